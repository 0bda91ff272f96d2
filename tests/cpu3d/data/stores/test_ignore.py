"""A label code of voxels that are not to be learnt, from the files to the samples."""

import numpy as np
import pytest

from cpu3d.data.datasets.names import is_ignored
from cpu3d.data.source import PatchSampling, patch_at, patch_dataset, volume_dataset
from cpu3d.data.store import open_store
from cpu3d.data.stores.prepare import StoreSettings, prepare
from cpu3d.data.stores.upkeep import append
from cpu3d.errors import InputError
from models.native.shared import IGNORED
from tests.cpu3d.data.made_datasets import (
    ALL,
    SHAPE,
    decathlon,
    tiny_image,
    tiny_label,
    write_nifti,
)

LABELS = {"0": "background", "1": "tumour", "200": "ignore"}


def sparse_label(*, annotated=slice(None, None, 2), code=200):
    """Every second slice is annotated, the others are not, also outside of the brain."""
    label = np.full(SHAPE, code, np.uint8)
    label[..., annotated] = tiny_label(1)[..., [1]]
    return label


def one_channel(folder, labels=LABELS, names=("c_0", "c_1"), voxels=None):
    """A data set of 3D images whose labels are `voxels`."""
    entries = [{kind: f"{kind}sTr/{name}.nii.gz" for kind in ("image", "label")} for name in names]
    decathlon(folder, 0, modality={"0": "MRI"}, labels=labels, training=entries)
    for seed, name in enumerate(names):
        write_nifti(folder / f"imagesTr/{name}.nii.gz", tiny_image(seed))
        label = sparse_label() if voxels is None else voxels
        write_nifti(folder / f"labelsTr/{name}.nii.gz", label)
    return folder


@pytest.fixture
def store(tmp_path):
    """Two cases with every second slice annotated."""
    prepare(one_channel(tmp_path / "data"), tmp_path / "store", **ALL)
    return open_store(tmp_path / "store")


def test_a_label_whose_name_says_so_is_in_no_region_and_keeps_its_name(capsys, store):
    manifest = store.manifest
    assert (manifest.ignore, manifest.labels[200]) == (200, "ignore")
    assert manifest.regions == {"tumour": (1,)}
    assert "200 ignore -> not annotated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("labels", "ignore", "got"),
    [
        (LABELS, 9, "be one of its codes 1, 200, got 9"),
        (LABELS, 1, "be the one that its names show, 200 ignore, got 1"),
        ({"0": "background", "1": "tumour"}, 1, "leave a region to be learnt, got 1 alone"),
        ({**LABELS, "201": "void"}, None, "at most one to be ignored, got 200 ignore, 201 void"),
        ({"background": 0, "all": [1, 2], "core": 2}, 2, "in no region, got 2 of all, core"),
    ],
)
def test_a_code_that_cannot_be_ignored_is_refused(tmp_path, labels, ignore, got):
    data = one_channel(tmp_path / "data", labels)
    with pytest.raises(InputError, match=got):
        prepare(data, tmp_path / "store", **ALL, ignore=ignore)
    assert not (tmp_path / "store").exists()


def test_a_case_without_an_annotated_voxel_where_its_image_is_is_refused(tmp_path):
    label = sparse_label(annotated=slice(0, 1))  # a slice of air
    label[label == 1] = 0
    data = one_channel(tmp_path / "data", voxels=label)
    with pytest.raises(InputError, match=r"c_0\.nii\.gz must have annotated voxels, got 200"):
        prepare(data, tmp_path / "store", **ALL)


def test_the_box_is_that_of_image_and_annotated_voxels_and_around_it_is_background(store):
    box = store.case("c_0").box.slices(SHAPE)
    assert box == (slice(1, 5), slice(1, 4), slice(0, 3))  # slice 0 holds a voxel of the tumour
    expected = np.zeros(SHAPE, np.uint8)
    expected[box] = sparse_label()[box]
    np.testing.assert_array_equal(store.label("c_0"), expected)
    assert store.case("c_0").label_voxels[200] == 4 * 3


def test_where_0_is_a_value_what_is_not_annotated_stays_so_beside_a_stored_box(tmp_path):
    settings = StoreSettings(crop=True, normalise=("MRI=zscore",))
    prepare(one_channel(tmp_path / "data"), tmp_path / "store", **ALL, settings=settings)
    np.testing.assert_array_equal(open_store(tmp_path / "store").label("c_0"), sparse_label())


def test_more_cases_come_with_the_same_code_ignored(tmp_path):
    labels = {"0": "background", "1": "tumour", "2": "rest", "200": "oedema"}
    store = tmp_path / "store"
    prepare(one_channel(tmp_path / "data", labels), store, **ALL, ignore=200)
    more = one_channel(tmp_path / "more", labels, names=("d_0",))
    write_nifti(more / "imagesTr/d_0.nii.gz", tiny_image(7))
    manifest = append(store, more, workers=1).manifest
    assert (manifest.ignore, len(manifest.cases)) == (200, 3)
    assert "200" not in str(manifest.regions)


@pytest.mark.parametrize("finished", [False, True])
def test_a_store_is_continued_with_the_code_that_it_was_begun_with(tmp_path, finished):
    labels = {"0": "background", "1": "tumour", "2": "rest", "3": "more"}
    data = one_channel(tmp_path / "data", labels, voxels=tiny_label(1, 2, 3))
    prepare(data, tmp_path / "store", **ALL, ignore=2)
    if not finished:
        (tmp_path / "store/manifest.json").unlink()
    with pytest.raises(InputError, match=r"ignore of store .* must be 2.* got None"):
        prepare(data, tmp_path / "store", **ALL)
    prepare(data, tmp_path / "store", **ALL, ignore=2)


# --- Samples ---


def test_a_volume_s_target_says_what_is_ignored_and_padding_is_not(store):
    targets = [target for _, target in volume_dataset(store, extent="full", grid=(8, 8, 8))]
    expected = np.zeros((8, 8, 8), np.uint8)
    expected[2:6, 2:5, 3] = IGNORED  # the brain's box, in the one slice of it that has no labels
    expected[2, 3, [2, 4]] = 1
    np.testing.assert_array_equal(targets, np.stack([expected[None, ..., None]] * 2))


def test_patches_are_drawn_around_voxels_of_regions_alone(store):
    sampling = PatchSampling((1, 1, 1), "foreground", foreground=1, codes=((1,),))
    for position in range(20):
        start = patch_at(position, sampling, store.cases("train")).region.start
        assert store.label("c_0")[start] == 1


@pytest.mark.parametrize(("side", "code", "least"), [(6, 1, 20), (16, 0, 12)])
def test_a_random_patch_without_an_annotated_voxel_is_drawn_again(tmp_path, side, code, least):
    """One corner of a volume is annotated, which 0.6 or 11 % of random patches meet. With a tumour
    in it the last attempt does."""
    label = np.full((40, 40, 40), 200, np.uint8)
    label[:side, :side, :side] = 0
    label[2, 2, 2] = code
    data = one_channel(tmp_path / "data", names=("c_0",), voxels=label)
    image = np.random.default_rng(0).integers(1, 99, label.shape).astype(np.int16)
    write_nifti(data / "imagesTr/c_0.nii.gz", image)
    prepare(data, tmp_path / "store", **ALL)
    store = open_store(tmp_path / "store")
    options = {"sampling": "random", "seed": 3}
    patches = list(patch_dataset(store, (8, 8, 8), **options, stop=20))
    annotated = [(target.numpy() != IGNORED).any() for _, target in patches]
    assert sum(annotated) >= least
    again = patch_dataset(store, (8, 8, 8), **options, start=13, stop=20, threads=2)
    for own, other in zip(again, patches[13:]):
        for ours, theirs in zip(own, other):
            np.testing.assert_array_equal(ours, theirs)


IGNORED_NAMES = """Ignore label|void|unlabelled|Don't care|unknown|not annotated|void / ignore
ignore_index|excluded|do not use|background (ignore)|unannotated voxels|undefined|unspecified
don\u2019t care|non labeled|not used|no annotation|no label|value to be ignored|exclude mask"""


def test_a_label_is_ignored_by_its_name():
    assert all(map(is_ignored, IGNORED_NAMES.replace("\n", "|").split("|")))
    assert not any(map(is_ignored, ("tumour", "unknown tumour", "avoid", "background")))

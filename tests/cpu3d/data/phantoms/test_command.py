import json

import nibabel
import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.data.datasets.layouts import read_dataset
from cpu3d.data.normalise import Kind
from cpu3d.data.phantoms import command as phantom_module
from cpu3d.data.phantoms.command import write_phantom
from cpu3d.data.phantoms.ct import ct_case
from cpu3d.data.phantoms.head import CLEARANCE, blind_patch, phantom_case
from cpu3d.data.stores.prepare import prepare
from cpu3d.errors import InputError

SMALL = (40, 48, 36)


def along(axis, mask):
    """Places along an axis where a mask has a voxel."""
    return np.flatnonzero(mask.any(axis=tuple({0, 1, 2} - {axis})))


def test_what_is_drawn_stays_what_it_was():
    """The numbers of version 1 as it was first written: whoever changes them makes a version 2."""
    image, label = phantom_case(SMALL, seed=5, index=0)
    assert (image.dtype, label.dtype) == (np.int16, np.uint8)
    assert all(np.array_equal(image[..., index] != 0, image[..., 0] != 0) for index in range(4))
    assert not label[image[..., 0] == 0].any()
    assert np.bincount(label.ravel()).tolist() == [68193, 732, 64, 131]
    assert np.allclose(
        image[image[..., 0] > 0].mean(axis=0), [235.441, 444.287, 284.083, 421.204], atol=0.01
    )


def test_it_is_a_decathlon_data_set_whatever_the_workers(tmp_path):
    write_phantom(tmp_path / "one", cases=3, shape=SMALL, seed=4, workers=1)
    write_phantom(tmp_path / "two", cases=3, shape=SMALL, seed=4, workers=2)
    files = sorted(
        path.relative_to(tmp_path / "one")
        for path in (tmp_path / "one").rglob("*")
        if path.is_file()
    )
    assert len(files) == 3 + 3 + 2
    assert all(
        (tmp_path / "one" / path).read_bytes() == (tmp_path / "two" / path).read_bytes()
        for path in files
    )
    dataset = read_dataset(tmp_path / "one")
    assert dataset.labels == {
        0: "background",
        1: "edema",
        2: "non-enhancing tumor",
        3: "enhancing tumour",
    }
    assert (dataset.channels, len(dataset.cases), dataset.problems) == (
        ("FLAIR", "T1w", "t1gd", "T2w"),
        3,
        {},
    )
    image, label = phantom_case(SMALL, seed=4, index=1)
    assert np.array_equal(np.asarray(nibabel.load(dataset.cases[1].images[0]).dataobj), image)
    assert np.array_equal(np.asarray(nibabel.load(dataset.cases[1].label).dataobj), label)


@pytest.mark.parametrize("kind", ["mr", "ct"])
def test_of_slices_that_are_annotated_now_and_then_the_others_are_to_be_ignored(tmp_path, kind):
    options = {"cases": 1, "shape": SMALL, "workers": 1, "kind": kind}
    whole = read_dataset(write_phantom(tmp_path / "whole", **options))
    sparse = read_dataset(write_phantom(tmp_path / "sparse", **options, annotate_every=10))
    code = max(sparse.labels)
    assert (sparse.ignore, sparse.labels) == (code, {**whole.labels, code: "ignore"})
    read = lambda files: np.asarray(nibabel.load(files.label).dataobj)
    expected = read(whole.cases[0])
    made = read(sparse.cases[0])
    is_annotated = np.arange(SMALL[2]) % 10 == 0
    np.testing.assert_array_equal(made[..., is_annotated], expected[..., is_annotated])
    assert set(np.unique(made[..., ~is_annotated])) == {code}


def test_bad_arguments_are_named_together_and_too_little_memory_is_one(tmp_path, monkeypatch):
    with pytest.raises(InputError) as error:
        write_phantom(tmp_path / "p", cases=0, shape=(0, 64, -1), seed=-1)
    assert [problem.split()[0] for problem in error.value.problems] == [
        "--cases",
        "--shape",
        "--seed",
    ]
    assert not (tmp_path / "p").exists()
    monkeypatch.setattr(phantom_module, "phantom_case", lambda *_: np.empty(1 << 62, np.uint8))
    with pytest.raises(InputError, match="--shape must fit"):
        write_phantom(tmp_path / "p", cases=1, shape=SMALL, workers=1)


def test_nothing_within_a_patch_of_a_lesion_tells_whether_it_is_the_only_one():
    shape = (64, 80, 56)
    for index in range(3):  # of the same random numbers, with the rule and without
        (image, label), (other, other_label) = (
            phantom_case(shape, 1, index, "count", holds=alone) for alone in (True, False)
        )
        length = np.ptp(along(1, image[..., 0] > 0)) + 1
        differ = along(1, (image != other).any(axis=-1))
        core = along(1, label > 1)
        gap = max(differ.min() - core.max(), core.min() - differ.max())
        assert gap > CLEARANCE * length
        assert gap >= blind_patch(shape), "what a patch must span to hold both"
        beside = np.ones(shape, bool)
        beside[:, differ.min() : differ.max() + 1] = False
        # There the lesion is the same voxel by voxel, but for what its rim is called.
        pairs = set(zip(label[beside].tolist(), other_label[beside].tolist()))
        assert pairs == {(0, 0), (1, 1), (2, 2), (3, 3), (3, 2)}


def test_a_data_set_states_its_rule_and_keeps_to_it(tmp_path, capsys):
    line = [
        "phantom",
        "--out",
        str(tmp_path / "p"),
        "--cases",
        "2",
        "--shape",
        *map(str, SMALL),
        "--workers",
        "1",
    ]
    assert main([*line, "--context", "count"]) == 0
    description = json.loads((tmp_path / "p/dataset.json").read_text())["description"]
    assert (
        "called enhancing tumour where the lesion is the only one, else non-enhancing tumor"
        in description
    )
    assert main([*line, "--context", "none"]) == 2
    assert "context of phantom folder" in capsys.readouterr().err
    assert main([*line, "--context", "count", "--kind", "ct"]) == 2
    assert "--kind must be mr with --context" in capsys.readouterr().err


# --- CT ---


@pytest.mark.parametrize("shape", [(80, 72, 60), (24, 24, 24)])
@pytest.mark.parametrize("index", range(4))
def test_a_ct_has_a_liver_with_lesions_among_tissues_of_the_same_values(shape, index):
    image, label = ct_case(shape, seed=3, index=index)
    assert (image.dtype, image.shape, label.dtype) == (np.int16, shape, np.uint8)
    assert all(np.count_nonzero(label == code) >= 8 for code in (1, 2))
    assert -1024 <= image.min() < -950
    assert np.median(image[label == 1]) - np.median(image[label == 2]) > 20
    outside = image[:2, :2]
    assert np.median(outside) == pytest.approx(-1000, abs=3)
    assert outside.std() == pytest.approx(10, abs=3)
    assert np.count_nonzero(np.abs(image) < 5) > 20, "water, at 0 HU"
    again = ct_case(shape, seed=3, index=index)
    assert np.array_equal(image, again[0])


def test_a_ct_is_prepared_in_the_window_of_its_labels(tmp_path):
    data = write_phantom(tmp_path / "data", cases=3, shape=(24, 24, 24), workers=1, kind="ct")
    manifest = prepare(data, tmp_path / "store", fractions=(1, 1, 1), workers=1)
    (kind,) = manifest.normalisation
    assert kind.kind is Kind.CT
    assert 0 < kind.low < kind.mean < kind.high < 200
    assert manifest.regions == {"liver": (1,), "lesion": (2,)}

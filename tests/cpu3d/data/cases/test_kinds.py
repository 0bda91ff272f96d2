"""How the channels of a data set are normalised, from its files on."""

import json
import re

import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.data.augment import AUGMENTS, NO_AUGMENT
from cpu3d.data.cases.case import load_case
from cpu3d.data.cases.kinds import is_ct
from cpu3d.data.cases.notes import case_notes
from cpu3d.data.datasets.layouts import CaseFiles
from cpu3d.data.normalise import Kind, Normalisation, in_units, normalise
from cpu3d.data.region import Region, bounding_box, centred, whole
from cpu3d.data.source import volume_dataset
from cpu3d.data.store import open_store
from cpu3d.data.stores.convert import StoreSettings
from cpu3d.data.stores.prepare import prepare
from cpu3d.data.stores.store_decisions import decisions_of
from cpu3d.errors import InputError
from tests.cpu3d.data.made_datasets import dataset_json, decathlon, write_nifti

LABELS = {"0": "background", "1": "tumour"}
SHAPE = (14, 12, 10)
EVERY = AUGMENTS["nnunet"]


KINDS_OF_CT = "ct cta ctp cbct cect ncct nect ldct hrct mdct msct dect ctac petct hu hounsfield"


def test_a_channel_is_ct_by_its_name():
    ct = ["Computed Tomography", "portalCT", "PET/CT", "computed axial tomography"]
    ct += KINDS_OF_CT.split()
    assert list(filter(is_ct, [*ct, "CT1", "T1ct", "FLAIR", "direct"])) == ct


def ball(radius):
    centre = (np.array(SHAPE) - 1) / 2
    return sum(((i - c) / (c + 0.5)) ** 2 for i, c in zip(np.indices(SHAPE), centre)) < radius**2


def in_hounsfield_units(seed):
    """A body in air, with noise, and in it an organ of water."""
    noise = np.random.default_rng(seed).normal(0, 3, SHAPE)
    return np.rint(np.select([ball(0.4), ball(0.8)], [0, 40], -1000) + noise).astype(np.int16)


def with_skull(seed):
    """Noise around a head, as whole numbers above 0."""
    rng = np.random.default_rng(seed)
    return np.rint(np.where(ball(0.8), 300, 20) + 5 * rng.random(SHAPE)).astype(np.int16)


def stripped(seed):
    """Zeros around a brain."""
    return np.where(ball(0.7), 2 * with_skull(seed) + 1, 0).astype(np.int16)


def beside(value, planes):
    """Heads in volumes whose first planes are of one value."""

    def volume(seed):
        made = with_skull(seed)
        made[:planes] = value
        return made

    return volume


def data_set(folder, *volumes, names=("MRI",), seeds=range(4)):
    """A data set whose case n has the channels `volumes[i](n)`."""
    entries = []
    for seed in seeds:
        channels = np.stack([volume(seed) for volume in volumes], -1)
        image = f"imagesTr/c_{seed}.nii.gz"
        write_nifti(folder / image, channels if len(volumes) > 1 else channels[..., 0])
        label = f"labelsTr/c_{seed}.nii.gz"
        write_nifti(folder / label, ball(0.4).astype(np.uint8))
        entries.append({"image": image, "label": label})
    modality = {str(index): name for index, name in enumerate(names)}
    return decathlon(folder, 0, modality=modality, labels=LABELS, training=entries)


TWO_TRAIN = {"fractions": (2, 1, 1), "workers": 1}
ALL_TRAIN = {"fractions": (1, 0, 0), "workers": 1}


def prepared(tmp_path, *volumes, normalise=(), crop=False, name="store", **more):
    data = data_set(tmp_path / f"{name}-data", *volumes, **more)
    settings = StoreSettings(normalise=normalise, crop=crop)
    prepare(data, tmp_path / name, **TWO_TRAIN, settings=settings)
    return open_store(tmp_path / name)


@pytest.fixture
def ct_data(tmp_path):
    return data_set(tmp_path / "data", in_hounsfield_units, names=("CT",))


def relabelled(data, label, *case_ids):
    """Give cases of a data set this label, in which 9 is not annotated."""
    with dataset_json(data) as about:
        about["labels"]["9"] = "ignore"
    for case_id in case_ids:
        write_nifti(data / f"labelsTr/{case_id}.nii.gz", label)


def loaded(tmp_path, volume, normalisation, **how):
    """A case of two equal channels without a label, as for a prediction."""
    path = write_nifti(tmp_path / "x.nii.gz", volume)
    files = CaseFiles("x", "x", (path, path), None)
    return load_case(files, channels=("a", "b"), normalisation=[normalisation] * 2, **how)


def kinds(store):
    return [each.kind.value for each in store.manifest.normalisations]


@pytest.mark.parametrize(
    ("volume", "name", "kind", "why"),
    [
        # 0 counts where its six neighbours are 0: in 4 of 14 planes, and in 3.
        (beside(0, 5), "MRI", "zscore-foreground", "0 in 36% of the voxels, .* from 25% on"),
        (beside(0, 4), "MRI", "zscore", "0 around 21% of the voxels, .* from 25% on"),
        (with_skull, "noNorm", "none", "by its name"),
        (with_skull, "rescale_to_0_1", "rescale", "by its name"),
        (in_hounsfield_units, "CT", "ct", "by its name"),
        (beside(-1090, 1), "MRI", "ct", "7% of the voxels are about -1000, .* from 5% on"),
        (beside(-910, 1), "MRI", "ct", "from 5% on"),
    ],
)
def test_a_kind_is_by_name_or_by_voxels_and_the_summary_says_why(tmp_path, volume, name, kind, why):
    store = prepared(tmp_path, volume, names=(name,))
    assert kinds(store) == [kind]
    decided = {line.name: line for line in decisions_of(store)}[f"channel {name}"]
    assert kind in decided.value
    assert re.search(why, decided.why)


def test_kinds_are_of_channels_and_a_user_may_choose_them(tmp_path):
    volumes = (in_hounsfield_units, stripped, with_skull)
    names = ("CT", "T1", "T2")
    store = prepared(tmp_path, *volumes, names=names)
    assert kinds(store) == ["ct", "zscore-foreground", "zscore"]
    chosen = ("ct=zscore", "T2w=rescale")
    other = prepared(tmp_path, *volumes, names=names, normalise=chosen, name="other")
    assert kinds(other) == ["zscore", "zscore-foreground", "rescale"]


def test_cases_of_the_test_split_decide_neither_kinds_nor_windows(tmp_path):
    def water_or_bone(seed):
        return in_hounsfield_units(seed) + np.int16(1000 * (seed > 1))

    def head_or_brain(seed):
        return beside(0, 12 * (seed > 1))(seed)

    data = data_set(tmp_path / "data", water_or_bone, head_or_brain, names=("CT", "MRI"))
    folds = [{"train": ["c_0"], "val": ["c_1"]}, {"train": ["c_1"], "val": ["c_0"]}]
    (tmp_path / "folds.json").write_text(json.dumps(folds))
    manifest = prepare(data, tmp_path / "store", workers=1, splits=tmp_path / "folds.json")
    ct, mri = manifest.normalisation
    assert ct.high < 100
    assert mri.kind is Kind.ZSCORE
    tested = prepare(data, tmp_path / "tested", fractions=(0, 0, 1), workers=1).normalisation
    assert tested[0].high > 1000  # without training cases all decide
    assert tested[1].kind is Kind.FOREGROUND
    assert "0 around" in tested[1].why


def test_kinds_are_of_cases_spread_over_the_data_set(tmp_path, monkeypatch):
    def brain_or_head(seed):
        return beside(0, 5 * (seed < 2))(seed)

    monkeypatch.setattr("cpu3d.data.cases.kinds.EXAMINED", 2)
    data = data_set(tmp_path / "data", brain_or_head)
    (mri,) = prepare(data, tmp_path / "store", **ALL_TRAIN).normalisation
    assert mri.kind is Kind.ZSCORE


def test_scores_that_a_user_chose_for_a_ct_are_given_and_others_are_refused(tmp_path):
    store = prepared(tmp_path, in_hounsfield_units, normalise=("MRI=zscore",))
    assert kinds(store) == ["zscore"]
    with pytest.raises(InputError, match="must not be CT, got 5% of its voxels"):
        prepared(tmp_path, in_hounsfield_units, normalise=("MRI=zscore-foreground",), name="other")
    words = ("CT=zscore-foreground",)
    named = prepared(tmp_path, in_hounsfield_units, names=("CT",), normalise=words, name="named")
    assert kinds(named) == ["zscore-foreground"]


def test_a_ct_without_labelled_voxels_is_refused_unless_another_kind_is_chosen(tmp_path, ct_data):
    relabelled(ct_data, np.zeros(SHAPE, np.uint8), "c_0", "c_1", "c_2", "c_3")
    with pytest.raises(InputError, match=r"window of CT, got none; .* --normalise CT=zscore"):
        prepare(ct_data, tmp_path / "store", **ALL_TRAIN)
    chosen = StoreSettings(normalise=("CT=zscore",))
    manifest = prepare(ct_data, tmp_path / "other", **ALL_TRAIN, settings=chosen)
    assert manifest.normalisation[0].kind is Kind.ZSCORE


@pytest.mark.parametrize("words", [("CT=ct2",), ("T1=zscore",), ("CT=ct", "ct=zscore")])
def test_a_normalisation_that_is_typed_wrong_leaves_no_store_behind(tmp_path, ct_data, words):
    settings = StoreSettings(normalise=words)
    with pytest.raises(InputError, match=f"--normalise must .*got {words[-1]}"):
        prepare(ct_data, tmp_path / "store", **ALL_TRAIN, settings=settings)
    assert not (tmp_path / "store").exists()


# --- 0 HU is a value like others ---


def samples(store, augment=NO_AUGMENT):
    """All samples of the training cases, in voxels around the whole grid."""
    stop = 6 * len(store.cases("train"))
    how = {"extent": "full", "grid": (16, 16, 16), "seed": 3, "augment": augment, "stop": stop}
    return [image.numpy()[0] for image, _ in volume_dataset(store, **how)]


@pytest.mark.parametrize("augment", [NO_AUGMENT, EVERY], ids=["plain", "every change"])
@pytest.mark.parametrize(("dtype", "added"), [("int16", 1024), ("float32", 0), ("uint16", 32000)])
def test_hu_with_numbers_added_and_as_float32_give_the_same_samples(
    tmp_path, augment, dtype, added
):
    def other(seed):
        return (in_hounsfield_units(seed).astype(np.int64) + added).astype(dtype)

    expected = samples(prepared(tmp_path, in_hounsfield_units, names=("CT",)), augment)
    made = samples(prepared(tmp_path, other, names=("CT",), name="other"), augment)
    np.testing.assert_array_equal(made, expected)


def test_a_fraction_of_hu_comes_back_to_within_the_stated_error(tmp_path):
    def fractions(seed):
        return (in_hounsfield_units(seed) / 3).astype(np.float32)

    store = prepared(tmp_path, fractions, names=("CT",))
    window = store.manifest.normalisation[0]
    for record in store.manifest.cases:
        back = in_units(store.image(record.case_id), record.units)[..., 0]
        largest = np.abs(back - fractions(int(record.case_id[-1]))).max()
        assert 0.9 < largest / window.std / record.max_abs_error < 1.02


# --- What surrounds a volume ---


def test_boxes_of_ct_are_around_what_is_shown_and_learnt(tmp_path, ct_data):
    sparse = np.full(SHAPE, 9, np.uint8)
    sparse[..., ::3] = ball(0.4)[..., ::3]
    relabelled(ct_data, sparse, "c_3")
    relabelled(ct_data, np.zeros(SHAPE, np.uint8), "c_1", "c_2")
    air = np.random.default_rng(0).integers(-1024, -990, SHAPE).astype(np.int16)
    write_nifti(ct_data / "imagesTr/c_1.nii.gz", air)
    prepare(ct_data, tmp_path / "store", **ALL_TRAIN)
    store = open_store(tmp_path / "store")
    assert store.case("c_1").box == whole(SHAPE)  # nothing is there
    low = store.manifest.normalisation[0].low
    for case_id in ("c_0", "c_2", "c_3"):
        shown = np.asarray(store.image(case_id))[..., 0] > low
        learnt = np.asarray(store.label(case_id)) == 1
        assert store.case(case_id).box == bounding_box(shown | learnt) != whole(SHAPE)
    assert (np.asarray(store.label("c_3")) == 9).any()


def test_a_ct_that_is_annotated_in_the_air_alone_is_refused(tmp_path, ct_data):
    label = np.full(SHAPE, 9, np.uint8)
    label[:1] = 0
    relabelled(ct_data, label, "c_2")
    with pytest.raises(InputError, match=r"c_2.*annotated.*in all of the content box"):
        prepare(ct_data, tmp_path / "store", **ALL_TRAIN)


@pytest.mark.parametrize("kind", ["zscore", "rescale"])
def test_a_box_is_around_what_differs_from_the_border_and_its_crop_loses_nothing(tmp_path, kind):
    def on_minus_one(seed):
        return np.where(ball(0.6), with_skull(seed), -1).astype(np.int16)

    stores = [
        prepared(
            tmp_path, on_minus_one, normalise=(f"MRI={kind}",), crop=crop, name=f"store-{crop}"
        )
        for crop in (False, True)
    ]
    record = stores[0].cases("train")[0]
    assert record.around == (-1.0,)
    assert record.box != whole(SHAPE)
    assert case_notes(record, ("MRI",)) == []
    for augment in (NO_AUGMENT, EVERY):
        np.testing.assert_array_equal(*(samples(store, augment) for store in stores))
    image, cropped = (np.asarray(store.image(record.case_id)) for store in stores)
    np.testing.assert_array_equal(cropped, image)
    made = normalise(
        image, record, Region((-1, -1, -1), (16, 14, 12)), stores[0].manifest.normalisation
    )
    assert made[0, 0, 0] == made[1, 1, 1]  # padding, and the volume's own corner


@pytest.mark.parametrize("kind", [kind.value for kind in Kind])
@pytest.mark.parametrize("divisor", [1, 7])
def test_a_sample_is_what_is_predicted_on(tmp_path, kind, divisor):
    def volume(seed):
        made = np.where(ball(0.6), with_skull(seed), 0) / divisor
        return made.astype(np.int16 if divisor == 1 else np.float32)

    store = prepared(tmp_path, volume, normalise=(f"MRI={kind}",))
    region = centred(whole(SHAPE), (16, 16, 16), SHAPE)
    expected = set()
    for record in store.cases("train"):
        image = np.asarray(store.image(record.case_id))
        made = normalise(image, record, region, store.manifest.normalisation)
        expected.add(made.tobytes())
    assert {sample.tobytes() for sample in samples(store)} == expected


def test_statistics_are_over_the_voxels_that_the_kind_looks_at(tmp_path):
    store = prepared(tmp_path, stripped, normalise=("MRI=zscore",))
    record = store.manifest.cases[0]
    image = np.asarray(store.image(record.case_id)).astype(np.float64)
    made = (record.channel_mean, record.channel_std, record.channel_min, record.channel_max)
    expected = (image.mean(), image.std(), image.min(), image.max())
    assert np.ravel(made) == pytest.approx(expected)
    assert record.channel_voxels == (image.size,)


@pytest.mark.parametrize("is_shell", [False, True])
@pytest.mark.parametrize(
    ("volume", "kind", "filled"),
    [
        (stripped(0), Kind.FOREGROUND, 0),
        (np.where(np.indices(SHAPE)[2] < 8, 40, -1000), Kind.CT, -1000),
    ],
)
def test_nan_becomes_what_surrounds_the_volume(tmp_path, volume, kind, filled, is_shell):
    is_nan = np.zeros(SHAPE, bool)
    is_nan[7, 6, 5] = True
    if is_shell:
        is_nan |= ~ball(0.95)
        is_nan[[0, -1]] = is_nan[:, [0, -1]] = is_nan[..., [0, -1]] = True
    volume = np.where(is_nan, np.float32(np.nan), volume)
    case = loaded(tmp_path, volume, Normalisation(kind), zero_nan=True)
    assert (case.image[is_nan] == filled).all()
    assert case.record.zeroed_voxels == 2 * is_nan.sum()


def test_air_is_around_a_body_at_the_border(tmp_path):
    """Tissue is most of the border, and all of the air is on one side."""
    body = np.where(ball(0.4), 60, 40).astype(np.int16)
    body[10:] = -1000
    record = loaded(tmp_path, body, Normalisation(Kind.CT, -1000, 100, 50, 20)).record
    assert record.around == (-1000.0, -1000.0)
    assert record.box == Region((0, 0, 0), (10, *SHAPE[1:]))


# --- Stores that grow, and continue ---


@pytest.mark.parametrize("added", [0, 1024])
def test_appended_cases_are_normalised_as_the_store_and_another_unit_is_named(
    tmp_path, capsys, added
):
    def in_unit(seed):
        return (in_hounsfield_units(seed) + added).astype(np.int16)

    store = prepared(tmp_path, in_hounsfield_units, names=("CT",), crop=True)
    more = data_set(tmp_path / "more", in_unit, names=("CT",), seeds=(8, 9))
    words = ["store", "append", "--store", str(store.folder), "--dataset", str(more)]
    assert main(words) == 0
    assert ("labelled values of CT about" in capsys.readouterr().out) == bool(added)
    manifest = open_store(store.folder).manifest
    assert manifest.normalisation == store.manifest.normalisation
    assert len(manifest.cases) == 6
    for record in manifest.cases[4:]:  # the window is known by now
        assert record.stored == record.box
        assert (record.box == whole(SHAPE)) == bool(added)


def test_an_unfinished_store_goes_on_with_the_kinds_it_was_begun_with(tmp_path):
    """Its training cases, which would decide others, are exchanged for brains."""
    store = prepared(tmp_path, with_skull).folder
    (store / "manifest.json").unlink()
    again = prepare(data_set(tmp_path / "store-data", stripped), store, **TWO_TRAIN)
    assert again.normalisation[0].kind is Kind.ZSCORE


def test_one_case_of_ct_among_others_is_a_bad_case(tmp_path):
    def one(seed):
        return in_hounsfield_units(seed) if seed == 0 else stripped(seed)

    data = data_set(tmp_path / "data", one)
    manifest = prepare(data, tmp_path / "store", **ALL_TRAIN, skip_bad=True)
    assert [case.case_id for case in manifest.cases] == ["c_1", "c_2", "c_3"]
    assert manifest.normalisation == ()  # all over the foreground, as in most cases

"""How the channels of a data set are normalised, from its files on."""

import json

import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.data.augment import NO_AUGMENT, AugmentConfig
from cpu3d.data.cases.case import load_case
from cpu3d.data.cases.kinds import is_ct
from cpu3d.data.cases.notes import case_notes
from cpu3d.data.datasets.layouts import CaseFiles
from cpu3d.data.files.loader import Loader, labelled, open_reading
from cpu3d.data.manifest import case_from_json
from cpu3d.data.native.spec import SampleSpec
from cpu3d.data.normalise import Kind, Normalisation, normalise
from cpu3d.data.region import Region, bounding_box, centred, whole
from cpu3d.data.sampling import ALL, PatchSampling
from cpu3d.data.store import open_store
from cpu3d.data.stores.convert import StoreSettings
from cpu3d.data.stores.folder import SOURCE
from cpu3d.data.stores.prepare import prepare
from cpu3d.data.stores.store_decisions import decisions_of
from cpu3d.data.stores.upkeep import append, verify
from cpu3d.errors import InputError
from tests.cpu3d.data.made_datasets import dataset_json, decathlon, write_nifti

LABELS = {"0": "background", "1": "tumour"}
SHAPE = (14, 12, 10)
WATER, FAT = 0, 1  # seeds of a split whose training case has an even and an odd number
EVERY = AugmentConfig(
    rotation_deg=30, scaling=0.4, contrast=0.25, gamma=0.5, noise=0.1, blur=1.0, low_resolution=0.5
)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        *[(name, True) for name in ("CT", "ct", "Computed Tomography", "CT_portal", "portalCT")],
        *[(name, True) for name in ("PET/CT", "ct (HU)", "DECT")],
        *[(name, False) for name in ("CT1", "T1ct", "FLAIR", "contrast", "MRI", "direct")],
    ],
)
def test_a_channel_is_ct_by_its_name(name, answer):
    assert is_ct(name) is answer


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


def data_set(folder, *volumes, names=("MRI",), cases=4):
    """A data set whose case n has the channels `volumes[i](n)`."""
    entries = []
    for seed in range(cases):
        channels = np.stack([volume(seed) for volume in volumes], -1)
        image = f"imagesTr/c_{seed}.nii.gz"
        write_nifti(folder / image, channels if len(volumes) > 1 else channels[..., 0])
        label = f"labelsTr/c_{seed}.nii.gz"
        write_nifti(folder / label, ball(0.4).astype(np.uint8))
        entries.append({"image": image, "label": label})
    modality = {str(index): name for index, name in enumerate(names)}
    return decathlon(folder, 0, modality=modality, labels=LABELS, training=entries)


def prepared(tmp_path, *volumes, normalise=(), name="store", **more):
    data = data_set(tmp_path / f"{name}-data", *volumes, **more)
    prepare(
        data,
        tmp_path / name,
        fractions=(2, 1, 1),
        workers=1,
        settings=StoreSettings(normalise=normalise),
    )
    return open_store(tmp_path / name)


def kinds(store):
    return [each.kind.value for each in store.manifest.normalisations]


@pytest.mark.parametrize(
    ("volume", "name", "kind", "why"),
    [
        (stripped, "MRI", "zscore-foreground", "from 25% on"),
        (with_skull, "MRI", "zscore", "from 25% on"),
        (with_skull, "noNorm", "none", "by its name"),
        (with_skull, "rescale_to_0_1", "rescale", "by its name"),
        (in_hounsfield_units, "CT", "ct", "by its name"),
        (in_hounsfield_units, "MRI", "ct", "from 5% on"),
    ],
)
def test_a_kind_is_by_name_or_by_voxels_and_the_summary_says_why(tmp_path, volume, name, kind, why):
    store = prepared(tmp_path, volume, names=(name,))
    assert kinds(store) == [kind]
    decided = {line.name: line for line in decisions_of(store)}[f"channel {name}"]
    assert kind in decided.value
    assert why in decided.why


def test_kinds_are_of_channels_and_a_user_may_choose_them(tmp_path):
    volumes = (in_hounsfield_units, stripped, with_skull)
    names = ("CT", "T1", "T2")
    store = prepared(tmp_path, *volumes, names=names)
    assert kinds(store) == ["ct", "zscore-foreground", "zscore"]
    other = prepared(
        tmp_path, *volumes, names=names, normalise=("ct=zscore", "T2w=rescale"), name="other"
    )
    assert kinds(other) == ["zscore", "zscore-foreground", "rescale"]
    assert other.manifest.split_hash != store.manifest.split_hash


def test_scores_that_a_user_chose_for_a_ct_are_given(tmp_path):
    store = prepared(tmp_path, in_hounsfield_units, names=("image",), normalise=("image=zscore",))
    assert kinds(store) == ["zscore"]
    more = data_set(tmp_path / "more", in_hounsfield_units, names=("image",), cases=5)
    assert append(tmp_path / "store", more, workers=1).new == ("c_4",)
    with pytest.raises(InputError, match="must not be CT"):
        prepared(
            tmp_path,
            in_hounsfield_units,
            names=("image",),
            normalise=("image=zscore-foreground",),
            name="other",
        )


@pytest.mark.parametrize(
    ("begun", "then", "is_good"),
    [
        ("MRI=rescale", "MRI=rescale", True),
        ("MRI=rescale", None, False),
        ("MRI=rescale", "MRI=zscore", False),
        (None, "MRI=zscore", False),
        (None, None, True),
    ],
)
def test_a_finished_store_keeps_its_kinds_without_its_source_json(tmp_path, begun, then, is_good):
    def words(kind):
        return (kind,) if kind else ()

    store = prepared(tmp_path, with_skull, normalise=words(begun))
    (store.folder / SOURCE).unlink()
    settings = StoreSettings(normalise=words(then))
    options = {"fractions": (2, 1, 1), "workers": 1, "settings": settings}
    if is_good:
        assert prepare(tmp_path / "store-data", store.folder, **options) == store.manifest
    else:
        with pytest.raises(InputError, match=r"normalise of store .* must be"):
            prepare(tmp_path / "store-data", store.folder, **options)


def test_a_ct_without_labelled_voxels_is_refused_unless_another_kind_is_chosen(tmp_path):
    data = data_set(tmp_path / "data", in_hounsfield_units, names=("CT",))
    for path in (data / "labelsTr").glob("*"):
        write_nifti(path, np.zeros(SHAPE, np.uint8))
    with pytest.raises(InputError, match="--normalise CT=zscore"):
        prepare(data, tmp_path / "store", fractions=(2, 1, 1), workers=1)
    chosen = StoreSettings(normalise=("CT=zscore",))
    manifest = prepare(data, tmp_path / "other", fractions=(2, 1, 1), workers=1, settings=chosen)
    assert manifest.normalisation[0].kind is Kind.ZSCORE


@pytest.mark.parametrize("word", ["CT=ct2", "T1=zscore", "CT"])
def test_a_normalisation_that_is_typed_wrong_leaves_no_store_behind(tmp_path, word):
    data = data_set(tmp_path / "data", in_hounsfield_units, names=("CT",))
    store = tmp_path / "store"
    options = {"fractions": (2, 1, 1), "workers": 1}
    with pytest.raises(InputError, match="--normalise must"):
        prepare(data, store, settings=StoreSettings(normalise=(word,)), **options)
    assert not store.exists()


# --- 0 HU is a value like others ---


def samples(store, augment=NO_AUGMENT):
    """All samples of the training cases, in voxels around the whole grid."""
    size = (16, 16, 16)
    records = labelled(store, "train")
    load = Loader(
        open_reading(store),
        records,
        PatchSampling(size, "centre", extent="full", seed=3),
        augment,
        SampleSpec(size, (0,), ((1,),)),
        share=ALL,
        mirrored=augment.mirrored_axes(()),
        normalisation=store.manifest.normalisation,
    )
    return [load(index)[0] for index in range(6 * len(records))]


@pytest.mark.parametrize("augment", [NO_AUGMENT, EVERY], ids=["plain", "every change"])
@pytest.mark.parametrize(("dtype", "added"), [("int16", 1024), ("float32", 0), ("uint16", 32000)])
def test_hu_with_numbers_added_and_as_float32_give_the_same_samples(
    tmp_path, augment, dtype, added
):
    def other(seed):
        return (in_hounsfield_units(seed).astype(np.int64) + added).astype(dtype)

    stores = (
        prepared(tmp_path, volume, names=("CT",), name=name)
        for volume, name in ((in_hounsfield_units, "hu"), (other, "other"))
    )
    expected, made = (samples(store, augment) for store in stores)
    np.testing.assert_array_equal(made, expected)


def test_a_fraction_of_hu_comes_back_to_within_the_stated_error(tmp_path):
    def fractions(seed):
        return (in_hounsfield_units(seed) / 3).astype(np.float32)

    store = prepared(tmp_path, fractions, names=("CT",))
    whole_numbers = prepared(tmp_path, in_hounsfield_units, names=("CT",), name="whole")
    for record in store.manifest.cases:
        ((step, offset),) = record.units
        source = fractions(int(record.case_id[-1]))
        back = np.asarray(store.image(record.case_id))[..., 0] * step + offset
        of_window = store.manifest.normalisation[0].std
        largest = np.abs(back - source).max()
        assert largest <= record.max_abs_error * of_window * 1.001
        assert largest > record.max_abs_error * of_window / 2
        alone = load_case(
            CaseFiles("x", "x", (tmp_path / f"store-data/imagesTr/{record.case_id}.nii.gz",), None),
            channels=("CT",),
            normalisation=store.manifest.normalisation,
        )
        assert alone.record.max_abs_error == record.max_abs_error
    made = zip(samples(store), samples(whole_numbers))
    for own, expected in made:
        np.testing.assert_allclose(own, expected, atol=0.01)


# --- What surrounds a volume ---


def without_labels(data, *case_ids):
    """Give cases of a data set labels of background alone."""
    for case_id in case_ids:
        write_nifti(data / f"labelsTr/{case_id}.nii.gz", np.zeros(SHAPE, np.uint8))


def test_a_healthy_ct_does_not_make_the_largest_box_the_whole_grid(tmp_path):
    data = data_set(tmp_path / "data", in_hounsfield_units, names=("CT",))
    prepare(data, tmp_path / "ill", fractions=(4, 0, 0), workers=1)
    without_labels(data, "c_2")
    prepare(data, tmp_path / "store", fractions=(4, 0, 0), workers=1)
    store = open_store(tmp_path / "store")
    record = store.case("c_2")
    assert set(record.label_voxels) == {0}
    image = np.asarray(store.image("c_2"))[..., 0]
    assert record.box == bounding_box(image > store.manifest.normalisation[0].low) != whole(SHAPE)
    assert store.manifest.largest_box == open_store(tmp_path / "ill").manifest.largest_box
    assert verify(tmp_path / "store", workers=1) == ()


def test_a_ct_in_which_nothing_is_there_has_its_whole_grid_as_box(tmp_path):
    data = data_set(tmp_path / "data", in_hounsfield_units, names=("CT",))
    without_labels(data, "c_1")
    air = np.random.default_rng(0).integers(-1024, -990, SHAPE).astype(np.int16)
    write_nifti(data / "imagesTr/c_1.nii.gz", air)
    prepare(data, tmp_path / "store", fractions=(4, 0, 0), workers=1)
    assert open_store(tmp_path / "store").case("c_1").box == whole(SHAPE)


def test_sparse_slices_do_not_make_the_box_of_a_ct_the_whole_grid(tmp_path):
    data = data_set(tmp_path / "data", in_hounsfield_units, names=("CT",))
    about = json.loads((data / "dataset.json").read_text())
    about["labels"]["9"] = "ignore"
    (data / "dataset.json").write_text(json.dumps(about))
    label = np.full(SHAPE, 9, np.uint8)
    label[..., ::3] = ball(0.4)[..., ::3]
    for path in (data / "labelsTr").iterdir():
        write_nifti(path, label)
    write_nifti(data / "labelsTr/c_3.nii.gz", np.where(label == 1, 0, label))
    prepare(data, tmp_path / "store", fractions=(4, 0, 0), workers=1)
    store = open_store(tmp_path / "store")
    low = store.manifest.normalisation[0].low
    for record in store.manifest.cases:
        stored = np.asarray(store.label(record.case_id))
        shown = np.asarray(store.image(record.case_id))[..., 0] > low
        assert record.box == bounding_box(shown | (stored == 1)) != whole(SHAPE)
        assert (stored == 9).any()
        assert record.stored == whole(SHAPE)


@pytest.mark.parametrize("place", ["c_0", "c_2"])
def test_a_ct_that_is_annotated_in_the_air_alone_is_a_bad_case(tmp_path, place):
    data = data_set(tmp_path / "data", in_hounsfield_units, names=("CT",), cases=5)
    about = json.loads((data / "dataset.json").read_text())
    about["labels"]["9"] = "ignore"
    (data / "dataset.json").write_text(json.dumps(about))
    label = np.full(SHAPE, 9, np.uint8)
    label[:1] = 0
    for path in (data / "labelsTr").iterdir():
        write_nifti(path, np.where(ball(0.4), 1, label) if place not in path.name else label)
    store = tmp_path / "store"
    options = {"fractions": (3, 1, 1), "workers": 1}
    with pytest.raises(InputError, match=rf"{place}.*annotated.*in all of the content box"):
        prepare(data, store, **options, skip_bad=True)
    about["training"] = [entry for entry in about["training"] if place not in entry["image"]]
    (data / "dataset.json").write_text(json.dumps(about))
    prepare(data, store, **options)
    assert verify(store, workers=1) == ()


@pytest.mark.parametrize("names", [("CT",), ("CT", "MRI")])
def test_the_box_of_a_ct_is_what_is_above_its_window_and_nothing_else_is_seen(tmp_path, names):
    def off_the_middle(seed):
        return np.roll(in_hounsfield_units(seed), (2, 0, -1), (0, 1, 2))

    def with_roll(seed):
        return np.roll(stripped(seed), (-1, 0, 0), (0, 1, 2))

    volumes = (off_the_middle, with_roll)[: len(names)]
    store = prepared(tmp_path, *volumes, names=names)
    kinds = store.manifest.normalisation
    data = tmp_path / "store-data"
    for record in store.manifest.cases:
        image = np.asarray(store.image(record.case_id))
        is_seen = (image[..., 0] > kinds[0].low) | (image[..., 1:] != 0).any(-1)
        label = np.asarray(store.label(record.case_id))
        assert record.box == bounding_box(is_seen | (label > 0)) != whole(SHAPE)
        own = tmp_path / f"store/cases/{record.case_id}.json"
        assert case_from_json(own.read_bytes()) == record
        # As an image that only `predict` sees.
        path = data / f"imagesTr/{record.case_id}.nii.gz"
        alone = load_case(
            CaseFiles("x", "x", (path,), None), channels=names, normalisation=kinds
        ).record
        assert alone.box == bounding_box(is_seen)
        made = normalise(image, record, whole(SHAPE), kinds)
        outside = np.ones(SHAPE, bool)
        outside[record.box.slices(SHAPE)] = False
        assert len(np.unique(made[outside], axis=0)) == 1


@pytest.mark.parametrize("kind", ["zscore", "none", "rescale"])
def test_a_box_is_around_what_differs_from_the_border_and_its_crop_loses_nothing(tmp_path, kind):
    def on_minus_one(seed):
        return np.where(ball(0.6), with_skull(seed), -1).astype(np.int16)

    stores = []
    for cropped in (False, True):
        folder = tmp_path / f"store-{cropped}"
        data = data_set(tmp_path / f"data-{cropped}", on_minus_one)
        settings = StoreSettings(crop=cropped, normalise=(f"MRI={kind}",))
        prepare(data, folder, fractions=(2, 1, 1), workers=1, settings=settings)
        stores.append(open_store(folder))
    record = stores[0].cases("train")[0]
    assert record.around == (-1.0,)
    assert record.box != whole(SHAPE)
    assert case_notes(record, ("MRI",)) == []
    for augment in (NO_AUGMENT, EVERY):
        own, cropped = (samples(store, augment) for store in stores)
        np.testing.assert_array_equal(own, cropped)
    image = np.asarray(stores[0].image(record.case_id))
    np.testing.assert_array_equal(stores[1].image(record.case_id), image)
    kinds = stores[0].manifest.normalisation
    made = normalise(image, record, Region((-1, -1, -1), (16, 14, 12)), kinds)
    assert made[0, 0, 0] == made[1, 1, 1]  # padding, and the volume's own corner


@pytest.mark.parametrize("kind", [kind.value for kind in Kind])
@pytest.mark.parametrize("divisor", [1, 7])
def test_a_sample_is_what_is_predicted_on(tmp_path, kind, divisor):
    def volume(seed):
        made = np.where(ball(0.6), with_skull(seed), 0) / divisor
        return made.astype(np.int16 if divisor == 1 else np.float32)

    store = prepared(tmp_path, volume, normalise=(f"MRI={kind}",))
    records = store.cases("train")
    made = {sample.tobytes() for sample in samples(store)}
    assert len(made) == len(records)
    for record in records:
        image = np.asarray(store.image(record.case_id))
        region = centred(whole(SHAPE), (16, 16, 16), SHAPE)
        expected = normalise(image, record, region, store.manifest.normalisation)
        assert expected.tobytes() in made


def test_statistics_are_over_the_voxels_that_the_kind_looks_at(tmp_path):
    store = prepared(tmp_path, stripped, normalise=("MRI=zscore",))
    record = store.manifest.cases[0]
    image = np.asarray(store.image(record.case_id)).astype(np.float64)
    expected = (image.mean(), image.std(), image.min(), image.max(), image.size)
    made = (
        record.channel_mean,
        record.channel_std,
        record.channel_min,
        record.channel_max,
        record.channel_voxels,
    )
    assert [each for (each,) in made] == pytest.approx(expected)


@pytest.mark.parametrize("is_shell", [False, True])
@pytest.mark.parametrize(("name", "filled"), [("MRI", 0), ("CT", -1000)])
def test_nan_becomes_what_surrounds_the_volume(tmp_path, name, filled, is_shell):
    volume = stripped(0) if name == "MRI" else np.where(ball(0.5), 40, -1000)
    volume = volume.astype(np.float32)
    is_nan = np.zeros(SHAPE, bool)
    is_nan[7, 6, 5] = True
    if is_shell:
        is_nan |= ~ball(0.95)
        is_nan[[0, -1]] = is_nan[:, [0, -1]] = is_nan[..., [0, -1]] = True
    volume[is_nan] = np.nan
    path = write_nifti(tmp_path / "x.nii.gz", volume)
    kind = Normalisation(Kind.CT if name == "CT" else Kind.FOREGROUND)
    case = load_case(
        CaseFiles("x", "x", (path,), None), channels=(name,), zero_nan=True, normalisation=[kind]
    )
    assert (case.image[is_nan] == filled).all()
    assert case.record.zeroed_voxels == is_nan.sum()
    notes = case_notes(case.record, (name,))
    assert any("were taken as what surrounds the volume" in note for note in notes)


# --- Stores that grow, break and continue ---


@pytest.mark.parametrize("added", [0, 1024])
def test_a_ct_in_another_unit_that_joins_a_store_is_named(tmp_path, capsys, added):
    def in_unit(seed):
        return (in_hounsfield_units(seed + 9) + added).astype(np.int16)

    store = prepared(tmp_path, in_hounsfield_units, names=("CT",))
    more = data_set(tmp_path / "more", in_unit, names=("CT",), cases=2)
    for path in sorted(more.glob("*/*.nii.gz")):
        path.rename(path.with_name(f"new_{path.name}"))
    about = (more / "dataset.json").read_text()
    (more / "dataset.json").write_text(about.replace("/c_", "/new_c_"))
    assert main(["store", "append", "--store", str(store.folder), "--dataset", str(more)]) == 0
    assert ("labelled values of CT about" in capsys.readouterr().out) == bool(added)


def add(store, more):
    """Append a data set's cases under other names."""
    with dataset_json(more) as entries:
        for entry in entries["training"]:
            for kind in ("image", "label"):
                (more / entry[kind]).rename(more / entry[kind].replace("c_", "new_"))
                entry[kind] = entry[kind].replace("c_", "new_")
    append(store, more, workers=1)
    return open_store(store)


def test_air_that_a_crop_leaves_out_of_a_body_at_the_border_stays_air(tmp_path):
    """Tissue is most of the border, and all of the air is on one side."""

    def body(seed):
        noise = np.random.default_rng(seed).integers(-3, 4, SHAPE)
        volume = np.where(ball(0.4), 60, 40) + noise
        volume[10:] = -1000
        return volume.astype(np.int16)

    made = []
    for crop in (False, True):
        data = data_set(tmp_path / f"data-{crop}", in_hounsfield_units, names=("CT",))
        folder = tmp_path / f"store-{crop}"
        settings = StoreSettings(crop=crop)
        prepare(data, folder, fractions=(2, 1, 1), workers=1, settings=settings)
        store = add(folder, data_set(tmp_path / f"more-{crop}", body, names=("CT",)))
        record = store.case("new_0")
        image = np.asarray(store.image("new_0"))
        made.append(normalise(image, record, whole(SHAPE), store.manifest.normalisation))
    assert record.stored != whole(SHAPE)
    np.testing.assert_array_equal(*made)


def test_appended_cases_are_normalised_as_the_store(tmp_path):
    store = prepared(tmp_path, with_skull)
    more = data_set(tmp_path / "more", stripped, cases=6)
    before = store.manifest.normalisation
    grown = add(tmp_path / "store", more)
    assert grown.manifest.normalisation == before
    record = grown.case("new_0")
    assert (record.around, record.channel_voxels) == ((0.0,), (np.prod(SHAPE),))


def test_an_unfinished_store_goes_on_with_the_kinds_it_was_begun_with(tmp_path):
    data = data_set(tmp_path / "data", with_skull)
    prepare(data, tmp_path / "store", fractions=(2, 1, 1), workers=1)
    (tmp_path / "store/manifest.json").unlink()
    content = json.loads((tmp_path / "store" / SOURCE).read_text())
    assert content["normalisation"][0]["kind"] == "zscore"
    again = prepare(data, tmp_path / "store", fractions=(1, 1, 2), workers=1)
    assert again.normalisation[0].kind is Kind.ZSCORE
    (tmp_path / "store/manifest.json").unlink()
    content["normalisation"][0]["kind"] = "half"
    (tmp_path / "store" / SOURCE).write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"source\.json must be complete JSON"):
        prepare(data, tmp_path / "store", fractions=(2, 1, 1), workers=1)
    chosen = StoreSettings(normalise=("MRI=none",))
    with pytest.raises(InputError, match="normalise of store"):
        prepare(data, tmp_path / "store", fractions=(2, 1, 1), workers=1, settings=chosen)


def test_the_boxes_of_a_store_whose_manifest_was_not_written_are_of_the_window_it_gets(tmp_path):
    def organ_of_water_or_fat(seed):
        """A body that is above the window of fat alone."""
        noise = np.random.default_rng(seed).integers(-3, 4, SHAPE)  # HU
        organ = -200 * (seed % 2)
        return (np.select([ball(0.4), ball(0.8)], [organ, -100], -1000) + noise).astype(np.int16)

    data = data_set(tmp_path / "data", organ_of_water_or_fat, names=("CT",))
    manifests = {}
    for seed in (WATER, FAT):
        folder = tmp_path / f"store-{seed}"
        manifests[seed] = prepare(data, folder, fractions=(1, 1, 2), seed=seed, workers=1)
    first, other = manifests.values()
    assert first.normalisation[0].low > -100 > other.normalisation[0].low
    assert first.largest_box != other.largest_box
    folder = tmp_path / f"store-{WATER}"
    (folder / "manifest.json").unlink()
    assert prepare(data, folder, fractions=(1, 1, 2), seed=FAT, workers=1) == other
    for record in other.cases:
        own = folder / f"cases/{record.case_id}.json"
        assert case_from_json(own.read_bytes()) == record


# --- CT in the place of others ---


def test_one_case_of_ct_among_others_is_a_bad_case(tmp_path):
    def one(seed):
        return in_hounsfield_units(seed) if seed == 1 else stripped(seed)

    data = data_set(tmp_path / "data", one)
    with pytest.raises(InputError, match=r"c_1\.nii\.gz must not be CT"):
        prepare(data, tmp_path / "store", fractions=(1, 0, 0), workers=1)
    manifest = prepare(data, tmp_path / "store", fractions=(1, 0, 0), workers=1, skip_bad=True)
    assert [case.case_id for case in manifest.cases] == ["c_0", "c_2", "c_3"]
    more = data_set(tmp_path / "more", in_hounsfield_units, cases=7)
    for number in range(4):
        (more / f"imagesTr/c_{number}.nii.gz").unlink()
    with dataset_json(more) as content:
        content["training"] = content["training"][4:]
    with pytest.raises(InputError, match=r"c_4\.nii\.gz must not be CT"):
        append(tmp_path / "store", more, workers=1)

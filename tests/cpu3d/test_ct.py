"""CT from the data set to the prediction: 0 HU is a value like others, and its offset says
nothing."""

import json
import re
import shutil
from types import SimpleNamespace

import nibabel
import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.data.cases.notes import unit_notes, window_notes
from cpu3d.data.cases.resample import resample_image
from cpu3d.data.nifti import ras_spacing_mm, read_volume, to_ras
from cpu3d.data.normalise import Kind, Normalisation, in_units
from cpu3d.data.phantoms.command import write_phantom
from cpu3d.data.store import open_store
from cpu3d.data.stores.convert import StoreSettings
from cpu3d.data.stores.prepare import prepare
from cpu3d.data.stores.upkeep import append, verify
from cpu3d.inference import evaluate, predict
from cpu3d.inference.postprocessing.rules import PostProcessing, Rule
from cpu3d.inference.scores_file import read_scores, scores_path
from cpu3d.run.config_json import load_config
from tests.cpu3d.data.made_datasets import dataset_json, make_record
from tests.cpu3d.runs import (
    SMALL,
    assert_same_weights,
    decided,
    run_command,
    shown_cases,
    start,
    written_weights,
)

CHANGES = {
    "hu": lambda volume: volume.astype(np.int16),
    "shifted": lambda volume: (volume + 1024).astype(np.int16),
    "float": lambda volume: volume.astype(np.float32),
}
SETTINGS = {"steps": 3, "batch": 1, "validations": 1, "rotation_deg": 20.0, "gamma": 0.5}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Stores of the same bodies, of which the files give other numbers, by the names of CHANGES."""
    folder = tmp_path_factory.mktemp("ct")
    made = {}
    for name, change in CHANGES.items():
        data = write_phantom(
            folder / name / "data", cases=4, shape=(24, 28, 24), workers=1, kind="ct"
        )
        for path in sorted((data / "imagesTr").iterdir()):
            image = nibabel.load(path)
            changed = nibabel.Nifti1Image(change(image.get_fdata()), image.affine)
            nibabel.save(changed, path)
        prepare(data, folder / name / "store", fractions=(2, 1, 1), workers=1)
        made[name] = open_store(folder / name / "store")
    return made


@pytest.fixture(scope="module")
def runs(stores, tmp_path_factory):
    """A run of three steps on each store."""
    folder = tmp_path_factory.mktemp("runs")
    for name, store in stores.items():
        start(store, folder / name, **SETTINGS).run()
    return {name: folder / name for name in stores}


@pytest.mark.parametrize("name", ["shifted", "float"])
def test_hu_with_1024_added_and_as_float32_train_to_the_same_weights(runs, name):
    assert_same_weights(runs[name], runs["hu"])


def test_a_run_keeps_the_window_and_predicts_without_its_store(stores, runs, tmp_path):
    answers = {}
    for name, run in runs.items():
        config = load_config(run)
        assert config.normalisation == stores[name].manifest.normalisation
        assert config.normalisation[0].kind is Kind.CT
        image = stores[name].folder.parent / "data/imagesTr/BRATS_001.nii.gz"
        out = tmp_path / name
        words = ["predict", "--run", run, "--image", image, "--out", out, "--raw", "--page"]
        assert main([str(word) for word in words]) == 0
        answers[name] = read_volume(out / "BRATS_001.nii.gz")[0]
    np.testing.assert_array_equal(answers["shifted"], answers["hu"])
    np.testing.assert_array_equal(answers["float"], answers["hu"])


@pytest.mark.parametrize(("store", "image"), [("hu", "shifted"), ("shifted", "hu"), ("hu", "hu")])
def test_an_image_in_another_unit_than_the_window_is_named(
    stores, runs, tmp_path, capsys, store, image
):
    path = stores[image].folder.parent / "data/imagesTr/BRATS_002.nii.gz"
    words = ["predict", "--run", runs[store], "--image", path, "--out", tmp_path, "--raw"]
    assert main([str(word) for word in words]) == 0
    kind = stores[store].manifest.normalisation[0]
    (notes,) = [json.loads((tmp_path / "BRATS_002.json").read_text())["notes"]]
    said = [note for note in notes if "do not fit" in note]
    assert len(said) == (store != image)
    assert all(f"{kind.low:.4g} to {kind.high:.4g}" in note for note in said)


NESTED = {"liver": (1, 2), "lesion": (2,)}
WHOLE = {"whole": (1, 2), "Anterior": (1,)}


@pytest.mark.parametrize(
    ("names", "regions", "learnt", "every"),
    [
        (("liver", "lesion"), NESTED, (), 2),
        (("liver", "lesion"), NESTED, ("lesion",), 1),
        (("Anterior", "Posterior"), WHOLE, (), 1),
        (("lesion", "liver"), {"lesion": (1, 2), "liver": (2,)}, (), 1),
    ],
)
def test_predict_answers_as_evaluate_does_whatever_a_region_is_called(
    names, regions, learnt, every, tmp_path
):
    shape = (24, 28, 24)
    data = tmp_path / "data"
    write_phantom(data, cases=4, shape=shape, workers=1, kind="ct", annotate_every=every)
    with dataset_json(data) as about:
        about["labels"].update({"1": names[0], "2": names[1]})
    prepare(data, tmp_path / "store", fractions=(2, 1, 1), workers=1, regions=regions)
    store = open_store(tmp_path / "store")
    config = decided(store, tmp_path, **SMALL, regions=learnt)
    run = written_weights(config, tmp_path / "run")
    rules = {name: Rule(share=0.5) for name in config.regions}
    case_id = store.manifest.split["test"][0]
    image = f"imagesTr/{case_id}.nii.gz"
    shutil.copytree(data, tmp_path / "other")
    with dataset_json(tmp_path / "other") as about:
        about["labels"] = {"0": "background", "7": names[1], "5": names[0]}
    with pytest.MonkeyPatch.context() as patch:
        for module in (evaluate, predict):
            patch.setattr(module, "postprocessing_together", lambda together: PostProcessing(rules))
        for name in ("data", "other"):
            words = ["--image", tmp_path / name / image, "--out", tmp_path / f"of-{name}"]
            assert run_command(predict, "--run", run, *words) == 0
        assert run_command(evaluate, "--run", run) == 0
    scored = read_volume(scores_path(run).parent / f"predictions/{case_id}.nii.gz")[0]
    painted = set(np.unique(scored))
    assert painted != {0}
    for name, codes in (("data", (0, 1, 2)), ("other", (0, 5, 7))):
        label = read_volume(tmp_path / f"of-{name}/{case_id}.nii.gz")[0]
        np.testing.assert_array_equal(label, np.array(codes)[scored])
    volumes = json.loads((tmp_path / f"of-data/{case_id}.json").read_text())["volumes_ml"]
    (case,) = read_scores(scores_path(run))["cases"]
    if every == 1:
        scores = case["regions"]
        expected = {name: scores[name]["prediction_ml"] for name in config.regions}
        assert volumes == pytest.approx(expected, abs=1e-4)


AIR, LUNG, FAT, MUSCLE, BONE = -1000, -800, -100, 50, 700
BODY = np.repeat([AIR, LUNG, FAT, MUSCLE, BONE], [400, 100, 100, 350, 50]).reshape(10, 10, 10, 1)


@pytest.mark.parametrize(
    "window", [(-140, -55), (-1000, -300), (-1000, -850), (-17, 201), (30, 150), (100, 400)]
)
@pytest.mark.parametrize("padding", [AIR, -2000])
@pytest.mark.parametrize("added", [0, 1024])
def test_an_image_is_named_by_its_unit_whatever_tissue_the_window_is_of(window, padding, added):
    image = BODY.copy()
    image[:2] = padding
    image = image + added
    kind = Normalisation(Kind.CT, *window, mean=sum(window) / 2, std=10.0)
    record = SimpleNamespace(units=())
    said = window_notes(image, record, ("CT",), (kind,))
    assert len(said) == (added > 0)


def labelled_about(middles):
    """Records of cases whose labelled values have these medians; None is a case without a label."""
    records = []
    for case_id, middle in zip("abcde", middles):
        values = () if middle is None else (middle - 20.0, float(middle), middle + 20.0)
        records.append(make_record(case_id, foreground=(values,)))
    return records


@pytest.mark.parametrize(
    ("middles", "named"),
    [
        ((100, 110, 95, 105, 98), ""),
        ((100, 110, 1119, 105, 98), "c"),  # HU + 1024
        ((1124, 1134, 1119, 1129, 1122), ""),  # all of them
        ((100, 180, 60, 105, 98), ""),  # with contrast medium, and without
        ((-850, -300, 40, -700, 60), ""),  # lungs: nodules, air
        ((60, 50, -850, 700, 55), ""),  # soft tissue in most, lungs in one, bone in another
        ((100, None, 1124, 105), "c"),  # one without a label
        ((700, -900, 650, 700, -880), ""),  # bone in some, lungs in others
        ((1129, 95, 1119, 105), "ac"),  # of two groups the lower one is taken to be in HU
        ((-924, 100, 1124), "ac"),
    ],
)
def test_a_ct_among_others_is_named_by_its_unit(middles, named):
    said = unit_notes(labelled_about(middles), ("CT",))
    assert "".join(said) == named
    for case_id, (note,) in said.items():
        odd = middles["abcde".index(case_id)]
        assert f"labelled values of CT about {odd}, of most cases they are about 1" in note


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """The store of bodies of which the second is in HU + 1024."""
    folder = tmp_path_factory.mktemp("odd")
    data = write_phantom(folder / "data", cases=4, shape=(24, 28, 24), workers=1, kind="ct")
    path = data / "imagesTr/BRATS_002.nii.gz"
    image = nibabel.load(path)
    shifted = CHANGES["shifted"](image.get_fdata())
    nibabel.save(nibabel.Nifti1Image(shifted, image.affine), path)
    prepare(data, folder / "store", fractions=(2, 1, 1), workers=1)
    return open_store(folder / "store")


def test_prepare_and_evaluate_name_the_case_of_another_unit(odd, stores, tmp_path, capsys):
    for store, named in ((odd, ["BRATS_002"]), (stores["hu"], []), (stores["shifted"], [])):
        capsys.readouterr()
        assert main(["store", "info", "--store", str(store.folder)]) == 0
        notes = re.findall(r"note: (\S+): labelled values of CT", capsys.readouterr().out)
        assert notes == named
    config = decided(odd, tmp_path / "run", **SMALL, **SETTINGS)
    written_weights(config, tmp_path / "run")
    split = next(name for name, ids in odd.manifest.split.items() if "BRATS_002" in ids)
    capsys.readouterr()
    assert main(["evaluate", "--run", str(tmp_path / "run"), "--split", split]) == 0
    assert "note: BRATS_002: labelled values of CT about" in capsys.readouterr().err


def test_a_run_is_scored_and_reported(stores, runs):
    assert main(["evaluate", "--run", str(runs["hu"])]) == 0
    assert main(["report", "--run", str(runs["hu"])]) == 0
    shown = shown_cases(runs["hu"] / "report.html")
    modality = shown[0]["modalities"][0]
    kind = stores["hu"].manifest.normalisation[0]
    assert (modality["unit"], modality["window"]) == ("HU", [kind.low, kind.high])


# --- Of several spacings ---


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """The store of bodies of which two have slices of twice the thickness."""
    folder = tmp_path_factory.mktemp("mixed")
    data = write_phantom(folder / "data", cases=4, shape=(24, 28, 24), workers=1, kind="ct")
    for number in (2, 3):  # one that is trained on, and one that is not
        for kind in ("imagesTr", "labelsTr"):
            path = data / kind / f"BRATS_{number:03}.nii.gz"
            image = nibabel.load(path)
            affine = image.affine @ np.diag([1, 1, 2, 1])
            thick = np.asarray(image.dataobj)[:, :, ::2]
            nibabel.save(nibabel.Nifti1Image(thick, affine), path)
    voxels = (1.0, 1.0, 1.0)
    prepare(data, folder / "store", fractions=(2, 1, 1), workers=1, spacing=voxels)
    return open_store(folder / "store")


@pytest.fixture(scope="module")
def mixed_run(mixed):
    """A run of three steps on it."""
    folder = mixed.folder.parent / "run"
    start(mixed, folder, **SETTINGS).run()
    return folder


def test_a_ct_is_resampled_within_its_values_to_half_a_step(mixed):
    resampled = [record for record in mixed.manifest.cases if record.resampled_from]
    assert len(resampled) == 2
    kind = mixed.manifest.normalisation[0]
    assert kind.kind is Kind.CT
    for record in resampled:
        data = mixed.folder.parent / "data"
        source = to_ras(*read_volume(data / f"imagesTr/{record.case_id}.nii.gz"))
        image = mixed.image(record.case_id)
        assert image.dtype == np.int16
        values = in_units(image, record.units)[..., 0]
        assert values.shape == record.shape == (24, 28, 24)
        expected = resample_image(source, record.shape, (1, 1, 2), outside=None)
        ((step, _),) = record.units
        assert step <= (int(source.max()) - int(source.min())) / 65_000
        np.testing.assert_allclose(values, expected, atol=0.51 * step)
        assert values.min() >= source.min() - step
        assert values.max() <= source.max() + step
        assert source.min() < kind.low < kind.high <= source.max() + 1
        assert record.max_abs_error < 1e-3
        assert record.box.size != record.shape  # air is not in it


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_ct_of_several_spacings_is_scored_on_its_own_grids(mixed, mixed_run, split):
    data = mixed.folder.parent / "data"
    assert main(["evaluate", "--run", str(mixed_run), "--split", split]) == 0
    path = scores_path(mixed_run, split)
    cases = json.loads(path.read_text())["cases"]
    assert len(cases) == len(mixed.manifest.split[split])
    for case in cases:
        case_id = case["case_id"]
        truth, geometry = read_volume(data / f"labelsTr/{case_id}.nii.gz")
        answer, grid = read_volume(path.parent / f"predictions/{case_id}.nii.gz")
        assert (answer.shape, grid) == (truth.shape, geometry)
        voxel_ml = np.prod(ras_spacing_mm(geometry)) / 1000
        for name, codes in mixed.manifest.regions.items():
            voxels = np.count_nonzero(np.isin(truth, codes))
            assert case["regions"][name]["truth_ml"] == pytest.approx(voxels * voxel_ml)


def test_a_ct_of_another_spacing_is_predicted_and_exported_alike(mixed, mixed_run, tmp_path):
    exported = tmp_path / "exported"
    words = ["export", "--run", mixed_run, "--format", "onnx", "--out", exported]
    assert main([str(word) for word in words]) == 0
    name = "BRATS_002.nii.gz"
    image = mixed.folder.parent / "data/imagesTr" / name
    answers = []
    for way in (["--run", mixed_run], ["--network", exported]):
        words = ["predict", *way, "--image", image, "--out", tmp_path / way[0]]
        assert main([str(word) for word in words]) == 0
        answer, grid = read_volume(tmp_path / way[0] / name)
        assert grid == read_volume(image)[1]
        answers.append(answer)
    np.testing.assert_array_equal(*answers)


def test_more_ct_of_another_spacing_is_taken(mixed, tmp_path):
    data = mixed.folder.parent / "data"
    few = tmp_path / "few"
    shutil.copytree(data, few)
    with dataset_json(few) as content:
        content["training"] = [each for each in content["training"] if "003" not in each["image"]]
    store = tmp_path / "store"
    chosen = {"fractions": (1, 0, 0), "workers": 1, "settings": StoreSettings("b2nd", crop=True)}
    before = prepare(few, store, **chosen, spacing=(1.0, 1.0, 1.0))
    done = append(store, data, workers=1)
    assert done.new == ("BRATS_003",)
    assert done.manifest.normalisation == before.normalisation
    record = open_store(store).case("BRATS_003")
    assert record.resampled_from.shape == (24, 28, 12)
    assert record.stored == record.box  # the window is known by now
    own = mixed.case("BRATS_003")
    assert (record.units, record.image_voxels_sha256) == (own.units, own.image_voxels_sha256)
    assert verify(store, workers=1) == ()

"""CT from the data set to the prediction: 0 HU is a value like others, and its offset says
nothing."""

import json
import shutil

import nibabel
import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.data.cases.notes import unit_notes, window_notes
from cpu3d.data.nifti import read_volume
from cpu3d.data.normalise import Kind, Normalisation
from cpu3d.data.store import open_store
from cpu3d.data.stores.prepare import prepare
from cpu3d.inference import evaluate, predict
from cpu3d.inference.postprocessing.rules import PostProcessing, Rule
from cpu3d.inference.scores_file import read_scores, scores_path
from cpu3d.run.config_json import load_config
from tests.cpu3d.data.made_datasets import dataset_json, decathlon, make_record, write_nifti
from tests.cpu3d.runs import (
    SMALL,
    decided,
    shown_cases,
    start,
    written_weights,
)

SHAPE = (24, 28, 24)
AIR, LUNG, FAT, MUSCLE, BONE, LIVER, LESION = -1000, -800, -100, 50, 700, 110, 55  # HU
CHANGES = {
    "hu": lambda volume: volume.astype(np.int16),
    "shifted": lambda volume: (volume + 1024).astype(np.int16),
}
SETTINGS = {"steps": 3, "batch": 1, "validations": 1, "rotation_deg": 20.0, "gamma": 0.5}


def run(*words):
    """Run a command to its end."""
    assert main([str(word) for word in words]) == 0


def bodies(folder, every=1):
    """A data set of four bodies in `folder`, which its store is in too: a liver with a lesion, of
    which one slice of `every` is annotated, among muscle, fat and air."""
    labels = {"0": "background", "1": "liver", "2": "lesion"}
    if every > 1:
        labels["3"] = "ignore"
    training = []
    for number in range(1, 5):
        rng = np.random.default_rng(number)
        off = np.indices(SHAPE).T - np.array(SHAPE) / 2 + rng.uniform(-1, 1, 3)
        radius = np.linalg.norm(off, axis=-1).T
        inside = [radius < r for r in (3, 6, 9, 11)]
        volume = np.select(inside, (LESION, LIVER, MUSCLE, FAT), AIR) + rng.normal(0, 10, SHAPE)
        label = inside[0].astype(np.uint8) + inside[1]
        label[..., np.arange(SHAPE[2]) % every > 0] = 3
        case = {"image": volume.astype(np.int16), "label": label}
        for kind, array in case.items():
            case[kind] = f"{kind}sTr/BRATS_{number:03}.nii.gz"
            write_nifti(folder / "data" / case[kind], array)
        training.append(case)
    return decathlon(folder / "data", 0, modality={"0": "CT"}, labels=labels, training=training)


def store_of(folder, **how):
    prepare(folder / "data", folder / "store", fractions=(2, 1, 1), workers=1, **how)
    return open_store(folder / "store")


def image_of(store, case_id):
    return store.folder.with_name("data") / f"imagesTr/{case_id}.nii.gz"


def change_file(path, change):
    image = nibabel.load(path)
    nibabel.save(nibabel.Nifti1Image(change(image.get_fdata()), image.affine), path)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Stores of the same bodies, of which the files give other numbers, by the names of CHANGES."""
    made = {}
    for name, change in CHANGES.items():
        folder = tmp_path_factory.mktemp(name)
        for path in (bodies(folder) / "imagesTr").iterdir():
            change_file(path, change)
        made[name] = store_of(folder)
    return made


@pytest.fixture(scope="module")
def runs(stores):
    """A run of three steps on each store."""
    folders = {}
    for name, store in stores.items():
        folders[name] = store.folder.with_name("run")
        start(store, folders[name], **SETTINGS).run()
    return folders


def test_a_run_keeps_the_window_and_predicts_without_its_store(stores, runs, tmp_path):
    answers = {}
    for name, folder in runs.items():
        config = load_config(folder)
        assert config.normalisation == stores[name].manifest.normalisation
        assert config.normalisation[0].kind is Kind.CT
        out = tmp_path / name
        image = image_of(stores[name], "BRATS_001")
        run("predict", "--run", folder, "--image", image, "--out", out, "--raw", "--page")
        answers[name] = read_volume(out / "BRATS_001.nii.gz")[0]
    for answer in answers.values():
        np.testing.assert_array_equal(answer, answers["hu"])


@pytest.mark.parametrize(("store", "image"), [("hu", "shifted"), ("shifted", "hu"), ("hu", "hu")])
def test_an_image_in_another_unit_than_the_window_is_named(stores, runs, tmp_path, store, image):
    path = image_of(stores[image], "BRATS_002")
    run("predict", "--run", runs[store], "--image", path, "--out", tmp_path, "--raw")
    kind = stores[store].manifest.normalisation[0]
    notes = json.loads((tmp_path / "BRATS_002.json").read_text())["notes"]
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
    data = bodies(tmp_path, every)
    with dataset_json(data) as about:
        about["labels"].update({"1": names[0], "2": names[1]})
    store = store_of(tmp_path, regions=regions)
    config = decided(store, tmp_path, **SMALL, regions=learnt)
    folder = written_weights(config, tmp_path / "run")
    rules = PostProcessing({name: Rule(share=0.5) for name in config.regions})
    case_id = store.manifest.split["test"][0]
    image = f"imagesTr/{case_id}.nii.gz"
    shutil.copytree(data, tmp_path / "other")
    with dataset_json(tmp_path / "other") as about:
        about["labels"] = {"0": "background", "7": names[1], "5": names[0]}
    with pytest.MonkeyPatch.context() as patch:
        for module in (evaluate, predict):
            patch.setattr(module, "postprocessing_together", lambda together: rules)
        for name in ("data", "other"):
            words = ["--image", tmp_path / name / image, "--out", tmp_path / f"of-{name}"]
            run("predict", "--run", folder, *words)
        run("evaluate", "--run", folder)
    scored = read_volume(scores_path(folder).parent / f"predictions/{case_id}.nii.gz")[0]
    assert scored.any()
    for name, codes in (("data", (0, 1, 2)), ("other", (0, 5, 7))):
        label = read_volume(tmp_path / f"of-{name}/{case_id}.nii.gz")[0]
        np.testing.assert_array_equal(label, np.array(codes)[scored])
    if every == 1:
        volumes = json.loads((tmp_path / f"of-data/{case_id}.json").read_text())["volumes_ml"]
        (case,) = read_scores(scores_path(folder))["cases"]
        expected = {name: case["regions"][name]["prediction_ml"] for name in config.regions}
        assert volumes == pytest.approx(expected, abs=1e-4)


BODY = np.repeat([AIR, LUNG, FAT, MUSCLE, BONE], [400, 100, 100, 350, 50]).reshape(10, 10, 10, 1)


@pytest.mark.parametrize(
    "window", [(-140, -55), (-1000, -300), (-1000, -850), (-17, 201), (30, 150), (100, 400)]
)
@pytest.mark.parametrize("padding", [AIR, -2000])
@pytest.mark.parametrize("added", [0, 1024])
def test_an_image_is_named_by_its_unit_whatever_tissue_the_window_is_of(window, padding, added):
    image = BODY + added
    image[:2] = padding + added
    kind = Normalisation(Kind.CT, *window, mean=sum(window) / 2, std=10.0)
    said = window_notes(image, make_record(), ("CT",), (kind,))
    assert len(said) == (added > 0)


@pytest.mark.parametrize(
    ("middles", "named"),
    [
        ((100, 110, 1119, 105, 98), "c"),  # HU + 1024
        ((1124, 1134, 1119, 1129, 1122), ""),  # all of them
        ((100, 180, 60, 105, 98), ""),  # with contrast medium, and without
        ((60, 50, -850, 700, 55), ""),  # soft tissue in most, lungs in one, bone in another
        ((100, None, 1124, 105), "c"),  # one without a label
        ((1129, 95, 1119, 105), "ac"),  # of two groups the lower one is taken to be in HU
        ((-924, 100, 1124), "ac"),
        ((100, 150, 150, 1050, 1250), "e"),  # within 100 of 1024
    ],
)
def test_a_ct_among_others_is_named_by_its_unit(middles, named):
    records = []
    for case_id, middle in zip("abcde", middles):
        values = () if middle is None else (middle - 20.0, float(middle), middle + 20.0)
        records.append(make_record(case_id, foreground=((), values)))
    said = unit_notes(records, ("MRI", "CT"))
    assert "".join(said) == named
    for case_id, (note,) in said.items():
        odd = middles["abcde".index(case_id)]
        assert f"labelled values of CT about {odd}, of most cases they are about 1" in note


def test_prepare_and_evaluate_name_the_case_of_another_unit(tmp_path, capsys):
    change_file(bodies(tmp_path) / "imagesTr/BRATS_002.nii.gz", CHANGES["shifted"])
    odd = store_of(tmp_path)
    note = "note: BRATS_002: labelled values of CT about"
    assert note in capsys.readouterr().out
    folder = written_weights(decided(odd, tmp_path / "run", **SMALL, **SETTINGS), tmp_path / "run")
    split = next(name for name, ids in odd.manifest.split.items() if "BRATS_002" in ids)
    run("evaluate", "--run", folder, "--split", split)
    assert note in capsys.readouterr().err


def test_a_run_is_scored_and_reported(stores, runs):
    for command in ("evaluate", "report"):
        run(command, "--run", runs["hu"])
    modality = shown_cases(runs["hu"] / "report.html")[0]["modalities"][0]
    kind = stores["hu"].manifest.normalisation[0]
    assert (modality["unit"], modality["window"]) == ("HU", [kind.low, kind.high])

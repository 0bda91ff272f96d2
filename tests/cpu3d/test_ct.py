"""CT from the data set to the prediction: 0 HU is a value like others, and its offset says
nothing."""

import json

import nibabel
import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.data.nifti import read_volume
from cpu3d.data.normalise import Kind
from cpu3d.data.store import open_store
from cpu3d.data.stores.convert import Settings
from cpu3d.data.stores.phantom import write_phantom
from cpu3d.data.stores.prepare import prepare
from cpu3d.errors import InputError
from cpu3d.plan import make_plan
from cpu3d.run.config_json import load_config
from tests.cpu3d.runs import HOST, assert_same_weights, shown_cases, start

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


def test_a_run_is_scored_and_reported(stores, runs):
    assert main(["evaluate", "--run", str(runs["hu"])]) == 0
    assert main(["report", "--run", str(runs["hu"])]) == 0
    shown = shown_cases(runs["hu"] / "report.html")
    modality = shown[0]["modalities"][0]
    kind = stores["hu"].manifest.normalisation[0]
    assert (modality["unit"], modality["window"]) == ("HU", [kind.low, kind.high])


def test_a_run_is_not_continued_on_a_store_of_another_normalisation(stores, runs, tmp_path):
    data = stores["hu"].folder.parent / "data"
    chosen = Settings(normalise=("CT=zscore",))
    prepare(data, tmp_path / "store", fractions=(2, 1, 1), workers=1, settings=chosen)
    with pytest.raises(InputError, match="take the store that the run was begun on"):
        make_plan(open_store(tmp_path / "store"), runs["hu"], HOST, {})


def test_the_config_of_a_run_on_other_channels_is_as_before_there_were_kinds(
    phantom_store, tmp_path
):
    start(phantom_store, tmp_path / "run", steps=1)
    content = json.loads((tmp_path / "run/config.json").read_text())
    assert "normalisation" not in content
    assert load_config(tmp_path / "run").normalisation == ()

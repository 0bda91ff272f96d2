"""Runs on a store of resampled cases answer on each image's own grid: evaluate, predict, export,
pages."""

import json

import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.data.cases.resample import to_source_grid
from cpu3d.data.nifti import read_volume
from cpu3d.data.store import open_store
from cpu3d.data.stores.prepare import prepare
from cpu3d.inference import evaluate, predict
from cpu3d.inference.ensemble import Ensemble
from cpu3d.inference.evaluate import evaluate_split
from cpu3d.inference.postprocessing.run_rules import choose_rules
from cpu3d.inference.predictor import load_predictor
from cpu3d.inference.runs import Inference
from cpu3d.run.config_json import load_config
from tests.cpu3d.conftest import FakePredictor
from tests.cpu3d.data.spaced import SPACINGS, spaced_set, write_drawn
from tests.cpu3d.runs import run_command, start
from tests.cpu3d.runs import shown_cases as shown_in

FOLDS = [
    {"train": ["a", "b", "c", "g"], "val": ["d", "e"]},
    {"train": ["d", "e"], "val": ["a", "b", "c", "g"]},
]
"""Cases of several spacings on each side; f, of 1 x 1 x 2 mm, is a test case."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return spaced_set(tmp_path_factory.mktemp("spaced") / "data")


@pytest.fixture(scope="module")
def store(data):
    (data.parent / "folds.json").write_text(json.dumps(FOLDS))
    prepare(data, data.parent / "store", workers=1, splits=data.parent / "folds.json")
    return open_store(data.parent / "store")


@pytest.fixture(scope="module")
def run(store):
    """A run of three steps."""
    folder = store.folder.parent / "run"
    start(store, folder, steps=3, depth=2).run()
    return folder


class Perfect(FakePredictor):
    """Answers with the store's own label, brought back."""

    def probabilities(self, image, record, channels=(), in_windows=False):
        label = self.store.label(record.case_id)
        masks = [np.isin(label, codes) for codes in self.regions.values()]
        answers = [to_source_grid(mask.astype(np.float32), record) for mask in masks]
        return np.stack(answers, -1)


@pytest.mark.parametrize("split", ["test", "val", "train"])
def test_a_perfect_answer_scores_on_the_source_s_grid_what_the_way_back_leaves(
    store, run, data, tmp_path, split
):
    config = load_config(run)
    predictor = Perfect(store, config.codes_by_region, config.label_names, config.store_channels)
    scores = evaluate_split(predictor, store, split, tmp_path, about={})
    assert scores["mean_dice"] > 0.95
    folder = next(tmp_path.rglob("predictions"))
    for case in scores["cases"]:
        case_id = case["case_id"]
        source, geometry = read_volume(data / f"labelsTr/{case_id}.nii.gz")
        answer, grid = read_volume(folder / f"{case_id}.nii.gz")
        assert grid == geometry
        voxel_ml = np.prod(SPACINGS[case_id]) / 1000
        core = case["regions"]["core"]
        assert core["truth_ml"] == pytest.approx(np.count_nonzero(source == 2) * voxel_ml)
        shared = np.count_nonzero((answer == 2) & (source == 2))
        total = np.count_nonzero(answer == 2) + np.count_nonzero(source == 2)
        assert core["dice"] == pytest.approx(2 * shared / total)
        if store.case(case_id).resampled_from is None:
            assert case["mean_dice"] == 1


@pytest.mark.parametrize("case_id", ["b", "d"])
def test_slices_of_an_answer_are_those_of_all_of_it(store, run, case_id):
    """The network sees a box inside a grid of 48 rows, which come from 24 or 60."""
    record = store.case(case_id)
    one, other = (load_predictor(run, inference=Inference(flips=flips)) for flips in (True, False))
    assert one.region(record).start[0] > 0
    for predictor in (one, Ensemble([one, other])):
        answers = predictor.probabilities(store.image(case_id), record)
        whole = np.asarray(answers)
        assert np.ptp(whole[5:10]) > 0
        for first in range(0, len(whole), 5):
            rows = slice(first, first + 5)
            np.testing.assert_array_equal(answers[rows], whole[rows])


def test_an_image_of_another_spacing_is_answered_on_its_own_grid(run, tmp_path, capsys):
    image, _ = write_drawn(tmp_path / "in", "new", (1.6, 1.6, 2.0), "LPS")
    out = tmp_path / "out"
    words = ["--image", image, "--out", out, "--page", "--probabilities"]
    assert run_command(predict, "--run", run, *words) == 0
    assert "voxels of" not in capsys.readouterr().err  # they are as the training's when seen
    label, grid = read_volume(out / "new.nii.gz")
    assert grid == read_volume(image)[1]
    content = json.loads((out / "new.json").read_text())
    assert content["spacing_mm"] == pytest.approx([1.6, 1.6, 2.0])
    for name, code in (("edema", 1), ("core", 2)):
        ml = np.count_nonzero(label == code) * 1.6 * 1.6 * 2 / 1000
        assert content["volumes_ml"][name] == pytest.approx(ml, abs=1e-4)
        probability = read_volume(out / content["probabilities"][name])
        assert probability[1] == grid
    (shown,) = shown_in(out / "new.html")
    assert shown["spacing"] == pytest.approx([1, 1, 1])


def test_predict_answers_as_evaluate_does_on_the_same_file(run, data, tmp_path):
    assert choose_rules(run).cases == 2  # on the sources' labels
    words = ["--image", data / "imagesTr/f.nii.gz", "--out", tmp_path]
    assert run_command(predict, "--run", run, *words) == 0
    assert run_command(evaluate, "--run", run) == 0
    answer = read_volume(tmp_path / "f.nii.gz")[0]
    assert answer.shape == (48, 40, 16)
    np.testing.assert_array_equal(answer, read_volume(run / "evaluation/predictions/f.nii.gz")[0])


def test_an_export_segments_files_of_any_spacing_as_predict_does(run, tmp_path):
    image, _ = write_drawn(tmp_path, "a", (0.8, 0.8, 4.0), "LPS")
    network = tmp_path / "exported"
    words = ["--format", "onnx", "--out", str(network), "--case", str(image)]
    assert main(["export", "--run", str(run), *words]) == 0
    about = json.loads((network / "export.json").read_text())
    assert about["target_spacing_mm"] == [1, 1, 1]
    for who in (["--run", run], ["--network", network]):
        words = [*who, "--image", image, "--out", tmp_path / who[0]]
        assert run_command(predict, *words) == 0
    expected, grid = read_volume(tmp_path / "--run/a.nii.gz")
    label, own_grid = read_volume(tmp_path / "--network/a.nii.gz")
    assert own_grid == grid == read_volume(image)[1]
    np.testing.assert_array_equal(label, expected)

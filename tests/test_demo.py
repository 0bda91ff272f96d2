"""The whole way through the command line, small: what the README's first command does."""

import json
import os
import signal
from unittest.mock import Mock

import nibabel
import numpy as np
import pytest

from cpu3d import demo
from cpu3d.__main__ import main
from cpu3d.errors import DivergedError, InputError, Interrupted
from cpu3d.report import report
from cpu3d.training.heartbeat_writer import how_it_ended
from memory_estimator.common.files import NotRegularError


@pytest.mark.slow  # .ci/run runs the same demo
def test_it_leaves_scores_a_page_and_a_prediction_and_again_has_little_to_do(tmp_path):
    command = ["demo", "--smoke", "--out", str(tmp_path)]
    assert main(command) == 0
    run = tmp_path / "smoke/run"
    scores = json.loads((run / "evaluation/scores.json").read_text())
    assert (scores["untouched"], len(scores["cases"])) == (True, 2)
    assert scores["split_hash"] in (run / "report.html").read_text()
    source = nibabel.load(tmp_path / "smoke/data/imagesTr/BRATS_001.nii.gz")
    prediction = nibabel.load(tmp_path / "smoke/predictions/BRATS_001.nii.gz")
    assert prediction.shape == source.shape[:3]
    np.testing.assert_array_equal(prediction.affine, source.affine)
    log = (run / "log.jsonl").read_bytes()
    assert main(command) == 0
    assert (run / "log.jsonl").read_bytes() == log


@pytest.mark.parametrize("smoke", [False, True])
def test_only_the_whole_demo_is_cut_to_its_minutes_and_it_is_of_no_cluster(monkeypatch, smoke):
    monkeypatch.setenv("TF_CONFIG", "left over")
    done = {}

    def noted(words):
        assert "TF_CONFIG" not in os.environ
        done[words[0]] = words
        return 3 * (words[0] == "evaluate")

    monkeypatch.setattr("cpu3d.__main__.main", noted)
    assert demo.run(demo.Options(demo.Path("out"), smoke, "lean")) == 3
    assert "lean" in done["train"]
    assert done["train"][4] == done["evaluate"][2] == f"out/{'smoke/' * smoke}run-lean"
    assert ("--budget-minutes" in done["train"]) != smoke


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "interrupted: the same command continues"),
        (Interrupted("saved", signal.SIGTERM), 143, "interrupted: saved"),
        (InputError("store must", "run must"), 2, "error: store must\nerror: run must"),
        (DivergedError("loss must"), 4, "error: loss must"),
        (NotRegularError(0, "a FIFO", "x"), 2, "error: x must be a regular file, got a FIFO"),
        (ModuleNotFoundError(name="tensorflow"), 2, "error: tensorflow must be installed"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (MemoryError(), 1, "error: memory must suffice for the command"),
    ],
)
def test_the_command_line_and_the_heartbeat_end_with_one_code(
    error, code, line, monkeypatch, capsys
):
    monkeypatch.setattr(report, "run", Mock(side_effect=error))
    assert main(["report", "--run", "r"]) == how_it_ended(error)[1] == code
    assert line in capsys.readouterr().err

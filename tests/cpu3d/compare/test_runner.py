import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from cpu3d.compare import runner
from cpu3d.compare.runner import Evaluation, PlannedRun, RunFailedError, carry_out, is_evaluated, is_trained

OPTIONS = ("--steps", "4", "--seed", "0")


@pytest.fixture
def stage(tmp_path, make_run, monkeypatch):
    """A folder whose `calls.txt` says what was done, with `stand_in.py` in the place of the real program."""
    template = make_run("template")
    stand_in = Path(__file__).with_name("stand_in.py")
    monkeypatch.setattr(runner, "PROGRAM", (sys.executable, str(stand_in), str(template)))
    monkeypatch.setattr(runner, "POLL_S", 0.05)
    return template.parent


def calls(stage):
    path = stage / "calls.txt"
    found = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return found


def planned(out, *names):
    return [PlannedRun(name, 0, out / "runs" / name, OPTIONS) for name in names]


def test_every_run_is_trained_and_scored_once(stage, tmp_path):
    out = tmp_path / "out"
    runs = planned(out, "a", "b")
    carry_out(runs, tmp_path / "store", out, Evaluation())
    assert calls(stage) == ["train a", "evaluate a", "train b", "evaluate b"]
    carry_out(runs, tmp_path / "store", out, Evaluation())
    assert calls(stage) == []


def test_without_an_evaluation_nothing_is_scored(stage, tmp_path):
    carry_out(planned(tmp_path / "out", "a"), tmp_path / "store", tmp_path / "out")
    assert calls(stage) == ["train a"]


def test_what_was_cut_off_goes_on(stage, tmp_path):
    out = tmp_path / "out"
    runs = planned(out, "a", "b")
    carry_out(runs[:1], tmp_path / "store", out)
    assert calls(stage) == ["train a"]
    carry_out(runs, tmp_path / "store", out, Evaluation())
    assert calls(stage) == ["evaluate a", "train b", "evaluate b"]


def test_younger_weights_and_other_tolerances_are_scored_again(stage, tmp_path):
    out = tmp_path / "out"
    (run,) = planned(out, "a")
    carry_out([run], tmp_path / "store", out, Evaluation())
    assert is_evaluated(run, Evaluation())
    assert not is_evaluated(run, Evaluation(tolerance_mm=2))
    assert not is_evaluated(run, Evaluation("val"))
    later = time.time() + 60
    os.utime(run.folder / "checkpoints" / "best.npz", (later, later))
    assert not is_evaluated(run, Evaluation())


def test_scores_of_another_way_to_predict_do_not_count(make_run):
    """A whole-volume run scored by hand with a window is scored again as it was trained."""
    run = PlannedRun("a", 0, make_run("a"), OPTIONS)
    assert is_evaluated(run, Evaluation())
    path = run.folder / "evaluation" / "scores.json"
    path.write_text(path.read_text().replace('"flips": false', '"flips": true'))
    assert not is_evaluated(run, Evaluation())


@pytest.mark.parametrize(
    ("end", "done"),
    [
        ({"reason": "finished", "step": 4}, True),
        ({"reason": "finished", "step": 3}, False),
        ({"reason": "interrupted", "step": 4}, False),
        ({"reason": "early stop", "step": 2}, True),
        ("none", False),
    ],
)
def test_a_run_is_trained_when_its_last_step_is_done(make_run, end, done):
    assert is_trained(PlannedRun("a", 0, make_run("a", scored=False, end=end), OPTIONS)) is done


def test_a_failed_run_stops_all_with_its_last_words_and_where_they_are(stage, tmp_path):
    (stage / "fail").touch()
    out = tmp_path / "out"
    with pytest.raises(RunFailedError, match="loss must be finite, got nan") as caught:
        carry_out(planned(out, "a", "b"), tmp_path / "store", out, Evaluation())
    assert caught.value.exit_code == 2
    assert str(out / "logs" / "a-train.txt") in str(caught.value)
    assert calls(stage) == ["train a"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_passed_on_once_and_waited_for(stage, tmp_path, number):
    (stage / "wait").touch()

    def interrupt():
        while not (stage / "told-to-wait").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt, match="the same command continues"):
        carry_out(planned(tmp_path / "out", "a"), tmp_path / "store", tmp_path / "out")
    assert (stage / "told").read_text() == "1"
    assert int((stage / "ready").read_text()) != os.getpgid(0), "else a terminal's Ctrl-C would reach it twice"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

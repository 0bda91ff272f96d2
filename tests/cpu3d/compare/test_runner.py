import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from cpu3d.compare.planned import PlannedRun, is_trained
from cpu3d.compare.runner import Evaluation, RunDivergedError, RunFailedError, carry_out, carry_out_all
from cpu3d.config import load_config
from cpu3d.errors import InputError
from cpu3d.training.run_log import read_events
from cpu3d.util.child import ROOT

OPTIONS = ("--steps", "4", "--seed", "0")

DIVERGED = "error: loss must\nbe finite, got nan at step 3"


def planned(out, *names, options=OPTIONS):
    return [PlannedRun(name, 0, out / "runs" / name, options) for name in names]


def test_every_run_is_trained_and_scored_once(stage, tmp_path):
    out = tmp_path / "out"
    runs = planned(out, "a", "b")
    carry_out(runs, tmp_path / "store", out, Evaluation(tolerance_mm=1 / 3))
    assert stage.calls() == ["train a", "evaluate a", "train b", "evaluate b"]
    carry_out(runs, tmp_path / "store", out, Evaluation(tolerance_mm=1 / 3))
    assert stage.calls() == [], "a third is told with all of its digits"


def test_without_an_evaluation_nothing_is_scored_until_there_is_one(stage, tmp_path):
    out = tmp_path / "out"
    runs = planned(out, "a", "b")
    carry_out(runs[:1], tmp_path / "store", out)
    assert stage.calls() == ["train a"]
    carry_out(runs, tmp_path / "store", out, Evaluation())
    assert stage.calls() == ["evaluate a", "train b", "evaluate b"]


def test_a_run_that_was_killed_goes_on(stage, tmp_path):
    out = tmp_path / "out"
    (run,) = planned(out, "a")
    stage.tell("cut")
    killer = threading.Thread(target=lambda: os.kill(int(stage.waited("waits").split()[0]), signal.SIGKILL))
    killer.start()
    with pytest.raises(RunFailedError, match="got SIGKILL"):
        carry_out([run], tmp_path / "store", out)
    killer.join()
    assert not is_trained(run)
    stage.untell("cut")
    carry_out([run], tmp_path / "store", out)
    assert [event["step"] for event in read_events(run.folder) if event["event"] == "step"] == [1, 2, 3, 4]
    assert stage.calls() == ["train a", "train a"]


def test_a_lost_last_line_is_asked_for_again(stage, tmp_path):
    out = tmp_path / "out"
    (run,) = planned(out, "a")
    stage.tell("lose-end")
    carry_out([run], tmp_path / "store", out)
    assert not is_trained(run)
    stage.untell("lose-end")
    carry_out([run], tmp_path / "store", out)
    assert is_trained(run)
    assert len([event for event in read_events(run.folder) if event["event"] == "step"]) == 4


def test_a_run_of_other_options_is_neither_taken_nor_continued(stage, tmp_path):
    out = tmp_path / "out"
    carry_out(planned(out, "a"), tmp_path / "store", out)
    stage.calls()
    for more in (("--learning-rate", "0.5"), ("--steps", "3"), ("--mode", "patch", "--patch", "8", "8", "8")):
        with pytest.raises(InputError, match=r"run .*a must be of its options, got (learning_rate|steps|mode) "):
            carry_out(planned(out, "a", options=(*OPTIONS, *more)), tmp_path / "store", out)
    assert stage.calls() == []
    assert load_config(out / "runs" / "a").learning_rate == 0.002


def test_a_failed_run_stops_all_with_its_last_words_and_where_they_are(stage, tmp_path):
    stage.tell("fail", "a 1 No space left on device")
    out = tmp_path / "out"
    with pytest.raises(RunFailedError, match="No space left") as caught:
        carry_out(planned(out, "a", "b"), tmp_path / "store", out, Evaluation())
    assert (caught.value.exit_code, caught.value.why) == (1, "train ended with exit code 1")
    assert str(out / "logs" / "a-train.txt") in str(caught.value)
    assert stage.calls() == ["train a"]


def test_the_rest_is_done_where_that_is_asked_for(stage, tmp_path):
    stage.tell("fail", "a 1 No space left on device")
    out = tmp_path / "out"
    (failed,) = carry_out_all(planned(out, "a", "b"), tmp_path / "store", out, Evaluation())
    assert str(failed) == "a, seed 0, is left out: train ended with exit code 1."
    assert stage.calls() == ["train a", "train b", "evaluate b"]
    with pytest.raises(RunFailedError, match="No space left"):
        carry_out_all(planned(out, "a"), tmp_path / "store", out, Evaluation())


def test_a_diverged_run_is_not_trained_again_to_find_out(stage, tmp_path):
    stage.tell("fail", f"a 4 {DIVERGED}")
    out = tmp_path / "out"
    (run,) = planned(out, "a")
    for _ in range(2):
        with pytest.raises(RunDivergedError, match="be finite, got nan") as caught:
            carry_out([run], tmp_path / "store", out)
        assert (caught.value.run, caught.value.why, caught.value.exit_code) == (run, "train diverged", 4)
        stage.tell("fail", "nobody 0 ")
    assert stage.calls() == ["train a"]
    with pytest.raises(InputError, match="must be of its options"):
        carry_out(planned(out, "a", options=("--steps", "4", "--seed", "1")), tmp_path / "store", out)


def test_only_the_exit_code_of_this_attempt_is_a_verdict(stage, tmp_path):
    stage.tell("fail", f"a 1 {DIVERGED}")
    out = tmp_path / "out"
    with pytest.raises(RunFailedError) as caught:
        carry_out(planned(out, "a"), tmp_path / "store", out)
    assert not isinstance(caught.value, RunDivergedError), "a code of 1 is another failure"
    stage.tell("fail", "a 2 error: something else")
    with pytest.raises(RunFailedError, match="something else") as caught:
        carry_out(planned(out, "a"), tmp_path / "store", out)
    assert not isinstance(caught.value, RunDivergedError), "bad input is another failure"
    assert "be finite" not in str(caught.value)


@pytest.fixture
def heard():
    """Tests that run under `nohup` ignore SIGHUP, and would not pass it on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_once_and_waited_for(stage, tmp_path, number, heard):
    stage.tell("cut")

    def interrupt():
        stage.waited("waits")
        os.kill(os.getpid(), number)

    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt, match="the same command continues"):
        carry_out(planned(tmp_path / "out", "a"), tmp_path / "store", tmp_path / "out")
    assert stage.waited("told") == str(int(signal.SIGINT))
    assert int(stage.waited("waits").split()[1]) != os.getpgid(0), "else a terminal's Ctrl-C would reach it twice"
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


ALONE = """
import json, sys
from pathlib import Path
from cpu3d.compare import process
from cpu3d.compare.runner import PlannedRun, carry_out
process.PROGRAM, out = tuple(json.loads(sys.argv[1])), Path(sys.argv[2])
carry_out([PlannedRun("a", 0, out / "runs" / "a", ("--steps", "4", "--seed", "0"))], out / "store", out)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="parents are watched on Linux alone")
def test_a_training_saves_and_ends_when_its_comparison_is_killed(stage, tmp_path):
    stage.tell("cut")
    command = [sys.executable, "-c", ALONE, json.dumps(stage.program), str(tmp_path / "out")]
    comparison = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    stage.waited("waits")
    comparison.kill()
    comparison.wait()
    told = set(stage.waited("told").split())  # once for each of the parent's threads
    assert told == {str(int(signal.SIGTERM))}

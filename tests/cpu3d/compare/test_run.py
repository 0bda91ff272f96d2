import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from cpu3d.compare import run as compare_run
from cpu3d.compare.plan import timed_options
from cpu3d.compare.run import (
    MEAN,
    TIMED_FOLDER,
    Evaluation,
    PlannedRun,
    Point,
    RunDivergedError,
    RunFailedError,
    carry_out,
    check_options,
    computing_seconds,
    forget_timing,
    is_evaluated,
    is_trained,
    read_run,
    step_seconds,
)
from cpu3d.data.region import grid_size
from cpu3d.errors import InputError
from cpu3d.inference.evaluate import scores_path
from cpu3d.training.checkpoint_history import checkpoints
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
    (failed,) = carry_out(planned(out, "a", "b"), tmp_path / "store", out, Evaluation(), keep_going=True)
    assert str(failed) == "a, seed 0, is left out: train ended with exit code 1."
    assert stage.calls() == ["train a", "train b", "evaluate b"]
    with pytest.raises(RunFailedError, match="No space left"):
        carry_out(planned(out, "a"), tmp_path / "store", out, Evaluation(), keep_going=True)


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
from cpu3d.compare import run
from cpu3d.compare.run import PlannedRun, carry_out
run.PROGRAM, out = tuple(json.loads(sys.argv[1])), Path(sys.argv[2])
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


@pytest.mark.parametrize(
    ("settings", "options", "unlike"),
    [
        ({"learning_rate": 0.5}, (), ["learning_rate"]),
        ({"optimizer": "sgd", "warmup_steps": 2}, ("--warmup-steps", "2"), ["optimizer"]),
        ({"mode": "patch", "grid": (8, 8, 8)}, ("--mode", "patch", "--patch", "8", "8", "8"), []),
        ({"mode": "patch", "grid": (8, 8, 8)}, ("--mode", "patch", "--patch", "8", "8", "4"), ["grid"]),
        ({"save_minutes": 1.0, "read_mode": "ram", "store": "/elsewhere"}, (), []),
        ({}, ("--filters", "3", "--no-flip"), ["unet.filters", "augment.flip"]),
        ({}, ("--dtype", "bfloat16", "--device", "cpu"), ["unet.dtype"]),
        ({}, ("--dtype", "auto"), []),
        ({}, ("--steps", "5"), ["steps"]),
    ],
)
def test_options_are_held_against_what_a_run_is(make_run, settings, options, unlike):
    run = PlannedRun("a", 0, make_run("a", scored=False, **settings), (*OPTIONS, *options))
    try:
        check_options(run)
        named = []
    except InputError as error:
        named = [problem.split(" got ")[1].split()[0] for problem in error.problems]
    assert set(unlike) <= set(named)
    assert bool(unlike) == bool(named)


def test_younger_weights_and_other_tolerances_are_scored_again(make_run, tmp_path):
    folder = make_run("a")
    assert is_evaluated(folder, Evaluation())
    assert not is_evaluated(folder, Evaluation(tolerance_mm=2))
    assert not is_evaluated(folder, Evaluation("val"))
    assert not is_evaluated(folder, Evaluation(), tmp_path), "none are there"
    later = time.time() + 60
    os.utime(folder / "checkpoints" / "best.npz", (later, later))
    assert not is_evaluated(folder, Evaluation())


def test_scores_of_another_way_to_predict_do_not_count(make_run):
    """A whole-volume run scored by hand with a window is scored again as it was trained."""
    folder = make_run("a")
    path = folder / "evaluation" / "scores.json"
    path.write_text(path.read_text().replace('"flips": false', '"flips": true'))
    assert not is_evaluated(folder, Evaluation())


PLAN = [
    {"name": "whole", "options": ["--filters", "2"], "steps": None, "warmup_steps": 10},
    {"name": "patch", "options": ["--mode", "patch", "--patch", "8", "8", "8"], "steps": None, "warmup_steps": 0},
]

THERE_AND_BACK = ["train whole-timed0", "train patch-timed0", "train patch-timed1", "train whole-timed1"]


def test_a_step_is_what_the_later_half_computes():
    log = [{"event": "start"}, *({"event": "step", "step_s": s, "wait_s": w} for s, w in [(9, 1), (8, 0), (3, 1)])]
    assert computing_seconds(log) == [8, 2]
    assert computing_seconds([{"event": "step", "step_s": 2.0}]) == [2.0]


def test_what_was_cut_off_or_half_deleted_is_timed_anew(stage, tmp_path):
    step_seconds(timed_options(PLAN), tmp_path / "store", tmp_path)
    stage.calls()
    for path in ("whole-timed0/log.jsonl", "patch-timed1/config.json"):
        path = tmp_path / TIMED_FOLDER / path
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))
    for path in checkpoints(tmp_path / TIMED_FOLDER / "patch-timed0"):
        path.unlink()
    assert step_seconds(timed_options(PLAN), tmp_path / "store", tmp_path) == {"whole": 2.0, "patch": 0.5}
    assert stage.calls() == THERE_AND_BACK[:3]
    forget_timing(tmp_path)
    assert not (tmp_path / TIMED_FOLDER).exists()


SAYS = "import json, os, sys; json.dump(dict(os.environ), open(os.environ['SAY_TO'], 'w'))"


def test_what_is_left_over_from_a_cluster_is_not_told_to_a_run(tmp_path, monkeypatch):
    """A run under it would wait for workers that nobody has started."""
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}')
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("SAY_TO", str(tmp_path / "environ"))
    monkeypatch.setattr(compare_run, "PROGRAM", (sys.executable, "-c", SAYS))
    carry_out(planned(tmp_path / "out", "a"), tmp_path / "store", tmp_path / "out")
    environ = json.loads((tmp_path / "environ").read_text())
    assert environ["SAY_TO"]
    assert not {"TF_CONFIG", "HOROVOD_RANK"} & set(environ)


PATCH = {"mode": "patch", "grid": (8, 8, 8), "patches_per_case": 8, "batch": 2}


def test_costs_are_those_of_the_log(make_run, tiny_store):
    costs = read_run("patch", 0, make_run("patch", **PATCH), "test", store=tiny_store).costs
    assert (costs.steps, costs.voxels) == (4, 4 * 2 * 512)
    assert (costs.step_s, costs.steps_s) == (1.5, 9 + 3 * 1.5)
    assert grid_size(tiny_store, extent="brain", multiple=16) == (16, 16, 16)
    assert costs.case_train_s == 1.5 / (2 * 512) * 16**3
    assert (costs.train_s, costs.validation_s) == (36, 1.0)
    assert costs.core_hours == 36 * 2 / 3600
    assert costs.train_peak_bytes == 3 * 2**30
    assert costs.allocator_peak_bytes is None
    assert costs.predict_peak_bytes > 0


def test_patches_without_a_store_do_not_tell_what_a_case_costs(make_run):
    assert read_run("patch", 0, make_run("patch", **PATCH), "test").costs.case_train_s is None
    assert read_run("whole", 0, make_run("whole"), "test").costs.case_train_s == 1.5


def test_the_memory_of_a_card_is_not_the_host_s(make_run):
    end = {"allocator_peak_bytes": 5}
    on_card = read_run("card", 0, make_run("card", device="gpu:0", end=end), "test").costs
    on_cpu = read_run("cpu", 0, make_run("cpu", end=end), "test").costs
    assert (on_card.card_peak_bytes, on_card.allocator_peak_bytes) == (5, None)
    assert (on_cpu.card_peak_bytes, on_cpu.allocator_peak_bytes) == (None, 5)


def test_the_end_of_an_earlier_attempt_is_not_the_end(make_run):
    folder = make_run("whole")
    with (folder / "log.jsonl").open("a") as file:
        file.write(json.dumps({"event": "start", "step": 4}) + "\n")
        file.write(json.dumps({"event": "step", "step": 5, "step_s": 1.5}) + "\n")
    costs = read_run("whole", 0, folder, "test").costs
    assert (costs.steps, costs.train_s, costs.core_hours) == (5, None, None)
    assert costs.train_peak_bytes == 3 * 2**30


def test_the_curve_is_over_voxels_and_seconds_of_steps(make_run):
    found = read_run("whole", 0, make_run("whole"), "test")
    assert found.curve == (Point(2 * 16**3, 10.5, 0.7), Point(4 * 16**3, 13.5, 0.7))


def test_scores_are_by_case_and_the_mean_of_the_regions_is_among_them(make_run):
    scores = read_run("off", 0, make_run("off", shift=1), "test").scores
    assert list(scores) == ["WT", "TC", "ET", MEAN]
    for case in ("e", "f"):
        assert scores["ET"]["dice"][case] == 0, "a single voxel that is off by one"
        each = [scores[region]["dice"][case] for region in ("WT", "TC", "ET")]
        assert scores[MEAN]["dice"][case] == pytest.approx(sum(each) / 3)


def test_missing_and_damaged_scores_are_named(make_run):
    folder = make_run("whole", scored=False)
    with pytest.raises(InputError, match=r"scores\.json, found none; run `evaluate`"):
        read_run("whole", 0, folder, "test")
    scores_path(folder).parent.mkdir()
    scores_path(folder).write_text('{"cases": [{}], "regions": {"WT": []}}')
    with pytest.raises(InputError, match="must be"):
        read_run("whole", 0, folder, "test")

"""What `status` says of run folders in every state, made of a config, a log and heartbeats."""

import dataclasses
import io
import json
import os
import re
import shutil
import time

import pytest
from rich.console import Console

from cpu3d.__main__ import main
from cpu3d.data.files.arrays import file_sha256
from cpu3d.inference.postprocessing.rules import PostProcessing
from cpu3d.inference.postprocessing.run_rules import FILE, PostprocessingRules
from cpu3d.plan import PLAN_SCHEMA
from cpu3d.report.status import describe, run_status, set_status
from cpu3d.run.checkpoint import weights_file, write_best
from cpu3d.run.config_json import save_config
from cpu3d.run.folds import Folds, fold_folder, save_folds
from cpu3d.run.heartbeat import heartbeat_path, write_heartbeat
from cpu3d.run.log import append_event
from cpu3d.run.rules import SCHEMA
from cpu3d.settings import RunConfig
from cpu3d.util.atomic import write_json
from tests.cpu3d.conftest import make_store
from tests.cpu3d.training.beats import beat

STEP = {
    "event": "step",
    "epoch": 0,
    "dice": {"WT": 0.5, "TC": 0.25},
    "step_s": 2.0,
    "wait_s": 0.1,
    "rss_bytes": 10**9,
}


@pytest.fixture
def run(tmp_path):
    """120 of 4000 steps of 2 s, a validation of 120 s after the 100th and a checkpoint of 120 s."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    save_config(RunConfig(steps=4000), folder)
    append_event(folder, {"event": "start", "step": 0, "time": "2026-11-20T10:39:38+00:00"})
    for step in range(1, 121):
        append_event(folder, {**STEP, "step": step, "loss": step / 100})
        if step == 100:
            scores = {"dice": {"WT": 0.9, "TC": 0.7}, "mean_dice": 0.8, "best": True, "cases": 2}
            append_event(
                folder,
                {"event": "validation", "step": step, "loss": 0.3, "seconds": 120.0, **scores},
            )
            append_event(
                folder, {"event": "checkpoint", "step": step, "seconds": 120.0, "bytes": 5}
            )
    checkpoint = folder / "checkpoints" / "step-00000100.npz"
    checkpoint.write_bytes(b"12345")
    os.utime(checkpoint, (time.time() - 240, time.time() - 240))
    write_best(folder, {}, {"best": 0.85})  # the log may be cut back to before it
    decision = PostprocessingRules(
        weights_sha256=(file_sha256(weights_file(folder, "best")),),
        split_hash=RunConfig().split_hash,
        cases=0,
        chosen=PostProcessing(off="too few cases"),
        before={},
        after={},
        cases_with={},
    )
    write_json(folder / FILE, {"schema": SCHEMA, **dataclasses.asdict(decision)})
    return folder


def printed(folder, width=200):
    """What is printed of a run, each stretch of blanks as one."""
    console = Console(width=width, file=io.StringIO())
    console.print(describe(run_status(folder)))
    return " ".join(console.file.getvalue().split())


def beat_written(run, written_s_ago, **changes):
    """A heartbeat in its file, which was written so many seconds ago."""
    write_heartbeat(run, beat(**changes))
    written = time.time() - written_s_ago
    os.utime(heartbeat_path(run, changes.get("rank", 0)), (written, written))


def write_silent(run, rank=0, **changes):
    beat_written(run, 500, rank=rank, beat=time.time() - 500, **changes)


def test_a_run_that_goes_on(run, capsys):
    write_heartbeat(run, beat())
    status = run_status(run)
    assert (status.state, status.is_fine) == ("running", True)
    assert (status.step, status.steps, status.step_s) == (120, 4000, 2.0)
    # 240 s beside 120 steps: 2 s more for each of the 3880 that are left.
    assert status.seconds_left == pytest.approx(3880 * 4)
    assert status.loss == pytest.approx(0.955), "of the last 50 steps"
    assert (status.best, status.dice) == (0.85, {"WT": 0.5, "TC": 0.25})
    assert (status.checkpoint["step"], status.checkpoint["size_bytes"]) == (100, 5)
    text = printed(run)
    for part in (
        "step: 120 of 4,000.*3.0%.* 2 s a step.* 4.31 h left",
        "validation after step 100: .*WT 0.900.* mean 0.800.* best 0.850",
        "running .* 7.00G 8.00G 9.00G 14.00G",
    ):
        assert re.search(part, text), text
    assert main(["status", "--run", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workers"][0]["heartbeat"]["phase"] == "computing"


AGAIN = "next: .*from step 100"


@pytest.mark.parametrize(
    ("changes", "state", "line"),
    [
        ({"phase": "starting"}, "starting", ""),
        ({"stop": "memory must keep 1 GiB"}, "stopping", "worker 0: memory must keep 1 GiB"),
        ({"exit_code": 0, "reason": "finished"}, "finished", "next: `evaluate --run"),
        ({"exit_code": 1, "reason": "OSError: full"}, "failed", f"OSError: full.*{AGAIN}"),
        ({"exit_code": 4, "reason": "loss must be"}, "diverged", "--learning-rate 0.01"),
        ({"exit_code": 6, "reason": "worker 1 is lost"}, "broken off", f"worker 1.*{AGAIN}"),
        ({"exit_code": 143, "reason": "saved"}, "interrupted", f"saved.*{AGAIN}"),
    ],
)
def test_every_state_has_its_word_its_exit_code_and_its_advice(run, changes, state, line):
    write_heartbeat(run, beat(**changes))
    text = printed(run)
    assert f"run: {state}" in text
    assert re.search(line, text), text
    fine = state in ("starting", "stopping", "finished")
    assert main(["status", "--run", str(run)]) == (0 if fine else 1)


@pytest.mark.parametrize(
    ("beat_s_ago", "written_s_ago", "changes", "state"),
    [
        (1, 1, {"place": "elsewhere", "process_start": 1}, "running"),
        (500, 500, {"stop": "low"}, "silent"),
        # Its clock is five minutes slow, or fast; the file's tells.
        (300, 3, {}, "running"),
        (-300, 3, {}, "running"),
        (500, 500, {"exit_code": 0}, "finished"),
        (1, 1, {"process_start": 1}, "killed"),  # a later process has its pid
    ],
)
def test_a_worker_is_alive_while_its_beat_is_young(run, beat_s_ago, written_s_ago, changes, state):
    beat_written(run, written_s_ago, beat=time.time() - beat_s_ago, **changes)
    assert run_status(run).state == state
    if state == "silent":  # it holds no memory
        assert re.search("silent computing.* - 8.00G 9.00G - .*node-17", printed(run))


@pytest.mark.parametrize(
    ("changes", "begin", "left_s"),
    [
        ({"process_start": 1}, 100, 3900 * 4),  # killed after its checkpoint
        ({"exit_code": 143, "reason": "saved"}, 100, 3900 * 4),
        ({"exit_code": 0, "reason": "finished"}, None, None),
    ],
)
def test_what_is_left_of_a_run_that_ended_early_is_left_from_its_checkpoint(
    run, changes, begin, left_s
):
    write_heartbeat(run, beat(**changes))
    status = run_status(run)
    assert status.steps_left == (None if begin is None else 4000 - begin)
    assert status.seconds_left == (None if left_s is None else pytest.approx(left_s))


@pytest.mark.parametrize(
    ("beat_step", "saved", "step"), [(118, 100, 120), (121, 100, 121), (118, 130, 130)]
)
def test_one_step_is_printed_that_of_the_newest_file(run, beat_step, saved, step):
    (run / "checkpoints" / f"step-{saved:08}.npz").touch()
    write_heartbeat(run, beat(step=beat_step))
    assert run_status(run).step == step


def test_the_worst_worker_decides_the_state_and_causes_come_first(run):
    write_heartbeat(run, beat(workers=3, exit_code=6, reason="worker 1 is lost"))
    write_silent(run, 1, workers=3)
    write_heartbeat(run, beat(rank=2, workers=3))
    status = run_status(run)
    assert (status.state, status.is_fine) == ("silent", False)
    assert [worker.state for worker in status.workers] == ["broken off", "silent", "running"]
    assert "why: worker 1: no heartbeat" in printed(run)
    write_heartbeat(run, beat(workers=1, started=time.time() - 100))
    write_silent(run, 1, workers=2, started=time.time() - 9000)
    assert run_status(run).state == "running", (
        "files of more workers than the latest attempt has are old"
    )


@pytest.mark.parametrize(
    ("steps", "changes", "state"),
    [
        (120, {"exit_code": 143}, "finished"),
        (120, {}, "running"),
        (120, {"exit_code": 2, "reason": "settings must"}, "failed"),
        (4000, {"exit_code": 143}, "interrupted"),
    ],
)
def test_a_finished_run_stays_finished_when_one_who_begins_it_again_is_stopped(
    run, steps, changes, state
):
    save_config(RunConfig(steps=steps), run)
    append_event(run, {"event": "end", "step": 120, "reason": "finished"})
    write_heartbeat(run, beat(step=0, steps=0, **changes))
    assert run_status(run).state == state


def test_what_is_damaged_or_missing_is_named(run, tmp_path, capsys):
    assert (run_status(run).state, run_status(run).is_fine) == ("unknown", False)
    write_heartbeat(run, beat(workers=2, started=time.time() - 10))
    assert [worker.state for worker in run_status(run).workers] == ["running", "starting"]
    write_heartbeat(run, beat(workers=2))
    assert [worker.state for worker in run_status(run).workers] == ["running", "unknown"]
    heartbeat_path(run, 0).write_text('{"schema": 1, "ra')
    with (run / "log.jsonl").open("a") as file:
        file.write('\x00\x00\n[1]\n{"event": "step", "step": 12')
    text = printed(run)
    for part in ("run: unknown", "must be a whole heartbeat", "step: 120 of 4,000"):
        assert part in text
    assert main(["status", "--run", str(tmp_path / "nothing")]) == 2
    assert "must hold a config" in capsys.readouterr().err


@pytest.fixture
def done(run, tmp_path):
    """The run with all its steps done, on a store that is there."""
    store = make_store(tmp_path / "store", tmp_path / "source")
    split_hash = store.manifest.split_hash
    save_config(RunConfig(steps=120, store=str(store.folder), split_hash=split_hash), run)
    append_event(run, {"event": "end", "step": 120, "reason": "finished"})
    change_decision(run, split_hash=split_hash)
    write_json(run / "plan.json", {"schema": PLAN_SCHEMA, "schedule": {"decided": 0}})
    return run


def change_decision(run, **changes):
    content = json.loads((run / FILE).read_text())
    (run / FILE).write_text(json.dumps({**content, **changes}))


FAILED = {"exit_code": 0, "reason": "post-processing could not be decided, disk full"}


@pytest.mark.parametrize("stopped", [{}, {"exit_code": 130}, FAILED])
@pytest.mark.parametrize("lack", ["decision", "weights"])
def test_a_run_whose_steps_are_done_has_not_finished_before_its_post_processing_is_decided(
    done, stopped, lack
):
    if stopped:
        write_heartbeat(done, beat(step=120, steps=120, **stopped))
    assert run_status(done).state == "finished"
    if lack == "decision":
        (done / FILE).unlink()
    else:
        write_best(done, {}, {"best": 0.9})  # others than it was decided with
    status = run_status(done)
    assert (status.state, status.is_fine) == ("undecided", False)
    assert ("disk full" in printed(done)) == (stopped == FAILED)


def test_a_run_that_has_just_begun(run):
    shutil.rmtree(run / "checkpoints")
    (run / "log.jsonl").unlink()
    write_heartbeat(run, beat(phase="starting", step=0, steps=0, own_bytes=None, free_bytes=None))
    text = printed(run)
    assert re.search("run: starting.*step: 0 of 4,000.* checkpoint: none", text)
    (run / "config.json").unlink()
    append_event(run, {"event": "start", "step": 0, "steps": 60})
    assert run_status(run).steps == 60


def test_a_run_whose_log_ends_with_its_divergence_has_diverged_whatever_became_of_its_process(run):
    append_event(run, {"event": "diverged", "step": 120, "reason": "weights must be finite"})
    assert run_status(run).state == "diverged"
    write_silent(run)
    text = printed(run)
    for part in ("run: diverged", "weights must be finite", "--learning-rate 0.01"):
        assert re.search(part, text), text


# --- Folds ---


@pytest.fixture
def two_folds(tmp_path):
    """A folder of two folds of 1000 steps, of which the first has taken 250 of 2 s, and the second
    has not begun: it is taken to need what was predicted, 1155 s."""
    folder = tmp_path / "folds"
    run = fold_folder(folder, "1/2")
    run.mkdir(parents=True)
    save_folds(folder, Folds(2, "store", {}, fold_s=1155.0))
    save_config(RunConfig(steps=1000, fold="1/2"), run)
    append_event(run, {"event": "start", "step": 0})
    for step in range(1, 251):
        append_event(run, {**STEP, "step": step, "loss": 1.0})
    return folder


@pytest.mark.parametrize(
    ("changes", "left_s"),
    [
        ({"step": 251, "steps": 1000}, 1498),  # of which the log has not heard yet
        # Of one that was killed before its first checkpoint nothing is done.
        ({"step": 250, "steps": 1000, "process_start": 1}, 2000),
    ],
)
def test_what_is_left_of_folds_is_that_of_each_until_it_is_scored(two_folds, changes, left_s):
    write_heartbeat(two_folds, beat(phase="training fold 1/2"))
    write_heartbeat(fold_folder(two_folds, "1/2"), beat(**changes))
    status = set_status(two_folds)
    assert [fold.seconds_left for fold in status.runs] == [left_s, 1155]
    assert status.runs[1].state == "waiting"
    assert (status.phase, status.is_fine) == ("training fold 1/2", True)
    write_heartbeat(two_folds, beat(process_start=1))
    assert set_status(two_folds).state == "killed"
    assert main(["status", "--run", str(two_folds)]) == 1


def test_the_reasons_of_the_plan_and_a_region_that_no_validation_case_has_are_printed(run):
    reasons = {"policy": "policy lean: why"}
    write_json(run / "plan.json", {"schema": PLAN_SCHEMA, "reasons": reasons})
    scores = {"dice": {"WT": 0.9, "TC": 0.0}, "mean_dice": 0.9, "left_out_of_mean": ["TC"]}
    append_event(run, {"event": "validation", "step": 120, "best": True, "cases": 2, **scores})
    text = printed(run)
    assert "plan: policy lean: why" in text
    assert re.search(r"validation after step 120: .*TC 0.000 +\(no case has TC\), mean 0.900", text)

"""What `status` says of run folders in every state, made of a config, a log and heartbeats."""

import dataclasses
import io
import json
import os
import re
import shutil
import time
from datetime import datetime, timedelta

import pytest
from rich.console import Console

from cpu3d.__main__ import main
from cpu3d.data.files.arrays import file_sha256
from cpu3d.inference.postprocessing.rules import PostProcessing
from cpu3d.inference.postprocessing.run_rules import FILE, OPEN, PostprocessingRules
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
from memory_estimator.common.units import format_seconds
from tests.cpu3d.training.beats import beat

STEP = {"event": "step", "dice": {"WT": 0.5, "TC": 0.25}, "step_s": 2.0}


@pytest.fixture
def run(tmp_path):
    """120 of 4000 steps, a validation of 120 s after the 100th and a checkpoint of 120 s."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    save_config(RunConfig(steps=4000), folder)
    events = [{"event": "start", "step": 0}]
    for step in range(1, 121):  # of 2 s, as the last 50, or 3
        of_step = {"step": step, "loss": step / 100, "step_s": 2.0 + (step < 70)}
        events.append({**STEP, **of_step, "dice": {"WT": 0.5 + (step < 71), "TC": 0.25}})
    scores = {"dice": {"WT": 0.9, "TC": 0.7}, "mean_dice": 0.8}
    events[101:101] = [
        {"event": "validation", "step": 100, "seconds": 120.0, **scores},
        {"event": "checkpoint", "step": 100, "seconds": 120.0},
    ]
    for event in events:
        append_event(folder, event)
    checkpoint = folder / "checkpoints" / "step-00000100.npz"
    checkpoint.write_bytes(b"12345")
    os.utime(checkpoint, (time.time() - 10_900,) * 2)
    write_best(folder, {}, {"best": 0.85})  # the log may be cut back to before it
    return folder


def printed(folder):
    """What is printed of a run, each stretch of blanks as one."""
    console = Console(width=200, file=io.StringIO())
    console.print(describe(run_status(folder)))
    return " ".join(console.file.getvalue().split())


def write_silent(run, rank=0, **changes):
    """A heartbeat of 500 s ago."""
    then = time.time() - 500
    write_heartbeat(run, beat(rank=rank, beat=then, **changes))
    os.utime(heartbeat_path(run, rank), (then, then))


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
        "step: 120 of 4,000.*3.0%.* 2 s a step recent steps: loss 0.955, Dice WT 0.500 TC 0.250 ",
        f"left: about 4.31 h, until {datetime.now() + timedelta(seconds=3880 * 4):%a %d %b %H}:",
        "validation after step 100: .*WT 0.900.* mean 0.800.* best 0.850",
        r"checkpoint: step 100, 3\.0\d h ago, 0 KiB",
        "running computing, 2 s 7.00G 8.00G 9.00G 14.00G",
    ):
        assert re.search(part, text), text
    assert main(["status", "--run", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workers"][0]["heartbeat"]["phase"] == "computing"


AGAIN = "next: .*from step 100"


@pytest.mark.parametrize(
    ("changes", "state", "line"),
    [
        ({"phase": "starting"}, "starting", ""),
        ({"stop": "memory must keep 1 GiB"}, "stopping", "note: worker 0: memory must keep 1 GiB"),
        ({"place": "elsewhere", "process_start": 1}, "running", "heard .* ago from node-17"),
        ({"process_start": 1}, "killed", f"why: .*dmesg.* about 4.33 h {AGAIN}"),
        ({"exit_code": 0, "reason": "finished"}, "finished", "next: `evaluate --run"),
        ({"exit_code": 1, "reason": "OSError: full"}, "failed", f"OSError: full.*{AGAIN}"),
        ({"exit_code": 4, "reason": "loss must be"}, "diverged", "--learning-rate 0.01"),
        ({"exit_code": 6, "reason": "worker 1 is lost"}, "broken off", f"worker 1.*{AGAIN}"),
        ({"exit_code": 143, "reason": "saved"}, "interrupted", f"saved.*{AGAIN}"),
    ],
)
def test_every_state_has_its_word_its_exit_code_and_its_advice(run, changes, state, line):
    if "exit_code" in changes:  # one that has noted its end is not silent
        write_silent(run, **changes)
    else:
        write_heartbeat(run, beat(**changes))
    text = printed(run)
    assert f"run: {state}" in text
    assert ("exit_code" not in changes) or f"ended, code {changes['exit_code']} - 8.00G" in text
    assert re.search(line, text), text
    fine = state in ("starting", "stopping", "running", "finished")
    assert ("left: 3,900 of 4,000 steps, from step 100" in text) is not fine
    assert main(["status", "--run", str(run)]) == (0 if fine else 1)


def test_a_silent_worker_is_looked_for_on_its_host_and_holds_no_memory(run):
    write_silent(run, stop="low")
    line = "run: silent.*silent computing.* - 8.00G 9.00G - .*node-17.*when its process has ended"
    assert re.search(line, printed(run))


@pytest.mark.parametrize(
    ("beat_step", "saved", "step"), [(118, 100, 120), (121, 100, 121), (118, 130, 130)]
)
def test_one_step_is_printed_that_of_the_newest_file(run, beat_step, saved, step):
    (run / "checkpoints" / f"step-{saved:08}.npz").touch()
    write_heartbeat(run, beat(step=beat_step, steps=500))
    status = run_status(run)
    assert (status.step, status.steps) == (step, 500)


def test_the_worst_worker_decides_the_state_and_causes_come_first(run):
    write_heartbeat(run, beat(workers=3, exit_code=6, reason="worker 1 is lost"))
    write_silent(run, 1, workers=3)
    write_heartbeat(run, beat(rank=2, workers=3))
    status = run_status(run)
    assert status.state == "silent"
    assert [worker.state for worker in status.workers] == ["broken off", "silent", "running"]
    (run / "logs").mkdir()
    (run / "logs/worker-1.log").touch()
    assert re.search("why: worker 1: no heartbeat.*last lines are in .*worker-1.log", printed(run))
    for rank, code, state in ((1, 143, "interrupted"), (2, 1, "failed")):
        write_heartbeat(run, beat(rank=rank, workers=3, exit_code=code))
        assert run_status(run).state == state
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
    assert run_status(run).state == "unknown"
    for started_s_ago, second in ((10, "starting"), (500, "unknown")):
        write_heartbeat(run, beat(workers=2, started=time.time() - started_s_ago))
        assert [worker.state for worker in run_status(run).workers] == ["running", second]
    heartbeat_path(run, 0).write_text('{"schema": 1, "ra')
    with (run / "log.jsonl").open("a") as file:
        file.write('\x00\x00\n[1]\n{"event": "step", "step": 12')
    text = printed(run)
    for part in ("run: unknown", "must be complete JSON", "step: 120 of 4,000"):
        assert part in text
    assert main(["status", "--run", str(tmp_path / "nothing")]) == 2
    assert "must hold a config" in capsys.readouterr().err


FAILED = {"exit_code": 0, "reason": "post-processing could not be decided, disk full"}


@pytest.mark.parametrize("stopped", [{}, {"exit_code": 130}, FAILED])
def test_a_run_whose_steps_are_done_has_not_finished_before_its_post_processing_is_decided(
    run, tiny_store, stopped
):
    split_hash = tiny_store.manifest.split_hash
    save_config(RunConfig(steps=120, store=str(tiny_store.folder), split_hash=split_hash), run)
    append_event(run, {"event": "end", "step": 120, "reason": "finished"})
    if stopped:
        write_heartbeat(run, beat(step=120, steps=120, **stopped))
    status = run_status(run)
    assert (status.state, status.is_fine, status.steps_left) == ("undecided", False, None)
    assert status.detail == (f"{OPEN}: {FAILED['reason']}" if stopped == FAILED else OPEN)
    weights = (file_sha256(weights_file(run, "best")),)
    off = PostProcessing(off="too few cases")
    decision = PostprocessingRules(off, {}, {}, {}, weights, split_hash, 0)
    write_json(run / FILE, {"schema": SCHEMA, **dataclasses.asdict(decision)})
    assert run_status(run).state == "finished"


def test_a_run_that_has_just_begun(run):
    shutil.rmtree(run / "checkpoints")
    (run / "log.jsonl").unlink()
    write_heartbeat(run, beat(phase="starting", step=0, steps=0, own_bytes=None, free_bytes=None))
    text = printed(run)
    assert re.search("run: starting.*step: 0 of 4,000.* checkpoint: none", text)
    (run / "config.json").unlink()
    for steps in (50, 60):
        append_event(run, {"event": "start", "step": 0, "steps": steps})
    assert run_status(run).steps == 60


def test_a_run_whose_log_ends_with_its_divergence_has_diverged_whatever_became_of_its_process(run):
    append_event(run, {"event": "diverged", "step": 120, "reason": "weights must be finite"})
    assert run_status(run).state == "diverged"
    write_silent(run)
    text = printed(run)
    for part in ("run: diverged", "weights must be finite", "--learning-rate 0.01"):
        assert re.search(part, text), text


# --- Folds ---


@pytest.mark.parametrize(
    ("changes", "left_s", "advice"),
    [
        ({"step": 251, "steps": 1000}, 1498, "the same command continues"),
        # Of one that was killed before its first checkpoint nothing is done.
        ({"step": 250, "steps": 1000, "process_start": 1}, 2000, "the same command starts"),
    ],
)
def test_what_is_left_of_folds_is_that_of_each_until_it_is_scored(
    tmp_path, capsys, changes, left_s, advice
):
    """The first has taken 250 of 1000 steps of 2 s, the second has not begun: it is taken to need
    what was predicted, or what one that has finished took."""
    run = fold_folder(tmp_path, "1/2")
    run.mkdir()
    save_folds(tmp_path, Folds(2, "store", {}, fold_s=1155.0))
    save_config(RunConfig(steps=1000, fold="1/2"), run)
    append_event(run, {"event": "start", "step": 0})
    for step in range(1, 251):
        append_event(run, {**STEP, "step": step, "loss": 1.0})
    write_heartbeat(run, beat(**changes))
    write_heartbeat(tmp_path, beat(phase="training fold 1/2"))
    status = set_status(tmp_path)
    assert [fold.seconds_left for fold in status.runs] == [left_s, 1155]
    assert status.seconds_left == left_s + 1155
    assert (status.phase, status.is_fine) == ("training fold 1/2", True)
    write_heartbeat(tmp_path, beat(process_start=1))
    assert set_status(tmp_path).state == "killed"
    assert main(["status", "--run", str(tmp_path)]) == 1
    rows = (
        rf"1/2 \w+ {changes['step']} of 1,000 {format_seconds(left_s)} - 2/2 waiting 0 19.2 min -"
    )
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(rows, text)
    assert "until" not in text
    for reason, usual_s in (("interrupted", 1155), ("finished", 510)):
        append_event(run, {"event": "end", "step": 250, "reason": reason, "seconds": 510.0})
        assert set_status(tmp_path).runs[1].seconds_left == usual_s
    shutil.copytree(run, fold_folder(tmp_path, "2/2"))
    append_event(fold_folder(tmp_path, "2/2"), {"event": "diverged", "step": 1, "reason": ""})
    assert set_status(tmp_path).advice.startswith(advice)
    write_silent(tmp_path)
    assert "when its process has ended" in set_status(tmp_path).advice


def test_the_reasons_of_the_plan_and_a_region_that_no_validation_case_has_are_printed(run):
    reasons = {"policy": "policy lean: why"}
    write_json(run / "plan.json", {"schema": PLAN_SCHEMA, "reasons": reasons})
    scores = {"dice": {"WT": 0.9, "TC": 0.0}, "mean_dice": 0.9, "left_out_of_mean": ["TC"]}
    append_event(run, {"event": "validation", "step": 120, **scores})
    text = printed(run)
    assert "plan: policy lean: why" in text
    assert re.search(r"validation after step 120: .*TC 0.000 +\(no case has TC\), mean 0.900", text)

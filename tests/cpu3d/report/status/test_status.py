"""What `status` says of run folders in every state, made of a config, a log and heartbeats."""

import io
import json
import os
import shutil
import time

import pytest
from rich.console import Console

from cpu3d.__main__ import main
from cpu3d.config import RunConfig, save_config
from cpu3d.errors import InputError
from cpu3d.report.status import command
from cpu3d.report.status.description import describe
from cpu3d.report.status.run_status import run_status
from cpu3d.training.heartbeat import heartbeat_path, write_heartbeat
from cpu3d.training.run_log import append_event, read_events, recent_events
from tests.cpu3d.training.beats import beat

STEP = {"event": "step", "epoch": 0, "dice": {"WT": 0.5, "TC": 0.25}, "step_s": 2.0, "wait_s": 0.1, "rss_bytes": 10**9}


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
            append_event(folder, {"event": "validation", "step": step, "loss": 0.3, "seconds": 120.0, **scores})
            append_event(folder, {"event": "checkpoint", "step": step, "seconds": 120.0, "bytes": 5})
    checkpoint = folder / "checkpoints" / "step-00000100.npz"
    checkpoint.write_bytes(b"12345")
    os.utime(checkpoint, (time.time() - 240, time.time() - 240))
    return folder


def said(folder, width=80):
    console = Console(width=width, file=io.StringIO())
    console.print(describe(run_status(folder)))
    return console.file.getvalue()


def words(folder):
    return " ".join(said(folder, 200).split())


def test_a_run_that_goes_on(run, capsys):
    write_heartbeat(run, beat())
    found = run_status(run)
    assert (found.state, found.is_fine, found.step, found.steps, found.step_s) == ("running", True, 120, 4000, 2.0)
    # 240 s beside 120 steps: 2 s more for each of the 3880 that are left.
    assert found.seconds_left == pytest.approx(3880 * 4)
    assert (found.recent_steps, found.loss) == (50, pytest.approx(0.955))
    assert (found.best, found.validation["step"]) == (0.8, 100)
    assert (found.checkpoint.step, found.checkpoint.size_bytes) == (100, 5)
    told = words(run)
    for part in (
        "run: running",
        "│ 0 │ running │ computing, 2 s │ 120 │ 7.00G │ 8.00G │ 9.00G │ 14.00G │",
        "step: 120 of 4,000 (3.0%), 2 s a step, about 4.31 h to go, until",
        "last 50 steps: loss 0.955, Dice WT 0.500 TC 0.250",
        "validation after step 100: Dice WT 0.900 TC 0.700, mean 0.800, the best so far",
        "checkpoint: step 100, 4 min ago, 0 KiB",
        "memory: 14.00 GiB free of this machine, 24.00 GiB",
    ):
        assert part in told, told
    assert "next:" not in told
    assert main(["status", "--run", str(run)]) == 0
    capsys.readouterr()
    assert main(["status", "--run", str(run), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["workers"][0]["heartbeat"]["phase"] == "computing"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_it_fits_the_terminal(run, width):
    for rank in range(4):
        phase = "waiting for data" if rank else "exchanging"
        write_heartbeat(run, beat(rank=rank, workers=4, phase=phase, phase_since=time.time() - 700, step=123456))
    lines = said(run, width).splitlines()
    assert max(map(len, lines)) <= width
    assert len([line for line in lines if "waiting for" in line]) == 3
    [head] = [number for number, line in enumerate(lines) if "worker" in line and "memory" in line]
    assert ("peak" in lines[head]) is (width >= 80)
    assert "│  7.00G │" in lines[head + 2]
    assert "│ 14.00G │" in lines[head + 2]


STATES = [
    ({}, "running", 0, ""),
    ({"process_start": 1}, "dead", 1, "next: the same command goes on from step 100"),
    ({"stalled": "the run must give a sign"}, "stalled", 1, "why: the run must give a sign"),
    ({"stop": "memory must keep 1 GiB"}, "stopping", 0, "note: memory must keep 1 GiB"),
    ({"exit_code": 0, "reason": "finished"}, "finished", 0, "next: `evaluate --run"),
    ({"exit_code": 5, "reason": "memory must keep"}, "out of memory", 1, "why: memory must keep"),
    ({"exit_code": 4, "reason": "loss must be"}, "diverged", 1, "with a lower --learning-rate"),
    ({"exit_code": 6, "reason": "worker 1 is lost"}, "broken off", 1, "why: worker 1 is lost"),
    ({"exit_code": 143, "reason": "saved after step 120"}, "interrupted", 1, "goes on from step 100"),
    ({"exit_code": 1, "reason": "OSError: full"}, "failed", 1, "why: OSError: full"),
]


@pytest.mark.parametrize(("changes", "state", "exit_code", "line"), STATES)
def test_every_state_has_its_word_its_exit_code_and_its_advice(run, changes, state, exit_code, line, capsys):
    write_heartbeat(run, beat(**changes))
    told = words(run)
    assert f"run: {state}" in told
    assert line in told
    assert main(["status", "--run", str(run)]) == exit_code
    assert ("to go, until" in told) is (state == "running")


def test_the_worst_worker_tells_the_state_and_what_others_suffer_from_comes_first(run):
    write_heartbeat(run, beat(workers=3, exit_code=6, reason="worker 1 is lost"))
    write_heartbeat(run, beat(rank=1, workers=3, process_start=1))
    write_heartbeat(run, beat(rank=2, workers=3))
    found = run_status(run)
    assert (found.state, found.is_fine) == ("dead", False)
    assert [worker.state for worker in found.workers] == ["broken off", "dead", "running"]
    told = words(run)
    assert told.index("why: worker 1: process") < told.index("why: worker 0: worker 1 is lost"), "the cause first"


DIFFER = "weights must be the same on all workers, got others on worker 1"


@pytest.mark.parametrize(
    ("exit_code", "reason", "why", "advice"),
    [
        (
            4,
            "loss and gradients must be finite, got nan",
            "finite, got nan",
            "another folder with a lower --learning-rate",
        ),
        (4, "weights must be finite, got others", "got others", "another folder with a lower --learning-rate"),
        (4, "answers must be finite, got nan", "finite, got nan", "the same command goes on from step 100"),
        (
            6,
            f"{DIFFER}: the same command continues from there",
            "worker 1",
            "take the host that is named out of the run; then",
        ),
        (143, "saved after step 3; the same command continues", "saved after step 3", "goes on from step 100"),
        (5, "stopped and saved, the same command continues", "stopped and saved", "goes on from step 100"),
        (6, "no sign. The same command goes on from the last checkpoint", "no sign", "goes on from step 100"),
        (1, "free some space, and the same command continues", "free some space", "goes on from step 100"),
    ],
)
def test_the_advice_follows_from_the_reason_and_is_given_once(run, exit_code, reason, why, advice):
    write_heartbeat(run, beat(exit_code=exit_code, reason=reason))
    told = words(run)
    assert f"{why} next: " in told
    assert advice in told
    assert told.count("same command") == ("learning-rate" not in advice)


@pytest.mark.parametrize(
    ("steps", "changes", "state"),
    [
        (120, {"process_start": 1}, "finished"),
        (120, {"exit_code": 143}, "finished"),
        (120, {}, "running"),
        (120, {"exit_code": 2, "reason": "settings must"}, "failed"),
        (4000, {"process_start": 1}, "dead"),
    ],
)
def test_a_finished_run_stays_finished_when_one_who_begins_it_again_is_killed(run, steps, changes, state):
    save_config(RunConfig(steps=steps), run)
    append_event(run, {"event": "end", "step": 120, "reason": "finished"})
    write_heartbeat(run, beat(step=0, steps=0, phase="computing", **changes))
    found = run_status(run)
    assert found.state == state
    assert main(["status", "--run", str(run)]) == (0 if state in ("finished", "running") else 1)
    append_event(run, {"event": "start", "step": 120})
    write_heartbeat(run, beat(process_start=1))
    assert run_status(run).state == "dead"


def test_a_dead_worker_holds_no_memory(run):
    write_heartbeat(run, beat(process_start=1))
    told = words(run)
    assert "│ 0 │ dead │ computing, 2 s │ 120 │ - │ 8.00G │ 9.00G │ - │" in told
    assert "free of" not in told


def test_a_peak_above_the_plan_is_said(run):
    write_heartbeat(run, beat(bound_bytes=7 * 2**30))
    assert "memory: worker 0 has held 1.00 GiB above the plan's upper bound, mapped files included" in words(run)


def test_the_log_of_the_worst_worker_is_named(run):
    (run / "logs").mkdir()
    (run / "logs" / "worker-1.log").write_text("killed")
    write_heartbeat(run, beat(workers=2))
    write_heartbeat(run, beat(rank=1, workers=2, process_start=1))
    assert f"its last words are in {run}/logs/worker-1.log" in words(run)


def test_files_of_more_workers_than_the_latest_attempt_has_are_old(run):
    now = time.time()
    write_heartbeat(run, beat(workers=1, started=now - 100))
    write_heartbeat(run, beat(rank=1, workers=2, started=now - 9000, process_start=1))
    assert run_status(run).state == "running"


def test_a_worker_whose_file_is_missing_is_starting_at_first_and_then_unknown(run):
    write_heartbeat(run, beat(workers=2, started=time.time() - 10))
    assert [worker.state for worker in run_status(run).workers] == ["running", "starting"]
    write_heartbeat(run, beat(workers=2))
    found = run_status(run)
    assert [worker.state for worker in found.workers] == ["running", "unknown"]
    assert f"{heartbeat_path(run, 1)} was never written" in words(run)


def test_damaged_files_are_told_and_the_rest_is_shown(run):
    write_heartbeat(run, beat())
    heartbeat_path(run, 0).write_text('{"schema": 1, "ra')
    with (run / "log.jsonl").open("a") as file:
        file.write('\x00\x00\n[1]\n{"event": "step", "step": 12')
    told = words(run)
    assert "run: unknown" in told
    assert "must be a whole heartbeat" in told
    assert "step: 120 of 4,000" in told


def test_a_run_from_before_there_were_heartbeats_is_told_by_its_log(run):
    assert run_status(run).state == "running"
    assert "note: there is no heartbeat; the last line of the log came" in words(run)
    os.utime(run / "log.jsonl", (time.time() - 1000,) * 2)
    found = run_status(run)
    assert (found.state, found.is_fine) == ("unknown", False)
    for reason, state in (("interrupted", "interrupted"), ("early stop", "finished")):
        append_event(run, {"event": "end", "step": 120, "reason": reason})
        assert run_status(run).state == state


def test_a_run_that_has_just_begun(run):
    shutil.rmtree(run / "checkpoints")
    (run / "log.jsonl").unlink()
    write_heartbeat(run, beat(phase="starting", step=0, steps=0, anonymous_bytes=None, free_bytes=None))
    told = words(run)
    assert "run: starting" in told
    assert "step: 0 of 4,000 (0.0%) checkpoint: none yet" in told
    (run / "config.json").unlink()
    assert run_status(run).steps is None


def test_the_steps_of_a_run_by_epochs_are_counted_in_its_store(run, phantom_store):
    save_config(RunConfig(store=str(phantom_store.folder), epochs=3, batch=2), run)
    assert run_status(run).steps == 6
    save_config(RunConfig(store=str(run / "moved"), epochs=3), run)
    assert run_status(run).steps is None
    assert "step: 120, 2 s a step" in words(run)


def test_a_checkpoint_of_earlier_versions_has_its_step_from_the_log(run):
    path = run / "checkpoints" / "step-00000100.npz"
    path.rename(path.with_name("last.npz"))
    assert run_status(run).checkpoint.step == 100


def test_what_is_no_run_is_refused(tmp_path, capsys):
    with pytest.raises(InputError, match="must hold a config"):
        run_status(tmp_path)
    assert main(["status", "--run", str(tmp_path / "nothing")]) == 2
    (tmp_path / "config.json").write_text('{"schema": 1, "st')
    assert main(["status", "--run", str(tmp_path)]) == 2
    assert "must be JSON" in capsys.readouterr().err


def test_watching_ends_with_the_run(run, monkeypatch, capsys):
    write_heartbeat(run, beat())
    sleeps = []

    def sleep(seconds):
        sleeps.append(seconds)
        if len(sleeps) == 3:
            write_heartbeat(run, beat(exit_code=5, reason="memory must keep"))

    monkeypatch.setattr(command.time, "sleep", sleep)
    assert main(["status", "--run", str(run), "--watch", "--every", "7"]) == 1
    assert sleeps == [7.0] * 3
    assert "out of memory" in capsys.readouterr().out


def test_recent_events_are_all_events_but_old_steps(run):
    everything, recent = read_events(run), recent_events(run, 30)
    assert recent == [event for event in everything if event["event"] != "step" or event["step"] > 90]
    assert recent_events(run / "nothing") == []

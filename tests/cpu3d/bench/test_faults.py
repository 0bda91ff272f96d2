"""`bench faults`: what an attempt is killed in is found, what is left is checked, and nothing slips."""

import math
import shutil

import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.bench import faults
from cpu3d.bench.faults import Ended, attempt, left_of_run, newest_event, run_differences
from cpu3d.training.checkpoint import checkpoints, write_best, write_next
from cpu3d.training.run_log import append_event, read_events
from cpu3d.util.records import read_records

START = {"event": "start", "step": 0, "engine": "none"}


def log(run, *events):
    (run / "checkpoints").mkdir(exist_ok=True, parents=True)
    for event in events:
        append_event(run, event)
    return run


def steps(*numbers):
    return [{"event": "step", "step": number, "loss": 1 / number} for number in numbers]


def test_what_an_earlier_attempt_logged_is_no_start_and_half_a_line_does_not_count(tmp_path):
    assert newest_event(tmp_path, []) == {}
    earlier = read_events(log(tmp_path, START, *steps(1, 2, 3)))
    assert newest_event(tmp_path, earlier) == {}
    log(tmp_path, {**START, "step": 2})
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"event": "step", ')
    assert newest_event(tmp_path, earlier)["step"] == 2


def test_a_process_is_killed_so_long_after_it_was_started_or_has_begun_and_only_then(tmp_path):
    killed = attempt(["doctor"], tmp_path / "run", 0.05)
    assert (killed.exit_code, killed.killed, killed.problems) == (-9, True, [])
    assert killed.at_s >= 0.05
    done = attempt(["--help"], tmp_path / "run", 0.0, is_starting=False)  # it never begins to train
    assert (done.exit_code, done.killed, done.begun_s) == (0, False, 0.0)


ARRAYS = {"model/000": np.arange(200, dtype=np.float32), "updates": np.array(0.0)}


def make_run(run, *, saved=(2, 4), arrays=ARRAYS, loss=0.1, seconds=7.0):
    log(run, START)
    for number in range(1, 5):
        event = {"event": "step", "step": number, "epoch": 0, "case_id": "a", "loss": loss / number}
        log(run, {**event, "dice": {"WT": 0.5}, "learning_rate": 0.1, "step_s": seconds})
        if number in saved:
            state = {"step": number, "best": 0.5, "trained_s": seconds}
            found = {"loss": 0.3, "dice": {"WT": 0.5}, "mean_dice": 0.5, "best": True, "cases": 1, "seconds": seconds}
            write_best(run, {"model/000": arrays["model/000"]}, state)
            log(run, {"event": "validation", "step": number, "epoch": 0, **found})
            write_next(run, number, arrays, state, keep=4)
            log(run, {"event": "checkpoint", "step": number, "seconds": seconds})
    return log(run, {"event": "end", "step": 4, "reason": "finished"})


def test_runs_that_differ_in_time_alone_are_the_same_and_a_bit_is_a_difference(tmp_path):
    one, other = make_run(tmp_path / "a"), make_run(tmp_path / "b", seconds=9.0)
    assert run_differences(one, other, keep=3) == []
    assert left_of_run(other) == ({"step": 4, "saved_step": 4, "redone": 0}, [])
    changed = np.nextafter(ARRAYS["model/000"], np.float32(0))
    found = run_differences(one, make_run(tmp_path / "c", arrays={**ARRAYS, "model/000": changed}), keep=3)
    assert [problem.split(":")[0] for problem in found] == ["last", "best"]
    (found,) = run_differences(one, make_run(tmp_path / "d", arrays={**ARRAYS, "updates": np.array(-0.0)}), keep=3)
    assert found.endswith("updates")


def test_a_loss_a_missing_validation_what_is_left_behind_and_no_end_are_differences(tmp_path):
    one = make_run(tmp_path / "a")
    other = make_run(tmp_path / "b", loss=np.nextafter(0.1, 1), saved=(4,))
    (other / "checkpoints" / ".step-00000002.npz.abc.partial").touch()
    found = run_differences(one, other, keep=3)
    assert [problem.split()[0] for problem in found] == ["steps", "validations", "nothing"]
    crowded = make_run(tmp_path / "c", saved=(1, 2, 3, 4))  # of which two may be marks to go back to
    assert run_differences(crowded, crowded, keep=2) == []
    assert len(run_differences(crowded, crowded, keep=1)) == 1
    assert "the log must end with the end" in run_differences(one, tmp_path / "none", keep=3)[2]


def test_after_a_kill_checkpoints_load_and_what_was_logged_as_saved_is_there(tmp_path):
    assert left_of_run(tmp_path) == ({"step": 0, "saved_step": 0, "redone": 0}, [])
    run = make_run(tmp_path / "a")
    newest, older = checkpoints(run)[:2]
    newest.unlink()
    found, (problem,) = left_of_run(run)
    assert found == {"step": 4, "saved_step": 2, "redone": 2}
    assert problem.startswith("step 4 was logged as saved")
    older.write_bytes(older.read_bytes()[:-40])
    assert "must be whole" in left_of_run(run)[1][0]
    for name, numbers in (("b", (1, 2, 4)), ("c", (1, 2, 2))):
        assert f"got {numbers[-1]} after 2" in left_of_run(log(tmp_path / name, START, *steps(*numbers)))[1][0]


@pytest.mark.parametrize(("loss", "code"), [(0.1, 0), (0.2, 1)])
def test_a_campaign_kills_as_often_as_asked_and_tells_what_is_wrong(tmp_path, monkeypatch, capsys, loss, code):
    def attempt(command, run, delay_s=math.inf, is_starting=True, rank=None):
        if delay_s == math.inf:
            shutil.rmtree(run, ignore_errors=True)
            make_run(run, loss=0.1 if run.name == "reference" else loss)
            return Ended(0, False, 1.0, 7.0, {}, [])
        assert 0 <= delay_s <= 1
        shutil.rmtree(run, ignore_errors=True)
        log(run, START, *steps(1, 2))
        return Ended(-9, True, 1.0, 2.0, {"event": "step", "step": 2}, [])

    monkeypatch.setattr(faults, "attempt", attempt)
    record = tmp_path / "faults.jsonl"
    command = ["bench", "faults", "--kills", "7", "--workdir", str(tmp_path / "w"), "--record", str(record)]
    assert main(command) == code
    assert main(command) == 2  # the folder is in use
    found = read_records(record, "faults")[0]
    kills = [[(kill["hit"], kill["redone"]) for kill in one["kills"]] for one in found["lives"]]
    assert kills == [5 * [("step", 2)], 2 * [("step", 2)]]
    assert found["missed"] == 0
    assert (tmp_path / "w" / "train-1").is_dir() == bool(code)  # what is wrong is kept
    printed = " ".join(capsys.readouterr().out.split())
    assert "step 7 2 2" in printed
    assert ("wrong: train-1: steps must be the 4 of the reference" in printed) == bool(code)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_small_campaign_loses_nothing(tmp_path, workers):
    record = tmp_path / "faults.jsonl"
    words = ["--kills", "4", "--workers", str(workers), "--workdir", str(tmp_path / "w"), "--record", str(record)]
    assert main(["bench", "faults", *words]) == 0
    found = read_records(record, "faults")[0]
    assert sum(len(life["kills"]) for life in found["lives"]) == 4

"""`bench faults`: kills are spread over the work, the moment they hit is told from what is left, and nothing slips."""

import collections
import json
import time

import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.bench.faults import command
from cpu3d.bench.faults.aims import (
    COMPUTING,
    ENDED,
    IN_TRAIN,
    LIFE_KILLS,
    PREPARING,
    SAVING,
    SAVING_BY_TIME,
    STARTING,
    VALIDATING,
    Aim,
    lives,
)
from cpu3d.bench.faults.checks import left_of_run, left_of_store, run_differences, store_differences
from cpu3d.bench.faults.markdown import faults_lines
from cpu3d.bench.faults.processes import attempt
from cpu3d.bench.faults.watch import LogTail, Usual, phase_hit, wait_for
from cpu3d.training.checkpoint_history import checkpoints, write_best, write_next
from cpu3d.training.run_log import append_event
from cpu3d.util.records import read_records

USUAL = Usual(dict.fromkeys({*IN_TRAIN, PREPARING}, 0.0), 4, frozenset({2, 4}))


# --- Aims ---


@pytest.mark.parametrize("kills", [1, 7, 50, 64])
@pytest.mark.parametrize("workers", [1, 2])
def test_as_many_kills_as_asked_for_the_same_for_the_same_seed(kills, workers):
    found = lives(kills, seed=3, workers=workers)
    assert found == lives(kills, seed=3, workers=workers)
    assert found != lives(kills, seed=4, workers=workers)
    assert sum(len(life.aims) for life in found) == kills
    assert all(1 <= len(life.aims) <= LIFE_KILLS for life in found)
    assert {life.command for life in found} <= ({"train", "prepare"} if workers == 1 else {"train"})


def test_fifty_kills_are_aimed_at_every_phase_several_times():
    aims = [aim for life in lives(50, seed=0) for aim in life.aims]
    counts = collections.Counter(aim.phase for aim in aims)
    assert set(counts) == {*IN_TRAIN, PREPARING}
    assert min(counts.values()) >= 5
    for life in lives(50, seed=0):
        waits = [aim.not_before for aim in life.aims]
        assert waits == sorted(waits)
        assert all(0 <= wait < 1 for wait in waits)


def test_one_training_life_in_four_has_batch_norm():
    norms = [life.norm for life in lives(64, seed=0) if life.command == "train"]
    assert norms.count("batch") == pytest.approx(len(norms) / 4, abs=0.5)
    assert "batch" in [life.norm for life in lives(12, seed=0, workers=2)]
    assert {life.norm for life in lives(64, seed=0) if life.command == "prepare"} == {""}


def test_kills_that_come_too_late_are_done_again_until_all_have_landed(tmp_path, monkeypatch):
    aims_lived = []

    def live(bench, life, folder):
        """The first kill of each life lands."""
        aims_lived.append(life.aims)
        kill = {"hit": SAVING, "ended_s": 0.0}
        return {"command": life.command, "norm": life.norm, "kills": [kill], "problems": []}, list(life.aims[1:])

    bench = command.Bench(tmp_path, 1, USUAL)
    append_event_in = bench.reference("instance")
    log(append_event_in, {**start(), "engine": "made up"})
    monkeypatch.setattr(command, "undisturbed", lambda *_: bench)
    monkeypatch.setattr(command, "_live", live)
    found = command.campaign(tmp_path, kills=20, seed=0, workers=1)
    assert sum(len(life["kills"]) for life in found["lives"]) == 20
    assert found["missed"] == 0
    assert min(aim.delay for aims in aims_lived for aim in aims) < min(
        aim.delay for life in lives(20, seed=0) for aim in life.aims
    )
    monkeypatch.setattr(command, "_live", lambda *_: ({"command": "train", "norm": "", "kills": [], "problems": []}, [
        Aim(SAVING, 0.0, 1.0, 0)
    ]))  # fmt: skip
    assert command.campaign(tmp_path, kills=1, seed=0, workers=1)["missed"] > 0


def test_every_worker_is_a_victim():
    assert {aim.victim for life in lives(12, seed=0, workers=2) for aim in life.aims} == {0, 1}


# --- Watching ---


def log(run, *events):
    run.mkdir(exist_ok=True)
    (run / "checkpoints").mkdir(exist_ok=True)
    for event in events:
        append_event(run, event)


def start(number=0, step=0):
    return {"event": "start", "step": step, "time": f"2025-01-01T00:00:{number:02d}"}


def steps(*numbers):
    return [{"event": "step", "step": number, "loss": 1 / number} for number in numbers]


def test_what_an_earlier_attempt_logged_is_no_start_of_this_one(tmp_path):
    log(tmp_path, start(), *steps(1, 2, 3))
    tail = LogTail(tmp_path)
    tail.look()
    assert not tail.started
    (tmp_path / "new").write_text("".join(json.dumps(event) + "\n" for event in (start(), *steps(1, 2))))
    (tmp_path / "new").replace(tmp_path / "log.jsonl")  # as the run drops what it does again
    tail.look()
    assert not tail.started
    assert tail.step == 2
    log(tmp_path, start(1, 2))
    tail.look()
    assert tail.started


def test_a_line_counts_once_it_is_whole(tmp_path):
    tail = LogTail(tmp_path)
    tail.look()
    log(tmp_path, start(), *steps(1))
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"event": "step", ')
    tail.look()
    assert tail.started
    assert tail.step == 1
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('"step": 2}\n')
    tail.look()
    assert tail.step == 2


@pytest.mark.parametrize(
    ("events", "files", "phase"),
    [
        ([], [], STARTING),
        ([start(1)], [], COMPUTING),
        ([start(1), *steps(1)], [], COMPUTING),
        ([start(1), *steps(1, 2)], [], VALIDATING),
        ([start(1), *steps(1, 2)], [".best.npz.x1.partial"], SAVING),
        ([start(1), *steps(1, 2), {"event": "validation", "step": 2}], [], SAVING),
        ([start(1), *steps(1, 2, 3)], [".step-00000003.npz.x1.partial"], SAVING),
        ([start(1), *steps(1, 2, 3)], ["step-00000003.npz"], SAVING),
        ([start(1), *steps(1, 2, 3), {"event": "checkpoint", "step": 3}], ["step-00000003.npz"], COMPUTING),
        ([start(1), *steps(1, 2, 3)], ["step-00000002.npz"], COMPUTING),
        ([start(1), *steps(1, 2, 3, 4), {"event": "end", "step": 4}], ["step-00000004.npz"], ENDED),
    ],
    ids=str,
)
def test_what_was_hit_is_told_from_what_is_left(tmp_path, events, files, phase):
    log(tmp_path, start())
    tail = LogTail(tmp_path)
    log(tmp_path, *events)
    for name in files:
        (tmp_path / "checkpoints" / name).touch()
    assert phase_hit(tmp_path, tail, USUAL) == phase


@pytest.mark.parametrize(
    ("phase", "too_early", "come"),
    [
        (COMPUTING, [start(), *steps(1)], steps(2)),
        (VALIDATING, [start(), *steps(1)], steps(2)),
        (SAVING, [start(), *steps(1, 2)], [{"event": "validation", "step": 2}]),
    ],
)
def test_a_kill_waits_for_its_phase_and_its_step(tmp_path, phase, too_early, come):
    tail, looks = LogTail(tmp_path), []
    log(tmp_path, *too_early)

    def alive():
        looks.append(1)
        if len(looks) == 5:
            log(tmp_path, *come)
        return len(looks) < 50

    assert wait_for(Aim(phase, 0.5, 0.0, 0), USUAL, tmp_path, tail, time.monotonic(), alive)
    assert 5 <= len(looks) < 50


def test_a_kill_while_saving_by_time_waits_for_a_checkpoint_that_no_validation_comes_before(tmp_path):
    tail, looks = LogTail(tmp_path), []
    log(tmp_path, start(), *steps(1, 2))
    partial = tmp_path / "checkpoints" / ".step-00000002.npz.x1.partial"
    partial.touch()  # of the validation after step 2

    def alive():
        looks.append(1)
        if len(looks) == 5:
            log(tmp_path, *steps(3))
        return len(looks) < 50

    assert wait_for(Aim(SAVING_BY_TIME, 0.5, 0.0, 0), USUAL, tmp_path, tail, time.monotonic(), alive)
    assert 5 <= len(looks) < 50
    partial.unlink()
    looks[:] = [1] * 10
    assert not wait_for(Aim(SAVING_BY_TIME, 0.5, 0.0, 0), USUAL, tmp_path, tail, time.monotonic(), alive)


def test_a_process_that_ends_first_is_not_killed(tmp_path):
    aim = Aim(SAVING, 0.5, 0.0, 0)
    ends = iter([True, True, False])
    assert not wait_for(aim, USUAL, tmp_path, LogTail(tmp_path), time.monotonic(), lambda: next(ends))


def test_a_delay_is_a_share_of_what_the_phase_takes(tmp_path):
    usual = Usual({**USUAL.seconds, STARTING: 0.2}, 4, frozenset())
    begin = time.monotonic()
    assert wait_for(Aim(STARTING, 0.0, 0.5, 0), usual, tmp_path, LogTail(tmp_path), begin, lambda: True)
    assert time.monotonic() - begin >= 0.1


# --- Checks ---

ARRAYS = {"model/000": np.arange(200, dtype=np.float32), "updates": np.array(4)}


def make_run(run, *, saved=(2, 4), arrays=ARRAYS, loss=0.1, seconds=7.0):
    log(run, start())
    for number in range(1, 5):
        event = {
            "event": "step",
            "step": number,
            "epoch": 0,
            "case_id": "a",
            "loss": loss / number,
            "dice": {"WT": 0.5},
        }
        log(run, {**event, "learning_rate": 0.1, "step_s": seconds})
        if number in saved:
            state = {"step": number, "best": 0.5, "trained_s": seconds}
            found = {"loss": 0.3, "dice": {"WT": 0.5}, "mean_dice": 0.5, "best": True, "cases": 1, "seconds": seconds}
            write_best(run, {"model/000": arrays["model/000"]}, state)
            log(run, {"event": "validation", "step": number, "epoch": 0, **found})
            write_next(run, number, arrays, state, keep=3)
            log(run, {"event": "checkpoint", "step": number, "seconds": seconds})
    log(run, {"event": "end", "step": 4, "reason": "finished"})
    return run


def test_two_runs_that_differ_in_time_alone_are_the_same(tmp_path):
    one, other = make_run(tmp_path / "a"), make_run(tmp_path / "b", seconds=9.0)
    assert run_differences(one, other, keep=3) == []
    assert left_of_run(other).problems == ()
    assert left_of_run(other).saved_step == 4


def test_one_bit_of_one_weight_is_a_difference(tmp_path):
    changed = ARRAYS["model/000"].copy()
    changed[7] = np.nextafter(changed[7], np.float32(0))
    one = make_run(tmp_path / "a")
    found = run_differences(one, make_run(tmp_path / "b", arrays={**ARRAYS, "model/000": changed}), keep=3)
    assert found == [
        "last: 1 of 2 arrays differ, the first model/000",
        "best: 1 of 1 arrays differ, the first model/000",
    ]


def test_minus_zero_is_another_number(tmp_path):
    one = make_run(tmp_path / "a", arrays={**ARRAYS, "updates": np.array(0.0)})
    other = make_run(tmp_path / "b", arrays={**ARRAYS, "updates": np.array(-0.0)})
    assert run_differences(one, other, keep=3) == ["last: 1 of 2 arrays differ, the first updates"]


def test_one_bit_of_a_loss_a_missing_validation_and_what_is_left_behind_are_differences(tmp_path):
    one = make_run(tmp_path / "a")
    other = make_run(tmp_path / "b", loss=np.nextafter(0.1, 1), saved=(4,))
    (other / "checkpoints" / ".step-00000002.npz.abc.partial").touch()
    found = run_differences(one, other, keep=3)
    assert [problem.split()[0] for problem in found] == ["steps", "validations", "nothing"]
    assert run_differences(one, one, keep=1) == ["at most 1 checkpoints must be kept, got 2"]


def test_a_run_that_did_not_come_to_its_end_is_different(tmp_path):
    one = make_run(tmp_path / "a")
    assert "the log must end with the end" in run_differences(one, tmp_path / "none", keep=3)[2]


def test_after_a_kill_every_checkpoint_has_to_load(tmp_path):
    run = make_run(tmp_path / "a")
    older = checkpoints(run)[1]
    older.write_bytes(older.read_bytes()[:-40])
    assert "must be whole" in left_of_run(run).problems[0]


def test_after_a_kill_what_was_logged_as_saved_has_to_be_there(tmp_path):
    run = make_run(tmp_path / "a")
    checkpoints(run)[0].unlink()
    left = left_of_run(run)
    assert left.problems == ("step 4 was logged as saved and must be there, got step 2",)
    assert (left.logged_step, left.redone) == (4, 2)


def test_after_a_kill_no_step_may_be_missing_or_double(tmp_path):
    log(tmp_path, start(), *steps(1, 2, 4))
    assert left_of_run(tmp_path).problems == ("logged steps must be 1, 2, 3 and so on, got 4 after 2",)
    log(tmp_path / "b", start(), *steps(1, 2, 2))
    assert left_of_run(tmp_path / "b").problems == ("logged steps must be 1, 2, 3 and so on, got 2 after 2",)


def test_a_run_that_was_killed_before_it_began_has_lost_nothing(tmp_path):
    left = left_of_run(tmp_path)
    assert (left.saved_step, left.logged_step, left.redone, left.problems) == (0, 0, 0, ())


def test_stores_are_compared_file_by_file(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "cases").mkdir(parents=True)
        (tmp_path / name / "cases" / "one.json").write_text("{}")
    assert store_differences(tmp_path / "a", tmp_path / "b") == []
    (tmp_path / "b" / "cases" / "one.json").write_text("{ }")
    (tmp_path / "b" / "cases" / ".one.npy.x.partial").touch()
    found = store_differences(tmp_path / "a", tmp_path / "b")
    assert [problem.split()[1] for problem in found] == ["cases/.one.npy.x.partial", "cases/one.json"]
    assert left_of_store(tmp_path / "b") == (1, ())
    (tmp_path / "b" / "manifest.json").write_text("{")
    assert left_of_store(tmp_path / "b")[1]


# --- Processes ---


def test_a_process_is_killed_when_it_is_time_and_only_then(tmp_path):
    words = ["phantom", "--out", str(tmp_path / "raw"), "--cases", "1", "--shape", "24", "24", "24", "--workers", "1"]
    killed = attempt(words, tmp_path / "said.txt", wait=lambda begin, alive: alive())
    assert (killed.exit_code, killed.killed, killed.problems) == (-9, True, [])

    def until_its_end(begin, alive):
        while alive():
            time.sleep(0.01)
        return False

    done = attempt(words, tmp_path / "said.txt", wait=until_its_end)
    assert (done.exit_code, done.killed) == (0, False)
    assert (tmp_path / "said.txt").read_text().count("$ cpu3d phantom") == 2


def test_options_and_a_folder_that_is_in_use_are_refused(tmp_path, capsys):
    assert main(["bench", "faults", "--workdir", str(tmp_path), "--kills", "0", "--workers", "0"]) == 2
    assert capsys.readouterr().err.count("must be at least 1") == 2
    (tmp_path / "mine").touch()
    assert main(["bench", "faults", "--workdir", str(tmp_path)]) == 2
    assert "must be empty" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_small_campaign_loses_nothing(tmp_path, workers):
    record = tmp_path / "faults.jsonl"
    words = ["bench", "faults", "--kills", "4", "--workers", str(workers), "--record", str(record)]
    assert main([*words, "--workdir", str(tmp_path / "work")]) == 0
    found = read_records(record, "faults")[0]
    assert sum(len(life["kills"]) for life in found["lives"]) == 4
    assert "Nothing that was logged as saved was lost" in faults_lines(found)[0]


# --- Telling ---


def test_a_record_is_told_by_phase_and_what_went_wrong_is_not_hidden():
    kill = {"hit": SAVING, "redone": 3, "ended_s": 4.4}
    lived = [
        {
            "command": "train",
            "norm": "batch",
            "kills": [kill, {**kill, "redone": 8}],
            "problems": [],
        },
        {
            "command": "prepare",
            "norm": "",
            "kills": [{"hit": PREPARING, "cases": 2, "ended_s": 1.0}],
            "problems": [],
        },
    ]
    record = {
        "workers": 1, "steps": 240, "seed": 0, "host": {"cores": 2, "cpu": "made up"}, "lives": lived, "missed": 0,
    }  # fmt: skip
    lines = faults_lines(record)
    told = "2 times in 1 small run, 1 of them with batch norm and 1 time in 1 small store (float32, 240 steps"
    assert told in lines[0]
    assert "Nothing that was logged as saved was lost (steps after it are done again)" in lines[0]
    assert "too late" not in lines[0]
    assert "2 more kills came too late each time. " in faults_lines({**record, "missed": 2})[0]
    assert lines[-2:] == ["| preparing | 1 | - | - |", "| saving | 2 | 5.5 | 8 |"]
    lived[0]["problems"] = ["train-1: last: 1 of 2 arrays differ"]
    assert "1 of the 2 ended otherwise" in faults_lines(record)[0]
    assert "ended after 4 s at the most" in faults_lines({**record, "workers": 2})[0]

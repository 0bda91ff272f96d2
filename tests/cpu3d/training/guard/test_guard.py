"""The guard around a training that is none: what it notes, says and does."""

import os
import threading
import time

import pytest

from cpu3d.errors import DivergedError, Interrupted, MemoryRunsOutError
from cpu3d.training.guard import guard as module
from cpu3d.training.guard.free_memory import MACHINE, Room
from cpu3d.training.guard.guard import UNGUARDED, Guard
from cpu3d.training.guard.heartbeat import read_heartbeats
from cpu3d.training.guard.samples import Sample

MIB, GIB = 2**20, 2**30


class Stage:
    """A clock and a memory that only a test moves; what the guard says and how it ends."""

    def __init__(self, monkeypatch):
        self.now, self.own, self.free = 0.0, GIB, 8 * GIB
        self.said, self.ended = [], []
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(module, "take_sample", self.sample)

    def sample(self):
        return Sample(self.now, self.own, 0, 0, {MACHINE: Room(self.free, 16 * GIB)})

    def look(self, guard, seconds=0.5):
        self.now += seconds
        guard._look()

    def live(self, guard, seconds):
        for _ in range(int(2 * seconds)):
            self.look(guard)

    def fall_to(self, guard, free):
        """Within a minute."""
        begin = self.free
        for part in range(1, 121):
            self.free = begin + (free - begin) * part // 120
            self.look(guard)

    def step(self, guard, step, seconds):
        guard.phase("computing", step=step)
        self.live(guard, seconds)


@pytest.fixture
def stage(monkeypatch):
    return Stage(monkeypatch)


@pytest.fixture
def guard(stage, tmp_path):
    """Not entered: without threads, so that the test is the one who looks."""
    return Guard(tmp_path, say=stage.said.append, end=stage.ended.append, bound_bytes=2 * GIB, stall_minutes=1)


def test_steps_are_timed_without_what_comes_between(guard, stage):
    for step in range(4):
        guard.phase("waiting for data", step=step)
        stage.live(guard, 1)
        guard.phase("computing")
        stage.live(guard, 2 + step)
        guard.phase("validating")
        stage.live(guard, 50)
        guard.phase("saving")
        stage.live(guard, 5)
    guard.phase("computing", step=4)
    beat = guard.heartbeat()
    assert (beat.last_step_s, beat.median_step_s, beat.longest_step_s) == (6.0, 4.5, 6.0)
    assert (beat.step, beat.phase) == (4, "computing")


def test_memory_that_runs_low_asks_for_a_stop_once(guard, stage):
    stage.step(guard, 0, 10)
    assert guard.stop is None
    stage.fall_to(guard, 200 * MIB)
    assert guard.stop is None
    stage.live(guard, 20)
    stage.fall_to(guard, 60 * MIB)
    assert guard.stop == "memory"
    assert "must keep 64 MiB free for a save, got 6" in guard.why
    assert stage.said == [f"warning: {guard.why}; saving after this step, then ending"]
    stage.free = 8 * GIB
    stage.live(guard, 3)
    assert guard.stop == "memory", "it is not taken back"
    assert stage.ended == []


def test_what_a_save_needs_is_told_with_the_plan(guard, stage):
    guard.plan(save_bytes=600 * MIB)
    stage.step(guard, 0, 5)
    assert guard.stop is None
    stage.fall_to(guard, 600 * MIB)
    assert "must keep 664 MiB free" in guard.why


def test_memory_that_falls_too_fast_ends_the_process_with_words_and_a_heartbeat(guard, stage, tmp_path):
    stage.step(guard, 0, 5)
    guard.saved(7)
    stage.free = 10 * MIB
    stage.look(guard)
    assert stage.ended == [5]
    [said] = stage.said
    assert said.startswith("error: memory must last to the end of a step, got 10 MiB free of this machine, falling by")
    assert said.endswith("; the checkpoint of step 7 is good; ending at once")
    beat = read_heartbeats(tmp_path)[0]
    assert (beat.exit_code, beat.phase) == (5, "computing")
    assert beat.reason in said


def test_what_exceeds_the_plan_is_said_once(guard, stage):
    stage.own = 3 * GIB
    stage.live(guard, 5)
    [said] = stage.said
    assert "must stay below the plan's upper bound of 2.00 GiB, got 1.00 GiB more" in said
    assert guard.stop is None


def test_a_stall_ends_the_process_with_the_stacks_and_the_phase(guard, stage, capfd, tmp_path):
    for step in range(3):
        stage.step(guard, step, 2)
    guard.phase("waiting for data")
    stage.live(guard, 5)
    guard.phase("waiting for data")
    stage.live(guard, 60)
    assert stage.ended == []
    stage.live(guard, 1)
    assert stage.ended == [6]
    assert "waiting for data; look whether the store's file system answers" in stage.said[0]
    assert "test_guard.py" in capfd.readouterr().err, "the stacks"
    beat = read_heartbeats(tmp_path)[0]
    assert beat.stalled == beat.reason
    assert "got none for 60.5 s, waiting for data" in beat.stalled


def test_the_first_step_may_take_longer_and_a_suspended_process_has_not_lived(guard, stage):
    stage.step(guard, 0, 200)
    for _ in range(5):
        stage.look(guard, seconds=3600)
    assert stage.ended == []
    stage.step(guard, 1, 100)
    stage.look(guard, seconds=10**6)
    assert stage.ended == []
    guard.phase("computing", step=2)
    assert guard._pace.longest_had_s < 300, "ten times the longest step is what may pass"


def test_signs_of_life_within_a_phase_are_enough(guard, stage):
    stage.step(guard, 0, 1)
    for _ in range(20):
        guard.phase("validating", step=1)
        stage.live(guard, 50)
    assert stage.ended == []


@pytest.mark.parametrize(
    ("error", "exit_code", "reason"),
    [
        (None, 0, "finished"),
        (DivergedError("loss must be finite, got nan"), 4, "loss must be finite, got nan"),
        (MemoryRunsOutError("memory must"), 5, "memory must"),
        (Interrupted("saved after step 3", 15), 143, "saved after step 3"),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt"),
        (OSError(28, "No space left on device"), 1, "OSError: [Errno 28] No space left on device"),
        (ValueError(), 1, "ValueError"),
        (SystemExit(3), 3, "exit code 3"),
        (SystemExit("no"), 1, "exit code 1"),
        (SystemExit(), 0, "finished"),
    ],
)
def test_how_a_run_ends_is_noted(tmp_path, error, exit_code, reason):
    def train():
        with Guard(tmp_path, say=print, step=2, steps=9) as guard:
            guard.phase("computing", step=3)
            if error:
                raise error

    if error is None:
        train()
    else:
        with pytest.raises(type(error)):
            train()
    beat = read_heartbeats(tmp_path)[0]
    assert (beat.phase, beat.step, beat.steps, beat.pid) == ("ended", 3, 9, os.getpid())
    assert (beat.reason, beat.exit_code) == (reason, exit_code)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("guard")]


def test_the_end_that_was_noted_is_the_one_that_counts(tmp_path):
    with Guard(tmp_path, say=print) as guard:
        guard.note_end("early stop")
    assert read_heartbeats(tmp_path)[0].reason == "early stop"


def test_phases_that_do_not_last_are_not_written_one_by_one(tmp_path, monkeypatch):
    """Steps of 4 ms: a file system would have hundreds of files a second to rename, for days."""
    written = []
    monkeypatch.setattr(module, "write_heartbeat", lambda run, beat: written.append(beat.phase))
    with Guard(tmp_path, say=print) as guard:
        for step in range(100):
            for phase in ("waiting for data", "computing"):
                guard.phase(phase, step=step)
                time.sleep(0.002)
    assert written[-1] == "ended"
    assert len(written) <= 4, written


def test_a_change_of_phase_is_in_the_file_within_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PHASE_LASTS_S", 0.1)
    with Guard(tmp_path, say=print, rank=1, workers=2) as guard:
        guard.phase("computing", step=5)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            beat = read_heartbeats(tmp_path).get(1)
            if beat and beat.phase == "computing":
                break
            time.sleep(0.02)
        assert (beat.phase, beat.step, beat.workers, beat.exit_code) == ("computing", 5, 2, None)
        assert beat.free_bytes > 0


def test_a_heartbeat_that_cannot_be_written_stops_nothing_and_is_said_once(tmp_path):
    run, said = tmp_path / "run", []
    run.mkdir()
    with Guard(run, say=said.append) as guard:
        run.rename(tmp_path / "gone")  # its own thread may write in between, so it is not emptied first
        for _ in range(3):
            guard._write()
        run.mkdir()
        guard._write()
        assert read_heartbeats(run)[0].exit_code is None
    [line] = said
    assert line.startswith("warning: no heartbeat can be written, [Errno 2]")


def test_words_that_cannot_be_said_do_not_keep_the_process_from_ending(stage, tmp_path):
    guard = Guard(tmp_path, say=lambda line: 1 / 0, end=stage.ended.append, bound_bytes=MIB)
    stage.step(guard, 0, 5)
    stage.free = 10 * MIB
    stage.look(guard)
    assert stage.ended == [5]
    assert read_heartbeats(tmp_path)[0].exit_code == 5


def test_a_watch_that_fails_is_said_and_the_run_goes_on(tmp_path, monkeypatch):
    said = []
    with Guard(tmp_path, say=said.append):
        monkeypatch.setattr(module, "take_sample", lambda: 1 / 0)
        end = time.monotonic() + 60
        while not said and time.monotonic() < end:
            time.sleep(0.02)
    assert "has failed, ZeroDivisionError" in said[0]


def test_a_phase_costs_a_step_next_to_nothing(tmp_path):
    with Guard(tmp_path, say=print) as guard:
        begin = time.thread_time()
        for step in range(2000):
            guard.phase("computing", step=step)
        assert (time.thread_time() - begin) / 2000 < 1e-3, "some microseconds are usual"


def test_what_was_not_known_at_first_may_be_told_later(guard, stage):
    guard.plan(step=3, steps=9, bound_bytes=GIB // 2)
    stage.look(guard)
    assert (guard.heartbeat().step, guard.heartbeat().steps) == (3, 9)
    assert "upper bound of 512 MiB" in stage.said[0]


def test_a_plan_that_is_told_later_is_held_against_what_is_taken_from_then_on(guard, stage):
    """Another program's memory, and the libraries, from before are no part of it; what is not told stays."""
    stage.live(guard, 5)
    stage.own, stage.free = 2 * GIB, 3 * GIB
    guard.plan(save_bytes=GIB, here=2, stall_minutes=7)
    stage.live(guard, 1)
    guard.plan()
    stage.live(guard, 1)
    assert guard._samples[0].own_bytes == 2 * GIB
    assert (guard._bound_bytes, guard._save_bytes, guard._here, guard._clock.limit_s) == (2 * GIB, GIB, 2, 420)


def test_a_run_that_has_not_begun_has_nothing_to_save(guard, stage):
    stage.look(guard)
    stage.fall_to(guard, 150 * MIB)
    stage.fall_to(guard, 50 * MIB)
    assert guard.stop is None
    stage.step(guard, 0, 1)
    assert guard.stop == "memory"


def test_unguarded_is_nothing():
    UNGUARDED.phase("computing", step=1)
    UNGUARDED.saved(1)
    UNGUARDED.plan(step=1)
    UNGUARDED.note_end("finished")
    assert (UNGUARDED.stop, UNGUARDED.why) == (None, "")

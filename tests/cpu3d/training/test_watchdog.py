"""The watchdog around a made-up training: free memory, time without progress, its messages and
acts."""

import os
import queue
import signal
import threading

import pytest

from cpu3d.host.free_memory import MACHINE, Room, Sample
from cpu3d.run.heartbeat import read_heartbeats
from cpu3d.training.heartbeat_writer import HeartbeatWriter
from cpu3d.training.watchdog import MemoryFloor, Watchdog, noted_signals

MIB = 2**20
GIB = 2**30


# --- Whether it lasts ---

PLAN = {"bound_bytes": 6000 * MIB, "save_bytes": 500 * MIB}


@pytest.mark.parametrize(
    ("samples", "limits", "action"),
    [
        # The floor, 64 MiB, and a save.
        ([(5000, 170)], {"save_bytes": 100 * MIB}, ""),
        ([(5000, 160)], {"save_bytes": 100 * MIB}, "stop"),
        # Others take what the top of the next step needs.
        ([(5000, 400), (1000, 4000)], {}, "stop"),
        # Next to nothing, and less and less.
        ([(5000, 40), (5000, 20)], {}, "end"),
        ([(5000, 20), (5000, 20)], {}, "stop"),
        ([(5000, 60), (5000, 40)], {"save_bytes": 100 * MIB}, "stop"),
        # 6000 of the plan, 1000 taken: 5200 free leave 200, of which half are kept.
        ([(1000, 5200), (6000, 110)], PLAN, ""),
        ([(1000, 5200), (6000, 90)], PLAN, "stop"),
        # Two workers take 10,000.
        ([(1000, 10_200), (6000, 110)], {**PLAN, "here": 2}, ""),
    ],
)
def test_the_run_goes_on_stops_or_ends(samples, limits, action):
    """After the last of (own, free) in MiB of a machine of 16 GiB."""
    floor = MemoryFloor(**limits)
    for own, free in samples:
        stop, end = floor.judge(
            Sample({MACHINE: Room(free * MIB, 16 * GIB)}, (own - 50) * MIB, 50 * MIB)
        )
    assert (bool(stop), bool(end)) == (action == "stop", action == "end")


# --- What the watchdog does ---


class Stage:
    """A clock and a memory that only a test moves; the watchdog's messages and exit codes."""

    def __init__(self, monkeypatch):
        self.native = GIB
        self.free = 8 * GIB
        self.printed = []
        self.ended = []
        monkeypatch.setattr(
            "cpu3d.training.watchdog.take_sample",
            lambda: Sample({MACHINE: Room(self.free, 16 * GIB)}, self.native),
        )

    def live(self, watchdog, seconds):
        for _ in range(int(2 * seconds)):
            watchdog.look()

    def step(self, watchdog, step, seconds):
        watchdog.phase("computing", step=step)
        self.live(watchdog, seconds)
        watchdog.stepped(seconds)


@pytest.fixture
def stage(monkeypatch):
    return Stage(monkeypatch)


@pytest.fixture
def watchdog(stage, tmp_path):
    """A watchdog that is not entered: without threads, so that the test itself looks."""
    heartbeat = HeartbeatWriter(tmp_path, say=stage.printed.append)
    watchdog = Watchdog(heartbeat, end=stage.ended.append)
    watchdog.plan(bound_bytes=2 * GIB)
    return watchdog


def test_memory_that_runs_low_asks_for_a_stop_once_and_not_before_there_is_something_to_save(
    watchdog, stage
):
    stage.free = 50 * MIB
    stage.live(watchdog, 2)
    assert not watchdog.why, "it starts"
    stage.step(watchdog, 0, 2)
    assert len(stage.printed) == 1
    assert (
        "must keep 64 MiB free for the next step, got 50 MiB free of this machine" in watchdog.why
    )
    stage.free = 8 * GIB
    stage.live(watchdog, 3)
    assert (bool(watchdog.why), stage.ended) == (True, []), "it is not taken back"


def test_memory_that_is_gone_ends_the_process_with_words_and_a_heartbeat(watchdog, stage, tmp_path):
    stage.step(watchdog, 0, 5)
    stage.free = 10 * MIB
    stage.live(watchdog, 0.5)
    assert stage.ended == [5]
    beat = read_heartbeats(tmp_path)[0]
    assert (beat.exit_code, beat.phase) == (5, "computing")
    assert "got 10 MiB free of this machine" in beat.reason
    assert stage.printed[-1].startswith(f"error: {beat.reason}")


@pytest.mark.parametrize(
    ("longest_s", "phase", "allowed_s"),
    [
        (5, "computing", 3600),
        (400, "computing", 4000),  # ten times the longest silence
        (400, "summing gradients", 6000),  # half as much again: another worker hangs
    ],
)
def test_a_stall_ends_the_process_with_the_stacks_and_the_phase(
    watchdog, stage, capfd, tmp_path, longest_s, phase, allowed_s
):
    stage.step(watchdog, 0, longest_s)
    watchdog.phase(phase, step=1)
    stage.live(watchdog, allowed_s)
    assert stage.ended == []
    stage.live(watchdog, 1)
    assert stage.ended == [6]
    assert "test_watchdog.py" in capfd.readouterr().err, "the stacks"
    assert phase in read_heartbeats(tmp_path)[0].reason


def test_a_process_that_hangs_is_ended_even_if_its_console_hangs_too(tmp_path, monkeypatch):
    for name, value in {"watchdog.STALL_S": 0.9, "heartbeat_writer.END_S": 0.1}.items():
        monkeypatch.setattr(f"cpu3d.training.{name}", value)
    console = threading.Event()
    codes = queue.Queue()
    heartbeat = HeartbeatWriter(tmp_path, say=lambda line: console.wait())
    with Watchdog(heartbeat, end=codes.put):
        assert codes.get(timeout=60) == 6
    console.set()


def test_a_failing_watch_stops_nothing(tmp_path, monkeypatch):
    printed = queue.Queue()
    with Watchdog(HeartbeatWriter(tmp_path, say=printed.put)):
        monkeypatch.setattr("cpu3d.training.watchdog.take_sample", lambda: 1 / 0)
        assert printed.get(timeout=60).startswith("warning: memory and stalls")
    assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]


def test_a_run_that_is_over_is_neither_stopped_nor_ended(watchdog, stage):
    stage.step(watchdog, 0, 2)
    watchdog.heartbeat.note_end("finished")
    stage.free = 10 * MIB
    stage.live(watchdog, 1000)
    assert (watchdog.why, stage.ended, stage.printed) == ("", [], [])


def test_a_second_sigterm_changes_nothing_and_a_second_ctrl_c_ends_at_once():
    with noted_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.SIGTERM in stop
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

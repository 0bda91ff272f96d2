"""The heartbeat that a process keeps: what it holds, and when it is written."""

import contextlib
import os
import threading
import time

import pytest

from cpu3d.errors import Interrupted
from cpu3d.host.free_memory import MACHINE, Room, Sample
from cpu3d.run.heartbeat import read_heartbeats
from cpu3d.training import heartbeat_writer
from cpu3d.training.heartbeat_writer import HeartbeatWriter


@pytest.mark.parametrize(
    ("error", "exit_code", "reason"),
    [
        (None, 0, "finished"),
        (Interrupted("saved after step 3", 15), 143, "saved after step 3"),
        (OSError(28, "Full", "a.npz"), 1, "a.npz must fit on its disk, got Full"),
        (ValueError("no such\nmore"), 1, "ValueError: no such"),
    ],
)
def test_how_a_process_ends_is_noted(tmp_path, error, exit_code, reason):
    expected = pytest.raises(type(error)) if error else contextlib.nullcontext()
    with expected, HeartbeatWriter(tmp_path, say=print) as heart:
        heart.phase("computing", step=3, steps=9)
        if error:
            heart.note_end("finished")  # the error counts
            raise error
    beat = read_heartbeats(tmp_path)[0]
    assert (beat.phase, beat.step, beat.steps, beat.pid) == ("ended", 3, 9, os.getpid())
    assert (beat.reason, beat.exit_code) == (reason, exit_code)
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def test_the_file_follows_within_seconds_and_not_phase_by_phase(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat_writer, "BEAT_S", 0.1)
    sample = Sample({MACHINE: Room(70, 90), "a limit": Room(30, 40)}, 12, 3, swapped_bytes=2)
    monkeypatch.setattr(heartbeat_writer, "take_sample", lambda: sample)
    with HeartbeatWriter(tmp_path, say=print, rank=1, workers=2) as heart:
        since = set()
        for step in range(6):
            heart.phase("computing", step=step)
            since.add(heart.now.phase_since)
        time.sleep(2)
        beat = read_heartbeats(tmp_path)[1]
        assert (beat.phase, beat.step, beat.workers, beat.exit_code) == ("computing", 5, 2, None)
        assert (beat.free_bytes, beat.own_bytes) == (30, 13)
        assert {beat.started} != since == {beat.phase_since}
        heart.now.stop = "memory runs low"
        heart.note_end("finished")
        heart.phase("deciding")
        assert (heart.now.exit_code, heart.now.stop) == (None, ""), "it goes on to its end"


def test_a_heartbeat_that_cannot_be_written_stops_nothing_and_is_said_once(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat_writer, "BEAT_S", 0.01)
    printed = []
    with HeartbeatWriter(tmp_path / "none-such", say=printed.append):
        time.sleep(0.2)
    assert [line.startswith("warning: no heartbeat can be written") for line in printed] == [True]

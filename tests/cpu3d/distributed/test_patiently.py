import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cpu3d.distributed import patiently as module
from cpu3d.distributed.patiently import Patiently


def test_an_answer_that_comes_in_time_is_given_and_an_error_raised():
    assert Patiently(lambda a, b: a + b)(1, 2) == 3
    with pytest.raises(FileNotFoundError):
        Patiently(Path("/none-such").read_text)()
    with pytest.raises(TimeoutError, match="its own"):
        Patiently(_own_timeout)()


def test_what_does_not_answer_is_asked_once_and_told_once(monkeypatch):
    held, asked, told, now = threading.Event(), [], [], [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def ask():
        asked.append(1)
        held.wait(60)
        return "there again"

    patiently = Patiently(ask, 1.0, "nothing", late=told.append, late_s=60.0)
    began_s = time.monotonic()
    assert [patiently() for _ in range(50)] == ["nothing"] * 50
    assert time.monotonic() - began_s < 25, "it waits for the first answer alone"
    assert (len(asked), told) == (1, [])
    now[0] = 61.0
    assert [patiently(), patiently()] == ["nothing"] * 2
    assert told == [61.0]
    held.set()
    end = time.monotonic() + 60
    while patiently() == "nothing":
        assert time.monotonic() < end
    assert patiently() == "there again"


def _own_timeout():
    raise TimeoutError("its own")

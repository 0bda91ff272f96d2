"""Keeps the heartbeat of this process: what it does is noted, and written down every few seconds.

    with HeartbeatWriter(run, say=print) as heartbeat:
        heartbeat.phase("computing", step=12, steps=100)
        heartbeat.note_end("finished")  # unless an error leaves the block

How the block is left is how the process has ended."""

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, Callable, Optional, Set, Tuple

from cpu3d.errors import exit_code_of, fault_of
from cpu3d.host.free_memory import take_sample
from cpu3d.host.memory import peak_rss_bytes
from cpu3d.run.heartbeat import (
    BEAT_S,
    Heartbeat,
    process_start,
    this_place,
    write_heartbeat,
)

# The longest that a process which must end at once waits for its message and heartbeat, and that
# the end of a block waits for a file system.
END_S = 3.0


class HeartbeatWriter:
    """A context manager. Outside of its block it notes and writes nothing by itself."""

    def __init__(
        self,
        folder: Path,
        *,
        say: Callable[[str], None],
        rank: int = 0,
        workers: int = 1,
    ):
        """The heartbeat of worker `rank` of `workers`, in the folder of a run or of folds."""
        self._folder = Path(folder)
        self._say = say
        now = time.time()
        pid = os.getpid()
        self.now = Heartbeat(
            rank=rank,
            workers=workers,
            host_name=socket.gethostname(),
            pid=pid,
            process_start=process_start(pid) or 0,
            place=this_place(),
            started=now,
            beat=now,
            phase="starting",
            phase_since=now,
            step=0,
            steps=0,
        )
        self.good_end = ""  # the reason that `note_end` has noted
        self._exit_code = 0
        self._said: Set[str] = set()  # kinds of lines that were printed
        self._done = threading.Event()
        self._changed = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> "HeartbeatWriter":
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> None:
        if error is None:
            reason = self.good_end or "finished"
            exit_code = self._exit_code
        else:
            reason, exit_code = how_it_ended(error)
        self.phase("ended")
        self.now.reason = reason
        self.now.exit_code = exit_code
        self._done.set()
        self.write_soon()
        self._thread.join(END_S)  # if a file system holds it, it is left: a daemon

    def phase(self, name: str, *, step: Optional[int] = None, steps: Optional[int] = None) -> None:
        """Note a phase that begins, such as "computing", the steps done and those of the run."""
        now = self.now
        if name != now.phase:
            now.phase_since = time.time()
        now.phase = name
        if step is not None:
            now.step = step
        if steps is not None:
            now.steps = steps

    def note_end(self, reason: str, exit_code: int = 0) -> None:
        """Note how the process will have ended, unless an error leaves the block: it will not stop
        before that."""
        self.now.stop = ""
        self.good_end = reason
        self._exit_code = exit_code

    def write_soon(self) -> None:
        """Have the heartbeat written now instead of seconds later."""
        self._changed.set()

    def print_and_exit(
        self, line: str, reason: str, exit_code: int, end: Callable[[int], Any]
    ) -> None:
        """Print a line, note an end, and call `end` with its exit code within seconds, even if
        console and file system hang."""
        self.now.reason = reason
        self.now.exit_code = exit_code

        def write() -> None:
            self.say_once("end", line)
            self._write()

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(END_S)
        end(exit_code)

    def say_once(self, kind: str, line: str) -> None:
        """Print a line, the first of its kind."""
        if kind not in self._said:
            self._said.add(kind)
            with contextlib.suppress(Exception):  # a terminal that is gone must not end a run
                self._say(line)

    # --- The thread ---

    def _beat(self) -> None:
        done = False
        while not done:
            done = self._done.is_set()
            self._write()
            self._changed.wait(0 if done else BEAT_S)
            self._changed.clear()

    def _write(self) -> None:
        try:
            with self._writing:
                self.now.beat = time.time()
                self.now.peak_bytes = peak_rss_bytes()
                self._note_memory()
                write_heartbeat(self._folder, self.now)
        except Exception as error:  # a full disk, a folder that is gone, or anything else
            why = fault_of(error) if isinstance(error, OSError) else str(error)
            problem = f"no heartbeat can be written, {why}"
            self.say_once("heartbeat", f"warning: {problem}; the run continues without it")

    def _note_memory(self) -> None:
        """Note this process's memory, with the limit that leaves the least."""
        try:
            sample = take_sample()
        except Exception:  # the watch over a training says so
            return
        self.now.free_bytes = min(room.free_bytes for room in sample.rooms.values())
        self.now.own_bytes = sample.own_bytes - sample.swapped_bytes + sample.file_bytes


def how_it_ended(error: BaseException) -> Tuple[str, int]:
    """(reason, exit code) of a process that ends by this exception, as on the command line."""
    name = type(error).__name__
    text = fault_of(error) if isinstance(error, OSError) else str(error)
    reason = text.strip().partition("\n")[0][:400]
    if not reason:
        reason = name
    elif not hasattr(error, "exit_code") and not isinstance(error, OSError):
        reason = f"{name}: {reason}"
    return reason, exit_code_of(error)

"""Watches a training from inside its process: a floor of free memory, whether it hangs, signals.

    with HeartbeatWriter(run, say=print) as heartbeat, Watchdog(heartbeat) as watchdog:
        watchdog.plan(steps=100, bound_bytes=...)
        watchdog.phase("computing", step=12)
        if watchdog.why: ...  # save, then raise MemoryRunsOutError(watchdog.why)

One thread takes samples and decides; the heartbeat's own writes it: a file system that hangs must
not stop the first."""

import contextlib
import enum
import faulthandler
import os
import signal
import sys
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from cpu3d.errors import MemoryRunsOutError, WorkerLostError
from cpu3d.host.free_memory import FLOOR_BYTES, Room, Sample, take_sample
from cpu3d.run.heartbeat import WAITING_PHASES
from cpu3d.training.heartbeat_writer import END_S, HeartbeatWriter
from memory_estimator.common.units import format_bytes, format_seconds

# --- Memory ---


class MemoryFloor:
    """Decides by samples whether a process continues, stops after its step, or ends before the
    kernel kills it.

    At the peak of the next step, which is taken to be the highest one so far, a limit's floor and
    the memory of a save must be free. A run with a plan may have started with no more free than its
    bound: it must keep half of what the bound left free, at least FLOOR_BYTES, or the same command
    would stop again."""

    def __init__(self, bound_bytes: Optional[int] = None, save_bytes: int = 0, here: int = 1):
        """`bound_bytes` is the plan's upper bound of each of the `here` workers of this host,
        `save_bytes` a save's."""
        self._bound_bytes = bound_bytes
        self._save_bytes = save_bytes
        self._here = here
        self._first: Optional[Sample] = None
        self._most_bytes = 0
        self._free_bytes: Dict[str, int] = {}  # by limit, of the sample before

    def judge(self, sample: Sample) -> Tuple[str, str]:
        """Why the process must stop after its step, and why it must end at once; "" for no."""
        if self._first is None:
            self._first = sample
        self._most_bytes = max(self._most_bytes, sample.own_bytes)
        to_come = self._most_bytes - sample.own_bytes
        before = self._free_bytes
        self._free_bytes = {name: room.free_bytes for name, room in sample.rooms.items()}
        stop = ""
        for name, room in sample.rooms.items():
            keep = self._kept_bytes(name, room)
            got = (
                f"{format_bytes(room.free_bytes)} free of {name} and "
                f"{format_bytes(sample.own_bytes)} in this process, "
                f"{format_bytes(self._first.own_bytes)} at the beginning"
            )
            todo = "end other programs, or continue with a leaner --policy or with more memory"
            end_below = min(keep // 2, room.floor_bytes // 2, before.get(name, 0))
            if room.free_bytes < end_below:  # and it falls
                return "", f"memory must last to the end of a step, got {got}; {todo}"
            if room.free_bytes - to_come < keep and not stop:
                needed = format_bytes(keep + to_come)
                stop = f"memory must keep {needed} free for the next step, got {got}; {todo}"
        return stop, ""

    def _kept_bytes(self, name: str, room: Room) -> int:
        """Memory that a limit must leave free at the peak of a step."""
        kept = room.floor_bytes + self._save_bytes
        first = self._first
        if first is None or not self._bound_bytes or name not in first.rooms:
            return kept
        to_take = max(0, self._bound_bytes - first.file_bytes - first.own_bytes)
        left_by_bound = first.rooms[name].free_bytes - self._here * to_take
        return min(kept, max(FLOOR_BYTES, left_by_bound // 2))


# --- The watch ---

# Between two samples; the second if less than eight floors are free.
SAMPLE_EVERY_S = 0.5
SAMPLE_SOON_S = 0.05

# A process hangs when it notes no progress for so long, and than so many times the longest silence
# so far.
STALL_S = 3600.0
LONGER_THAN_BEFORE = 10
# A wait for other workers may take so many times as long: the worker that hangs is found first, and
# the chief can save.
WHILE_OTHERS_WORK = 1.5


class Watchdog:
    """A context manager around a training, within that of its heartbeat. Outside of its block it
    watches nothing."""

    def __init__(self, heartbeat: HeartbeatWriter, *, end: Callable[[int], Any] = os._exit):
        """`end(exit_code)` ends the process."""
        self.heartbeat = heartbeat
        self.now = heartbeat.now
        self._end = end
        # How long it has watched, now and at the last progress: without the time of a suspended
        # process.
        self._awake_s = 0.0
        self._called_at_s = 0.0
        self._longest_s = 0.0  # between two calls of `phase`
        self._wait_s = SAMPLE_EVERY_S
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.plan()

    @property
    def why(self) -> str:
        """Why the run must save and stop after this step; "" while it need not."""
        return self.now.stop

    def __enter__(self) -> "Watchdog":
        self.look()
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._done.set()
        self._thread.join(END_S)  # if a file system holds it, it is left: a daemon

    def phase(self, name: str, step: Optional[int] = None) -> None:
        """Note a phase that begins, such as "computing", and the steps done. Each call counts as
        progress."""
        if self.now.phase != "starting":
            self._longest_s = max(self._longest_s, self._awake_s - self._called_at_s)
        self._called_at_s = self._awake_s
        self.heartbeat.phase(name, step=step)

    def plan(
        self,
        *,
        step: int = 0,
        steps: int = 0,
        bound_bytes: Optional[int] = None,
        save_bytes: int = 0,
        here: int = 1,
    ) -> None:
        """Set the facts of the run; the last three are MemoryFloor's."""
        self.now.step = step
        self.now.steps = steps
        self.now.bound_bytes = bound_bytes
        self._floor = MemoryFloor(bound_bytes, save_bytes, here)
        self.heartbeat.write_soon()

    def stepped(self, seconds: float) -> None:
        """Note how long a step took."""
        self.now.longest_step_s = max(self.now.longest_step_s or 0.0, seconds)

    def look(self) -> None:
        """Take a sample and act on it."""
        self._awake_s += self._wait_s
        sample = take_sample()
        stop, end = self._floor.judge(sample)
        is_little = any(room.free_bytes < 8 * room.floor_bytes for room in sample.rooms.values())
        self._wait_s = SAMPLE_SOON_S if is_little else SAMPLE_EVERY_S
        now = self.now
        if now.exit_code is not None or self.heartbeat.good_end:
            return
        if end:
            self._end_at_once(end, MemoryRunsOutError.exit_code)
        elif stop and not now.stop and now.phase != "starting":  # when there is nothing to save
            now.stop = stop
            self.heartbeat.say_once("stop", f"warning: {stop}; saving after this step, then ending")
            self.heartbeat.write_soon()
        silent_s = self._awake_s - self._called_at_s
        allowed_s = max(STALL_S, LONGER_THAN_BEFORE * self._longest_s)
        if now.phase in WAITING_PHASES:
            allowed_s *= WHILE_OTHERS_WORK
        if silent_s > allowed_s:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # a stderr that is none
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            self._end_at_once(
                f"worker {now.rank} of {now.workers} must make progress within "
                f"{format_seconds(allowed_s)}, got none for {format_seconds(silent_s)}, "
                f"{now.phase}; look at the stacks in its log, and whether file systems and other "
                "workers answer. The same command continues from the last checkpoint",
                WorkerLostError.exit_code,
            )

    def _watch(self) -> None:
        while not self._done.wait(self._wait_s):
            try:
                self.look()
            except Exception as error:  # a fault of the watch must not end a run of days
                problem = f"memory and stalls cannot be watched, {error!r}"
                self.heartbeat.say_once("watch", f"warning: {problem}; the run continues")

    def _end_at_once(self, why: str, exit_code: int) -> None:
        """Print and note why, and end the process, even if the console or the file hangs."""
        line = f"error: {why}; ending at once"
        self.heartbeat.print_and_exit(line, why, exit_code, self._end)


# --- Stops ---


class StopRequest(enum.IntEnum):
    """Why a worker wants to stop after its step; of several reasons and workers the largest counts.
    A number, as it travels to the other workers as one float32 of a sum."""

    NONE = 0
    MEMORY = 1  # its watchdog asks for it
    SIGINT = signal.SIGINT
    SIGTERM = signal.SIGTERM


@contextlib.contextmanager
def noted_signals() -> Iterator[List[int]]:
    """Yields a list that gets the number of every SIGINT and SIGTERM, to read between two steps.

    A second SIGINT raises. Another SIGTERM does not: several arrive when a parent with threads is
    killed."""
    noted: List[int] = []

    def note(number: int, frame: Any) -> None:
        if noted and number == signal.SIGINT:
            raise KeyboardInterrupt
        noted.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Watches a training from inside its process: a floor of free memory, whether it hangs, signals,
and the heartbeat.

    with Guard(run, say=print) as guard:
        guard.plan(steps=100, bound_bytes=...)
        guard.phase("computing", step=12)
        if guard.why: ...  # save, then raise MemoryRunsOutError(guard.why)

One thread takes samples and decides, another writes the heartbeat: a file system that hangs must
not stop the first."""

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

from cpu3d.errors import MemoryRunsOutError, WorkerLostError, exit_code_of
from cpu3d.host.memory import peak_rss_bytes, resident
from cpu3d.run.heartbeat import (
    BEAT_S,
    WAITING_PHASES,
    Heartbeat,
    process_start,
    this_place,
    write_heartbeat,
)
from memory_estimator.common.units import format_bytes, format_seconds
from memory_estimator.host import available_bytes, meminfo, memory_limit

# --- Memory ---

MACHINE, CGROUP = (
    "this machine",
    "the limit of this container or job",
)  # the limits, as messages name them

# Kept free on the smallest and on the largest host, where other programs vary by more, beside the
# memory of a save.
FLOOR_BYTES, HIGHEST_FLOOR_BYTES = 64 * 2**20, 2**30


class Room(NamedTuple):
    """The room that a limit leaves. Pages of files, of a mapped store too, count as free: the
    kernel drops them."""

    free_bytes: int
    total_bytes: int

    @property
    def floor_bytes(self) -> int:
        """Memory to keep free."""
        return min(max(FLOOR_BYTES, self.total_bytes // 500), HIGHEST_FLOOR_BYTES)


class Sample(NamedTuple):
    """A process's memory and what its limits leave, at one moment."""

    rooms: Dict[str, Room]  # by limit: that of the machine always, that of a cgroup if set
    own_bytes: int = 0  # the process's own data, in memory or swapped out
    file_bytes: int = 0  # mapped pages of files: libraries, a store
    swapped_bytes: int = 0


def take_sample(root: Path = Path("/")) -> Sample:
    """This process's memory now, by /proc and /sys in `root`. Free swap counts for the machine, as
    the kernel kills no process while it has some; not for a cgroup."""
    memory, process = meminfo(root), resident()
    total = memory["MemTotal"]
    rooms = {MACHINE: Room(available_bytes(root, memory) + memory.get("SwapFree", 0), total)}
    limit, used = memory_limit(root, total)
    if limit is not None:
        rooms[CGROUP] = Room(max(0, limit - used), limit)
    swapped = process.swapped_bytes
    return Sample(rooms, process.anonymous_bytes + swapped, process.file_bytes, swapped)


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
        self._bound_bytes, self._save_bytes, self._here = bound_bytes, save_bytes, here
        self._first: Optional[Sample] = None
        self._most_bytes = 0
        self._free_bytes: Dict[str, int] = {}

    def judge(self, sample: Sample) -> Tuple[str, str]:
        """("", "") to continue, ("stop", why) to save after this step, or ("end", why) to end at
        once."""
        first = self._first = self._first or sample
        self._most_bytes = max(self._most_bytes, sample.own_bytes)
        to_come, action = self._most_bytes - sample.own_bytes, ("", "")
        for name, room in sample.rooms.items():
            before, self._free_bytes[name] = self._free_bytes.get(name, 0), room.free_bytes
            keep = room.floor_bytes + self._save_bytes
            if self._bound_bytes and name in first.rooms:
                to_take = max(0, self._bound_bytes - first.file_bytes - first.own_bytes)
                keep = min(
                    keep,
                    max(FLOOR_BYTES, (first.rooms[name].free_bytes - self._here * to_take) // 2),
                )
            got = (
                f"{format_bytes(room.free_bytes)} free of {name} and {format_bytes(sample.own_bytes)} in this process, "
                f"{format_bytes(first.own_bytes)} at the beginning; end other programs, or continue with a leaner "
                "--policy or with more memory"
            )
            if room.free_bytes < min(keep // 2, room.floor_bytes // 2, before):
                return "end", f"memory must last to the end of a step, got {got}"
            if room.free_bytes - to_come < keep and not action[0]:
                action = (
                    "stop",
                    f"memory must keep {format_bytes(keep + to_come)} free for the next step, got {got}",
                )
        return action


# --- The watch ---

SAMPLE_EVERY_S, SAMPLE_SOON_S = (
    0.5,
    0.05,
)  # between two samples; the second if less than eight floors are free

LONGER_THAN_BEFORE, FIRST_TIME, WHILE_OTHERS_WORK = 10, 4, 1.5
"""A process hangs when no progress is noted for longer than `stall_minutes` and than 10 times the
longest silence so far. A phase that is new, such as the step that compiles, may take 4 times the
minutes. A wait for other workers may take 1.5 times as long as any of their phases: the worker that
hangs is found first, and the chief can save."""

LAST_WORDS_S = (
    3.0  # the longest that a process which must end at once waits for its message and heartbeat
)


class Guard:
    """A context manager around a training. Outside of its block it watches and writes nothing."""

    def __init__(
        self,
        run: Path,
        *,
        say: Callable[[str], None],
        rank=0,
        workers=1,
        end=os._exit,
        **known: Any,
    ):
        """`end(exit_code)` ends the process; `known` is as in `plan`."""
        self._run, self._say, self._end = Path(run), say, end
        now, pid = time.time(), os.getpid()
        place = {"pid": pid, "process_start": process_start(pid) or 0, "place": this_place()}
        times = {
            "started": now,
            "beat": now,
            "phase": "starting",
            "phase_since": now,
            "step": 0,
            "steps": 0,
        }
        self.now = Heartbeat(
            rank=rank, workers=workers, host_name=socket.gethostname(), **place, **times
        )
        self._awake_s = self._called_at_s = 0.0
        """How long the watch has watched, now and at the last progress: without the time of a
        suspended process."""
        self._seen, self._longest_s = (
            set(),
            0.0,
        )  # phases so far, and the longest time between two calls of `phase`
        self._wait_s, self._messages = SAMPLE_EVERY_S, set()
        self._done, self._changed = threading.Event(), threading.Event()
        self._writing = threading.Lock()
        self._threads = [
            threading.Thread(target=work, name="guard", daemon=True)
            for work in (self._watch, self._beat)
        ]
        self.plan(**known)

    @property
    def why(self) -> str:
        """Why the run must save and stop after this step; "" while it need not."""
        return self.now.stop

    def __enter__(self) -> "Guard":
        self.look()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if self.now.exit_code is None:
            self.note_end(*how_it_ended(error))
        self._done.set()
        self._changed.set()
        for thread in self._threads:
            thread.join(LAST_WORDS_S)  # one that a file system holds is left behind; it is a daemon

    def phase(self, name: str, step: Optional[int] = None) -> None:
        """Note a phase that begins, such as "computing", and the steps done. Each call counts as
        progress."""
        now = self.now
        if now.phase != "starting":
            self._seen.add(now.phase)
            self._longest_s = max(self._longest_s, self._awake_s - self._called_at_s)
        self._called_at_s = self._awake_s
        if name != now.phase:
            now.phase_since = time.time()
        now.phase, now.step = name, now.step if step is None else step

    def plan(
        self, *, step: int = 0, steps: int = 0, stall_minutes: float = 15.0, **limits: Any
    ) -> None:
        """Set the facts of the run; with 0 `stall_minutes` nothing counts as hanging. `limits` are
        MemoryFloor's."""
        self.now.step, self.now.steps, self.now.bound_bytes = step, steps, limits.get("bound_bytes")
        self._stall_s, self._floor = 60 * stall_minutes, MemoryFloor(**limits)
        self._changed.set()

    def stepped(self, seconds: float) -> None:
        """Note how long a step took."""
        self.now.longest_step_s = max(self.now.longest_step_s or 0.0, seconds)

    def new_pace(self) -> None:
        """Forget how long phases took: the next ones are of another size, and the first of each may
        take longer."""
        self._seen, self._longest_s, self.now.longest_step_s = set(), 0.0, None

    def saved(self, step: int) -> None:
        """Note a checkpoint that is on the disk."""
        self.now.checkpoint_step, self.now.checkpoint_time = step, time.time()

    def note_end(self, reason: str, exit_code: int = 0) -> None:
        """Note how the run ends; without it the exception that leaves the block decides."""
        self.phase("ended")
        self.now.reason, self.now.exit_code = reason, exit_code
        self._changed.set()

    def allowed_s(self, phase: str) -> float:
        """Seconds that `phase` may take without progress."""
        longest_s = LONGER_THAN_BEFORE * self._longest_s
        if (
            phase in WAITING_PHASES
        ):  # the phases of the others are taken to be as long as those here
            return WHILE_OTHERS_WORK * max(FIRST_TIME * self._stall_s, longest_s)
        is_first = phase not in self._seen or self.now.longest_step_s is None
        return max((FIRST_TIME if is_first else 1) * self._stall_s, longest_s)

    def look(self) -> None:
        """Take a sample and act on it."""
        self._awake_s += self._wait_s
        now, sample = self.now, take_sample()
        action, why = self._floor.judge(sample)
        now.free_of, (now.free_bytes, now.limit_bytes) = min(
            sample.rooms.items(), key=lambda item: item[1].free_bytes
        )
        now.anonymous_bytes, now.swapped_bytes = (
            sample.own_bytes - sample.swapped_bytes,
            sample.swapped_bytes,
        )
        now.file_bytes = sample.file_bytes
        little = any(room.free_bytes < 8 * room.floor_bytes for room in sample.rooms.values())
        self._wait_s = SAMPLE_SOON_S if little else SAMPLE_EVERY_S
        if now.exit_code is None:
            if action == "end":
                self._end_at_once(why, MemoryRunsOutError.exit_code)
            elif (
                action == "stop" and not now.stop and now.phase != "starting"
            ):  # there is nothing to save yet
                now.stop = why
                self._say_once("stop", f"warning: {why}; saving after this step, then ending")
                self._changed.set()
            silent_s = self._awake_s - self._called_at_s
            if self._stall_s and silent_s > self.allowed_s(now.phase):
                self._stall(silent_s)

    # --- Threads ---

    def _watch(self) -> None:
        while not self._done.wait(self._wait_s):
            try:
                self.look()
            except Exception as error:  # a fault of the watch must not end a run of days
                self._say_once(
                    "watch",
                    f"warning: memory and stalls cannot be watched, {error!r}; the run continues",
                )

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
                self.now.beat, self.now.peak_bytes = time.time(), peak_rss_bytes()
                write_heartbeat(self._run, self.now)
        except Exception as error:  # a full disk, a folder that is gone, or anything else
            self._say_once(
                "heartbeat",
                f"warning: no heartbeat can be written, {error}; the run continues without it",
            )

    def _stall(self, silent_s: float) -> None:
        now = self.now
        name = f"worker {now.rank} of {now.workers}" if now.workers > 1 else "the run"
        now.stalled = (
            f"{name} must make progress within {format_seconds(self.allowed_s(now.phase))}, got none for "
            f"{format_seconds(silent_s)}, {now.phase}; look at the stacks in its log, and whether file systems and "
            "other workers answer. The same command continues from the last checkpoint"
        )
        with contextlib.suppress(
            OSError, ValueError, AttributeError
        ):  # of a stderr that is no file
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        self._end_at_once(now.stalled, WorkerLostError.exit_code)

    def _end_at_once(self, why: str, exit_code: int) -> None:
        """Print and note why, and end the process, even if the console or the file hangs."""
        self.now.reason, self.now.exit_code = why, exit_code
        step = self.now.checkpoint_step
        line = f"error: {why}{'' if step is None else f'; the checkpoint of step {step} is good'}; ending at once"
        writer = threading.Thread(
            target=lambda: (self._say_once("end", line), self._write()), daemon=True
        )
        writer.start()
        writer.join(LAST_WORDS_S)
        self._end(exit_code)

    def _say_once(self, kind: str, line: str) -> None:
        if kind not in self._messages:
            self._messages.add(kind)
            with contextlib.suppress(Exception):  # a terminal that is gone must not end the watch
                self._say(line)


# --- Ends ---


def how_it_ended(error: Optional[BaseException]) -> Tuple[str, int]:
    """(reason, exit code) of a process that ends by this exception, as on the command line."""
    if error is None:
        return "finished", 0
    first, name = str(error).strip().partition("\n")[0][:400], type(error).__name__
    reason = first if hasattr(error, "exit_code") else ": ".join(filter(None, (name, first)))
    return reason or name, exit_code_of(error)


@contextlib.contextmanager
def noted_signals() -> Iterator[List[int]]:
    """Yields a list that gets the number of every SIGINT and SIGTERM, to read between two steps.

    A second SIGINT raises. Another SIGTERM does not: several arrive when a parent with threads is
    killed."""
    noted: List[int] = []

    def note(number, frame):
        if noted and number == signal.SIGINT:
            raise KeyboardInterrupt
        noted.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Watches a training from inside its process: a floor of free memory, whether it hangs, signals,
and the heartbeat.

    with Guard(run, say=print) as guard:
        guard.plan(steps=100, bound_bytes=...)
        guard.phase("computing", step=12)
        if guard.why: ...  # save, then raise MemoryRunsOutError(guard.why)

One thread takes samples and decides, another writes the heartbeat: a file system that hangs must
not stop the first."""

import contextlib
import enum
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

from cpu3d.errors import MemoryRunsOutError, WorkerLostError, exit_code_of, fault_of
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

# The limits, as messages name them.
MACHINE = "this machine"
CGROUP = "the limit of this container or job"

# Kept free on the smallest and on the largest host, where other programs vary by more, beside the
# memory of a save.
FLOOR_BYTES = 64 * 2**20
HIGHEST_FLOOR_BYTES = 2**30


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
    memory = meminfo(root)
    process = resident()
    if process is None:
        raise OSError("/proc must tell a process's memory, got nothing; train on Linux")
    total = memory["MemTotal"]
    rooms = {MACHINE: Room(available_bytes(root, memory) + memory.get("SwapFree", 0), total)}
    limit, used = memory_limit(root, total)
    if limit is not None:
        rooms[CGROUP] = Room(max(0, limit - used), limit)
    swapped = process.swapped_bytes
    return Sample(rooms, process.anonymous_bytes + swapped, process.file_bytes, swapped)


class Action(enum.Enum):
    """What a process does after a sample of its memory."""

    CONTINUE = "continue"
    STOP = "stop"  # save after this step
    END = "end"  # end at once


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

    def judge(self, sample: Sample) -> Tuple[Action, str]:
        """What to do, and why; "" to continue."""
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
                return Action.END, f"memory must last to the end of a step, got {got}; {todo}"
            if room.free_bytes - to_come < keep and not stop:
                needed = format_bytes(keep + to_come)
                stop = f"memory must keep {needed} free for the next step, got {got}; {todo}"
        return (Action.STOP, stop) if stop else (Action.CONTINUE, "")

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

# A process hangs when no progress is noted for longer than `stall_minutes` and than so many times
# the longest silence so far.
LONGER_THAN_BEFORE = 10
# A phase that is new, such as the step that compiles, may take so many times the minutes.
FIRST_TIME = 4
# A wait for other workers may take so many times as long as any of their phases: the worker that
# hangs is found first, and the chief can save.
WHILE_OTHERS_WORK = 1.5

# The longest that a process which must end at once waits for its message and heartbeat.
LAST_WORDS_S = 3.0


class Guard:
    """A context manager around a training. Outside of its block it watches and writes nothing."""

    def __init__(
        self,
        run: Path,
        *,
        say: Callable[[str], None],
        rank: int = 0,
        workers: int = 1,
        acts: bool = True,
        next_phase: str = "",
        end: Callable[[int], Any] = os._exit,
    ):
        """Without `acts` it notes memory and beats, and never stops or ends the process. A
        `next_phase` follows a good end, in another guard of this process: the heartbeat stays open
        until then. `end(exit_code)` ends the process."""
        self._run = Path(run)
        self._say = say
        self._acts = acts
        self._next_phase = next_phase
        self._end = end
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
        # How long the watch has watched, now and at the last progress: without the time of a
        # suspended process.
        self._awake_s = 0.0
        self._called_at_s = 0.0
        self._seen: Set[str] = set()  # phases so far
        self._longest_s = 0.0  # between two calls of `phase`
        self._wait_s = SAMPLE_EVERY_S
        self._messages: Set[str] = set()  # kinds of lines that were printed
        self._done = threading.Event()
        self._changed = threading.Event()
        self._writing = threading.Lock()
        self._threads = [
            threading.Thread(target=work, name="guard", daemon=True)
            for work in (self._watch, self._beat)
        ]
        self.plan()

    @property
    def why(self) -> str:
        """Why the run must save and stop after this step; "" while it need not."""
        return self.now.stop

    def __enter__(self) -> "Guard":
        self.look()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> None:
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
        now.phase = name
        if step is not None:
            now.step = step

    def plan(
        self,
        *,
        step: int = 0,
        steps: int = 0,
        stall_minutes: float = 15.0,
        bound_bytes: Optional[int] = None,
        save_bytes: int = 0,
        here: int = 1,
    ) -> None:
        """Set the facts of the run; with 0 `stall_minutes` nothing counts as hanging. The last
        three are MemoryFloor's."""
        self.now.step = step
        self.now.steps = steps
        self.now.bound_bytes = bound_bytes
        self._stall_s = 60 * stall_minutes
        self._floor = MemoryFloor(bound_bytes, save_bytes, here)
        self._changed.set()

    def follow(self, before: Heartbeat) -> None:
        """Take over what an earlier guard of this run has noted of its steps and checkpoints."""
        now = self.now
        now.step = before.step
        now.steps = before.steps
        now.bound_bytes = before.bound_bytes
        now.longest_step_s = before.longest_step_s
        now.checkpoint_step = before.checkpoint_step
        now.checkpoint_time = before.checkpoint_time

    def stepped(self, seconds: float) -> None:
        """Note how long a step took."""
        self.now.longest_step_s = max(self.now.longest_step_s or 0.0, seconds)

    def new_pace(self) -> None:
        """Forget how long phases took: the next ones are of another size, and the first of each may
        take longer."""
        self._seen = set()
        self._longest_s = 0.0
        self.now.longest_step_s = None

    def saved(self, step: int) -> None:
        """Note a checkpoint that is on the disk."""
        self.now.checkpoint_step = step
        self.now.checkpoint_time = time.time()

    def note_end(self, reason: str, exit_code: int = 0) -> None:
        """Note how the run ends; without it the exception that leaves the block decides."""
        if exit_code == 0 and self._next_phase:
            self.phase(self._next_phase)
        else:
            self.phase("ended")
            self.now.reason = reason
            self.now.exit_code = exit_code
        self._changed.set()

    def allowed_s(self, phase: str) -> float:
        """Seconds that `phase` may take without progress."""
        longest_s = LONGER_THAN_BEFORE * self._longest_s
        first_s = max(FIRST_TIME * self._stall_s, longest_s)
        # The phases of the others are taken to be as long as those here.
        if phase in WAITING_PHASES:
            return WHILE_OTHERS_WORK * first_s
        is_first = phase not in self._seen or self.now.longest_step_s is None
        return first_s if is_first else max(self._stall_s, longest_s)

    def look(self) -> None:
        """Take a sample and act on it."""
        self._awake_s += self._wait_s
        sample = take_sample()
        action, why = self._floor.judge(sample)
        self._note_memory(sample)
        is_little = any(room.free_bytes < 8 * room.floor_bytes for room in sample.rooms.values())
        self._wait_s = SAMPLE_SOON_S if is_little else SAMPLE_EVERY_S
        now = self.now
        if now.exit_code is not None or not self._acts:
            return
        has_begun = now.phase != "starting"  # else there is nothing to save yet
        if action is Action.END:
            self._end_at_once(why, MemoryRunsOutError.exit_code)
        elif action is Action.STOP and has_begun and not now.stop:
            now.stop = why
            self._say_once("stop", f"warning: {why}; saving after this step, then ending")
            self._changed.set()
        silent_s = self._awake_s - self._called_at_s
        if self._stall_s and silent_s > self.allowed_s(now.phase):
            self._stall(silent_s)

    def _note_memory(self, sample: Sample) -> None:
        """Note a sample in the heartbeat, with the limit that leaves the least."""
        now = self.now
        now.free_of = min(sample.rooms, key=lambda name: sample.rooms[name].free_bytes)
        least = sample.rooms[now.free_of]
        now.free_bytes = least.free_bytes
        now.limit_bytes = least.total_bytes
        now.anonymous_bytes = sample.own_bytes - sample.swapped_bytes
        now.swapped_bytes = sample.swapped_bytes
        now.file_bytes = sample.file_bytes

    # --- Threads ---

    def _watch(self) -> None:
        while not self._done.wait(self._wait_s):
            try:
                self.look()
            except Exception as error:  # a fault of the watch must not end a run of days
                problem = f"memory and stalls cannot be watched, {error!r}"
                self._say_once("watch", f"warning: {problem}; the run continues")

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
                write_heartbeat(self._run, self.now)
        except Exception as error:  # a full disk, a folder that is gone, or anything else
            why = fault_of(error) if isinstance(error, OSError) else str(error)
            problem = f"no heartbeat can be written, {why}"
            self._say_once("heartbeat", f"warning: {problem}; the run continues without it")

    def _stall(self, silent_s: float) -> None:
        now = self.now
        name = "the run"
        if now.workers > 1:
            name = f"worker {now.rank} of {now.workers}"
        within = format_seconds(self.allowed_s(now.phase))
        now.stalled = (
            f"{name} must make progress within {within}, got none for {format_seconds(silent_s)}, "
            f"{now.phase}; look at the stacks in its log, and whether file systems and other "
            "workers answer. The same command continues from the last checkpoint"
        )
        of_no_file = (OSError, ValueError, AttributeError)  # errors of a stderr that is none
        with contextlib.suppress(*of_no_file):
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        self._end_at_once(now.stalled, WorkerLostError.exit_code)

    def _end_at_once(self, why: str, exit_code: int) -> None:
        """Print and note why, and end the process, even if the console or the file hangs."""
        self.now.reason = why
        self.now.exit_code = exit_code
        step = self.now.checkpoint_step
        good = "" if step is None else f"; the checkpoint of step {step} is good"

        def write() -> None:
            self._say_once("end", f"error: {why}{good}; ending at once")
            self._write()

        writer = threading.Thread(target=write, daemon=True)
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
    name = type(error).__name__
    text = fault_of(error) if isinstance(error, OSError) else str(error)
    reason = text.strip().partition("\n")[0][:400]
    if not reason:
        reason = name
    elif not hasattr(error, "exit_code") and not isinstance(error, OSError):
        reason = f"{name}: {reason}"
    return reason, exit_code_of(error)


class Stop(enum.IntEnum):
    """Why a worker wants to stop after its step; of several reasons and workers the largest counts.
    A number, as it travels to the other workers as one float32 of a sum."""

    NONE = 0
    MEMORY = 1  # its guard asks for it
    SIGINT = signal.SIGINT
    SIGTERM = signal.SIGTERM


Wish = Callable[[], Stop]
"""Is asked between two steps whether to stop."""


def stop_of(noted: Sequence[int], guard: Guard) -> Stop:
    """Why this worker wants to stop: by signals, as of `noted_signals`, or by its guard."""
    if noted:
        return Stop(max(noted))
    return Stop.MEMORY if guard.why else Stop.NONE


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

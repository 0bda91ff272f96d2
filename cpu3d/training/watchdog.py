"""Watches a training from inside its process: a floor of free memory, whether it hangs, signals.

    with Pulse(run, say=print) as pulse, Guard(pulse) as guard:
        guard.plan(steps=100, bound_bytes=...)
        guard.phase("computing", step=12)
        if guard.why: ...  # save, then raise MemoryRunsOutError(guard.why)

One thread takes samples and decides; the pulse's own writes the heartbeat: a file system that hangs
must not stop the first."""

import contextlib
import enum
import faulthandler
import os
import signal
import sys
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from cpu3d.errors import MemoryRunsOutError, WorkerLostError
from cpu3d.host.free_memory import FLOOR_BYTES, Room, Sample, take_sample
from cpu3d.run.heartbeat import WAITING_PHASES
from cpu3d.training.pulse import LAST_WORDS_S, Pulse
from memory_estimator.common.units import format_bytes, format_seconds

# --- Memory ---


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

STALL_S = 900.0
# A process hangs when no progress is noted for longer than STALL_S and than so many times the
# longest silence so far.
LONGER_THAN_BEFORE = 10
# A phase that is new, such as the step that compiles, may take so many times as long.
FIRST_TIME = 4
# A wait for other workers may take so many times as long as any of their phases: the worker that
# hangs is found first, and the chief can save.
WHILE_OTHERS_WORK = 1.5


class Guard:
    """A context manager around a training, within that of its pulse. Outside of its block it
    watches nothing."""

    def __init__(
        self,
        pulse: Pulse,
        *,
        end: Callable[[int], Any] = os._exit,
        stall_s: float = STALL_S,
    ):
        """`end(exit_code)` ends the process."""
        self._pulse = pulse
        self.now = pulse.now
        self._end = end
        self._stall_s = stall_s
        self._saved_step: Optional[int] = None  # of the last checkpoint of this attempt
        # How long the watch has watched, now and at the last progress: without the time of a
        # suspended process.
        self._awake_s = 0.0
        self._called_at_s = 0.0
        self._seen: Set[str] = set()  # phases so far
        self._longest_s = 0.0  # between two calls of `phase`
        self._wait_s = SAMPLE_EVERY_S
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)
        self.plan()

    @property
    def why(self) -> str:
        """Why the run must save and stop after this step; "" while it need not."""
        return self.now.stop

    def __enter__(self) -> "Guard":
        self.look()
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._done.set()
        self._thread.join(LAST_WORDS_S)  # if a file system holds it, it is left: a daemon

    def phase(self, name: str, step: Optional[int] = None) -> None:
        """Note a phase that begins, such as "computing", and the steps done. Each call counts as
        progress."""
        before = self.now.phase
        if before != "starting":
            self._seen.add(before)
            self._longest_s = max(self._longest_s, self._awake_s - self._called_at_s)
        self._called_at_s = self._awake_s
        self._pulse.phase(name, step=step)

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
        self._pulse.write_soon()

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
        self._saved_step = step

    def note_end(self, reason: str) -> None:
        """Note why a run is over: from now on nothing stops or ends it."""
        self._pulse.note_end(reason)

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
        is_little = any(room.free_bytes < 8 * room.floor_bytes for room in sample.rooms.values())
        self._wait_s = SAMPLE_SOON_S if is_little else SAMPLE_EVERY_S
        now = self.now
        if now.exit_code is not None or self._pulse.good_end:
            return
        has_begun = now.phase != "starting"  # else there is nothing to save yet
        if action is Action.END:
            self._end_at_once(why, MemoryRunsOutError.exit_code)
        elif action is Action.STOP and has_begun and not now.stop:
            now.stop = why
            self._pulse.say_once("stop", f"warning: {why}; saving after this step, then ending")
            self._pulse.write_soon()
        silent_s = self._awake_s - self._called_at_s
        if silent_s > self.allowed_s(now.phase):
            self._stall(silent_s)

    def _watch(self) -> None:
        while not self._done.wait(self._wait_s):
            try:
                self.look()
            except Exception as error:  # a fault of the watch must not end a run of days
                problem = f"memory and stalls cannot be watched, {error!r}"
                self._pulse.say_once("watch", f"warning: {problem}; the run continues")

    def _stall(self, silent_s: float) -> None:
        now = self.now
        name = "the run"
        if now.workers > 1:
            name = f"worker {now.rank} of {now.workers}"
        within = format_seconds(self.allowed_s(now.phase))
        why = (
            f"{name} must make progress within {within}, got none for {format_seconds(silent_s)}, "
            f"{now.phase}; look at the stacks in its log, and whether file systems and other "
            "workers answer. The same command continues from the last checkpoint"
        )
        of_no_file = (OSError, ValueError, AttributeError)  # errors of a stderr that is none
        with contextlib.suppress(*of_no_file):
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        self._end_at_once(why, WorkerLostError.exit_code)

    def _end_at_once(self, why: str, exit_code: int) -> None:
        """Print and note why, and end the process, even if the console or the file hangs."""
        step = self._saved_step
        good = "" if step is None else f"; the checkpoint of step {step} is good"
        self._pulse.last_words(f"error: {why}{good}; ending at once", why, exit_code)
        self._end(exit_code)


# --- Stops ---


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

"""Watches a training from inside its process: a heartbeat file, its memory against the plan, and whether it hangs.

    with Guard(run, bound_bytes=..., say=print) as guard:
        guard.phase("computing", step=12)
        if guard.stop: ...  # save, then raise MemoryRunsOutError(guard.why)

Decisions are in `judge` and `stall`; here are the threads that take samples and do what was decided. The heartbeat has
a thread of its own, because a file system that does not answer must not keep the watch from saying so.
"""

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Callable, List, Optional

from cpu3d.errors import MemoryRunsOutError, WorkerLostError
from cpu3d.host.memory import peak_rss_bytes
from cpu3d.training.guard.ending import how_it_ended
from cpu3d.training.guard.free_memory import tightest
from cpu3d.training.guard.heartbeat import (
    BEAT_S,
    Heartbeat,
    process_start,
    this_place,
    write_heartbeat,
)
from cpu3d.training.guard.judge import SAMPLE_EVERY_S, Limits, judge, next_look_s, span_s
from cpu3d.training.guard.pace import Pace
from cpu3d.training.guard.samples import Sample, take_sample, thinned
from cpu3d.training.guard.stall import StallClock, stall_message

MOST_SAMPLES = 400
"""Thinned beyond."""

PHASE_LASTS_S = 2.0
"""A phase that has gone on for so long is in the heartbeat without waiting for the next one."""

LAST_WORDS_S = 3.0
"""A process that has to end at once waits no longer than this for its message and its heartbeat to be written."""


class Unguarded:
    """Stands where no Guard is wanted: nothing is watched, nothing is written."""

    stop: Optional[str] = None
    why = ""

    def phase(self, name: str, step: Optional[int] = None) -> None:
        pass

    def saved(self, step: int) -> None:
        pass

    def plan(
        self,
        *,
        step: Optional[int] = None,
        steps: Optional[int] = None,
        bound_bytes: Optional[int] = None,
        save_bytes: Optional[int] = None,
        here: Optional[int] = None,
        stall_minutes: Optional[float] = None,
    ) -> None:
        pass

    def note_end(self, reason: str, exit_code: int = 0) -> None:
        pass


UNGUARDED = Unguarded()


class Guard(Unguarded):
    """A context manager around a training."""

    def __init__(
        self,
        run: Path,
        *,
        say: Callable[[str], None],
        rank: int = 0,
        workers: int = 1,
        step: int = 0,
        steps: int = 0,
        bound_bytes: Optional[int] = None,
        save_bytes: int = 0,
        here: int = 1,
        stall_minutes: float = 15.0,
        end: Callable[[int], None] = os._exit,
    ):
        """`save_bytes` is what saving takes for a moment.

        `here` workers of the run are on this host, each with a plan of `bound_bytes`. `end` ends the process. 0
        `stall_minutes` never find a stall. What is not known yet may be told later, see `plan`.
        """
        self.stop = None
        """None, or "memory": finish the step, save, and raise MemoryRunsOutError with `why`."""
        self.why = ""
        self._run, self._say, self._rank, self._workers = Path(run), say, rank, workers
        self._step, self._steps = step, steps
        self._bound_bytes, self._save_bytes, self._here = bound_bytes, save_bytes, here
        self._end = end
        # What `phase` notes, for the threads to read.
        self._phase, self._phase_since, self._called_at, self._signs = "starting", time.time(), time.perf_counter(), 0
        self._pace = Pace()
        self._checkpoint_step = self._checkpoint_time = None
        self._clock = StallClock(60 * stall_minutes)
        self._samples: List[Sample] = []
        self._anew = False
        """Whether samples are counted from the next one on."""
        self._told = set()
        self._stalled = self._reason = ""
        self._exit_code: Optional[int] = None
        self._started, self._start_of_process = time.time(), process_start(os.getpid()) or 0
        self._done, self._changed = threading.Event(), threading.Event()
        self._writing = threading.Lock()
        self._threads: List[threading.Thread] = []

    def __enter__(self) -> "Guard":
        self._look()
        for work in (self._watch, self._beat):
            thread = threading.Thread(target=work, name=f"guard {work.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, kind, error, trace) -> None:
        if self._exit_code is None:
            reason, exit_code = how_it_ended(error)
            self.note_end(reason, exit_code)
        self._done.set()
        self._changed.set()
        for thread in self._threads:
            thread.join(LAST_WORDS_S)  # one that a file system holds is left behind; it is a daemon

    def phase(self, name: str, step: Optional[int] = None) -> None:
        """Note what begins now, one of PHASES, and how many steps are done. Every call is a sign of life.

        Takes a few microseconds: call it for every volume of a long phase.
        """
        now = time.perf_counter()
        spent, before = now - self._called_at, self._phase
        had = self._clock.ended(before, spent)
        self._pace.ended(before, spent, had)
        if step is not None and step != self._step:
            self._pace.step_ended(is_done=step > self._step)
            self._step = step
        if name != before:
            self._phase_since = time.time()
        self._phase, self._called_at = name, now
        self._signs += 1

    def plan(
        self,
        *,
        step: Optional[int] = None,
        steps: Optional[int] = None,
        bound_bytes: Optional[int] = None,
        save_bytes: Optional[int] = None,
        here: Optional[int] = None,
        stall_minutes: Optional[float] = None,
    ) -> None:
        """Set what was not known when the guard was made, as for one that watches the process from its beginning.

        What is None stays. The plan is held against what the process takes from here on, its libraries there.
        """
        self._anew = True
        self._step = self._step if step is None else step
        self._steps = self._steps if steps is None else steps
        self._bound_bytes = self._bound_bytes if bound_bytes is None else bound_bytes
        self._save_bytes = max(self._save_bytes, save_bytes or 0)
        self._here = self._here if here is None else here
        if stall_minutes is not None:
            self._clock.limit_s = 60 * stall_minutes
        self._changed.set()

    def saved(self, step: int) -> None:
        """Note a checkpoint that is on the disk."""
        self._checkpoint_step, self._checkpoint_time = step, time.time()

    def note_end(self, reason: str, exit_code: int = 0) -> None:
        """Note how the run ends. Without it that is told by the exception which leaves the block, if any."""
        self.phase("ended")
        self._reason, self._exit_code = reason, exit_code
        self._changed.set()

    def heartbeat(self) -> Heartbeat:
        """What the file says, as of now."""
        samples = self._samples
        sample = samples[-1] if samples else None
        limit = tightest(sample.rooms) if sample else ""
        room = sample.rooms[limit] if sample else None
        known = sample is not None and sample.own_bytes > 0
        return Heartbeat(
            rank=self._rank,
            workers=self._workers,
            pid=os.getpid(),
            process_start=self._start_of_process,
            place=this_place(),
            host_name=socket.gethostname(),
            started=self._started,
            beat=time.time(),
            phase=self._phase,
            phase_since=self._phase_since,
            step=self._step,
            steps=self._steps,
            last_step_s=self._pace.last_step_s,
            median_step_s=self._pace.median_step_s,
            longest_step_s=self._pace.longest_step_s,
            anonymous_bytes=sample.own_bytes - sample.swapped_bytes if known else None,
            file_bytes=sample.file_bytes if known else None,
            swapped_bytes=sample.swapped_bytes if known else None,
            peak_bytes=peak_rss_bytes() if known else None,
            bound_bytes=self._bound_bytes,
            free_bytes=room and room.free_bytes,
            free_of=limit,
            limit_bytes=room and room.total_bytes,
            checkpoint_step=self._checkpoint_step,
            checkpoint_time=self._checkpoint_time,
            stalled=self._stalled,
            stop=self.why,
            reason=self._reason,
            exit_code=self._exit_code,
        )

    # --- Threads ---

    def _watch(self) -> None:
        wait_s = SAMPLE_EVERY_S
        while not self._done.wait(wait_s):
            try:
                self._look(wait_s)
                wait_s = next_look_s(self._samples)
            except Exception as error:  # the watch must not be what ends a run of days
                self._say_once(
                    "watch", f"warning: the watch on memory and stalls has failed, {error!r}; the run goes on"
                )
                wait_s = SAMPLE_EVERY_S

    def _beat(self) -> None:
        while True:
            done, phase, written = self._done.is_set(), self._phase, time.monotonic()  # before it is written
            self._write()
            if done:
                return
            # Steps may be many a second, and the file system that of a whole cluster: a new phase waits until it lasts.
            while not self._changed.wait(PHASE_LASTS_S / 2):
                lasts = time.time() - self._phase_since >= PHASE_LASTS_S
                if time.monotonic() - written >= BEAT_S or (lasts and self._phase != phase):
                    break
            self._changed.clear()

    def _write(self) -> None:
        try:
            with self._writing:
                write_heartbeat(self._run, self.heartbeat())
        except Exception as error:  # a disk that is full, a folder that is gone, and what nobody thought of
            self._say_once("heartbeat", f"warning: no heartbeat can be written, {error}; the run goes on without")

    def _look(self, wait_s: float = SAMPLE_EVERY_S) -> None:
        """Take a sample, and do what follows from it and from the silence."""
        phase = self._phase
        self._clock.look(time.monotonic(), self._signs, wait_s)
        sample, anew = take_sample(), self._anew
        if anew:
            self._anew = False
        limits = Limits(
            self._bound_bytes, self._save_bytes, self._here, self._pace.longest_had_s, self._pace.longest_save_s
        )
        self._samples = [sample] if anew else [*self._samples, sample]
        if len(self._samples) > MOST_SAMPLES:
            self._samples = thinned(self._samples, span_s(limits))
        if self._exit_code is not None:
            return
        verdict = judge(self._samples, limits)
        for kind, line in verdict.warnings:
            self._say_once(kind, line)
        if verdict.action == "end":
            self._end_at_once(verdict.why, MemoryRunsOutError.exit_code)
        elif verdict.action == "stop" and self.stop is None and phase != "starting":  # nothing is to be saved then
            self.why, self.stop = verdict.why, "memory"
            self._tell(f"warning: {verdict.why}; saving after this step, then ending")
            self._changed.set()
        if self._clock.is_stalled(phase, self._pace.longest_had_s):
            self._stall(phase)

    def _stall(self, phase: str) -> None:
        silent_s, allowed_s = self._clock.silent_s, self._clock.allowed_s(phase, self._pace.longest_had_s)
        self._stalled = stall_message(phase, silent_s, allowed_s, self._rank, self._workers)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # of a stderr that is no file
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        self._end_at_once(self._stalled, WorkerLostError.exit_code)

    def _end_at_once(self, why: str, exit_code: int) -> None:
        """Say why, note it, and end the process, whatever holds the console or the file."""
        self._reason, self._exit_code = why, exit_code
        since = ""
        if self._checkpoint_step is not None:
            since = f"; the checkpoint of step {self._checkpoint_step} is good"
        words = threading.Thread(target=lambda: (self._tell(f"error: {why}{since}; ending at once"), self._write()))
        words.daemon = True
        words.start()
        words.join(LAST_WORDS_S)
        self._end(exit_code)

    def _say_once(self, kind: str, line: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._tell(line)

    def _tell(self, line: str) -> None:
        with contextlib.suppress(Exception):  # a terminal that is gone must not end the watch
            self._say(line)

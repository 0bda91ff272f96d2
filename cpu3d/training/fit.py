"""The training loop: steps, validations and checkpoints of one run, in the order they happen.

What computes a step, network and data, is made for one grid. Under a curriculum there are two such grids: when the last
coarse step is done, what the run has learnt moves on to a learner of the full one.

Of several workers each goes through it at the same pace, on its own share of every batch. Only the chief writes.
"""

import contextlib
import dataclasses
import functools
import gc
import json
import math
import statistics
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, TypedDict

import numpy as np
import psutil

from cpu3d.data.files.loader import Reading
from cpu3d.data.sampling import Share
from cpu3d.distributed.all_reduce import ALONE, Exchange, array_from_chief, text_from_chief
from cpu3d.errors import DivergedError, InputError, Interrupted, MemoryRunsOutError, WorkerLostError, WorkersDifferError
from cpu3d.host.gpu import memory_device
from cpu3d.host.memory import peak_rss_bytes
from cpu3d.host.speed import Observer
from cpu3d.plan import Plan
from cpu3d.run.checkpoint import checkpoints, newest, set_aside, write_best, write_next
from cpu3d.run.log import append_event, forget_after, read_events, shown
from cpu3d.settings import RunConfig, command_at_half_rate
from cpu3d.training.feeds import Feeds, Parts
from cpu3d.training.learner import Learner, Outcome, allocator_peak_bytes
from cpu3d.training.tracking import Track, tracked
from cpu3d.training.validation import validate
from cpu3d.training.watchdog import UNGUARDED, Unguarded, noted_signals
from cpu3d.util.records import versions
from memory_estimator.common.files import typed
from memory_estimator.host import Host

MEMORY = 1
"""A worker's note that its memory is running out. The other notes are the numbers of SIGINT and SIGTERM; 0 is none."""

ENOUGH_STEPS = 12
"""After so many steps of an attempt it is recorded what they took; else at its end."""

TIMED_STEPS = 3
"""Taken to tell a step's time, and taken back; the first one compiles and is not counted."""

HIGHEST_LOSS = 10.0
"""A loss above this has diverged, as one that is not finite: a network that predicts nothing costs 1 to 2."""


class Fit:
    """One run in its folder, from its last checkpoint, or from the start where it has none."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        exchange: Exchange = ALONE,
        make_learner: Optional[Callable[[RunConfig], Learner]] = None,
    ):
        """`make_learner` makes, by default, the network of a configuration without a curriculum."""
        self.store, self.folder, self.config = plan.store, Path(folder), plan.config
        self.steps_per_epoch, self.steps = plan.steps_per_epoch, plan.steps
        self._exchange, self._guard = exchange, UNGUARDED
        self._make_learner = make_learner or (lambda config: Learner(config, exchange))
        self._observer: Optional[Observer] = None
        self.step = self.stale_validations = 0
        self.best: Optional[float] = None
        self.best_is_coarse = False
        """The highest mean Dice of a validation so far, and of which weights. Coarse ones do not compete with those in
        full, which end the run."""
        self.owes_validation = False
        """Whether the run was stopped before it could validate the step it has reached."""
        self.trained_s = 0.0
        """Wall time of earlier attempts and of this one, up to the last checkpoint."""
        self.waited_s = self.exchanged_s = self.stepped_s = 0.0
        self._show: Callable[[Dict[str, Any]], None] = lambda event: None
        self._track: Track = lambda event, picture=None: None
        """Both are given every event as it is logged."""
        self._reading: Optional[Reading] = None
        self._full_learner: Optional[Learner] = None
        """Made before its steps begin, where their time was measured."""
        self.warnings = self._restore()
        """What was wrong with checkpoints, a line each."""
        if exchange.is_chief:
            forget_after(self.folder, self.step, owes_validation=self.owes_validation)

    @property
    def has_open_length(self) -> bool:
        """Whether a budget of minutes is still to become steps: `fit_budget` does that."""
        return bool(self.config.budget_minutes) and not self.config.steps

    def fit_budget(self, guard: Unguarded = UNGUARDED) -> List[float]:
        """Cut the run to the steps that its minutes hold, the same on all workers; returns the seconds of a step, of a
        coarse one first where there are any.

        Of the minutes go what earlier attempts took and the timing itself, not what validations will take. The steps
        until the first validation are kept in any case. The weights are left as they were.
        """
        self._guard = guard
        begin, step_s = time.perf_counter(), [self._timed(self.learner)]
        if self.step < self.config.coarse_steps:
            self._full_learner = self._make_learner(self.config.at(self.steps))
            step_s.append(self._timed(self._full_learner))
        left_s = 60 * self.config.budget_minutes - self.trained_s - (time.perf_counter() - begin)
        first = 1 if self.config.validations else self.config.validate_every * self.steps_per_epoch

        def remaining_s(steps: int) -> float:
            coarse = max(self._cut_to(steps).coarse_steps - self.step, 0)
            return coarse * step_s[0] + (steps - self.step - coarse) * step_s[-1]

        most = next((n for n in range(self.steps, self.step, -1) if remaining_s(n) <= left_s), self.step + (left_s > 0))
        steps = min(max(most, first, self.step + self.learner.config.is_coarse), self.steps)
        self.steps = int(array_from_chief(self._exchange, np.array([steps]))[0])
        self.config = self._cut_to(self.steps)
        if self.learner.config.is_coarse and self.step >= self.config.coarse_steps:
            self._move_to_full()
        return step_s

    def log_start(self, host: Host, engine: str, threads: Dict[str, str], predicted: Dict[str, Any]) -> None:
        """Log where and with what this attempt runs, and what it was predicted to take."""
        config, unet, store = self.config, self.config.unet, self.store
        place = {"host": host.summary(), "versions": versions(), "engine": engine, "threads": threads}
        data = {"store": str(store.folder), "split_hash": config.split_hash, "grid": list(config.grid)}
        how = {"mode": config.mode, "device": config.device, "precision": unet.dtype, "policy": unet.policy}
        self._log(
            "start",
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            parameters=self.learner.parameters,
            read_mode=self.feeds.reading.plan.mode,
            micro_batch=config.micro,
            workers=self._exchange.count,
            steps=self.steps,
            coarse_steps=config.coarse_steps,
            predicted=predicted,
            **{**place, **data, **how},
        )

    def run(self, guard: Unguarded = UNGUARDED, observer: Optional[Observer] = None, mlflow: str = "") -> None:
        """Train to the last epoch, an early stop, or a stop that one of the workers asks for, and save in each case.
        `observer` is shown the steps; `mlflow` is the URI where the chief tracks the run too.

        Raises Interrupted after a signal and MemoryRunsOutError after the guard's word, once that is saved;
        DivergedError and WorkerLostError for what they say.
        """
        self._guard, self._observer = guard, observer
        self._resumed_at, self._trained_before_s = time.monotonic(), self.trained_s
        self._saved_at = self._resumed_at
        with noted_signals() as noted, contextlib.ExitStack() as stack:
            if self._exchange.is_chief:
                size = {"steps_per_epoch": self.steps_per_epoch, "batch": self.config.batch}
                self._show = stack.enter_context(shown(self.folder, steps=self.steps, done=self.step, **size))
                self._track = stack.enter_context(tracked(self.folder, self.config, mlflow))

            wish = functools.partial(_wish, noted, guard)
            stop, parts = 0, self._parts()
            while not (stop or self.is_over):
                if not self.owes_validation:
                    stop = self._train_step(parts, wish)
                    self.owes_validation = self._validation_is_due()
                    if self.step == self.config.coarse_steps and not stop:
                        parts = None  # its volumes, before others are read
                        self._move_to_full()
                        parts = self._parts()
                if self.owes_validation and not stop:  # who asks us to stop may not wait for it
                    self._check_finite()
                    stop = self._validate(wish)
                late = time.monotonic() - self._saved_at > 60 * self.config.save_minutes
                if stop or self.is_over or late or self._is_validation_step(self.step):
                    self._save()
            if observer:
                observer.record()
            reason = self.reason if self.is_over else "memory" if stop == MEMORY else "interrupted"
            self._log(
                "end",
                reason=reason,
                seconds=self.trained_s,
                peak_rss_bytes=peak_rss_bytes(),
                allocator_peak_bytes=allocator_peak_bytes(memory_device(self.config.device)),
                wait_share=self.waited_s / self.stepped_s if self.stepped_s else 0.0,
                exchange_share=self.exchanged_s / self.stepped_s if self.stepped_s else 0.0,
            )
        if self._exchange.count > 1:  # leave only when the chief has written all; it leaves without the others
            self._phase("waiting for the last checkpoint")
            try:
                self._exchange.sum(np.zeros(1, np.float32))
            except WorkerLostError:
                if not self._exchange.is_chief:
                    raise
        if self.is_over:
            guard.note_end(reason)
        else:
            raise _stopped(stop, guard, f"saved after step {self.step}")

    def note_end(self) -> None:
        """Log the end of a run that was killed between its last checkpoint and that line."""
        events = read_events(self.folder)
        if not events or events[-1]["event"] == "end":
            return
        peak_bytes = max((event["rss_bytes"] for event in events if "rss_bytes" in event), default=None)
        self._log(
            "end", reason=self.reason, seconds=self.trained_s, peak_rss_bytes=peak_bytes, allocator_peak_bytes=None
        )

    @property
    def is_over(self) -> bool:
        """Whether the last epoch is done or patience has run out: nothing is left to do."""
        stale = self.step > self.config.coarse_steps and 0 < self.config.patience <= self.stale_validations
        return not self.owes_validation and (stale or self.step >= self.steps)

    @property
    def reason(self) -> str:
        """Why a run that is over is over."""
        return "finished" if self.step >= self.steps else "early stop"

    @property
    def longer(self) -> str:
        """The option that lets a run go on which is over."""
        if self.step < self.steps:
            return "--patience"
        return "--steps" if self.config.steps else "--epochs"

    # --- The two grids ---

    def _keep_coarse_steps(self, saved: int) -> None:
        """Have the run, which may have another length than before, as many coarse steps as it has done: those of the
        checkpoint where it is in full already, and at least those done where it is not. Raises InputError where none
        would be left to do in full."""
        coarse = saved if self.step >= saved else max(self.config.coarse_steps, self.step)
        if self.step < saved and self.steps <= self.step:
            rule = f"steps must be above the {self.step} that the run has done at half the resolution"
            raise InputError(f"{rule}, got {self.steps}; raise it, so that it ends in full")
        self.config = dataclasses.replace(self.config, coarse_steps=coarse)

    def _cut_to(self, steps: int) -> RunConfig:
        """The run with so many steps; none that is in full becomes coarse."""
        config = dataclasses.replace(self.config, steps=steps)
        coarse = min(config.with_coarse_share(steps).coarse_steps, config.coarse_steps)
        return dataclasses.replace(config, coarse_steps=max(coarse, min(self.step, config.coarse_steps)))

    def _enter(self) -> None:
        """Make what computes the step to come: its learner, with weights as they were drawn, and its data."""
        config, made = self.config.at(self.step), None
        if not config.is_coarse:
            made, self._full_learner = self._full_learner, None
        self.learner = made or self._make_learner(config)
        self.feeds = self._feeds_of(config)

    def _move_to_full(self) -> None:
        """Go on at the full grid with all that was learnt at the coarse one: weights, momentum, averages."""
        self._guard.new_pace()
        self._phase("building the network in full")
        arrays = self.learner.arrays()
        self._enter()
        self.learner.restore(arrays)
        del arrays
        gc.collect()  # the coarse network, whose layers and functions name each other

    def _feeds_of(self, config: RunConfig) -> Feeds:
        share = Share(self._exchange.rank, self._exchange.count, config.batch)
        feeds = Feeds(self.store, config, share, self._reading)
        self._reading = feeds.reading
        return feeds

    def _parts(self) -> Parts:
        """What the steps to come are given, until the grid changes or the run ends."""
        is_coarse = self.step < self.config.coarse_steps
        return self.feeds.training(self.step, self.config.coarse_steps if is_coarse else self.steps, self._guard.phase)

    def _timed(self, learner: Learner) -> float:
        """Seconds of a step of a learner, whose weights are left as they were."""
        before, steps = learner.arrays(), range(TIMED_STEPS)
        parts = self._feeds_of(learner.config).training(self.step, self.step + TIMED_STEPS, self._guard.phase)
        step_s = statistics.median([self._compute(learner, parts, 0.0)[1] for _ in steps][1:])
        learner.restore(before)
        return step_s

    # --- Steps ---

    def _phase(self, name: str) -> None:
        self._guard.phase(name, step=self.step)

    def _train_step(self, parts: Parts, wish: Callable[[], int]) -> int:
        """One step; returns what stops the run after it, 0 for nothing: the same on all workers."""
        config, is_coarse = self.config, self.step < self.config.coarse_steps
        if self.step == config.coarse_steps:  # what the coarse steps could not learn more of, these may
            self.stale_validations = 0
        rate, observer = config.rate_at(self.step, self.steps), None if is_coarse else self._observer
        waited_before_s, finished_before_s = parts.waited_s, parts.finished_s
        with self._saved_where_one_is_lost():  # nothing but this step is
            outcome, step_s = self._compute(self.learner, parts, rate, wish)
        waited_s = parts.waited_s - waited_before_s
        own_s = step_s - waited_s - (parts.finished_s - finished_before_s) - outcome.exchange_s
        if observer and observer.note(own_s) == ENOUGH_STEPS:
            observer.record()
        self.waited_s += waited_s
        self.exchanged_s += outcome.exchange_s
        self.stepped_s += step_s
        names = self.feeds.case_ids(self.step)
        if not outcome.loss <= HIGHEST_LOSS:
            raise self._diverged(outcome, names)
        epoch = self.step // self.steps_per_epoch
        self.step += 1
        exchanged = {"exchange_s": outcome.exchange_s} if self._exchange.count > 1 else {}
        self._log(
            "step",
            epoch=epoch,
            case_id=" ".join(names),
            loss=outcome.loss,
            dice=dict(zip(config.regions, map(float, outcome.dice.mean(0)))),
            learning_rate=rate,
            voxels=config.batch * math.prod(self.learner.config.grid),
            step_s=step_s,
            wait_s=waited_s,
            **exchanged,
            rss_bytes=psutil.Process().memory_info().rss,
        )
        return int(max(outcome.notes))

    def _compute(
        self, learner: Learner, parts: Parts, rate: float, wish: Callable[[], int] = lambda: 0
    ) -> Tuple[Outcome, float]:
        """What a learner makes of the next parts, and the seconds that took."""
        self._phase("computing")
        begin = time.perf_counter()
        outcome = learner.step(parts, rate, wish, lambda: self._phase("exchanging"))
        self._phase("computing")
        return outcome, time.perf_counter() - begin

    def _diverged(self, outcome: Outcome, names: List[str]) -> DivergedError:
        """Log a step whose loss is too high or not finite, and return what to raise. Nothing of it is saved."""
        losses = np.repeat(outcome.losses, self.config.micro)  # of a part, for each of its cases
        bad = ", ".join(dict.fromkeys(name for name, loss in zip(names, losses) if not loss <= HIGHEST_LOSS))
        there = checkpoints(self.folder)[:1]
        left = f"{there[0].name} is the last good checkpoint" if there else "there is no checkpoint yet"
        reason = f"loss must be finite and at most {HIGHEST_LOSS:g}, got {outcome.loss:g} at step {self.step + 1}"
        reason += f" on {bad or ', '.join(names)}"
        with contextlib.suppress(OSError):  # what is raised says the same
            self._log("diverged", reason=reason)
        again = command_at_half_rate(self.config, self.folder, self._exchange.count)
        return DivergedError(f"{reason}; {left}. Look at these cases, or go on at half the rate: {again}")

    def _is_validation_step(self, step: int) -> bool:
        """Whether a validation is due after so many steps, or would be if cases were held out for it."""
        count = self.config.validations
        if count:  # the i-th of them as soon as that share of the steps is done
            return step * count // self.steps > (step - 1) * count // self.steps
        return step % (self.steps_per_epoch * self.config.validate_every) == 0

    def _validation_is_due(self) -> bool:
        return bool(self.feeds.held_out) and (self._is_validation_step(self.step) or self.step == self.steps)

    def _validate(self, wish: Callable[[], int]) -> int:
        """Score the held-out volumes; keeps the weights when their mean Dice is the best so far.

        Returns what stops the run after it, 0 for nothing: the same on all workers.
        """
        begin = time.perf_counter()
        with self._saved_where_one_is_lost():
            found, stop = validate(self.feeds, self.learner, self._exchange, self._phase, wish)
        if found is None:
            return stop
        mean_dice = float(found.dice.mean())
        is_first = self.best is None or self.best_is_coarse > self.learner.config.is_coarse
        better = is_first or mean_dice > self.best
        self.stale_validations = 0 if better else self.stale_validations + 1
        self.owes_validation = False
        if better:
            self.best, self.best_is_coarse = mean_dice, self.learner.config.is_coarse
            self._save_best()
        self._log(
            "validation",
            found.picture,
            epoch=self.step // self.steps_per_epoch,
            loss=found.loss,
            dice=dict(zip(self.config.regions, map(float, found.dice))),
            mean_dice=mean_dice,
            seconds=time.perf_counter() - begin,
            best=bool(better),
            cases=found.cases,
        )
        return stop

    # --- Files ---

    def _save(self) -> None:
        """Write a checkpoint. Raises OSError where it cannot, with what is there still; the chief's work alone."""
        self._phase("saving")
        begin = time.perf_counter()
        self._saved_at, self.trained_s = time.monotonic(), self._trained_until_now_s
        self._check_finite()
        if not self._exchange.is_chief:
            return
        if self.step and not self.feeds.held_out:
            self._save_best()
        with self._writing(f"step {self.step} could not be saved"):
            size = write_next(
                self.folder,
                self.step,
                self.learner.arrays(),
                self._state(),
                keep=self.config.keep,
            )
        self._guard.saved(self.step)
        self._log("checkpoint", seconds=time.perf_counter() - begin, bytes=size)

    @property
    def _trained_until_now_s(self) -> float:
        return self._trained_before_s + time.monotonic() - self._resumed_at

    def _check_finite(self) -> None:
        """The loss of a step is that of the weights before its update, so an update that overflows shows here first."""
        # A smallest and a largest value are of no size; a mask would be. Both are NaN where one value is.
        arrays = self.learner.arrays().values()
        if not all(np.isfinite(extreme(array)) for array in arrays for extreme in (np.min, np.max)):
            rule = f"weights must be finite, got others after step {self.step}"
            again = command_at_half_rate(self.config, self.folder, self._exchange.count)
            raise DivergedError(f"{rule}; go on at half the rate: {again}")

    def _save_best(self) -> None:
        if self._exchange.is_chief:
            self._phase("saving")
            with self._writing("the best weights could not be saved"):
                write_best(self.folder, self.learner.weights(), self._state())

    @contextlib.contextmanager
    def _saved_where_one_is_lost(self) -> Iterator[None]:
        """Let the chief save what all have done before WorkerLostError goes on."""
        try:
            yield
        except WorkersDifferError:
            raise
        except WorkerLostError as error:
            if not self._exchange.is_chief:
                raise
            try:
                self._save()
                message = f"saved after step {self.step}"
            except (OSError, InputError) as also:
                message = str(also)
            raise WorkerLostError(f"{error}; {message}") from error

    @contextlib.contextmanager
    def _writing(self, problem: str) -> Iterator[None]:
        """Raise an OSError again with what is wrong, and what the run can go on from."""
        try:
            yield
        except OSError as error:
            there = checkpoints(self.folder)
            what = f"{there[0]} is whole" if there else "there is no checkpoint yet"
            raise OSError(f"{problem}: {error}; {what}; free some space, and the same command continues") from error

    def _log(self, event: str, picture: Optional[np.ndarray] = None, **content: Any) -> None:
        if not self._exchange.is_chief:
            return
        line = {"event": event, "step": self.step, **content}
        with self._writing(f"step {self.step} could not be logged in {self.folder / 'log.jsonl'}"):
            append_event(self.folder, line)
        self._show(line)
        self._track(line, picture)

    def _state(self) -> Dict[str, Any]:
        own = {name: getattr(self, name) for name in _State.__annotations__}
        config = self.config
        return {**own, "coarse_steps": config.coarse_steps, "split_hash": config.split_hash, "seed": config.seed}

    def _restore(self) -> List[str]:
        """Take up the newest whole checkpoint, which the chief reads for all, where there is one; returns a line about
        each that is damaged. What computes the step to come is there then."""
        found = newest(self.folder) if self._exchange.is_chief else None
        text = text_from_chief(self._exchange, json.dumps(found.state) if found else "")
        try:
            state = typed(json.loads(text), _SavedState, "state") if text else {}
        except ValueError as error:
            of = found.path if found else "of the chief"
            raise InputError(f"checkpoint {of} must hold a run's state, got {error}; delete it") from None
        for name in state and _State.__annotations__:
            setattr(self, name, state[name])
        if state:
            self._keep_coarse_steps(state["coarse_steps"])
        self._enter()
        if found:
            self.learner.restore(found.arrays)
        if text and self._exchange.count > 1:
            for variable in self.learner.named_variables().values():
                variable.assign(array_from_chief(self._exchange, np.asarray(variable.read_value())))
        return set_aside(found) if found else []


class _State(TypedDict):
    """What of a checkpoint's state a run goes on from, by the names that it has here."""

    step: int
    best: Optional[float]
    best_is_coarse: bool
    stale_validations: int
    trained_s: float
    owes_validation: bool


class _SavedState(_State):
    coarse_steps: int
    """Of the run as it was when it was saved."""


def _wish(noted: List[int], guard: Unguarded) -> int:
    """What this worker tells the others when its gradients are ready."""
    return max(noted, default=MEMORY if guard.why else 0)


def _stopped(stop: int, guard: Unguarded, done: str) -> BaseException:
    """What to raise for a stop that one of the workers asked for, once that is done."""
    if stop == MEMORY:
        why = guard.why or "the memory of another worker runs out"
        return MemoryRunsOutError(f"{why}; stopped and {done}, the same command continues")
    return Interrupted(f"{done}; the same command continues", stop)

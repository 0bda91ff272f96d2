"""The training loop: steps, validations and checkpoints of one run, in the order they happen.

Of several workers each goes through it at the same pace, on its own share of every batch. Only the chief writes.
"""

import contextlib
import dataclasses
import functools
import json
import statistics
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, TypedDict

import numpy as np
import psutil

from cpu3d.data.sampling import Share
from cpu3d.distributed.all_reduce import ALONE, Exchange, array_from_chief, text_from_chief
from cpu3d.errors import DivergedError, InputError, Interrupted, MemoryRunsOutError, WorkerLostError, WorkersDifferError
from cpu3d.host.gpu import memory_device
from cpu3d.host.memory import peak_rss_bytes
from cpu3d.host.observe import Observer
from cpu3d.plan import Plan
from cpu3d.training.checkpoint import checkpoints, newest, set_aside, step_of, write_best, write_next
from cpu3d.training.feeds import Feeds, Parts
from cpu3d.training.learner import Learner, Outcome, allocator_peak_bytes
from cpu3d.training.learning_rate import FEW, RATES, LossWatch, best_rate, is_over
from cpu3d.training.run_log import RATE_TEST, WENT_BACK, append_event, forget_after, read_events, shown
from cpu3d.training.tracking import Track, tracked
from cpu3d.training.validation import validate
from cpu3d.training.watchdog import UNGUARDED, Unguarded, noted_signals
from cpu3d.util.records import versions
from memory_estimator.files import typed
from memory_estimator.host import Host

MEMORY = 1
"""A worker's note that its memory is running out. The other notes are the numbers of SIGINT and SIGTERM; 0 is none."""

ENOUGH_STEPS = 12
"""After so many steps of an attempt it is recorded what they took; else at its end."""

TIMED_STEPS = 3
"""Taken to tell a step's time, and taken back; the first one compiles and is not counted."""

MOST_RETRIES, SAME_STEP = 6, 2
"""Times in a row that a run goes back from about the same step, at half the rate each time; and from exactly the same
one with a loss that is not finite, as where a case is at fault."""


class Fit:
    """One run in its folder, from its last checkpoint, or from the start where it has none."""

    def __init__(self, plan: Plan, folder: Path, exchange: Exchange = ALONE, learner: Optional[Learner] = None):
        """`learner` is by default the plan's network."""
        self.store, self.folder, self.config = plan.store, Path(folder), plan.config
        self.steps_per_epoch, self.steps = plan.steps_per_epoch, plan.steps
        self.feeds = Feeds(self.store, self.config, Share(exchange.rank, exchange.count, self.config.batch))
        self.learner = Learner(self.config, exchange) if learner is None else learner
        self._exchange, self._guard = exchange, UNGUARDED
        self._observer: Optional[Observer] = None
        self.step = self.stale_validations = 0
        self.best: Optional[float] = None
        self.owes_validation = False
        """Whether the run was stopped before it could validate the step it has reached."""
        self.trained_s = 0.0
        """Wall time of earlier attempts and of this one, up to the last checkpoint."""
        self.rate_share = 1.0
        """Of the learning rate: halved each time the run went back."""
        self.diverged_at = self.retries = 0
        """Step of the last divergence, and how often in a row the run went back from about there."""
        self.losses = LossWatch()
        self.waited_s = self.exchanged_s = self.stepped_s = 0.0
        self._show: Callable[[Dict[str, Any]], None] = lambda event: None
        self._track: Track = lambda event, picture=None: None
        """Both are given every event as it is logged."""
        self.warnings = self._restore()
        """What was wrong with checkpoints, a line each."""
        self._forget()

    @property
    def has_open_length(self) -> bool:
        """Whether a budget of minutes is still to become steps: `fit_budget` does that."""
        return bool(self.config.budget_minutes) and not self.config.steps

    def find_rate(self, guard: Unguarded = UNGUARDED) -> None:
        """Find the learning rate that was left open by a range test on the first batch, the same on all workers. The
        weights are left as they were. Raises DivergedError where the loss of that batch is not finite."""
        self._guard = guard
        begin, before, losses, stop = time.perf_counter(), self.learner.arrays(), [], 0
        with noted_signals() as noted:
            while not (stop or (losses and is_over(losses))):
                rate, parts = (*RATES, 0.0)[len(losses)], self.feeds.training(0, 1, guard.phase)
                outcome, _ = self._compute(parts, rate, lambda: _wish(noted, guard))
                losses.append(outcome.loss)
                stop = int(max(outcome.notes))
        self.learner.restore(before)
        if stop:
            raise _stopped(stop, guard, "put the weights back before the first step")
        if not np.isfinite(losses[0]):
            error = self._diverged(outcome, self.feeds.case_ids(0))
            self._log("diverged", reason=error.problems[0].partition(";")[0], losses=[])
            raise error
        rate = float(array_from_chief(self._exchange, np.array([best_rate(losses)]))[0])
        self.config = dataclasses.replace(self.config, found_rate=rate)
        seconds = time.perf_counter() - begin
        self.trained_s += seconds
        tried = {"rates": list(RATES[: len(losses) - 1]), "losses": [_shown(loss) for loss in losses]}
        self._log(RATE_TEST, learning_rate=rate, seconds=seconds, **tried)

    def fit_budget(self, guard: Unguarded = UNGUARDED) -> float:
        """Cut the run to the steps that its minutes hold, the same on all workers; returns the seconds a step.

        Of the minutes go what earlier attempts took and the timing itself, not what validations will take. The steps
        until the first validation are kept in any case. The weights are left as they were.
        """
        self._guard = guard
        begin, before = time.perf_counter(), self.learner.arrays()
        parts = self.feeds.training(self.step, self.step + TIMED_STEPS, guard.phase)
        step_s = statistics.median([self._compute(parts, 0.0)[1] for _ in range(TIMED_STEPS)][1:])
        self.learner.restore(before)
        left_s = 60 * self.config.budget_minutes - self.trained_s - (time.perf_counter() - begin)
        first = 1 if self.config.validations else self.config.validate_every * self.steps_per_epoch
        more = max(round(left_s / step_s), 1) if left_s > 0 else 0
        steps = min(max(self.step + more, first), self.steps)
        self.steps = int(array_from_chief(self._exchange, np.array([steps]))[0])
        self.config = dataclasses.replace(self.config, steps=self.steps)
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
        parts = self.feeds.training(self.step, self.steps, guard.phase)
        with noted_signals() as noted, contextlib.ExitStack() as stack:
            if self._exchange.is_chief:
                size = {"steps_per_epoch": self.steps_per_epoch, "batch": self.config.batch}
                self._show = stack.enter_context(shown(self.folder, steps=self.steps, done=self.step, **size))
                self._track = stack.enter_context(tracked(self.folder, self.config, mlflow))

            wish = functools.partial(_wish, noted, guard)
            stop, due = 0, False
            if not self.step:
                self._save()  # there is always one to go back to
            while not (stop or self.is_over):
                try:
                    if not self.owes_validation:
                        stop = self._train_step(parts, wish)
                        self.owes_validation = self._validation_is_due()
                    if self.owes_validation and not stop:  # who asks us to stop may not wait for it
                        self._check_finite()
                        stop = self._validate(wish)
                    late = time.monotonic() - self._saved_at > 60 * self.config.save_minutes
                    due = due or late or self._is_mark(self.step)
                    if stop or self.is_over or (due and not self.losses.high_steps and self._is_finite()):
                        self._save()  # what may be diverging is not saved; soon the losses say which, to all workers
                        due = False
                except DivergedError as error:
                    self._go_back(error)
                    parts = self.feeds.training(self.step, self.steps, guard.phase)
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
        stale = 0 < self.config.patience <= self.stale_validations
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

    # --- Steps ---

    def _phase(self, name: str) -> None:
        self._guard.phase(name, step=self.step)

    def _train_step(self, parts: Parts, wish: Callable[[], int]) -> int:
        """One step; returns what stops the run after it, 0 for nothing: the same on all workers."""
        config = self.config
        rate = self.rate_share * config.rate_at(self.step, self.steps)
        waited_before_s, finished_before_s = parts.waited_s, parts.finished_s
        with self._saved_where_one_is_lost():  # nothing but this step is
            step = functools.partial(self._compute, parts, rate, wish)
            outcome, step_s = self._observer.watch(step) if self._observer else step()
        waited_s = parts.waited_s - waited_before_s
        own_s = step_s - waited_s - (parts.finished_s - finished_before_s) - outcome.exchange_s
        if self._observer and self._observer.note(own_s) == ENOUGH_STEPS:
            self._observer.record()
        self.waited_s += waited_s
        self.exchanged_s += outcome.exchange_s
        self.stepped_s += step_s
        names = self.feeds.case_ids(self.step)
        if self.losses.diverges(outcome.loss):
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
            step_s=step_s,
            wait_s=waited_s,
            **exchanged,
            rss_bytes=psutil.Process().memory_info().rss,
        )
        return int(max(outcome.notes))

    def _compute(self, parts: Parts, rate: float, wish: Callable[[], int] = lambda: 0) -> Tuple[Outcome, float]:
        """What the learner makes of the next parts, and the seconds that took."""
        self._phase("computing")
        begin = time.perf_counter()
        outcome = self.learner.step(parts, rate, wish, lambda: self._phase("exchanging"))
        self._phase("computing")
        return outcome, time.perf_counter() - begin

    def _diverged(self, outcome: Outcome, names: List[str]) -> DivergedError:
        """What to raise for a loss that is not finite, with its cases, or for the last one of several too high."""
        if np.isfinite(outcome.loss):
            losses = ", ".join(f"{loss:.3f}" for loss in self.losses.recent)
            return DivergedError(
                f"loss must stay below {self.losses.level:.3f}, got {losses} at step {self.step + 1}; lower "
                f"--learning-rate, {self.config.peak_rate:g}, and train into another folder"
            )
        losses = np.repeat(outcome.losses, self.config.micro)  # of a part, for each of its cases
        bad = [name for name, loss in zip(names, losses) if not np.isfinite(loss)]
        return DivergedError(
            f"loss and gradients must be finite, got {outcome.loss} at step {self.step + 1} on {', '.join(bad)}; "
            f"look at them, or lower --learning-rate, {self.config.peak_rate:g}, and train into another folder"
        )

    def _go_back(self, error: DivergedError) -> None:
        """Go on from the last mark before the divergence, at half the rate. Raises DivergedError where that has failed
        MOST_RETRIES times in a row. A run that is cut meanwhile diverges again, and ends in the same bits."""
        self._phase("going back")
        failed, best, share, trained_s = self.step + 1, self.best, self.rate_share / 2, self._trained_until_now_s
        high, losses, reason = self.losses.high_steps, list(self.losses.recent), error.problems[0].partition(";")[0]
        retries = self.retries + 1 if failed <= self.diverged_at + FEW else 1
        if retries > (SAME_STEP if failed == self.diverged_at and not high else MOST_RETRIES):
            with contextlib.suppress(OSError):  # what is raised says the same
                self._log("diverged", reason=reason, losses=losses)
            left = ", ".join(path.name for path in checkpoints(self.folder)[:1])
            raise DivergedError(f"{error}; {left or 'no checkpoint'} is from before")
        # The first loss that is too high is that of weights from the step before. Each time it goes back farther.
        last_good = self.step - (1 + high + FEW * (retries - 1) if high or retries > 1 else 0)
        self._restore(last_good)
        self.rate_share, self.diverged_at, self.retries = share, failed, retries
        self.best = best  # whose weights are kept
        self._forget()
        back = {"rate_share": share, "diverged_at": failed, "losses": losses, "best": best}
        self._log(WENT_BACK, **back, reason=reason, seconds=trained_s - self.trained_s)
        self._save()
        if self._exchange.is_chief:
            for path in checkpoints(self.folder):
                if step_of(path) > self.step:
                    path.unlink()

    def _forget(self) -> None:
        if self._exchange.is_chief:
            share, is_found = self.rate_share, bool(self.config.found_rate)
            owes = self.owes_validation
            forget_after(self.folder, self.step, owes_validation=owes, rate_share=share, rate_is_found=is_found)

    def _is_mark(self, step: int) -> bool:
        """Whether a validation is due after so many steps, or would be if cases were held out for it; and the start.
        There is a checkpoint of these, whatever the time, so that it is known where a run goes back to."""
        count = self.config.validations
        if count:  # the i-th of them as soon as that share of the steps is done
            return step * count // self.steps > (step - 1) * count // self.steps
        return step % (self.steps_per_epoch * self.config.validate_every) == 0

    def _validation_is_due(self) -> bool:
        return bool(self.feeds.held_out) and (self._is_mark(self.step) or self.step == self.steps)

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
        better = self.best is None or mean_dice > self.best
        self.stale_validations = 0 if better else self.stale_validations + 1
        self.owes_validation = False
        if better:
            self.best = mean_dice
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
                is_mark=self._is_mark,
            )
        self._guard.saved(self.step)
        self._log("checkpoint", seconds=time.perf_counter() - begin, bytes=size)

    @property
    def _trained_until_now_s(self) -> float:
        return self._trained_before_s + time.monotonic() - self._resumed_at

    def _check_finite(self) -> None:
        """The loss of a step is that of the weights before its update, so an update that overflows shows here first."""
        if not self._is_finite():
            way = "lower --learning-rate and train into another folder"
            raise DivergedError(f"weights must be finite, got others after step {self.step}; {way}")

    def _is_finite(self) -> bool:
        """Whether all weights are, and what else is saved."""
        # A smallest and a largest value are of no size; a mask would be. Both are NaN where one value is.
        arrays = self.learner.arrays().values()
        return all(np.isfinite(extreme(array)) for array in arrays for extreme in (np.min, np.max))

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
        own["losses"] = dataclasses.asdict(self.losses)
        return {**own, "split_hash": self.config.split_hash, "seed": self.config.seed}

    def _restore(self, last_good: Optional[int] = None) -> List[str]:
        """Take up the newest whole checkpoint, which the chief reads for all; returns a line about it. To go back it is
        the newest mark that is not after `last_good`, else the oldest mark."""
        found = None
        if self._exchange.is_chief and last_good is not None:
            steps = [step_of(path) for path in checkpoints(self.folder)]
            marks = [step for step in steps if self._is_mark(step)] or steps
            found = newest(self.folder, lambda step: step in marks and step <= max(last_good, min(marks)))
        elif self._exchange.is_chief:
            found = newest(self.folder)
        if found:
            try:
                typed({**_LATER, **found.state}, _State, "state")
            except ValueError as error:
                raise InputError(f"checkpoint {found.path} must hold a run's state, got {error}; delete it") from None
            self.learner.restore(found.arrays)
        text = text_from_chief(self._exchange, json.dumps(found.state) if found else "")
        if not text and last_good is not None:
            raise InputError(f"run {self.folder} must hold a checkpoint to go back to, found none; train anew")
        if not text:
            return []
        if self._exchange.count > 1:
            for variable in self.learner.named_variables().values():
                variable.assign(array_from_chief(self._exchange, np.asarray(variable.read_value())))
        state = typed({**_LATER, **json.loads(text)}, _State, "state")
        for name in _State.__annotations__:
            setattr(self, name, state[name])
        return set_aside(found) if found else []


class _State(TypedDict):
    """What of a checkpoint's state a run goes on from."""

    step: int
    best: Optional[float]
    stale_validations: int
    trained_s: float
    owes_validation: bool
    rate_share: float
    diverged_at: int
    retries: int
    losses: LossWatch


_LATER = {"owes_validation": False, "rate_share": 1.0, "diverged_at": 0, "retries": 0, "losses": {}}
"""What older checkpoints do not have."""


def _wish(noted: List[int], guard: Unguarded) -> int:
    """What this worker tells the others when its gradients are ready."""
    return max(noted, default=MEMORY if guard.why else 0)


def _stopped(stop: int, guard: Unguarded, done: str) -> BaseException:
    """What to raise for a stop that one of the workers asked for, once that is done."""
    if stop == MEMORY:
        why = guard.why or "the memory of another worker runs out"
        return MemoryRunsOutError(f"{why}; stopped and {done}, the same command continues")
    return Interrupted(f"{done}; the same command continues", stop)


def _shown(loss: float) -> Optional[float]:
    """As JSON has it, which knows no NaN."""
    return loss if np.isfinite(loss) else None

"""The training loop: steps, validations and checkpoints of one run, in the order they happen.

A run with coarse steps has two learners: after the last coarse step the variables move from the one
whose network averages, or that of smaller patches, to that of full steps.

Each of several workers runs this loop, on its own share of every batch. Only the chief writes
files."""

import contextlib
import dataclasses
import functools
import gc
import json
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np
import psutil

from cpu3d.data.cases.notes import left_out_of_mean
from cpu3d.data.files.reader import Reader
from cpu3d.data.sampling import Share
from cpu3d.distributed.all_reduce import ALONE, Exchange, array_from_chief, text_from_chief
from cpu3d.errors import (
    DivergedError,
    InputError,
    Interrupted,
    MemoryRunsOutError,
    WorkerLostError,
    WorkersDifferError,
)
from cpu3d.host.gpu import CPU
from cpu3d.host.memory import allocator_peak_bytes, peak_rss_bytes
from cpu3d.plan import Plan
from cpu3d.run.checkpoint import (
    last_saved,
    lost_best,
    newest,
    progress_of,
    set_aside,
    write_best,
    write_next,
    writing,
)
from cpu3d.run.config_json import half_rates
from cpu3d.run.log import FINISHED, append_event, forget_after, last_event, shown
from cpu3d.settings import RunConfig
from cpu3d.training.budget import cut, steps_within
from cpu3d.training.divergence import wrong_loss, wrong_weights
from cpu3d.training.learner import Learner, Outcome
from cpu3d.training.run_data import MicroBatches, RunData
from cpu3d.training.tracking import Track, tracked
from cpu3d.training.validation import validate
from cpu3d.training.watchdog import StopRequest, Watchdog, noted_signals

# The fewest that are taken to measure the time of a step, and undone.
TIMED_STEPS = 2

# The longest time between two checkpoints. There is one after every validation as well.
SAVE_EVERY_S = 600.0


class Fit:
    """A run in its folder, from its last checkpoint, or from the start if it has none."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        watchdog: Watchdog,
        exchange: Exchange = ALONE,
        make_learner: Optional[Callable[[RunConfig], Learner]] = None,
    ):
        """`make_learner` makes, by default, the network of a configuration without a curriculum."""
        self.store = plan.store
        self.folder = Path(folder)
        self.config = plan.config
        self.steps_per_epoch = plan.steps_per_epoch
        self.steps = plan.steps
        self._least_steps = plan.least_steps
        self._transfer = plan.transfer
        self._exchange = exchange
        self._watchdog = watchdog
        if make_learner is None:
            make_learner = functools.partial(Learner, exchange=exchange)
        self._make_learner = make_learner

        self._signals: List[int] = []  # that ask for a stop
        self._listeners: List[Track] = []  # all get every event as it is logged
        self._reader: Optional[Reader] = None
        # Made early if the time of its steps was measured.
        self._full_learner: Optional[Learner] = None
        # Of weights from elsewhere, which a restart does not read again.
        self._owes_first_save = False
        self.warnings = self._restore()  # a line for each damaged checkpoint
        if exchange.is_chief:
            forget_after(self.folder, self.step, owes_validation=self.progress.owes_validation)

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.progress.step

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self._exchange.count

    def fit_budget(self) -> List[float]:
        """Cut the run to the steps that its minutes hold, earlier attempts and the timing included,
        validations not; the least number of the plan is kept. The weights stay as they were.
        Returns the seconds of a full step, after those of a coarse one if coarse ones are left."""
        begin = time.perf_counter()
        spent_s = self.progress.trained_s - self.progress.validated_s
        step_s = [self._timed(self.learner)]
        if self.learner.config.is_coarse:
            self._full_learner = self._make_learner(self.config.at(self.steps))
            step_s.append(self._timed(self._full_learner))
        steps = steps_within(
            self.config,
            step=self.step,
            steps=self.steps,
            at_least=self._least_steps,
            left_s=60 * self.config.budget_minutes - spent_s - (time.perf_counter() - begin),
            step_s=step_s,
        )
        self.steps = int(array_from_chief(self._exchange, np.array([steps]))[0])
        self.config = cut(self.config, step=self.step, steps=self.steps)
        return step_s

    def run(self, mlflow: str = "") -> None:
        """Train to the last step, or a stop that one of the workers asks for, and save in both
        cases. `mlflow` is the URI where the chief tracks the run too. A run that is over logs its
        end, if a kill has lost that.

        Raises Interrupted after a signal and MemoryRunsOutError if the watchdog asks for a stop,
        each once the run is saved; DivergedError, and WorkerLostError."""
        was_over = self.is_over
        self._saved_at = time.monotonic()
        # As if there had been one attempt alone.
        self._began_at = self._saved_at - self.progress.trained_s
        with noted_signals() as self._signals, contextlib.ExitStack() as stack:
            if self._exchange.is_chief:
                show = shown(
                    self.folder,
                    steps=self.steps,
                    done=self.step,
                    steps_per_epoch=self.steps_per_epoch,
                    batch=self.config.batch,
                )
                track = tracked(self.folder, self.config, mlflow)
                self._listeners = [stack.enter_context(show), stack.enter_context(track)]
            stop = StopRequest.NONE
            if self._owes_first_save:
                self._save()
            if not was_over:
                stop = self._loop()
            if not was_over or last_event(self.folder).get("event") != "end":
                self._log_end(stop)
        if self.workers > 1:
            self._wait_for_chief()
        if self.is_over:
            self._watchdog.heartbeat.note_end(FINISHED)
            return
        saved = f"saved after step {self.step}; the same command continues"
        if stop == StopRequest.MEMORY:
            why = self._watchdog.why
            if not why:
                got = "another worker's running out; see its log"
                why = f"memory must last on all workers, got {got}"
            raise MemoryRunsOutError(f"{why}; stopped and {saved}")
        raise Interrupted(saved, stop)

    def log(self, event: str, **content: Any) -> None:
        """Have the chief append an event to the log, and show it."""
        if not self._exchange.is_chief:
            return
        line = {"event": event, "step": self.step, **content}
        problem = f"step {self.step} could not be logged in {self.folder / 'log.jsonl'}"
        with writing(self.folder, problem):
            append_event(self.folder, line)
        for listen in self._listeners:
            listen(line)

    @property
    def is_over(self) -> bool:
        """Whether the last step is done: nothing is left to do."""
        return self.progress.is_over(self.steps)

    @property
    def _is_validation_step(self) -> bool:
        return self.config.validates_after(self.step, self.steps)

    # --- Coarse and full steps ---

    def _enter(self) -> None:
        """Make the learner of the next step, with its first weights, and its data; if a validation
        comes before that, those of the step that is done."""
        config = self.config.at(self.step)
        if self.progress.owes_validation:
            config = self.config.after(self.step)
        if self._full_learner and not config.is_coarse:
            self.learner = self._full_learner
            self._full_learner = None
        else:
            self.learner = self._make_learner(config)
        self.data = self._data_of(config)

    def _move_to_full(self) -> None:
        """Continue at full resolution with the weights, momentum and averages of the coarse one."""
        self._phase("building the full network")
        coarse = self.learner
        arrays = coarse.arrays()
        self._enter()
        self.learner.restore(arrays)
        coarse.release()  # the full network's variables hold the values by now
        del arrays, coarse
        gc.collect()  # frees the coarse network, whose layers and functions refer to each other

    def _data_of(self, config: RunConfig) -> RunData:
        share = Share(self._exchange.rank, self._exchange.count, config.batch)
        data = RunData(self.store, config, share, self._reader)
        self._reader = data.reader
        return data

    def _micro_batches(self) -> MicroBatches:
        """The data of the next steps, until coarse steps or the run end."""
        end = self.config.coarse_steps
        if self.step >= end:
            end = self.steps
        return self.data.training(self.step, end, self._watchdog.phase)

    def _timed(self, learner: Learner) -> float:
        """Mean seconds of a step of a learner, whose variables stay as they were."""
        data = self._data_of(learner.config)
        # The first one compiles and does not count; one of the others is on whole volumes.
        end = self.step + 1 + max(TIMED_STEPS, learner.config.whole_every)
        micro_batches = data.training(self.step, end, self._watchdog.phase)
        before = learner.arrays()
        seconds = 0.0
        voxels = 0
        for step in range(self.step, end):
            _, step_s = self._compute(learner, micro_batches, rate=0.0)
            if step > self.step:
                seconds += step_s
                voxels += data.voxels(step)
        learner.restore(before)
        return seconds / voxels * data.mean_voxels

    # --- Steps ---

    def _loop(self) -> StopRequest:
        """Steps, validations and saves until the run is over or a worker wants to stop; returns why
        it does: the same on all workers."""
        stop = StopRequest.NONE
        micro_batches: Optional[MicroBatches] = None
        while not (stop or self.is_over):
            if not self.progress.owes_validation:
                # Only now, as a validation after the last coarse step is of coarse weights, on
                # their grid.
                if self.learner.config.is_coarse and self.step >= self.config.coarse_steps:
                    if self.step > self._saved_step:
                        self._save()  # building may take more memory than there is
                    micro_batches = None  # frees their volumes before others are read
                    self._move_to_full()
                if micro_batches is None:
                    micro_batches = self._micro_batches()
                stop = self._train_step(micro_batches)
                is_due = self.step == self.steps or self._is_validation_step
                self.progress.owes_validation = bool(self.data.held_out) and is_due
            if self.progress.owes_validation and not stop:  # a stop does not wait for a validation
                self._check_finite()
                stop = self._validate()
            is_late = time.monotonic() - self._saved_at >= SAVE_EVERY_S
            if stop or self.is_over or is_late or self._is_validation_step:
                self._save()
        return stop

    def _wait_for_chief(self) -> None:
        """Leave only when the chief has written all. The chief does not need the others any
        more."""
        self._phase("waiting for the last checkpoint")
        try:
            self._exchange.sum(np.zeros(1, np.float32))
        except WorkerLostError:
            if not self._exchange.is_chief:
                raise

    def _stop_request(self) -> StopRequest:
        """Why this worker wants to stop: by signals, or by its watchdog."""
        if self._signals:
            return StopRequest(max(self._signals))
        return StopRequest.MEMORY if self._watchdog.why else StopRequest.NONE

    def _phase(self, name: str) -> None:
        self._watchdog.phase(name, step=self.step)

    def _train_step(self, micro_batches: MicroBatches) -> StopRequest:
        """Take a step; returns as `_loop`."""
        config = self.config
        rate = config.rate_at(self.step, self.steps)
        with self._saved_if_a_worker_is_lost():  # at most this step is lost
            outcome, step_s = self._compute(self.learner, micro_batches, rate)
        waited_s = micro_batches.waited_s()
        self._watchdog.stepped(step_s)
        names = self.data.case_ids(self.step)
        wrong = wrong_loss(outcome, names, self.step + 1)
        if wrong:
            raise self._diverged(wrong, "look at these cases, or ")
        epoch = self.step // self.steps_per_epoch
        self.progress.step += 1
        self.log(
            "step",
            epoch=epoch,
            case_id=" ".join(names),
            loss=outcome.loss,
            dice=dict(zip(config.regions, map(float, outcome.dice.mean(0)))),
            learning_rate=rate,
            voxels=self.data.voxels(self.step - 1),
            step_s=step_s,
            wait_s=waited_s,
            exchange_s=outcome.exchange_s,
            rss_bytes=psutil.Process().memory_info().rss,
        )
        return StopRequest(int(max(outcome.notes)))

    def _compute(
        self, learner: Learner, micro_batches: MicroBatches, rate: float
    ) -> Tuple[Outcome, float]:
        """The outcome of a learner's step on the next micro-batches, and its seconds."""
        self._phase("computing")
        begin = time.perf_counter()
        outcome = learner.step(
            micro_batches, rate, self._stop_request, lambda: self._phase("summing gradients")
        )
        self._phase("computing")
        return outcome, time.perf_counter() - begin

    def _validate(self) -> StopRequest:
        """Score the held-out volumes, and keep the weights of the best mean Dice so far; returns as
        `_loop`."""
        begin = time.perf_counter()
        with self._saved_if_a_worker_is_lost():
            scores, stop = validate(
                self.data, self.learner, self._exchange, self._phase, self._stop_request
            )
        seconds = time.perf_counter() - begin
        self.progress.validated_s += seconds
        if scores is None:
            return stop
        progress = self.progress
        dice = dict(zip(self.config.regions, map(float, scores.dice)))
        left_out = left_out_of_mean(self.store.cases("val"), self.config.codes_by_region)
        mean_dice = float(np.mean([dice[name] for name in dice if name not in left_out]))
        is_coarse = self.learner.config.is_coarse
        is_first_in_full = progress.best_is_coarse and not is_coarse
        is_best = progress.best is None or is_first_in_full or mean_dice > progress.best
        progress.owes_validation = False
        if is_best:
            progress.best = mean_dice
            progress.best_is_coarse = is_coarse
            self._save_best()
        self.log(
            "validation",
            epoch=self.step // self.steps_per_epoch,
            loss=scores.loss,
            dice=dice,
            mean_dice=mean_dice,
            left_out_of_mean=left_out,
            seconds=seconds,
            best=is_best,
            cases=self.data.held_out,
        )
        return stop

    # --- Files ---

    def _save(self) -> None:
        """Have the chief write a checkpoint. Raises OSError if it cannot, with the name of the one
        before."""
        self._phase("saving")
        begin = time.perf_counter()
        self._saved_at = time.monotonic()
        self.progress.trained_s = self._saved_at - self._began_at
        self._check_finite()
        self._saved_step = self.step
        if not self._exchange.is_chief:
            return
        if self.step and not self.data.held_out:
            self._save_best()
        with writing(self.folder, f"step {self.step} could not be saved"):
            arrays = self.learner.arrays()
            size = write_next(self.folder, self.step, arrays, self._state())
        self.log("checkpoint", seconds=time.perf_counter() - begin, bytes=size)

    def _check_finite(self) -> None:
        """Raise DivergedError for weights that are not finite."""
        wrong = wrong_weights(self.learner.arrays(), self.step)
        if wrong:
            raise self._diverged(wrong)

    def _diverged(self, reason: str, first: str = "") -> DivergedError:
        """Log that the run has diverged, and return the error to raise; `first` is what may be done
        before its rate is halved. What has diverged is not saved."""
        with contextlib.suppress(OSError):  # the error has the same message
            self.log("diverged", reason=reason)
        todo = f"{first}add {half_rates(self.config)}, half the rates, to the command"
        return DivergedError(f"{reason}; {last_saved(self.folder)}; {todo}")

    def _save_best(self) -> None:
        if self._exchange.is_chief:
            self._phase("saving")
            with writing(self.folder, "the best weights could not be saved"):
                write_best(self.folder, self.learner.weights(), self._state())

    @contextlib.contextmanager
    def _saved_if_a_worker_is_lost(self) -> Iterator[None]:
        """Have the chief save the steps that are done before it raises WorkerLostError."""
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
            except (OSError, InputError) as failure:
                message = str(failure)
            raise WorkerLostError(f"{error}; {message}") from error

    def _log_end(self, stop: StopRequest) -> None:
        reason = "interrupted"
        if self.is_over:
            reason = FINISHED
        elif stop == StopRequest.MEMORY:
            reason = "memory"
        device = "CPU:0" if self.config.device == CPU else "GPU:0"  # the only card that is visible
        self.log(
            "end",
            reason=reason,
            seconds=self.progress.trained_s,
            peak_rss_bytes=peak_rss_bytes(),
            allocator_peak_bytes=allocator_peak_bytes(device),
        )

    def _state(self) -> Dict[str, Any]:
        """What a checkpoint keeps beside the learner's arrays."""
        return {
            **dataclasses.asdict(self.progress),
            "coarse_steps": self.config.coarse_steps,
            "split_hash": self.config.split_hash,
            "seed": self.config.seed,
        }

    def _restore(self) -> List[str]:
        """Continue from the newest whole checkpoint, which the chief reads for all workers, or
        start; makes the learner and the data of the next step. Returns a line for each damaged
        checkpoint, and for lost best weights, in whose place those of the checkpoint are validated.
        """
        checkpoint = newest(self.folder) if self._exchange.is_chief else None
        has_cases = bool(self.store.cases("val"))
        warnings = []
        lost = ""
        if checkpoint:
            warnings = set_aside(checkpoint)
            has_best = not has_cases or isinstance(checkpoint.state.get("best"), float)
            if has_best and checkpoint.state.get("step"):
                lost = lost_best(self.folder)
        if checkpoint and lost:
            warnings.append(f"warning: {lost}; those of {checkpoint.path.name} are kept instead")
            if has_cases:
                checkpoint.state.update(best=None, best_is_coarse=False, owes_validation=True)
        state = text_from_chief(self._exchange, json.dumps(checkpoint.state) if checkpoint else "")
        try:
            self.progress = progress_of(json.loads(state or "{}"))
        except ValueError as error:
            rule = f"the newest checkpoint of {self.folder} must hold a run's state"
            raise InputError(f"{rule}, got {error}; delete it") from None
        self._owes_first_save = bool(self.config.init) and not state
        self._saved_step = self.step
        self._enter()
        if checkpoint:
            self.learner.restore(checkpoint.arrays)
        elif self._transfer:
            self.learner.start_from(self._transfer.first)
        if (state or self._owes_first_save) and self.workers > 1:
            self.learner.take_from_chief()
        if lost and not has_cases:
            self._save_best()
        return warnings

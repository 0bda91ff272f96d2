"""The training loop: steps, validations and checkpoints of one run, in the order they happen."""

import contextlib
import signal
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np
import psutil
import tensorflow as tf

from cpu3d.checkpoint import load_checkpoint, save_checkpoint
from cpu3d.config import RunConfig
from cpu3d.data.store import Store
from cpu3d.data.words import by
from cpu3d.errors import InputError
from cpu3d.feeds import Feeds, Parts
from cpu3d.host.gpu import memory_device
from cpu3d.host.memory import peak_rss_bytes
from cpu3d.learner import Learner, allocator_peak_bytes, parameter_count
from cpu3d.losses import dice_cross_entropy, hard_dice_counts
from cpu3d.run_log import append_event, forget_after, read_events
from cpu3d.schedule import learning_rate
from cpu3d.sliding_window import sliding_window
from cpu3d.versions import versions
from cpu3d.watch import TensorBoard, TrainingBar
from memory_estimator.host import Host
from memory_estimator.job import statistics_note
from models.layer_plan import training_flops


class Fit:
    """One run in its folder, from its last checkpoint, or from the start where it has none."""

    def __init__(self, store: Store, folder: Path, config: RunConfig):
        self.store, self.folder, self.config = store, Path(folder), config
        self.val_cases = store.cases("val")
        self.feeds = Feeds(store, config)
        self.steps_per_epoch = len(store.cases("train")) * config.patches_per_case // config.batch
        self.steps = config.steps or config.epochs * self.steps_per_epoch
        self.learner = Learner(config)
        self.step = 0
        self.best: Optional[float] = None
        self.stale_validations = 0
        self.trained_s = 0.0
        """Wall time of earlier attempts and of this one, up to the last checkpoint."""
        self.waited_s = self.stepped_s = 0.0
        self._watchers: Tuple[Callable[[Dict[str, Any]], None], ...] = ()
        """Given every event as it is logged."""
        self._last = self.folder / "checkpoints" / "last.npz"
        self._best = self.folder / "checkpoints" / "best.npz"
        if self._last.is_file():
            self._restore()
        forget_after(self.folder, self.step)

    def plan(self) -> List[str]:
        """What is about to happen, a line each."""
        config, manifest = self.config, self.store.manifest
        unet, flops = config.unet, training_flops(config.unet, config.grid, config.batch)
        done = f", continued after step {self.step}" if self.step else ""
        fold = f", fold {config.fold}" if config.fold else ""
        lines = [
            f"store: {self.store.folder}, {len(manifest.cases)} cases, split {config.split_hash}{fold}: "
            + ", ".join(f"{len(ids)} {name}" for name, ids in manifest.split.items()),
            f"{self._seen()}, {', '.join(config.channels)} -> {', '.join(config.regions)}",
            f"network: {unet.network}, {unet.depth} levels, {unet.filters} filters, {unet.norm} norm, {unet.dtype}, "
            f"policy {unet.policy}, {parameter_count(self.learner.model):,} parameters, "
            f"{flops / 1e9:,.0f} GFLOP a step",
            f"run: {self.folder}, {self._length()} at batch {config.batch}"
            f"{f', {config.micro} at a time' if config.parts > 1 else ''}{done}",
        ]
        lines.append(f"reads: {self.feeds.reading.plan.reason}")
        note = statistics_note(unet.norm, config.batch, config.micro)
        if note:
            lines.append(f"note: {note}")
        if config.augment.resamples:
            lines.append(f"rotation and scaling: {self._resampling()}")
        if not self.val_cases:
            lines.append("no validation cases in this split: the last weights count as the best")
        return lines

    def log_start(self, host: Host, engine: str, threads: Dict[str, str], predicted: Dict[str, Any]) -> None:
        """Log where and with what this attempt runs, and what it was predicted to take."""
        self._log(
            "start",
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            host=host.summary(),
            versions=versions(),
            engine=engine,
            threads=threads,
            store=str(self.store.folder),
            split_hash=self.config.split_hash,
            grid=list(self.config.grid),
            parameters=parameter_count(self.learner.model),
            mode=self.config.mode,
            device=self.config.device,
            precision=self.config.unet.dtype,
            policy=self.config.unet.policy,
            read_mode=self.feeds.reading.plan.mode,
            micro_batch=self.config.micro,
            predicted=predicted,
        )

    def run(self) -> None:
        """Train to the last epoch, an early stop, or a signal; the checkpoint is written in each case."""
        self._resumed_at, self._trained_before_s = time.monotonic(), self.trained_s
        self._saved_at = self._resumed_at
        parts = self.feeds.training(self.step, self.steps)
        bar = TrainingBar(self.steps, self.step, self.steps_per_epoch, self.config.batch)
        with _stop_flag() as stop, bar, TensorBoard(self.folder / "tensorboard") as board:
            self._watchers = (bar.show, board.show)
            while not (stop or self.is_over):
                self._train_step(parts)
                validated = self._validation_is_due()
                if validated:
                    self._validate()
                late = time.monotonic() - self._saved_at > 60 * self.config.save_minutes
                if validated or late or stop or self.is_over:
                    self._save()
            reads = self.feeds.reading.reader.reads
            reason = "finished" if self.step >= self.steps else "interrupted" if stop else "early stop"
            self._log(
                "end",
                reason=reason,
                seconds=self.trained_s,
                peak_rss_bytes=peak_rss_bytes(),
                allocator_peak_bytes=allocator_peak_bytes(memory_device(self.config.device)),
                wait_share=self.wait_share,
                bytes_read=reads.bytes_read,
                zero_copy_ratio=reads.zero_copy_ratio,
            )
        if reason == "interrupted":
            raise KeyboardInterrupt(f"saved after step {self.step}; the same command continues")

    def note_end(self) -> None:
        """Log the end of a run that was killed between its last checkpoint and that line."""
        events = read_events(self.folder)
        if not events or events[-1]["event"] == "end":
            return
        steps = [event for event in events if event["event"] == "step"]
        self._log(
            "end",
            reason="finished" if self.step >= self.steps else "early stop",
            seconds=self.trained_s,
            peak_rss_bytes=max((event["rss_bytes"] for event in steps), default=None),
            allocator_peak_bytes=None,
            wait_share=sum(event["wait_s"] for event in steps) / max(sum(event["step_s"] for event in steps), 1e-9),
        )

    @property
    def wait_share(self) -> float:
        """Part of the steps' wall time that was spent waiting for data, 0 to 1, of this attempt."""
        return self.waited_s / self.stepped_s if self.stepped_s else 0.0

    def _seen(self) -> str:
        """What a step sees, in words."""
        config, volume, seen = self.config, by(self.feeds.volume_shape, " x "), by(self.config.grid, " x ")
        if config.is_patch:
            return (
                f"patches: {seen} of {volume} ({config.extent}), {config.patches_per_case} of a case an epoch, "
                f"{config.foreground:.0%} around labels, on {config.device}"
            )
        at = f", at {config.resolution:g} of the resolution of {volume}" if config.resolution < 1 else ""
        return f"volumes: {seen} ({config.extent}){at}"

    def _resampling(self) -> str:
        """What rotation and scaling cost; of volumes it is measured, which takes a moment."""
        if self.config.is_patch:
            return "computed in the step"
        return f"{self.feeds.resampling_cost_s():.2f} s a volume, while the step before runs"

    def _length(self) -> str:
        if self.config.steps:
            return f"{self.steps} steps, {self.steps_per_epoch} an epoch"
        return f"{self.config.epochs} epochs of {self.steps_per_epoch} steps"

    # --- Steps ---

    def _train_step(self, parts: Parts) -> None:
        config = self.config
        rate = learning_rate(
            self.step,
            peak=config.learning_rate,
            steps=self.steps,
            warmup_steps=config.warmup_steps,
            schedule=config.schedule,
        )
        begin, waited_before_s = time.perf_counter(), parts.waited_s
        loss, dice = self.learner.step(parts, rate)
        step_s, waited_s = time.perf_counter() - begin, parts.waited_s - waited_before_s
        self.waited_s += waited_s
        self.stepped_s += step_s
        names = self.feeds.case_ids(self.step)
        if not np.isfinite(loss):
            raise InputError(
                f"loss must be finite, got {loss} at step {self.step + 1} on {', '.join(names)}; {self._way_back()}"
            )
        epoch = self.step // self.steps_per_epoch
        self.step += 1
        self._log(
            "step",
            epoch=epoch,
            case_id=" ".join(names),
            loss=loss,
            dice=dict(zip(config.regions, map(float, dice.mean(0)))),
            learning_rate=rate,
            step_s=step_s,
            wait_s=waited_s,
            rss_bytes=psutil.Process().memory_info().rss,
        )

    @property
    def is_over(self) -> bool:
        """Whether the last epoch is done or patience has run out: nothing is left to train."""
        return self.step >= self.steps or 0 < self.config.patience <= self.stale_validations

    @property
    def longer(self) -> str:
        """The option that lets a run go on which is over."""
        if self.step < self.steps:
            return "--patience"
        return "--steps" if self.config.steps else "--epochs"

    def _validation_is_due(self) -> bool:
        count = self.config.validations
        if count:  # the i-th of them as soon as that share of the steps is done
            due = self.step * count // self.steps > (self.step - 1) * count // self.steps
        else:
            due = self.step % (self.steps_per_epoch * self.config.validate_every) == 0
        return bool(self.val_cases) and (due or self.step == self.steps)

    def _validate(self) -> None:
        """Hard Dice on whole held-out volumes; keeps the weights when their mean is the best so far."""
        begin = time.perf_counter()
        losses, scores = [], []
        self.learner.swap_average()
        for image, target in self.feeds.validation():
            loss, counts = _score(target, self._whole_logits(image))
            losses.append(float(loss))
            overlap, predicted, true = np.moveaxis(counts.numpy()[0], -1, 0)
            total = predicted + true
            # A region absent from both scores 1: nothing was missed and nothing was made up.
            scores.append(np.where(total == 0, 1.0, 2 * overlap / np.maximum(total, 1)))
        self.learner.swap_average()
        dice = np.mean(scores, 0)
        better = self.best is None or dice.mean() > self.best
        self.stale_validations = 0 if better else self.stale_validations + 1
        if better:
            self.best = float(dice.mean())
            self._save_best()
        self._log(
            "validation",
            epoch=self.step // self.steps_per_epoch,
            loss=float(np.mean(losses)),
            dice=dict(zip(self.config.regions, map(float, dice))),
            mean_dice=float(dice.mean()),
            seconds=time.perf_counter() - begin,
            best=bool(better),
            cases=len(self.val_cases),
        )

    def _whole_logits(self, image):
        """Logits (1, X, Y, Z, R) of a whole volume at its own resolution."""
        resizing = self.feeds.resizing
        if self.config.is_patch:
            return sliding_window(self.learner.logits, image, self.config.grid)[None]
        if resizing:
            return resizing.grow(self.learner.logits(resizing.shrink(image)))
        return self.learner.logits(image)

    # --- Checkpoints ---

    def _save(self) -> None:
        begin = time.perf_counter()
        self._saved_at = time.monotonic()
        self.trained_s = self._trained_before_s + self._saved_at - self._resumed_at
        arrays = self.learner.arrays()
        if not all(np.isfinite(array).all() for array in arrays.values()):
            # The loss of a step is that of the weights before its update, so an update that overflows shows here first.
            raise InputError(f"weights must be finite, got others after step {self.step}; {self._way_back()}")
        if not self.val_cases:
            self._save_best()
        size = save_checkpoint(self._last, arrays, self._state())
        self._log("checkpoint", seconds=time.perf_counter() - begin, bytes=size)

    def _save_best(self) -> None:
        save_checkpoint(self._best, self.learner.weights(), self._state())

    def _state(self) -> Dict[str, Any]:
        return {
            "step": self.step,
            "best": self.best,
            "stale_validations": self.stale_validations,
            "trained_s": self.trained_s,
            "split_hash": self.config.split_hash,
            "seed": self.config.seed,
        }

    def _restore(self) -> None:
        arrays, state = load_checkpoint(self._last)
        self.learner.restore(arrays)
        self.step, self.best = state["step"], state["best"]
        self.stale_validations, self.trained_s = state["stale_validations"], state["trained_s"]

    def _way_back(self) -> str:
        """What to do when training has diverged."""
        if not self._last.is_file():
            return "lower --learning-rate and train into another folder"
        step = load_checkpoint(self._last)[1]["step"]
        return f"{self._last} still holds step {step}; train into another folder with a lower --learning-rate"

    # --- Log ---

    def _log(self, event: str, **content: Any) -> None:
        line = {"event": event, "step": self.step, **content}
        append_event(self.folder, line)
        for watch in self._watchers:
            watch(line)


# --- Private helpers ---


@tf.function
def _score(target, logits):
    return dice_cross_entropy(target, logits)[0], hard_dice_counts(target, logits)


@contextlib.contextmanager
def _stop_flag() -> Iterator[List[int]]:
    """A list that fills when SIGINT or SIGTERM arrives, so that the step in flight ends first.

    A second SIGINT raises. Another SIGTERM does not: of a parent with threads that is killed several arrive.
    """
    stop: List[int] = []

    def note(number, frame):
        if stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

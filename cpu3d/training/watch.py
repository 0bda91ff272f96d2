"""What a person watches while a run trains: a bar on a terminal, lines in a log file, TensorBoard."""

from pathlib import Path
from typing import Any, Mapping

from rich.console import Console
from rich.progress import Progress, TextColumn

from cpu3d.util.progress import columns
from memory_estimator.units import GIB


class TrainingBar:
    """A context manager that shows steps and validations as they come, on stderr."""

    def __init__(self, steps: int, done: int, steps_per_epoch: int, batch: int):
        self._console = Console(stderr=True)
        self._steps_per_epoch, self._batch = steps_per_epoch, batch
        self._progress = Progress(
            *columns(TextColumn("{task.fields[state]}")),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=steps, completed=done, state="")

    def __enter__(self) -> "TrainingBar":
        self._progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.stop()

    def show(self, event: Mapping[str, Any]) -> None:
        """Take an event of the run's log: steps move the bar, validations and the end are printed."""
        if event["event"] == "step":
            self._show_step(event)
        elif event["event"] == "validation":
            best = ", best so far" if event["best"] else ""
            self._print(
                f"validation after step {event['step']}: Dice {_dice(event['dice'])} on {event['cases']} whole "
                f"volumes, {event['seconds']:.1f} s{best}"
            )
        elif event["event"] == "end":
            self._print(
                f"{event['reason']} after step {event['step']}: {event['seconds']:.0f} s in all, "
                f"{event['wait_share']:.1%} of the steps waiting for data, peak {event['peak_rss_bytes'] / GIB:.1f} GiB"
            )

    def _show_step(self, event: Mapping[str, Any]) -> None:
        state = (
            f"loss {event['loss']:.3f}  {_dice(event['dice'])}  {event['step_s'] / self._batch:.2f} s/volume  "
            f"{event['rss_bytes'] / GIB:.1f} GiB"
        )
        self._progress.update(self._task, completed=event["step"], state=state)
        if not self._console.is_terminal and event["step"] % self._steps_per_epoch == 0:
            self._print(f"epoch {event['epoch'] + 1}, step {event['step']}: {state}")

    def _print(self, line: str) -> None:
        self._progress.console.print(line, highlight=False, soft_wrap=True)


class TensorBoard:
    """A context manager that writes steps and validations as scalars below `folder`."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __enter__(self) -> "TensorBoard":
        import tensorflow as tf

        self._writer, self._scalar = tf.summary.create_file_writer(str(self._folder)), tf.summary.scalar
        return self

    def __exit__(self, *error: Any) -> None:
        self._writer.close()

    def show(self, event: Mapping[str, Any]) -> None:
        """Take an event of the run's log."""
        names = {"step": ("loss", "learning_rate", "step_s", "wait_s"), "validation": ("loss", "mean_dice")}
        group = event["event"]
        with self._writer.as_default(step=event["step"]):
            for name in names.get(group, ()):
                self._scalar(f"{group}/{name}", event[name])
            for region, value in event.get("dice", {}).items():
                self._scalar(f"{group}/dice/{region}", value)


# --- Private helpers ---


def _dice(dice: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in dice.items())

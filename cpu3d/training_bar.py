"""What a person watches while a run trains: a bar on a terminal, a line an epoch in a log file."""

from typing import Any, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

GIB = 2**30


class TrainingBar:
    """A context manager that shows steps and validations as they come, on stderr."""

    def __init__(self, steps: int, done: int, steps_per_epoch: int, batch: int):
        self._console = Console(stderr=True)
        self._steps_per_epoch, self._batch = steps_per_epoch, batch
        self._progress = Progress(
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=steps, completed=done, state="")

    def __enter__(self) -> "TrainingBar":
        self._progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.stop()

    def step(self, event: Mapping[str, Any]) -> None:
        """Show a step event of the run's log."""
        state = (
            f"loss {event['loss']:.3f}  {_dice(event['dice'])}  {event['step_s'] / self._batch:.2f} s/volume  "
            f"{event['rss_bytes'] / GIB:.1f} GiB"
        )
        self._progress.update(self._task, completed=event["step"], state=state)
        if not self._console.is_terminal and event["step"] % self._steps_per_epoch == 0:
            self._console.print(f"epoch {event['epoch'] + 1}, step {event['step']}: {state}", highlight=False, soft_wrap=True)

    def validation(self, event: Mapping[str, Any]) -> None:
        """Print a validation event of the run's log."""
        best = ", best so far" if event["best"] else ""
        self._progress.console.print(
            f"validation after step {event['step']}: Dice {_dice(event['dice'])} on {event['cases']} whole volumes, "
            f"{event['seconds']:.1f} s{best}",
            highlight=False,
            soft_wrap=True,
        )


# --- Private helpers ---


def _dice(dice: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in dice.items())

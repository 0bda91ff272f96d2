"""What a person watches while workers run: the lines of one of them as they come, and a bar of the run's steps."""

from pathlib import Path
from typing import Any, Optional

from rich.console import Console
from rich.progress import Progress

from cpu3d.distributed.patiently import Patiently
from cpu3d.training.run_log import recent_events
from cpu3d.util.child import last_step
from cpu3d.util.progress import columns


class Follower:
    """A context manager on stderr. Where that is no terminal there are lines and no bar.

        with Follower(run / "logs" / "worker-0.log", run) as follower:
            follower.show()  # again and again

    The lines are those that `log` gets from now on, but for the first, which is the header; None is nobody's.
    """

    def __init__(self, log: Optional[Path], run: Path):
        console = Console(stderr=True)
        self._console = console
        self._log, self._run = log, run
        self._read = log.stat().st_size if log and log.exists() else 0
        self._headers = 1
        """Still to come."""
        self._begun = b""
        """A line that has no end yet."""
        self._progress = Progress(*columns(), console=console, disable=not (log and console.is_terminal))
        self._task = self._progress.add_task("train", total=None)
        self._look = Patiently(self._show)

    def __enter__(self) -> "Follower":
        self._progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.show()
        if self._begun:
            self._print(self._begun)
        self._progress.stop()

    def show(self) -> None:
        """Print what is new, and move the bar. A file system that does not answer holds it for a moment, once."""
        self._look()

    def say(self, line: str) -> None:
        """Print a line of our own, above the bar."""
        say(line, self._console)

    def _show(self) -> None:
        self._print_new()
        if self._progress.disable:
            return
        step = last_step(self._run)
        if step and self._progress.tasks[0].total is None:
            self._progress.update(self._task, total=_steps(self._run))
        self._progress.update(self._task, completed=step)

    def _print_new(self) -> None:
        if not self._log or not self._log.exists():
            return
        with self._log.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        self._read += len(new)
        *lines, self._begun = (self._begun + new).split(b"\n")
        for line in lines[self._headers :]:
            self._print(line)
        self._headers = max(0, self._headers - len(lines))

    def _print(self, line: bytes) -> None:
        self.say(line.decode("utf-8", errors="replace"))


def say(line: str, console: Optional[Console] = None) -> None:
    """Print a line on stderr, as it is."""
    (console or Console(stderr=True)).print(line, highlight=False, markup=False, soft_wrap=True)


# --- Private helpers ---


def _steps(run: Path) -> Optional[int]:
    """Of the whole run, as its newest start says; None where it does not."""
    starts = [event for event in recent_events(run, 1) if event.get("event") == "start"]
    steps = starts[-1].get("steps") if starts else None
    return steps if isinstance(steps, int) else None

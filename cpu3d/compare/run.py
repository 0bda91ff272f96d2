"""Runs of a comparison: each training and each evaluation in a process of its own.

    failed = train_and_score(runs, store, out, Evaluation())

A fresh process has its own peak of memory, and all runs start on equal terms. The same call continues after one that
was cut off: a trained run is not trained again, a half-trained one continues, current scores are kept, and a run that
diverged is reported as such.
"""

import contextlib
import os
import shlex
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence, Tuple

from cpu3d.distributed.cluster import without_cluster
from cpu3d.errors import ENDINGS, DivergedError, InputError
from cpu3d.inference.evaluate import UNTOUCHED, read_scores, scores_path
from cpu3d.inference.runs import Inference
from cpu3d.inference.scores import TOLERANCE_MM
from cpu3d.run.checkpoint import BEST, checkpoints
from cpu3d.run.config import load_config
from cpu3d.run.log import read_events
from cpu3d.run.summary import last_end, numbers
from cpu3d.util.atomic import writable_folder
from cpu3d.util.child import PROGRAM, ROOT, forward_signals, how_ended, last_words, start
from cpu3d.util.progress import bar, say

POLL_S = 1.0


class Evaluation(NamedTuple):
    """How runs are scored."""

    split: str = UNTOUCHED
    tolerance_mm: float = TOLERANCE_MM


@dataclass(frozen=True)
class PlannedRun:
    """A run to train and to score."""

    variant: str
    seed: int
    folder: Path
    options: Tuple[str, ...]  # of `train`, all but --store and --run; with --seed and --steps or --budget-minutes

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    @property
    def steps(self) -> int:
        """Steps of the run; 0 while a budget of minutes has not decided them yet."""
        if "--steps" in self.options:
            return int(self.options[self.options.index("--steps") + 1])
        return load_config(self.folder).steps if (self.folder / "config.json").is_file() else 0


class Failed(NamedTuple):
    """A run without a result, and the reason in a few words, without paths."""

    variant: str
    seed: int
    why: str

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}, is left out: {self.why}."


class RunFailedError(InputError):
    """A process that failed."""

    def __init__(self, problem: str, exit_code: int, why: str = "failed"):
        super().__init__(problem)
        self.exit_code, self.why = exit_code, why  # in a few words, without paths


def train_and_score(
    runs: Sequence[PlannedRun], store: Path, out: Path, evaluation: Evaluation, *, force: bool = False
) -> List[Failed]:
    """Train and score all of `runs`, in their order, and return those that failed; `force` is that of `train`.

    The output of the processes is added to out/logs/NAME-train.txt and NAME-evaluate.txt, where NAME is that of a run's
    folder. A run that diverged before is not tried again. Raises the last RunFailedError if all fail, and
    KeyboardInterrupt after a signal, which the process has received as SIGINT and answered by saving.
    """
    failed, logs = [], writable_folder(out / "logs", "folder of logs")
    for number, run in enumerate(runs, 1):
        label, log = f"{number}/{len(runs)} {run}", logs / f"{run.folder.name}-train.txt"
        of_run = ["--run", str(run.folder), "--store", str(store)]
        try:
            if is_trained(run):
                say(f"{label}: trained already")
            elif [event["event"] for event in read_events(run.folder)[-1:]] == ["diverged"]:
                problem = f"{run} diverged before; remove {run.folder} to train it again"
                raise RunFailedError(problem, DivergedError.exit_code, "train diverged")
            else:
                command = ["train", *of_run, *run.options, *["--force"] * force]
                call(command, log, f"{label}: train", run=run.folder, steps=run.steps)
            if outdated_scores(run.folder, evaluation):
                command = ["evaluate", *of_run, "--split", evaluation.split]
                command += ["--tolerance", repr(evaluation.tolerance_mm)]
                call(command, logs / f"{run.folder.name}-evaluate.txt", f"{label}: evaluate")
        except RunFailedError as error:
            failed.append(Failed(run.variant, run.seed, error.why))
            if len(failed) == len(runs):
                raise
            say(f"error: {error}")
    return failed


def is_trained(run: PlannedRun) -> bool:
    """Whether the run has taken all of its steps, or has stopped early, and has its best weights:
    `train` replaces those that are lost."""
    best = run.folder / "checkpoints" / BEST
    end = last_end(read_events(run.folder)) if checkpoints(run.folder) and best.is_file() else {}
    return end.get("reason") == "early stop" or (end.get("reason") == "finished" and end["step"] == run.steps)


def outdated_scores(run: Path, evaluation: Evaluation) -> str:
    """The reason why a run must be scored again, empty if its scores are of this kind, younger than its weights and of
    the network applied as it was trained."""
    path, weights = scores_path(run, evaluation.split), run / "checkpoints" / BEST
    try:
        scores, is_younger = read_scores(path), path.stat().st_mtime >= weights.stat().st_mtime
    except (InputError, FileNotFoundError):
        return "none that can be read"
    config = load_config(run)
    window = list(config.grid) if config.is_patch else None
    wanted = {"split_hash": config.split_hash, "tolerance_mm": evaluation.tolerance_mm, "weights": "best"}
    wanted["inference"] = {**Inference().to_json(), "window": window, "one_pass": not window}
    differing = [f"{name} {scores.get(name)}" for name, value in wanted.items() if scores.get(name) != value]
    return ", ".join([*differing, *["scores older than the weights"] * (not is_younger)])


def call(command: Sequence[str], log: Path, label: str, *, run: Optional[Path] = None, steps: int = 0) -> None:
    """Run `python -m cpu3d command`, its output added to `log`, with a bar of the steps that the folder `run` logs.

    Signals are passed on as SIGINT. Raises RunFailedError with the last lines that the command printed, and
    KeyboardInterrupt when it ended after a signal.
    """
    steps, shown, children = steps or 1, 0, []
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(log.open("a", encoding="utf-8"))
        file.write(f"$ cpu3d {shlex.join(command)}\n")
        file.flush()
        begin = os.fstat(file.fileno()).st_size  # all before is of an earlier attempt
        advance = stack.enter_context(bar(label, steps))
        signals = stack.enter_context(forward_signals(children, as_signal=lambda number: signal.SIGINT))
        child = start([*PROGRAM, *command], file, without_cluster(os.environ), cwd=ROOT)
        children.append(child)
        stack.callback(child.wait)
        if signals:  # while it was being started
            child.send_signal(signal.SIGINT)
        while child.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(POLL_S)
            done = numbers(read_events(run, steps=1), "step") if run else []
            step = min(done[-1], steps) if done else 0
            advance(step - shown)
            shown = step
        advance(steps - shown if child.returncode == 0 else 0)
    if signals:
        raise KeyboardInterrupt("the same command continues")
    if child.returncode:
        code, ended = child.returncode, how_ended(child.returncode)
        problem = f"{label} must succeed, got {ended}; its output is in {log}, which ends:\n  {last_words(log, begin)}"
        why = f"{command[0]} diverged" if code == DivergedError.exit_code else f"{command[0]} ended with {ended}"
        raise RunFailedError(problem, code if code > 0 and code in ENDINGS else 1, why)

"""Runs carried out one after the other, each training and each evaluation in a process of its own.

    carry_out(runs, store, out, Evaluation())

A fresh process makes the peaks of memory honest and starts every run on equal terms. The same call continues where one
was cut off: what is trained is not trained again, what is half trained goes on, what has current scores keeps them, and
what diverged is told to have done so.
"""

from pathlib import Path
from typing import List, Optional, Sequence

from rich.console import Console

from cpu3d.compare import process
from cpu3d.compare.planned import (
    Evaluation,
    Failed,
    PlannedRun,
    is_evaluated,
    is_trained,
    keep_verdict,
    verdict_of,
)
from cpu3d.compare.process import RunDivergedError, RunFailedError
from cpu3d.util.atomic import writable_folder


def carry_out(
    runs: Sequence[PlannedRun],
    store: Path,
    out: Path,
    evaluation: Optional[Evaluation] = None,
    *,
    force: bool = False,
) -> None:
    """Train and, with an `evaluation`, score all of `runs`, in their order.

    What the processes say is added to out/logs/NAME-train.txt and NAME-evaluate.txt, NAME being a run's folder's. The
    first failure ends it with RunFailedError, which has the last lines; RunDivergedError says that the run diverged,
    now or when it was tried before. Signals are passed on as `cpu3d.compare.process` says, the process saves, and
    KeyboardInterrupt is raised. A folder that holds a run of other options raises InputError.
    """
    for number, run in enumerate(runs, 1):
        _carry_out(run, f"{number}/{len(runs)} {run.name}", store, out, evaluation, force)


def carry_out_all(
    runs: Sequence[PlannedRun], store: Path, out: Path, evaluation: Evaluation, *, force: bool = False
) -> List[Failed]:
    """As `carry_out`, but a run that fails does not keep the others from being done; returns those that did.

    Raises RunFailedError, the first one's, where all do.
    """
    errors = []
    for number, run in enumerate(runs, 1):
        try:
            _carry_out(run, f"{number}/{len(runs)} {run.name}", store, out, evaluation, force)
        except RunFailedError as error:
            _say(f"error: {error}")
            errors.append(error)
    if len(errors) == len(runs):
        raise errors[0]
    return [Failed(error.run.variant, error.run.seed, error.why) for error in errors]


def evaluate_folder(folder: Path, scored: Path, store: Path, out: Path, evaluation: Evaluation, label: str) -> None:
    """Score the trained run in `folder`, in a process of its own; evaluation/ is written below `scored`."""
    logs = writable_folder(Path(out) / "logs", "folder of logs")
    command = ["evaluate", "--run", str(folder), "--store", str(store)]
    command += ["--split", evaluation.split, "--tolerance", repr(evaluation.tolerance_mm)]
    if scored != folder:
        command += ["--out", str(scored)]
    process.call(command, logs / f"{scored.name}-evaluate.txt", f"{label}: evaluate")


# --- Private helpers ---


def _carry_out(
    run: PlannedRun, label: str, store: Path, out: Path, evaluation: Optional[Evaluation], force: bool
) -> None:
    try:
        verdict = verdict_of(run)
        if verdict:
            raise verdict
        if is_trained(run):
            _say(f"{label}: trained already")
        else:
            logs = writable_folder(Path(out) / "logs", "folder of logs")
            command = ["train", "--store", str(store), "--run", str(run.folder), *run.options]
            command += ["--force"] if force else []
            log = logs / f"{run.folder.name}-train.txt"
            process.call(command, log, f"{label}: train", run=run.folder, steps=run.steps)
        if evaluation is not None and not is_evaluated(run.folder, evaluation):
            evaluate_folder(run.folder, run.folder, store, out, evaluation, label)
    except RunFailedError as error:
        error.run = run
        if isinstance(error, RunDivergedError) and not verdict:
            keep_verdict(run, error)
        raise


def _say(line: str) -> None:
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)

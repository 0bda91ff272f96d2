"""Runs of a comparison: each training and each evaluation in a process of its own.

    failed = train_and_score(runs, store, out, Evaluation())

A fresh process has its own peak of memory, and all runs start on equal terms. The same call
continues after one that was cut off: a trained run is not trained again, a half-trained one
continues, current scores are kept, and a run that diverged is reported as such."""

from dataclasses import dataclass
from pathlib import Path
from typing import List, NamedTuple, Sequence, Tuple

from cpu3d.inference.postprocessing.decision import postprocessing_of
from cpu3d.inference.scores import TOLERANCE_MM
from cpu3d.inference.scores_file import UNTOUCHED, outdated_scores
from cpu3d.processes import RunFailedError, evaluate_run, has_rules, train_run
from cpu3d.run.config_json import load_config
from cpu3d.util.atomic import writable_folder
from cpu3d.util.progress import say


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
    # Of `train`, all but --store and --run; with --seed and --steps or --budget-minutes.
    options: Tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    @property
    def steps(self) -> int:
        """Steps of the run; 0 while a budget of minutes has not decided them yet."""
        if "--steps" in self.options:
            return int(self.options[self.options.index("--steps") + 1])
        if (self.folder / "config.json").is_file():
            return load_config(self.folder).steps
        return 0


class Failed(NamedTuple):
    """A run without a result, and the reason in a few words, without paths."""

    variant: str
    seed: int
    why: str

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}, is left out: {self.why}."


def train_and_score(
    runs: Sequence[PlannedRun],
    store: Path,
    out: Path,
    evaluation: Evaluation,
    *,
    force: bool = False,
) -> List[Failed]:
    """Train and score all of `runs`, in their order, and return those that failed; `force` is that
    of `train`.

    The output of the processes is added to out/logs/NAME-train.txt and NAME-evaluate.txt, where
    NAME is that of a run's folder. A run that diverged before is not tried again. Raises the last
    RunFailedError if all fail, and KeyboardInterrupt after a signal, which the process has received
    as SIGINT and answered by saving. A run whose post-processing could not be decided fails too:
    its raw answers are not scored beside those of runs with rules."""
    failed: List[Failed] = []
    logs = writable_folder(out / "logs", "folder of logs")
    for number, run in enumerate(runs, 1):
        label = f"{number}/{len(runs)} {run}"
        options = list(run.options)
        if force:
            options.append("--force")
        log = logs / f"{run.folder.name}-train.txt"
        try:
            train_run(
                run.folder,
                store,
                options,
                log,
                label,
                steps=run.steps,
            )
            if not has_rules(run.folder):
                rule = f"{label}: post-processing must be decided before the run is scored"
                problem = f"{rule}, got none; see {log}, and repeat the same command"
                raise RunFailedError(problem, 1, "post-processing was not decided")
            postprocessing = postprocessing_of(run.folder, load_config(run.folder))
            if outdated_scores(
                run.folder,
                evaluation.split,
                evaluation.tolerance_mm,
                postprocessing=postprocessing,
            ):
                options = ["--split", evaluation.split]
                options += ["--tolerance", repr(evaluation.tolerance_mm)]
                log = logs / f"{run.folder.name}-evaluate.txt"
                evaluate_run(run.folder, store, options, log, label)
        except RunFailedError as error:
            failed.append(Failed(run.variant, run.seed, error.why))
            if len(failed) == len(runs):
                raise
            say(f"error: {error}")
    return failed

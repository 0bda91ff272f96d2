"""Runs of a comparison: each training and each evaluation in a process of its own.

    failed = Runner(store, out, Evaluation()).carry_out(runs)

A fresh process has its own peak of memory and starts every run on equal terms. The same call continues where another
was cut off: a run that is trained is not trained again, one that is half trained continues, current scores are kept,
and a run that diverged is reported as such. `grouped` makes variants of run folders that are there already: runs that
differ in their seed alone are one.
"""

import contextlib
import dataclasses
import itertools
import math
import os
import re
import shlex
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from cpu3d.distributed.cluster import without_cluster
from cpu3d.errors import DivergedError, InputError, refuse
from cpu3d.inference.evaluate import UNTOUCHED, read_scores, scores_path
from cpu3d.inference.runs import Inference
from cpu3d.inference.scores import TOLERANCE_MM
from cpu3d.pages.page import flat
from cpu3d.run.checkpoint import checkpoints
from cpu3d.run.log import FINISHED, read_events
from cpu3d.run.summary import costs_of, last_end
from cpu3d.settings import RunConfig, load_config
from cpu3d.util.atomic import writable_folder
from cpu3d.util.child import PROGRAM, ROOT, forward_signals, how_ended, last_step, last_words, start
from cpu3d.util.lock import locked
from cpu3d.util.progress import bar, say

POLL_S = 1.0
UNEQUAL = 1.1  # times more that one run may have spent than another under what counts as one budget
SHARED = ("split_hash", "fold", "regions")  # of all run folders: else they were trained or scored on other cases

SAME_VARIANT = {
    *("seed", "unet.seed", "store", "save_minutes", "read_mode"),
    *("unet.policy", "device", "validate_every", "validations", "patience", "micro_batch"),
}
"""Settings that do not make another variant: seed, files, how a step is computed, how often it is validated."""


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
        """That it is to take; 0 where its minutes decide that, and are not timed yet."""
        if "--steps" in self.options:
            return int(self.options[self.options.index("--steps") + 1])
        return load_config(self.folder).steps if (self.folder / "config.json").is_file() else 0


class Failed(NamedTuple):
    """A run without a result, and why in a few words, without paths."""

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


@dataclass(frozen=True)
class Runner:
    """Trains and scores the runs of a comparison.

    What the processes print is added to out/logs/NAME-train.txt and NAME-evaluate.txt, NAME being a run's folder's.
    """

    store: Path
    out: Path
    evaluation: Evaluation
    force: bool = False  # train although memory may not hold it

    def carry_out(self, runs: Sequence[PlannedRun]) -> List[Failed]:
        """Train and score all of `runs`, in their order, and return those that failed.

        A run that diverged before is not tried again. Raises the last RunFailedError where all fail, and
        KeyboardInterrupt after a signal, which the process has got as SIGINT and answered by saving.
        """
        failed: List[Failed] = []
        for number, run in enumerate(runs, 1):
            label = f"{number}/{len(runs)} {run}"
            try:
                self._train(run, label)
                if not is_evaluated(run.folder, self.evaluation):
                    self.evaluate(run.folder, run.folder, label)
            except RunFailedError as error:
                failed.append(Failed(run.variant, run.seed, error.why))
                if len(failed) == len(runs):
                    raise
                say(f"error: {error}")
        return failed

    def evaluate(self, folder: Path, scored: Path, label: str) -> None:
        """Score the trained run in `folder`; evaluation/ is written below `scored`."""
        command = ["evaluate", "--run", str(folder), "--store", str(self.store)]
        command += ["--split", self.evaluation.split, "--tolerance", repr(self.evaluation.tolerance_mm)]
        if scored != folder:
            command += ["--out", str(scored)]
        call(command, self._log(scored, "evaluate"), f"{label}: evaluate")

    def _train(self, run: PlannedRun, label: str) -> None:
        last = read_events(run.folder)[-1:]
        if is_trained(run):
            say(f"{label}: trained already")
        elif last and last[0]["event"] == "diverged":
            problem = f"{run} diverged before, in {run.folder}; remove that to try again"
            raise RunFailedError(problem, DivergedError.exit_code, "train diverged")
        else:
            command = ["train", "--store", str(self.store), "--run", str(run.folder), *run.options]
            command += ["--force"] if self.force else []
            call(command, self._log(run.folder, "train"), f"{label}: train", run=run.folder, steps=run.steps)

    def _log(self, folder: Path, what: str) -> Path:
        return writable_folder(self.out / "logs", "folder of logs") / f"{folder.name}-{what}.txt"


def is_trained(run: PlannedRun) -> bool:
    """Whether the run has taken all of its steps, or has stopped early."""
    end = last_end(read_events(run.folder)) if checkpoints(run.folder) else {}
    reason = end.get("reason")
    return reason == "early stop" or (reason == "finished" and end["step"] == run.steps)


def is_evaluated(run: Path, evaluation: Evaluation, scored: Optional[Path] = None) -> bool:
    """Whether `scored`, by default the run's own folder, holds scores of this kind, younger than the
    run's weights and of the network applied as it was trained.
    """
    path, weights = scores_path(scored or run, evaluation.split), run / "checkpoints" / "best.npz"
    try:
        scores, is_younger = read_scores(path), path.stat().st_mtime >= weights.stat().st_mtime
    except (InputError, FileNotFoundError):
        return False  # none, or damaged: they are made again
    config = load_config(run)
    window = list(config.grid) if config.is_patch else None
    return (
        is_younger
        and scores.get("inference") == {**Inference().to_json(), "window": window, "one_pass": not window}
        and scores["split_hash"] == config.split_hash
        and scores["tolerance_mm"] == evaluation.tolerance_mm
        and scores["weights"] == "best"
    )


def run_voxels(config: RunConfig, steps: int) -> int:
    """Voxels that the network sees in a run of so many steps, of which a curriculum has its share at half."""
    return round(config.batch * math.prod(config.grid) * config.with_coarse_share(steps).full_steps(steps))


# --- Run folders that are there already ---


def grouped(folders: Sequence[Path], *, force: bool = False) -> List[Tuple[str, int, Path]]:
    """The variant, seed and folder of every run. The first one's variant is the baseline.

    A variant is named as its first run's folder is, less what follows "-seed". Raises InputError as `_trained`, and for
    two runs of equal settings and seed and a variant that shares no seed with the baseline.
    """
    problems: List[str] = []
    names: Dict[str, str] = {}  # settings -> name of the variant
    runs: Dict[Tuple[str, int], Path] = {}
    for folder, config in _trained(folders, force).items():
        settings = sorted(pair for pair in flat(dataclasses.asdict(config)) if pair[0] not in SAME_VARIANT)
        # Under batch norm the network learns from what is computed together.
        kind = str((settings, config.micro if config.unet.norm == "batch" else None))
        if kind not in names:
            name = re.sub(r"[-_]?seed[-_]?\d+$", "", folder.name) or folder.name
            free = (f"{name}-{number}" if number > 1 else name for number in itertools.count(1))
            names[kind] = next(name for name in free if name not in names.values())
        run = (names[kind], config.seed)
        if run in runs:
            both = f"{runs[run]} and {folder}, alike with seed {config.seed}"
            problems.append(f"runs must differ in a setting or their seed, got {both}; leave one out")
        runs[run] = folder
    seeds = {name: [seed for variant, seed in runs if variant == name] for name in names.values()}
    refuse([*problems, *unpaired(seeds, next(iter(seeds))).values()])
    return [(variant, seed, folder) for (variant, seed), folder in runs.items()]


def _trained(folders: Sequence[Path], force: bool) -> Dict[Path, RunConfig]:
    """The configuration of each run.

    Raises InputError, all offenders at once, for folders that are no runs, were not trained or are being trained, and
    for runs of different splits, folds or regions; unless `force`, also for runs that were cut off or stopped, and
    for runs that had neither as many voxels nor as much time.
    """
    problems: List[str] = []
    configs: Dict[Path, RunConfig] = {}
    spent: Dict[Path, Tuple[int, float]] = {}  # voxels seen, seconds of steps
    for folder in folders:
        try:
            configs[folder] = load_config(folder)
            if not (folder / "checkpoints" / "best.npz").is_file():
                raise InputError(f"run {folder} must hold checkpoints/best.npz, found none; run `train` on it")
            with locked(folder, "run"):
                events = read_events(folder)  # of a run that is not being trained
        except InputError as error:
            problems += error.problems
            continue
        costs, end = costs_of(events), last_end(events).get("reason", "none")
        spent[folder] = costs.voxels, costs.steps_s
        if end not in FINISHED and not force:
            rule = f"must have been trained to its end, got end: {end}"
            problems.append(f"run {folder} {rule}; continue it with `train`, or add --force")
    for name in SHARED:
        values = {getattr(config, name): folder for folder, config in configs.items()}
        if len(values) > 1:
            got = " and ".join(f"{value or 'none'} in {folder}" for value, folder in values.items())
            problems.append(f"runs must share their {name}, got {got}; compare runs of one split")
    if not force and spent and all(max(column) > UNEQUAL * min(column) for column in zip(*spent.values())):
        most, least = max(spent, key=spent.__getitem__), min(spent, key=spent.__getitem__)
        got = " and ".join(
            f"{spent[run][0] / 1e6:,.4g} million voxels in {spent[run][1]:,.0f} s in {run}" for run in (most, least)
        )
        problems.append(f"runs must have had one budget, got {got}; leave some out, or add --force")
    refuse(problems)
    return configs


def unpaired(seeds: Mapping[str, Sequence[int]], baseline: str) -> Dict[str, str]:
    """The variants that share no seed with the baseline, each with the problem. `seeds` is variant -> its seeds."""
    return {
        variant: f"variant {variant} must share a seed with {baseline}, got {list(own)} and {list(seeds[baseline])}; "
        "train one of each with the same --seed"
        for variant, own in seeds.items()
        if not set(own) & set(seeds[baseline])
    }


# --- Private helpers ---


def call(command: Sequence[str], log: Path, label: str, *, run: Optional[Path] = None, steps: int = 0) -> None:
    """Run `python -m cpu3d command`, its output added to `log`, with a bar of the steps that the folder `run` logs.

    Our signals are sent on as SIGINT. Raises RunFailedError with the last lines it printed, and KeyboardInterrupt when
    it ended after a signal.
    """
    steps, shown, children = steps or 1, 0, []
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(log.open("a", encoding="utf-8"))
        file.write(f"$ cpu3d {shlex.join(command)}\n")
        file.flush()
        begin = os.fstat(file.fileno()).st_size  # what was printed before is of an earlier attempt
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
            step = min(last_step(run), steps) if run else 0
            advance(step - shown)
            shown = step
        advance(steps - shown if child.returncode == 0 else 0)
    if signals:
        raise KeyboardInterrupt("the same command continues")
    if child.returncode:
        code, ended = child.returncode, how_ended(child.returncode)
        problem = f"{label} must succeed, got {ended}; all of it is in {log}, which ends:\n  {last_words(log, begin)}"
        why = f"{command[0]} diverged" if code == DivergedError.exit_code else f"{command[0]} ended with {ended}"
        raise RunFailedError(problem, code if code in range(1, 7) else 1, why)

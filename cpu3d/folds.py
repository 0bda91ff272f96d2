"""All folds of a store: trained in turn, every case scored once, one page, one ensemble.

    train_folds(store, folder, 5, settings={"epochs": 40})

Each fold is an ordinary run, folder/fold-1 to folder/fold-K, trained and scored by processes of its
own: a fold that is trained, here or elsewhere, is not trained again, a half-trained one continues,
and current scores are kept. So the same call continues after one that was cut off. A fold that
fails is named at the end; the others go on.
"""

import contextlib
import json
import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from cpu3d.checks import check_run, learnable
from cpu3d.chosen import (
    SETTINGS,
    Chosen,
    TrainOptions,
    chosen_again,
    located,
    still_open,
)
from cpu3d.data.store import Store, open_store
from cpu3d.distributed.cluster import read_cluster
from cpu3d.errors import InputError, raise_if_any
from cpu3d.host.gpu import HostGpus
from cpu3d.host.thread_plan import host_share
from cpu3d.inference.out_of_fold import EVALUATION, is_scored, read_out_of_fold, write_out_of_fold
from cpu3d.inference.postprocessing.joint import decide_jointly
from cpu3d.inference.scores import TOLERANCE_MM
from cpu3d.plan import Plan, make_plan, read_plan
from cpu3d.plan_text import plan_lines
from cpu3d.processes import RunFailedError, evaluate_run, has_rules, is_trained, train_run
from cpu3d.report.folds import gather_folds, results_tables, write_folds_report
from cpu3d.run.checkpoint import checkpoints, step_of
from cpu3d.run.config_json import differences, load_config, matching_settings
from cpu3d.run.folds import (
    COMPARISON,
    CONFIG,
    START_S,
    Folds,
    fold_folder,
    read_folds,
    save_folds,
)
from cpu3d.run.log import last_end
from cpu3d.run.transfer import leak
from cpu3d.settings import RunConfig
from cpu3d.training.pulse import Pulse
from cpu3d.training.tracking import require_mlflow
from cpu3d.training.train import refuse_foreign
from cpu3d.util.atomic import check_folder, writable_folder
from cpu3d.util.lock import locked
from cpu3d.util.progress import say
from cpu3d.util.records import count, listed
from memory_estimator.common.schema import check_given, to_command_line
from memory_estimator.common.table import Table, new_console
from memory_estimator.common.units import format_bytes, format_seconds
from memory_estimator.host import Host, read_host
from memory_estimator.job import AUTO

# Settings of which a command line takes one.
EITHER = (("epochs", "steps"), ("validate_every", "validations"))


def run(options: TrainOptions, settings: Dict[str, Any]) -> int:
    """`train --folds`."""
    if options.dry_run:
        show_folds(options, settings)
        return 0
    if options.json:
        raise InputError("--json must come with --dry-run, got it alone; add --dry-run")
    train_folds(
        options.store,
        options.run,
        options.folds,
        settings=settings,
        force=options.force,
        mlflow=options.mlflow,
    )
    return 0


def train_folds(
    store_folder: Path,
    folder: Path,
    parts: int,
    *,
    settings: Optional[Chosen] = None,
    force: bool = False,
    mlflow: str = "",
) -> None:
    """Train, or continue, the `parts` folds of a store in `folder`, with the settings of `train`;
    then score them and decide their post-processing together.

    Before anything is written it raises InputError, also for settings other than those that the
    folder was begun with and for a fold's folder that holds other files than a run's own, which
    stop all folds, and, unless `force`, DoesNotFitError. Interrupted after SIGINT and
    SIGTERM, once the fold that trains is saved. If folds fail, RunFailedError when the others are
    done.
    """
    folder = Path(folder)
    check_given(SETTINGS, settings or {}, InputError)
    if mlflow:
        require_mlflow()
    check_folder(folder, "folder of --run")
    with contextlib.ExitStack() as stack:
        if folder.is_dir():  # else nothing may be written yet
            stack.enter_context(locked(folder, "folder of folds"))
        asked = _Asked(store_folder, folder, parts, settings or {}, force=force)
        planned = asked.planned
        _show(planned, asked.host)
        if not folder.is_dir():
            writable_folder(folder, "folder of --run")
            stack.enter_context(locked(folder, "folder of folds"))
        place = asked.store.folder.resolve()
        first = planned[0].plan
        paced = first.paced
        folds = Folds(
            parts,
            str(place),
            asked.chosen,
            paced.training_s if paced else None,
            beside_s(first),
            validation_s=paced.validation_s if paced else None,
            scoring_s=scoring_s(first),
        )
        save_folds(folder, folds)
        words = _command_line(asked.alike, force=force, mlflow=mlflow)
        failed = _carry_out(planned, place, folder, words)
    for table in results_tables(gather_folds(folder)):
        new_console().print(table)
    say(f"written: {folder / 'report.html'}")
    if failed:
        lines = [f"fold {fold} without: {error.why}" for fold, error in failed.items()]
        rule = f"all {parts} folds must be trained and scored, got {listed(lines)}"
        worst = list(failed.values())[-1]
        raise RunFailedError(
            f"{rule}; the same command tries them again",
            worst.exit_code,
            worst.why,
        )


def show_folds(options: TrainOptions, settings: Dict[str, Any]) -> None:
    """Print what `train --folds` would do with these options, and write nothing. Raises as
    `train_folds` before it writes."""
    if options.mlflow:
        require_mlflow()
    check_folder(options.run, "folder of --run")
    asked = _Asked(options.store, options.run, options.folds, settings, force=options.force)
    if options.json:
        print(json.dumps([fold.plan.to_json() for fold in asked.planned]))
    else:
        _show(asked.planned, asked.host, stderr=False)


def scoring_s(plan: Plan) -> Optional[float]:
    """Predicted seconds of a fold beside its training: scoring, and the starts of its processes;
    None if no step is predicted."""
    forecast = plan.paced
    if forecast is None:
        return None
    return START_S + forecast.course.held_out * forecast.answered_s


def beside_s(plan: Plan) -> Optional[float]:
    """Predicted seconds of a fold beside its steps: validations, its own post-processing, which
    `train` decides, scoring, and the starts of its processes; None if no step is predicted."""
    forecast = plan.paced
    if forecast is None:
        return None
    return scoring_s(plan) + forecast.validation_s + forecast.postprocessing_s


# --- Private helpers ---


@dataclass(frozen=True)
class PlannedFold:
    """A fold to train and to score."""

    fold: str  # as "2/5"
    folder: Path
    plan: Plan

    @property
    def steps(self) -> int:
        """Steps of the run; 0 while a budget of minutes has not decided them yet."""
        return 0 if self.plan.config.has_open_length else self.plan.steps

    @cached_property
    def is_trained(self) -> bool:
        """Whether nothing is left to train, as it is planned."""
        return is_trained(self.folder, self.steps)

    @property
    def is_done(self) -> bool:
        """Whether it is trained, its own post-processing decided, and its cases scored."""
        return self.is_trained and has_rules(self.folder) and is_scored(self.folder)

    @property
    def is_changed(self) -> bool:
        """Whether it has begun with other settings, such as higher rates."""
        if not (self.folder / "config.json").is_file():
            return False
        return load_config(self.folder) != self.plan.config

    @property
    def training_left_s(self) -> Optional[float]:
        """Predicted seconds until it is trained, as its plan has them; None if no step is
        predicted."""
        return 0.0 if self.is_trained else self.plan.left_s

    @property
    def scoring_left_s(self) -> Optional[float]:
        """Predicted seconds from then until it is scored; None if no step is predicted."""
        return 0.0 if self.is_trained and is_scored(self.folder) else scoring_s(self.plan)


class _Asked:
    """What a call asks for: the settings of all calls for these folds, and the folds as they would
    be trained with them."""

    def __init__(
        self, store_folder: Path, folder: Path, parts: int, settings: Chosen, *, force: bool
    ):
        settings = located(settings)
        raise_if_any(_problems(folder, parts, settings))
        for place in (folder, *(fold_folder(folder, f"{i}/{parts}") for i in range(1, parts + 1))):
            refuse_foreign(place)
        kept = read_folds(folder)
        before = kept.chosen if kept else _chosen_elsewhere(folder, parts)
        self.chosen = chosen_again(_without_replaced(before, settings), settings)
        self.alike = _as_begun(self.chosen, folder, parts)
        self.store = open_store(store_folder)
        self.host = host_share(read_host(), 1)
        self.planned = _plan(self.store, folder, parts, self.alike, self.host, force=force)


def _problems(folder: Path, parts: int, settings: Chosen) -> List[str]:
    """What keeps folds from being trained so."""
    problems = []
    if settings.get("fold"):
        problems.append(f"--folds must come without --fold, got {settings['fold']}; leave one out")
    workers = read_cluster(os.environ).workers
    if workers > 1:
        rule = f"train --folds must be one process, got one of {workers} workers"
        todo = "train each fold by all workers with --fold I/K, then repeat --folds alone"
        problems.append(f"{rule}; {todo}")
    kept = read_folds(folder)
    for name, kind in ((CONFIG, "one run"), (COMPARISON, "the folder of a comparison")):
        if (folder / name).is_file() and not (kept and name == COMPARISON):
            rule = f"--run {folder} must be a folder of folds"
            problems.append(f"{rule}, got {kind}; choose another folder")
    if kept and kept.count != parts:
        rule = f"--folds must stay {kept.count}, as {folder} was begun, got {parts}"
        problems.append(f"{rule}; leave it so, or choose another folder")
    return problems


def _without_replaced(before: Chosen, settings: Chosen) -> Dict[str, Any]:
    """The settings of earlier calls, but for those that a command line does not take beside the new
    ones."""
    replaced = []
    for pair in EITHER:
        if any(name in settings for name in pair):
            replaced += pair
    return {name: value for name, value in before.items() if name not in replaced}


def _chosen_elsewhere(folder: Path, parts: int) -> Dict[str, Any]:
    """The settings that were chosen for the first fold that is there, trained before this folder
    was one of folds."""
    for part in range(1, parts + 1):
        chosen = read_plan(fold_folder(folder, f"{part}/{parts}")).get("chosen")
        if chosen:
            return {name: value for name, value in chosen.items() if name != "fold"}
    return {}


def _as_begun(chosen: Chosen, folder: Path, parts: int) -> Dict[str, Any]:
    """The settings with the network and coarse steps of a fold that has begun, unless they are
    chosen: an earlier version may have decided others, and all folds are alike."""
    for part in range(1, parts + 1):
        run = fold_folder(folder, f"{part}/{parts}")
        if not (run / "config.json").is_file() or not checkpoints(run):
            continue
        begun = load_config(run)
        depth = begun.unet.depth
        if chosen.get("depth", AUTO) in (AUTO, depth):  # another one is refused by its name
            return {**chosen, **still_open(chosen, matching_settings(begun))}
    return dict(chosen)


def _plan(
    store: Store,
    folder: Path,
    parts: int,
    chosen: Chosen,
    host: Host,
    *,
    force: bool,
) -> List[PlannedFold]:
    """The folds as they would be trained now. Raises InputError if the settings do not suit the
    store, or a fold that has begun, and DoesNotFitError, unless `force`, if one is to be trained
    that may not fit."""
    gpus = HostGpus()
    planned = []
    for part in range(1, parts + 1):
        fold = f"{part}/{parts}"
        run = fold_folder(folder, fold)
        try:
            plan = make_plan(store, run, host, {**chosen, "fold": fold}, gpus=gpus, force=force)
        except InputError as error:
            raise type(error)(*(f"fold {fold}: {problem}" for problem in error.problems)) from None
        planned.append(PlannedFold(fold, run, plan))
    raise_if_any(problem for fold in planned for problem in _stopped_by_scores(fold))
    leaks = {fold.fold: leak(fold.plan.config.init_record) for fold in planned}
    raise_if_any(f"fold {fold}: {problem}" for fold, problem in leaks.items() if problem)
    raise_if_any(problem for fold in planned for problem in _made_shorter(fold))
    first = planned[0].plan.config
    for other in planned[1:]:
        alike = replace(first, fold=other.fold)
        problems = differences(alike, other.plan.config) + _other_start(first, other.plan.config)
        raise_if_any(f"fold {other.fold} beside fold 1: {problem}" for problem in problems)
    for fold in planned:
        if not (force or fold.is_trained):
            check_run(fold.plan, host, gpus)
    return planned


def _other_start(first: RunConfig, other: RunConfig) -> List[str]:
    """What is wrong if two folds start from different weights: their file has changed."""
    if first.init_record is None or other.init_record is None:  # other settings, which are named
        return []
    wanted = first.init_record.sha256
    got = other.init_record.sha256
    if wanted == got:
        return []
    rule = f"init must hold weights of SHA-256 {wanted}, got {got}"
    return [f"{rule}; restore them, or choose another folder"]


def _stopped_by_scores(fold: PlannedFold) -> List[str]:
    """What is wrong with a fold whose length the cases decide that it is scored on."""
    why = f"the cases that fold {fold.fold} is scored on would decide when it stops"
    if last_end(fold.folder).get("reason") == "early stop":
        todo = "repeat its `train` with --patience 0"
        return [f"run {fold.folder} must be trained to its end, got an early stop: {why}; {todo}"]
    patience = fold.plan.config.patience
    if patience:
        return [f"--patience must be 0 with --folds, got {patience}: {why}; add --patience 0"]
    return []


def _made_shorter(fold: PlannedFold) -> List[str]:
    """What is wrong with a fold that would be shorter than it was begun: steps cannot be taken
    back, so folds that have not begun would be shorter than the others."""
    if not fold.steps or not (fold.folder / "config.json").is_file():
        return []
    begun = load_config(fold.folder)
    if begun.has_open_length:
        return []  # its steps were not decided
    new = fold.plan.config
    name = "steps"
    least = begun.steps or begun.epochs * fold.plan.steps_per_epoch
    got = fold.steps
    if not (begun.steps or new.steps):
        name = "epochs"
        least = begun.epochs
        got = new.epochs
    if got >= least:
        return []
    rule = f"{name} must be at least {least}, as {fold.folder} was begun, got {got}"
    return [f"{rule}; leave it so or make it larger, or choose another folder"]


def _show(planned: Sequence[PlannedFold], host: Host, *, stderr: bool = True) -> None:
    """Print the plan of the first fold that is to be trained, and what all of them take."""
    waiting = [fold for fold in planned if not fold.is_trained]
    for fold in waiting[:1]:
        each = f"the plan of each fold, here of {fold.fold}; the table below has the time of all:"
        say(each, *plan_lines(fold.plan, host), stderr=stderr)
    rows = []
    for fold in planned:
        split = fold.plan.store.manifest.split
        saved = checkpoints(fold.folder)
        state = "to train"
        if fold.is_trained:
            state = "scored" if is_scored(fold.folder) else "to score"
        elif saved:
            state = f"from step {step_of(saved[0]):,}"
        steps = f"{fold.steps:,}" if fold.steps else "by time"
        cases = (str(len(split["train"])), str(len(split["val"])))
        left = (format_seconds(fold.training_left_s), format_seconds(fold.scoring_left_s))
        rows.append((fold.fold, state, *cases, steps, *left))
    left_s = [
        seconds for fold in planned for seconds in (fold.training_left_s, fold.scoring_left_s)
    ]
    all_s = "unknown" if None in left_s else f"about {format_seconds(sum(left_s))}"
    bounds = [fold.plan.forecast.upper_bound_bytes for fold in waiting if fold.plan.forecast]
    memory = f", up to {format_bytes(max(bounds))} of memory" if bounds else ""
    caption = f"predicted: {all_s} for all {len(planned)} folds{memory}"
    columns = ("fold", "state", "train", "held out", "steps", "to train", "to score")
    table = Table(columns, rows, title=f"{len(planned)} folds", caption=caption, names=2)
    new_console().print(table)
    warnings = dict.fromkeys(learnable(fold.plan)[0] for fold in waiting)  # each once
    say(*filter(None, warnings), stderr=stderr)
    manifest = planned[0].plan.store.manifest
    untouched = len(manifest.split["test"])
    if untouched:
        todo = ""
        if not manifest.folds:
            todo = "; `prepare --split 1 0 0` puts all patients into the folds"
        outside = f"{count(untouched, 'test case')} outside the folds, untouched by them{todo}"
        say(outside, stderr=stderr)


def _carry_out(
    planned: Sequence[PlannedFold],
    store: Path,
    folder: Path,
    words: Sequence[str],
) -> Dict[str, RunFailedError]:
    """Train and score all folds, in their order; returns those that failed. Raises the last error
    if all fail."""
    logs = writable_folder(folder / "logs", "folder of logs")
    failed: Dict[str, RunFailedError] = {}
    with Pulse(folder, say=say) as pulse:
        for number, fold in enumerate(planned):
            label = f"fold {fold.fold}"
            if fold.is_done:
                say(f"{label}: trained and scored already")
                continue
            try:
                pulse.phase(f"training {label}", step=number, steps=len(planned))
                options = [*words, "--fold", fold.fold]
                log = logs / f"{fold.folder.name}-train.txt"
                train_run(
                    fold.folder,
                    store,
                    options,
                    log,
                    label,
                    steps=fold.steps,
                    again=fold.is_changed,
                )
                if not is_scored(fold.folder):
                    pulse.phase(f"scoring {label}", step=number, steps=len(planned))
                    log = logs / f"{fold.folder.name}-evaluate.txt"
                    options = [*EVALUATION, "--tolerance", repr(TOLERANCE_MM)]
                    evaluate_run(fold.folder, store, options, log, label)
            except RunFailedError as error:
                failed[fold.fold] = error
                if len(failed) == len(planned):
                    raise
                say(f"error: {error}")
            if fold is not planned[-1]:
                _publish(folder)  # before the others are done
        pulse.phase("writing the page", step=len(planned), steps=len(planned))
        _publish(folder)
        for error in list(failed.values())[-1:]:
            pulse.note_end(f"{listed(failed)} failed; the others are done", error.exit_code)
    return failed


def _publish(folder: Path) -> None:
    """Decide post-processing on the cases that are scored; write their scores and the page."""
    answers = read_out_of_fold(folder)
    if answers:
        cases = [evidence for of_fold in answers.evidence.values() for evidence in of_fold.values()]
        decide_jointly(folder, cases)
        write_out_of_fold(folder, answers)
    write_folds_report(folder)


def _command_line(chosen: Chosen, *, force: bool, mlflow: str) -> List[str]:
    """Options of `train` for each fold, besides its folders and --fold."""
    words = [word for cls in SETTINGS for word in to_command_line(cls, chosen)]
    if force:
        words.append("--force")
    if mlflow:
        words += ["--mlflow", mlflow]
    return words

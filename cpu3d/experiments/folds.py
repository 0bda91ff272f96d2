"""Train all folds of a store: every case is scored once, and the folds answer together.

    train_folds(store, folder, 5, settings={"epochs": 40})

Each fold is an ordinary run, folder/fold-1 to folder/fold-K, also one that was trained elsewhere.
The same call continues after one that was cut off. A fold that fails is named at the end; the
others go on.
"""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence

from cpu3d.data.store import open_store
from cpu3d.distributed.cluster import read_cluster
from cpu3d.errors import InputError, raise_if_any
from cpu3d.experiments.runner import PlannedRun, RunFailedError, carry_out
from cpu3d.host.gpu import HostGpus
from cpu3d.inference.out_of_fold import read_out_of_fold, write_out_of_fold
from cpu3d.inference.postprocessing.run_rules import choose_rules_of_folds
from cpu3d.plan import Plan, make_plan
from cpu3d.plan_text import check_run, learnable, plan_lines
from cpu3d.report.folds import gather_folds, results_tables, write_folds_report
from cpu3d.run.config_json import differences, load_config
from cpu3d.run.folds import (
    COMPARISON,
    CONFIG,
    START_S,
    Folds,
    fold_folder,
    fold_names,
    read_folds,
    save_folds,
)
from cpu3d.run.transfer import leak
from cpu3d.settings import (
    SETTINGS,
    Chosen,
    TrainOptions,
    as_options,
    chosen_again,
    located,
)
from cpu3d.training.tracking import require_mlflow
from cpu3d.training.train import refuse_foreign
from cpu3d.util.atomic import check_folder, writable_folder
from cpu3d.util.lock import locked
from cpu3d.util.progress import say
from cpu3d.util.records import count, listed
from memory_estimator.common.schema import check_given
from memory_estimator.common.table import Table, new_console
from memory_estimator.common.units import format_seconds
from memory_estimator.host import read_host


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
    folder was begun with and for a fold's folder that holds other files than a run's own, and,
    unless `force`, DoesNotFitError. Interrupted after SIGINT and SIGTERM, once the fold that trains
    is saved. If folds fail, RunFailedError when the others are done.
    """
    folder = Path(folder)
    check_given(SETTINGS, settings or {}, InputError)
    if mlflow:
        require_mlflow()
    check_folder(folder, "folder of --run")
    chosen = _chosen_in_all(folder, parts, settings or {})
    words = as_options(chosen)
    if force:
        words.append("--force")
    if mlflow:
        words += ["--mlflow", mlflow]
    planned = _plan(store_folder, folder, parts, chosen, words, force=force)
    _show(planned)
    writable_folder(folder, "folder of --run")
    with locked(folder, "folder of folds"):
        store = planned[0].plan.store.folder.resolve()
        # the last one waits longest: `status` shows this until it has a pace of its own
        save_folds(folder, Folds(parts, str(store), chosen, planned[-1].left_s))
        runs = [fold.run for fold in planned]
        failed = carry_out(runs, store, folder, lambda: publish_folds(folder))
        publish_folds(folder)
    for table in results_tables(gather_folds(folder)):
        new_console().print(table)
    say(f"written: {folder / 'report.html'}")
    if failed:
        lines = [f"{fold} without: {error.why}" for fold, error in failed.items()]
        worst = list(failed.values())[-1]
        raise RunFailedError(
            f"all {parts} folds must be trained and scored, got {listed(lines)}; the same command "
            "tries them again",
            worst.exit_code,
            worst.why,
        )


def show_folds(options: TrainOptions, settings: Dict[str, Any]) -> None:
    """Print what `train --folds` would do with these options, and write nothing. Raises as
    `train_folds` before it writes."""
    if options.mlflow:
        require_mlflow()
    check_folder(options.run, "folder of --run")
    chosen = _chosen_in_all(options.run, options.folds, settings)
    planned = _plan(options.store, options.run, options.folds, chosen, force=options.force)
    if options.json:
        print(json.dumps([fold.plan.to_json() for fold in planned]))
    else:
        _show(planned, stderr=False)


def publish_folds(folder: Path) -> None:
    """Decide post-processing on the cases that are scored; write their scores and the page."""
    answers = read_out_of_fold(folder)
    if answers:
        cases = [
            evidence
            for fold_evidence in answers.evidence.values()
            for evidence in fold_evidence.values()
        ]
        choose_rules_of_folds(folder, cases)
        write_out_of_fold(folder, answers)
    write_folds_report(folder)


OF_FOLD = ("fold", "spacing_mm", "oriented", "init_record")  # in which folds differ


# --- Private helpers ---


@dataclass(frozen=True)
class PlannedFold:
    """A fold to train and to score."""

    fold: str  # as "2/5"
    plan: Plan
    run: PlannedRun

    @property
    def state(self) -> str:
        """What is left to do, in words."""
        if self.run.is_trained:
            return "scored" if self.run.is_scored else "to score"
        return f"from step {self.plan.done:,}" if self.plan.done else "to train"

    @property
    def left_s(self) -> Optional[float]:
        """Predicted seconds until it is scored, with the starts of its processes; None if no step
        is predicted."""
        if self.state == "scored":
            return 0.0
        forecast = self.plan.forecast
        training_s = 0.0 if self.run.is_trained else self.plan.left_s
        if training_s is None or forecast is None:
            return None
        return training_s + START_S + forecast.schedule.held_out * forecast.answered_s


def _chosen_in_all(folder: Path, parts: int, settings: Chosen) -> Dict[str, Any]:
    """The settings of all calls for these folds. Raises InputError if they cannot be trained so."""
    settings = located(settings)
    kept = read_folds(folder)
    raise_if_any(_problems(folder, parts, settings, kept))
    for place in (folder, *(fold_folder(folder, fold) for fold in fold_names(parts))):
        refuse_foreign(place)
    before = dict(kept.chosen) if kept else {}
    return chosen_again(before, settings)


def _problems(folder: Path, parts: int, settings: Chosen, kept: Optional[Folds]) -> Iterator[str]:
    """What keeps folds from being trained so."""
    if settings.get("fold"):
        yield f"--folds must come without --fold, got {settings['fold']}; leave one out"
    workers = read_cluster(os.environ).workers
    if workers > 1:
        todo = "train each fold by all workers with --fold I/K, then repeat --folds alone"
        yield f"train --folds must be one process, got one of {workers} workers; {todo}"
    for name, kind in ((CONFIG, "one run"), (COMPARISON, "the folder of a comparison")):
        if (folder / name).is_file():
            yield f"--run {folder} must be a folder of folds, got {kind}; choose another folder"
    if kept and kept.count != parts:
        rule = f"--folds must stay {kept.count}, as {folder} was begun, got {parts}"
        yield f"{rule}; leave it so, or choose another folder"


def _plan(
    store_folder: Path,
    folder: Path,
    parts: int,
    chosen: Chosen,
    words: Sequence[str] = (),
    *,
    force: bool,
) -> List[PlannedFold]:
    """The folds as they would be trained now, with options of `train`. Raises InputError if the
    settings do not suit the store, or a fold that has begun, and DoesNotFitError, unless `force`,
    if one is to be trained that may not fit."""
    store = open_store(store_folder)
    host = read_host()
    gpus = HostGpus()
    planned = []
    for fold in fold_names(parts):
        place = fold_folder(folder, fold)
        try:
            plan = make_plan(store, place, host, {**chosen, "fold": fold}, gpus=gpus, force=force)
        except InputError as error:
            raise type(error)(*(f"fold {fold}: {problem}" for problem in error.problems)) from None
        is_begun = (place / CONFIG).is_file()
        run = PlannedRun(
            name=f"fold {fold}",
            folder=place,
            options=(*words, "--fold", fold),
            steps=0 if plan.config.has_open_length else plan.steps,
            is_fold=True,
            # one that has diverged, with other settings, such as lower rates
            again=is_begun and load_config(place) != plan.config,
        )
        planned.append(PlannedFold(fold, plan, run))
    raise_if_any(problem for fold in planned for problem in _problems_of_fold(fold))
    first = planned[0].plan.config
    for other in planned[1:]:
        own = {name: getattr(other.plan.config, name) for name in OF_FOLD}
        problems = differences(replace(first, **own), other.plan.config)
        start = first.init_record
        record = other.plan.config.init_record
        if start and record and start.sha256 != record.sha256:  # the file has changed since
            problems.append(
                f"init must hold weights of SHA-256 {start.sha256}, got {record.sha256}; restore "
                "them, or choose another folder"
            )
        raise_if_any(f"fold {other.fold} beside fold 1: {problem}" for problem in problems)
    for fold in planned:
        if not (force or fold.run.is_trained):
            check_run(fold.plan, host, gpus)
    return planned


def _problems_of_fold(fold: PlannedFold) -> Iterator[str]:
    """What keeps a fold from being trained as planned, and scored by cases that it has not seen."""
    config = fold.plan.config
    seen = leak(config.init_record)
    if seen:
        yield f"fold {fold.fold}: {seen}"
    folder = fold.run.folder
    if config.has_open_length or not (folder / CONFIG).is_file():
        return
    begun = load_config(folder)
    least = begun.steps or begun.epochs * fold.plan.steps_per_epoch
    # Steps cannot be taken back, so folds that have not begun would be shorter than the others.
    if not begun.has_open_length and fold.plan.steps < least:
        rule = f"steps must be at least {least}, as {folder} was begun"
        yield f"{rule}, got {fold.plan.steps}; make them more, or choose another folder"


def _show(planned: Sequence[PlannedFold], *, stderr: bool = True) -> None:
    """Print the plan of the first fold that is to be trained, and the time of all of them."""
    waiting = [fold for fold in planned if not fold.run.is_trained]
    for fold in waiting[:1]:
        say(f"the plan of fold {fold.fold}:", *plan_lines(fold.plan, read_host()), stderr=stderr)
    rows = []
    for fold in planned:
        split = fold.plan.store.manifest.split
        steps = f"{fold.run.steps:,}" if fold.run.steps else "by time"
        cases = (str(len(split["train"])), str(len(split["val"])))
        rows.append((fold.fold, fold.state, *cases, steps, format_seconds(fold.left_s)))
    left_s = [fold.left_s for fold in planned]
    all_s = "unknown" if None in left_s else f"about {format_seconds(sum(left_s))}"
    columns = ("fold", "state", "train", "held out", "steps", "left")
    caption = f"predicted: {all_s} for all {len(planned)} folds"
    table = Table(columns, rows, title=f"{len(planned)} folds", caption=caption, names=2)
    new_console().print(table)
    warnings = dict.fromkeys(learnable(fold.plan)[0] for fold in waiting)  # each once
    say(*filter(None, warnings), stderr=stderr)
    untouched = len(planned[0].plan.store.manifest.split["test"])
    if untouched:
        say(
            f"{count(untouched, 'test case')} outside the folds, untouched by them; `prepare "
            "--split 1 0 0` puts all patients into the folds",
            stderr=stderr,
        )

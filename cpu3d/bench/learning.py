"""Measure how fast settings learn: scores of untouched cases over training cost.

    ./run.sh bench learning --store store --folds 5 --seeds 0 1 2 --workdir study \\
        --name rotated --record study.jsonl -- --epochs 40 --rotation-deg 15
    ./run.sh bench learning --store store --folds 5 --only 2 --seeds 0 --workdir study \\
        --name rotated --record study.jsonl -- --epochs 40 --rotation-deg 15
    ./run.sh bench tables --studies study.jsonl --learning curves.png
    ./run.sh bench learning --compare study.jsonl --name defaults --name rotated
    ./run.sh bench learning --workdir work --task context --record learning.jsonl -- --recipe demo

Each seed and fold is a training and an evaluation of the cases that it held out. Nothing is chosen
by these: the last weights are scored, without post-processing. Without --folds the validation cases
are scored. What ends is kept in WORKDIR/NAME, so the same command continues after an interruption,
and other --seeds or --only add to it; the tables have all that is there, and the record gets what
it lacks. To measure settings again give another --name. A task is plain or context, which are
phantoms. A full step, the unit of cost, has the voxels of a step at full resolution; seconds are of
steps alone.
"""

import hashlib
import itertools
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from cpu3d.bench.further_cases import further_cases
from cpu3d.bench.harness import Output
from cpu3d.bench.learning_results import (
    pair_tables,
    paired,
    study_tables,
    two_settings,
)
from cpu3d.bench.study import HELD_OUT, Network, Study
from cpu3d.compare.variants import read_train_options
from cpu3d.data.fold import with_fold
from cpu3d.data.phantoms.command import USUAL_SHAPE
from cpu3d.data.store import Store, open_store
from cpu3d.errors import InputError, raise_if_any
from cpu3d.processes import RunFailedError, call
from cpu3d.util.atomic import writable_folder
from cpu3d.util.progress import say
from cpu3d.util.records import listed
from memory_estimator.common.schema import option

# Task -> options of `phantom`.
PHANTOMS = {"plain": [], "context": ["--context", "count"]}
TASK_STEPS = 64  # of a run on a task, unless a number is chosen
OWN = ("seed", "fold")  # settings of train that are options here


@dataclass(frozen=True)
class Options:
    """The options of `bench learning`."""

    workdir: Optional[Path] = option(None, "folder for runs and data; continued", metavar="DIR")
    store: Optional[Path] = option(None, "store of `prepare`", metavar="DIR", one_of="data")
    task: str = option("plain", "the phantoms of a store", choices=tuple(PHANTOMS), one_of="data")
    compare: Tuple[Path, ...] = option(
        (), help="compare two settings in these records by case", metavar="FILE", one_of="data"
    )
    folds: Optional[int] = option(
        None, "cross-validate in K folds (default: the store's given folds)", "K", at_least=2
    )
    only: Tuple[int, ...] = option((), "train these folds alone", metavar="I", at_least=1)
    seeds: Tuple[int, ...] = option((0, 1, 2), "seeds of the runs", metavar="S", at_least=0)
    name: Tuple[str, ...] = option(
        (),
        "name of the settings (default: the options of train); with --compare two, baseline first",
        repeat=True,
    )
    shape: Tuple[int, int, int] = option(USUAL_SHAPE, "voxels of phantoms", metavar=("X", "Y", "Z"))
    cases: Tuple[int, int] = option(
        (8, 4), "of a task: cases to train on, and untouched cases", metavar=("TRAIN", "VAL")
    )
    also: Tuple[Path, ...] = option(
        (), "folders of further labelled cases, scored by the network of each run", metavar="CASE"
    )
    steps: Optional[int] = option(
        None, f"steps of every run (default: {TASK_STEPS} of a task)", at_least=1, metavar="N"
    )
    train: Tuple[str, ...] = option((), "options of train, after --", metavar="-- ...", rest=True)


OPTIONS = (Options, Output)


def run(options: Options, output: Output) -> int:
    """Train and score what is not there yet, or compare records.

    Runs that fail are left out and named; the exit code is then the highest of theirs. Raises
    RunFailedError if nothing is there, and Interrupted after a signal.
    """
    raise_if_any(_problems(options))
    if options.compare:
        return compare(options, output)
    workdir = options.workdir.resolve()
    study = study_of(options, workdir)
    further = further_cases(options.also, study.store)
    writable_folder(workdir, "workdir")
    study = study.claim()
    kept = study.kept()
    study.announce(kept)
    failed: Dict[Network, RunFailedError] = {}
    for number, network in enumerate(study.networks, 1):
        label = f"{number}/{len(study.networks)} {study.name}, {network}"
        try:
            if network not in kept:
                kept[network] = study.measure(network, label)
            study.score_further(network, kept[network], further, label)
        except RunFailedError as error:
            failed[network] = error
            if len(failed) == len(study.networks):
                raise
            say(f"error: {error}")
    left_out = [f"{network} is left out: {error.why}" for network, error in failed.items()]
    results = [kept[network] for network in sorted(kept, key=Network.place)]
    result = study.record(results, left_out)
    output.show(result, *study_tables([result]))
    if output.record:
        study.append_new(output.record, results, left_out)
    return max((error.exit_code for error in failed.values()), default=0)


def study_of(options: Options, workdir: Path) -> Study:
    """The study that the options ask for; a task's store is made. Raises InputError for options
    that do not suit the store, and for settings that train would refuse."""
    words = tuple(word for word in options.train if word != "--")
    known = [word for word in words if word != "--force"]  # it is no setting
    settings = read_train_options(known, "what follows --")
    raise_if_any(
        f"options after -- must be without --{name}, got {settings[name]}; use --{name}s"
        for name in OWN
        if name in settings
    )
    if settings.get("patience"):
        rule = f"options after -- must be without --patience, got {settings['patience']}"
        raise InputError(f"{rule}: the cases that are scored would end a run; leave it out")
    steps = options.steps
    log = workdir / "log.txt"
    if options.store:
        store = open_store(options.store)
        task = store.manifest.name
    else:
        store = made_store(writable_folder(workdir, "workdir"), options, log)
        task = options.task
        if steps is None:
            steps = settings.get("steps", TASK_STEPS)
    if steps:
        settings["steps"] = steps
    count_of_folds = _folds_of(store, options)
    folds = [""]
    if count_of_folds:
        numbers_of_folds = options.only or range(1, count_of_folds + 1)
        folds = [f"{number}/{count_of_folds}" for number in numbers_of_folds]
    if options.name:
        name = options.name[0]
    else:
        name = shlex.join(words) if words else "defaults"
    folder_name = name if options.store else f"{task}-{name}"
    return Study(
        task=task,
        name=name,
        store=store,
        folder=workdir / _folder_name(folder_name),
        folds=count_of_folds,
        networks=tuple(itertools.starmap(Network, itertools.product(options.seeds, folds))),
        steps=steps,
        options=words,
        settings=settings,
        log=log,
    )


def made_store(workdir: Path, options: Options, log: Path) -> Store:
    """The store of the task below `workdir`, made if it is missing."""
    cases = [*map(str, options.cases)]
    shape = [*map(str, options.shape)]
    words = [*PHANTOMS[options.task], "--shape", *shape]
    folder = workdir / "-".join([options.task, *shape, *cases])
    data = str(folder / "data")
    store = str(folder / "store")
    total = str(sum(options.cases))
    phantom = ["phantom", "--out", data, "--cases", total, *words]
    call(phantom, log, f"{options.task}: phantom")
    prepare = ["prepare", "--dataset", data, "--store", store, "--split", *cases, "0"]
    call(prepare, log, f"{options.task}: prepare")
    return open_store(Path(store))


# --- Two settings side by side ---


def compare(options: Options, output: Output) -> int:
    """Print the paired differences of two settings in one or two record files."""
    pair = paired(*two_settings(options.compare, options.name))
    if pair.left_out:
        say(f"note: seeds {listed(pair.left_out)} are left out: not all cases are scored in both")
    result = pair.to_json()
    output.publish("differences", result, *pair_tables(result))
    return 0


# --- Private helpers ---


def _problems(options: Options) -> List[str]:
    """Options that are missing or do not go together."""
    problems = []
    if not options.compare and not options.workdir:
        problems.append("--workdir must name a folder for runs, got none; add it")
    if not options.compare and len(options.name) > 1:
        problems.append(f"--name must be given once, got {listed(options.name)}; choose one")
    if options.compare and options.train:
        words = shlex.join(options.train)
        problems.append(f"--compare must be without options of train, got {words}; leave them out")
    if len(set(options.seeds)) < len(options.seeds):
        problems.append(f"--seeds must differ, got {listed(options.seeds)}; leave one out")
    if len(set(options.only)) < len(options.only):
        problems.append(f"--only must differ, got {listed(options.only)}; leave one out")
    return problems


def _folds_of(store: Store, options: Options) -> Optional[int]:
    """The number of folds: the chosen one, or that of the folds which the store was given; None if
    its validation cases are scored instead."""
    folds = options.folds or len(store.manifest.folds) or None
    if options.only and (not folds or max(options.only) > folds):
        rule = "--only must come with --folds"
        if folds:
            rule = f"--only must name some of the {folds} folds"
        raise InputError(f"{rule}, got {listed(options.only)}; name folds from 1 on")
    if folds:
        with_fold(store, f"1/{folds}")  # which refuses a number that does not suit the store
    elif not store.manifest.split[HELD_OUT]:
        rule = f"store {store.folder} must have validation cases, got none"
        raise InputError(f"{rule}; choose --folds, which hold out training cases")
    return folds


def _folder_name(name: str) -> str:
    """A folder's name for a name of settings, another one for each."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:60]
    if plain == name:
        return name
    return f"{plain}-{hashlib.sha256(json.dumps(name).encode()).hexdigest()[:6]}"

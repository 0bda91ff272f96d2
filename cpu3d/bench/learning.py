"""Measure how fast settings learn: scores of untouched cases over training cost.

    ./run.sh bench learning --store store --folds 5 --seeds 0 1 2 --workdir study \\
        --name rotated --record study.jsonl -- --epochs 40 --rotation-deg 15
    ./run.sh bench learning --store store --folds 5 --only 2 --seeds 0 --workdir study \\
        --name rotated --record study.jsonl -- --epochs 40 --rotation-deg 15
    ./run.sh bench tables --studies study.jsonl --learning curves.png
    ./run.sh bench learning --compare study.jsonl --name defaults --name rotated
    ./run.sh bench learning --workdir learning --task small --record learning.jsonl -- --recipe demo

Each seed and fold is a training and an evaluation of the cases that it held out. Nothing is chosen
by these: the last weights are scored, without post-processing. Without --folds the validation cases
are scored. What ends is kept in WORKDIR/NAME, so the same command continues after an interruption,
and other --seeds or --only add to it; the tables have all that is there, and the record gets what
it lacks. To measure settings again give another --name. A task is
plain, context or small, which are phantoms, or the folder of a real case, which is warped into
copies. A full step, the unit of cost, has the voxels of a step at full resolution; seconds are of
steps alone.
"""

import dataclasses
import hashlib
import itertools
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from cpu3d.bench.further_cases import further_cases, scored_cases
from cpu3d.bench.harness import Output, Result
from cpu3d.bench.learning_results import (
    SHOWN,
    as_words,
    meaning,
    merged,
    network_of,
    pair_tables,
    paired,
    study_key,
    study_tables,
    two_settings,
)
from cpu3d.compare.experiment import read_train_options
from cpu3d.compare.run import PlannedRun
from cpu3d.compare.statistics import read_result
from cpu3d.data.store import Store, open_store
from cpu3d.data.stores.phantom import USUAL_SHAPE
from cpu3d.data.stores.splits import with_fold
from cpu3d.errors import InputError, raise_if_any
from cpu3d.folds import beside_s
from cpu3d.host.gpu import HostGpus
from cpu3d.inference.scores_file import read_scores, scores_path
from cpu3d.plan import Plan, make_plan
from cpu3d.processes import RunFailedError, call, evaluate_run, train_run
from cpu3d.run.config_json import load_config
from cpu3d.run.log import read_events
from cpu3d.run.summary import numbers, of_kind
from cpu3d.run.transfer import leak
from cpu3d.settings import RunConfig
from cpu3d.util.atomic import writable_folder, write_json
from cpu3d.util.progress import say
from cpu3d.util.records import append_record, count, listed, read_records
from memory_estimator.common.files import read_json
from memory_estimator.common.schema import option
from memory_estimator.common.units import format_seconds
from memory_estimator.host import read_host

# Task -> options of `phantom`.
PHANTOMS = {"plain": [], "context": ["--context", "count"], "small": ["--lesion-size", "small"]}
TASK_STEPS = 64  # of a run on a task, unless a number is chosen
VALIDATIONS = 8  # of a run, unless another number is chosen
HELD_OUT = "val"  # the split in which a store's view of a fold has the cases that it holds out
OWN = ("seed", "fold")  # settings of train that are options here


@dataclass(frozen=True)
class Options:
    """The options of `bench learning`."""

    workdir: Optional[Path] = option(None, "folder for runs and data; continued", metavar="DIR")
    store: Optional[Path] = option(None, "store of `prepare`", metavar="DIR", one_of="data")
    task: str = option("plain", "plain, context or small, or the folder of a case", one_of="data")
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
    study = Study.of(options, workdir)
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


class Network(NamedTuple):
    """A network to train."""

    seed: int
    fold: str  # such as "2/5"; "" for no fold

    def __str__(self) -> str:
        if self.fold:
            return f"seed {self.seed}, fold {self.fold}"
        return f"seed {self.seed}"

    def place(self) -> Tuple[int, int, str]:
        """By which networks are sorted: fold 2 is before fold 10."""
        return self.seed, len(self.fold), self.fold

    @property
    def folder(self) -> str:
        if self.fold:
            return f"seed{self.seed}-fold{self.fold.replace('/', 'of')}"
        return f"seed{self.seed}"


@dataclass(frozen=True)
class Study:
    """The networks of one setting on one store, and the folder that keeps them."""

    task: str
    name: str
    store: Store
    folder: Path
    folds: Optional[int]
    networks: Tuple[Network, ...]  # of this call, seed by seed
    steps: Optional[int]
    options: Tuple[str, ...]  # of train, as the user gave them
    settings: Mapping[str, Any]  # the settings in them
    log: Path

    @classmethod
    def of(cls, options: Options, workdir: Path) -> "Study":
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
            task = Path(options.task).resolve().name
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
        return cls(
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

    def claim(self) -> "Study":
        """Write what the study is into its folder; returns it in the words it was begun with, if
        the options meant the same then. Raises InputError if the folder is another's."""
        content = {
            "split_hash": self.store.manifest.split_hash,
            "folds": self.folds,
            "steps": self.steps,
            "options": list(self.options),
        }
        path = self.folder / "study.json"
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(path, content)
            return self
        begun = read_json(path)
        differing = []
        for name in ("split_hash", "folds"):
            if begun.get(name) != content[name]:
                differing.append((name, begun.get(name), content[name]))
        if meaning(begun) != meaning(content):
            differing.append(("options", as_words(begun), as_words(content)))
        problems = []
        for name, old, new in differing:
            rule = f"{name} of {self.folder} must be {old}, as it was begun, got {new}"
            problems.append(f"{rule}; choose another --name")
        raise_if_any(problems)
        words = [word for word in begun["options"] if word != "--force"]
        if "--force" in self.options:  # it is no setting, and holds for this call
            words.append("--force")
        return dataclasses.replace(self, steps=begun["steps"], options=tuple(words))

    def _refuse_leaks(self, todo: Sequence[Network]) -> None:
        """Raise InputError if the first weights have seen cases that a network is scored on."""
        of_folds = {network.fold: network for network in todo}
        plans = map(self.plan_of, of_folds.values())
        raise_if_any(filter(None, (leak(plan.config.init_record) for plan in plans)))

    def kept(self) -> Dict[Network, Result]:
        """The results that the folder has, of earlier calls too. Raises InputError for a damaged
        one."""
        results = {}
        for path in self.folder.glob("seed*.json"):
            result = _kept_result(path)
            results[Network(*network_of(result["curve"]))] = result
        return results

    def announce(self, kept: Mapping[Network, Result]) -> None:
        """Print the plan: what is to be done, and its time. Raises InputError as `make_plan`."""
        todo = [network for network in self.networks if network not in kept]
        measured = len(self.networks) - len(todo)
        done = f"{measured} measured already" if measured else "none measured yet"
        lines = [f"{self.task}, {self.name}: {count(self.networks, 'run')}, {done}"]
        if todo:
            plan = self.plan_of(todo[0])
            if plan.config.init:
                self._refuse_leaks(todo)
            is_timed = self.steps_of(plan) == 0
            run_s = plan.config.budget_minutes * 60 if is_timed else plan.training_s
            steps = "as many steps as fit" if is_timed else count(plan.steps, "step")
            other_s = beside_s(plan)
            time = "time unknown"
            if run_s and other_s is not None:
                each_s = run_s + other_s
                time = f"{format_seconds(each_s)} each, {format_seconds(each_s * len(todo))} in all"
                time += ", with starts, validations and scoring"
            lines.append(f"plan: {count(todo, 'run')} of {steps}: {time}")
        say(*lines)

    def plan_of(self, network: Network) -> Plan:
        """The plan of a network's training on this host."""
        settings = {**self.settings, "seed": network.seed}
        if "validate_every" not in settings:
            settings.setdefault("validations", VALIDATIONS)
        if network.fold:
            settings["fold"] = network.fold
        host = read_host()
        force = "--force" in self.options
        nowhere = Path("/nonexistent")
        return make_plan(self.store, nowhere, host, settings, gpus=HostGpus(), force=force)

    @staticmethod
    def steps_of(plan: Plan) -> int:
        """The steps of a run; 0 if a budget of minutes decides them."""
        is_timed = plan.config.budget_minutes and not plan.config.steps
        return 0 if is_timed else plan.steps

    def measure(self, network: Network, label: str) -> Result:
        """Train and score a network and keep its result. Raises RunFailedError and Interrupted."""
        run = self.folder / network.folder
        words = ["--validations", str(VALIDATIONS), "--keep", "1", *self.options]
        if self.steps:
            words += ["--steps", str(self.steps)]
        words += ["--seed", str(network.seed)]
        if network.fold:
            words += ["--fold", network.fold]
        if "init" in self.settings:  # as an absolute path
            words += ["--init", self.settings["init"]]
        steps = self.steps_of(self.plan_of(network))
        train_run(run, self.store.folder, words, self.log, label, steps=steps)
        words = ["--split", HELD_OUT, "--weights", "last", "--raw"]
        evaluate_run(run, self.store.folder, words, self.log, label)
        result = result_of(run, with_fold(self.store, network.fold), network)
        write_json(self.path_of(network), result)
        say(f"{label}: {_in_short(result['curve'])}")
        return result

    def score_further(
        self,
        network: Network,
        result: Result,
        further: Mapping[str, Path],
        label: str,
    ) -> None:
        """Have a network predict those further cases that its result lacks, and add their scores to
        it. Raises RunFailedError and Interrupted."""
        curve = result["curve"]
        scored = {case["case_id"] for case in curve.get("further", ())}
        todo = {case_id: folder for case_id, folder in further.items() if case_id not in scored}
        if not todo:
            return
        run = self.folder / network.folder
        out = run / "further"
        words = ["predict", "--run", str(run), "--weights", "last", "--raw"]
        words += ["--image", *map(str, todo.values()), "--out", str(out)]
        call(words, self.log, f"{label}: predict")
        ignore = self.store.manifest.ignore
        added = scored_cases(todo, out, list(curve["cases"][0]["regions"]), ignore)
        curve["further"] = [*curve.get("further", ()), *map(_short_case, added)]
        write_json(self.path_of(network), result)

    def path_of(self, network: Network) -> Path:
        """The file of a network's result."""
        return self.folder / f"{network.folder}.json"

    def record(self, results: Sequence[Result], failed: Sequence[str]) -> Result:
        """The record of the results. `failed`: a line for each network that is left out."""
        split = with_fold(self.store, self.networks[0].fold).manifest.split
        return {
            "task": self.task,
            "name": self.name,
            "options": list(self.options),
            "steps": self.steps,
            "folds": self.folds,
            "split_hash": self.store.manifest.split_hash,
            "cases": [len(split["train"]), len(split[HELD_OUT])],
            "shape": list(self.store.manifest.largest_shape),
            "curves": [result["curve"] for result in results],
            **results[-1]["about"],
            "failed": list(failed),
        }

    def append_new(self, path: Path, results: Sequence[Result], failed: Sequence[str]) -> None:
        """Add those results to a file of records that its newest ones lack, a record for each CPU
        that measured some."""
        studies = merged(read_records(path, "learning")) if path.is_file() else []
        by_cpu: Dict[str, List[Result]] = {}
        for result in results:
            by_cpu.setdefault(result["about"]["host"]["cpu"], []).append(result)
        for own in by_cpu.values():
            wanted = self.record(own, failed)
            known = []
            for study in studies:
                if study_key(study) == study_key(wanted) and meaning(study) == meaning(wanted):
                    known = study["curves"]
            new = [result for result in own if json.loads(json.dumps(result["curve"])) not in known]
            if new:
                append_record(path, "learning", self.record(new, failed))


def made_store(workdir: Path, options: Options, log: Path) -> Store:
    """The store of the task below `workdir`, made if it is missing."""
    task = Path(options.task).resolve()
    cases = [*map(str, options.cases)]
    shape = [*map(str, options.shape)]
    words = ["--warp", str(task)]
    if options.task in PHANTOMS:
        words = [*PHANTOMS[options.task], "--shape", *shape]
    folder = workdir / "-".join([task.name, *shape, *cases])
    data = str(folder / "data")
    store = str(folder / "store")
    total = str(sum(options.cases))
    phantom = ["phantom", "--out", data, "--cases", total, *words]
    call(phantom, log, f"{options.task}: phantom")
    prepare = ["prepare", "--dataset", data, "--store", store, "--split", *cases, "0"]
    call(prepare, log, f"{options.task}: prepare")
    return open_store(Path(store))


# --- The result of a network ---


def result_of(run: Path, store: Store, network: Network) -> Result:
    """The result of a run that was trained, and scored on the cases that it held out."""
    events = read_events(run)
    config = load_config(run)
    scores = read_scores(scores_path(run, HELD_OUT))
    start = of_kind(events, "start")[0]
    costs = read_result(PlannedRun("", network.seed, run, ()), HELD_OUT, store).costs
    curve = {
        "seed": network.seed,
        "fold": network.fold,
        "steps": config.steps,
        "points": points_of(events, config),
        "costs": {**costs, "wait_s": sum(numbers(of_kind(events, "step"), "wait_s"))},
        "cases": [_short_case(case) for case in scores["cases"]],
    }
    about = {"config": config.to_json(), "engine_name": start["engine"]}
    about.update((fact, start[fact]) for fact in ("threads", "host", "versions"))
    return {"curve": curve, "about": about}


def points_of(events: Sequence[Mapping[str, Any]], config: RunConfig) -> List[Result]:
    """A point for each validation: step, full steps and seconds of steps until then, and Dice."""
    seconds = [0.0, *itertools.accumulate(numbers(of_kind(events, "step"), "step_s"))]
    points = []
    for event in of_kind(events, "validation"):
        step = event["step"]
        points.append(
            {
                "step": step,
                "full_steps": config.full_steps(step),
                "seconds": seconds[min(step, len(seconds) - 1)],
                "dice": dict(event["dice"]),
            }
        )
    return points


def _short_case(case: Mapping[str, Any]) -> Result:
    """What a record keeps of a scored case."""
    regions = {}
    for region, scores in case["regions"].items():
        regions[region] = {name: scores[name] for name in (*SHOWN, "empty")}
    return {"case_id": case["case_id"], "regions": regions}


def _kept_result(path: Path) -> Result:
    """The result of a network that was measured before. Raises InputError if it is damaged."""
    try:
        result = read_json(path)
        network_of(result["curve"])
    except (ValueError, KeyError, TypeError, AttributeError):
        rule = f"{path} must be as it was written, got a damaged file"
        raise InputError(f"{rule}; delete it, and the run is scored again") from None
    return result


def _in_short(curve: Result) -> str:
    """A line on the scores of a network."""
    regions = curve["cases"][0]["regions"]
    means = []
    for region in regions:
        dice = [case["regions"][region]["dice"] for case in curve["cases"]]
        means.append(f"{region} {sum(dice) / len(dice):.3f}")
    return f"Dice of {count(curve['cases'], 'untouched case')}: {', '.join(means)}"


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

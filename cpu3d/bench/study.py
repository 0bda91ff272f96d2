"""A study of `bench learning`: the networks of one setting on one store, what each has learnt, and
the folder that keeps them."""

import dataclasses
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from cpu3d.bench.further_cases import scored_cases
from cpu3d.bench.harness import Result
from cpu3d.bench.learning_results import (
    SHOWN,
    as_words,
    meaning,
    merged,
    network_of,
    study_key,
)
from cpu3d.chosen import still_open
from cpu3d.compare.run import PlannedRun
from cpu3d.compare.statistics import read_result
from cpu3d.compare.variants import as_options
from cpu3d.data.fold import with_fold
from cpu3d.data.store import Store
from cpu3d.errors import InputError, raise_if_any
from cpu3d.folds import beside_s
from cpu3d.host.gpu import HostGpus
from cpu3d.inference.scores_file import read_scores, scores_path
from cpu3d.plan import NO_RUN, Plan, make_plan
from cpu3d.processes import call, evaluate_run, train_run
from cpu3d.run.config_json import load_config, settings_of_begun
from cpu3d.run.log import read_events
from cpu3d.run.summary import numbers, of_kind
from cpu3d.run.transfer import leak
from cpu3d.settings import RunConfig
from cpu3d.util.atomic import write_json
from cpu3d.util.progress import say
from cpu3d.util.records import append_record, count, read_records
from memory_estimator.common.files import read_json
from memory_estimator.common.units import format_seconds
from memory_estimator.host import read_host

VALIDATIONS = 8  # of a run, unless another number is chosen
HELD_OUT = "val"  # the split in which a store's view of a fold has the cases that it holds out


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
        settings = {**self.settings, **self._begun_settings(), "seed": network.seed}
        if "validate_every" not in settings:
            settings.setdefault("validations", VALIDATIONS)
        if network.fold:
            settings["fold"] = network.fold
        host = read_host()
        force = "--force" in self.options
        return make_plan(self.store, NO_RUN, host, settings, gpus=HostGpus(), force=force)

    def _begun_settings(self) -> Dict[str, Any]:
        """Of networks that were trained before: an earlier version may have decided levels, strides
        and coarse steps otherwise, and all networks are alike."""
        runs = sorted(path.parent for path in self.folder.glob("seed*/config.json"))
        return still_open(self.settings, settings_of_begun(runs))

    @staticmethod
    def steps_of(plan: Plan) -> int:
        """The steps of a run; 0 if a budget of minutes decides them."""
        is_timed = plan.config.budget_minutes and not plan.config.steps
        return 0 if is_timed else plan.steps

    def measure(self, network: Network, label: str) -> Result:
        """Train and score a network and keep its result. Raises RunFailedError and Interrupted."""
        run = self.folder / network.folder
        words = ["--validations", str(VALIDATIONS), "--keep", "1", *self.options]
        words += as_options(self._begun_settings())
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
        """The record of the results, which names no folder but those in the options of train.
        `failed`: a line for each network that is left out."""
        split = with_fold(self.store, self.networks[0].fold).manifest.split
        about = results[-1]["about"]
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
            **about,
            "config": _without_folders(about["config"]),
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


def _without_folders(config: Mapping[str, Any]) -> Result:
    """A run's settings as a record has them, which is for others: it names no folder of a host."""
    kept = {name: value for name, value in config.items() if name not in ("store", "init")}
    source = kept.get("init_record")
    if source:
        kept["init_record"] = {**source, "file": Path(source["file"]).name}
    return kept


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

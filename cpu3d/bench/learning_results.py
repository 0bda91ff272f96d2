"""What records of `bench learning` say: tables, paired differences between settings, pictures.

A record has a curve for each trained network: of a seed and, with folds, of a fold. Later records
of the same settings add networks, or take the place of those of the same seed and fold.
"""

import dataclasses
import itertools
import json
import shlex
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from cpu3d.bench.harness import Result
from cpu3d.compare.results import differences_table
from cpu3d.compare.statistics import MEAN, paired_difference, seed_bound
from cpu3d.compare.variants import read_train_options
from cpu3d.errors import InputError, raise_if_any
from cpu3d.inference.scores import METRICS, has_region
from cpu3d.report.pictures import Line, chart, strips
from cpu3d.util.records import count, listed, read_records
from memory_estimator.common.table import PALETTE, Table
from memory_estimator.common.units import format_bytes

# Scores of a case in a record.
SHOWN = ("dice", "lesion_dice", "lesion_sensitivity", "false_positives")
FURTHER = "further"  # the key of a curve's cases that are in no fold
COMPARED = ("dice", "lesion_dice", "false_positives")
DATA = ("task", "shape", "split_hash", "folds")  # fields of records on the same data, cut alike
SETTINGS = (*DATA, "name", "steps")
COSTS = {"full_steps": "full steps", "seconds": "seconds of steps"}  # of a point, in words
AXES = {**COSTS, "seconds": "seconds of steps, with the compilation in the first"}
PRESENT = "cases that have the region"


# --- Records ---


def merged(records: Sequence[Result], *, by_cpu: bool = True) -> List[Result]:
    """A record for each setting, with the newest curve of each seed and fold; with `by_cpu` those
    of other CPUs are apart.

    A name that was given to other options later stands for these alone.
    """
    studies: Dict[str, Result] = {}
    for record in records:
        cpu = record["host"]["cpu"] if by_cpu else ""
        key = json.dumps([cpu, study_key(record)])
        earlier = studies.get(key)
        curves = {}
        if earlier and meaning(earlier) == meaning(record):
            curves = {network_of(curve): curve for curve in earlier["curves"]}
        curves.update((network_of(curve), curve) for curve in record["curves"])
        studies[key] = {**record, "curves": [curves[network] for network in sorted(curves)]}
    return list(studies.values())


def study_key(record: Mapping[str, Any]) -> List[Any]:
    """The data and the name of a record: those of one study are equal."""
    return [*map(record.get, SETTINGS)]


def meaning(record: Mapping[str, Any]) -> Any:
    """What the options and steps of a record ask for, whatever their order; the words themselves
    if `train` does not know them any more."""
    words = [word for word in record.get("options") or () if word != "--force"]  # it is no setting
    try:
        settings = read_train_options(words, "a record")
    except InputError:
        return [record.get("steps"), *words]
    if record.get("steps"):
        settings["steps"] = record["steps"]
    return settings


def as_words(record: Mapping[str, Any]) -> str:
    """The options and steps of a record as a command line has them."""
    words = []
    if record.get("steps"):
        words += ["--steps", str(record["steps"])]
    return shlex.join([*words, "--", *(record.get("options") or ())])


def network_of(curve: Mapping[str, Any]) -> Tuple[int, str]:
    """Seed and fold of a curve's network; "" for no fold."""
    return curve["seed"], curve.get("fold", "")


def cases_of(curve: Mapping[str, Any], kind: str = "cases") -> Dict[str, Dict[str, Dict[str, Any]]]:
    """Case id -> region -> scores of a network's untouched cases, or of "further" ones, with the
    mean over several regions as one more; none in records from before cases were kept."""
    cases = {}
    for case in curve.get(kind, ()):
        regions = dict(case["regions"])
        if len(regions) > 1:
            regions[MEAN] = {name: fmean(of[name] for of in regions.values()) for name in SHOWN}
        cases[case["case_id"]] = regions
    return cases


def end_dice(curve: Mapping[str, Any]) -> List[float]:
    """The mean Dice over the regions of each untouched case by the last weights, or of records
    without cases their mean."""
    cases = cases_of(curve).values()
    if cases:
        return [fmean(of[name]["dice"] for name in of if name != MEAN) for of in cases]
    return [fmean(curve["points"][-1]["dice"].values())]


# --- Tables ---


def learning_table(records: Sequence[Result]) -> Table:
    """A row a record: costs of a run and mean Dice at the end, with the range of its seeds' and its
    folds' means."""
    rows = []
    for record in records:
        curves = record["curves"]
        costs = [f"{fmean(curve['points'][-1][cost] for curve in curves):.1f}" for cost in COSTS]
        row = [record["task"], record["name"], str(len(curves)), *costs]
        for name, show in (("train_s", _minutes), ("train_peak_bytes", format_bytes)):
            known = [curve["costs"][name] for curve in curves if curve.get("costs", {}).get(name)]
            row.append(show(max(known)) if known else "-")
        seeds = _means_by(curves, lambda curve: curve["seed"])
        folds = _means_by(curves, lambda curve: curve.get("fold", ""))
        mean = fmean(dice for curve in curves for dice in end_dice(curve))
        row += [f"{mean:.3f}", _range(seeds), _range(folds)]
        rows.append(row)
    columns = ["task", "settings", "runs", *COSTS.values(), "minutes", "memory"]
    columns += ["mean Dice", "of the seeds", "of the folds"]
    failed = [f"{record['name']}: {why}" for record in records for why in record.get("failed", ())]
    caption = (
        "Costs of a run: means of steps and seconds; of minutes, with validations, and of memory "
        "the most. Dice of untouched cases by the last weights: mean over cases and regions, the "
        "lowest and highest mean of a seed and of a fold."
    )
    return Table(columns, rows, names=2, caption=" ".join([caption, *failed]))


def study_tables(records: Sequence[Result]) -> List[Table]:
    """All tables of records, but for those of a kind that none has."""
    tables = [learning_table(records), regions_table(records), regions_table(records, FURTHER)]
    return [table for table in tables if table.rows]


def regions_table(records: Sequence[Result], kind: str = "cases") -> Table:
    """The scores of the untouched cases, a row for each region of a record that has cases of this
    kind."""
    rows = []
    for record in records:
        cases = [of for curve in record["curves"] for of in cases_of(curve, kind).values()]
        for region in cases[0] if cases else ():
            values = {name: [of[region][name] for of in cases] for name in SHOWN}
            present = [of[region] for of in cases if has_region(of[region])]
            row = [record["name"], region, f"{fmean(values['dice']):.3f}"]
            row += [f"{median(values['dice']):.3f}"]
            if region == MEAN:
                row += ["", ""]
            else:
                dice = f"{fmean(of['dice'] for of in present):.3f}" if present else "-"
                row += [dice, f"{len(present)} of {len(cases)}"]
            row += [f"{fmean(values[name]):.{METRICS[name].digits}f}" for name in SHOWN[1:]]
            rows.append(row)
    labels = [METRICS[name].labelled for name in SHOWN[1:]]
    columns = ("settings", "region", "Dice", "median", "where present", "present", *labels)
    caption = (
        "Untouched cases, full grids, without post-processing. A region that a case lacks scores 1 "
        "if nothing is predicted and else 0, as in BraTS; where present: the mean over the others."
    )
    title = ""
    if kind == FURTHER:
        title = "Further cases, each scored by the network of each run"
    return Table(columns, rows, names=2, title=title, caption=caption)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}"


def _means_by(curves: Sequence[Result], group_of: Callable[[Result], Any]) -> List[float]:
    """The mean Dice of each group of curves, such as those of a seed."""
    groups: Dict[Any, List[float]] = defaultdict(list)
    for curve in curves:
        groups[group_of(curve)] += end_dice(curve)
    return list(map(fmean, groups.values()))


def _range(means: Sequence[float]) -> str:
    return f"{min(means):.3f} to {max(means):.3f}" if len(means) > 1 else "-"


# --- Paired differences ---


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two settings on the same cases, seeds and folds."""

    names: Tuple[str, str]  # the baseline first
    seeds: List[int]
    cases: List[str]
    folds: List[str]  # of each case, the fold that held it out
    values: Dict[str, Dict[str, np.ndarray]]
    """Region -> metric -> scores (2, seeds, cases): of the baseline and of the other."""
    present: Dict[str, np.ndarray]  # region -> (cases,) whether the truth has it
    left_out: List[int]  # seeds for which not all of these cases are scored in both
    further: Dict[str, Dict[str, Any]]  # region -> metric -> difference of cases in no fold

    def difference(self, region: str, metric: str, cases: Any = slice(None)) -> Dict[str, Any]:
        """The `paired_difference` of a score, of all or of chosen cases."""
        baseline, other = self.values[region][metric][:, :, cases]
        better = METRICS[metric].larger_is_better
        return paired_difference(other, baseline, larger_is_better=better)

    def to_json(self) -> Result:
        """The differences, in the form of those of `compare`."""
        regions = list(self.values)
        every = {name: {key: self.difference(name, key) for key in COMPARED} for name in regions}
        some = {
            name: {"dice": self.difference(name, "dice", present)}
            for name, present in self.present.items()
            if 0 < present.sum() < len(present)
        }
        of_folds: Dict[str, Dict[str, float]] = {name: {} for name in regions}
        for fold in sorted(set(self.folds), key=lambda fold: (len(fold), fold)):
            held_out = np.array(self.folds) == fold
            for name in regions:
                of_folds[name][fold] = self.difference(name, "dice", held_out)["mean"]
        return {
            "baseline": self.names[0],
            "seeds": self.seeds,
            "cases": len(self.cases),
            "left_out_seeds": self.left_out,
            "differences": {self.names[1]: every},
            "where_present": {self.names[1]: some},
            "further": {self.names[1]: self.further},
            "of_folds": of_folds,
        }


def paired(baseline: Result, other: Result) -> Pair:
    """Two records side by side, on the seeds for which both have scored the most cases.

    Raises InputError unless both are of the same data, cut alike, and share a scored case and seed.
    """
    names = (baseline["name"], other["name"])
    raise_if_any(
        f"{field} of {names[1]} must be that of {names[0]}, {baseline.get(field)}, got "
        f"{other.get(field)}; measure both on one store with the same --folds"
        for field in DATA
        if baseline.get(field) != other.get(field)
    )
    tables = [_by_seed(record) for record in (baseline, other)]
    shared = {}
    for seed in set(tables[0]) & set(tables[1]):
        shared[seed] = [case for case in tables[0][seed] if case in tables[1][seed]]
    cases = max(shared.values(), key=len, default=[])
    if not cases:
        rule = f"{names[0]} and {names[1]} must share a seed and an untouched case"
        raise InputError(f"{rule}, got none in their records; measure both with the same --seeds")
    seeds = sorted(seed for seed, own in shared.items() if set(cases) <= set(own))
    cases = sorted(cases)
    first = tables[0][seeds[0]]
    regions = list(first[cases[0]].scores)

    def array(region: str, metric: str) -> np.ndarray:
        scores = np.empty((2, len(seeds), len(cases)))
        for index in np.ndindex(scores.shape):
            setting, seed, case = index
            of_case = tables[setting][seeds[seed]][cases[case]].scores
            scores[index] = of_case[region][metric]
        return scores

    def present(region: str) -> np.ndarray:
        return np.array([has_region(first[case].scores[region]) for case in cases])

    return Pair(
        names=names,
        seeds=seeds,
        cases=cases,
        folds=[first[case].fold for case in cases],
        values={name: {metric: array(name, metric) for metric in COMPARED} for name in regions},
        present={name: present(name) for name in regions},
        left_out=sorted(set(shared) - set(seeds)),
        further=_further_differences(baseline, other),
    )


def _further_differences(baseline: Result, other: Result) -> Dict[str, Dict[str, Any]]:
    """Region -> metric -> the difference of the further cases that all shared networks have scored,
    where each network takes the place of a seed; empty for none."""
    of_both = []
    for record in (baseline, other):
        of_both.append({network_of(own): cases_of(own, FURTHER) for own in record["curves"]})
    pairs = []
    for network in sorted(set(of_both[0]) & set(of_both[1])):
        first, second = (networks[network] for networks in of_both)
        if first and second:
            pairs.append((first, second))
    if not pairs:
        return {}
    names = sorted(set.intersection(*(set(cases) for pair in pairs for cases in pair)))
    if not names:
        return {}
    differences: Dict[str, Dict[str, Any]] = {}
    for region in pairs[0][0][names[0]]:
        differences[region] = {}
        for metric in COMPARED:
            values = np.empty((2, len(pairs), len(names)))  # settings, networks, cases
            for network, pair in enumerate(pairs):
                for setting, cases in enumerate(pair):
                    values[setting, network] = [cases[name][region][metric] for name in names]
            better = METRICS[metric].larger_is_better
            own = paired_difference(values[1], values[0], larger_is_better=better)
            differences[region][metric] = own
    return differences


class _Scored(NamedTuple):
    """A case as a network that has not seen it scored."""

    fold: str
    scores: Dict[str, Dict[str, Any]]  # region -> scores


def _by_seed(record: Result) -> Dict[int, Dict[str, _Scored]]:
    """Seed -> case id -> its scores, of the networks of all folds."""
    table: Dict[int, Dict[str, _Scored]] = defaultdict(dict)
    for curve in record["curves"]:
        seed, fold = network_of(curve)
        for case_id, scores in cases_of(curve).items():
            table[seed][case_id] = _Scored(fold, scores)
    return dict(table)


def two_settings(files: Sequence[Path], names: Sequence[str]) -> List[Result]:
    """The records of two settings: of these names in one file, or one of each file, whose name then
    may be left out. Equal names get those of their files before them."""
    if len(files) > 2:
        raise InputError(f"--compare must have one or two files, got {len(files)}; leave some out")
    studies = [merged(read_records(path, "learning"), by_cpu=False) for path in files]
    if len(files) == 1:
        known = list(dict.fromkeys(record["name"] for record in studies[0]))
        names = names or known
        if len(names) != 2 or names[0] == names[1]:
            rule = f"--name must choose two of the settings in {files[0]}, {listed(known)}"
            raise InputError(f"{rule}, got {listed(names)}; the first is the baseline")
        studies *= 2
    if len(names) == 1:
        names = [names[0], names[0]]
    chosen = []
    problems = []
    for place, records in enumerate(studies):
        path = files[place % len(files)]
        own = [record for record in records if not names or record["name"] == names[place]]
        if len(own) == 1:
            chosen.append(own[0])
            continue
        wanted = f"one study {names[place]}" if names else "one study"
        known = ", ".join(f"{record['name']} on {record['task']}" for record in records) or "none"
        todo = "choose with --name, and keep studies of other data or steps in other files"
        problems.append(f"{path} must hold {wanted}, got {known}; {todo}")
    raise_if_any(problems)
    if chosen[0]["name"] == chosen[1]["name"]:
        for path, study in zip(files, chosen):
            study["name"] = f"{path.stem}: {study['name']}"
    return chosen


def pair_tables(result: Result) -> List[Table]:
    """The tables of a pair's JSON: over all cases, over those that have a region if some lack it,
    and fold by fold."""
    (name,) = result["differences"]
    noun = "seed" if len(result["seeds"]) == 1 else "seeds"
    seeds = f"{noun} {listed(result['seeds'])}"
    scored = f"{count(result['cases'], 'untouched case')}, {seeds}"
    tables = [differences_table(result, f"{name} against {result['baseline']}: {scored}")]
    if any(result["where_present"][name].values()):
        some = {"baseline": result["baseline"], "differences": result["where_present"]}
        tables.append(differences_table(some, f"{name} against {result['baseline']}: {PRESENT}"))
    if result["further"][name]:
        some = {"baseline": result["baseline"], "differences": result["further"]}
        title = f"{name} against {result['baseline']}: further cases, each network as a seed"
        tables.append(differences_table(some, title))
    if len(next(iter(result["of_folds"].values()))) > 1:
        tables.append(_folds_table(result["of_folds"]))
    return tables


def _folds_table(of_folds: Mapping[str, Mapping[str, float]]) -> Table:
    """The difference of the Dice of each region, fold by fold."""
    rows = []
    for region, differences in of_folds.items():
        values = list(differences.values())
        row = [region, *(f"{value:+.3f}" for value in values)]
        rows.append([*row, f"{fmean(values):+.3f}", f"{seed_bound(values):.3f}"])
    folds = next(iter(of_folds.values()))
    return Table(
        ("region", *folds, "mean", "by chance"),
        rows,
        title="Difference of the Dice, fold by fold",
        caption="By chance: if the settings were equally good, the choice of the folds would make "
        "a mean larger than this once in 20 times (Student's t). It is rather too small, as "
        "networks of two folds share training cases.",
    )


def pairs_of(records: Sequence[Result]) -> List[Pair]:
    """Every setting with cases beside the first one on the same data, if they share a network."""
    groups: Dict[str, List[Result]] = defaultdict(list)
    for record in records:
        if any(cases_of(curve) for curve in record["curves"]):
            groups[json.dumps([*map(record.get, DATA)])].append(record)
    pairs = []
    for first, *others in groups.values():
        for other in others:
            shared = {*_networks(first)} & {*_networks(other)}
            if shared:
                pairs.append(paired(first, other))
    return pairs


def _networks(record: Result) -> List[Tuple[int, str]]:
    return [network_of(curve) for curve in record["curves"] if cases_of(curve)]


# --- Pictures ---


def draw_learning(records: Sequence[Result], cost: str = "full_steps") -> bytes:
    """Mean Dice of the untouched cases over a cost, the mean of the runs and their range, a colour
    a record, as PNG."""
    lines = []
    for record, colour in zip(records, itertools.cycle(PALETTE)):
        curves = [curve["points"] for curve in record["curves"]]
        length = max(map(len, curves))
        x = np.mean([_resampled([point[cost] for point in own], length) for own in curves], 0)
        dice = [[fmean(point["dice"].values()) for point in own] for own in curves]
        runs = np.array([_resampled(own, length) for own in dice])
        band = (runs.min(0), runs.max(0)) if len(runs) > 1 else None
        name = f"{record['task']}, {record['name']} ({count(len(runs), 'run')})"
        lines.append(Line(name, x, runs.mean(0), colour, band=band))
    title = "Dice of untouched cases: mean and range of the runs"
    return chart(lines, title=title, x_label=AXES[cost], y_label="mean Dice", x_from=0)


def _resampled(values: Sequence[float], length: int) -> np.ndarray:
    """A curve's values at `length` places, evenly from its first point to its last."""
    return np.interp(np.linspace(0, len(values) - 1, length), np.arange(len(values)), values)


def draw_pair(pair: Pair) -> bytes:
    """The differences of the Dice, a dot a case (mean over its seeds) for each region, as PNG."""
    baseline, other = pair.names
    columns = {}
    for region, of in pair.values.items():
        columns[region] = (of["dice"][1] - of["dice"][0]).mean(0).tolist()
    title = f"{other} against {baseline}"
    return strips(columns, title=title, y_label="difference of Dice", level=0.0)

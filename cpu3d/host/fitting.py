"""A host's constants from what runs have shown there, beginning with those that are assumed of it.

One run says little of networks that differ from its own, so nothing is fitted from scratch. The assumed costs are
first scaled as one, work and traffic apart; then each group of operations by its own seconds, with costs held to the
assumed proportions (ridge regression) as far as the seconds do not contradict. More runs contradict more.
"""

import dataclasses
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from memory_estimator.calibration import HostConstants, part_of, runtime_ops, scaled
from memory_estimator.job import Job
from memory_estimator.step.program import Program
from memory_estimator.step.timing import FUSED, features, group_of, step_seconds, tensor_bytes
from memory_estimator.step.training_step import training_step

DISTURBED_SHARE = 0.1
"""A step that took longer than the fastest one by more than this share was disturbed by something."""

FEWEST_STEPS = 2
"""Undisturbed ones, to call their median a step's seconds."""

HELD = 0.0001
"""How firmly costs are held to the assumed ones: one that is off by all of itself weighs as much as this share of all
operations' seconds. Groups of next to no seconds so stay as assumed, for what little was seen of them."""

FURTHEST = 8.0
"""The most that work and traffic are scaled apart: one run may not tell the two from each other."""


@dataclass(frozen=True)
class Run:
    """What a run has shown of the host that it ran on."""

    job: Job
    by: str  # the command
    date: str
    step_s: Optional[float] = None  # of an undisturbed step; None where none was timed
    op_s: Dict[str, float] = field(default_factory=dict)
    """Operation of the job's program -> its seconds, each time it runs. Empty where the profiler did not tell them."""
    group_s: Dict[str, float] = field(default_factory=dict)
    """The same of groups of operations (`timing.group_of`) that are not told apart, all together."""
    runtime_bytes: Optional[int] = None  # resident memory of the process besides tensors and scratch


class Row(NamedTuple):
    """Operations of one group that were timed together, most often a single one."""

    group: str
    features: Dict[str, float]  # `timing.features`, summed
    seconds: float


class Seen(NamedTuple):
    """A run with its program."""

    run: Run
    program: Program
    rows: List[Row]


def undisturbed(steps_s: Sequence[float]) -> List[float]:
    """Those of some steps' seconds that lie near the fastest one; [] where they are fewer than FEWEST_STEPS."""
    near = [seconds for seconds in steps_s if seconds <= (1 + DISTURBED_SHARE) * min(steps_s)]
    return near if len(near) >= FEWEST_STEPS else []


def fitted(runs: Sequence[Run], assumed: HostConstants, cpu: str, cache_bytes: int) -> List[HostConstants]:
    """Constants of the host `cpu` in each dtype that `runs`, all on one engine and of equally many threads, have timed;
    and in one that none has timed, `assumed` as much slower as they were in the other. Empty where none was timed."""
    engine, threads = runs[0].job.engine, runs[0].job.threads
    assumed = assumed.for_threads(threads)
    by_dtype: Dict[str, List[Run]] = defaultdict(list)
    for run in runs:
        if run.step_s:
            by_dtype[run.job.unet.dtype].append(run)
    found, scales = [], []
    memory = {name: getattr(assumed, name)[engine] for name in ("baseline_bytes", "op_bytes")}
    origins = {**assumed.origins, "cache_bytes": "measured: /sys"}
    points = [(runtime_ops(training_step(run.job)), run.runtime_bytes) for run in runs if run.runtime_bytes]
    if points:
        memory = dict(zip(memory, straight_line(points, memory["op_bytes"])))
        origins.update(dict.fromkeys(memory, "measured: calibrate, resident memory less the step's tensors"))
    about = {"cpu": cpu, "threads": threads, "cache_bytes": cache_bytes, "measured_threads": 0}
    about.update(baseline_bytes={engine: memory["baseline_bytes"]}, op_bytes={engine: memory["op_bytes"]}, others=None)
    for dtype, some in by_dtype.items():
        costs, scale = fit_costs(some, assumed, cache_bytes)
        scales.append(scale)
        used = [run for run in some if run.op_s] or some
        commands = ", ".join(dict.fromkeys(run.by for run in used))
        measured = {"name": cpu, "origin": "measured", "runs": len(used), "record": commands}
        measured["date"] = max(run.date for run in used)
        measured["origins"] = {**origins, "costs": f"measured: {commands}, {measured['date']}"}
        of_dtype = {**about, **measured, "costs": {engine: {dtype: costs}}}
        found.append(dataclasses.replace(assumed, **of_dtype))
    others = {dtype: groups for dtype, groups in assumed.costs.get(engine, {}).items() if dtype not in by_dtype}
    if found and others:
        scale = {part: statistics.fmean(one[part] for one in scales) for part in scales[0]}
        costs = {dtype: scaled(groups, scale) for dtype, groups in others.items()}
        name = f"{assumed.name}, as much slower or faster as {' and '.join(by_dtype)} was here"
        of_others = {**about, "name": name, "origin": "assumed", "costs": {engine: costs}}
        found.append(dataclasses.replace(assumed, **of_others))
    return found


def fit_costs(
    runs: Sequence[Run], assumed: HostConstants, cache_bytes: int
) -> Tuple[Dict[str, Dict[str, float]], Dict[str, float]]:
    """Group -> feature -> seconds a unit, of runs in one engine and dtype; and by how much work, traffic and overhead
    are dearer than assumed. Of runs whose operations were not seen only the scale is taken, and only without others."""
    job = runs[0].job
    speeds = assumed.speeds(job.engine, job.unet.dtype)
    seen = [one for one in (_seen(run, cache_bytes) for run in runs if run.op_s) if one]
    if not seen:
        constants = dataclasses.replace(assumed, cache_bytes=cache_bytes)
        ratios = [run.step_s / step_seconds(training_step(run.job), constants, run.job) for run in runs]
        scale = dict.fromkeys(("work", "traffic", "overhead"), statistics.median(ratios))
        return scaled(speeds, scale), scale
    by_group: Dict[str, List[Row]] = defaultdict(list)
    for row in (row for one in seen for row in one.rows):
        by_group[row.group].append(row)
    scale = _scale_of_parts([row for rows in by_group.values() for row in rows], speeds)
    costs = scaled(speeds, scale)
    ridge_s = HELD * sum(row.seconds for rows in by_group.values() for row in rows) / len(seen)
    for group, rows in by_group.items():
        costs[group] = _held_fit(rows, costs.get(group, {}), ridge_s)
    costs["every_op"] = {"seconds": max(0.0, statistics.median(map(_op_overhead_s, seen)))}
    # Least squares of uneven seconds add up to less than these: what is left over goes to all costs alike.
    whole = {engine: {dtype: costs} for engine, dtype in [(job.engine, job.unet.dtype)]}
    fitted = dataclasses.replace(assumed, costs=whole, cache_bytes=cache_bytes)
    rest = statistics.median(one.run.step_s / step_seconds(one.program, fitted, one.run.job) for one in seen)
    return scaled(costs, dict.fromkeys(scale, rest)), scale


def straight_line(points: Sequence[Tuple[int, int]], slope: float) -> Tuple[int, int]:
    """Bytes of no operations, and of each, through measured (operations, bytes); `slope` where it takes two points."""
    ops, sizes = zip(*points)
    mean_ops, mean_size = statistics.fmean(ops), statistics.fmean(sizes)
    spread = sum((one - mean_ops) ** 2 for one in ops)
    if spread:
        slope = max(0.0, sum((one - mean_ops) * (size - mean_size) for one, size in points) / spread)
    return max(0, round(mean_size - slope * mean_ops)), round(slope)


# --- Private helpers ---


def _seen(run: Run, cache_bytes: int) -> Optional[Seen]:
    """None for a run of a version that wrote the step down with other operations, or whose operations took no time."""
    program = training_step(run.job)
    if not {op.name for op in program.ops}.issuperset(run.op_s) or not any(run.op_s.values()):
        return None
    sizes, rows, by_group = tensor_bytes(program), [], defaultdict(list)
    for op in (op for op in program.ops if op.kind != FUSED):
        if op.name in run.op_s:
            rows.append(Row(group_of(op), features(op, sizes, cache_bytes), run.op_s[op.name]))
        else:
            by_group[group_of(op)].append(features(op, sizes, cache_bytes))
    for group, seconds in run.group_s.items():
        total: Dict[str, float] = Counter()
        for one in by_group.get(group, ()):
            total.update(one)
        if total:
            rows.append(Row(group, dict(total), seconds))
    return Seen(run, program, [row for row in rows if row.seconds > 0 and any(row.features.values())])


def _op_overhead_s(one: Seen) -> float:
    """Seconds of a step that lie in none of its operations, for each of them."""
    parts = one.run.job.parts
    times = [(op.name, 1 if op.kind == "update" else parts) for op in one.program.ops]
    seconds = sum(one.run.op_s.get(name, 0.0) * number for name, number in times)
    seconds += sum(one_s * (1 if group == "update" else parts) for group, one_s in one.run.group_s.items())
    return (one.run.step_s - seconds) / sum(number for _, number in times)


def _scale_of_parts(rows: Sequence[Row], speeds: Mapping[str, Mapping[str, float]]) -> Dict[str, float]:
    """By how much work and traffic are dearer than `speeds` say, all rows taken together."""
    columns = np.zeros((len(rows), 2))  # seconds of work and of traffic
    for column, row in zip(columns, rows):
        for name, amount in row.features.items():
            column[int(part_of(name) != "work")] += amount * speeds.get(row.group, {}).get(name, 0.0)
    known = columns.sum(1) > 0
    columns, seconds = columns[known], np.array([row.seconds for row in rows])[known]
    whole = seconds.sum() / columns.sum()
    apart = _least_squares(columns * whole, seconds, np.ones(2), HELD * seconds.sum())
    work, traffic = (whole * np.clip(apart, 1 / FURTHEST, FURTHEST)).tolist()
    return {"work": work, "traffic": traffic, "overhead": 1.0}


def _held_fit(rows: Sequence[Row], assumed: Mapping[str, float], ridge_s: float) -> Dict[str, float]:
    """Costs of one group. What is beyond the cache is never cheaper than what is in it."""
    names = sorted({name for row in rows for name, amount in row.features.items() if amount} | set(assumed))
    apart = {"cached", "traffic"} <= set(names)
    amounts = np.array([[row.features.get(name, 0.0) for name in names] for row in rows])
    usual = np.array([assumed.get(name, 0.0) for name in names])
    if apart:  # the second unknown is how much dearer traffic is
        cached, traffic = names.index("cached"), names.index("traffic")
        amounts[:, cached] += amounts[:, traffic]
        usual[traffic] = max(0.0, usual[traffic] - usual[cached])
    # In units of what is assumed; what was assumed to cost nothing in units of all the group's seconds.
    seconds, totals = np.array([row.seconds for row in rows]), amounts.sum(0)
    units = np.where(usual > 0, usual, np.divide(seconds.sum(), totals, out=np.zeros_like(totals), where=totals > 0))
    times = _least_squares(amounts * units, seconds, (usual > 0).astype(float), ridge_s)
    costs = dict(zip(names, (times * units).tolist()))
    if apart:
        costs["traffic"] += costs["cached"]
    return costs


def _least_squares(rows: np.ndarray, seconds: np.ndarray, usual: np.ndarray, ridge_s: float) -> np.ndarray:
    """Factors of the columns, none negative, so that the rows add up to `seconds`, and near to `usual`.

    Errors count as a share of the square root of the time: long operations matter more, short ones are not ignored.
    Coordinate descent on the normal equations, of a few unknowns.
    """
    products = rows.T @ (rows / seconds[:, None]) + ridge_s * np.eye(len(usual))
    goal, found = rows.sum(0) + ridge_s * usual, usual.copy()
    for _ in range(2000):
        before = found.copy()
        for i, row in enumerate(products):
            found[i] = max(0.0, found[i] + (goal[i] - row @ found) / row[i])
        if abs(found - before).max() < 1e-7:
            break
    return found

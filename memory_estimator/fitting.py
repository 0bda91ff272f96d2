"""What a unit of each kind of work costs on a host, from operations whose seconds were measured there."""

import math
import statistics
from collections import defaultdict
from typing import Any, Dict, List, Mapping, Sequence

import numpy as np

Costs = Dict[str, Dict[str, float]]
"""Group -> feature -> seconds a unit."""


def fit_costs(measured: Sequence[Mapping[str, Any]]) -> Costs:
    """Costs of each group from `measure`'s "networks".

    Errors count as a share of the square root of the time: long operations matter more, short ones are not ignored.
    """
    by_group: Dict[str, List[Mapping[str, Any]]] = defaultdict(list)
    for row in (row for network in measured for row in network["rows"]):
        by_group[row["group"]].append(row)
    costs = {group: _least_squares(rows) for group, rows in by_group.items()}
    left = [
        (network["step_s"] - sum(row["seconds"] for row in network["rows"])) / network["ops"] for network in measured
    ]
    return {**costs, "every_op": {"seconds": max(0.0, statistics.median(left))}}


def straight_line(points: Sequence[Mapping[str, int]]) -> Dict[str, int]:
    """{"bytes", "op_bytes"}: bytes of no operations, and of each, through the measured {"bytes", "ops"}."""
    ops, size = (np.array([point[name] for point in points], float) for name in ("ops", "bytes"))
    slope = max(0.0, float(np.polyfit(ops, size, 1)[0])) if len(set(ops)) > 1 else 0.0
    return {"bytes": round(float(np.mean(size - slope * ops))), "op_bytes": round(slope)}


def _least_squares(rows: Sequence[Mapping[str, Any]]) -> Dict[str, float]:
    """Seconds a unit of each feature of one group, none of them negative."""
    from scipy.optimize import nnls  # not into the memory of a measuring process

    there = [row for row in rows if row["seconds"] > 0]
    names = sorted({name for row in there for name, amount in row["features"].items() if amount})
    if not names:
        return {}
    counted = np.array([[row["features"].get(name, 0.0) for name in names] for row in there])
    if names == ["cached", "traffic"]:
        # What lies in the cache is not slower: the second unknown is how much dearer it is beyond.
        counted[:, 0] += counted[:, 1]
    weight = np.array([1 / math.sqrt(row["seconds"]) for row in there])
    scale = np.abs(counted).max(axis=0)
    found, _ = nnls(counted / scale * weight[:, None], np.array([row["seconds"] for row in there]) * weight)
    costs = dict(zip(names, (found / scale).tolist()))
    if names == ["cached", "traffic"]:
        costs["traffic"] += costs["cached"]
    elif {"cached", "traffic"} & set(names):  # the same beyond the cache as in it where only one was seen
        costs = {"cached": costs.get("traffic"), "traffic": costs.get("cached"), **costs}
    return costs

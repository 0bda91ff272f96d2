"""From timed operations to what a unit of each kind of work costs: least squares with no cost below zero."""

import math
import statistics
from collections import defaultdict
from typing import Any, Dict, List, Mapping, Sequence

import numpy as np
from scipy.optimize import nnls

Costs = Dict[str, Dict[str, float]]
"""Group -> feature -> seconds a unit."""


def fit_costs(networks: Sequence[Mapping[str, Any]]) -> Costs:
    """Costs of each group from `cpu3d.bench.op_times.measure`'s "networks".

    Errors count as a share of the square root of the time: long operations matter more, short ones are not ignored.
    Raises ValueError where nothing was timed.
    """
    by_group: Dict[str, List[Mapping[str, Any]]] = defaultdict(list)
    timed = [network for network in networks if network["step_s"]]
    if not timed:
        raise ValueError("networks must hold timed steps, got none; ask for at least one step")
    for network in timed:
        for row in network["rows"]:
            by_group[row["group"]].append(row)
    costs = {group: _complete(_least_squares(rows)) for group, rows in by_group.items()}
    left = [(network["step_s"] - _seconds(costs, network["rows"])) / network["ops"] for network in timed]
    costs["every_op"] = {"seconds": max(0.0, statistics.median(left))}
    return costs


def straight_line(points: Sequence[Mapping[str, int]]) -> Dict[str, int]:
    """{"bytes", "op_bytes"}: bytes of no operations, and of each, through the measured {"bytes", "ops"}."""
    ops = np.array([point["ops"] for point in points], float)
    size = np.array([point["bytes"] for point in points], float)
    slope = float(np.polyfit(ops, size, 1)[0]) if len(set(ops)) > 1 else 0.0
    slope = max(0.0, slope)
    return {"bytes": round(float(np.mean(size - slope * ops))), "op_bytes": round(slope)}


# --- Private helpers ---


def _least_squares(rows: Sequence[Mapping[str, Any]]) -> Dict[str, float]:
    there = [row for row in rows if row["seconds"] > 0]
    names = sorted({name for row in there for name, amount in row["features"].items() if amount})
    if not there or not names:
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
    return costs


def _complete(costs: Dict[str, float]) -> Dict[str, float]:
    """Traffic costs the same beyond the cache as in it where only one was seen."""
    for one, other in (("cached", "traffic"), ("traffic", "cached")):
        if one in costs and other not in costs:
            return {**costs, other: costs[one]}
    return costs


def _seconds(costs: Costs, rows: Sequence[Mapping[str, Any]]) -> float:
    return sum(costs[row["group"]].get(name, 0.0) * amount for row in rows for name, amount in row["features"].items())

"""The record of `bench scaling` in words: a table for the terminal, the gap explained, and both as Markdown."""

import json
from typing import Any, Dict, List, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from cpu3d.bench.record import newest as newest_of
from memory_estimator.scaling.costs import ALONE, APART, TOGETHER, WIDE, row_of
from memory_estimator.scaling.model import predicted_errors
from memory_estimator.units import GIB

COLUMNS = ("", "cores", "s a step", "volumes/s", "efficiency", "peak of a process, GiB")


def newest(records: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """The last record of every step, number of cores, engine and CPU."""
    names = ("shape", "batch", "micro_batch", "unet", "optimizer", "cores_per_worker", "engine_name")
    own = lambda record: [*(record[name] for name in names), record["host"]["cpu"]]  # noqa: E731
    return newest_of(records, lambda record: json.dumps(own(record), sort_keys=True))


def scaling_table(result: Dict[str, Any]) -> Table:
    """For the terminal."""
    table = Table(title=title_of(result), title_justify="left", box=SIMPLE_HEAD)
    for name in COLUMNS:
        table.add_column(name, justify="right" if name else "left")
    for row in result["rows"]:
        table.add_row(*cells_of(result, row))
    return table


def cells_of(result: Dict[str, Any], row: Dict[str, Any]) -> List[str]:
    """A row in words, as COLUMNS has them."""
    spread = f" ({row['step_s_min']:.2f} to {row['step_s_max']:.2f})"
    efficiency = f"{row['efficiency']:.1%}"
    if row["efficiency_max"] > row["efficiency_min"]:
        efficiency += f" ({row['efficiency_min']:.1%} to {row['efficiency_max']:.1%})"
    return [
        name_of(row),
        str(row["workers"] * result["cores_per_worker"]),
        f"{row['step_s']:.2f}{spread}",
        f"{row['processes'] * result['batch'] / row['step_s']:.3f}",
        efficiency if row["name"] != ALONE else "-",
        f"{row['process_peak_bytes'] / GIB:.2f}",
    ]


def gap(result: Dict[str, Any], workers: int) -> Dict[str, float]:
    """Where the seconds go that a step of several takes more than one of one; they add up to that.

    "contention": as many workers side by side, without exchange, against one. "waiting": for the slower, at each step.
    "all-reduce": the exchange itself. "packing": gradients into one vector and out of it. "rest": what a step computes
    more when gradients are added up apart from the update, and what the rounds differ by.
    """
    alone, together, apart = (
        row_of(result, name, count) for name, count in ((ALONE, 1), (TOGETHER, workers), (APART, workers))
    )
    return {
        "contention": apart["step_s"] - alone["step_s"],
        "waiting": together["wait_s"],
        "all-reduce": together["exchange_s"],
        "packing": together["packing_s"],
        "rest": together["compute_s"] - apart["step_s"],
    }


def gap_lines(result: Dict[str, Any]) -> List[str]:
    """The gap in sentences, for every number of workers."""
    lines = []
    alone_s = row_of(result, ALONE, 1)["step_s"]
    for row in (row for row in result["rows"] if row["name"] == TOGETHER):
        count, parts = row["workers"], gap(result, row["workers"])
        told = ", ".join(
            f"{name} {1000 * seconds:+.0f} ms ({seconds / alone_s:+.1%})" for name, seconds in parts.items()
        )
        socket_rate = result["loopback_bytes_per_s"]
        passed = 2 * (count - 1) / count * result["gradient_bytes"]
        rate = passed / row["exchange_s"]
        lines.append(
            f"{count} workers take {1000 * (row['step_s'] - alone_s):+.0f} ms a step more than one: {told}. "
            f"{passed / 1e6:.1f} MB pass each way at {rate / 1e9:.2f} GB/s, {rate / socket_rate:.0%} "
            f"of a plain socket of this host ({socket_rate / 1e9:.1f} GB/s); a message alone takes "
            f"{1e6 * row['message_s']:.0f} us."
        )
    return lines


def scaling_lines(records: Sequence[Dict[str, Any]]) -> List[str]:
    """Markdown of the newest records: a table each, the gap, and how far the estimator is off."""
    lines: List[str] = []
    found = newest(records)
    for record in found:
        lines += [f"{title_of(record)}:", "", f"| {' | '.join(COLUMNS)} |", "|---|" + "---|" * (len(COLUMNS) - 1)]
        lines += ["| " + " | ".join(cells_of(record, row)) + " |" for row in record["rows"]]
        lines += ["", *gap_lines(record), ""]
    errors = predicted_errors(found)
    flatters = "" if len(found) > 1 else " from constants of the same record, which flatters"
    told = ", ".join(f"{error:+.1%}" for error in errors)
    return [*lines, f"The estimator's steps of several workers are off by {told}{flatters}."]


def title_of(result: Dict[str, Any]) -> str:
    unet = result["unet"]
    shape = " x ".join(map(str, result["shape"]))
    return (
        f"{shape} x {unet['channels']}, {unet['filters']} filters, {_volumes(result['batch'])} a worker, "
        f"{unet['dtype']}, policy {unet['policy']}, {result['engine_name']}, {result['host']['cpu']}"
    )


def name_of(row: Dict[str, Any]) -> str:
    """A row's name in words."""
    count = row["workers"]
    return {
        ALONE: "1 worker",
        TOGETHER: f"{count} workers",
        APART: f"{count} side by side, no exchange",
        WIDE: f"1 worker on the cores of {count}",
    }[row["name"]]


# --- Private helpers ---


def _volumes(number: int) -> str:
    return f"{number} volume" if number == 1 else f"{number} volumes"

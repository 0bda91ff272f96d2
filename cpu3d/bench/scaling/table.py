"""The record of `bench scaling` in words: a table for the terminal, the gap explained, and both as Markdown."""

from typing import Any, Dict, List, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from memory_estimator.scaling.costs import ALONE, APART, IN_PARTS, TOGETHER, WIDE, row_of
from memory_estimator.scaling.model import predicted_errors
from memory_estimator.units import GIB

COLUMNS = ("", "cores", "s a step", "volumes/s", "efficiency", "peak, GiB")


def scaling_table(result: Mapping[str, Any]) -> Table:
    """For the terminal."""
    table = Table(title=title_of(result), title_justify="left", box=SIMPLE_HEAD)
    for name in COLUMNS:
        table.add_column(name, justify="right" if name else "left")
    for row in result["rows"]:
        table.add_row(*cells_of(result, row))
    return table


def cells_of(result: Mapping[str, Any], row: Mapping[str, Any]) -> List[str]:
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


def gap(result: Mapping[str, Any], workers: int) -> Dict[str, float]:
    """Where the seconds go that a step of several takes more than one of one; they add up to that.

    "in parts": one worker that adds its gradients up and updates its weights apart. "contention": as many such workers
    side by side, without exchange, against one. "waiting": for the slower, at each step. "all-reduce": the exchange
    itself. "packing": gradients into one vector and out of it. "rest": what the rounds differ by.
    """
    alone, in_parts = row_of(result, ALONE, 1), row_of(result, IN_PARTS, 1)
    together, apart = row_of(result, TOGETHER, workers), row_of(result, APART, workers)
    return {
        "in parts": in_parts["compute_s"] - alone["step_s"],
        "contention": apart["compute_s"] - in_parts["compute_s"],
        "waiting": together["wait_s"],
        "all-reduce": together["exchange_s"],
        "packing": together["packing_s"],
        "rest": together["compute_s"] - apart["compute_s"],
    }


def gap_lines(result: Mapping[str, Any]) -> List[str]:
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
            f"of a plain socket of this host ({socket_rate / 1e9:.1f} GB/s). A sum takes {1e6 * row['call_s']:.0f} us "
            f"whatever its length and up to {1e6 * row['message_s']:.0f} us a message."
        )
    return lines


def scaling_lines(records: Sequence[Mapping[str, Any]]) -> List[str]:
    """Markdown of the records, one of each job: a table each, the gap, and how far the estimator is off."""
    lines: List[str] = []
    for record in records:
        lines += [f"{title_of(record)}:", "", f"| {' | '.join(COLUMNS)} |", "|---|" + "---|" * (len(COLUMNS) - 1)]
        lines += ["| " + " | ".join(cells_of(record, row)) + " |" for row in record["rows"]]
        lines += ["", *gap_lines(record), ""]
    errors = predicted_errors(records)
    flatters = "" if len(records) > 1 else " from constants of the same record, which flatters"
    told = ", ".join(f"{error:+.1%}" for error in errors)
    return [*lines, f"The estimator's steps of several workers are off by {told}{flatters}."]


def title_of(result: Mapping[str, Any]) -> str:
    unet = result["unet"]
    shape = " x ".join(map(str, result["shape"]))
    return (
        f"{shape} x {unet['channels']}, {unet['filters']} filters, {_volumes(result['batch'])} a worker, "
        f"{unet['dtype']}, policy {unet['policy']}, {result['engine_name']}, {result['host']['cpu']}"
    )


def name_of(row: Mapping[str, Any]) -> str:
    """A row's name in words."""
    count = row["workers"]
    return {
        ALONE: "1 worker",
        IN_PARTS: "1 worker, its update apart",
        TOGETHER: f"{count} workers",
        APART: f"{count} side by side, no exchange",
        WIDE: f"1 worker on the cores of {count}",
    }[row["name"]]


# --- Private helpers ---


def _volumes(number: int) -> str:
    return f"{number} volume" if number == 1 else f"{number} volumes"

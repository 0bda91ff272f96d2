"""The rows of `bench windows` in words: for the terminal, and the cells that its Markdown has too."""

import statistics
from typing import Any, Dict, List

from rich.box import SIMPLE_HEAD
from rich.table import Table

from memory_estimator.units import GIB

ONE_PASS = "one pass"
"""The way that all others are measured against."""


def windows_table(result: Dict[str, Any]) -> Table:
    """For the terminal."""
    table = Table(title=title_of(result), title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    table.collapse_padding = True  # within 80 columns
    notes = [f"{row['name']}: {row['error']}" for row in result["rows"] if row["error"]]
    off_by = f"off by: mean difference of the probabilities from {ONE_PASS}, over the brain"
    table.caption = "\n".join([result["engine_name"], off_by, *notes])
    table.add_column("", min_width=15)
    for column in ("\ns a case", f"against\n{ONE_PASS}", "peak,\nGiB", "\nDice"):
        table.add_column(column, justify="right")
    for column in ("\noff by", "at a\nborder", "labels\nchanged"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in result["rows"]:
        name, *cells, everywhere, border, changed = cells_of(row)
        table.add_row(
            name.replace(", ", "\n"), *cells, everywhere.partition(" (")[0], border.partition(" (")[0], changed
        )
    return table


def cells_of(row: Dict[str, Any]) -> List[str]:
    """A row in words: name, seconds a case, ratio, process peak, mean Dice, difference in all and at borders, labels
    changed."""
    if row["error"]:
        return [row["name"], "died", *["-"] * 6]
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    cells = [row["name"], f"{row['seconds']:.2f}{_range(row)}", ratio, f"{row['process_peak_bytes'] / GIB:.2f}"]
    cells.append("-" if row["dice"] is None else f"{statistics.fmean(row['dice'].values()):.3f}")
    difference = row["difference"]
    if difference is None:
        return [*cells, "-", "-", "-"]
    border = next((one for one in difference["by_distance"] if one["distance"] == 0), None)
    return [
        *cells,
        mean_and_p99(difference),
        mean_and_p99(border) if border else "none",
        f"{difference['changed_share']:.2%}",
    ]


def mean_and_p99(difference: Dict[str, Any]) -> str:
    """Such as "0.0021 (0.035)"."""
    return f"{difference['mean']:.2g} ({difference['p99']:.2g})"


def device_of(result: Dict[str, Any]) -> str:
    """The device of a record; those from before there was a choice are of the CPU."""
    return result.get("device", "cpu")


def title_of(result: Dict[str, Any]) -> str:
    unet, grid, count = result["unet"], " x ".join(map(str, result["grid"])), len(result["cases"])
    trained = f"patches of {grid}" if result["mode"] == "patch" else f"whole volumes, {grid}"
    return (
        f"{count} case{'s' * (count != 1)} of {result['name']}, a network trained on {trained}: "
        f"{unet['depth']} levels, {unet['filters']} filters, {unet['dtype']}"
        f"{'' if device_of(result) == 'cpu' else f', on {device_of(result)}'}"
    )


# --- Private helpers ---


def _range(row: Dict[str, Any]) -> str:
    """ " (least to most)", where there was more than one round."""
    low, high = row["seconds_min"], row["seconds_max"]
    return f" ({low:.2f} to {high:.2f})" if high > low else ""

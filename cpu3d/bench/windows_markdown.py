"""The records of `bench windows` as Markdown: what each way takes, and the difference by distance to a tile border."""

import json
from typing import Any, Dict, List, Sequence

from cpu3d.bench.record import newest as newest_of
from cpu3d.bench.windows_table import ONE_PASS, cells_of, device_of, mean_and_p99, title_of

DISTANCES = (0, 1, 2, 4, 8, 16, 32, 64)
"""Voxels to a border that get a line."""


def newest(records: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """The last record of every network, set of cases, CPU and device."""

    def key(record: Dict[str, Any]) -> str:
        own = [record[name] for name in ("name", "cases", "mode", "grid", "unet")]
        return json.dumps([*own, record["host"]["cpu"], device_of(record)])

    return newest_of(records, key)


def windows_lines(record: Dict[str, Any]) -> List[str]:
    """The lines of one record's two tables."""
    host, rows = record["host"], record["rows"]
    regions = next((list(row["dice"]) for row in rows if row["dice"]), [])
    lines = [
        f"{title_of(record)}; {record['engine_name']}, {host['cores']} cores of {host['cpu']}, median of "
        f"{record['rounds']} round{'s' * (record['rounds'] != 1)} in turn (least to most). The difference is that of "
        f"the probabilities from {ONE_PASS}, over the brain: mean (99th percentile).",
        "",
        f"| | windows | s a case | against {ONE_PASS} | process peak, GiB | Dice {', '.join(regions)} | difference | "
        "at a border | labels changed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name, seconds, ratio, peak, _, *differences = cells_of(row)
        windows = "-" if row["tiles"] is None else f"{row['tiles']:g}"
        dice = ", ".join(f"{value:.3f}" for value in row["dice"].values()) if row["dice"] else "-"
        lines.append("| " + " | ".join([name, windows, seconds, ratio, peak, dice, *differences]) + " |")
    lines += [f"\n{row['name']}: {row['error']}." for row in rows if row["error"]]
    return lines + _by_distance([row for row in rows if row["difference"]])


# --- Private helpers ---


def _by_distance(rows: Sequence[Dict[str, Any]]) -> List[str]:
    """Only the distances that some way has; nothing where no way has a border inside a volume."""
    found = [{one["distance"]: one for one in row["difference"]["by_distance"]} for row in rows]
    # Without a border all is one distance, that of no border at all.
    found = [places if 0 in places else {} for places in found]
    there = [distance for distance in DISTANCES if any(distance in places for places in found)]
    if not there:
        return []
    lines = [
        "",
        "| voxels to a border | " + " | ".join(row["name"] for row in rows) + " |",
        "|---|" + "---|" * len(rows),
    ]
    for distance in there:
        cells = [mean_and_p99(places[distance]) if distance in places else "-" for places in found]
        lines.append(f"| {distance} | " + " | ".join(cells) + " |")
    return lines

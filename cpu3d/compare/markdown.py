"""Comparisons as Markdown, from their records: a few lines for the README, everything for docs/compare.md."""

from typing import Any, Dict, List, Optional, Sequence

from cpu3d.compare.statistics import Difference
from cpu3d.compare.tables import cases, in_words, spread
from cpu3d.compare.verdict import NAMES
from memory_estimator.units import GIB

MARK = "<!-- from here on made by `bench tables` -->"
"""In docs/compare.md: what follows is made from the records."""


def newest(records: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """The last record of each title, in the order of their first ones."""
    return list({record["title"]: record for record in records}.values())


def summary_lines(records: Sequence[Dict[str, Any]]) -> List[str]:
    """A line for each region of each variant beside its baseline, then one for what each variant took."""
    lines = ["| | | against | Dice | difference (95 %) | HD95, mm, difference |", "|---|---|---|---|---|---|"]
    for record in newest(records):
        for variant, of_regions in record["differences"].items():
            for region, of_metrics in of_regions.items():
                own, other = (
                    spread(*record["variants"][name]["scores"][region]["dice"].values(), "dice")
                    for name in (variant, record["baseline"])
                )
                dice, hd95 = (in_words(_difference(of_metrics[metric]), metric) for metric in ("dice", "hd95_mm"))
                names = (f"{variant}, {region}", f"{record['baseline']} {other}")
                lines.append(f"| {record['title']} | {names[0]} | {names[1]} | {own} | {dice} | {hd95} |")
    lines += [
        "",
        "| | | s a case trained | s in all | GiB, training | s a case predicted | GiB, prediction |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in newest(records):
        for variant, found in record["variants"].items():
            costs = found["costs"]
            cells = (
                *(_number(costs[name]) for name in ("case_train_s", "train_s")),
                _number(costs["train_peak_bytes"], GIB),
                _number(costs["case_predict_s"]),
                _number(costs["predict_peak_bytes"], GIB),
            )
            lines.append(f"| {record['title']} | {variant} | {' | '.join(cells)} |")
    return lines


def page_lines(records: Sequence[Dict[str, Any]]) -> List[str]:
    """Everything that the newest record of each comparison holds, losing variants too."""
    lines: List[str] = []
    for record in newest(records):
        host, data = record["host"], record["data"]
        count = ", ".join(f"{number} {name}" for name, number in data["split"].items())
        lines += [
            f"### {record['title']}",
            "",
            f"{record['date']}, {host['cores']} cores of {host['cpu']}; {data['name']}, "
            f"{' x '.join(map(str, data['shape']))}: {count}; {record['budget']}; seeds "
            f"{', '.join(map(str, record['seeds']))}; scored on {record['cases']} cases of "
            f'"{record["evaluation"]["split"]}".',
            "",
            *[f"- `{name}`: `{options}`" for name, options in record["options"].items()],
            "",
            *[f"- {line}" for line in record["reading"]],
            "",
            f"| region | variant | {' | '.join(NAMES.values())} |",
            "|---|---|---|---|---|",
        ]
        for region in record["regions"]:
            for variant, found in record["variants"].items():
                scores = [spread(*found["scores"][region][metric].values(), metric) for metric in NAMES]
                lines.append(f"| {region} | {variant} | {' | '.join(scores)} |")
        if record["differences"]:
            lines += [
                "",
                f"Differences to {record['baseline']}, 95 % intervals, cases better / worse / equal:",
                "",
                f"| region | variant | {' | | '.join(NAMES.values())} | |",
                "|---|---|---|---|---|---|---|---|",
            ]
        for variant, of_regions in record["differences"].items():
            for region, of_metrics in of_regions.items():
                found = [(_difference(of_metrics[metric]), metric) for metric in NAMES]
                cells = [cell for one, metric in found for cell in (in_words(one, metric), cases(one))]
                lines.append(f"| {region} | {variant} | {' | '.join(cells)} |")
        lines += [
            "",
            "| variant | steps | million voxels | s a step | s a case trained | s in all | core-hours | GiB, training "
            "| s a case predicted | GiB, prediction |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for variant, found in record["variants"].items():
            costs = found["costs"]
            cells = (
                f"{costs['steps']:,.0f}",
                f"{costs['voxels'] / 1e6:,.{0 if costs['voxels'] >= 1e8 else 1}f}",
                *(_number(costs[name]) for name in ("step_s", "case_train_s", "train_s", "core_hours")),
                _number(costs["train_peak_bytes"], GIB),
                _number(costs["case_predict_s"]),
                _number(costs["predict_peak_bytes"], GIB),
            )
            lines.append(f"| {variant} | {' | '.join(cells)} |")
        lines.append("")
    return lines


# --- Private helpers ---


def _difference(content: Dict[str, Any]) -> Difference:
    interval = content["interval"]
    return Difference(**{**content, "interval": tuple(interval) if interval else None})


def _number(value: Optional[float], unit: float = 1) -> str:
    return "-" if value is None else f"{value / unit:.3g}" if value / unit < 100 else f"{value / unit:.0f}"

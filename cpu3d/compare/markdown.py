"""Comparisons as Markdown, from their records: a few lines for the README, everything for docs/compare.md."""

from typing import Any, Dict, List, Optional, Sequence, Tuple

from cpu3d.compare.statistics import difference_from_json
from cpu3d.compare.tables import COSTS, DIFFERENCES, cases, in_words, scores_caption, spread
from cpu3d.compare.verdict import NAMES
from cpu3d.data.words import by
from cpu3d.util.records import newest
from cpu3d.util.words import listed, markdown_table, number
from memory_estimator.units import GIB

MARK = "<!-- from here on made by `bench tables` -->"
"""In docs/compare.md: what follows is made from the records."""

Record = Dict[str, Any]

_COLUMNS: Tuple[Tuple[str, str, float], ...] = (
    ("million voxels", "voxels", 1e6),
    ("s a step", "step_s", 1),
    ("s a case trained", "case_train_s", 1),
    ("s in all", "train_s", 1),
    ("core-hours", "core_hours", 1),
    ("GiB, training", "train_peak_bytes", GIB),
    ("GiB of the card", "card_peak_bytes", GIB),
    ("s a case predicted", "case_predict_s", 1),
    ("GiB, prediction", "predict_peak_bytes", GIB),
)
"""Of the tables of costs: name, cost and unit. What no run of a record knows has no column."""

_SHORT = ("s a case trained", "s in all", "GiB, training", "GiB of the card", "s a case predicted", "GiB, prediction")
"""Those of the README."""


def title_of(record: Record) -> str:
    """What tells a comparison or a study from others: the newest record of a title counts."""
    return record["title"]


def summary_lines(records: Sequence[Record]) -> List[str]:
    """A line for each region of each variant beside its baseline, then one for what each variant took."""
    rows = []
    for record in newest(records, title_of):
        for variant, of_regions in record["differences"].items():
            for region, of_metrics in of_regions.items():
                own, other = (
                    spread(*record["variants"][name]["scores"][region]["dice"].values(), "dice")
                    for name in (variant, record["baseline"])
                )
                rows.append(
                    [record["title"], f"{variant}, {region}", f"{record['baseline']} {other}", own]
                    + [_difference(of_metrics, metric) for metric in ("dice", "hd95_mm")]
                )
    header = ["", "", "against", "Dice", "difference (95 %)", "HD95, mm, difference"]
    lines = [*markdown_table(header, rows), "", "Bold: counts as a difference, with few seeds too.", ""]
    found = [
        (record["title"], variant, one["costs"])
        for record in newest(records, title_of)
        for variant, one in record["variants"].items()
    ]
    columns = _known([costs for _, _, costs in found], _SHORT)
    return lines + markdown_table(
        ["", "", *(name for name, _, _ in columns)],
        [[title, variant, *_cells(costs, columns)] for title, variant, costs in found],
    )


def page_lines(records: Sequence[Record]) -> List[str]:
    """Everything that the newest record of each comparison holds, losing variants too."""
    lines: List[str] = []
    for record in newest(records, title_of):
        found = record["variants"]
        lines += [
            *_about(record),
            "",
            *[f"- `{name}`: `{options}`" for name, options in record["options"].items()],
            "",
            *[f"- {line}" for line in record["reading"]],
            "",
            scores_caption(record["evaluation"]["tolerance_mm"]),
            "",
            *markdown_table(
                ["region", "variant", *NAMES.values()],
                [
                    [region, variant, *(spread(*one["scores"][region][metric].values(), metric) for metric in NAMES)]
                    for region in record["regions"]
                    for variant, one in found.items()
                ],
            ),
            "",
        ]
        if record["differences"]:
            lines += [
                f"Differences to {record['baseline']}. {DIFFERENCES}",
                "",
                *markdown_table(
                    ["region", "variant", *(cell for name in NAMES.values() for cell in (name, ""))],
                    [
                        [region, variant, *(cell for metric in NAMES for cell in _with_cases(of_metrics, metric))]
                        for variant, of_regions in record["differences"].items()
                        for region, of_metrics in of_regions.items()
                    ],
                ),
                "",
            ]
        columns = _known([one["costs"] for one in found.values()], [name for name, _, _ in _COLUMNS])
        lines += [
            COSTS,
            "",
            *markdown_table(
                ["variant", "steps", *(name for name, _, _ in columns)],
                [
                    [variant, f"{one['costs']['steps']:,.0f}", *_cells(one["costs"], columns)]
                    for variant, one in found.items()
                ],
            ),
            "",
        ]
        if record.get("limits"):
            lines += [
                "What favours a side, and what this cannot say:",
                "",
                *(f"- {line}" for line in record["limits"]),
                "",
            ]
    return lines


# --- Private helpers ---


def _about(record: Record) -> List[str]:
    host, data = record["host"], record["data"]
    split = ", ".join(f"{count} {name}" for name, count in data["split"].items())
    return [
        f"### {record['title']}",
        "",
        f"{record['date']}, {host['cores']} cores of {host['cpu']}; {data['name']}, {by(data['shape'], ' x ')}: "
        f"{split}; {record['budget']}; seeds {listed(record['seeds'])}; scored on {record['cases']} cases of "
        f'"{record["evaluation"]["split"]}".',
    ]


def _difference(of_metrics: Dict[str, Any], metric: str) -> str:
    """With its interval, bold where it counts."""
    one = difference_from_json(of_metrics[metric])
    return f"**{in_words(one, metric)}**" if one.is_clear else in_words(one, metric)


def _with_cases(of_metrics: Dict[str, Any], metric: str) -> Tuple[str, str]:
    return _difference(of_metrics, metric), cases(difference_from_json(of_metrics[metric]))


def _known(costs: Sequence[Dict[str, Optional[float]]], names: Sequence[str]) -> List[Tuple[str, str, float]]:
    """The columns of these names that some of the costs know."""
    return [
        column for column in _COLUMNS if column[0] in names and any(one.get(column[1]) is not None for one in costs)
    ]


def _cells(costs: Dict[str, Optional[float]], columns: Sequence[Tuple[str, str, float]]) -> List[str]:
    return [number(costs.get(name), unit) for _, name, unit in columns]

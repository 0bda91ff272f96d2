"""The rows of `bench data` as Markdown, from their records: the targets for the README, every line for docs/data.md."""

from typing import Any, Dict, List, Sequence

from cpu3d.bench.data.tables import amount

NAMES = {
    "s4": "a case",
    "s0": "a patch",
    "spleen": "training on patches",
    "ladder": "S1's ladder",
    "volumes": "training on whole volumes",
    "many": "a large store",
    "augment": "augmentation",
    "monai": "MONAI",
}
"""Row -> what it is about, in the order of the page."""

MARK = "<!-- from here on made by `bench tables` -->"
"""In docs/data.md: what follows is made from the records."""


def newest(records: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """The last record of each row at full size, in the order of `NAMES`."""
    last = {record["row"]: record for record in records}
    return [last[row] for row in NAMES if row in last]


def targets_lines(records: Sequence[Dict[str, Any]]) -> List[str]:
    """What was asked for and what was found, a line a target."""
    lines = ["| | | found | asked for |", "|---|---|---|---|"]
    for record in newest(records):
        for target in record["targets"]:
            found, bound = (f"{value:.3g} {target['unit']}" for value in (target["value"], target["bound"]))
            rule = "at least" if target["rule"] == ">=" else "at most"
            missed = "" if target["met"] else " (**missed**)"
            lines.append(f"| {NAMES[record['row']]} | {target['name']} | {found}{missed} | {rule} {bound} |")
    return lines


def page_lines(records: Sequence[Dict[str, Any]]) -> List[str]:
    """Every line of every row, losing ones too."""
    lines: List[str] = []
    for record in newest(records):
        host = record["host"]
        lines += [
            f"### {record['title']}",
            "",
            f"{record['date']}, {host['cores']} cores of {host['cpu']}, {record['file_system']}, median of "
            f"{record['rounds']} rounds in turn (least to most); case: {record['case']}.",
            "",
            "| | pages | median | | |",
            "|---|---|---|---|---|",
        ]
        for line in record["lines"]:
            spread = f"{amount(line['min'], line['unit'])} to {amount(line['max'], line['unit'])}"
            cells = (line["name"], line["state"], amount(line["median"], line["unit"]), spread, line["note"])
            lines.append("| " + " | ".join(cells) + " |")
        lines += ["", *[f"{note}" for note in record["notes"]], *([""] if record["notes"] else [])]
    return lines

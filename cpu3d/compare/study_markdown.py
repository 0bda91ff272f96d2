"""A resolution study's record as Markdown, for README and docs."""

from typing import Any, Dict, List

from cpu3d.compare.study import from_json
from cpu3d.compare.study_tables import best_rows, cost_table, score_table
from cpu3d.compare.study_verdict import sentences


def study_lines(record: Dict[str, Any]) -> List[str]:
    """The tables, best rows bold, and the verdict below them, from one line of `compare --resolutions --record`."""
    study = from_json(record)
    about = study.about
    host = about["host"]
    lines = [
        f"### {about['title']}",
        "",
        f"{record.get('date', '')}, {about['data']}: {about['cases']['train']} cases to train on, "
        f"{about['cases'][about['split']]} to test, {about['epochs']:g} epochs, {len(study.seeds)} seeds; "
        f"{about['network']}; {host['cores']} cores of {host['cpu']}.".lstrip(", "),
    ]
    for header, rows in (score_table(study), cost_table(study)):
        lines += ["", *_table(header, rows, best_rows(study))]
    return [*lines, "", *(f"- {line}" for line in sentences(study))]


# --- Private helpers ---


def _table(header: List[str], rows: List[List[str]], bold: List[int]) -> List[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for number, cells in enumerate(rows):
        shown = [f"**{cell}**" for cell in cells] if number in bold else cells
        lines.append("| " + " | ".join(shown) + " |")
    return lines

"""A resolution study's record as Markdown, for README and docs."""

from typing import Any, Dict, List

from cpu3d.compare.study.result import from_json
from cpu3d.compare.study.tables import COSTS, SCORES, best_rows, cost_table, score_table
from cpu3d.compare.study.verdict import limits, sentences
from cpu3d.data.words import count
from cpu3d.util.words import markdown_table


def study_lines(record: Dict[str, Any]) -> List[str]:
    """Verdict, tables with the best rows bold, and limits, of one line of `compare --resolutions --record`."""
    study = from_json(record)
    about = study.about
    host = about["host"]
    lines = [
        f"### {about['title']}",
        "",
        f"{record.get('date', '')}, {about['data']}: {count(about['cases']['train'], 'case')} to train on, "
        f"{about['cases'][about['split']]} to score, {about['epochs']:g} epochs, {count(study.seeds, 'seed')}; "
        f"{about['network']}; {host['cores']} cores of {host['cpu']}.".lstrip(", "),
        "",
        *(f"- {line}" for line in sentences(study)),
    ]
    for caption, (header, rows) in ((SCORES, score_table(study)), (COSTS, cost_table(study))):
        lines += ["", caption, "", *markdown_table(header, rows, best_rows(study))]
    return [*lines, "", "What this cannot say:", "", *(f"- {line}" for line in limits(study))]

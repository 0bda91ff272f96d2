"""One self-contained page of a resolution study: verdict, table, the curves, the search, and how it was done."""

from pathlib import Path

from cpu3d.compare.study.picture import draw_regions, draw_scores, draw_search
from cpu3d.compare.study.result import Study
from cpu3d.compare.study.tables import COSTS, SCORES, best_rows, cost_table, score_table, search_rows
from cpu3d.compare.study.verdict import limits, sentences
from cpu3d.report.page import render_page

TEMPLATE = Path(__file__).with_name("page.html.j2")


def render_study(study: Study) -> str:
    """The page as HTML: no script, no network, pictures inside."""
    searched = search_rows(study)
    return render_page(
        TEMPLATE,
        study=study,
        about=study.about,
        verdict=sentences(study),
        limits=limits(study),
        tables=((SCORES, *score_table(study)), (COSTS, *cost_table(study))),
        best=best_rows(study),
        scores=draw_scores(study),
        regions=draw_regions(study) if len(study.regions) > 1 else None,
        search=draw_search(study) if searched else None,
        searched=searched,
    )

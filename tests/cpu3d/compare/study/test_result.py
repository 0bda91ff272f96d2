"""What a study holds, and what its tables, pages and Markdown say of it."""

import json
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from cpu3d.compare.study.learning_rates import Trial
from cpu3d.compare.study.markdown import study_lines
from cpu3d.compare.study.page import render_study
from cpu3d.compare.study.picture import draw_search
from cpu3d.compare.study.result import from_json, to_json
from cpu3d.compare.study.tables import COSTS, SCORES, best_rows, cost_table, print_study, score_table, search_rows
from tests.cpu3d.compare.study.studies import arm, study

PNG = b"\x89PNG"


@pytest.fixture
def four():
    """Two resolutions at two batches."""
    return study(
        arm(0.5, (0.70, 0.72), regions=("WT", "ET")),
        arm(1.0, (0.80, 0.82), regions=("WT", "ET"), train_s=700.0),
        arm(0.5, (0.60, 0.62), batch=4, regions=("WT", "ET")),
        arm(1.0, (0.50, 0.52), batch=4, regions=("WT", "ET"), trials=(Trial(0.002, 0.3), Trial(0.004, None))),
    )


def test_a_study_goes_to_json_and_back(four):
    content = json.loads(json.dumps(to_json(four)))
    assert from_json(content) == four
    assert from_json({**content, "schema": 1, "date": "2025-01-01"}) == four  # a record has more around it
    for old in content["arms"]:
        del old["diverged"]
    assert from_json(content) == four, "a record from before a rate could diverge in full length"


def test_dice_of_an_arm_is_the_mean_over_cases_and_then_over_seeds(four):
    """Cases a to d are 0.015 below their first on average."""
    assert four.arms[0].over_seeds() == pytest.approx([0.685, 0.705])
    assert four.arms[0].dice == pytest.approx(0.695)
    assert four.arms[0].runs[0].by_case() == pytest.approx([0.70, 0.69, 0.68, 0.67])
    assert four.arms[0].median("step_s") == 1.0


def test_the_tables_have_a_row_an_arm_by_batch_and_resolution(four):
    header, rows = score_table(four)
    assert header == ["resolution", "batch", "rate", "mean Dice", "WT Dice", "ET Dice", "WT HD95, mm", "ET HD95, mm"]
    assert [row[:2] for row in rows] == [["0.5", "1"], ["1", "1"], ["0.5", "4"], ["1", "4"]]
    assert rows[0][3:7] == ["0.695 ± 0.014"] * 3 + ["2.9 ± 0.1"]
    header, rows = cost_table(four)
    assert dict(zip(header, rows[1])) == {
        "resolution": "1",
        "batch": "1",
        "grid": "48 \u00d7 48 \u00d7 48",
        "steps": "240",
        "s a step": "1",
        "training": "0:11:40",
        "peak memory": "1.00 GiB",
        "s to predict a case": "0.1",
    }
    assert best_rows(four) == [1, 2]


def test_one_region_has_no_column_for_the_mean():
    header, rows = score_table(study(arm(1.0, (0.8,))))
    assert header == ["resolution", "batch", "rate", "WT Dice", "WT HD95, mm"]
    assert rows == [["1", "1", "0.002", "0.785", "2.0"]]


def test_the_search_names_every_trial_and_its_winner(four):
    assert search_rows(four)[-1][1] == [("0.002", "0.3000", True), ("0.004", "diverged", False)]


def test_the_terminal_shows_scores_costs_and_the_verdict(four):
    console = Console(width=120, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    print_study(four, console)
    text = console.export_text()
    console.file.close()
    assert "0.695 ± 0.014" in text
    assert "0:11:40" in text
    assert "Dice rises to resolution 1" in text


def test_markdown_has_both_tables_and_the_verdict(four):
    lines = study_lines({"date": "2025-03-01", **to_json(four)})
    assert lines[0] == "### Made up"
    assert lines[2].startswith("2025-03-01, made up: 20 cases to train on, 4 to score, 12 epochs, 2 seeds")
    assert SCORES in lines
    assert COSTS in lines
    assert (
        "- One data set, one network, one length of training: the order may differ with more of any of them." in lines
    )
    tables = [line for line in lines if line.startswith("|")]
    assert len(tables) == 2 * (2 + 4)
    assert {line.count("|") for line in tables[:6]} == {9}
    assert sum(line.startswith("| **") for line in tables) == 4
    assert any(line.startswith("- Batch 1: Dice rises to") for line in lines)


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def tags(page):
    parser = Tags()
    parser.feed(page)
    assert parser.open == []
    return parser.seen


def test_the_page_is_whole_and_asks_for_nothing(four):
    page = render_study(four)
    assert "<h2>Limits</h2>" in page
    assert "2.7 times narrower" in page
    seen = tags(page)
    pictures = [attributes for tag, attributes in seen if tag == "img"]
    assert len(pictures) == 3
    assert all(picture["src"].startswith("data:image/png;base64,") and picture["alt"] for picture in pictures)
    assert not {tag for tag, _ in seen} & {"script", "link", "iframe"}
    assert not re.search(r"https?://", page)
    assert page.count('class="best"') == 4
    assert "square root of the batch" in page
    assert "NOT untouched" not in page


def test_the_page_of_one_arm_without_a_search_has_no_place_for_one():
    page = render_study(study(arm(1.0, (0.8,), trials=()), split="val"))
    assert sum(tag == "img" for tag, _ in tags(page)) == 1
    assert "search for the learning rate" not in page
    assert "NOT untouched" in page


def test_names_on_the_page_are_text():
    assert "<b>evil</b>" not in render_study(study(arm(1.0, (0.8,)), data="<b>evil</b>"))


def test_a_search_whose_rates_diverged_can_be_drawn(four):
    assert draw_search(four).startswith(PNG)

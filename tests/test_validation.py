"""The published validation is what the record and the code as it stands give."""

import json
from pathlib import Path

import pytest

from cpu3d.bench.tables import VALIDATION, validation
from cpu3d.bench.validation_page import page
from memory_estimator.accuracy import SHIPPED
from memory_estimator.digest import digest, to_json

ROOT = Path(__file__).resolve().parents[1]
RECORD = f"records/{VALIDATION}"
REMAKE_ACCURACY = f"run python -m memory_estimator.digest {RECORD} --out memory_estimator/accuracy.json"
REMAKE_PAGE = "run ./run.sh bench tables --records records --page docs/validation.md"


@pytest.fixture(scope="module")
def validated():
    if not (ROOT / "records" / VALIDATION).is_file():
        pytest.skip(f"needs records/{VALIDATION}, which `./run.sh bench validate` makes in 40 minutes")
    return validation(ROOT / "records")


def test_the_page_is_up_to_date(validated):
    there = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8").splitlines()
    assert there == page(*validated), REMAKE_PAGE


def test_what_the_estimator_says_of_its_errors_is_what_was_measured(validated):
    assert json.loads(SHIPPED.read_text(encoding="utf-8")) == to_json(digest(validated[1], RECORD)), REMAKE_ACCURACY


def test_no_measured_peak_is_above_its_upper_bound(validated):
    assert [row for row in validated[1] if row.slack < 0] == []

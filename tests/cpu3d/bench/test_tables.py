"""The pages that `bench tables` makes of records: of what is there, and of nothing else."""

import pytest

from cpu3d.bench.record import append_record, newest
from cpu3d.bench.tables import compare_page
from cpu3d.compare.study.result import to_json
from tests.cpu3d.compare.study.studies import arm, study

DIFFERENCE = {
    "mean": -0.2, "interval": [-0.3, -0.1], "seeds": 3, "cases": 16, "better": 0, "worse": 16, "equal": 0,
    "seed_bound": 0.1,
}  # fmt: skip
COSTS = {
    "steps": 400, "voxels": 9.8e7, "train_s": 70.0, "steps_s": 60.0, "step_s": 0.15, "validation_s": 5.0,
    "case_train_s": 0.15, "train_peak_bytes": 2**30, "allocator_peak_bytes": None, "core_hours": 0.04,
    "case_predict_s": 0.2, "predict_peak_bytes": 2**30,
}  # fmt: skip


def comparison(**difference):
    metrics = ("dice", "hd95_mm", "surface_dice")
    scores = {"ET": {metric: {"mean": 0.7, "sd": 0.01} for metric in metrics}}
    differences = {"ET": {metric: {**DIFFERENCE, **difference} for metric in metrics}}
    return {
        "title": "made up",
        "host": {"cpu": "made up", "cores": 2},
        "data": {"name": "phantoms", "split": {"train": 40, "val": 8, "test": 16}, "shape": [80, 106, 70]},
        "budget": "10 epochs each",
        "seeds": [0, 1, 2],
        "evaluation": {"split": "test", "tolerance_mm": 1.0},
        "options": {"whole": "--mode whole", "patch": "--mode patch"},
        "cases": 16,
        "regions": ["ET"],
        "baseline": "whole",
        "variants": {name: {"scores": scores, "costs": COSTS} for name in ("whole", "patch")},
        "differences": {"patch": differences},
        "reading": ["patch scores lower."],
        "limits": ["One data set."],
    }


def test_what_was_not_recorded_has_no_part(tmp_path):
    assert compare_page(tmp_path) == []
    found = to_json(study(arm(0.5, (0.7,)), arm(1.0, (0.8,))))
    append_record(tmp_path / "resolutions.jsonl", "resolutions", {"title": "one", **found})
    page = "\n".join(compare_page(tmp_path))
    assert page.startswith("## Resolution, effective batch and learning rate")
    assert "against patches" not in page


def test_a_comparison_is_told_with_captions_and_what_counts_is_bold(tmp_path):
    append_record(tmp_path / "compare.jsonl", "compare", comparison())
    page = "\n".join(compare_page(tmp_path))
    assert "\n- patch scores lower.\n" in page
    assert "80 x 106 x 70: 40 train, 8 val, 16 test; 10 epochs each; seeds 0, 1 and 2; scored on 16 cases" in page
    assert "HD95 in mm; surface Dice at 1 mm." in page
    assert "standard deviation of the seeds" in page
    assert "largest resident set of its process" in page
    assert "| ET | patch | **-0.200 (-0.300 to -0.100)** | 0 / 16 / 0 |" in page
    assert "| patch | 400 | 98 | 0.15 | 0.15 | 70 | 0.04 | 1 | 0.2 | 1 |" in page
    assert "What favours a side, and what this cannot say:\n\n- One data set." in page
    assert "GiB of the card" not in page, "no run knows it"


@pytest.mark.parametrize("bound", [0.3, None])
def test_what_seeds_alone_may_make_is_not_bold(tmp_path, bound):
    append_record(tmp_path / "compare.jsonl", "compare", comparison(seed_bound=bound))
    assert "| -0.200 (-0.300 to -0.100) |" in "\n".join(compare_page(tmp_path))


def test_a_record_from_before_there_was_a_bound_can_be_told(tmp_path):
    record = comparison()
    for one in record["differences"]["patch"]["ET"].values():
        del one["seed_bound"]
    del record["limits"]
    append_record(tmp_path / "compare.jsonl", "compare", record)
    assert "| -0.200 (-0.300 to -0.100) |" in "\n".join(compare_page(tmp_path))


def test_the_newest_of_a_key_counts_in_the_place_of_the_first():
    records = [{"title": "a", "n": 1}, {"title": "b", "n": 2}, {"title": "a", "n": 3}]
    assert [record["n"] for record in newest(records, lambda record: record["title"])] == [3, 2]

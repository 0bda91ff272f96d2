import dataclasses
import json
import time

import numpy as np
import pytest

from cpu3d.compare import statistics
from cpu3d.compare.run import Failed, PlannedRun
from cpu3d.compare.statistics import (
    MEAN,
    Point,
    bootstrap_mean,
    comparison_of,
    counts,
    paired_difference,
    seed_bound,
)
from cpu3d.errors import InputError

BASE = np.array(
    [[0.5, 0.25, 0.75], [0.5, 0.5, 0.25]]
)  # two seeds, three cases; sums are exact in binary


def test_a_constant_shift_is_that_difference_with_an_interval_of_no_width():
    result = paired_difference(BASE - 0.125, BASE)
    assert (result["mean"], result["interval"]) == (-0.125, (-0.125, -0.125))
    assert (result["better"], result["worse"], result["equal"]) == (0, 3, 0)
    assert (result["seeds"], result["cases"]) == (2, 3)
    assert counts(result)


def test_cases_are_judged_by_the_mean_over_their_seeds_and_shorter_distances_are_better():
    shift = np.array([[1.0, -1.0, 2.0], [-1.0, -1.0, 1.0]])
    larger, smaller = (
        paired_difference(BASE + shift, BASE, larger_is_better=way) for way in (True, False)
    )
    for result in (larger, smaller):
        assert (result["better"], result["worse"], result["equal"]) == (1, 1, 1)
    assert paired_difference(BASE + 1, BASE, larger_is_better=False)["worse"] == 3


def test_the_interval_of_two_cases_of_one_seed_holds_all_four_resamples():
    """Means of (0, 1): 0 and 1 a quarter of the time each, 1/2 else: 2.5 % and 97.5 % are the
    ends."""
    assert bootstrap_mean(np.array([[0.0, 1.0]])) == (0, 1)


def test_the_bound_of_the_seeds_is_students():
    """Differences 0.1, 0.2 and 0.3 have the deviation 0.1; t(0.975, 2) is 4.303."""
    assert seed_bound([0.1, 0.2, 0.3]) == pytest.approx(4.3027 * 0.1 / np.sqrt(3), rel=1e-4)
    assert seed_bound([0.1, 0.3]) == pytest.approx(12.706 * 0.1414214 / np.sqrt(2), rel=1e-4)
    assert seed_bound([0.1]) is None
    assert seed_bound([0.1, 0.1, 0.1]) == 0


def test_a_difference_that_seeds_alone_may_make_does_not_count():
    """Three seeds are all better, by 0.1, 0.2 and 0.6: the interval leaves out 0, but Student's t
    is 0.657."""
    differences = np.array([[0.1], [0.2], [0.6]]) + np.zeros((1, 4))
    result = paired_difference(differences, np.zeros((3, 4)))
    assert result["interval"][0] > 0
    assert result["mean"] == pytest.approx(0.3)
    assert result["seed_bound"] == pytest.approx(2.4841 * 0.264575, rel=1e-3)
    assert not counts(result)
    assert counts(paired_difference(differences + 1, np.zeros((3, 4))))


@pytest.fixture
def read_result(make_run, tiny_store):
    """read_result("off", 1, shift=1): a run that `make_run` makes, read."""

    def read(variant, seed=0, **settings):
        run = PlannedRun(variant, seed, make_run(variant, seed, **settings), ())
        return statistics.read_result(run, "test", tiny_store)

    return read


def test_the_first_variant_is_what_others_are_paired_with(read_result):
    shifts = {"whole": 0, "same": 0, "off": 1}
    results = [
        read_result(name, seed, shift=shift) for name, shift in shifts.items() for seed in (0, 1)
    ]
    result = comparison_of(results, "whole").to_json()
    same, off = result["differences"]["same"][MEAN]["dice"], result["differences"]["off"]["ET"]
    assert (result["baseline"], same["mean"], same["interval"], same["equal"]) == (
        "whole",
        0,
        (0, 0),
        2,
    )
    assert (off["dice"]["mean"], off["dice"]["interval"], off["dice"]["worse"]) == (-1, (-1, -1), 2)
    assert (off["hd95_mm"]["mean"], off["hd95_mm"]["worse"]) == (1, 2), "a voxel of 1 mm along X"
    assert result["variants"]["off"]["costs"]["train_peak_bytes"] == 3 * 2**30


def test_only_seeds_that_both_have_are_paired_and_failed_runs_are_named(read_result):
    def seeds(*results, failed=()):
        return comparison_of(results, "whole", failed).to_json()["differences"]["off"]["WT"][
            "dice"
        ]["seeds"]

    whole, more, off, least = (
        read_result(name, seed, shift=name == "off") for name in ("whole", "off") for seed in (0, 1)
    )
    lost = [Failed("off", 0, "train diverged"), Failed("whole", 1, "train diverged")]
    with pytest.raises(InputError, match="baseline whole must have a run"):
        comparison_of([off], "whole", lost)
    other = dataclasses.replace(off, scores={**off.scores, "WT": {"dice": {"e": 1}}})
    with pytest.raises(InputError, match="same cases as"):
        comparison_of([whole, other], "whole")
    assert (
        seeds(whole, more, off)
        == seeds(whole, off, least)
        == seeds(whole, more, least, failed=lost[:1])
        == 1
    )
    with pytest.raises(InputError, match=r"off must share a seed with whole, got \[1\] and \[0\]"):
        comparison_of([whole, least], "whole")
    result = comparison_of([whole, least], "whole", lost)
    assert list(result.runs) == ["whole"]
    assert result.failed == (*lost, Failed("off", 1, result.failed[2].why))
    assert "whole" in result.failed[2].why


# --- The result of a run ---


def test_costs_are_those_of_the_log(read_result):
    costs = read_result("patch", mode="patch", grid=(8, 8, 8), patches_per_case=8, batch=2).costs
    assert (costs["steps"], costs["voxels"]) == (4, 4 * 2 * 512)
    assert (costs["step_s"], costs["steps_s"]) == (1.5, 9 + 3 * 1.5)
    assert costs["case_train_s"] == 1.5 / (2 * 512) * 16**3
    assert (costs["train_s"], costs["validation_s"], costs["core_hours"]) == (
        36,
        1.0,
        36 * 2 / 3600,
    )
    assert (costs["train_peak_bytes"], costs["allocator_peak_bytes"]) == (3 * 2**30, None)
    assert costs["predict_peak_bytes"] > 0
    card = read_result("card", device="gpu:0", end={"allocator_peak_bytes": 5}).costs
    assert (card["card_peak_bytes"], card["allocator_peak_bytes"], card["core_hours"]) == (
        5,
        None,
        None,
    )
    assert card["case_train_s"] == 1.5


def test_the_curve_of_many_validations_is_found_in_one_pass(make_run, tiny_store):
    folder, lines = make_run("long"), []
    for step in range(1, 6001):
        lines.append({"event": "step", "step": step, "step_s": 0.5, "voxels": 2})
        lines.append({"event": "validation", "step": step, "mean_dice": 0.5, "seconds": 0.25})
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    begin = time.process_time()
    result = statistics.read_result(PlannedRun("long", 0, folder, ()), "test", tiny_store)
    assert time.process_time() - begin < 3, "a sum over all steps for each validation takes minutes"
    assert (result.curve[0], result.curve[-1]) == (Point(2, 0.5, 0.5), Point(12_000, 3000.0, 0.5))
    assert result.costs["validation_s"] == 1500


def test_the_curve_is_over_voxels_and_seconds_and_scores_are_by_case_with_the_mean_of_the_regions(
    read_result,
):
    result = read_result("off", shift=1)
    assert result.curve == [Point(2 * 16**3, 10.5, 0.7), Point(4 * 16**3, 13.5, 0.7)]
    assert list(result.scores) == ["WT", "TC", "ET", MEAN]
    for case in ("e", "f"):
        assert result.scores["ET"]["dice"][case] == 0, "a single voxel that is off by one"
        each = [result.scores[region]["dice"][case] for region in ("WT", "TC", "ET")]
        assert result.scores[MEAN]["dice"][case] == pytest.approx(sum(each) / 3)

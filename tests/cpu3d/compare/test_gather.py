import json

import pytest

from cpu3d.compare.comparison import compare, to_json
from cpu3d.compare.gather import MEAN, Point, read_run
from cpu3d.errors import InputError
from cpu3d.evaluate import scores_path

PATCH = {"mode": "patch", "grid": (8, 8, 8), "patches_per_case": 8, "batch": 2}


def test_costs_are_those_of_the_log(make_run):
    costs = read_run("patch", 0, make_run("patch", **PATCH), "test").costs
    assert (costs.steps, costs.voxels) == (4, 4 * 2 * 512)
    assert (costs.step_s, costs.steps_s) == (1.5, 9 + 3 * 1.5)
    assert costs.case_train_s == 1.5 / 2 * 8, "eight patches make up a case, two a step"
    assert (costs.train_s, costs.validation_s) == (36, 1.0)
    assert costs.core_hours == 36 * 2 / 3600
    assert costs.train_peak_bytes == 3 * 2**30
    assert costs.allocator_peak_bytes is None
    assert costs.predict_peak_bytes > 0


def test_the_curve_is_over_voxels_and_seconds_of_steps(make_run):
    found = read_run("whole", 0, make_run("whole"), "test")
    assert found.curve == (Point(2 * 16**3, 10.5, 0.7), Point(4 * 16**3, 13.5, 0.7))


def test_scores_are_by_case_and_the_mean_of_the_regions_is_among_them(make_run):
    scores = read_run("off", 0, make_run("off", shift=1), "test").scores
    assert list(scores) == ["WT", "TC", "ET", MEAN]
    for case in ("e", "f"):
        assert scores["ET"]["dice"][case] == 0, "a single voxel that is off by one"
        each = [scores[region]["dice"][case] for region in ("WT", "TC", "ET")]
        assert scores[MEAN]["dice"][case] == pytest.approx(sum(each) / 3)


def test_what_is_not_known_is_none(make_run):
    folder = make_run("whole", end="none")
    path = scores_path(folder)
    scores = json.loads(path.read_text())
    del scores["peak_rss_bytes"]
    path.write_text(json.dumps(scores))
    costs = read_run("whole", 0, folder, "test").costs
    assert (costs.train_s, costs.core_hours, costs.predict_peak_bytes) == (None, None, None)
    assert costs.train_peak_bytes == 2**30, "the log's steps say at least that"


def test_a_run_may_be_read_without_scores(make_run):
    found = read_run("whole", 0, make_run("whole", scored=False), None)
    assert (found.scores, found.costs.case_predict_s) == ({}, None)


def test_missing_and_damaged_scores_are_named(make_run):
    folder = make_run("whole", scored=False)
    with pytest.raises(InputError, match=r"scores\.json, found none; run `evaluate`"):
        read_run("whole", 0, folder, "test")
    scores_path(folder).parent.mkdir()
    scores_path(folder).write_text('{"cases": [{}], "regions": {"WT": []}}')
    with pytest.raises(InputError, match="must be complete"):
        read_run("whole", 0, folder, "test")


def results(make_run, **shifts):
    return [
        read_run(name, seed, make_run(name, seed, shift=shift), "test")
        for name, shift in shifts.items()
        for seed in (0, 1)
    ]


def test_runs_that_are_alike_do_not_differ(make_run):
    found = compare(results(make_run, whole=0, same=0))
    one = found.differences["same"][MEAN]["dice"]
    assert (found.baseline, one.mean, one.interval, one.equal) == ("whole", 0, (0, 0), 2)


def test_the_first_variant_is_what_others_are_paired_with(make_run):
    found = compare(results(make_run, whole=0, off=1))
    one = found.differences["off"]["ET"]
    assert (one["dice"].mean, one["dice"].interval, one["dice"].worse) == (-1, (-1, -1), 2)
    assert (one["hd95_mm"].mean, one["hd95_mm"].worse) == (1, 2), "a voxel of 1 mm along X"
    assert found.cost("off", "train_peak_bytes") == 3 * 2**30
    json.dumps(to_json(found), allow_nan=False)


def test_only_seeds_that_both_have_are_paired(make_run):
    runs = results(make_run, whole=0, off=1)
    assert compare(runs[:3]).differences["off"]["WT"]["dice"].seeds == 1
    assert compare([runs[0], *runs[2:]]).differences["off"]["WT"]["dice"].seeds == 1
    with pytest.raises(InputError, match=r"off must share a seed with whole, got \[1\] and \[0\]"):
        compare([runs[0], runs[3]])


def test_runs_that_were_scored_on_other_cases_are_refused(make_run):
    runs = results(make_run, whole=0)
    del runs[1].scores["WT"]["dice"]["f"]
    with pytest.raises(InputError, match="same cases as"):
        compare(runs)

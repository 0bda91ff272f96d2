import json

import pytest

from cpu3d.compare.comparison import compare, to_json
from cpu3d.compare.gather import MEAN, Point, read_run
from cpu3d.compare.planned import Failed
from cpu3d.data.extent import grid_size
from cpu3d.errors import InputError
from cpu3d.inference.evaluate import scores_path

PATCH = {"mode": "patch", "grid": (8, 8, 8), "patches_per_case": 8, "batch": 2}


def test_costs_are_those_of_the_log(make_run, tiny_store):
    costs = read_run("patch", 0, make_run("patch", **PATCH), "test", store=tiny_store).costs
    assert (costs.steps, costs.voxels) == (4, 4 * 2 * 512)
    assert (costs.step_s, costs.steps_s) == (1.5, 9 + 3 * 1.5)
    assert grid_size(tiny_store, extent="brain", multiple=16) == (16, 16, 16)
    assert costs.case_train_s == 1.5 / (2 * 512) * 16**3
    assert (costs.train_s, costs.validation_s) == (36, 1.0)
    assert costs.core_hours == 36 * 2 / 3600
    assert costs.train_peak_bytes == 3 * 2**30
    assert costs.allocator_peak_bytes is None
    assert costs.predict_peak_bytes > 0


@pytest.mark.parametrize("count", [1, 6, 8, 20])
def test_a_case_costs_what_its_voxels_do_however_many_patches_an_epoch_has(make_run, tiny_store, count):
    settings = {**PATCH, "patches_per_case": count}
    costs = read_run("patch", 0, make_run("patch", **settings), "test", store=tiny_store).costs
    assert costs.case_train_s == 1.5 / (2 * 512) * 16**3


def test_patches_without_a_store_do_not_tell_what_a_case_costs(make_run):
    assert read_run("patch", 0, make_run("patch", **PATCH), "test").costs.case_train_s is None
    assert read_run("whole", 0, make_run("whole"), "test").costs.case_train_s == 1.5


def test_the_memory_of_a_card_is_not_the_host_s(make_run):
    end = {"allocator_peak_bytes": 5}
    on_card = read_run("card", 0, make_run("card", device="gpu:0", end=end), "test").costs
    on_cpu = read_run("cpu", 0, make_run("cpu", end=end), "test").costs
    assert (on_card.card_peak_bytes, on_card.allocator_peak_bytes) == (5, None)
    assert (on_cpu.card_peak_bytes, on_cpu.allocator_peak_bytes) == (None, 5)


def test_the_end_of_an_earlier_attempt_is_not_the_end(make_run):
    folder = make_run("whole")
    with (folder / "log.jsonl").open("a") as file:
        file.write(json.dumps({"event": "start", "step": 4}) + "\n")
        file.write(json.dumps({"event": "step", "step": 5, "step_s": 1.5}) + "\n")
    costs = read_run("whole", 0, folder, "test").costs
    assert (costs.steps, costs.train_s, costs.core_hours) == (5, None, None)
    assert costs.train_peak_bytes == 3 * 2**30


def test_scores_may_lie_in_another_folder(make_run, tmp_path):
    folder = make_run("whole")
    (folder / "evaluation").rename(tmp_path / "evaluation")
    found = read_run("whole", 0, folder, "test", scored=tmp_path)
    assert found.evaluation == tmp_path / "evaluation"
    assert found.scores["ET"]["dice"] == {"e": 1, "f": 1}


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
    scores_path(folder).write_text('{"schema": 1, "cases": [{}], "regions": {"WT": []}}')
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


def test_failed_runs_are_told_and_the_others_compared(make_run):
    runs = results(make_run, whole=0, off=1)
    lost = [Failed("off", 0, "train diverged")]
    found = compare([*runs[:2], runs[3]], baseline="whole", failed=lost)
    assert found.differences["off"]["WT"]["dice"].seeds == 1
    assert to_json(found)["failed"] == ["off, seed 0, is left out: train diverged."]
    found = compare([runs[0], runs[3]], baseline="whole", failed=[*lost, Failed("whole", 1, "train diverged")])
    assert found.variants == ["whole"]
    assert str(found.failed[-1]) == "off, seed 1, is left out: whole has no such seed."


def test_without_a_baseline_there_is_nothing_to_compare(make_run):
    runs = results(make_run, off=1)
    with pytest.raises(InputError, match="baseline whole must have a run that ended well") as caught:
        compare(runs, baseline="whole", failed=[Failed("whole", seed, "train diverged") for seed in (0, 1)])
    assert caught.value.problems[1] == "whole, seed 0, is left out: train diverged."


def test_runs_that_were_scored_on_other_cases_are_refused(make_run):
    runs = results(make_run, whole=0)
    del runs[1].scores["WT"]["dice"]["f"]
    with pytest.raises(InputError, match="same cases as"):
        compare(runs)

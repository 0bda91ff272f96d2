from cpu3d.compare.statistics import Difference
from cpu3d.compare.verdict import cost_words, limits, verdict


def difference(mean, interval, cases=20):
    return Difference(mean, interval, 5, cases, 0, 0, cases)


NONE = difference(0.0, (0.0, 0.0))


def of(dice, hd95=NONE, surface=NONE):
    return {"dice": dice, "hd95_mm": hd95, "surface_dice": surface}


def test_a_clear_difference_is_told_with_its_size_and_interval():
    lines = verdict({"patch-32": {"ET": of(difference(-0.21, (-0.334, -0.101)))}}, "whole")
    assert lines[0] == "patch-32 scores lower than whole by 0.210 (0.101 to 0.334) in ET Dice."


def test_a_shorter_distance_is_told_as_such():
    lines = verdict({"p": {"WT": of(NONE, hd95=difference(-3.0, (-5.0, -1.0)))}}, "whole")
    assert lines[0] == "p is closer than whole by 3.0 mm (1.0 to 5.0) in WT HD95."


def test_what_the_interval_does_not_leave_out_is_no_difference():
    unclear = difference(-0.01, (-0.03, 0.01))
    assert verdict({"p": {"WT": of(unclear, unclear, unclear)}}, "whole") == [
        "p: no difference to whole beyond the interval in any score; WT Dice -0.010 (-0.030 to +0.010)."
    ]


def test_identical_runs_are_told_to_be_alike():
    assert verdict({"p": {"WT": of(NONE), "mean": of(NONE)}}, "whole") == ["p: no difference to whole in any score."]


def test_the_mean_comes_first_and_regions_without_a_difference_share_a_line():
    clear, unclear = difference(0.1, (0.05, 0.2)), difference(0.01, (-0.1, 0.1))
    lines = verdict({"p": {"WT": of(clear), "TC": of(unclear), "ET": of(unclear), "mean": of(clear)}}, "whole")
    both = "by 0.100 (0.050 to 0.200) in mean Dice and by 0.100 (0.050 to 0.200) in WT Dice"
    assert lines[0] == f"p scores higher than whole {both}."
    assert lines[1:] == [
        "p: no difference to whole beyond the interval in Dice (TC, ET), HD95 (all) and surface Dice (all)."
    ]


def test_a_single_pair_is_told_to_have_no_interval():
    pair, none = difference(-0.2, None), difference(0.0, None)
    lines = verdict({"p": {"WT": of(pair, hd95=difference(2.0, None), surface=none)}}, "whole")
    assert lines[:2] == [
        "p scores lower than whole by 0.200 in WT Dice.",
        "p is further off than whole by 2.0 mm in WT HD95.",
    ]
    assert "one case of one seed has no interval" in lines[-1]


def test_costs_are_told_against_the_baseline_and_what_is_not_known_is_left_out():
    costs = {
        "whole": {"case_train_s": 2.0, "train_peak_bytes": 8, "case_predict_s": None},
        "p": {"case_train_s": 1.0, "train_peak_bytes": 2, "case_predict_s": 3.0},
    }
    assert cost_words(costs, "whole") == [
        "p takes, against whole, 0.50 x the seconds to train a case once and 0.25 x the memory to train."
    ]


def test_few_seeds_and_cases_are_owned_up_to():
    words = lambda seeds, cases, **more: " ".join(
        limits(seeds, cases, **{"split": "test", "untouched": True, "voxels": [1e6, 1e6], **more})
    )
    assert "One seed and one case" in words(1, 1)
    assert "One seed: intervals are over cases alone" in words(1, 30)
    assert "One case: intervals are over seeds alone" in words(6, 1)
    assert "3 seeds and 8 cases: so few" in words(3, 8)
    assert "so few" not in words(6, 30)
    assert "unequally" not in words(6, 30)
    assert "from 1.0 to 2.0 million voxels" in words(6, 30, voxels=[1e6, 2e6])
    assert 'split "val" were seen' in words(6, 30, split="val", untouched=False)

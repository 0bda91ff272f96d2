from cpu3d.compare.statistics import Difference
from cpu3d.compare.verdict import cost_words, verdict


def difference(mean, interval, bound=0.0, cases=20):
    """Of five seeds; `bound` is what they alone may make."""
    return Difference(mean, interval, 5, cases, 0, 0, cases, bound)


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


def test_what_seeds_alone_may_make_is_undecided():
    dice, hd95 = difference(-0.21, (-0.334, -0.101), 0.25), difference(3.0, (1.0, 5.0), 4.0)
    assert verdict({"p": {"ET": of(dice, hd95)}}, "whole") == [
        "p against whole, undecided: ET Dice, scores lower by 0.210 (0.101 to 0.334) where seeds alone may make 0.250; "
        "ET HD95, is further off by 3.0 mm (1.0 to 5.0) where seeds alone may make 4.0 mm.",
        "p: no difference to whole in surface Dice (ET).",
    ]


def test_of_one_seed_nothing_is_decided():
    one = difference(-0.21, (-0.334, -0.101), None)
    assert verdict({"p": {"ET": of(one)}}, "whole")[0] == (
        "p against whole, undecided: ET Dice, scores lower by 0.210 (0.101 to 0.334); the intervals leave out 0, but "
        "are over cases alone, of one seed."
    )


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


COSTS = {
    "whole": {"case_train_s": 2.0, "train_peak_bytes": 8, "case_predict_s": None},
    "p": {"case_train_s": 1.0, "train_peak_bytes": 2, "case_predict_s": 3.0},
}


def test_costs_are_told_against_the_baseline_and_what_is_not_known_is_left_out():
    assert cost_words(COSTS, "whole", {"whole": "cpu", "p": "cpu"}) == [
        "p takes, against whole, 0.50 x the seconds to train a case once and 0.25 x the memory to train."
    ]


def test_no_ratio_is_made_of_a_cpu_and_a_card():
    (line,) = cost_words(COSTS, "whole", {"whole": "cpu", "p": "gpu:1"})
    assert line.startswith("p was trained on gpu:1 and whole on cpu")
    assert " x " not in line


def test_two_cards_are_compared_by_their_own_memory():
    costs = {name: {**own, "card_peak_bytes": 10} for name, own in COSTS.items()}
    (line,) = cost_words(costs, "whole", {"whole": "gpu:0", "p": "gpu:1"})
    assert "1.00 x the memory to train" in line

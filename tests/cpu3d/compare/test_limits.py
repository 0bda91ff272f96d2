import pytest

from cpu3d.compare.limits import METHOD, caveats, favours, limits, unlike_devices
from cpu3d.config import RunConfig
from models.config import UNetConfig

WHOLE = RunConfig(grid=(48, 80, 64))
PATCH = RunConfig(grid=(32, 32, 32), mode="patch")


def words(seeds, cases):
    return " ".join(caveats(seeds, cases))


def test_few_seeds_and_cases_are_owned_up_to():
    assert "One seed and one case" in words(1, 1)
    assert "One seed: intervals are over cases alone" in words(1, 30)
    assert "One case: intervals are over seeds alone" in words(6, 1)
    assert "3 seeds and 8 cases: so few" in words(3, 8)
    assert words(6, 30) == ""


def of(configs=None, **more):
    usual = {
        "steps": {"whole": 400, "p": 400},
        "voxels": {"whole": 1e6, "p": 1e6},
        "seconds": {"whole": 60, "p": 60},
        "by_time": False,
        "split": "test",
        "untouched": True,
    }
    return " ".join(limits(configs or {"whole": WHOLE, "p": WHOLE}, **{**usual, **more}))


def test_unequal_budgets_and_cases_that_were_seen_are_told():
    assert "unequally" not in of()
    assert "Variants saw from 1.0 to 2.0 million voxels, unequally" in of(voxels={"whole": 1e6, "p": 2e6})
    assert "In equal time variants saw from 1.0" in of(voxels={"whole": 1e6, "p": 2e6}, by_time=True)
    assert "steps took from 60 to 90 s" in of(seconds={"whole": 60, "p": 90}, by_time=True)
    assert "took from" not in of(seconds={"whole": 60, "p": 90})
    assert 'split "val" were seen' in of(split="val", untouched=False)


def test_what_is_the_same_for_all_favours_nobody():
    assert favours({"whole": WHOLE, "other": WHOLE}, {"whole": 400, "other": 410}) == []
    assert favours({"a": PATCH, "b": PATCH}, {"a": 400, "b": 400}) == []


def test_what_favours_patches_is_told():
    steps, around, validated = favours({"whole": WHOLE, "patch-32": PATCH}, {"whole": 400, "patch-32": 3000})
    assert steps == (
        "patch-32 takes 7.5 times the optimizer steps of whole, 3,000 against 400, at the same learning rate, 0.002, "
        "which is searched for neither."
    )
    assert around.startswith("Of the patches of patch-32, 33% are drawn around labelled voxels")
    assert "validation is outside it, and that of patch-32 is by a sliding window" in validated


def test_rates_of_their_own_are_told_as_such():
    other = RunConfig(grid=(32, 32, 32), mode="patch", learning_rate=1e-3, foreground=0)
    lines = favours({"whole": WHOLE, "p": other}, {"whole": 400, "p": 3000})
    assert "at learning rates of 0.001 and 0.002, which are searched for neither" in lines[0]
    assert not any("around labelled" in line for line in lines)


def test_devices_and_precisions_that_differ_are_told():
    card = RunConfig(grid=(48, 80, 64), device="gpu:0", unet=UNetConfig(dtype="bfloat16"))
    whole = RunConfig(unet=UNetConfig(dtype="float32"))
    lines = favours({"whole": whole, "card": card}, {"whole": 400, "card": 400})
    assert "whole on cpu and card on gpu:0" in lines[0]
    assert "whole in float32 and card in bfloat16" in lines[1]
    assert unlike_devices([whole, card])
    assert not unlike_devices([card, RunConfig(device="gpu:1")])


@pytest.mark.parametrize("words", ["2.7 times narrower", "Owen 2007", "HD95 the diagonal"])
def test_the_method_is_told(words):
    assert words in " ".join(METHOD)

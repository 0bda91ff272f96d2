"""What a comparison is planned to be: variants, one budget, courses, and run folders that are there already."""

import argparse
import itertools
import math

import pytest

from cpu3d.compare.plan import (
    Budget,
    Variant,
    courses,
    extended,
    parse_variant,
    planned_run,
    resolution_variants,
    resolve_variants,
    usual_variants,
)
from cpu3d.compare.run import grouped
from cpu3d.errors import InputError
from cpu3d.settings import SETTINGS
from cpu3d.util.lock import locked
from memory_estimator.common.schema import add_options, arguments
from tests.cpu3d.runs import decided

SMALL = {"filters": 2, "depth": 3, "dtype": "float32", "curriculum": "off"}


def test_a_variant_is_train_s_options_on_top_of_the_common_ones():
    common = {"filters": 8, "patch": [64, 64, 64], "foreground": 0.5, "learning_rate": 0.1, "recipe": "demo"}
    variant = parse_variant("p", "--mode patch --gpu-memory 8GiB --learning-rate 0.2", common)
    kept = {"filters": 8, "foreground": 0.5, "recipe": "demo"}
    assert variant.settings == {**kept, "learning_rate": 0.2, "mode": "patch", "gpu_memory": "8GiB"}
    whole = parse_variant("w", "--recipe paper-flair", common).settings
    assert whole == {"filters": 8, "learning_rate": 0.1, "recipe": "paper-flair"}, "what is for patches is left out"
    assert "patch" in parse_variant("r", "--recipe gpu-patch", common).settings


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--mode half", "variant bad must have options of train.*invalid choice"),
        ("--mode", "variant bad must have options of train"),
        ("--nonsense 3", "variant bad must have options of train.*unrecognized"),
        ("--recipe 'demo", "variant bad must have options of train, got"),
        ("--seed 3", "variant bad must be without --seed, got 3"),
        ("--epochs 3", "without --epochs"),
        ("--fold 1/2", "without --fold"),
        ("--regions WT", "without --regions"),
    ],
)
def test_what_a_variant_may_not_have_is_refused_with_its_name(options, words):
    with pytest.raises(InputError, match=words):
        parse_variant("bad", options, {})
    for name in ("", "a/b", "..", ".hidden", "a b"):
        with pytest.raises(InputError, match="must have a name of letters"):
            parse_variant(name, "", {})


def test_the_usual_patches_are_of_the_size_that_is_chosen_or_half_the_volume(phantom_store):
    common = {**SMALL, "patch": [16, 8, 16], "foreground": 0.5, "patches_per_case": 5}
    for patch, name in (([16, 8, 16], "patch"), (None, "patch-half")):
        common = {**common, "patch": patch} if patch else {**SMALL, "patches_per_case": 5}
        whole, patches = resolve_variants(usual_variants(common, phantom_store), phantom_store)
        assert (whole[0].name, patches[0].name) == ("whole", name)
        grid, of_patches = whole[1].config.grid, patches[1].config
        expected = tuple(patch) if patch else tuple(max(n // 8 * 4, 8) for n in grid)
        assert (of_patches.grid, of_patches.patches_per_case) == (expected, 5)


def given_options(words):
    parser = argparse.ArgumentParser()
    add_options(parser, SETTINGS)
    return arguments([SETTINGS], parser.parse_args(words))[0]


def test_all_variants_see_as_much_and_every_run_is_what_train_makes_of_its_options(phantom_store, tmp_path):
    variants = [
        Variant("whole", SMALL),
        Variant("small", {**SMALL, "mode": "patch", "patch": [16, 16, 8]}),
        Variant("two", {**SMALL, "mode": "patch", "patch": [16, 16, 16], "batch": 2}),
    ]
    plan = courses(resolve_variants(variants, phantom_store), Budget("epochs", 7), 3)
    whole = plan[0]["voxels"]
    assert whole == 7 * 4 * math.prod(plan[0]["grid"])
    halved = courses(
        resolve_variants([Variant("whole", {**SMALL, "curriculum": "half"})], phantom_store), Budget("epochs", 7), 3
    )
    assert abs(halved[0]["steps"] - 7 * 4) <= 2
    assert halved[0]["voxels"] < whole / 2, "7 of 8 steps have fewer"
    for course, seed in itertools.product(plan, (0, 5)):
        assert abs(course["voxels"] - whole) <= math.prod(course["grid"]) * course["batch"]
        run = planned_run(course, seed, tmp_path)
        config = decided(phantom_store, tmp_path / "none", **given_options(run.options))
        assert (config.steps, config.grid, config.seed) == (course["steps"], course["grid"], seed)
        assert config.unet.policy == course["policy"]
        assert (config.validations, config.warmup_steps) == (3, min(10, course["steps"] // 10))
    few = courses(resolve_variants(variants[:2], phantom_store), Budget("voxels", 3 * 40 * 48 * 36), 9)
    assert few[0]["steps"] < 9 < few[1]["steps"]
    assert [course["validations"] for course in few] == [few[0]["steps"], 9]
    kept = extended(None, {}, [0], few)
    assert {course["validations"] for course in kept.plan} == {few[0]["steps"]}, "as many as the shortest can have"


def test_resolutions_are_variants_of_whole_volumes_for_equally_many_epochs(phantom_store):
    shares, batches = (0.5, 1, 0.5), (2, 1)
    variants = resolution_variants({**SMALL, "recipe": "demo"}, shares, batches)
    assert [variant.name for variant in variants] == ["r1-b1", "r0.5-b1", "r1-b2", "r0.5-b2"]
    plan = courses(resolve_variants(variants, phantom_store), Budget("passes", 6), 4)
    assert [course["steps"] for course in plan] == [24, 24, 12, 12], "of 4 cases"
    assert plan[0]["voxels"] == plan[2]["voxels"] == 6 * 4 * math.prod(plan[0]["grid"])
    assert plan[1]["voxels"] < plan[0]["voxels"]
    (alone,) = resolution_variants({"recipe": "paper-flair"}, [1], ())
    assert alone.settings == {"recipe": "paper-flair", "mode": "whole", "resolution": 1, "batch": 1}


def names(*folders, **more):
    return [(variant, seed) for variant, seed, _ in grouped(folders, **more)]


def test_runs_that_differ_in_their_seed_or_in_how_they_were_computed_are_one_variant(make_run, tmp_path):
    patch = {"mode": "patch", "grid": (8, 8, 8)}
    computed = {
        "policy": "lean",
        "micro_batch": 1,
        "validations": 2,
        "device": "gpu:0",
        "store": "/elsewhere",
    }
    runs = [make_run("whole", 0), make_run("whole", 1, **computed), make_run("patch", 0, **patch)]
    assert names(*runs) == [("whole", 0), ("whole", 1), ("patch", 0)]
    (tmp_path / "again").mkdir()
    other = make_run("more", 0, learning_rate=0.5).rename(tmp_path / "again" / "whole-seed0")
    assert names(runs[0], other) == [("whole", 0), ("whole-2", 0)]
    by_norm = [make_run(f"by-{n}", 0, norm="batch", batch=4, micro_batch=n) for n in (1, 2)]
    assert names(*by_norm) == [("by-1", 0), ("by-2", 0)], "batch norm learns what it sees at a time"


def test_unequal_budgets_are_refused_unless_time_was_equal(make_run):
    """Steps of 1.5 s and a first one of 9 s."""
    whole, long = make_run("whole", step_s=1.5), make_run("long", learning_rate=0.5, step_s=3.0, batch=2)
    with pytest.raises(InputError, match=r"must have had one budget, got 0\.03277 million voxels in 18 s in .*long"):
        grouped([whole, long])
    assert len(grouped([whole, long], force=True)) == 2
    assert len(grouped([whole, make_run("other", learning_rate=0.1, batch=2)])) == 2


def test_runs_that_cannot_be_compared_are_refused_all_at_once(make_run, tmp_path):
    first, same, cut = make_run("first"), make_run("same"), make_run("cut", learning_rate=0.5, end="none")
    early = make_run("early", learning_rate=0.4, end={"reason": "early stop", "step": 2})
    bare, busy = make_run("bare", trained=False, scored=False), make_run("busy", learning_rate=0.3)
    fold = make_run("fold", scored=False, fold="1/2")
    with locked(busy, "run"), pytest.raises(InputError) as caught:
        grouped([first, early, cut, tmp_path / "none", bare, busy, fold])
    words = ("trained to its end", "config.json", "checkpoints/best.npz", "one process", "share their fold")
    assert len(caught.value.problems) == len(words)
    assert all(word in problem for word, problem in zip(words, caught.value.problems))
    assert names(first, cut, force=True) == [("first", 0), ("cut", 0)]
    with pytest.raises(InputError, match="alike with seed 0"):
        grouped([first, same])

import argparse
import math

import pytest

from cpu3d.compare.budget import Budget
from cpu3d.compare.plan import courses, planned_runs, run_options, with_minutes
from cpu3d.compare.variants import Variant, common_settings, half, parse_variant, resolved, usual_variants
from cpu3d.errors import InputError
from cpu3d.resolve import resolve
from cpu3d.training.train import add_arguments
from cpu3d.training_options import add_training_options, as_options, chosen_settings
from memory_estimator.host import read_host

SMALL = {"filters": 2, "depth": 3, "dtype": "float32"}


def train_arguments(options):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--store", "s", "--run", "r", *options])


def found(store, *variants):
    return [resolved(variant, store, read_host(), []) for variant in variants]


def test_a_variant_is_train_s_options_on_top_of_the_common_ones():
    common = {"filters": 8, "patch": [64, 64, 64], "foreground": 0.5, "learning_rate": 0.1}
    variant = parse_variant("p", "--mode patch --gpu-memory 8GiB --learning-rate 0.2", common, "demo")
    assert variant.settings == {
        "filters": 8, "foreground": 0.5, "learning_rate": 0.2, "mode": "patch", "gpu_memory": "8GiB"
    }  # fmt: skip
    assert variant.recipe == "demo"
    assert parse_variant("p", "--recipe paper-flair", {}, "demo").recipe == "paper-flair"


@pytest.mark.parametrize(
    ("options", "recipe", "common", "whole"),
    [
        ("--mode whole", None, {}, True),
        ("", None, {}, True),
        ("", "gpu-patch", {}, False),
        ("--mode whole", "gpu-patch", {}, True),
        ("--recipe gpu-patch", None, {}, False),
        ("", None, {"mode": "patch"}, False),
    ],
)
def test_what_is_for_patches_alone_is_not_for_a_variant_on_whole_volumes(options, recipe, common, whole):
    of_patches = {"patch": [8, 8, 8], "foreground": 0.5, "patches_per_case": 3}
    settings = parse_variant("v", options, {"filters": 8, **of_patches, **common}, recipe).settings
    assert settings["filters"] == 8
    assert (set(of_patches) & set(settings)) == (set() if whole else set(of_patches))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--mode half", "variant bad must have options of train.*invalid choice"),
        ("--nonsense 3", "variant bad must have options of train.*unrecognized"),
        ("--recipe 'demo", "variant bad must have options as on a command line"),
        ("--seed 3", "variant bad must be without --seed, got 3; give --seeds"),
        ("--epochs 3", "without --epochs"),
        ("--fold 1/2", "without --fold"),
        ("--regions WT", "without --regions"),
        ("--patience 2", "without --patience"),
        ("--validations 2", "without --validations, got 2; give it to compare"),
    ],
)
def test_what_a_variant_may_not_have_is_told_with_its_name(options, words):
    with pytest.raises(InputError, match=words):
        parse_variant("bad", options, {}, None)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b"])
def test_a_name_is_one_of_a_folder(name):
    with pytest.raises(InputError, match="must have a name of letters"):
        parse_variant(name, "", {}, None)


def test_what_train_refuses_is_told_with_the_variants_name(phantom_store):
    variant = Variant("huge", {**SMALL, "mode": "patch", "patch": [512, 512, 512]})
    with pytest.raises(InputError, match="variant huge: --patch 512 512 512 must lie within"):
        found(phantom_store, variant)


def test_options_are_the_inverse_of_choosing_them():
    parser = argparse.ArgumentParser()
    add_training_options(parser)
    words = (
        "--mode patch --patch 8 16 24 --no-flip --residual --no-augment --regions WT ET --batch 2 --learning-rate 1e-3"
    )
    settings = chosen_settings(parser.parse_args(words.split()))
    assert settings["flip"] is False
    assert chosen_settings(parser.parse_args(as_options(settings))) == settings


def test_the_usual_variants_are_whole_volumes_and_patches_of_half_their_grid(phantom_store):
    whole, patch = found(phantom_store, *usual_variants(SMALL, None, phantom_store, read_host(), []))
    assert (whole.config.mode, patch.config.mode) == ("whole", "patch")
    assert patch.config.grid == half(whole.config.grid, 4)


def test_the_usual_patches_are_of_the_size_that_is_asked_for(phantom_store):
    common = {**SMALL, "patch": [16, 8, 16], "foreground": 0.5, "patches_per_case": 5}
    whole, patch = found(phantom_store, *usual_variants(common, None, phantom_store, read_host(), []))
    assert (whole.variant.name, patch.variant.name) == ("whole", "patch")
    assert (patch.config.grid, patch.config.foreground, patch.config.patches_per_case) == ((16, 8, 16), 0.5, 5)
    del common["patch"]
    whole, patch = found(phantom_store, *usual_variants(common, None, phantom_store, read_host(), []))
    assert (patch.config.grid, patch.config.patches_per_case) == (half(whole.config.grid, 4), 5)


def test_the_usual_variants_take_no_mode(phantom_store):
    with pytest.raises(InputError, match="--mode must be left to the variants, got patch"):
        usual_variants({**SMALL, "mode": "patch"}, None, phantom_store, read_host(), [])


@pytest.mark.parametrize(
    ("grid", "divisor", "expected"),
    [((144, 192, 144), 16, (64, 96, 64)), ((48, 80, 64), 16, (32, 32, 32)), ((16, 32, 48), 16, (16, 32, 32))],
)
def test_half_a_grid_is_one_that_the_network_takes(grid, divisor, expected):
    assert half(grid, divisor) == expected


def test_all_variants_see_as_much_and_every_run_is_what_train_makes_of_its_options(phantom_store, tmp_path):
    variants = [
        Variant("whole", SMALL),
        Variant("small", {**SMALL, "mode": "patch", "patch": [16, 16, 8]}),
        Variant("two", {**SMALL, "mode": "patch", "patch": [16, 16, 16], "batch": 2}),
    ]
    plan = courses(found(phantom_store, *variants), Budget("epochs", 7), 3)
    whole = plan[0]["voxels"]
    assert whole == 7 * 4 * math.prod(plan[0]["grid"])
    for course in plan:
        assert abs(course["voxels"] - whole) <= course["step_voxels"]
    for run in planned_runs(plan, [0, 5], tmp_path):
        settings = chosen_settings(train_arguments(run.options))
        config = resolve(phantom_store, tmp_path / "none", read_host(), settings, None)
        course = next(course for course in plan if course["name"] == run.variant)
        assert (config.steps, list(config.grid), config.seed) == (course["steps"], course["grid"], run.seed)
        assert config.unet.policy == course["policy"]
        assert (config.validations, config.warmup_steps) == (3, min(10, course["steps"] // 10))


def test_all_variants_have_equally_many_validations_that_the_shortest_can_have(phantom_store):
    variants = [Variant("whole", SMALL), Variant("p", {**SMALL, "mode": "patch", "patch": [8, 8, 8]})]
    plan = courses(found(phantom_store, *variants), Budget("voxels", 3 * 40 * 48 * 36), 9)
    assert plan[0]["steps"] < 9 < plan[1]["steps"]
    assert {course["validations"] for course in plan} == {plan[0]["steps"]}


def test_a_plan_from_before_there_was_a_choice_keeps_its_own_options():
    old = {"name": "whole", "options": ["--filters", "2"], "validate_every": 3, "steps": 40}
    assert run_options(old, 1, 40, 4) == (*old["options"], "--steps", "40", "--validate-every", "3", "--seed", "1")
    new = {"name": "whole", "options": [], "validations": 4, "steps": 40, "warmup_steps": 10}
    words = "--steps 40 --validations 4 --seed 1 --warmup-steps 4"
    assert run_options(new, 1, 40, 4) == tuple(words.split())


def test_under_a_budget_of_minutes_the_faster_step_is_taken_more_often(phantom_store):
    variants = [Variant("whole", SMALL), Variant("p", {**SMALL, "mode": "patch", "patch": [8, 8, 8]})]
    plan = courses(found(phantom_store, *variants), Budget("minutes", 1), 4)
    assert [course["steps"] for course in plan] == [None, None]
    timed = with_minutes(plan, 1, {"whole": 2.0, "p": 0.5}, 4)
    assert [course["steps"] for course in timed] == [30, 120]
    assert [course["validations"] for course in timed] == [4, 4]


@pytest.mark.parametrize("option", ["--seed 1", "--steps 10", "--validate-every 3", "--patience 1"])
def test_what_the_comparison_decides_is_not_for_all_variants_either(option):
    args = train_arguments(option.split())
    with pytest.raises(InputError, match=f"compare must be without {option.split()[0]}"):
        common_settings(args)

import argparse
import itertools
import math

import pytest

from cpu3d.compare.plan import (
    Budget,
    Variant,
    courses,
    grouped,
    half,
    parse_variant,
    planned_run,
    resolve_variants,
    start_rate,
    usual_variants,
)
from cpu3d.errors import InputError
from cpu3d.settings import chosen_settings
from cpu3d.training.train import add_arguments
from cpu3d.util.lock import locked
from tests.cpu3d.runs import decided


@pytest.mark.parametrize(
    ("optimizer", "batch", "base_batch", "expected"),
    [
        ("adam", 1, 1, 0.002),
        ("adam", 4, 1, 0.004),
        ("adam", 1, 16, 0.0005),
        ("sgd", 4, 1, 0.008),
        ("sgd", 2, 8, 0.0005),
    ],
)
def test_the_start_of_a_search_grows_with_the_batch_or_for_adam_with_its_root(optimizer, batch, base_batch, expected):
    assert start_rate(0.002, batch, base_batch, optimizer) == expected


SMALL = {"filters": 2, "depth": 3, "dtype": "float32"}


def train_arguments(options):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--store", "s", "--run", "r", *options])


def found(store, *variants):
    return resolve_variants(variants, store)


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
        ("--seed 3", "variant bad must be without --seed, got 3"),
        ("--epochs 3", "without --epochs"),
        ("--fold 1/2", "without --fold"),
        ("--regions WT", "without --regions"),
        ("--patience 2", "without --patience"),
        ("--validations 2", "without --validations, got 2"),
    ],
)
def test_what_a_variant_may_not_have_is_told_with_its_name(options, words):
    with pytest.raises(InputError, match=words):
        parse_variant("bad", options, {}, None)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b"])
def test_a_name_is_one_of_a_folder(name):
    with pytest.raises(InputError, match="must have a name of letters"):
        parse_variant(name, "", {}, None)


def test_the_usual_patches_are_of_the_size_that_is_asked_for(phantom_store):
    common = {**SMALL, "patch": [16, 8, 16], "foreground": 0.5, "patches_per_case": 5}
    whole, patch = found(phantom_store, *usual_variants(common, None, phantom_store))
    assert (whole[0].name, patch[0].name) == ("whole", "patch")
    assert (patch[1].config.grid, patch[1].config.foreground, patch[1].config.patches_per_case) == ((16, 8, 16), 0.5, 5)
    del common["patch"]
    whole, patch = found(phantom_store, *usual_variants(common, None, phantom_store))
    assert (patch[1].config.grid, patch[1].config.patches_per_case) == (half(whole[1].config.grid, 4), 5)


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
    for course, seed in itertools.product(plan, (0, 5)):
        assert abs(course["voxels"] - whole) <= math.prod(course["grid"]) * course["batch"]
        run = planned_run(course, seed, tmp_path)
        settings = chosen_settings(train_arguments(run.options))
        config = decided(phantom_store, tmp_path / "none", **settings)
        assert (config.steps, config.grid, config.seed) == (course["steps"], course["grid"], seed)
        assert config.unet.policy == course["policy"]
        assert (config.validations, config.warmup_steps) == (3, min(10, course["steps"] // 10))


def test_all_variants_have_equally_many_validations_that_the_shortest_can_have(phantom_store):
    variants = [Variant("whole", SMALL), Variant("p", {**SMALL, "mode": "patch", "patch": [8, 8, 8]})]
    plan = courses(found(phantom_store, *variants), Budget("voxels", 3 * 40 * 48 * 36), 9)
    assert plan[0]["steps"] < 9 < plan[1]["steps"]
    assert {course["validations"] for course in plan} == {plan[0]["steps"]}


def test_runs_that_differ_in_their_seed_alone_are_one_variant(make_run):
    folders = [make_run("whole", 0), make_run("whole", 1), make_run("patch", 0, mode="patch", grid=(8, 8, 8))]
    assert [(variant, seed) for variant, seed, _ in grouped(folders)] == [("whole", 0), ("whole", 1), ("patch", 0)]


def test_variants_of_one_name_are_told_apart(make_run, tmp_path):
    (tmp_path / "again").mkdir()
    other = make_run("whole", 0, learning_rate=0.5).rename(tmp_path / "again" / "whole-seed0")
    assert [variant for variant, _, _ in grouped([make_run("whole", 0), other])] == ["whole", "whole-2"]


@pytest.mark.parametrize(
    "settings",
    [
        {"store": "/elsewhere"},
        {"policy": "lean"},
        {"micro_batch": 1},
        {"validate_every": 7, "validations": 2, "patience": 3},
        {"device": "gpu:0", "read_mode": "ram", "save_minutes": 1.0},
    ],
)
def test_where_and_how_a_run_was_computed_makes_no_variant(make_run, settings):
    folders = [make_run("whole", 0), make_run("whole", 1, **settings)]
    assert [(variant, seed) for variant, seed, _ in grouped(folders)] == [("whole", 0), ("whole", 1)]


def test_what_batch_norm_sees_at_a_time_makes_one(make_run):
    folders = [make_run(f"by-{n}", 0, norm="batch", batch=4, micro_batch=n) for n in (1, 2)]
    assert [variant for variant, _, _ in grouped(folders)] == ["by-1", "by-2"]


@pytest.mark.parametrize(
    ("end", "is_over"),
    [
        ({"reason": "finished"}, True),
        ({"reason": "early stop", "step": 2}, True),
        ({"reason": "memory", "step": 3}, False),
        ({"reason": "interrupted", "step": 3}, False),
        ("none", False),
    ],
)
def test_only_a_run_that_finished_or_stopped_early_was_trained_to_its_end(make_run, end, is_over):
    folders = [make_run("whole"), make_run("other", learning_rate=0.5, end=end)]
    if is_over:
        assert len(grouped(folders)) == 2
    else:
        with pytest.raises(InputError, match="other-seed0 must have been trained to its end"):
            grouped(folders)


def test_a_run_that_is_being_trained_is_refused(make_run):
    folders = [make_run("whole"), make_run("other", learning_rate=0.5)]
    with locked(folders[1], "run"), pytest.raises(InputError, match=r"other-seed0 must be written by one process"):
        grouped(folders)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"split_hash": "0123456789ab"}, "share their split_hash, got {own} in .*first.* and 0123456789ab in .*other"),
        ({"fold": "1/2"}, "share their fold, got none in .* and 1/2 in"),
        ({"regions": ("WT",)}, "share their regions, got WT, TC, ET in .* and WT in"),
    ],
)
def test_runs_of_other_cases_are_refused_with_both_values(make_run, tiny_store, settings, words):
    folders = [make_run("first"), make_run("other", scored=False, **settings)]
    with pytest.raises(InputError, match=words.format(own=tiny_store.manifest.split_hash)):
        grouped(folders)


def test_all_folders_that_are_no_trained_runs_are_named(make_run, tmp_path):
    with pytest.raises(InputError) as caught:
        grouped([tmp_path / "nothing", make_run("half", trained=False, scored=False)])
    assert "nothing must hold a config.json" in caught.value.problems[0]
    assert "half-seed0 must have been trained" in caught.value.problems[1]


def test_two_runs_alike_are_refused(make_run):
    with pytest.raises(InputError, match="alike with seed 0"):
        grouped([make_run("one"), make_run("two")])

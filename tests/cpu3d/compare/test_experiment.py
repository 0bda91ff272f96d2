"""The plan of a comparison: variants, one budget, and the options of its runs."""

import argparse
import dataclasses
import json
import math

import pytest

from cpu3d.chosen import SETTINGS
from cpu3d.compare import experiment
from cpu3d.compare.experiment import Budget, Kept, Options, courses, resumed
from cpu3d.compare.variants import (
    as_options,
    parse_variant,
    read_train_options,
    resolve_variants,
    usual_variants,
)
from cpu3d.data.fold import with_fold
from cpu3d.data.store import Store
from cpu3d.errors import InputError
from cpu3d.run.config_json import save_config
from memory_estimator.common.schema import add_options, arguments
from tests.cpu3d.runs import decided, of_voxels, written_weights

SMALL = {"filters": 2, "depth": 3, "dtype": "float32", "curriculum": "off"}


def test_a_variant_is_train_s_options_on_top_of_the_common_ones():
    common = {
        "filters": 8,
        "patch": [64, 64, 64],
        "foreground": 0.5,
        "learning_rate": 0.1,
        "recipe": "demo",
    }
    variant = parse_variant("p", "--mode patch --patch 32 32 32 --learning-rate 0.2", common)
    kept = {"filters": 8, "foreground": 0.5, "recipe": "demo"}
    assert variant == {**kept, "learning_rate": 0.2, "mode": "patch", "patch": (32, 32, 32)}
    whole = parse_variant("w", "--recipe paper-flair", common)
    assert whole == {"filters": 8, "learning_rate": 0.1, "recipe": "paper-flair"}, (
        "what is for patches is left out"
    )
    assert "patch" in parse_variant("r", "--recipe gpu-patch", common)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--mode half", "variant bad must have options of train.*invalid choice"),
        ("--nonsense 3", "variant bad must have options of train.*unrecognized"),
        ("--recipe 'demo", "variant bad must have options of train, got"),
        ("--seed 3", "variant bad must be without --seed, got 3"),
        ("--regions WT", "without --regions"),
    ],
)
def test_what_a_variant_may_not_have_is_refused_with_its_name(options, words):
    with pytest.raises(InputError, match=words):
        parse_variant("bad", options, {})


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b"])
def test_a_variant_needs_a_name_that_folders_may_have(name):
    with pytest.raises(InputError, match="must have a name of letters"):
        parse_variant(name, "", {})


@pytest.mark.parametrize(("own", "name"), [({"patch": [16, 8, 16]}, "patch"), ({}, "patch-half")])
def test_the_usual_patches_are_of_the_size_that_is_chosen_or_half_the_volume(
    phantom_store, own, name
):
    variants = usual_variants({**SMALL, **own, "patches_per_case": 5}, phantom_store)
    plans = resolve_variants(variants, phantom_store)
    assert list(plans) == ["whole", name]
    grid, of_patches = plans["whole"][1].config.grid, plans[name][1].config
    expected = tuple(own.get("patch", [max(n // 8 * 4, 8) for n in grid]))
    assert (of_patches.grid, of_patches.patches_per_case) == (expected, 5)


def planned(store, variants, budget, validations):
    baseline = next(iter(variants))
    return courses(resolve_variants(variants, store), baseline, budget, validations)


def test_all_variants_see_as_much_and_every_run_is_what_train_makes_of_its_options(
    phantom_store, tmp_path
):
    variants = {
        "whole": SMALL,
        "small": {**SMALL, "mode": "patch", "patch": [16, 16, 8]},
        "two": {**SMALL, "mode": "patch", "patch": [16, 16, 16], "batch": 2},
    }
    plan = planned(phantom_store, variants, Budget("epochs", 7), 3)
    voxels = plan[0]["voxels"]
    assert voxels == 7 * 4 * math.prod(plan[0]["grid"])
    (halved,) = planned(
        phantom_store, {"whole": {**SMALL, "curriculum": "half"}}, Budget("epochs", 7), 3
    )
    assert abs(halved["steps"] - 7 * 4) <= 2
    assert halved["voxels"] < voxels / 2, "7 of 8 steps have fewer"
    parser = argparse.ArgumentParser()
    add_options(parser, SETTINGS)
    for course in plan:
        assert abs(course["voxels"] - voxels) <= math.prod(course["grid"]) * course["batch"]
        (chosen,) = arguments([SETTINGS], parser.parse_args(course["options"]))
        config = decided(phantom_store, tmp_path / "none", **chosen)
        assert (config.steps, config.grid, config.unet.policy) == (
            course["steps"],
            course["grid"],
            course["policy"],
        )
        assert (config.validations, config.warmup_steps) == (3, min(10, course["steps"] // 10))
    del variants["two"]
    few = planned(phantom_store, variants, Budget("voxels", 3 * 40 * 48 * 36), 9)
    assert few[0]["steps"] < 9 < few[1]["steps"]
    for course in few:  # as many as the shortest can have
        assert course["options"][course["options"].index("--validations") + 1] == str(
            few[0]["steps"]
        )


@pytest.mark.parametrize(
    ("spacing_mm", "strides"),
    [((1.0, 1.0, 5.0), ((2, 2, 1), (2, 2, 1))), ((1.0, 1.0, 1.0), ((2, 2, 2), (2, 2, 2)))],
)
def test_variants_have_the_strides_of_whole_volumes_and_their_runs_keep_them(
    phantom_store, tmp_path, spacing_mm, strides
):
    store = of_voxels(phantom_store, *spacing_mm)
    own = ((2, 1, 2), (2, 2, 2))
    patch = {**SMALL, "mode": "patch", "patch": [16, 16, 8]}  # by itself 2,2,1 would be the second
    variants = {"whole": SMALL, "patch": patch, "own": {**patch, "strides": own}}
    resolved = resolve_variants(variants, store)
    seen = {name: plan.config.unet.every_stride for name, (_, plan) in resolved.items()}
    assert seen == {"whole": strides, "patch": strides, "own": own}
    plan = courses(resolved, "whole", Budget("epochs", 1), 1)
    for course in plan:
        chosen = read_train_options(course["options"], course["name"])
        config = decided(store, tmp_path / "none", **chosen)
        assert config.unet.every_stride == seen[course["name"]]
    # one of an earlier version, which did not name them, goes on with all axes
    (whole, *_) = plan
    place = whole["options"].index("--strides")
    before = {**whole, "options": whole["options"][:place] + whole["options"][place + 3 :]}
    Kept({}, [0], [before]).save(tmp_path)
    (again,) = resumed(Kept({}, [0, 1], [whole]), tmp_path).plan
    chosen = read_train_options(again["options"], again["name"])
    assert chosen["strides"] == ((2, 2, 2), (2, 2, 2))


@pytest.mark.parametrize("is_run_there", [False, True])
def test_a_comparison_that_a_version_before_began_keeps_its_coarse_steps(
    phantom_store, tmp_path, is_run_there
):
    network = {"filters": 2, "depth": 3, "dtype": "float32", "steps": 6}
    store = of_voxels(phantom_store, 1.0, 1.0, 5.0)
    course = {
        "name": "whole",
        "options": as_options({**network, "strides": ((2, 2, 1), (2, 2, 1)), "device": "auto"}),
        "grid": (1, 1, 1),
        "batch": 1,
        "policy": "speed",
        "step_s": None,
        "peak_bytes": None,
        "steps": 6,
        "voxels": 6,
    }
    Kept({}, [3], [course]).save(tmp_path)
    begun = decided(store, tmp_path / "none", **network, curriculum="half", coarse_stride=(2, 2, 2))
    if is_run_there:
        run = tmp_path / "runs" / "whole-seed3"
        run.mkdir(parents=True)
        save_config(begun, run)
    (again,) = resumed(Kept({}, [3, 4], [course]), tmp_path).plan
    chosen = read_train_options(again["options"], again["name"])
    config = decided(store, tmp_path / "none", **chosen)
    if is_run_there:
        assert (config.curriculum, config.coarse_grid) == (begun.curriculum, begun.coarse_grid)
    else:  # half of all axes does not pay
        assert (config.curriculum, chosen["coarse_stride"]) == ("off", (2, 2, 2))


def test_a_comparison_of_a_version_before_goes_on_with_its_levels_and_patches(
    phantom_store, tmp_path, monkeypatch
):
    def asked_for():
        options = Options(store=phantom_store.folder, out=tmp_path)
        asked, plan, _ = experiment.planned(options, {"filters": 2}, phantom_store)
        return Kept(asked, [0], plan)

    with monkeypatch.context() as before:  # which had five levels on any volume
        for module in ("cpu3d.decisions", "cpu3d.compare.variants"):
            before.setattr(f"{module}.depth_of_store", lambda *_: (5, ""))
        kept = asked_for()
    assert asked_for().asked["variants"] != kept.asked["variants"]  # the patches are smaller
    kept.save(tmp_path)
    again = resumed(asked_for(), tmp_path)
    assert again.asked == json.loads(json.dumps(kept.asked))
    for course in again.plan:
        chosen = read_train_options(course["options"], course["name"])
        assert decided(phantom_store, tmp_path / "none", **chosen).unet.depth == 5


def test_the_runs_of_a_comparison_name_their_coarse_steps(phantom_store):
    store = of_voxels(phantom_store, 1.0, 1.0, 5.0)
    variants = {"half": {**SMALL, "curriculum": "half"}, "off": SMALL}
    resolved = resolve_variants(variants, store)
    seen = {
        name: (settings["curriculum"], settings["coarse_stride"])
        for name, (settings, _) in resolved.items()
    }
    assert seen == {"half": ("half", (2, 2, 1)), "off": ("off", (2, 2, 2))}


SHORT = ((2, 2, 2), (2, 2, 1))  # of a box of 12 slices
LONG = ((2, 2, 2), (2, 2, 2))  # of a grid of 36 slices
OWN = ((2, 1, 2), (2, 2, 2))


@pytest.mark.parametrize(
    ("baseline", "strides"),
    [
        ({}, {"baseline": SHORT, "full": SHORT, "brain": SHORT, "patch": SHORT}),
        ({"extent": "full"}, {"baseline": LONG, "full": LONG, "brain": LONG, "patch": LONG}),
        ({"strides": OWN}, {"baseline": OWN, "full": SHORT, "brain": SHORT, "patch": SHORT}),
    ],
)
def test_variants_of_one_depth_have_one_network_whatever_they_see(phantom_store, baseline, strides):
    x, y, _ = phantom_store.manifest.largest_box
    manifest = dataclasses.replace(phantom_store.manifest, largest_box=(x, y, 12))
    variants = {
        "baseline": {**SMALL, **baseline},
        "full": {**SMALL, "extent": "full"},
        "brain": {**SMALL, "extent": "brain"},
        "patch": {**SMALL, "extent": "full", "mode": "patch", "patch": [16, 16, 16]},
    }
    resolved = resolve_variants(variants, Store(phantom_store.folder, manifest))
    seen = {name: plan.config.unet.every_stride for name, (_, plan) in resolved.items()}
    assert seen == strides


def test_a_variant_whose_first_weights_have_seen_a_held_out_patient_is_refused(
    phantom_store, tmp_path
):
    (held_out,) = phantom_store.manifest.split["val"]
    folds = [
        fold
        for fold in ("1/2", "2/2")
        if held_out in with_fold(phantom_store, fold).manifest.split["train"]
    ]
    network = {"filters": 4, "depth": 3}
    trained = decided(phantom_store, tmp_path / "none", fold=folds[0], **network)
    source = written_weights(trained, tmp_path / "source")
    with pytest.raises(InputError, match=rf"variant whole.*{held_out}"):
        resolve_variants({"whole": {**network, "init": str(source)}}, phantom_store)

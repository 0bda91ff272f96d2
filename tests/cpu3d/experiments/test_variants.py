"""The plan of a comparison: variants, one budget, and the settings of its runs."""

import math

import pytest

from cpu3d.data.fold import with_fold
from cpu3d.errors import InputError
from cpu3d.experiments.variants import parse_variant, planned_variants
from cpu3d.plan import make_plan
from tests.cpu3d.runs import HOST, decided, written_weights

SMALL = {"filters": 2, "depth": 3, "dtype": "float32", "curriculum": "off"}


def courses(store, variants, epochs=1, validations=1, folds=("",), minutes=None):
    planned = planned_variants(variants, store, folds, validations, epochs=epochs, minutes=minutes)
    return {variant.name: variant for variant in planned}


def test_a_variant_is_train_s_options_on_top_of_the_common_ones():
    common = {"filters": 8, "patch": [64, 64, 64], "recipe": "demo"}
    variant = parse_variant("p", "--mode patch --patch 32 32 32 --learning-rate 0.2", common)
    assert variant == {**common, "learning_rate": 0.2, "mode": "patch", "patch": (32, 32, 32)}
    whole = parse_variant("w", "--recipe paper-flair", common)
    assert whole == {"filters": 8, "recipe": "paper-flair"}, "what is for patches is left out"
    assert "patch" in parse_variant("r", "--recipe gpu-patch", common)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("bad", "--mode half", "variant bad must have options of train.*invalid choice"),
        ("bad", "--seed 3", "variant bad must be without --seed, got 3"),
        ("bad", "--regions WT", "without --regions"),
        ("..", "", "must have a name of letters"),
    ],
)
def test_what_a_variant_may_not_be_is_refused_with_its_name(name, options, words):
    with pytest.raises(InputError, match=words):
        parse_variant(name, options, {})


def test_all_variants_see_as_much_and_every_run_is_what_train_makes_of_its_settings(
    phantom_store, tmp_path
):
    variants = {
        "whole": SMALL,
        "small": {**SMALL, "mode": "patch", "patch": [16, 16, 8]},
        "two": {**SMALL, "mode": "patch", "patch": [16, 16, 16], "batch": 2},
    }
    planned = courses(phantom_store, variants, 7, 3)
    voxels = {}
    for name, variant in planned.items():
        plan = make_plan(phantom_store, tmp_path, HOST, variant.settings)
        config = plan.config
        assert (config.steps, config.validations) == (variant.steps, 3)
        assert variant.run_s == pytest.approx(plan.training_s)
        assert variant.settings["policy"] == config.unet.policy
        sample = math.prod(config.grid) * config.batch
        voxels[name] = variant.steps * sample
        assert abs(voxels[name] - voxels["whole"]) <= sample
    assert planned["whole"].steps == 7 * 4
    assert planned["two"].row[:6] == ["two", "16x16x16", "2", "94", "0.8 M", "speed"]
    halved = courses(phantom_store, {"a": SMALL, "b": {**SMALL, "curriculum": "half"}}, 7)
    # 80 of them at 12 x 20 x 16 of 24 x 36 x 32 voxels
    assert halved["b"].steps == 97
    few = courses(phantom_store, {"whole": SMALL, "small": variants["small"]}, validations=9)
    assert few["whole"].steps < 9 < few["small"].steps
    for variant in few.values():  # as many as the shortest can have
        assert variant.settings["validations"] == few["whole"].steps
    (timed,) = courses(phantom_store, {"whole": SMALL}, minutes=3).values()
    assert (timed.steps, timed.settings["budget_minutes"]) == (None, 3)
    assert timed.settings["epochs"] == 3 * 60 * 1000 / 4, "steps of a millisecond: no limit"


def test_variants_have_the_network_of_the_first_unless_they_choose_another(phantom_store):
    own = ((2, 1, 2), (2, 2, 2))
    # by itself a patch of 8 slices would halve Z once
    patch = {**SMALL, "mode": "patch", "patch": [16, 16, 8]}
    variants = {"whole": SMALL, "patch": patch, "own": {**patch, "strides": own}}
    planned = courses(phantom_store, variants)
    seen = {name: variant.settings["strides"] for name, variant in planned.items()}
    every = ((2, 2, 2), (2, 2, 2))
    assert seen == {"whole": every, "patch": every, "own": own}


@pytest.mark.parametrize("folds", [[""], ["1/2", "2/2"], ["2/2", "1/2"]])
def test_a_variant_whose_first_weights_have_seen_a_held_out_patient_is_refused(
    phantom_store, tmp_path, folds
):
    (held_out,) = phantom_store.manifest.split["val"]
    first = with_fold(phantom_store, "1/2").manifest.split["train"]
    fold = "1/2" if held_out in first else "2/2"
    network = {"filters": 4, "depth": 3}
    trained = decided(phantom_store, tmp_path / "none", fold=fold, **network)
    source = written_weights(trained, tmp_path / "source")
    with pytest.raises(InputError, match=r"variant whole: --init must .* held-out patients"):
        courses(phantom_store, {"whole": {**network, "init": str(source)}}, folds=folds)

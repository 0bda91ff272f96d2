"""Recipes: that each says what it costs and gives, and that the overview lists them all."""

import argparse

import pytest

from cpu3d.recipes import RECIPES, overview
from cpu3d.training_options import add_training_options


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_its_command_its_cost_and_its_score(name):
    text = RECIPES[name].__doc__
    assert "\n    ./run.sh " in text
    assert f"--recipe {name} " in text or name in ("demo", "brats-regions")
    assert text.count("Cost: ") == text.count("Score: ") == 1
    assert name == "demo" or "not verified here" in text


def test_the_help_lists_every_recipe_with_what_it_is():
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter)
    add_training_options(parser)
    listed = parser.format_help()[-len(overview()) - 1 :].splitlines()[1:]
    assert [line.split()[0] for line in listed] == list(RECIPES)
    assert all(line.endswith(".") and len(line) > 30 for line in listed)


def test_gpu_patch_is_brats_regions_on_patches_of_a_card_with_a_wider_network():
    patch, whole = RECIPES["gpu-patch"](), RECIPES["brats-regions"]()
    assert (patch.mode, patch.device, patch.grid, patch.batch, patch.unet.filters) == (
        "patch",
        "gpu:0",
        (0, 0, 0),
        2,
        32,
    )
    for name in ("regions", "channels", "schedule", "learning_rate", "epochs", "extent", "augment", "optimizer"):
        assert getattr(patch, name) == getattr(whole, name)

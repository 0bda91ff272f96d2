"""Settings: the command line, the checks, and a configuration that is saved, read back and compared
without loss."""

import argparse
import dataclasses
import json
import math

import numpy as np
import pytest

from cpu3d.errors import InputError
from cpu3d.run.config_json import load_config, save_config
from cpu3d.settings import (
    SETTINGS,
    RunConfig,
    Settings,
    as_options,
    chosen_again,
    with_settings,
)
from memory_estimator.common.schema import add_options, arguments
from models.config import UNetConfig

CONFIG = RunConfig(
    store="s",
    channels=("FLAIR",),
    label_names={0: "background", 4: "enhancing"},
    region_codes={"WT": (1, 2, 4)},
    grid=(16, 32, 16),
    unet=UNetConfig(depth=3),
)


@pytest.mark.parametrize(
    ("norm", "micro_batch", "micro", "count"),
    [
        ("instance", 0, 1, 6),
        ("batch", 0, 6, 1),
        ("batch", 2, 2, 3),
    ],
)
def test_the_micro_batch_is_one_volume_by_rule_but_with_batch_norm_the_whole_batch(
    norm, micro_batch, micro, count
):
    config = RunConfig(unet=UNetConfig(norm=norm), batch=6, micro_batch=micro_batch)
    assert (config.micro, config.micro_batches) == (micro, count)


@pytest.mark.parametrize(("field", "value"), [("learning_rate", math.inf), ("extent", "tile")])
def test_a_bad_setting_is_refused_by_name(field, value):
    option = "--" + field.replace("_", "-")
    with pytest.raises(InputError, match=f"{option} must be"):
        RunConfig(**{field: value})


SAVED = dataclasses.replace(
    CONFIG,
    store_channels=("FLAIR", "T1w"),
    regions=("WT",),
    unet=UNetConfig(channels=1, outputs=1, depth=3),
)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("schema", 9, r"run .* must have schema \d, got 9"),
        ("grid", [16, 16], "config.grid must be"),
        ("grid", [16, 16, 0], "grid must be positive"),
        ("unet", {"depth": 99}, "depth must be between 2 and 8"),
        ("augment", {"flop": True}, "got unknown flop"),
        ("regions", ["TC"], "regions must be some of WT, got"),
        ("optimizer", ..., "config must hold every setting, got none for optimizer"),
        ("augment", {"flip": True}, "got none for augment.blur, augment.contrast"),
    ],
)
def test_a_saved_config_with_a_value_of_another_kind_or_none_is_refused_by_name(
    tmp_path, name, value, problem
):
    save_config(SAVED, tmp_path)
    assert load_config(tmp_path) == SAVED
    path = tmp_path / "config.json"
    content = {**json.loads(path.read_text()), name: value}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    with pytest.raises(InputError, match=problem):
        load_config(tmp_path)


# --- The command line ---


def chosen(*words):
    parser = argparse.ArgumentParser()
    add_options(parser, SETTINGS)
    return arguments([SETTINGS], parser.parse_args(words), InputError)[0]


def test_what_is_given_on_the_command_line_is_set_and_nothing_else():
    words = "--channels FLAIR T1w --batch 2 --patch 16 16 32 --residual --no-flip"
    words += " --augment nnunet --strides 2,2,1 2,2,1 2,2,2 2,2,2"
    settings = chosen(*words.split())
    assert settings == {
        "channels": ("FLAIR", "T1w"),
        "batch": 2,
        "patch": (16, 16, 32),
        "residual": True,
        "flip": False,
        "augment": "nnunet",
        "strides": ((2, 2, 1), (2, 2, 1), (2, 2, 2), (2, 2, 2)),
    }
    config = with_settings(RunConfig(epochs=7), settings)
    assert (config.channels, config.batch, config.epochs) == (("FLAIR", "T1w"), 2, 7)
    assert (config.unet.residual, config.augment.flip, config.augment.scaling) == (True, False, 0.4)
    assert config.unet.divisors == (16, 16, 4)
    assert with_settings(config, {"depth": 3}).unet.strides == ()
    assert chosen(*as_options(settings)) == settings


def test_what_is_left_open_stays_as_it_was():
    words = "--device auto --dtype auto --policy auto --strides auto"
    config = with_settings(RunConfig(device="gpu:0"), chosen(*words.split()))
    assert (config.device, config.unet) == ("gpu:0", UNetConfig())


@pytest.mark.parametrize(
    ("before", "words", "after"),
    [
        ({"steps": 9}, "--epochs 3", {"steps": 0, "epochs": 3}),
        ({"steps": 9}, "--budget-minutes 3", {"steps": 0, "budget_minutes": 3.0}),
        ({"budget_minutes": 3.0}, "--steps 9", {"budget_minutes": 0.0, "steps": 9}),
    ],
)
def test_a_length_chosen_in_one_way_takes_the_place_of_another(before, words, after):
    now = chosen(*words.split())
    config = with_settings(RunConfig(**before), now)
    assert {name: getattr(config, name) for name in after} == after
    assert chosen_again(before, now) == now


@pytest.mark.parametrize("name", ["epochs", "steps", "validations", "micro-batch", "batch"])
def test_a_number_that_would_be_taken_for_the_default_is_refused(name):
    with pytest.raises(InputError, match=rf"^--{name} must be at least 1, got 0; [^\n]+$"):
        with_settings(Settings(), chosen(f"--{name}", "0"))


@pytest.mark.parametrize(("steps", "warmup"), [(8, 0), (72, 3), (400, 10)])
def test_the_rate_rises_falls_as_a_cosine_and_full_steps_begin_at_a_share_of_it(steps, warmup):
    half = steps // 2
    config = RunConfig(coarse_steps=half, learning_rate=0.1)
    rise = np.arange(1, warmup + 1) / max(warmup, 1)
    fall = (1 + np.cos(np.linspace(0, np.pi, half - warmup, endpoint=False))) / 2
    full = 0.3 * (1 + np.cos(np.linspace(0, np.pi, half, endpoint=False))) / 2
    rates = [config.rate_at(step, steps) for step in range(steps)]
    np.testing.assert_allclose(rates, 0.1 * np.concatenate([rise, fall, full]))

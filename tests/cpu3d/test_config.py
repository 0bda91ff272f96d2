"""A configuration is saved, read back and compared without loss."""

import dataclasses
import json

import pytest

from cpu3d.config import RunConfig, differences, load_config, save_config
from cpu3d.errors import InputError
from cpu3d.recipes import RECIPES
from models.config import UNetConfig

CONFIG = RunConfig(
    store="s",
    channels=("FLAIR",),
    label_names={0: "background", 4: "enhancing"},
    region_codes={"WT": (1, 2, 4)},
    grid=(16, 32, 16),
    unet=UNetConfig(depth=3),
)


def test_a_config_comes_back_equal(tmp_path):
    save_config(CONFIG, tmp_path)
    assert load_config(tmp_path) == CONFIG


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_config_that_saves(name, tmp_path):
    save_config(RECIPES[name](), tmp_path)
    assert load_config(tmp_path) == RECIPES[name]()


def test_differences_give_both_values_and_pass_what_may_change():
    other = dataclasses.replace(CONFIG, epochs=7, batch=2, unet=UNetConfig(depth=4))
    problems = differences(CONFIG, other)
    assert len(problems) == 2
    assert problems[0].startswith("unet.depth must stay as the run was started, got 4 for 3")
    assert problems[1].startswith("batch must stay as the run was started, got 2 for 1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "must be JSON with a schema"),
        ('{"schema": 9}', "must have schema 1, got 9"),
        ('{"schema": 1, "nonsense": 2}', "must be complete"),
        (
            json.dumps({"schema": 1, **dataclasses.asdict(CONFIG), "unet": {"depth": 99}}),
            "depth must be between 2 and 8",
        ),
    ],
)
def test_a_damaged_or_foreign_config_is_refused(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=message):
        load_config(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"must hold a config\.json, found none"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"), [("epochs", 0), ("batch", -1), ("learning_rate", 0), ("ema", 1), ("extent", "tile")]
)
def test_a_bad_setting_is_refused_by_name(field, value):
    with pytest.raises(InputError, match=f"{field} must be"):
        RunConfig(**{field: value})


def test_saved_configs_are_plain_json(tmp_path):
    save_config(CONFIG, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["unet"]["depth"] == 3

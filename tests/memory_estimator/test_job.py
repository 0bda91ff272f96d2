"""A job, and where it comes from: the command line, a recipe, a saved run."""

import argparse
import dataclasses
import json

import pytest

from cpu3d.settings import RunConfig, load_config, recipe_config, save_config
from memory_estimator.job import RECIPES, Job, JobOptions, job_from, job_of_run, notes_on_run, policy_is_open
from memory_estimator.schema import add_options
from models.config import UNetConfig


def parsed(text):
    parser = argparse.ArgumentParser()
    add_options(parser, JobOptions)
    return parser.parse_args(text.split())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": (64, 64, 60)}, r"input_shape \(64, 64, 60\) must be divisible by 16; pad to \(64, 64, 64\)"),
        ({"shape": (64, 64, 0)}, "input_shape must be three positive numbers"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"cases": -1}, "cases must be at least 0, got -1"),
        ({"optimizer": "lamb"}, "optimizer must be one of adam, sgd, got 'lamb'"),
        ({"engine": "torch"}, "engine must be one of itex, stock, got 'torch'"),
        ({"batch": 16, "micro_batch": 3}, "micro_batch must divide the batch of 16, got 3; give one of 1, 2, 4, 8, 16"),
    ],
)
def test_a_job_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Job(**changes)


def test_every_option_reaches_the_job():
    job = job_from(parsed(
        "--shape 64 80 96 --batch 4 --micro-batch 2 --channels 1 --classes 2 --filters 8 --depth 4 --network cicek2016 "
        "--norm batch --up upsampling --residual --deep-supervision --dtype float32 --optimizer sgd --policy lean "
        "--engine stock --threads 3"
    ))  # fmt: skip
    unet = UNetConfig(
        channels=1, outputs=2, filters=8, depth=4, network="cicek2016", norm="batch", up="upsampling", residual=True,
        deep_supervision=True, dtype="float32", policy="lean",
    )  # fmt: skip
    assert job == Job(unet, (64, 80, 96), batch=4, micro_batch=2, optimizer="sgd", engine="stock", threads=3)
    assert job.policy == "lean"


def test_volumes_at_a_time_are_one_or_with_batch_norm_all_unless_asked_for():
    jobs = (("instance", 0, 1), ("none", 0, 1), ("batch", 0, 6), ("batch", 2, 2), ("none", 3, 3))
    for norm, micro_batch, micro in jobs:
        job = Job(UNetConfig(norm=norm), (64, 64, 64), batch=6, micro_batch=micro_batch)
        assert (job.micro, job.parts, job.voxels) == (micro, 6 // micro, micro * 64**3)


@pytest.mark.parametrize(
    ("options", "is_open"),
    [
        ("--shape 64 64 64 --policy auto", True),
        ("--recipe brats-regions", True),
        ("--recipe brats-regions --policy lean", False),
        ("--run there", False),
        ("--run there --policy auto", True),
    ],
)
def test_a_policy_is_open_where_neither_the_command_nor_a_run_has_one(options, is_open):
    assert policy_is_open(parsed(options)) is is_open


def test_every_recipe_s_settings_agree_with_its_job():
    for name, recipe in RECIPES.items():
        config, job = recipe_config({"recipe": name}), recipe.job
        assert (config.unet, config.batch, config.optimizer, config.ema) == (job.unet, job.batch, job.optimizer, 0)
        assert config.micro == job.micro
        if config.channels:
            assert (job.unet.channels, job.unet.outputs) == (len(config.channels), len(config.regions))


CONFIG = RunConfig(
    grid=(64, 80, 96), unet=UNetConfig(filters=8, dtype="bfloat16", policy="balanced"), batch=4, micro_batch=2,
    optimizer="sgd", ema=0.9, engine="stock",
)  # fmt: skip


def test_a_saved_run_is_the_job_that_it_trained(tmp_path):
    save_config(CONFIG, tmp_path)
    expected = Job(CONFIG.unet, CONFIG.grid, 4, 2, "sgd", "stock", averaged=True, from_store=True)
    assert job_of_run(tmp_path) == expected


@pytest.mark.parametrize(("fold", "cases"), [("", 7), ("1/3", 6), ("2/3", 7), ("odd", 0)])
def test_the_cases_of_a_saved_run_are_those_that_its_fold_leaves(fold, cases, tmp_path):
    """Of 7 to train on and 3 to validate on, dealt out to three parts in turn, the first part holds out 4."""
    split = {"train": list("abcdefg"), "val": list("hij"), "test": ["k"]}
    (tmp_path / "manifest.json").write_text(json.dumps({"split": split}))
    save_config(dataclasses.replace(CONFIG, store=str(tmp_path), mode="patch", patches_per_case=5), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "fold": fold}))
    assert job_of_run(tmp_path).cases == 5 * cases


def test_what_the_estimate_of_a_saved_run_leaves_out_is_said(tmp_path):
    notes = []
    for changes in ({}, {"resolution": 0.5}, {"mode": "patch", "device": "gpu:1"}):
        save_config(dataclasses.replace(CONFIG, **changes), tmp_path)
        notes.append(" ".join(notes_on_run(tmp_path)))
    assert notes[0] == ""
    assert "validates on whole volumes" in notes[1]
    assert notes[2].startswith("the run is on gpu:1")


@pytest.mark.policy_left_open
def test_a_run_from_before_there_were_policies_is_as_it_was_computed(tmp_path):
    save_config(CONFIG, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["micro_batch"], content["unet"]["policy"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    job, config = job_of_run(tmp_path), load_config(tmp_path)
    assert (job.policy, job.micro) == ("speed", 4) == (config.unet.policy, config.micro)


def damaged(**changes):
    return lambda content: json.dumps({**content, **changes})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: json.dumps(content)[:-40], "must be as `train` wrote it"),
        (damaged(schema=2), "got schema 2, not 1"),
        (damaged(unet={"filters": 8, "colour": 3}), "others in colour"),
        (lambda content: json.dumps({"schema": 1}), "config must have the fields"),
        (damaged(batch="two"), "config.batch must be int, got two"),
        (damaged(micro_batch=3), "micro_batch must divide the batch of 4, got 3"),
        (damaged(unet={"policy": "fast"}), "policy must be one of speed, balanced, lean, got 'fast'"),
        (damaged(grid=[64, 64.5, 64]), r"config.grid\[1\] must be int, got 64.5"),
    ],
)
def test_a_damaged_run_is_refused_by_its_file(damage, message, tmp_path):
    save_config(CONFIG, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(damage(json.loads(path.read_text())))
    with pytest.raises(ValueError, match=message) as error:
        job_of_run(tmp_path)
    assert str(tmp_path) in str(error.value)

"""A job, and where it comes from: the command line, a recipe, a saved run."""

import argparse
import dataclasses
import json

import pytest

from cpu3d.settings import RunConfig, load_config, recipe_config, save_config
from memory_estimator.job import (
    RECIPES,
    Job,
    JobOptions,
    divisors,
    job_from,
    job_of_run,
    notes_on_run,
    policy_is_open,
    statistics_note,
)
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
        ({"shape": (64, -64, 64)}, "input_shape must be three positive numbers"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"cases": -1}, "cases must be at least 0, got -1"),
        ({"optimizer": "lamb"}, "optimizer must be one of adam, sgd, got 'lamb'"),
        ({"engine": "torch"}, "engine must be one of itex, stock, got 'torch'"),
        ({"batch": 16, "micro_batch": 3}, "micro_batch must divide the batch of 16, got 3; give one of 1, 2, 4, 8, 16"),
        ({"batch": 4, "micro_batch": 8}, "micro_batch must divide the batch of 4, got 8; give one of 1, 2, 4"),
        ({"batch": 4, "micro_batch": -4}, "micro_batch must divide the batch of 4, got -4"),
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


@pytest.mark.parametrize(
    ("norm", "micro_batch", "micro"),
    [("instance", 0, 1), ("none", 0, 1), ("batch", 0, 6), ("batch", 2, 2), ("instance", 3, 3), ("instance", 6, 6)],
)
def test_volumes_at_a_time_are_one_or_with_batch_norm_all_unless_asked_for(norm, micro_batch, micro):
    job = Job(UNetConfig(norm=norm), (64, 64, 64), batch=6, micro_batch=micro_batch)
    assert (job.micro, job.parts, job.voxels) == (micro, 6 // micro, micro * 64**3)


def test_micro_batches_are_another_training_to_batch_norm():
    note = statistics_note("batch", 6, 2)
    assert note.startswith("batch norm's statistics are of 2 of a batch's 6 volumes at a time")


@pytest.mark.parametrize(
    ("norm", "given", "kept"),
    [("instance", 1, 0), ("instance", 2, 2), ("instance", 4, 4), ("batch", 4, 0), ("batch", 1, 1), ("batch", 0, 0)],
)
def test_equal_jobs_are_told_apart_by_no_spelling(norm, given, kept):
    job = Job(UNetConfig(norm=norm), batch=4, micro_batch=given)
    assert job.canonical == dataclasses.replace(job, micro_batch=kept)
    assert job.canonical.micro == job.micro


@pytest.mark.parametrize("number", range(1, 65))
def test_divisors_are_all_that_divide_in_order(number):
    assert divisors(number) == tuple(n for n in range(1, number + 1) if number % n == 0)


def test_a_shape_is_held_against_the_depth_that_was_asked_for():
    assert job_from(parsed("--shape 72 72 72 --depth 4")).shape == (72, 72, 72)


def test_options_given_win_over_the_recipe_and_the_rest_stays():
    job = job_from(parsed("--dtype bfloat16 --batch 2"), RECIPES["paper-2020"].job)
    base = RECIPES["paper-2020"].job
    assert job == dataclasses.replace(base, batch=2, unet=dataclasses.replace(base.unet, dtype="bfloat16"))


@pytest.mark.parametrize(
    ("options", "is_open"),
    [
        ("--shape 64 64 64", True),
        ("--shape 64 64 64 --policy auto", True),
        ("--shape 64 64 64 --policy speed", False),
        ("--recipe brats-regions", True),
        ("--recipe brats-regions --policy lean", False),
        ("--run there", False),
        ("--run there --policy auto", True),
        ("--run there --policy lean", False),
    ],
)
def test_a_policy_is_open_where_neither_the_command_nor_a_run_has_one(options, is_open):
    assert policy_is_open(parsed(options)) is is_open


def test_a_policy_left_open_is_for_the_time_being_the_base_s():
    base = Job(UNetConfig(policy="lean"), (64, 64, 64))
    assert job_from(parsed("--policy auto"), base) == base
    assert job_from(parsed("--policy balanced"), base).policy == "balanced"


def test_every_recipe_s_settings_agree_with_its_job():
    for name, recipe in RECIPES.items():
        config, job = recipe_config(name), recipe.job
        assert (config.unet, config.batch, config.optimizer, config.ema) == (job.unet, job.batch, job.optimizer, 0)
        assert config.micro == job.micro
        if config.channels:
            assert job.unet.channels == len(config.channels)
            assert job.unet.outputs == len(config.regions)


CONFIG = RunConfig(
    grid=(64, 80, 96), unet=UNetConfig(filters=8, dtype="bfloat16", policy="balanced"), batch=4, micro_batch=2,
    optimizer="sgd", ema=0.9, engine="stock",
)  # fmt: skip


def test_a_saved_run_is_the_job_that_it_trained(tmp_path):
    save_config(CONFIG, tmp_path)
    expected = Job(
        CONFIG.unet, (64, 80, 96), batch=4, micro_batch=2, optimizer="sgd", engine="stock", averaged=True,
        from_store=True,
    )  # fmt: skip
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


def test_what_the_estimate_of_a_saved_run_leaves_out_is_told(tmp_path):
    save_config(CONFIG, tmp_path)
    assert notes_on_run(tmp_path) == []
    save_config(dataclasses.replace(CONFIG, resolution=0.5), tmp_path)
    (whole,) = notes_on_run(tmp_path)
    assert "validates on whole volumes" in whole
    save_config(dataclasses.replace(CONFIG, mode="patch", device="gpu:1"), tmp_path)
    card, whole = notes_on_run(tmp_path)
    assert "gpu:1" in card
    assert "validates on whole volumes" in whole


@pytest.mark.policy_left_open
def test_a_run_from_before_there_were_policies_is_as_it_was_computed(tmp_path):
    save_config(CONFIG, tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    del content["micro_batch"], content["unet"]["policy"]
    path.write_text(json.dumps(content))
    job, config = job_of_run(tmp_path), load_config(tmp_path)
    assert (job.policy, job.micro) == ("speed", 4) == (config.unet.policy, config.micro)


def damaged(**changes):
    def damage(content):
        content.update(changes)
        return json.dumps(content)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: json.dumps(content)[:-40], "must be JSON"),
        (lambda content: "[1]", "must have schema 1, got None"),
        (damaged(schema=2), "must have schema 1, got 2; use the version that made it"),
        (damaged(unet={"filters": 8, "colour": 3}), "must be complete, got .*colour"),
        (lambda content: json.dumps({"schema": 1}), "must be complete, got config must have the fields"),
        (damaged(grid=[64, 64]), "config.grid must be"),
        (damaged(batch="two"), "config.batch must be int, got two"),
        (damaged(batch=1.5), "config.batch must be int, got 1.5"),
        (damaged(batch=True), "config.batch must be int, got True"),
        (damaged(batch=0), "batch must be at least 1, got 0"),
        (damaged(micro_batch=3), "micro_batch must divide the batch of 4, got 3"),
        (damaged(micro_batch="all"), "config.micro_batch must be int, got all"),
        (damaged(unet={"policy": "fast"}), "policy must be one of speed, balanced, lean, got 'fast'"),
        (damaged(grid=[64, 64.5, 64]), r"config.grid\[1\] must be int, got 64.5"),
        (damaged(unet={"filters": 0}), "filters must be at least 1, got 0"),
        (damaged(ema="much"), "must be complete"),
    ],
)
def test_a_damaged_run_is_refused_by_its_file(damage, message, tmp_path):
    save_config(CONFIG, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(damage(json.loads(path.read_text())))
    with pytest.raises(ValueError, match=message) as error:
        job_of_run(tmp_path)
    assert str(tmp_path) in str(error.value)

"""A job, and where it comes from: the command line, a recipe, a saved run."""

import argparse
import dataclasses
import json

import pytest

from cpu3d.config import RunConfig, save_config
from cpu3d.recipes import RECIPES
from memory_estimator.job import Job
from memory_estimator.options import add_job_options, job_from, network_from
from memory_estimator.recipes import JOBS
from memory_estimator.saved_run import job_of_run
from models.config import UNetConfig


def parsed(text):
    parser = argparse.ArgumentParser()
    add_job_options(parser)
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
        ({"policy": "lean"}, "policy must be one of speed, got 'lean'"),
    ],
)
def test_a_job_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Job(**changes)


def test_every_option_reaches_the_job():
    job = job_from(parsed(
        "--shape 64 80 96 --batch 2 --micro-batch 2 --channels 1 --classes 2 --filters 8 --depth 4 --network cicek2016 "
        "--norm batch --up upsampling --residual --deep-supervision --dtype float32 --optimizer sgd --policy speed "
        "--engine stock --threads 3"
    ))  # fmt: skip
    unet = UNetConfig(
        channels=1, outputs=2, filters=8, depth=4, network="cicek2016", norm="batch", up="upsampling", residual=True,
        deep_supervision=True, dtype="float32",
    )  # fmt: skip
    assert job == Job(unet, (64, 80, 96), batch=2, optimizer="sgd", engine="stock", threads=3)


def test_a_shape_is_held_against_the_depth_that_was_asked_for():
    assert job_from(parsed("--shape 72 72 72 --depth 4")).shape == (72, 72, 72)


def test_options_given_win_over_the_recipe_and_the_rest_stays():
    job = job_from(parsed("--dtype bfloat16 --batch 2"), JOBS["paper-2020"])
    base = JOBS["paper-2020"]
    assert job == dataclasses.replace(base, batch=2, unet=dataclasses.replace(base.unet, dtype="bfloat16"))


@pytest.mark.parametrize("policy", ["balanced", "lean"])
def test_policies_to_come_are_refused_with_the_reason(policy):
    with pytest.raises(ValueError, match=f"policy must be one of speed, got {policy}; the trainer has no other yet"):
        job_from(parsed(f"--shape 64 64 64 --policy {policy}"))


@pytest.mark.parametrize("micro_batch", [0, 1, 8, -4])
def test_a_micro_batch_is_the_batch_so_far(micro_batch):
    with pytest.raises(
        ValueError, match=rf"micro-batch must be the batch of 4, got {micro_batch}; .* comes with the memory policies"
    ):
        job_from(parsed(f"--shape 64 64 64 --batch 4 --micro-batch {micro_batch}"))


def test_without_a_shape_nothing_can_be_said():
    with pytest.raises(ValueError, match="shape must be given, got none; add --shape X Y Z, --recipe or --run"):
        job_from(parsed("--batch 2"))


def test_a_network_not_asked_about_is_the_default_one():
    assert network_from(parsed(""), "float32") == UNetConfig()


def test_every_recipe_of_the_trainer_has_its_job_and_agrees_with_it():
    assert set(JOBS) == set(RECIPES)
    for name, job in JOBS.items():
        config = RECIPES[name]()
        assert (config.unet, config.batch, config.optimizer, config.ema) == (job.unet, job.batch, job.optimizer, 0)
        if config.channels:
            assert job.unet.channels == len(config.channels)
            assert job.unet.outputs == len(config.regions)


CONFIG = RunConfig(
    grid=(64, 80, 96), unet=UNetConfig(filters=8, dtype="bfloat16"), batch=2, optimizer="sgd", ema=0.9, engine="stock",
)  # fmt: skip


def test_a_saved_run_is_the_job_that_it_trained(tmp_path):
    save_config(CONFIG, tmp_path)
    expected = Job(
        CONFIG.unet, (64, 80, 96), batch=2, optimizer="sgd", engine="stock", averaged=True, from_store=True,
    )  # fmt: skip
    assert job_of_run(tmp_path) == expected


@pytest.mark.parametrize("engine", ["itex", "stock"])
def test_a_run_that_left_the_engine_open_takes_the_one_that_is_there(engine, tmp_path):
    save_config(dataclasses.replace(CONFIG, engine="auto"), tmp_path)
    assert job_of_run(tmp_path, engine).engine == engine


def test_a_run_without_onednn_is_not_estimated(tmp_path):
    save_config(dataclasses.replace(CONFIG, engine="stock-no-onednn"), tmp_path)
    with pytest.raises(ValueError, match="engine must be itex or stock to be estimated, got stock-no-onednn"):
        job_of_run(tmp_path)


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
        (lambda content: json.dumps({"schema": 1}), "must be complete, got KeyError"),
        (damaged(grid=[64, 64]), "input_shape must be three positive numbers"),
        (damaged(batch="two"), "batch must be a whole number, got 'two'"),
        (damaged(batch=1.5), "batch must be a whole number, got 1.5"),
        (damaged(batch=True), "batch must be a whole number, got True"),
        (damaged(batch=0), "batch must be at least 1, got 0"),
        (damaged(grid=[64, 64.5, 64]), "grid Y must be a whole number, got 64.5"),
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


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must hold a config\.json, got No such file"):
        job_of_run(tmp_path / "nowhere")

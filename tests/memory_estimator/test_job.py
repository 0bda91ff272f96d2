"""A job, and where it comes from: the command line, a recipe, a saved run."""

import argparse
import dataclasses
import json

import pytest

from cpu3d.chosen import recipe_settings
from memory_estimator.common.schema import add_options
from memory_estimator.job import (
    RECIPES,
    Job,
    JobOptions,
    job_from,
    policy_is_open,
    why_strides,
)
from memory_estimator.sources import read_run, source_job
from models.config import UNetConfig


def parsed(text):
    parser = argparse.ArgumentParser()
    add_options(parser, JobOptions)
    return parser.parse_args(text.split())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"shape": (64, 64, 60)},
            r"shape \(64, 64, 60\) must be divisible by 16\b.* \(64, 64, 64\)",
        ),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"optimizer": "lamb"}, "optimizer must be one of muon, adam, sgd, got 'lamb'"),
        (
            {"unet": UNetConfig(depth=3, strides=((2, 2, 1), (2, 2, 2))), "shape": (64, 62, 20)},
            r"shape \(64, 62, 20\) must be divisible by 4, 4 and 2 .* \(64, 64, 20\) or .*60",
        ),
        ({"engine": "torch"}, "engine must be one of itex, stock, got 'torch'"),
        (
            {"batch": 16, "micro_batch": 3},
            "micro_batch must divide the batch of 16, got 3.* 1, 2, 4, 8, 16",
        ),
    ],
)
def test_a_job_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Job(**changes)


def test_every_option_reaches_the_job():
    line = (
        "--shape 64 80 96 --batch 4 --micro-batch 2 --channels 1 --classes 2 --filters 8 "
        "--depth 4 --network cicek2016 --norm batch --up upsampling --residual "
        "--deep-supervision --dtype float32 --optimizer sgd --policy lean --engine stock "
        "--threads 3 --strides 2,2,1 2,2,2 1,2,2"
    )
    job = job_from(parsed(line))
    unet = UNetConfig(
        channels=1,
        outputs=2,
        filters=8,
        depth=4,
        network="cicek2016",
        norm="batch",
        up="upsampling",
        residual=True,
        deep_supervision=True,
        dtype="float32",
        policy="lean",
        strides=((2, 2, 1), (2, 2, 2), (1, 2, 2)),
    )
    assert job == Job(
        unet, (64, 80, 96), batch=4, micro_batch=2, optimizer="sgd", engine="stock", threads=3
    )


@pytest.mark.parametrize(
    ("options", "is_open"),
    [
        ("--shape 64 64 64 --policy auto", True),
        ("--recipe brats-regions", True),
        ("--recipe brats-regions --policy lean", False),
        ("--run there --policy auto", True),
    ],
)
def test_a_policy_is_open_where_neither_the_command_nor_a_run_has_one(options, is_open):
    assert policy_is_open(parsed(options)) is is_open


def test_every_recipe_s_settings_agree_with_its_job():
    for name, recipe in RECIPES.items():
        config = recipe_settings({"recipe": name})
        job = recipe.job
        assert (config.unet, config.batch, config.optimizer, config.ema) == (
            job.unet,
            job.batch,
            job.optimizer,
            0,
        )
        assert config.micro == job.micro
        if config.channels:
            assert (job.unet.channels, job.unet.outputs) == (
                len(config.channels),
                len(config.regions),
            )


JOB = Job(
    UNetConfig(filters=8, dtype="bfloat16", policy="lean"),
    (64, 80, 96),
    batch=4,
    micro_batch=2,
    optimizer="sgd",
    engine="stock",
    averaged=True,
    from_store=True,
    cases=7,
    case_bytes=123,
)


def write_plan(folder, job=JOB, workers=2, settings=(), **changes):
    """The folder of a run with that plan."""
    config = {
        "device": "cpu",
        "mode": "whole",
        "resolution": 1,
        "coarse_steps": 0,
        "read_mode": "auto",
    }
    job = dataclasses.asdict(job) if isinstance(job, Job) else job
    plan = {"schema": 1, "workers": workers, "job": job, "config": {**config, **dict(settings)}}
    (folder / "plan.json").write_text(json.dumps({**plan, **changes}))
    return folder


def test_a_run_is_the_job_of_its_plan_and_what_its_estimate_leaves_out_is_said(tmp_path):
    assert read_run(write_plan(tmp_path)) == (JOB, [], 2)
    (note,) = read_run(write_plan(tmp_path, settings={"resolution": 0.5})).notes
    assert "validates on whole volumes" in note
    of_card, again = read_run(
        write_plan(tmp_path, settings={"mode": "patch", "device": "gpu:1"})
    ).notes
    assert ("gpu:1" in of_card, again) == (True, note)


@pytest.mark.parametrize("strides", [(), ((2, 2, 1), (2, 2, 1), (2, 2, 2), (2, 2, 2))])
def test_a_run_keeps_its_strides_and_one_that_halves_all_axes_names_none(tmp_path, strides):
    job = JOB.with_unet(strides=strides)
    fields = json.loads(json.dumps(job.fields()))
    assert ("strides" in fields["unet"]) == bool(strides)
    assert read_run(write_plan(tmp_path, fields)).job == job


@pytest.mark.parametrize("turned", [False, True])
def test_a_run_of_a_version_before_gamma_is_read(tmp_path, turned):
    fields = {**dataclasses.asdict(JOB), "resampled": turned}
    del fields["reworked"]
    assert read_run(write_plan(tmp_path, fields)) == (JOB, [], 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "of schema 1, got schema 2"),
        ({"job": {**dataclasses.asdict(JOB), "unet": {}}}, "got a job without all of its fields"),
        ({"job": {"batch": 4, "micro_batch": 3}}, "micro_batch must divide the batch of 4, got 3"),
        ({"workers": 3}, "got 3 workers for batches of 4"),
        (
            {"job": {"unet": {"policy": "balanced"}}},
            "policy must be one of speed, lean, got 'balanced'",
        ),
        ({"job": {"shape": [64, 64.5, 64]}}, r"job.shape\[1\] must be int, got 64.5"),
        ({"config": {}}, "plan.config must have its fields and no others, got no device"),
    ],
)
def test_a_damaged_run_is_refused_by_its_file(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        read_run(write_plan(tmp_path, **changes))
    assert "plan.json" in str(error.value)


# --- Spacing, and a store ---


@pytest.mark.parametrize(
    ("line", "shape", "strides"),
    [
        ("--shape 144 192 144", (144, 192, 144), ()),
        ("--shape 138 177 144 --spacing 1 1 1", (144, 192, 144), ()),
        (
            "--shape 145 182 29 --spacing 1 1 5",
            (160, 192, 32),
            ((2, 2, 1), (2, 2, 1), (2, 2, 2), (2, 2, 2)),
        ),
        ("--shape 145 182 29 --spacing 1 1 5 --depth 3", (148, 184, 29), ((2, 2, 1),) * 2),
        ("--recipe brats-regions --spacing 1 1 1", (144, 192, 144), ()),
        ("--shape 9 9 9 --spacing 1 1 5 --depth 2 --strides 2,1,2", (10, 9, 10), ((2, 1, 2),)),
    ],
)
def test_strides_follow_from_a_spacing_and_the_shape_is_padded_to_them(line, shape, strides):
    args = parsed(line)
    job = job_from(args, source_job(args).job)
    assert (job.shape, job.unet.strides) == (shape, strides)
    is_open = "--spacing" in line and "--strides" not in line
    assert bool(why_strides(args, job)) == is_open


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--run there --spacing 1 1 5", "--spacing must come without --run"),
        ("--store nowhere", "store nowhere must hold a finished manifest.json, got none"),
    ],
)
def test_a_spacing_of_a_run_and_what_is_no_store_are_refused(line, message):
    with pytest.raises(ValueError, match=message):
        source_job(parsed(line))


MANIFEST = {
    "schema": 1,
    "channels": ["CT"],
    "regions": {"liver": [1, 2], "tumour": [2]},
    "split": {"train": ["a", "b"], "val": ["c"], "test": ["d"]},
    "largest_shape": [100, 100, 30],
    "largest_box": [90, 80, 20],
    "records": {"file": "cases-0.jsonl"},
}


def write_store(folder, **changes):
    sizes = {"a": 1.0, "b": 5.0, "c": 5.0, "d": 1.0}
    cases = [{"case_id": name, "spacing_mm": [1, 1, z], "more": 0} for name, z in sizes.items()]
    (folder / "cases-0.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))
    (folder / "manifest.json").write_text(json.dumps({**MANIFEST, **changes}))
    return folder


@pytest.mark.parametrize(("more", "depth"), [("", 5), (" --depth 3 --classes 1", 3)])
def test_a_store_is_a_job_by_training_and_validation_cases_and_other_options_override_it(
    tmp_path, more, depth
):
    args = parsed(f"--store {write_store(tmp_path)}{more}")
    job = job_from(args, source_job(args).job)
    assert (job.unet.channels, job.unet.outputs) == (1, 1 if more else 2)
    assert (job.cases, job.from_store, job.case_bytes) == (2, True, 100 * 100 * 30 * 3)
    assert job.unet.every_stride[:2] == ((2, 2, 1), (2, 2, 1))  # the median is 5 mm
    assert len(job.unet.every_stride) == depth - 1
    assert job.shape[2] == 20


def test_a_store_without_training_and_validation_cases_is_a_job_by_all(tmp_path):
    none = {"train": [], "val": [], "test": ["a", "b", "c", "d"]}
    args = parsed(f"--store {write_store(tmp_path, split=none)}")
    job = job_from(args, source_job(args).job)
    assert job.cases == 0
    assert args.spacing == (1, 1, 3)  # the median of 1, 5, 5, 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "of schema 1, got schema 2"),
        ({"largest_box": [1, 2]}, "largest_box"),
        ({"records": {"file": "gone"}}, "manifest.json .* got no gone beside it"),
    ],
)
def test_a_damaged_store_is_refused_by_its_file(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        source_job(parsed(f"--store {write_store(tmp_path, **changes)}"))

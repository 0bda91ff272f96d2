"""A job, and where it comes from: the command line, a recipe, a saved run."""

import argparse
import dataclasses
import json

import pytest

from cpu3d.settings import recipe_settings
from memory_estimator.common.schema import add_options
from memory_estimator.job import RECIPES, Job, JobOptions, job_from, statistics_note, why_strides
from memory_estimator.sources import PLAN_SCHEMA, JobSource, read_run, source_job
from memory_estimator.training import ExtraMemory, Schedule
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
        (
            {"batch": 16, "micro_batch": 3},
            "--micro-batch must divide the batch of 16, got 3.* 1, 2, 4, 8, 16",
        ),
    ],
)
def test_a_job_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Job(**changes)


def test_batch_norm_in_parts_of_a_batch_has_a_note():
    of_volumes = [statistics_note("batch", 4, micro) for micro in (4, 2)]
    assert [*map(bool, of_volumes)] == [False, True]


def test_every_option_reaches_the_job():
    line = (
        "--shape 64 80 96 --batch 4 --micro-batch 2 --classes 2 --network cicek2016 "
        "--residual --dtype float32 --optimizer sgd --policy lean --engine stock --threads 3 "
        "--strides 2,2,1 2,2,2 1,2,2"
    )
    unet = UNetConfig(
        outputs=2,
        depth=4,
        network="cicek2016",
        residual=True,
        policy="lean",
        strides=((2, 2, 1), (2, 2, 2), (1, 2, 2)),
    )
    assert job_from(parsed(line)) == Job(
        unet, (64, 80, 96), batch=4, micro_batch=2, optimizer="sgd", engine="stock", threads=3
    )


def test_every_recipe_s_settings_agree_with_its_job():
    for name, recipe in RECIPES.items():
        config = recipe_settings({"recipe": name})
        job = recipe.job
        trained = (config.unet, config.batch, config.micro, config.optimizer)
        assert trained == (job.unet, job.batch, job.micro, job.optimizer)
        if config.channels:
            maps = (len(config.channels), len(config.regions))
            assert maps == (job.unet.channels, job.unet.outputs)
    paper = recipe_settings({"recipe": "paper-2020"})
    assert (paper.epochs, paper.curriculum, paper.extent) == (25, "off", "full")


JOB = Job(
    UNetConfig(filters=8, residual=True, dtype="bfloat16", policy="lean"),
    (64, 80, 96),
    batch=8,
    micro_batch=2,
    optimizer="sgd",
    engine="stock",
    freeze="encoder",
    from_store=True,
    cases=7,
    case_bytes=123,
)


SCHEDULE = Schedule(steps=9, coarse_steps=6, coarse_shape=(32, 48, 48), extra=ExtraMemory(copies=1))


def write_plan(folder, job=JOB, workers=2, device="cpu", schedule=SCHEDULE, **changes):
    """The folder of a run with that plan."""
    plan = {
        "schema": PLAN_SCHEMA,
        "workers": workers,
        "job": job,
        "config": {"device": device},
        "smaller_grids": None,
        "schedule": schedule,
        **changes,
    }
    (folder / "plan.json").write_text(json.dumps(plan, default=dataclasses.asdict))
    return folder


def test_a_run_is_the_job_of_its_plan_and_what_its_estimate_leaves_out_is_said(tmp_path):
    assert read_run(write_plan(tmp_path)) == JobSource(JOB, [], 2, SCHEDULE)
    words = (
        "64 x 80 x 96 x 4 -> 3, unet3d, 5 levels, 8 filters, instance norm, residual, batch 8, "
        "2 at a time, bfloat16, sgd, stock, policy lean, encoder frozen, 1 thread"
    )
    assert JOB.describe() == words
    (of_card,) = read_run(write_plan(tmp_path, device="gpu:1")).notes
    assert "gpu:1" in of_card


@pytest.mark.parametrize("more", ["--shape 64 64 64", "--depth 4", "--strides 2,2,1", "--batch 2"])
def test_options_that_change_the_steps_of_a_run_leave_a_step_alone(more, tmp_path):
    run = f"--run {write_plan(tmp_path)} "
    source = source_job(parsed(run + more))
    assert source.schedule == Schedule()
    assert any(more.split()[0] in note for note in source.notes)
    assert source_job(parsed(run + "--filters 16")).schedule == SCHEDULE


@pytest.mark.parametrize("strides", [(), ((2, 2, 1), (2, 2, 1), (2, 2, 2), (2, 2, 2))])
def test_a_run_keeps_its_strides_and_one_that_halves_all_axes_names_none(tmp_path, strides):
    job = JOB.with_unet(strides=strides)
    fields = json.loads(json.dumps(job.fields()))
    assert ("strides" in fields["unet"]) == bool(strides)
    assert read_run(write_plan(tmp_path, fields)).job == job


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 0}, f"of schema {PLAN_SCHEMA}, got schema 0; use the version"),
        ({"job": {**dataclasses.asdict(JOB), "unet": {}}}, "got a job without all of its fields"),
        ({"workers": 3}, "got 3 workers for batches of 8"),
        ({"workers": 0}, "got 0 workers"),
        ({"config": {}}, "got no 'device'"),
    ],
)
def test_a_damaged_run_is_refused_by_its_file(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        read_run(write_plan(tmp_path, **changes))
    assert "plan.json" in str(error.value)


# --- Spacing ---


@pytest.mark.parametrize(
    ("line", "shape", "strides"),
    [
        ("--shape 138 177 144 --spacing 1 1 1", (144, 192, 144), ()),
        ("--shape 145 182 29 --spacing 1 1 5 --depth 3", (148, 184, 29), ((2, 2, 1),) * 2),
        # four levels: 36 50 35, 18 25 18, 9 13 9, 5 7 5
        ("--shape 36 50 35 --spacing 1 1 1", (40, 56, 40), ()),
        ("--shape 9 9 9 --spacing 1 1 5 --depth 2 --strides 2,1,2", (10, 9, 10), ((2, 1, 2),)),
    ],
)
def test_strides_follow_from_a_spacing_and_the_shape_is_padded_to_them(line, shape, strides):
    args = parsed(line)
    job = job_from(args, source_job(args).job)
    assert (job.shape, job.unet.strides) == (shape, strides)
    sides = " x ".join(line.split()[1:4])
    assert why_strides(args, job).startswith(sides) != ("--strides" in line)

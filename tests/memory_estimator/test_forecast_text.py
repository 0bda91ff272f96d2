"""A forecast for reading: its figures, worked out by hand."""

import dataclasses

import pytest

from memory_estimator.accuracy import Bound, load_accuracy
from memory_estimator.calibration import Scale, load_constants
from memory_estimator.common.units import format_seconds
from memory_estimator.forecast_text import steps_table, time_line, verdict
from memory_estimator.job import Job
from memory_estimator.training import Schedule
from models.config import UNetConfig

GIB = 2**30
SCALE = Scale(1.5, 2, "2026-11-28", "96 x 96 x 96 in bfloat16")
MEASURED = Job(UNetConfig(dtype="bfloat16"), (96, 96, 96), threads=2)
"""Of a kind whose errors are known on the host of "avx512_bf16"."""


def test_a_table_has_steps_grids_and_seconds_as_of_another_host():
    """15 coarse steps of 2 s, then 5 full ones of 10 s; a third of a step for each of 3 cases,
    twice, and for one in the end."""
    counts = {"validations": 2, "held_out": 3, "decided": 1}
    schedule = Schedule(steps=20, coarse_steps=15, coarse_shape=(16, 16, 64), **counts)
    job = Job(UNetConfig(filters=4, depth=3, policy="lean"), (32, 32, 32), threads=2)
    made = schedule.forecast(job, load_constants("avx2"), load_accuracy())
    assert made.coarse.job.policy == "speed"
    peaks = {"allocator_peak_bytes": 0, "process_peak_bytes": GIB}
    coarse = dataclasses.replace(made.coarse, step_s=2.0, **peaks)
    full = dataclasses.replace(made.full, step_s=10.0, coarse=coarse, **peaks)
    forecast = dataclasses.replace(made, full=full)
    table = steps_table(forecast)
    *steps, whole = table.rows
    assert steps == [
        ("coarse steps", "15", "16 x 16 x 32", "2 s", "-", "1.00 GiB"),
        ("full steps", "5", "32 x 32 x 32", "10 s", "-", "1.00 GiB"),
    ]
    assert (*whole[:4], whole[5]) == ("the whole run", "20", "", "", "1.00 GiB")
    assert "a step, uncalibrated" in table.columns
    content = forecast.to_json()
    assert (content["step_s"], content["coarse"]["step_s"]) == (10.0, 2.0)
    assert content["run_process_peak_bytes"] == GIB
    words = "80 s of steps, 8 s of validation, 3.33 s of post-processing"
    assert time_line(forecast) == f"about 91.3 s in all: {words}"


@pytest.mark.parametrize(
    ("batch", "workers", "ninths"),
    [
        (1, 1, (3, 3, 3)),
        (2, 1, (1, 3, 5)),  # of two the larger one decides
        (2, 2, (1, 3, 5)),
    ],
)
def test_seconds_are_the_mean_over_cases_of_which_the_smallest_and_the_median_are_named(
    batch, workers, ninths
):
    grids = sorted(((32, 32, 32), (64, 64, 64), MEASURED.shape) * 30)
    job = dataclasses.replace(MEASURED, batch=batch, micro_batch=batch // workers)
    constants = load_constants("avx2")
    made = Schedule(grids=grids).forecast(job, constants, load_accuracy(), workers=workers)
    steps = [*dict(made.by_case).values(), made.full]
    assert [step.job.shape[0] for step in steps] == [32, 64, 96]
    shown = [row[3] for row in steps_table(made).rows[1:-1]]
    assert shown == [format_seconds(step.step_s) for step in steps]
    expected = sum(share * step.step_s for share, step in zip(ninths, steps)) / 9
    assert made.full_step_s == pytest.approx(expected)


@pytest.mark.parametrize(
    ("scales", "budget_s", "name", "time"),
    [
        ({}, None, "a step, predicted", "60 s in all (56 s to 64 s): "),
        ({"bfloat16": SCALE}, None, "a step, calibrated", "about 60 s in all: "),
        ({}, 42.0, "a step, predicted", "60 s in all (56 s to 62 s): "),
        ({}, 30.0, "a step, predicted", "about 50 s in all: "),  # whatever a step takes
    ],
)
def test_hours_are_a_range_where_errors_are_known_within_the_budget(scales, budget_s, name, time):
    schedule = Schedule(steps=4, budget_s=budget_s, validations=3, held_out=2)
    constants = dataclasses.replace(load_constants("avx512_bf16"), scales=scales)
    made = schedule.forecast(MEASURED, constants, load_accuracy())
    kind = dataclasses.replace(made.full.kind, step_s=Bound(0.02, 0.1))
    full = dataclasses.replace(made.full, step_s=10.0, kind=kind)
    forecast = dataclasses.replace(made, full=full)
    assert name in steps_table(forecast).columns
    assert time_line(forecast).startswith(time)


@pytest.mark.parametrize(("needed", "says"), [(4, "0 KiB to spare"), (5, "1.00 GiB short")])
def test_whether_it_fits_is_one_sentence(needed, says):
    sentence = verdict(needed * GIB, 4 * GIB, "free")
    assert says in sentence
    assert sentence.startswith("does not fit" if needed > 4 else "fits")

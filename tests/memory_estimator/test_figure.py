"""What the estimator's pictures show; how they look is for the eye."""

import dataclasses
import math

import pytest

from memory_estimator.__main__ import BATCHES, FILTERS, size_lines
from memory_estimator.figure import draw_sizes, draw_timeline
from memory_estimator.job import Job
from memory_estimator.validation import Measured
from models.config import UNetConfig

JOB = Job(UNetConfig(filters=16))


def fake(job):
    return math.prod(job.shape) * job.batch * job.unet.filters


def test_lines_go_through_the_predictions_by_batch_and_by_filters():
    (_, by_batch), (_, by_filters) = size_lines(JOB, fake, sides=(64, 128))
    assert [line.name for line in by_batch] == [f"batch {batch}" for batch in BATCHES]
    assert [line.name for line in by_filters] == [f"{filters} filters" for filters in FILTERS]
    assert by_batch[1].points == [(64**3, 64**3 * 2 * 16), (128**3, 128**3 * 2 * 16)]
    # Sides are rounded up to what the network halves.
    (_, deep), _ = size_lines(JOB.with_unet(depth=7), fake, sides=(64, 80, 128))
    assert [voxels for voxels, _ in deep[0].points] == [64**3, 128**3]


def test_a_measured_point_lies_on_the_line_of_its_settings():
    job = dataclasses.replace(JOB, shape=(96, 96, 96), batch=2, micro_batch=2, threads=9)
    alike = Measured(job, process_peak_bytes=7, step_s=1)
    others = [dataclasses.replace(alike, job=other) for other in (job.with_unet(depth=3), job.with_unet(norm="none"))]
    failed = dataclasses.replace(alike, failure="exited with -9")
    (_, by_batch), (_, by_filters) = size_lines(JOB, fake, [alike, *others, failed], sides=(64,))
    points = {line.name: line.measured for line in (*by_batch, *by_filters)}
    assert points.pop("batch 2") == [(96**3, 7)]
    assert not any(points.values())


def test_sizes_are_drawn_with_and_without_points_and_host():
    point = Measured(dataclasses.replace(JOB, shape=(96, 96, 96)), process_peak_bytes=2**30, step_s=1)
    panels = size_lines(JOB, fake, [point], sides=(64, 512))
    for host_bytes in (None, 2**40):
        assert draw_sizes(panels, title="t", host_bytes=host_bytes).startswith(b"\x89PNG")


OPS, LIVE = ["encoder0_conv1", "encoder1_conv1", "update"], [2**20, 3 * 2**20, 2**20]
CALLS = [(0.0, "a", 2**20), (1.0, "b", 2**21), (2.0, "", 2**20)]


@pytest.mark.parametrize(
    ("ops", "live", "seconds", "measured"),
    [(OPS, LIVE, [1, 2, 3], CALLS), ([], [], [], CALLS), ([], [], [], []), (OPS, LIVE, [0] * 3, [])],
)
def test_a_step_is_drawn_from_prediction_measurement_or_neither(ops, live, seconds, measured):
    assert draw_timeline(ops, live, seconds, title="t", measured=measured).startswith(b"\x89PNG")

"""Pictures: unusual input still gives one."""

import io
import time

import numpy as np
import pytest
from matplotlib.image import imread
from scipy.ndimage import median_filter

from cpu3d.report.pictures import Line, chart, running_median, strips


@pytest.mark.parametrize("count", [0, 1, 3, 500])
def test_curves_of_any_length_with_holes_in_them_can_be_drawn(count):
    y = np.linspace(1, 0, count)
    y[1:2] = np.nan
    lines = [
        Line("training", np.arange(count), y, "#0072b2", is_dense=True),
        Line("", [1], [float("inf")], "#000000"),
    ]
    drawn = [
        chart(lines, title="loss", y_label="loss"),
        chart([], title="nothing", y_label="", y_range=(0, None)),
    ]
    assert drawn[0][:24] == drawn[1][:24], "a PNG file of the same width and height"
    strips(
        {"WT": [0.9] * count, "TC": [0.5], "ET": []}, title="Dice", y_label="Dice", y_range=(0, 1)
    )


def test_a_picture_shows_its_values_and_leaves_out_those_that_are_not_finite():
    line = lambda x, y: chart([Line("", x, y, "#000000")], title="", y_label="")
    dots = lambda x, y: strips({"WT": y}, title="", y_label="")
    for draw in (line, dots):
        assert (
            draw([0, 1, 2], [1, 2, 4]) == draw([0, 1, 2], [1, 2, 4]) != draw([0, 1, 2], [1, 3, 4])
        )
    assert line([0, 1, 2], [1, np.inf, 4]) == line([0, 2], [1, 4])


# --- Long runs ---


def drawn(x, y, **line):
    """The dots of a curve's chart, 0 to 1."""
    return imread(io.BytesIO(chart([Line("", x, y, "#000000", **line)], title="", y_label="")))


def spiked(count):
    """A curve of noise with a spike of one point, up and down, and a hole."""
    y = np.random.default_rng(0).normal(size=count)
    y[count // 3] = 30
    y[count // 2] = -30
    y[count // 4 : count // 4 + 9] = np.nan
    return y


@pytest.mark.parametrize("is_dense", [False, True])
def test_a_long_curve_looks_as_if_all_of_its_points_were_drawn(is_dense, monkeypatch):
    x, y = np.arange(40_000), spiked(40_000)
    thinned = drawn(x, y, is_dense=is_dense, marks="-")
    monkeypatch.setattr("cpu3d.report.pictures.COLUMNS", 40_000)
    every = drawn(x, y, is_dense=is_dense, marks="-")
    assert (np.abs(thinned - every) > 0.2).mean() < 0.0005, "a few dots at the edge of a line"


def test_a_million_points_are_drawn_in_seconds():
    begin = time.process_time()
    drawn(np.arange(1_000_000), spiked(1_000_000), is_dense=True)
    assert time.process_time() - begin < 20, "47 minutes by a filter over every point"


@pytest.mark.parametrize("size", [5, 6, 30])
def test_the_running_median_is_that_of_a_filter(size):
    y = np.random.default_rng(1).normal(size=60)
    at = np.array([0, 1, 7, 30, 58, 59])
    np.testing.assert_array_equal(running_median(y, size, at), median_filter(y, size)[at])

"""Pictures: unusual input still gives one."""

import time

import numpy as np
import pytest

from cpu3d.report.pictures import Line, chart, strips


@pytest.mark.parametrize("count", [0, 1, 500])
def test_curves_of_any_length_with_holes_in_them_can_be_drawn(count):
    y = np.linspace(1, 0, count)
    y[1:2] = np.nan
    lines = [
        Line("training", np.arange(count), y, "#0072b2", is_dense=True),
        Line("", [1], [float("inf")], "#000000"),
    ]
    drawn = chart(lines, title="loss", y_label="loss")
    empty = chart([], title="nothing", y_label="", y_range=(0, None))
    assert drawn[:24] == empty[:24], "a PNG file of the same width and height"
    strips({"WT": [0.9] * count, "TC": [0.5], "ET": []}, title="Dice", y_label="Dice")


def test_a_picture_shows_its_values_and_leaves_out_those_that_are_not_finite():
    line = lambda x, y: chart([Line("", x, y, "#000000")], title="", y_label="")
    dots = lambda x, y: strips({"WT": y}, title="", y_label="")
    for draw in (line, dots):
        assert (
            draw([0, 1, 2], [1, 2, 4]) == draw([0, 1, 2], [1, 2, 4]) != draw([0, 1, 2], [1, 3, 4])
        )
    assert line([0, 1, 2], [1, np.inf, 4]) == line([0, 2], [1, 4])


def test_a_million_points_are_drawn_in_seconds_with_the_only_one_that_stands_out():
    x = np.arange(1_000_000)
    y = np.random.default_rng(0).normal(size=x.size)
    y[300_000:300_009] = np.nan
    begin = time.process_time()
    drawn = [chart([Line("", x, y, "#000000", is_dense=True)], title="", y_label="")]
    y[500_000] = 30
    drawn.append(chart([Line("", x, y, "#000000", is_dense=True)], title="", y_label=""))
    assert time.process_time() - begin < 20, "47 minutes by a filter over every point"
    assert drawn[0] != drawn[1]

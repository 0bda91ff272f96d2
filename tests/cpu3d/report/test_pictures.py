"""Pictures: unusual input still gives one."""

import numpy as np
import pytest

from cpu3d.report.pictures import Line, chart, strips


@pytest.mark.parametrize("count", [0, 1, 3, 500])
def test_curves_of_any_length_with_holes_in_them_can_be_drawn(count):
    y = np.linspace(1, 0, count)
    y[1:2] = np.nan
    lines = [Line("training", np.arange(count), y, "#0072b2", measured=False), Line("", [1], [float("inf")], "#000000")]
    drawn = [chart(lines, title="loss", y_label="loss"), chart([], title="nothing", y_label="", y_range=(0, None))]
    drawn.append(strips({"WT": [0.9] * count, "TC": [0.5], "ET": []}, title="Dice", y_label="Dice", y_range=(0, 1)))
    assert all(png.startswith(b"\x89PNG\r\n\x1a\n") for png in drawn)

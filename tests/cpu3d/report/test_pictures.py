"""Pictures: unusual input still gives one."""

import io

import numpy as np
import pytest
from matplotlib import image as png_image

from cpu3d.report.pictures import Line, chart, strips

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def pixels(png):
    assert png[:8] == SIGNATURE
    return png_image.imread(io.BytesIO(png))[..., :3]


@pytest.mark.parametrize("count", [0, 1, 3, 500])
def test_curves_of_any_length_with_holes_in_them_can_be_drawn(count):
    y = np.linspace(1, 0, count)
    y[1:2] = np.nan
    lines = [Line("training", np.arange(count), y, "#0072b2", measured=False), Line("", [1], [float("inf")], "#000000")]
    pixels(chart(lines, title="loss", y_label="loss"))
    pixels(chart([], title="nothing", y_label="", y_range=(0, None)))
    pixels(strips({"WT": [0.9] * count, "TC": [0.5], "ET": []}, title="Dice", y_label="Dice", y_range=(0, 1)))

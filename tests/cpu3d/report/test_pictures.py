"""Pictures: unusual input still gives one."""

import numpy as np

from cpu3d.report.pictures import Line, chart, strips


def curve(x, y, **style):
    return chart([Line("", x, y, "#000000", **style)], title="", y_label="")


def test_a_picture_shows_its_values_and_leaves_out_those_that_are_not_finite():
    dots = lambda x, y: strips({"WT": y}, title="", y_label="")
    for draw in (curve, dots):
        same, again, other = (draw([0, 1, 2], [1, middle, 4]) for middle in (2, 2, 3))
        assert same == again != other
    assert curve([0, 1, 2], [1, np.inf, 4]) == curve([0, 2], [1, 4])
    line = Line("", [1, 2], [1, 4], "#000000")
    ways = ({}, {"switch": 2}, {"log": True}, {"y_range": (0, 9)})
    assert len({chart([line], title="", y_label="", **how) for how in ways}) == len(ways)

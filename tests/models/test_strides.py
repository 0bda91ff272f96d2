"""Which axes are halved, worked out by nnU-Net's rule."""

import pytest

from models.config import UNetConfig
from models.strides import checked_strides, divisors_text, strides_for, strides_text


@pytest.mark.parametrize(
    ("spacing_mm", "shape", "depth", "strides"),
    [
        # cubes: 160 192 160, 80 96 80, 40 48 40, 20 24 20, 10 12 10
        ((1, 1, 1), (160, 192, 160), 5, "2,2,2 2,2,2 2,2,2 2,2,2"),
        # 5 mm are 6.3, 3.1, then 1.6 times the spacing in plane: 0.8, 1.6, 3.2
        ((0.8, 0.8, 5), (256, 256, 20), 5, "2,2,1 2,2,1 2,2,2 2,2,2"),
        # 5 slices would become 3
        ((0.5, 0.5, 4), (320, 320, 5), 6, "2,2,1 2,2,1 2,2,1 2,2,1 2,2,1"),
        # twice as long is too long, and after one halving the same
        ((1, 1, 2), (128, 128, 64), 4, "2,2,1 2,2,2 2,2,2"),
        # the short axis is at its end, so the others count alone: 5 to 20 by 2 of theirs
        ((1, 6, 4), (8, 64, 64), 4, "2,1,1 1,2,2 1,2,2"),
    ],
)
def test_the_axes_near_the_shortest_voxel_are_halved_as_long_as_they_keep_four(
    spacing_mm, shape, depth, strides
):
    made = strides_for(spacing_mm, shape, depth)
    assert strides_text(made) == strides
    network = UNetConfig(depth=depth, strides=made)
    assert all(side >= 4 for side in network.grid(shape, depth - 1))


def test_a_grid_with_nothing_left_to_halve_is_refused_with_the_deepest_that_is():
    with pytest.raises(ValueError, match="depth must be at most 3 for 16 x 16 x 5 voxels, got 5"):
        strides_for((1, 1, 1), (16, 16, 5), 5)


@pytest.mark.parametrize("strides", [(), [], [[2, 2, 2], [2, 2, 2]]])
def test_halving_every_axis_has_one_name(strides):
    assert checked_strides(strides, 3) == ()


@pytest.mark.parametrize(("divisors", "text"), [((8, 8, 8), "8"), ((8, 4, 1), "8, 4 and 1 along")])
def test_divisors_are_one_number_where_they_are_equal(divisors, text):
    assert divisors_text(divisors).startswith(text)

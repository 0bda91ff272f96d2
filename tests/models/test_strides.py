"""Which axes are halved, worked out by nnU-Net's rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.config import UNetConfig
from models.strides import (
    coarse_grid,
    depth_for,
    strides_for,
    strides_reason,
    strides_text,
)


@pytest.mark.parametrize(
    ("spacing_mm", "shape", "depth", "strides", "words"),
    [
        # 5 mm are 6.3, 3.1, then 1.6 times the spacing in plane: 0.8, 1.6, 3.2
        ((0.8, 0.8, 5), (256, 256, 20), 5, "2,2,1 2,2,1 2,2,2 2,2,2", "sides of 8 or more"),
        # 5 slices would become 3
        ((0.5, 0.5, 4), (320, 320, 5), 5, "2,2,1 2,2,1 2,2,1 2,2,1", "sides of 8 or more"),
        # twice as long is too long, and after one halving the same
        ((1, 1, 2), (128, 128, 64), 3, "2,2,1 2,2,2", "sides of 8 or more"),
        # the short axis is at its end, so the others count alone: 5 to 20 by 2 of theirs
        ((1, 6, 4), (8, 64, 64), 4, "2,1,1 1,2,2 1,2,2", "sides of 8 or more"),
        # 64 64 20, 32 32 10, 16 16 5
        ((1.5, 1.5, 1.5), (64, 64, 20), 6, "2,2,2 2,2,2 2,2,1 2,2,1 2,2,1", "the last 1 of 5"),
        # too small from the start: all axes, as without the rule
        ((1, 1, 1), (7, 7, 7), 3, "2,2,2 2,2,2", "no side is 8 or more"),
    ],
)
def test_the_axes_near_the_shortest_voxel_are_halved_as_long_as_they_keep_four(
    spacing_mm, shape, depth, strides, words
):
    """Where no axis keeps four a level halves those of the level before."""
    assert strides_text(strides_for(spacing_mm, shape, depth)) == strides
    reason = strides_reason(spacing_mm, shape, depth)
    assert words in reason
    assert ("the level before" in reason) == ("the last" in words)


@pytest.mark.parametrize(
    ("spacing_mm", "shape", "most", "depth"),
    [
        ((1, 1, 1), (36, 50, 35), 5, 4),  # 18 25 18, 9 13 9, 5 7 5: nnU-Net's for the hippocampus
        ((1, 1, 1), (7, 7, 7), 5, 2),  # the least that is a U-Net
    ],
)
def test_levels_end_where_no_axis_keeps_four(spacing_mm, shape, most, depth):
    assert depth_for(spacing_mm, shape, most) == depth


@given(
    spacing_mm=st.tuples(*[st.floats(0.1, 20)] * 3),
    shape=st.tuples(*[st.integers(1, 300)] * 3),
    depth=st.integers(2, 8),
)
def test_any_volume_has_a_network_and_is_padded_by_less_than_a_voxel_of_its_deepest_level(
    spacing_mm, shape, depth
):
    network = UNetConfig(filters=1, depth=depth, strides=strides_for(spacing_mm, shape, depth))
    padded = [-(-side // divisor) * divisor for side, divisor in zip(shape, network.divisors)]
    network.check_shape(tuple(padded))
    for side, grown, divisor in zip(shape, padded, network.divisors):
        assert 0 <= grown - side < divisor


# --- Grids ---


@pytest.mark.parametrize(
    ("extent", "stride", "divisors", "grid", "is_possible", "is_taken"),
    [
        # all axes halved: one voxel along Z at the deepest level
        ((145, 182, 29), (2, 2, 2), (16, 16, 16), (80, 96, 16), False, False),
        # 40^3 are 64,000 and enough, 40 x 36 x 40 are 57,600
        ((80, 80, 40), (2, 2, 1), (4, 4, 4), (40, 40, 40), True, True),
        ((80, 72, 40), (2, 2, 1), (4, 4, 4), (40, 36, 40), True, False),
        # two voxels there along X; an axis that is not halved may have one, as it has in full
        ((60, 182, 29), (2, 2, 1), (16, 16, 32), (32, 96, 32), True, True),
    ],
)
def test_coarse_steps_halve_the_axes_of_the_first_level(
    extent, stride, divisors, grid, is_possible, is_taken
):
    coarse = coarse_grid(extent, stride, divisors)
    assert (*coarse, coarse.is_taken) == (grid, is_possible, is_taken)

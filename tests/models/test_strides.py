"""Which axes are halved, worked out by nnU-Net's rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    ("spacing_mm", "shape", "depth", "strides"),
    [
        # 16 16 5, 8 8 5, 4 4 5: no axis keeps four, so those of the level before go on
        ((1, 1, 1), (16, 16, 5), 5, "2,2,1 2,2,1 2,2,1 2,2,1"),
        ((1, 1, 1), (48, 48, 5), 5, "2,2,1 2,2,1 2,2,1 2,2,1"),
        # one slice
        ((0.6, 0.6, 4), (40, 36, 1), 5, "2,2,1 2,2,1 2,2,1 2,2,1"),
        # 64 64 20, 32 32 10, 16 16 5
        ((1.5, 1.5, 1.5), (64, 64, 20), 5, "2,2,2 2,2,2 2,2,1 2,2,1"),
        # too small from the start: all axes, as without the rule
        ((1, 1, 1), (7, 7, 7), 3, "2,2,2 2,2,2"),
        ((1, 1, 1), (1, 1, 1), 8, " ".join(["2,2,2"] * 7)),
        # cubes of brains, at any depth
        ((1, 1, 1), (138, 177, 144), 8, " ".join(["2,2,2"] * 7)),
    ],
)
def test_where_no_axis_keeps_four_a_level_halves_those_of_the_level_before(
    spacing_mm, shape, depth, strides
):
    made = strides_for(spacing_mm, shape, depth)
    assert strides_text(made) == strides


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


@pytest.mark.parametrize("strides", [(), [], [[2, 2, 2], [2, 2, 2]]])
def test_halving_every_axis_has_one_name(strides):
    assert checked_strides(strides, 3) == ()


@pytest.mark.parametrize(("divisors", "text"), [((8, 8, 8), "8"), ((8, 4, 1), "8, 4 and 1 along")])
def test_divisors_are_one_number_where_they_are_equal(divisors, text):
    assert divisors_text(divisors).startswith(text)

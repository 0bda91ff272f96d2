"""Distances to tile borders, counted by hand and by looking at every plane; figures by distance."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu3d.bench.tile_borders import border_distance, by_distance, figures
from cpu3d.data.patches import patch_grid
from cpu3d.data.region import Region, whole


def tiles_of(shape, patch, overlap):
    return patch_grid(whole(shape), patch, overlap)


def test_two_tiles_side_by_side_have_one_border_between_them():
    # | 0 1 2 3 | 4 5 6 7 |: the outer faces are no borders.
    distance = border_distance((8, 1, 1), tiles_of((8, 1, 1), (4, 1, 1), 0.0))
    assert distance[:, 0, 0].tolist() == [3, 2, 1, 0, 0, 1, 2, 3]


def test_a_tile_that_covers_another_has_borders_where_it_begins_and_where_that_one_ends():
    # Tiles 0..3, 2..5, 4..7: planes before 2, 4 and 6.
    distance = border_distance((8, 1, 1), tiles_of((8, 1, 1), (4, 1, 1), 0.5))
    assert distance[:, 0, 0].tolist() == [1, 0, 0, 0, 0, 0, 0, 1]


def test_the_nearest_border_of_any_axis_counts():
    # One plane before x = 4 and one before y = 2; none along z.
    distance = border_distance((8, 4, 3), tiles_of((8, 4, 3), (4, 2, 3), 0.0))
    expected = np.minimum(np.array([3, 2, 1, 0, 0, 1, 2, 3])[:, None], np.array([1, 0, 0, 1])[None, :])
    np.testing.assert_array_equal(distance, np.repeat(expected[:, :, None], 3, axis=2))
    assert distance.dtype == np.int16


@pytest.mark.parametrize("patch", [(5, 4, 3), (6, 8, 3)])
def test_a_single_tile_has_no_border_and_neither_has_one_that_reaches_outside(patch):
    distance = border_distance((5, 4, 3), tiles_of((5, 4, 3), patch, 0.5))
    assert distance.shape == (5, 4, 3)
    assert (distance == 5).all()


def test_a_tile_that_reaches_outside_along_one_axis_has_its_borders_along_the_others():
    tiles = tiles_of((4, 2, 2), (2, 6, 2), 0.0)
    assert {tile.start[1] for tile in tiles} == {-2}
    assert border_distance((4, 2, 2), tiles)[:, 0, 0].tolist() == [1, 0, 0, 1]


@settings(max_examples=40)
@given(
    shape=st.tuples(*[st.integers(1, 9)] * 3),
    patch=st.tuples(*[st.integers(1, 6)] * 3),
    overlap=st.sampled_from([0.0, 0.3, 0.5, 0.75]),
)
def test_the_distance_is_the_number_of_voxels_to_where_other_tiles_cover(shape, patch, overlap):
    tiles = tiles_of(shape, patch, overlap)
    distance = border_distance(shape, tiles)
    extents = [{(tile.start[axis], tile.stop[axis]) for tile in tiles} for axis in range(3)]
    covering = [[{(a, b) for a, b in extents[axis] if a <= at < b} for at in range(shape[axis])] for axis in range(3)]
    for voxel in itertools.product(*map(range, shape)):
        steps = [
            abs(other - voxel[axis]) - 1
            for axis in range(3)
            for other in range(shape[axis])
            if covering[axis][other] != covering[axis][voxel[axis]]
        ]
        assert distance[voxel] == min(steps, default=max(shape))


def test_figures_are_of_all_values_at_a_distance():
    distance = np.array([2, 0, 2, 0], np.int16)
    difference = np.array([[0.4, 0.0], [0.1, 0.3], [0.0, 0.0], [0.2, 0.2]], np.float32)
    near, far = by_distance(distance, difference)
    assert (near["distance"], near["voxels"], far["distance"], far["voxels"]) == (0, 2, 2, 2)
    assert near["mean"] == pytest.approx(0.2)
    assert near["max"] == pytest.approx(0.3)
    assert far["mean"] == pytest.approx(0.1)
    # Of 0, 0, 0 and 0.4 the 99th percentile lies 97 % of the way from the third to the fourth.
    assert far["p99"] == pytest.approx(0.97 * 0.4)


def test_equal_answers_differ_nowhere():
    assert figures(np.zeros((3, 2))) == {"mean": 0, "p99": 0, "max": 0}


def test_tiles_need_not_begin_at_the_volume_s_first_voxel():
    tiles = [Region((-1, 0, 0), (2, 1, 1)), Region((1, 0, 0), (4, 1, 1))]
    assert border_distance((4, 1, 1), tiles)[:, 0, 0].tolist() == [0, 0, 1, 2]

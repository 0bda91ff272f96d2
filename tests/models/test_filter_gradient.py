"""A kernel's gradient, at once and plane by plane, against its definition."""

import numpy as np
import pytest
import tensorflow as tf

from models.ordered import filter_gradient, filter_gradient_by_planes

GRIDS = [(5, 4, 6), (2, 3, 1), (1, 4, 3)]
"""One has fewer planes than the kernel, one a single plane."""


def maps(samples, grid, seed=0):
    """What a convolution from 3 to 2 channels read, and the gradient of what it wrote."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((samples, *grid, channels)).astype("f4") for channels in (3, 2)]


def by_definition(x, upstream, side):
    """Each tap meets the map shifted by its place in the kernel; beyond the edge there is nothing."""
    reach, grid = side // 2, x.shape[1:4]
    padded = np.pad(x.astype("f8"), [(0, 0), *[(reach, reach)] * 3, (0, 0)])
    gradient = np.zeros((side, side, side, x.shape[-1], upstream.shape[-1]))
    for i, j, k in np.ndindex(side, side, side):
        seen = padded[:, i : i + grid[0], j : j + grid[1], k : k + grid[2]]
        gradient[i, j, k] = np.tensordot(seen, upstream, ([0, 1, 2, 3], [0, 1, 2, 3]))
    return gradient


def distance(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("function", [filter_gradient, filter_gradient_by_planes])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(("side", "samples"), [(3, 2), (1, 3)])
def test_it_is_the_sum_over_all_voxels_of_what_a_tap_saw_times_the_gradient_there(function, grid, side, samples):
    x, upstream = maps(samples, grid)
    found = function(tf.constant(x), tf.constant(upstream), (side, side, side, 3, 2))
    assert found.shape == (side, side, side, 3, 2)
    assert distance(found.numpy(), by_definition(x, upstream, side)) < 1e-6


@pytest.mark.parametrize(
    ("function", "grid", "channels"),
    [
        (filter_gradient_by_planes, (6, 5, 4), (3, 2)),
        # The smallest grids, whatever lay in memory before.
        *((filter_gradient, grid, (64, 64)) for grid in [(1, 2, 2), (2, 1, 2), (2, 2, 2), (3, 2, 2)]),
    ],
)
def test_in_bfloat16_it_is_the_definitions_to_that_precision(function, grid, channels):
    rng = np.random.default_rng(0)
    gradient = tf.function(lambda x, upstream: function(x, upstream, (3, 3, 3, *channels)))
    for _ in range(3):
        tf.random.normal((200, 1000)) * 1e30
        x, upstream = (tf.cast(rng.standard_normal((1, *grid, n)), tf.bfloat16) for n in channels)
        expected = by_definition(*(tf.cast(one, tf.float32).numpy() for one in (x, upstream)), 3)
        found = gradient(x, upstream)
        assert found.dtype == tf.bfloat16
        assert distance(tf.cast(found, tf.float32).numpy(), expected) < 2**-6


def operations(samples):
    @tf.function
    def gradient(x, upstream):
        return filter_gradient_by_planes(x, upstream, (3, 3, 3, 3, 2))

    given = [tf.TensorSpec((samples, 4, 3, 2, channels)) for channels in (3, 2)]
    found = gradient.get_concrete_function(*given).graph.get_operations()
    return gradient, [op for op in found if "BackpropFilter" in op.type]


def test_every_plane_of_the_kernel_waits_for_the_one_before_it(waits_for):
    _, planes = operations(samples=2)
    assert [op.type for op in planes] == ["Conv2DBackpropFilter"] * 2 * 3  # samples, planes of the kernel
    assert all(waits_for(later, earlier) for earlier, later in zip(planes, planes[1:]))


def test_without_a_known_number_of_samples_it_is_computed_at_once():
    gradient, found = operations(samples=None)
    assert [op.type for op in found] == ["Conv3DBackpropFilterV2"]
    x, upstream = maps(2, (4, 3, 2))
    assert distance(gradient(tf.constant(x), tf.constant(upstream)).numpy(), by_definition(x, upstream, 3)) < 1e-6

"""A network slid over a volume in tiles."""

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.data.windows import sliding_window, window_count


@pytest.mark.parametrize(("shape", "overlap"), [((9, 13, 17), 0.0), ((20, 6, 11), 0.75)])
def test_a_network_without_a_neighbourhood_gives_the_whole_volumes_answer_to_the_bit(
    shape, overlap
):
    kernel = tf.constant(np.random.default_rng(1).standard_normal((1, 1, 1, 2, 3)), tf.float32)

    def network(tile):
        return tf.nn.relu(tf.nn.conv3d(tile, kernel, [1] * 5, "SAME"))

    volume = np.random.default_rng(0).standard_normal((1, *shape, 2)).astype(np.float32)
    np.testing.assert_array_equal(
        sliding_window(network, volume, (8, 6, 4), overlap), network(volume).numpy()[0]
    )


def test_where_two_tiles_disagree_the_nearer_middle_counts_more():
    values = iter([0.0, 1.0])
    network = lambda tile: np.full((1, 8, 6, 4, 1), next(values))
    along = sliding_window(network, np.zeros((1, 12, 6, 4, 2)), (8, 6, 4))[:, 3, 2, 0]
    np.testing.assert_array_equal(along[:4], 0)  # the first tile alone
    np.testing.assert_array_equal(along[8:], 1)  # the second alone
    weight = np.exp(-0.5 * (np.arange(8) - 3.5) ** 2)
    np.testing.assert_allclose(along[4:8], weight[:4] / (weight[:4] + weight[4:]), rtol=1e-5)


def test_tiles_are_spread_evenly():
    starts = []
    note = lambda tile: starts.append(tile.min()) or tile
    sliding_window(note, np.indices((1, 13, 6, 4, 1))[1], (8, 6, 4))
    assert starts == [0, 2, 5]


@pytest.mark.parametrize(
    ("shape", "overlaps", "count"),
    [((12, 6, 4), (), 2), ((13, 6, 4), (), 3), ((5, 5, 5), (), 2), ((24, 12, 4), (0.0,), 6),
     ((8, 9, 4), (0.75,), 4)],
)  # fmt: skip
def test_tiles_are_the_fewest_that_overlap_enough_by_default_by_a_half(shape, overlaps, count):
    assert window_count(shape, (8, 6, 4), *overlaps) == count

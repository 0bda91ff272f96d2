import numpy as np
import pytest
import tensorflow as tf

from cpu3d.data.resolution import Resizing, field_of, growing, network_grid, resizing_for, shrinking

SHARES = (1 / 3, 0.4, 0.5, 2 / 3, 0.75, 0.9)


def ramp(size, slope=(1.0, 10.0, 100.0), first=(0.0, 0.0, 0.0), step=1.0):
    """(1, X, Y, Z, 2): what voxels at `first` + `step` * index have in a ramp, and in its negative."""
    at = [a + step * np.arange(n) for a, n in zip(first, size)]
    value = sum(s * x for s, x in zip(slope, np.meshgrid(*at, indexing="ij")))
    return np.stack([value, -value], -1)[None].astype(np.float32)


@pytest.mark.parametrize(
    ("grid", "resolution", "divisor", "seen", "field"),
    [
        ((48, 48, 32), 0.5, 8, (24, 24, 16), (48, 48, 32)),
        ((45, 47, 33), 0.5, 8, (24, 24, 24), (48, 48, 48)),
        ((48, 40, 30), 0.75, 4, (36, 32, 24), (48, 43, 32)),  # 32 / 0.75 is 42.7: the last voxel is covered in part
        ((10, 20, 30), 0.7, 1, (7, 14, 21), (10, 20, 30)),
        ((3, 3, 3), 0.1, 1, (1, 1, 1), (10, 10, 10)),
        ((13, 7, 5), 1.0, 1, (13, 7, 5), (13, 7, 5)),
    ],
)
def test_the_network_sees_all_of_an_extent_and_the_field_is_what_that_covers(grid, resolution, divisor, seen, field):
    assert network_grid(grid, resolution, divisor) == seen
    assert field_of(seen, resolution, grid) == field


def test_a_field_always_holds_the_extent():
    for size in range(1, 200):
        for resolution in (*SHARES, 0.1, 0.55, 0.7, 0.95):
            for divisor in (1, 4, 16):
                assert resizing_for((size, 1, 1), resolution, divisor).field[0] >= size


def test_a_larger_network_grid_covers_a_larger_field():
    resizing = resizing_for((20, 20, 20), 0.5, 4, at_least=(16, 8, 8))
    assert (resizing.seen, resizing.field) == ((16, 12, 12), (32, 24, 24))


def test_half_the_resolution_averages_pairs_and_a_third_weighs_three():
    np.testing.assert_allclose(shrinking(2, 4, 0.5), [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]], atol=1e-7)
    np.testing.assert_allclose(
        shrinking(2, 6, 1 / 3), [[0.25, 0.5, 0.25, 0, 0, 0], [0, 0, 0, 0.25, 0.5, 0.25]], atol=1e-7
    )


def test_weights_are_centred_where_the_network_voxel_is():
    """At 3/4 the first voxel is centred at 0.5 / 0.75 - 0.5 = 1/6 and the mean of [0, 1/3]: 5/6 of voxel 0."""
    np.testing.assert_allclose(
        shrinking(3, 4, 0.75), [[5 / 6, 1 / 6, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 1 / 6, 5 / 6]], atol=1e-7
    )


@pytest.mark.parametrize("resolution", SHARES)
def test_weights_sum_to_one_and_are_never_negative(resolution):
    field = field_of((12, 1, 1), resolution)[0]
    for weights in (shrinking(12, field, resolution), growing(field, 12, resolution)):
        np.testing.assert_allclose(weights.sum(1), 1, atol=1e-6)
        assert weights.min() >= 0


def test_towards_full_resolution_the_weights_become_the_identity():
    np.testing.assert_allclose(shrinking(8, 9, 0.999)[:, :8], np.eye(8), atol=0.01)


@pytest.mark.parametrize("resolution", SHARES)
def test_a_ramp_stays_the_same_ramp_at_the_network_voxels_places(resolution):
    resizing = Resizing((8, 6, 4), resolution)
    first = (0.5 / resolution - 0.5,) * 3
    expected = ramp(resizing.seen, first=first, step=1 / resolution)
    np.testing.assert_allclose(resizing.shrink(ramp(resizing.field)), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("resolution", SHARES)
def test_growing_gives_a_ramp_back_between_the_outermost_centres(resolution):
    resizing = Resizing((8, 6, 4), resolution)
    there = ramp(resizing.field)
    back = resizing.grow(resizing.shrink(there)).numpy()
    edge = int(np.ceil(0.5 / resolution))
    inside = (slice(None), *(slice(edge, -edge),) * 3)
    np.testing.assert_allclose(back[inside], there[inside], rtol=1e-4, atol=2e-3)
    assert back[0, 0, 0, 0, 0] == pytest.approx(111 * (0.5 / resolution - 0.5), abs=1e-3)  # the first centre's value


@pytest.mark.parametrize("resolution", SHARES)
def test_a_constant_stays_constant_both_ways(resolution):
    resizing = Resizing((4, 6, 8), resolution)
    there = np.full((2, *resizing.field, 3), 7.0, np.float32)
    back = resizing.grow(resizing.shrink(there))
    assert back.shape == there.shape
    np.testing.assert_allclose(back, there, rtol=1e-5)


def test_a_smooth_volume_comes_back_nearly_as_it_was():
    resizing = Resizing((24, 24, 24), 0.75)
    waves = [np.sin(2 * np.pi * np.arange(n) / 16) for n in resizing.field]
    there = np.einsum("x,y,z->xyz", *waves)[None, ..., None].astype(np.float32)
    back = resizing.grow(resizing.shrink(there)).numpy()
    assert np.abs(back - there)[:, 2:-2, 2:-2, 2:-2].max() < 0.12


def test_axes_channels_and_samples_do_not_mix():
    """The mean of every 2 x 2 x 2 block, computed the slow way."""
    image = np.random.default_rng(0).normal(size=(2, 8, 4, 6, 3)).astype(np.float32)
    blocks = image.reshape(2, 4, 2, 2, 2, 3, 2, 3).mean((2, 4, 6))
    np.testing.assert_allclose(Resizing((4, 2, 3), 0.5).shrink(image), blocks, rtol=1e-5, atol=1e-6)


def test_growing_puts_a_value_where_its_voxel_is():
    """At 1/2 store voxels 2 and 3 lie a quarter of a network voxel around voxel 1, and take 3/4 of it."""
    logits = np.zeros((1, 4, 4, 4, 2), np.float32)
    logits[0, 1, 2, 3, 1] = 64
    grown = Resizing((4, 4, 4), 0.5).grow(logits).numpy()
    assert not grown[..., 0].any()
    np.testing.assert_allclose(grown[0, :, 4, 7, 1], 64 * 0.75 * np.array([0, 0.25, 0.75, 0.75, 0.25, 0, 0, 0]))
    np.testing.assert_allclose(grown[0, 2, 4, :, 1], 64 * 0.75**2 * np.array([0, 0, 0, 0, 0, 0.25, 0.75, 1]))


def test_a_mask_keeps_what_half_a_network_voxel_or_more_holds():
    mask = np.zeros((1, 4, 4, 4, 2), np.uint8)
    mask[0, 0, :2, :2, 0] = 1  # 4 of 8
    mask[0, 2:, 2:, 2:, 1] = 1
    mask[0, 0, 0, :2, 1] = 1  # 2 of 8
    image, target = Resizing((2, 2, 2), 0.5).shrink_pair(np.ones((1, 4, 4, 4, 1), np.float32), mask)
    assert (image.shape, target.dtype) == ((1, 2, 2, 2, 1), tf.uint8)
    expected = np.zeros((1, 2, 2, 2, 2), np.uint8)
    expected[0, 0, 0, 0, 0] = expected[0, 1, 1, 1, 1] = 1
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("resolution", SHARES)
def test_half_a_plane_is_a_half_at_every_resolution(resolution):
    """A mask that ends in the middle of a network voxel: rounding must not decide about a whole face of it."""
    resizing = Resizing((6, 6, 6), resolution)
    mask = np.full((1, *resizing.field, 1), 1, np.uint8)
    half = shrinking(6, resizing.field[0], resolution)
    ends = [k for k in range(resizing.field[0]) if np.isclose(half[:, :k].sum(1), 0.5).any()]
    for end in ends:
        part = mask.copy()
        part[:, end:] = 0
        seen = resizing.shrink_pair(part.astype(np.float32), part)[1].numpy()
        assert seen[0, :, 0, 0, 0].sum() == (half[:, :end].sum(1) > 0.499).sum()
        assert (seen.any((2, 3)) == seen.all((2, 3))).all()


def test_bfloat16_images_are_averaged_in_float32():
    there = tf.cast(np.random.default_rng(1).normal(size=(1, 8, 8, 8, 2)), tf.bfloat16)
    resizing = Resizing((4, 4, 4), 0.5)
    expected = tf.cast(resizing.shrink(tf.cast(there, tf.float32)), tf.bfloat16)
    assert resizing.shrink(there).dtype == tf.bfloat16
    np.testing.assert_array_equal(tf.cast(resizing.shrink(there), tf.float32), tf.cast(expected, tf.float32))


def test_full_resolution_is_the_identity_to_the_bit():
    resizing = Resizing((4, 4, 4), 1.0)
    image = tf.constant(np.random.default_rng(2).normal(size=(1, 4, 4, 4, 2)).astype(np.float32))
    mask = tf.cast(image > 0, tf.uint8)
    assert resizing.field == (4, 4, 4)
    for there, back in zip((image, mask, image), (*resizing.shrink_pair(image, mask), resizing.grow(image))):
        np.testing.assert_array_equal(there, back)
    np.testing.assert_array_equal(shrinking(5, 5, 1), np.eye(5))
    np.testing.assert_array_equal(growing(5, 5, 1), np.eye(5))


def test_the_number_of_samples_may_be_open():
    resizing = Resizing((2, 2, 2), 0.5)
    shape = (None, 4, 4, 4, 1)
    compiled = tf.function(
        resizing.shrink_pair, input_signature=[tf.TensorSpec(shape, tf.float32), tf.TensorSpec(shape, tf.uint8)]
    )
    for samples in (1, 3):
        image, target = compiled(np.ones((samples, 4, 4, 4, 1), np.float32), np.ones((samples, 4, 4, 4, 1), np.uint8))
        assert image.shape == target.shape == (samples, 2, 2, 2, 1)

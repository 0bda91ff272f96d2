"""Augmentation: parameters are numbers, applying them is geometry."""

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.data.augment import AugmentConfig, flip, resample, sample_params

IDENTITY = tf.constant([1.0, 0, 0, 1])


def test_parameters_depend_on_seed_and_position_alone():
    config = AugmentConfig(rotation_deg=10, scaling=0.1)
    drawn = [sample_params(config, seed=1, position=p, channels=4) for p in range(50)]
    assert drawn == [sample_params(config, seed=1, position=p, channels=4) for p in range(50)]
    assert len(set(drawn)) == 50
    assert {params.flips for params in drawn} == {(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)}
    assert all(0.9 <= gain <= 1.1 for params in drawn for gain in params.gain)


def test_one_option_does_not_move_the_others():
    plain = sample_params(AugmentConfig(), seed=1, position=5, channels=2)
    turned = sample_params(AugmentConfig(rotation_deg=5, scaling=0.2), seed=1, position=5, channels=2)
    assert (plain.flips, plain.gain, plain.offset) == (turned.flips, turned.gain, turned.offset)


@pytest.mark.parametrize("flips", [(False, False, False), (True, False, False), (False, True, True)])
def test_flip_mirrors_the_named_axes(flips):
    volume = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    expected = volume[tuple(slice(None, None, -1 if mirrored else 1) for mirrored in flips)]
    np.testing.assert_array_equal(flip(tf.constant(volume), tf.constant(flips)), expected)


def test_a_quarter_turn_in_each_plane_is_numpy_s():
    # A quarter turn needs no interpolation on a cube, so it can be held against an exact rotation.
    volume = np.random.default_rng(0).integers(0, 200, (6, 6, 6, 1)).astype(np.uint8)
    quarter = tf.constant([0.0, 1, -1, 0])
    in_xy = resample(volume, quarter, IDENTITY, linear=False).numpy()
    in_yz = resample(volume, IDENTITY, quarter, linear=False).numpy()
    assert any(np.array_equal(in_xy, np.rot90(volume, k, (0, 1))) for k in (1, 3))
    assert any(np.array_equal(in_yz, np.rot90(volume, k, (1, 2))) for k in (1, 3))


def sphere(shape, spacing_mm, centre_mm, radius_mm):
    """(X, Y, Z, 1) float32: 1 where a voxel is within a sphere, whose centre is told from the grid's."""
    at_mm = [(index - (n - 1) / 2) * size for index, n, size in zip(np.indices(shape), shape, spacing_mm)]
    return np.float32(sum((at - c) ** 2 for at, c in zip(at_mm, centre_mm)) <= radius_mm**2)[..., None]


@pytest.mark.parametrize("position", range(3))
def test_a_sphere_in_mm_stays_one_on_a_grid_of_1_x_1_x_5_mm(position):
    shape, spacing_mm, centre_mm = (120, 120, 25), (1, 1, 5), np.array([8.0, 12, -9])
    params = sample_params(AugmentConfig(rotation_deg=44), seed=0, position=position, channels=1)
    turned = resample(sphere(shape, spacing_mm, centre_mm, 32), *params.planes(spacing_mm), linear=True).numpy() > 0.5
    about_z, about_x = np.eye(3), np.eye(3)
    about_z[:2, :2], about_x[1:, 1:] = np.reshape(params.plane_xy, (2, 2)), np.reshape(params.plane_yz, (2, 2))
    expected = sphere(shape, spacing_mm, np.linalg.solve(about_z @ about_x, centre_mm), 32) > 0
    assert 2 * (turned & expected).sum() / (turned.sum() + expected.sum()) > 0.97


@pytest.mark.parametrize("spacing_mm", [(1, 1, 1), (0.7, 0.7, 0.7), (0.9999999, 1, 1.0000001)])
def test_voxels_of_equal_sides_are_turned_to_the_bit_by_what_was_drawn(spacing_mm):
    params = sample_params(AugmentConfig(rotation_deg=15, scaling=0.1), seed=4, position=2, channels=1)
    np.testing.assert_array_equal(params.planes(spacing_mm), np.float32([params.plane_xy, params.plane_yz]))


def test_a_batch_is_mirrored_and_turned_sample_by_sample():
    volumes = tf.constant(np.random.default_rng(0).normal(size=(8, 5, 6, 7, 2)).astype("f4"))
    config = AugmentConfig(rotation_deg=20, scaling=0.2)
    drawn = [sample_params(config, seed=1, position=p, channels=2) for p in range(8)]
    flips = tf.constant([params.flips for params in drawn])
    planes = np.stack([params.planes((1, 1, 1)) for params in drawn], axis=1)
    mirrored, turned = flip(volumes, flips), resample(volumes, *planes, linear=True)
    for index in range(8):
        np.testing.assert_array_equal(mirrored[index], flip(volumes[index], flips[index]))
        alone = resample(volumes[index], *(plane[index] for plane in planes), linear=True)
        np.testing.assert_array_equal(turned[index], alone)
    assert not np.array_equal(mirrored, volumes)

"""Augmentation: parameters are numbers, applying them is geometry."""

import numpy as np
import pytest

from cpu3d.data.augment import AugmentConfig, draw
from cpu3d.data.finish import resample


def drawn(config, position, seed=1, channels=2, spacing_mm=(1, 1, 1)):
    """With a normalisation that changes nothing: "scale" is the gain, "shift" the offset."""
    return draw(config, np.ones(channels), np.zeros(channels), spacing_mm, seed=seed, position=position)


def test_what_is_drawn_depends_on_seed_and_position_alone():
    config = AugmentConfig(rotation_deg=10, scaling=0.1)
    found, again = ([drawn(config, position) for position in range(50)] for _ in range(2))
    for one, same in zip(found, again):
        np.testing.assert_equal(one, same)
        assert np.all(np.abs(one["scale"] - 1) <= 0.1)
        assert np.all(np.abs(one["shift"]) <= 0.1)
    assert len({one["planes"].tobytes() for one in found}) == 50
    assert len({tuple(one["flips"]) for one in found}) == 8
    # The drawn intensity is applied to normalised values: here to x / 2 - 2.
    halved = draw(config, np.full(2, 0.5), np.full(2, -2.0), (1, 1, 1), seed=1, position=3)
    np.testing.assert_allclose(halved["scale"], 0.5 * found[3]["scale"], rtol=1e-6)
    np.testing.assert_allclose(halved["shift"], found[3]["shift"] - 2 * found[3]["scale"], rtol=1e-6)
    plain = drawn(AugmentConfig(), 3)
    for name in ("flips", "scale", "shift"):  # one option does not move the others
        np.testing.assert_array_equal(plain[name], found[3][name])


@pytest.mark.parametrize(("name", "value"), [("gain", 1), ("offset", -1), ("rotation_deg", 45), ("scaling", 0.5)])
def test_an_augmentation_out_of_range_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"augment {name} must be in \[0, .*\), got {value}"):
        AugmentConfig(**{name: value})


def sphere(shape, spacing_mm, centre_mm, radius_mm):
    """(X, Y, Z, 1) float32: 1 where a voxel is within a sphere, whose centre is told from the grid's."""
    at_mm = [(index - (n - 1) / 2) * size for index, n, size in zip(np.indices(shape), shape, spacing_mm)]
    return np.float32(sum((at - c) ** 2 for at, c in zip(at_mm, centre_mm)) <= radius_mm**2)[..., None]


@pytest.mark.parametrize("position", range(3))
def test_a_sphere_in_mm_stays_one_on_a_grid_of_1_x_1_x_5_mm(position):
    shape, spacing_mm, centre_mm = (120, 120, 25), (1, 1, 5), np.array([8.0, 12, -9])
    of_voxels, of_mm = (
        drawn(AugmentConfig(rotation_deg=44), position, spacing_mm=size)["planes"] for size in (spacing_mm, (1, 1, 1))
    )
    about_z, about_x = np.eye(3), np.eye(3)
    about_z[:2, :2], about_x[1:, 1:] = of_mm.reshape(2, 2, 2)
    expected = sphere(shape, spacing_mm, np.linalg.solve(about_z @ about_x, centre_mm), 32) > 0
    for linear, least in ((True, 0.97), (False, 0.95)):  # an image, a label
        turned = resample(sphere(shape, spacing_mm, centre_mm, 32), *of_voxels, linear=linear).numpy() > 0.5
        assert 2 * (turned & expected).sum() / (turned.sum() + expected.sum()) > least


@pytest.mark.parametrize("spacing_mm", [(0.7, 0.7, 0.7), (0.9999999, 1, 1.0000001)])
def test_voxels_of_equal_sides_are_turned_to_the_bit_as_those_of_1_mm(spacing_mm):
    config = AugmentConfig(rotation_deg=15, scaling=0.1)
    np.testing.assert_equal(drawn(config, 2, spacing_mm=spacing_mm), drawn(config, 2))

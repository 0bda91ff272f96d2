"""What counts as background: what interpolation leaves is 0, and nothing that was measured."""

import nibabel
import numpy as np
import pytest
from scipy.ndimage import affine_transform

from cpu3d.data.background import (
    border_value,
    surroundings,
    without_far_values,
    without_residue,
)

SHAPE = (24, 20, 16)


def head(seed=0, dtype=np.float32):
    """A skull-stripped scan: intensities of 100 to 900 in a box, 0 around it."""
    volume = np.zeros(SHAPE, dtype)
    volume[5:19, 4:16, 3:13] = np.random.default_rng(seed).uniform(100, 900, (14, 12, 10))
    return volume


def noise(scale, seed=1):
    return np.random.default_rng(seed).normal(0, scale, SHAPE)


@pytest.mark.parametrize("unit", [1e-6, 1e6])
@pytest.mark.parametrize(("dtype", "residue"), [(np.float64, 1e-12), (np.float32, 1e-6)])
def test_residue_of_both_signs_around_a_head_becomes_0_in_any_unit_of_intensity(
    dtype, unit, residue
):
    clean = head(dtype=dtype)
    volume = (np.where(clean == 0, noise(residue * 900), clean) * unit).astype(dtype)
    volume[10, 10, 5:8] *= 1e6  # a few hot voxels are no maximum
    cleaned = without_residue(volume)
    assert cleaned.dtype == dtype
    assert np.array_equal(cleaned, np.where(clean == 0, 0, volume))


def test_low_intensities_at_the_edge_of_a_head_stay_beside_residue():
    inside = np.random.default_rng(2).uniform(0.5, 900, SHAPE)
    clean = np.where(head() == 0, 0, inside).astype(np.float32)
    dirty = np.where(clean == 0, noise(1e-4), clean).astype(np.float32)
    assert np.array_equal(without_residue(dirty), clean)


def test_what_cubic_splines_leave_of_a_head_that_is_turned_becomes_0_beside_it_too():
    volume = np.zeros((48, 44, 40), np.float32)
    volume[12:36, 12:32, 12:28] = np.random.default_rng(0).uniform(300, 900, (24, 20, 16))
    turn = nibabel.eulerangles.euler2mat(0.1)  # about Z
    how = {"matrix": turn, "offset": (np.eye(3) - turn) @ [24, 22, 20] + 0.3}
    turned = affine_transform(volume, order=3, **how)
    inside = affine_transform((volume > 0).astype(np.float32), order=1, **how) > 0
    assert np.mean(turned != 0) > 0.9
    cleaned = without_residue(turned)
    assert np.mean(cleaned != 0) < 1.5 * inside.mean()
    assert np.array_equal(cleaned[inside & (turned > 9)], turned[inside & (turned > 9)])


def scores_behind_zeros():
    """Scores around 0, some of which are almost that."""
    volume = np.zeros((64, 64, 64), np.float32)
    volume[8:56, 8:56, 8:56] = np.random.default_rng(0).normal(0, 1, (48, 48, 48))
    volume[20, 20, 20:30] = 1e-6
    return volume


STAY = {
    "quiet air": np.hypot(head() + noise(0.5), noise(0.5, 2)).astype(np.float32),
    "air": np.hypot(head() + noise(30), noise(30, 2)).astype(np.float32),
    "whole numbers": np.where(head() == 0, np.sign(noise(1)), 2e4),
    "scores": scores_behind_zeros(),
    "a crop inside the body": np.random.default_rng(0).uniform(0, 1000, SHAPE),
}


@pytest.mark.parametrize("name", STAY)
def test_what_is_no_residue_stays_as_it_is(name):
    assert without_residue(STAY[name]) is STAY[name]


def test_residue_in_a_crop_whose_border_is_mostly_head_becomes_0_too():
    crop = (slice(5, 15), slice(4, 12), slice(4, 15))
    clean = head()[crop]
    dirty = np.where(clean == 0, noise(1e-5)[crop], clean).astype(np.float32)
    assert np.array_equal(without_residue(dirty), clean)
    assert border_value(clean) == 0


def test_a_value_far_from_all_others_becomes_the_median_of_its_neighbours():
    volume = np.random.default_rng(0).integers(10_000, 10_100, (12, 12, 16))
    volume[6:] = 0  # which are no values
    volume[5, 0, 0] = 11_080
    assert without_far_values(volume, has_background=True)[1] == 0
    volume[5, 0, 0] = 11_100  # more than 10 times the range of the others
    made, changed = without_far_values(volume, has_background=True)
    assert (made[5, 0, 0], changed) == (np.sort(volume[4:7, :2, :2], axis=None)[5], 1)
    volume[5, 0, 0] = most = volume[volume < 11_000].max()
    volume[:2, :2, :2] = 90_000
    made, changed = without_far_values(volume, has_background=True)
    assert (made[0, 0, 0], changed) == (most, 8)  # amid others


@pytest.mark.parametrize(("value", "dtype"), [(-1024, np.int16), (-0.73, np.float32)])
def test_another_constant_background_is_named(value, dtype):
    volume = np.where(head() == 0, value, 200 + noise(9)).astype(dtype)
    assert border_value(volume) == pytest.approx(value)
    assert border_value(volume[5:19, 4:16]) == pytest.approx(value)  # 55 % of whose border it is
    assert without_residue(volume) is volume


@pytest.mark.parametrize("scale", [0.5, 3])
def test_a_border_that_is_almost_0_but_no_residue_is_named_in_scans_of_no_whole_numbers(scale):
    volume = np.where(head() == 0, noise(scale), head())
    assert without_residue(volume) is volume
    assert 0 < border_value(volume) < 2 * scale
    assert border_value(np.rint(abs(volume)).astype(np.int16)) == 0


def test_what_surrounds_a_volume_is_the_lower_median_of_its_faces():
    assert surroundings(np.arange(27).reshape(3, 3, 3), is_ct=False) == 12
    assert surroundings(np.full((3, 3, 3), np.nan), is_ct=True) == 0


def test_no_other_background_is_named_for_0_nor_for_noise():
    assert border_value(head()) == 0
    assert border_value(np.resize([1, 2, 3], SHAPE)) == 0
    assert border_value(STAY["a crop inside the body"]) == 0
    assert border_value(np.where(head() == 0, noise(1e-5), head()).astype(np.float32)) == 0

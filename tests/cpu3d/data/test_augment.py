"""What is drawn for a sample: numbers that follow from seed and position."""

import dataclasses

import numpy as np
import pytest

from cpu3d.data.augment import CHANNEL_PROBABILITY, PROBABILITY, AugmentConfig, draw, smoothing
from cpu3d.data.normalise import Statistics, levels_of

ALL = AugmentConfig(
    rotation_deg=30, scaling=0.4, contrast=0.25, gamma=0.5, noise=0.1, blur=1.0, low_resolution=0.5
)


def drawn(config, position, seed=1, channels=2, spacing_mm=(1, 1, 1)):
    """With a normalisation that changes nothing: "scale" is the gain, "shift" the offset."""
    levels = levels_of([Statistics(0, 1, 0, 1)] * channels, ())
    return draw(config, levels, spacing_mm, seed=seed, position=position)


def test_what_is_drawn_depends_on_seed_and_position_alone():
    samples, again = ([drawn(ALL, position) for position in range(50)] for _ in range(2))
    for sample, same in zip(samples, again):
        np.testing.assert_equal(vars(sample), vars(same))
        assert np.all(np.abs(sample.scale - 1) <= 0.1)
        assert np.all(np.abs(sample.shift) <= 0.1)
    assert len({sample.matrix.tobytes() for sample in samples}) == 50
    assert len({sample.noise_keys.tobytes() for sample in samples}) == 50
    assert len({sample.flips for sample in samples}) == 8
    assert drawn(ALL, 3, seed=2).matrix.tobytes() != samples[3].matrix.tobytes()
    # The drawn intensity is applied to normalised values: here to x / 2 - 2.
    levels = levels_of([Statistics(4, 2, 0, 9)] * 2, ())
    halved = draw(ALL, levels, (1, 1, 1), seed=1, position=3)
    np.testing.assert_allclose(halved.scale, 0.5 * samples[3].scale, rtol=1e-6)
    np.testing.assert_allclose(halved.shift, samples[3].shift - 2 * samples[3].scale, rtol=1e-6)


@pytest.mark.parametrize(
    "left", ["rotation_deg", "contrast", "gamma", "noise", "blur", "low_resolution", "gain"]
)
def test_one_option_does_not_move_the_numbers_of_another(left):
    """Rotation and scaling share a matrix; gain and offset are in both of scale and shift."""
    of = {"rotation_deg": "matrix", "gain": "scale"}
    for position in range(20):
        every = vars(drawn(ALL, position))
        without = vars(drawn(dataclasses.replace(ALL, **{left: 0.0}), position))
        assert left in ("rotation_deg", "gain") or without[left] is None
        for name, value in every.items():
            if name not in (of.get(left, left), "shift" if left == "gain" else ""):
                np.testing.assert_equal(without[name], value, err_msg=name)


def test_each_change_comes_as_often_as_it_should_and_within_its_range():
    samples = [drawn(ALL, position, channels=4) for position in range(3000)]
    ranges = {
        "noise": (0, 0.1),
        "blur": (0.5, 1),
        "contrast": (0.75, 1.25),
        "gamma": (1 / 1.5, 1.5),
    }
    ranges["low_resolution"] = (0.5, 1)
    for name, (low, high) in ranges.items():
        values = [getattr(sample, name) for sample in samples if getattr(sample, name) is not None]
        none_of_four = (1 - CHANNEL_PROBABILITY.get(name, 1)) ** 4
        assert len(values) / 3000 == pytest.approx(PROBABILITY[name] * (1 - none_of_four), abs=0.03)
        changed = np.concatenate(values)
        if name in CHANNEL_PROBABILITY:
            is_changed = changed != (0 if name == "blur" else 1)
            assert is_changed.mean() == pytest.approx(
                CHANNEL_PROBABILITY[name] / (1 - none_of_four), abs=0.05
            )
            changed = changed[is_changed]
        width = high - low
        assert low <= changed.min() < low + 0.05 * width
        assert high - 0.05 * width < changed.max() <= high
    zooms = [1 / np.cbrt(np.linalg.det(sample.matrix.astype(float))) for sample in samples]
    assert 1 / 1.4 <= min(zooms) < 0.73
    assert 1.37 < max(zooms) <= 1.4 + 1e-6
    assert np.mean(np.array(zooms) > 1) == pytest.approx(0.5, abs=0.03)
    for turn, zoom in zip(
        (sample.matrix for sample in samples[:20]), zooms
    ):  # all axes alike, and turned rigidly
        np.testing.assert_allclose(turn @ turn.T * zoom**2, np.eye(3), atol=1e-5)


def test_without_rotation_and_scaling_nothing_is_turned_and_without_any_nothing_is_drawn():
    plain = AugmentConfig(flip=False, gain=0, offset=0)
    for position in range(20):
        sample = vars(drawn(plain, position))
        nothing = dict.fromkeys(("matrix", "noise", "blur", "low_resolution", "contrast", "gamma"))
        assert {name: sample[name] for name in nothing} == nothing
        assert not any(sample["flips"])
        np.testing.assert_array_equal(sample["scale"], 1)
        np.testing.assert_array_equal(sample["shift"], 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            ("gain", 1),
            ("offset", -1),
            ("rotation_deg", 45),
            ("scaling", 1),
            ("contrast", 1.5),
            ("gamma", 4),
        ],
        *[("noise", -0.1), ("blur", 10), ("low_resolution", 1), ("noise", float("nan"))],
    ],
)
def test_an_augmentation_out_of_range_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"augment {name} must be in \[0, .*\), got {value}"):
        AugmentConfig(**{name: value})


@pytest.mark.parametrize("spacing_mm", [(0.7, 0.7, 0.7), (0.9999999, 1, 1.0000001)])
def test_voxels_of_equal_sides_are_turned_to_the_bit_as_those_of_1_mm(spacing_mm):
    np.testing.assert_equal(vars(drawn(ALL, 2, spacing_mm=spacing_mm)), vars(drawn(ALL, 2)))


def test_the_numbers_of_some_channels_are_theirs_among_all():
    levels = levels_of([Statistics(0, 1 / n, 0, 1) for n in range(1, 5)], ())
    every = draw(ALL, levels, (1, 1, 1), seed=1, position=3)
    some = every.of_channels((3, 1))
    np.testing.assert_array_equal(some.scale, every.scale[[3, 1]])
    np.testing.assert_array_equal(some.noise_keys, every.noise_keys[[3, 1]])
    np.testing.assert_array_equal(some.matrix, every.matrix)


@pytest.mark.parametrize(
    ("blur", "low_resolution"), [(0, 1), (0.7, 1), (0, 0.5), (0, 0.01), (1.2, 0.6)]
)
def test_smoothing_keeps_what_is_constant_and_leaves_a_ramp_where_it_is(blur, low_resolution):
    weights = smoothing(30, blur, low_resolution)
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-6)
    assert weights.min() >= 0
    if low_resolution > 0.1:
        middle = slice(8, -8)
        np.testing.assert_allclose(
            (weights @ np.arange(30))[middle], np.arange(30)[middle], atol=0.51
        )


@pytest.mark.parametrize(
    ("config", "names", "axes"),
    [
        (AugmentConfig(), ("tumour",), (0, 1, 2)),
        (AugmentConfig(), ("left kidney", "right kidney"), (1, 2)),
        (AugmentConfig(flip=False), ("tumour",), ()),
    ],
)
def test_images_are_mirrored_but_never_onto_the_other_side(config, names, axes):
    mirrored = config.mirrored_axes(names)
    assert mirrored == axes
    levels = levels_of([Statistics(0, 1, 0, 1)], ())
    drawn_flips = [
        draw(config, levels, (1, 1, 1), seed=1, position=k, mirrored=mirrored).flips
        for k in range(100)
    ]
    shares = np.mean(drawn_flips, axis=0)
    assert tuple(np.flatnonzero(shares)) == axes
    assert all(0.3 < shares[axis] < 0.7 for axis in axes)

"""What is drawn for a sample: numbers that follow from seed and position."""

import dataclasses

import numpy as np
import pytest

from cpu3d.data.augment import AUGMENTS, NO_AUGMENT, AugmentConfig, draw, draw_box, smoothing
from cpu3d.data.normalise import Kind, Normalisation, Statistics, levels_of

ALL = AUGMENTS["nnunet"]


def drawn(
    config,
    position,
    *,
    channels=2,
    names=(),
    own=(0, 1, 0, 1),
    kinds=(),
    seed=1,
    spacing_mm=(1, 1, 1),
):
    """With a normalisation that changes nothing, unless by a channel's `own` statistics: "scale" is
    the gain, "shift" the offset."""
    levels = levels_of([Statistics(*own)] * channels, kinds)
    mirrored = config.mirrored_axes(names)
    return draw(config, levels, spacing_mm, seed=seed, position=position, mirrored=mirrored)


def test_what_is_drawn_depends_on_seed_and_position_alone():
    samples = [drawn(ALL, position) for position in range(50)]
    for position, sample in enumerate(samples):
        np.testing.assert_equal(vars(sample), vars(drawn(ALL, position)))
    strengths = np.abs([[sample.scale - 1, sample.shift] for sample in samples]).max((0, 2))
    np.testing.assert_allclose(strengths, 0.1, atol=0.005)
    samples.append(drawn(ALL, 0, seed=2))
    for name in ("matrix", "noise_keys"):
        assert len({getattr(sample, name).tobytes() for sample in samples}) == 51
    # The drawn intensity is applied to normalised values: here to x / 2 - 2.
    halved = drawn(ALL, 3, own=(4, 2, 0, 9))
    np.testing.assert_allclose(halved.scale, 0.5 * samples[3].scale, rtol=1e-6)
    np.testing.assert_allclose(halved.shift, samples[3].shift - 2 * samples[3].scale, rtol=1e-6)
    ct = Normalisation(Kind.CT, 0, 9, 4, 2)  # x / 2 up to 4.5, and -2 around the volume
    mixed = drawn(ALL, 3, own=(4, 2, 0, 9), kinds=(Normalisation(), ct))
    np.testing.assert_allclose(mixed.scale, halved.scale)
    own = halved.shift * np.eye(2)
    np.testing.assert_allclose([mixed.shift, mixed.outside], own, rtol=1e-6)
    np.testing.assert_array_equal([mixed.background, mixed.limits[1]], [[0, np.nan], [-2, 2.5]])


@pytest.mark.parametrize("left", ["rotation_deg", "contrast", "gamma", "noise", "blur", "gain"])
def test_one_option_does_not_move_the_numbers_of_another(left):
    changed = {"rotation_deg": {"matrix"}, "gain": {"scale", "shift"}}.get(left, {left})
    for position in range(20):
        every = vars(drawn(ALL, position))
        without = vars(drawn(dataclasses.replace(ALL, **{left: 0.0}), position))
        for name in set(every) - changed:
            np.testing.assert_equal(without[name], every[name], err_msg=name)


RANGES = {
    "noise": (0, 0.1, 1, 0.1, 1, 61.4103),
    "blur": (0.5, 1, 0, 0.2, 0.5, 782.587),
    "contrast": (0.75, 1.25, 1, 0.15, 1, 1848.62),
    "gamma": (1 / 1.5, 1.5, 1, 0.4, 1, 4949.12),
    "low_resolution": (0.5, 1, 1, 0.25, 0.5, 2542.61),
}
"""Change -> its least and largest value with ALL, and that of a channel without it; the shares of
samples and of their channels that have it; and the sum that it has always had, by the order of
draws."""


def test_each_change_comes_as_often_as_it_should_and_within_its_range():
    samples = [drawn(ALL, position, channels=4) for position in range(3000)]
    for name, (low, high, without, of_samples, of_channels, total) in RANGES.items():
        values = [getattr(sample, name) for sample in samples if getattr(sample, name) is not None]
        none_of_four = (1 - of_channels) ** 4
        assert len(values) / 3000 == pytest.approx(of_samples * (1 - none_of_four), abs=0.03)
        changed = np.concatenate(values)
        assert changed.sum(dtype=float) == pytest.approx(total, rel=1e-5)
        is_changed = changed != without
        share = of_channels / (1 - none_of_four)
        assert is_changed.mean() == pytest.approx(share, abs=0.05)
        margin = 0.05 * (high - low)
        assert low <= changed[is_changed].min() < low + margin
        assert high - margin < changed[is_changed].max() <= high
    assert np.mean([sample.negative for sample in samples]) == pytest.approx(0.25, abs=0.03)
    zooms = [1 / np.cbrt(np.linalg.det(sample.matrix.astype(float))) for sample in samples]
    assert 1 / 1.4 <= min(zooms) < 0.73
    assert 1.37 < max(zooms) <= 1.4 + 1e-6
    turns = np.array([sample.matrix * zoom for sample, zoom in zip(samples, zooms)])
    for turn in turns[:20]:  # all axes alike, and turned rigidly
        np.testing.assert_allclose(turn @ turn.T, np.eye(3), atol=1e-5)
    assert 0.7499 < turns[:, 0, 0].min() < 0.77  # by up to 30 degrees about Y and about Z
    assert abs(np.corrcoef(turns[:, 0, 1], turns[:, 0, 2])[0, 1]) < 0.1  # each by its own angle


def test_thick_slices_are_turned_and_zoomed_in_their_plane_alone():
    matrix = drawn(ALL, 0, spacing_mm=(1, 1, 3)).matrix
    np.testing.assert_array_equal([*matrix[2], *matrix[:, 2]], [0, 0, 1] * 2)
    assert abs(matrix[0, 1]) > 0.05


def test_boxes_of_other_samples_have_any_share_of_the_grid_and_lie_anywhere_in_it():
    how = {"cases": 50, "seed": 1}
    share = AUGMENTS["cutmix"].cutmix
    drawn = [draw_box(share, (40, 30, 8), position=position, **how) for position in range(4000)]
    taken = [(each[0], position) for position, each in enumerate(drawn) if each]
    assert all(donor // 50 == position // 50 for donor, position in taken)  # the same epoch
    assert {(donor - position) % 50 for donor, position in taken} == set(range(1, 50))
    boxes = [each for each in drawn if each is not None]
    assert len(boxes) / 4000 == pytest.approx(0.5, abs=0.03)
    spans = np.array([[(side.start, side.stop) for side in box] for _, box in boxes])
    assert spans.min() == 0
    np.testing.assert_array_equal(spans[..., 1].max(0), [40, 30, 8])
    shares = np.prod(spans[..., 1] - spans[..., 0], 1) / (40 * 30 * 8)
    np.testing.assert_allclose(np.quantile(shares, [0.25, 0.5, 0.75]), [0.25, 0.5, 0.75], atol=0.05)
    np.testing.assert_allclose(spans.mean((0, 2)), [20, 15, 4], atol=0.6)


def test_noise_alone_needs_no_volume_at_a_time():
    needs = [name for name in RANGES if dataclasses.replace(NO_AUGMENT, **{name: 0.1}).needs_volume]
    assert needs == ["blur", "contrast", "gamma", "low_resolution"]


@pytest.mark.parametrize(
    "words", ["noise -1", "blur nan", "gain 1", "contrast 1", "low_resolution 1", "cutmix 1"]
)
def test_an_augmentation_out_of_range_is_refused(words):
    name, value = words.split()
    with pytest.raises(ValueError, match=f"augment {name} must be in .*, got {value}"):
        AugmentConfig(**{name: float(value)})


@pytest.mark.parametrize(("blur", "low_resolution"), [(0.7, 1), (0, 0.32), (0, 0.01), (1.2, 0.6)])
def test_smoothing_keeps_what_is_constant_and_leaves_a_ramp_where_it_is(blur, low_resolution):
    weights = smoothing(30, blur, low_resolution)
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-6)
    assert weights.min() >= 0
    if low_resolution > 0.1:
        ramp = np.arange(30)
        np.testing.assert_allclose((weights @ ramp)[8:22], ramp[8:22], atol=0.4)


@pytest.mark.parametrize(
    ("flip", "names", "axes"),
    [
        (True, ("tumour",), (0, 1, 2)),
        (True, ("left kidney", "right kidney"), (1, 2)),
        (False, ("tumour",), ()),
    ],
)
def test_images_are_mirrored_but_never_onto_the_other_side(flip, names, axes):
    config = AugmentConfig(flip=flip)
    assert config.mirrored_axes(names) == axes
    shares = np.mean([drawn(config, position, names=names).flips for position in range(100)], 0)
    assert tuple(np.flatnonzero(shares)) == axes
    assert all(0.3 < shares[axis] < 0.7 for axis in axes)

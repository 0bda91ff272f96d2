"""Augmentation: parameters are numbers, applying them is geometry."""

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.data import normalise as module
from cpu3d.data.augment import AugmentConfig, draw
from cpu3d.data.normalise import Finish, padded, resample


def drawn(config, position, seed=1, channels=2, spacing_mm=(1, 1, 1)):
    """With a normalisation that changes nothing: "scale" is the gain, "shift" the offset."""
    return draw(config, np.ones(channels), np.zeros(channels), spacing_mm, seed=seed, position=position)


def test_what_is_drawn_depends_on_seed_and_position_alone():
    config = AugmentConfig(rotation_deg=10, scaling=0.1)
    samples, again = ([drawn(config, position) for position in range(50)] for _ in range(2))
    for sample, same in zip(samples, again):
        np.testing.assert_equal(sample, same)
        assert np.all(np.abs(sample["scale"] - 1) <= 0.1)
        assert np.all(np.abs(sample["shift"]) <= 0.1)
    assert len({sample["planes"].tobytes() for sample in samples}) == 50
    assert len({tuple(sample["flips"]) for sample in samples}) == 8
    # The drawn intensity is applied to normalised values: here to x / 2 - 2.
    halved = draw(config, np.full(2, 0.5), np.full(2, -2.0), (1, 1, 1), seed=1, position=3)
    np.testing.assert_allclose(halved["scale"], 0.5 * samples[3]["scale"], rtol=1e-6)
    np.testing.assert_allclose(halved["shift"], samples[3]["shift"] - 2 * samples[3]["scale"], rtol=1e-6)
    plain = drawn(AugmentConfig(), 3)
    for name in ("flips", "scale", "shift"):  # one option does not move the others
        np.testing.assert_array_equal(plain[name], samples[3][name])


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


# --- Finishing: the same bits in slabs and at once, in a pipeline and in a step, one by one and in a batch ---

CODES = ((1, 2, 3), (2, 3), (3, 255))
START, SIZE, PADDING = (1, 0, 2), (9, 7, 6), ((1, 3), (2, 1), (0, 3))
"""Of a box in its arrays, which are larger; with its padding a sample is 13 x 10 x 9 voxels."""


def box(seed=0, *, half=False, flips=None):
    """A box of arrays that are larger than it, as a loader gives it."""
    rng = np.random.default_rng(seed)
    whole = tuple(a + n + 1 for a, n in zip(START, SIZE))
    bits = rng.integers(-900, 900, (*whole, 4)).astype(np.int16)
    bits[rng.random((*whole, 4)) < 0.3] = 0
    if half:
        bits = (bits / np.float32(300)).astype(np.float16).view(np.int16)
    label = np.where(rng.random(whole) < 0.1, rng.choice([1, 2, 3, 255], whole), 0).astype(np.uint8)
    scale, shift = np.array([0.01, 0.02, 0.003, 0.4]), np.array([-1, 0.5, 0.25, 2])
    drawn = draw(AugmentConfig(rotation_deg=15), scale, shift, (1, 1, 2), seed=seed, position=7)
    if flips is not None:
        drawn["flips"] = np.array(flips)
    arrays = {**drawn, "bits": bits, "is_half": np.array(half), "label": label}
    arrays.update(start=np.int64(START), size=np.int64(SIZE), padding=np.int64(PADDING))
    return {"channels": (0, 1, 2, 3), **{name: tf.constant(array) for name, array in arrays.items()}}


def same(left, right):
    """Whether two (image, target) hold the same bits: -0 is not 0, as it would not be in a hash."""
    bits = [[tf.io.serialize_tensor(part).numpy() for part in pair] for pair in (left, right)]
    return bits[0] == bits[1]


@pytest.mark.parametrize("flips", [(0, 0, 0), (1, 0, 1), (0, 1, 0), (1, 1, 1)])
@pytest.mark.parametrize(("half", "planes"), [(False, 1), (False, 4), (True, 2), (True, 100)])
def test_slabs_of_any_thickness_are_the_volume_by_hand(flips, half, planes, monkeypatch):
    monkeypatch.setattr(module, "SLAB_VALUES", planes * 7 * 6 * 4)
    sample = box(half=half, flips=np.array(flips, bool))
    image, target = Finish(CODES).from_box(sample)
    cut = tuple(slice(a, a + n) for a, n in zip(START, SIZE))
    bits, label, scale, shift = (sample[name].numpy() for name in ("bits", "label", "scale", "shift"))
    value = bits[cut].view(np.float16).astype(np.float32) if half else bits[cut].astype(np.float32)
    mirrored, around = tuple(slice(None, None, -1 if flipped else 1) for flipped in flips), [*PADDING, (0, 0)]
    expected = np.where(value == 0, np.float32(0), value * scale + shift)
    np.testing.assert_array_equal(image, np.pad(expected, around)[mirrored])
    regions = np.stack([np.isin(label[cut], members) for members in CODES], -1)
    np.testing.assert_array_equal(target, np.pad(regions, around)[mirrored])
    assert (image.shape, target.dtype) == ((13, 10, 9, 4), tf.uint8)


@pytest.mark.parametrize(("dtype", "resamples"), [("float32", True), ("bfloat16", False), ("bfloat16", True)])
def test_the_same_bits_wherever_it_runs(dtype, resamples):
    finish = Finish(CODES, dtype, resamples)
    boxes = [box(0), box(1), box(2, half=True)]
    single, raws = [finish.from_box(part) for part in boxes], [padded(part) for part in boxes]
    batch = {name: tf.stack([raw[name] for raw in raws]) for name in raws[0]}
    together = [tf.stack(parts) for parts in zip(*single)]
    for run in (finish, tf.function(lambda raw: finish(raw))):
        assert all(same(run(raw), sample) for raw, sample in zip(raws, single))
        assert same(run(batch), together)
    pipeline = tf.data.Dataset.from_tensor_slices(batch)
    assert all(same(made, sample) for made, sample in zip(pipeline.map(finish), single))
    assert same(next(iter(pipeline.batch(3).map(finish))), together)

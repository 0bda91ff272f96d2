"""Finishing: the same bits in slabs and at once, in a pipeline and in a step, one by one and in a batch."""

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.data import finish as finish_module
from cpu3d.data.augment import AugmentConfig, draw
from cpu3d.data.finish import Finish, padded

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
    monkeypatch.setattr(finish_module, "SLAB_VALUES", planes * 7 * 6 * 4)
    one = box(half=half, flips=np.array(flips, bool))
    image, target = Finish(CODES).from_box(one)
    cut = tuple(slice(a, a + n) for a, n in zip(START, SIZE))
    bits, label, scale, shift = (one[name].numpy() for name in ("bits", "label", "scale", "shift"))
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
    single, raws = [finish.from_box(one) for one in boxes], [padded(one) for one in boxes]
    batch = {name: tf.stack([raw[name] for raw in raws]) for name in raws[0]}
    together = [tf.stack(parts) for parts in zip(*single)]
    for run in (finish, tf.function(lambda raw: finish(raw))):
        assert all(same(run(raw), one) for raw, one in zip(raws, single))
        assert same(run(batch), together)
    pipeline = tf.data.Dataset.from_tensor_slices(batch)
    assert all(same(made, one) for made, one in zip(pipeline.map(finish), single))
    assert same(next(iter(pipeline.batch(3).map(finish))), together)

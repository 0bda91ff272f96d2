"""Finishing: the same bits in slabs and at once, in a pipeline and in a step, one by one and in a batch."""

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.data import finish as finish_module
from cpu3d.data.augment import AugmentConfig, draw
from cpu3d.data.finish import Finish, padded

CODES = ((1, 2, 3), (2, 3), (3,))
GRID = (13, 10, 9)
"""Voxels of every sample here."""


def box(seed=0, *, half=False, inside=(9, 7, 6), start=(1, 0, 2), padding=((1, 3), (2, 1), (0, 3))):
    """A box of arrays that are larger than it, as a loader gives it, for a sample of `GRID`."""
    rng = np.random.default_rng(seed)
    whole = tuple(a + n + 1 for a, n in zip(start, inside))
    bits = rng.integers(-900, 900, (*whole, 4)).astype(np.int16)
    bits[rng.random((*whole, 4)) < 0.3] = 0
    if half:
        bits = (bits / np.float32(300)).astype(np.float16).view(np.int16)
    label = np.where(rng.random(whole) < 0.1, rng.integers(0, 4, whole), 0).astype(np.uint8)
    scale, shift = np.array([0.01, 0.02, 0.003, 0.4]), np.array([-1, 0.5, 0.25, 2])
    drawn = draw(AugmentConfig(rotation_deg=15), scale, shift, (1, 1, 2), seed=seed, position=7)
    return {
        "bits": tf.constant(bits),
        "is_half": tf.constant(half),
        "label": tf.constant(label),
        **{name: tf.constant(array) for name, array in drawn.items()},
        "start": tf.constant(start, tf.int64),
        "size": tf.constant(inside, tf.int64),
        "padding": tf.constant(padding, tf.int64),
        "channels": (0, 1, 2, 3),
    }


def by_hand(box, codes=CODES):
    """Image, in float32, and target of a box without rotation, in NumPy."""
    cut = tuple(slice(a, a + n) for a, n in zip(box["start"].numpy(), box["size"].numpy()))
    bits, label = box["bits"].numpy()[cut][..., list(box["channels"])], box["label"].numpy()[cut]
    value = bits.view(np.float16).astype(np.float32) if box["is_half"] else bits.astype(np.float32)
    scale, shift = (box[name].numpy()[list(box["channels"])] for name in ("scale", "shift"))
    image = np.where(value == 0, np.float32(0), value * scale + shift)
    target = np.stack([np.isin(label, members) for members in codes], -1).astype(np.uint8)
    mirrored = tuple(slice(None, None, -1 if flipped else 1) for flipped in box["flips"].numpy())
    around = [*box["padding"].numpy(), (0, 0)]
    return np.pad(image, around)[mirrored], np.pad(target, around)[mirrored]


def batch(raws):
    return {name: tf.stack([raw[name] for raw in raws]) for name in raws[0]}


def same(left, right):
    """Whether two (image, target) hold the same bits: -0 is not 0, as it would not be in a hash."""
    return all(a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b) for a, b in zip(left, right))


def bits(tensor):
    return tf.io.serialize_tensor(tensor).numpy()


@pytest.mark.parametrize(
    "flips", [(False, False, False), (True, False, True), (False, True, False), (True, True, True)]
)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("planes", [1, 2, 4, 100])
def test_slabs_of_any_thickness_are_the_volume_by_hand(flips, half, planes, monkeypatch):
    monkeypatch.setattr(finish_module, "SLAB_VALUES", planes * 7 * 6 * 4)
    one = {**box(half=half), "flips": tf.constant(flips)}
    image, target = Finish(CODES).from_box(one)
    expected, regions = by_hand(one)
    assert image.shape == (*GRID, 4)
    np.testing.assert_array_equal(image, expected)
    np.testing.assert_array_equal(target, regions)
    assert target.dtype == tf.uint8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("resamples", [False, True])
def test_the_same_bits_wherever_it_runs(dtype, resamples):
    finish = Finish(CODES, dtype, resamples)
    boxes = [box(0), box(1), box(2, half=True)]
    single = [finish.from_box(one) for one in boxes]
    raws = [padded(one) for one in boxes]
    assert all(same(finish(raw), one) for raw, one in zip(raws, single))
    compiled = tf.function(lambda raw: finish(raw))
    assert all(same(compiled(raw), one) for raw, one in zip(raws, single))
    together = [tf.stack(parts) for parts in zip(*single)]
    assert same(finish(batch(raws)), together)
    assert same(compiled(batch(raws)), together)
    pipeline = tf.data.Dataset.from_tensor_slices(batch(raws))
    assert all(same(made, one) for made, one in zip(pipeline.map(finish), single))
    assert same(next(iter(pipeline.batch(3).map(finish))), together)


@pytest.mark.parametrize("label", [0, 1, 2, 3, 7, 255])
def test_a_target_says_where_a_label_is_one_of_its_region_s(label):
    one = {**box(), "flips": tf.constant([False] * 3)}
    one["label"] = tf.fill(one["label"].shape, np.uint8(label))
    target = Finish(((1, 255), (7,))).from_box(one)[1]
    inside = target[1:10, 2:9, :6]
    assert np.array_equal(np.unique(inside[..., 0]), [int(label in (1, 255))])
    assert np.array_equal(np.unique(inside[..., 1]), [int(label == 7)])
    assert int(tf.reduce_sum(tf.cast(target, tf.int32))) == int(tf.reduce_sum(tf.cast(inside, tf.int32)))

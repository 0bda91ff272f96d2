"""What a loader gives for a sample: the map of an array, a copy of a box, or one voxel of background."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from cpu3d.data.augment import NO_AUGMENT
from cpu3d.data.files.loader import BOX, Loader
from cpu3d.data.files.reader import Reader
from cpu3d.data.region import Region
from cpu3d.data.sampling import PatchSampling


@pytest.mark.parametrize(("mode", "kind"), [("mmap", "npy"), ("ram", "npy"), ("pread", "npy"), ("mmap", "b2nd")])
def test_a_large_part_is_the_map_a_small_one_a_copy_and_outside_of_the_brain_nothing_is_read(
    tmp_path, stored_case, mode, kind
):
    image = np.arange(8 * 8 * 8 * 2).reshape(8, 8, 8, 2).astype(np.int16)
    record = stored_case(tmp_path, image, image[..., 0].astype(np.uint8), kind=kind)
    record = dataclasses.replace(record, box=Region((1, 1, 1), (6, 6, 6)), channel_std=(2.0, 4.0))
    reading = SimpleNamespace(reader=Reader(tmp_path, mode))
    for size, start, found in (((12, 12, 12), (1, 1, 1), (6, 6, 6)), ((2, 2, 2), (3, 3, 3), (2, 2, 2))):
        loader = Loader(reading, [record], PatchSampling(size, "centre"), augment=NO_AUGMENT)
        box = dict(zip(BOX, loader(0)))
        is_map = kind == "npy" and mode != "pread" and size == (12, 12, 12)
        assert (box["bits"].shape[:3] == (8, 8, 8), not box["bits"].flags.writeable) == (is_map, is_map)
        taken = tuple(slice(a, a + n) for a, n in zip(box["start"], box["size"]))
        expected = tuple(slice(a, a + n) for a, n in zip(start, found))
        np.testing.assert_array_equal(box["bits"][taken], image[expected])
        np.testing.assert_array_equal(box["label"][taken], image[expected][..., 0].astype(np.uint8))
        assert box["padding"].sum(1).tolist() == [a - b for a, b in zip(size, found)]
        np.testing.assert_allclose(box["scale"], (0.5, 0.25))
    corner = PatchSampling((1, 1, 1), "grid", extent="full", grid=(8, 8, 8), overlap=0)
    box = dict(zip(BOX, Loader(reading, [record], corner, augment=NO_AUGMENT)(0)))
    assert not box["bits"].any()
    assert box["bits"].shape == (1, 1, 1, 2)

"""What a loader brings into memory ahead and gives back, and for how long it stays."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from cpu3d.data.augment import NO_AUGMENT
from cpu3d.data.files.loader import BOX, Loader, open_reading
from cpu3d.data.files.reader import Reader
from cpu3d.data.region import Region
from cpu3d.data.sampling import PatchSampling
from cpu3d.data.store import open_store, write_store


class Advised:
    """A reader that notes the advice it gets, and fails at it."""

    mode = "pread"

    def __init__(self):
        self.given = {"advise": [], "give_back": []}

    def advise(self, record, slices):
        self.given["advise"].append(record.case_id)
        raise OSError("a disk")

    def give_back(self, record):
        self.given["give_back"].append(record.case_id)

    def box(self, record, part, slices):
        return np.zeros((2, 2, 3, 1), np.int16) if part == "x" else np.zeros((2, 2, 3), np.uint8)


@pytest.mark.parametrize(("kept", "back"), [("", "012345"), ("13", "0245")])
def test_what_comes_is_brought_in_and_what_was_used_is_given_back_unless_it_stays_or_comes_again(
    make_record, kept, back
):
    for count, expected in ((10, back), (1, "")):
        reader, records = Advised(), [make_record(str(number)) for number in range(count)]
        reading = SimpleNamespace(reader=reader, kept=frozenset(kept))
        whole = PatchSampling((4, 4, 4), "centre", shuffle=False)
        loader = Loader(reading, records, whole, augment=NO_AUGMENT, samples=range(10))
        for sample in range(10):
            loader(sample)
        loader._adviser.shutdown()
        assert set(reader.given["advise"]) == {record.case_id for record in records} - set("12" if count == 10 else "")
        assert "".join(reader.given["give_back"]) == expected


@pytest.mark.parametrize(("mode", "kind"), [("mmap", "npy"), ("ram", "npy"), ("pread", "npy"), ("mmap", "b2nd")])
def test_a_large_part_is_the_map_a_small_one_a_copy_and_outside_of_the_brain_nothing_is_read(
    tmp_path, stored_case, mode, kind
):
    image = np.arange(8 * 8 * 8 * 2).reshape(8, 8, 8, 2).astype(np.int16)
    record = stored_case(tmp_path, image, image[..., 0].astype(np.uint8), kind=kind)
    record = dataclasses.replace(record, box=Region((1, 1, 1), (6, 6, 6)), channel_std=(2.0, 4.0))
    reading = SimpleNamespace(reader=Reader(tmp_path, mode), kept=frozenset())
    for size, start, found in (((12, 12, 12), (1, 1, 1), (6, 6, 6)), ((2, 2, 2), (3, 3, 3), (2, 2, 2))):
        loader = Loader(reading, [record], PatchSampling(size, "centre"), augment=NO_AUGMENT, samples=range(1))
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
    box = dict(zip(BOX, Loader(reading, [record], corner, augment=NO_AUGMENT, samples=range(9))(0)))
    assert not box["bits"].any()
    assert box["bits"].shape == (1, 1, 1, 2)


def test_what_stays_in_memory_is_the_first_that_the_budget_holds(tmp_path, stored_case, manifest_of):
    image = np.ones((4, 4, 4, 1), np.int16)
    records = [stored_case(tmp_path, image, image[..., 0].astype(np.uint8), stem=stem) for stem in "abcdef"]
    write_store(tmp_path, manifest_of(records, {"train": tuple("abcd"), "val": tuple("ef")}))
    size_bytes = records[0].image_bytes + records[0].label_bytes
    for free_bytes, kept in ((0, ""), (6 * size_bytes, "abc"), (12 * size_bytes, "abcdef")):
        reading = open_reading(open_store(tmp_path), ("train", "val"), free_bytes=free_bytes, read_mode="mmap")
        assert reading.kept == set(kept)

"""What a loader brings into memory ahead and gives back, and for how long it stays."""

import ctypes
import mmap
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest

from cpu3d.data.augment import NO_AUGMENT
from cpu3d.data.files import pages
from cpu3d.data.files.loader import Loader, open_reading
from cpu3d.data.files.reader import Reader
from cpu3d.data.records import array_path
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


def test_what_stays_in_memory_is_the_first_that_the_budget_holds(tmp_path, stored_case, manifest_of):
    image = np.ones((4, 4, 4, 1), np.int16)
    records = [stored_case(tmp_path, image, image[..., 0].astype(np.uint8), stem=stem) for stem in "abcdef"]
    write_store(tmp_path, manifest_of(records, {"train": tuple("abcd"), "val": tuple("ef")}))
    size_bytes = records[0].image_bytes + records[0].label_bytes
    for free_bytes, kept in ((0, ""), (6 * size_bytes, "abc"), (12 * size_bytes, "abcdef")):
        reading = open_reading(open_store(tmp_path), ("train", "val"), free_bytes=free_bytes, read_mode="mmap")
        assert reading.kept == set(kept)


def share_in_memory(path):
    """Of a file's pages, the share that the kernel holds."""
    vector = np.zeros(-(-path.stat().st_size // mmap.PAGESIZE), np.uint8)
    with open(path, "rb") as file:
        content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    address, to = ctypes.c_void_p(content.ctypes.data), ctypes.c_void_p(vector.ctypes.data)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(content.size), to) == 0
    return (vector & 1).mean()


@pytest.mark.parametrize(("mode", "kind"), [("mmap", "npy"), ("pread", "b2nd"), ("ram", "npy")])
def test_a_reader_brings_in_what_it_is_advised_and_gives_it_back(tmp_path, stored_case, mode, kind):
    image = np.random.default_rng(0).integers(0, 30000, (64, 64, 64, 2)).astype(np.int16)
    record = stored_case(tmp_path, image, image[..., 0].astype(np.uint8), kind=kind)
    paths = [array_path(tmp_path, record, part) for part in "xy"]
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            pages.give_back(file.fileno())
        if share_in_memory(path):
            pytest.skip("the pages of this file system cannot be dropped")
    reader = Reader(tmp_path, mode)
    reader.advise(record, (slice(0, 8), slice(0, 64), slice(0, 64)))
    low, high = (0.05, 0.9) if mode == "mmap" else (1, 1)
    until = time.monotonic() + 10  # what is asked for may still be on its way
    while not all(low <= share_in_memory(path) <= high for path in paths):
        assert time.monotonic() < until
        time.sleep(0.05)
    reader.give_back(record)
    assert not any(map(share_in_memory, paths))

"""What a loader brings into memory ahead and gives back, and for how long it stays."""

import ctypes
import gc
import mmap
import os
import threading
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

WHOLE = PatchSampling((4, 4, 4), "centre", shuffle=False)


def advice(records, samples, kept=(), fails=False):
    """The advice that a loader gives for samples that come one after another."""
    given = []

    class FakeReader:
        mode = "pread"

        def advise(self, record, slices):
            given.append(("bring in", record.case_id))
            assert not fails

        def give_back(self, record):
            given.append(("give back", record.case_id))
            assert not fails

        def box(self, record, part, slices):
            return np.zeros((2, 2, 3) if part == "y" else (2, 2, 3, 1), np.uint8 if part == "y" else np.int16)

    reading = SimpleNamespace(reader=FakeReader(), kept=frozenset(kept))
    loader = Loader(reading, records, WHOLE, augment=NO_AUGMENT, samples=samples)
    for sample in samples:
        loader(sample)
    loader._adviser.shutdown()
    return given


def test_what_comes_is_brought_in_once_and_what_was_used_is_given_back_unless_it_stays_or_comes_again(make_record):
    records = [make_record(str(number)) for number in range(10)]
    given = advice(records, range(10), kept="13")
    assert given[:3] == [("bring in", "0"), ("bring in", "1"), ("bring in", "2")]
    assert [case for what, case in given if what == "bring in"] == list("0123456789")
    assert [case for what, case in given if what == "give back"] == list("0245")
    assert given.index(("give back", "0")) > given.index(("bring in", "5"))
    assert ("give back", "a") not in advice([make_record("a")], range(10))
    assert advice(records, range(10), fails=True)  # whatever fails, a run goes on


def test_the_thread_begins_with_the_first_sample_and_ends_with_its_owner(make_record, tmp_path):
    def threads():
        return {one for one in threading.enumerate() if "look-ahead" in one.name}

    gc.collect()
    before = threads()
    reading = SimpleNamespace(reader=Reader(tmp_path), kept=frozenset())
    loader = Loader(reading, [make_record()], WHOLE, augment=NO_AUGMENT, samples=range(3))
    assert threads() == before
    with pytest.raises(Exception, match="must exist, found none"):
        loader(0)
    (thread,) = threads() - before
    del loader
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_what_stays_in_memory_is_the_first_that_the_budget_holds(tmp_path, stored_case, manifest_of):
    image = np.ones((4, 4, 4, 1), np.int16)
    records = [stored_case(tmp_path, image, image[..., 0].astype(np.uint8), stem=stem) for stem in "abcdef"]
    write_store(tmp_path, manifest_of(records, {"train": tuple("abcd"), "val": tuple("ef")}))
    store = open_store(tmp_path)
    size_bytes = records[0].image_bytes + records[0].label_bytes
    for free_bytes, kept in ((0, ""), (6 * size_bytes, "abc"), (12 * size_bytes, "abcdef")):
        reading = open_reading(store, ("train", "val"), free_bytes=free_bytes, read_mode="mmap")
        assert reading.kept == set(kept)


def share_in_memory(path):
    """Of a file's pages, the share that the kernel holds."""
    vector = np.zeros(-(-path.stat().st_size // mmap.PAGESIZE), np.uint8)
    with open(path, "rb") as file:
        content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    address, to = ctypes.c_void_p(content.ctypes.data), ctypes.c_void_p(vector.ctypes.data)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(content.size), to) == 0
    return (vector & 1).mean()


@pytest.mark.parametrize("mode", ["mmap", "pread", "ram"])
@pytest.mark.parametrize("kind", ["npy", "b2nd"])
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
    for path in paths:
        for _ in range(100):  # what is asked for may still be on its way
            share = share_in_memory(path)
            if (0 < share < 0.9) if mode != "ram" and kind == "npy" else share == 1:
                break
            time.sleep(0.05)
        else:
            pytest.fail(f"{share} of {path} is in memory")
    reader.give_back(record)
    assert not any(map(share_in_memory, paths))

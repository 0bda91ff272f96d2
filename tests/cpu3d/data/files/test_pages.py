"""What the look-ahead brings into memory and gives back, as the kernel tells it of real files."""

import ctypes
import gc
import mmap
import os
import threading

import numpy as np
import pytest

from cpu3d.data.files import pages
from cpu3d.data.files.pages import AHEAD, LookAhead
from cpu3d.data.files.reader import Reader
from cpu3d.data.records import array_path

COUNT = 12


def share_in_memory(path):
    """Of a file's pages, the share that the kernel holds."""
    vector = np.zeros(-(-path.stat().st_size // mmap.PAGESIZE), np.uint8)
    with open(path, "rb") as file:
        content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    call = ctypes.CDLL(None).mincore
    assert (
        call(
            ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(content.size), vector.ctypes.data_as(ctypes.c_void_p)
        )
        == 0
    )
    return (vector & 1).mean()


def dropped(path):
    """Give a file's pages back; skip where the kernel keeps them."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        pages.give_back(file.fileno())
    if share_in_memory(path):
        pytest.skip("the pages of this file system cannot be dropped")


def run(bring_in, release, samples, *, in_flight=2, stop=None):
    ahead = LookAhead(bring_in, release, samples=samples, in_flight=in_flight)
    for sample in samples[:stop]:
        ahead.at(sample)
    ahead.close()


def test_every_sample_is_brought_in_once_before_it_comes_and_released_once_after_its_use():
    brought, released = [], []
    run(brought.append, lambda sample, in_use: released.append((sample, in_use)), range(5, 5 + COUNT), in_flight=3)
    assert brought == list(range(5, 5 + COUNT))
    assert released[0] == (5, range(6, 8 + AHEAD + 1))
    assert released[-1] == (COUNT + 1, range(COUNT + 2, 5 + COUNT))
    assert [sample for sample, _ in released] == list(range(5, COUNT + 2))


def test_whatever_fails_a_run_goes_on():
    asked = []

    def fail(*sample):
        asked.append(sample[0])
        raise OSError("a disk")

    run(fail, fail, range(9))
    assert sorted(asked) == sorted([*range(9), *range(7)])


def test_the_thread_begins_with_the_first_sample_and_ends_with_its_owner():
    def threads():
        return [one for one in threading.enumerate() if "look-ahead" in one.name]

    before = threads()
    ahead = LookAhead(lambda sample: None, lambda *_: None, samples=range(9), in_flight=2)
    assert threads() == before
    ahead.at(0)
    (thread,) = set(threads()) - set(before)
    del ahead
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("mode", ["mmap", "pread", "ram"])
@pytest.mark.parametrize("kind", ["npy", "b2nd"])
def test_a_reader_brings_in_what_it_is_advised_and_gives_it_back(tmp_path, stored_case, mode, kind):
    image = np.random.default_rng(0).integers(0, 30000, (64, 64, 64, 2)).astype(np.int16)
    record = stored_case(tmp_path, image, image[..., 0].astype(np.uint8), kind=kind)
    paths = [array_path(tmp_path, record, part) for part in "xy"]
    for path in paths:
        dropped(path)
    reader = Reader(tmp_path, mode)
    reader.advise(record, (slice(0, 8), slice(0, 64), slice(0, 64)))
    few = mode != "ram" and kind == "npy"
    for path in paths:
        # What is asked for may still be on its way.
        assert _settles(path, lambda share: 0 < share < 0.9 if few else share == 1)
    reader.advise(record)
    reader.give_back(record)
    if few:
        np.testing.assert_array_equal(reader.box(record, "x", (slice(1, 3),) * 3), image[1:3, 1:3, 1:3])


def _settles(path, holds):
    for _ in range(100):
        if holds(share_in_memory(path)):
            return True
        threading.Event().wait(0.05)
    return False

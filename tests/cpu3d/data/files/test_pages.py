"""What the look-ahead brings into memory and gives back, as the kernel tells it of real files."""

import gc
import os
import threading

import numpy as np
import pytest

from cpu3d.data.files import pages
from cpu3d.data.files.pages import LINGER, LookAhead, map_file, resident

COUNT = 16


@pytest.fixture
def files(tmp_path):
    """Files that are on the disk, none of them in memory; skipped where the kernel does not tell."""
    paths = [tmp_path / str(number) for number in range(COUNT)]
    for path in paths:
        with open(path, "wb") as file:
            file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
            pages.give_back(file.fileno())
    if any(map(share_in_memory, paths)):
        pytest.skip("the pages of this file system cannot be dropped")
    return paths


def share_in_memory(path):
    with open(path, "rb") as file:
        return resident(map_file(file.fileno(), path.stat().st_size)).mean()


def read(path):
    return path.read_bytes() and None


def test_what_comes_is_brought_in_what_was_used_is_given_back_and_what_stays_stays(files):
    kept = {0, 1, 5}
    ahead = LookAhead(
        lambda sample: read(files[sample]), lambda sample: () if sample in kept else (files[sample],), stop=COUNT
    )
    for sample in range(COUNT - 2):
        ahead.at(sample)
    ahead.close()
    assert [bool(share_in_memory(path)) for path in files] == [n in kept or n >= COUNT - 4 for n in range(COUNT)]


def test_pages_that_a_map_was_using_go_some_samples_later(files):
    ahead = LookAhead(lambda sample: None, lambda sample: (files[sample % COUNT],), stop=COUNT)
    with open(files[0], "rb") as file:
        used = map_file(file.fileno(), 1 << 20, populate=True)
    assert np.count_nonzero(used)
    for sample in range(4):
        ahead.at(sample)
    ahead.close()
    assert share_in_memory(files[0])
    del used
    ahead = LookAhead(lambda sample: None, lambda sample: (files[sample % COUNT],), stop=COUNT)
    for sample in range(LINGER + 4):
        ahead.at(sample)
    ahead.close()
    assert not share_in_memory(files[0])


def test_a_file_of_samples_to_come_is_not_given_back(files):
    """As the patches of one case, one after another."""
    ahead = LookAhead(lambda sample: read(files[0]), lambda sample: (files[0],), stop=100)
    for sample in range(8):
        ahead.at(sample)
    ahead.close()
    assert share_in_memory(files[0])


def test_whatever_fails_a_run_goes_on():
    asked = []

    def fail(sample):
        asked.append(sample)
        raise OSError("a disk")

    ahead = LookAhead(fail, fail, stop=9)
    for sample in range(6):
        ahead.at(sample)
    ahead.close()
    assert asked[-1] >= 2


def test_the_thread_begins_with_the_first_sample_and_ends_with_its_owner():
    def threads():
        return [one for one in threading.enumerate() if one.name == "cpu3d look-ahead"]

    before = threads()
    ahead = LookAhead(lambda sample: None, lambda sample: (), stop=9)
    assert threads() == before
    ahead.at(0)
    (thread,) = set(threads()) - set(before)
    del ahead
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    LookAhead(lambda sample: None, lambda sample: (), stop=9).close()

"""Rounds take turns, and pages are dropped when they are said to be."""

import os

import numpy as np
import pytest

from cpu3d.bench.data.measuring import drop_pages, in_turn, read_through, resident_bytes, touch
from cpu3d.data.files.read_mode import MEMORY, file_system


def test_variants_take_turns_and_a_first_round_is_not_counted():
    calls = []

    def variant(name, seconds):
        def work(number):
            calls.append((name, number))
            return seconds + number

        return work

    found = in_turn({"a": variant("a", 1.0), "b": variant("b", 10.0)}, 2)
    assert found == {"a": [1.0, 2.0], "b": [10.0, 11.0]}
    assert calls == [("a", 0), ("b", 0), ("a", 0), ("b", 0), ("a", 1), ("b", 1)]


@pytest.mark.parametrize("order", ["C", "F"])
def test_touching_reads_one_value_of_every_page_in_either_order(order):
    array = np.zeros((64, 64), np.float32, order=order)
    array.ravel(order="K")[::1024] = 1
    assert touch(array) == 4


@pytest.fixture
def on_disk(tmp_path):
    if file_system(tmp_path) in MEMORY:
        pytest.skip("needs a temporary folder on a disk: pages of a file system in memory cannot be dropped")
    return tmp_path


def test_pages_are_there_after_reading_and_gone_after_dropping(on_disk):
    path = on_disk / "file"
    path.write_bytes(os.urandom(300_000))
    read_through([path])
    assert resident_bytes(path) == 300_000
    assert drop_pages([path]) == 0
    assert resident_bytes(path) == 0
    read_through([path])
    assert resident_bytes(path) == 300_000


def test_pages_in_use_are_told_as_kept(on_disk):
    path = on_disk / "file"
    path.write_bytes(os.urandom(400_000))
    drop_pages([path])
    held = np.memmap(path, np.uint8, "r")
    assert held[:4096].sum() > 0
    assert 0 < drop_pages([path]) <= 1


def test_an_empty_file_has_no_pages(tmp_path):
    (tmp_path / "file").touch()
    assert resident_bytes(tmp_path / "file") == 0
    assert drop_pages([tmp_path / "file"]) == 0

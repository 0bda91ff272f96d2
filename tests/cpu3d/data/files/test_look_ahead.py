import gc
import os
import threading
import time

import numpy as np
import pytest

from cpu3d.data.files import page_cache
from cpu3d.data.files.file_map import map_file
from cpu3d.data.files.look_ahead import LookAhead
from cpu3d.data.files.reader import Reader
from cpu3d.data.records import array_path
from cpu3d.data.sampling import sample_at

IMAGE = np.random.default_rng(0).integers(1000, size=(64, 64, 32, 2), dtype=np.int16)
"""Half a megabyte, 128 pages."""
LABEL = np.ones(IMAGE.shape[:3], np.uint8)
TOTAL = int(IMAGE.sum())


def pages_of(folder, record, part="x"):
    """Which pages of a file are in memory."""
    with open(array_path(folder, record, part), "rb") as file:
        return page_cache.resident(map_file(file.fileno(), os.fstat(file.fileno()).st_size))


def in_memory(folder, records):
    """Bytes of the cases' files that are in memory."""
    return sum(int(pages_of(folder, record, part).sum()) for record in records for part in "xy") * 4096


def drop(folder, record):
    for part in "xy":
        with open(array_path(folder, record, part), "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture
def store(tmp_path, stored_case):
    """store(cases): folder and records of cases whose files are on the disk and not in memory."""

    def make(cases, kind="npy"):
        records = [stored_case(tmp_path, IMAGE, LABEL, stem=f"c{n:02d}", kind=kind) for n in range(cases)]
        for record in records:
            drop(tmp_path, record)
        if in_memory(tmp_path, records):
            pytest.skip("this file system's pages cannot be dropped")
        return tmp_path, records

    return make


def eventually(condition):
    """Whether the condition holds within two seconds: a disk's read was asked for and not waited for."""
    end = time.monotonic() + 2
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


def look_ahead_at(reader, records, **settings):
    settings = {"page_budget_bytes": 2**40, "horizon": 2 * len(records), "stop": len(records), **settings}
    return LookAhead(reader, lambda position: records[position % len(records)], **settings)


@pytest.mark.parametrize("mode", ["mmap", "pread", "ram"])
@pytest.mark.parametrize("kind", ["npy", "b2nd"])
def test_a_dropped_file_is_in_memory_before_it_is_read(store, mode, kind):
    folder, records = store(6, kind)
    ahead = look_ahead_at(Reader(folder, mode), records, ahead=2, in_flight=1)
    ahead.at(0)
    assert eventually(lambda: all(pages_of(folder, record, part).all() for record in records[:3] for part in "xy"))
    assert in_memory(folder, records[3:]) == 0
    ahead.at(1)
    assert eventually(lambda: pages_of(folder, records[3]).all())
    ahead.close()


def test_of_a_patch_only_its_pages_are_brought_in(store):
    folder, records = store(2)
    # Planes of X are 8 KiB, two pages: rows 0 to 7 of plane 10 are in the first page behind the header.
    ahead = look_ahead_at(Reader(folder), records, box_at=lambda position: (slice(10, 11), slice(0, 8), slice(0, 32)))
    ahead.at(0)
    assert eventually(lambda: pages_of(folder, records[1]).any())
    ahead.close()
    for record in records:
        found = np.flatnonzero(pages_of(folder, record))
        assert found[found >= 4].tolist() == [20]  # looking at the header brings in what is right behind it


def test_pages_in_memory_stay_within_the_budget_on_data_that_is_larger(store):
    folder, records = store(12)
    case_bytes = sum(4096 * len(pages_of(folder, records[0], part)) for part in "xy")
    budget, most = 5 * case_bytes, 0
    record_at = lambda position: records[sample_at(position, cases=12, seed=3).index]
    reader = Reader(folder)
    ahead = LookAhead(reader, record_at, page_budget_bytes=budget, horizon=24, ahead=1, in_flight=1)
    for position in range(60):
        ahead.at(position)
        assert reader.array(record_at(position), "x").sum() == TOTAL
        assert reader.array(record_at(position), "y").sum() == LABEL.size
        eventually(lambda: ahead._positions.empty())
        most = max(most, in_memory(folder, records))
    ahead.close()
    assert in_memory(folder, records) <= budget
    assert most <= budget + 2 * case_bytes
    # Without the plan the kernel would keep everything here, so what is kept is the plan's choice.
    assert in_memory(folder, records) >= budget - 2 * case_bytes


def test_a_file_that_was_mapped_when_it_was_given_back_is_given_back_again(store):
    folder, records = store(14)
    reader = Reader(folder)
    held = reader.array(records[0], "x")
    held.sum()
    ahead = look_ahead_at(reader, records, page_budget_bytes=1, ahead=0, in_flight=1)
    for position in range(4):
        ahead.at(position)
    eventually(lambda: ahead._positions.empty())
    assert pages_of(folder, records[0]).any()  # a map's pages cannot be dropped
    del held
    for position in range(4, 14):
        ahead.at(position)
    ahead.close()
    assert not pages_of(folder, records[0]).any()


def test_what_is_in_use_is_not_given_back(store):
    folder, records = store(10)
    budget = 3 * sum(4096 * len(pages_of(folder, records[0], part)) for part in "xy")
    ahead = look_ahead_at(Reader(folder), records, page_budget_bytes=budget, ahead=1, in_flight=3)
    for position in range(10):
        ahead.at(position)
        in_use = records[max(0, position - 2) : position + 1]
        assert eventually(lambda in_use=in_use: all(pages_of(folder, record).all() for record in in_use))
        time.sleep(0.005)
        assert all(pages_of(folder, record).all() for record in in_use)
    ahead.close()
    assert in_memory(folder, records) <= budget


def test_look_aheads_of_one_reader_leave_each_others_files_alone(store):
    folder, records = store(12)
    reader = Reader(folder)
    other = look_ahead_at(reader, records[:1], ahead=0, in_flight=1)
    other.at(0)
    assert eventually(lambda: pages_of(folder, records[0]).all())
    ahead = look_ahead_at(reader, records, page_budget_bytes=1, ahead=0, in_flight=1)
    for position in range(12):
        ahead.at(position)
    ahead.close()
    assert all(pages_of(folder, records[0], part).all() for part in "xy")
    assert not pages_of(folder, records[1]).any()
    other.close()


def test_ram_gives_nothing_back(store):
    folder, records = store(4)
    ahead = look_ahead_at(Reader(folder, "ram"), records, page_budget_bytes=1, ahead=0, in_flight=1)
    for position in range(4):
        ahead.at(position)
    ahead.close()
    assert all(pages_of(folder, record, part).all() for record in records for part in "xy")


def test_another_pass_begins_at_the_start_again(store):
    folder, records = store(3)
    ahead = look_ahead_at(Reader(folder), records)
    for position in range(3):
        ahead.at(position)
    assert eventually(lambda: all(pages_of(folder, record).all() for record in records))
    for record in records:
        drop(folder, record)
    ahead.at(0)
    assert eventually(lambda: pages_of(folder, records[0]).all() and pages_of(folder, records[2]).all())
    ahead.close()


def test_threads_that_come_late_change_nothing(store):
    folder, records = store(8)
    advised = []
    reader = Reader(folder)
    reader.advise = lambda record, box: advised.append(record.stem)
    ahead = look_ahead_at(reader, records, ahead=1, in_flight=3)
    for position in (0, 2, 1, 4, 3, 5, 7, 6):
        ahead.at(position)
    ahead.close()
    assert advised == [record.stem for record in records]


@pytest.mark.parametrize("fault", ["missing file", "no record", "no advice"])
def test_whatever_fails_in_it_a_run_goes_on(store, monkeypatch, fault):
    folder, records = store(3)

    def fail(*_):
        raise OSError("no advice")

    if fault == "missing file":
        array_path(folder, records[1], "x").unlink()
    if fault == "no advice":
        monkeypatch.setattr(os, "posix_fadvise", fail)
    reader = Reader(folder)
    record_at = (lambda position: records[9]) if fault == "no record" else (lambda position: records[position])
    ahead = LookAhead(reader, record_at, page_budget_bytes=1, horizon=6, stop=3, in_flight=1, ahead=1)
    for position in range(3):
        ahead.at(position)
    assert ahead._thread.is_alive()
    ahead.close()
    assert reader.array(records[2], "x").sum() == TOTAL


def test_without_posix_fadvise_nothing_is_advised(store, monkeypatch):
    folder, records = store(2)
    monkeypatch.delattr(os, "posix_fadvise")
    ahead = look_ahead_at(Reader(folder), records)
    ahead.at(0)
    ahead.close()
    assert in_memory(folder, records) <= 4 * 128 * 1024  # the headers, and what the kernel reads around them


def test_the_thread_begins_with_the_first_position_and_ends_with_its_owner(store):
    folder, records = store(2)
    before = threading.active_count()
    ahead = look_ahead_at(Reader(folder), records)
    assert threading.active_count() == before
    ahead.at(0)
    thread = ahead._thread
    assert thread.daemon
    del ahead
    gc.collect()
    thread.join(2)
    assert not thread.is_alive()


def test_a_look_ahead_that_was_never_asked_closes_at_once(store):
    folder, records = store(1)
    look_ahead_at(Reader(folder), records).close()

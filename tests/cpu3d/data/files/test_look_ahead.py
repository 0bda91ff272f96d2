import dataclasses
import gc
import os
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cpu3d.data.files import look_ahead, page_cache
from cpu3d.data.files.file_map import map_file
from cpu3d.data.files.look_ahead import LookAhead
from cpu3d.data.files.reader import Reader
from cpu3d.data.records import array_path
from cpu3d.data.sampling import sample_at
from cpu3d.data.sharding import ALL, Share

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
        eventually(lambda: ahead._samples.empty())
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
    eventually(lambda: ahead._samples.empty())
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
    thread.join(60)
    assert not thread.is_alive()


def test_a_look_ahead_that_was_never_asked_closes_at_once(store):
    folder, records = store(1)
    look_ahead_at(Reader(folder), records).close()


# --- Several workers of a host, who share its pages ---


class Kernel:
    """A host's pages: which files are in memory, where nothing goes by itself and every read is done at once."""

    def __init__(self):
        self.files, self.used = set(), {}
        self.reads = self.waits = self.most = 0
        self.uses, self.given, self.taken = 0, [], []

    def bring_in(self, file):
        self.reads += file not in self.files
        self.files.add(file)
        self.most = max(self.most, len(self.files))

    def use(self, worker, file):
        self.waits += file not in self.files
        self.bring_in(file)
        self.used[worker] = file
        self.uses += 1

    def give_back(self, file):
        self.given.append((self.uses, file))
        if file in self.used.values():
            self.taken.append(file)
        self.files.discard(file)


class FakeReader(Reader):
    """Of cases whose files are a byte long and not there."""

    def __init__(self, kernel):
        super().__init__("/nowhere")
        self.kernel, self.asked = kernel, []

    def advise(self, record, slices=None):
        self.asked.append(record.stem)
        self.kernel.bring_in(record.stem)


def run_host(monkeypatch, shares, *, budgets, samples, orders=None, begin=0, seed=0):
    """A host's kernel after `samples` of 60 cases were used here in all, from `begin` on.

    The workers go on in any order, at most a step apart. Each plans within its one of `budgets`, for the order of its
    one of `orders`: that of its share.
    """
    kernel, part = Kernel(), shares[0].part
    monkeypatch.setattr(look_ahead._Adviser, "_give_back", staticmethod(lambda paths: kernel.give_back(stem_of(paths))))
    stem_at = lambda position: f"c{sample_at(position, cases=60, seed=3).index:02d}"
    readers, advisers = [FakeReader(kernel) for _ in shares], []
    for reader, share, order, budget in zip(readers, shares, orders or shares, budgets):
        workers = len(order.in_step)
        ahead = LookAhead(
            reader,
            lambda place, order=order: record_of(stem_at(order.position_here(place))),
            page_budget_bytes=budget,
            horizon=120,
            start=begin // len(shares),
            stop=samples // len(shares),
            ahead=1,
            in_flight=1,
            workers=workers,
            turn=order.in_step.index(share.rank),
            apart=part if workers > 1 else 0,
        )
        advisers.append(ahead._adviser)  # without its thread: in the order that is drawn
    draw, done = random.Random(seed), [begin // len(shares)] * len(shares)
    while sum(done) < samples:
        last = min(min(done) + part, samples // len(shares))
        worker = draw.choice([worker for worker, count in enumerate(done) if count < last])
        advisers[worker].at(done[worker])
        kernel.use(worker, stem_at(shares[worker].position(done[worker])))
        done[worker] += 1
    for reader, share in zip(readers, shares):  # each asks for its own, in its own order, and misses none
        assert reader.asked == [stem_at(share.position(index)) for index in range(begin // len(shares), done[0])]
    return kernel


def record_of(stem):
    return SimpleNamespace(stem=stem, format="npy", has_label=False, image_bytes=1, label_bytes=0)


def stem_of(paths):
    return Path(paths[0]).name.split(".")[0]


def host_of(workers, part, here):
    return [Share(rank, workers, workers * part, here) for rank in here]


HOSTS = [host_of(2, 1, (0, 1)), host_of(2, 3, (0, 1)), host_of(4, 2, (0, 1, 2, 3)), host_of(4, 2, (1, 2))]


@pytest.mark.parametrize("shares", HOSTS)
def test_no_worker_gives_back_what_another_uses_or_needs_next(monkeypatch, shares):
    for seed, budget in enumerate((12, 16, 24, 40)):
        span = {"begin": 24 * (seed % 2), "samples": 240}
        kernel = run_host(monkeypatch, shares, budgets=[budget] * len(shares), seed=seed, **span)
        assert kernel.taken == []
        assert kernel.waits == 0
        assert kernel.most <= max(budget, 18)  # of four workers more may be in use at once than 12 or 16


@pytest.mark.parametrize("shares", HOSTS[:3])
def test_all_workers_of_a_host_read_from_the_disk_as_often_as_one_with_all_its_memory(monkeypatch, shares):
    alone = run_host(monkeypatch, [ALL], budgets=[40], samples=240)
    together = run_host(monkeypatch, shares, budgets=[40] * len(shares), samples=240)
    assert together.reads == alone.reads == 60 + 3 * (60 - 40)
    # Each for itself, with its part of the memory, they drop what others use, and read more.
    own = [dataclasses.replace(share, here=()) for share in shares]
    apart = run_host(monkeypatch, shares, budgets=[40 // len(shares)] * len(shares), samples=240, orders=own)
    assert apart.taken
    assert apart.reads > 1.1 * alone.reads


def test_of_workers_that_measured_different_budgets_the_smallest_holds(monkeypatch):
    shares = HOSTS[1]
    least = run_host(monkeypatch, shares, budgets=[24, 24], samples=240)
    for budgets in ([24, 40], [40, 24], [24, 25]):
        kernel = run_host(monkeypatch, shares, budgets=budgets, samples=240)
        assert kernel.taken == []
        assert kernel.waits == 0
        assert kernel.reads == least.reads
        assert kernel.most <= 24 + 4


def test_each_of_several_workers_gives_a_file_back_twice_eight_of_its_samples_apart(monkeypatch):
    kernel = run_host(monkeypatch, HOSTS[0], budgets=[24, 24], samples=60)
    begin, file = kernel.given[0]
    uses = [use for use, given in kernel.given if given == file and use < begin + 30]
    assert len(uses) == 4
    assert uses[1] <= begin + 2
    assert uses[2] >= begin + 2 * look_ahead.LINGER - 1

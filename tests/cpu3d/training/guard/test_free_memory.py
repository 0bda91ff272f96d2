"""What each limit leaves, on hosts made of a few files, and on this one."""

import resource
from pathlib import Path

import pytest

from cpu3d.host.memory import Resident, resident
from cpu3d.training.guard.free_memory import ADDRESSES, CGROUP, MACHINE, Room, free_memory, throttled_at, tightest

GIB = 2**30


@pytest.fixture
def host(tmp_path):
    """16 GiB, 10 of them free, 2 of swap."""
    write(tmp_path, "proc/meminfo", "\n".join(f"{name}: {size * 2**20} kB" for name, size in MEMORY.items()))
    return tmp_path


MEMORY = {"MemTotal": 16, "MemFree": 1, "MemAvailable": 10, "SwapTotal": 4, "SwapFree": 2}


def write(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")


def test_swap_counts_for_the_machine(host):
    assert free_memory(root=host) == {MACHINE: Room(12 * GIB, 16 * GIB)}


def test_a_version_2_limit_leaves_what_is_not_used_and_all_file_pages(host):
    write(host, "proc/self/cgroup", "0::/job")
    write(host, "sys/fs/cgroup/job/memory.max", str(8 * GIB))
    write(host, "sys/fs/cgroup/job/memory.current", str(7 * GIB))
    write(host, "sys/fs/cgroup/job/memory.stat", f"anon {3 * GIB}\nactive_file {3 * GIB}\ninactive_file {GIB}")
    rooms = free_memory(root=host)
    assert rooms[CGROUP] == Room(5 * GIB, 8 * GIB)
    assert tightest(rooms) == CGROUP


def test_where_a_cgroup_slows_its_processes_down(host):
    assert throttled_at(host) is None
    write(host, "proc/self/cgroup", "0::/job")
    write(host, "sys/fs/cgroup/job/memory.high", "max")
    assert throttled_at(host) is None
    write(host, "sys/fs/cgroup/job/memory.high", str(6 * GIB))
    write(host, "sys/fs/cgroup/job/memory.current", str(8 * GIB))
    write(host, "sys/fs/cgroup/job/memory.stat", f"active_file {GIB}\ninactive_file {2 * GIB}")
    assert throttled_at(host) == Room(GIB, 6 * GIB)
    write(host, "sys/fs/cgroup/job/memory.stat", "active_file 0\ninactive_file 0")
    assert throttled_at(host) == Room(0, 6 * GIB)
    assert CGROUP not in free_memory(root=host), "nobody is killed there"


def test_a_version_1_limit_does_too(host):
    write(host, "proc/self/cgroup", "4:memory:/job")
    write(host, "sys/fs/cgroup/memory/job/memory.limit_in_bytes", str(8 * GIB))
    write(host, "sys/fs/cgroup/memory/job/memory.usage_in_bytes", str(7 * GIB))
    stat = f"active_file 1\ninactive_file 1\ntotal_active_file {2 * GIB}\ntotal_inactive_file {GIB}"
    write(host, "sys/fs/cgroup/memory/job/memory.stat", stat)
    assert free_memory(root=host)[CGROUP] == Room(4 * GIB, 8 * GIB)


def test_a_limit_of_addresses_leaves_what_is_not_mapped(host, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (5 * GIB, -1) if which == resource.RLIMIT_AS else (-1, -1))
    rooms = free_memory(Resident(0.0, GIB, 0, address_bytes=4 * GIB), host)
    assert rooms[ADDRESSES] == Room(GIB, 5 * GIB)
    assert tightest(rooms) == ADDRESSES


def test_a_system_without_proc_asks_psutil(tmp_path):
    room = free_memory(root=tmp_path)[MACHINE]
    assert room.free_bytes > 0
    assert room.total_bytes > GIB


@pytest.mark.skipif(not Path("/proc/meminfo").is_file(), reason="needs /proc")
def test_this_host_has_some():
    rooms = free_memory(resident())
    assert rooms[tightest(rooms)].free_bytes > 0

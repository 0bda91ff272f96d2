"""What limits leave free, on made-up hosts."""

import pytest

from cpu3d.host.free_memory import CGROUP, MACHINE, Room, take_sample
from memory_estimator.host import read_host
from tests.cpu3d.host.hosts import XEON, write_line, write_tree

GIB = 2**30


def test_swap_counts_for_the_machine_and_a_container_leaves_what_is_not_used_and_all_file_pages(
    tmp_path, monkeypatch
):
    own = {"RssAnon": 1, "RssShmem": 2, "VmSwap": 4, "RssFile": 8}
    monkeypatch.setattr("cpu3d.host.free_memory.status_sizes", lambda: own)
    memory = {"MemTotal": 16, "MemFree": 1, "MemAvailable": 10, "SwapTotal": 4, "SwapFree": 2}
    lines = [f"{name}: {size * 2**20} kB" for name, size in memory.items()]
    write_line(tmp_path, "proc/meminfo", "\n".join(lines))
    assert take_sample(tmp_path) == ({MACHINE: Room(12 * GIB, 16 * GIB)}, 7, 8, 4)
    write_line(tmp_path, "proc/self/cgroup", "0::/job")
    for name, text in (("max", 8 * GIB), ("current", 7 * GIB), ("stat", f"active_file {4 * GIB}")):
        write_line(tmp_path, f"sys/fs/cgroup/job/memory.{name}", text)
    assert take_sample(tmp_path).rooms[CGROUP] == Room(5 * GIB, 8 * GIB)
    write_line(tmp_path, "sys/fs/cgroup/job/memory.current", 13 * GIB)
    assert take_sample(tmp_path).rooms[CGROUP].free_bytes == 0


def test_a_process_bound_to_a_numa_node_has_the_memory_of_that_node(tmp_path):
    write_tree(tmp_path, XEON)
    write_line(tmp_path, "proc/self/status", "Mems_allowed_list: 1")
    free_bytes = take_sample(tmp_path).rooms[MACHINE].free_bytes
    assert free_bytes == read_host(tmp_path).free_bytes < 768 * GIB
    write_line(tmp_path, "proc/meminfo", "MemTotal: 9 kB\nMemAvailable: 8 kB")
    assert read_host(tmp_path).free_bytes == 8192


@pytest.mark.parametrize(
    ("total_bytes", "floor_bytes"), [(8 * GIB, GIB // 16), (100 * GIB, GIB // 5), (2048 * GIB, GIB)]
)
def test_more_is_kept_free_on_a_larger_host(total_bytes, floor_bytes):
    assert Room(0, total_bytes).floor_bytes == floor_bytes

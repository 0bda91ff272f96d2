"""This host, from made-up /proc and /sys."""

import dataclasses

import psutil
import pytest

from memory_estimator.host import read_host
from tests.cpu3d.host.hosts import AMX, BFLOAT16, CLOUD, GIB, VNNI, XEON, write_line, write_tree


@pytest.fixture
def xeon(tmp_path):
    """Two sockets of 28 cores of two threads, 1.5 TiB."""
    write_tree(tmp_path, XEON)
    return tmp_path


@pytest.fixture
def big(tmp_path):
    """One socket, 64 cores, 256 GiB: the host of the containers."""
    write_tree(tmp_path, CLOUD)
    return tmp_path


@pytest.mark.parametrize(
    ("mask", "counts"),
    [("0,56", (1, 1, 2, 1)), ("0-1,28", (2, 3, 3, 2)), ("0-255", (2, 56, 112, 2))],
)
def test_only_the_cpus_in_the_mask_count(xeon, mask, counts):
    write_line(xeon, "proc/self/status", f"Cpus_allowed_list: {mask}")
    host = read_host(xeon)
    assert (host.sockets, host.cores, host.logical_cpus, host.numa_nodes) == counts


@pytest.mark.parametrize(
    ("status", "numa_maps", "nodes"),
    [
        ("", "", 2),
        (
            "Mems_allowed_list: 0-1",
            "561bbaff2000 bind:0 file=/usr/bin/python3\n7f0000000000 default\n",
            1,
        ),  # numactl
        ("Mems_allowed_list: 1", "", 1),  # Slurm
        ("Mems_allowed_list: 1", "561bbaff2000 bind:0-1 file=/usr/bin/python3\n", 1),
        ("Mems_allowed_list: 0-1", "561bbaff2000 interleave:0-1 file=/usr/bin/python3\n", 2),
    ],
)
def test_only_the_memory_of_allowed_nodes_is_free(xeon, status, numa_maps, nodes):
    """Two nodes of 768 GiB, 97 % of each free."""
    write_line(xeon, "proc/self/status", f"Cpus_allowed_list: 0-111\n{status}")
    write_line(xeon, "proc/self/numa_maps", numa_maps)
    host = read_host(xeon)
    assert host.free_bytes == pytest.approx(nodes * 0.97 * 768 * GIB, abs=GIB)


@pytest.mark.parametrize(
    ("isa", "cpu", "name", "dtype"),
    [
        (AMX, "Intel(R) Xeon(R) Platinum 8480+", "amx", "bfloat16"),
        (BFLOAT16, "AMD EPYC 9654", "avx512_bf16", "bfloat16"),
        (BFLOAT16, "Intel(R) Xeon(R) Gold 6348H", "avx512", "float32"),
        (VNNI, "", "avx512", "float32"),
        (("avx2",), "", "", "float32"),
        ([flag for flag in AMX if flag != "avx512vl"], "", "avx2", "float32"),
        ([flag for flag in AMX if flag != "amx_tile"], "AMD EPYC", "avx512_bf16", "bfloat16"),
    ],
)
def test_own_kernels_are_those_of_the_best_instruction_set(isa, cpu, name, dtype, tmp_path):
    made_up = dataclasses.replace(XEON.host, isa=isa, cpu_model=cpu)
    write_tree(tmp_path, dataclasses.replace(XEON, host=made_up))
    host = read_host(tmp_path)
    assert (host.instructions, host.best_dtype) == (name, dtype)
    assert ("avx2" in host.native.why) == (name == "")


@pytest.mark.parametrize(
    ("cgroup", "files", "quota", "used", "limit"),
    [
        (
            "0::/",
            {
                "cpu.max": "700000 100000",
                "memory.max": 16 * GIB,
                "memory.current": 6 * GIB,
                # The kernel drops page cache before it kills anything.
                "memory.stat": f"anon {GIB}\ninactive_file {3 * GIB}\nactive_file {GIB}",
            },
            7.0,
            2 * GIB,
            16 * GIB,
        ),
        (
            # The path is the host's: the container sees the top alone.
            "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc",
            {
                "cpu,cpuacct/cpu.cfs_quota_us": 270000,
                "cpu,cpuacct/cpu.cfs_period_us": 100000,
                "memory/memory.limit_in_bytes": 8 * GIB,
                "memory/memory.usage_in_bytes": 3 * GIB,
                "memory/memory.stat": f"total_inactive_file {GIB}\ntotal_active_file {GIB}",
            },
            2.7,
            GIB,
            8 * GIB,
        ),
    ],
)
def test_a_container_gets_what_its_cgroup_leaves(big, cgroup, files, quota, used, limit):
    write_line(big, "proc/self/cgroup", cgroup)
    for path, content in files.items():
        write_line(big, f"sys/fs/cgroup/{path}", content)
    host = read_host(big)
    assert (host.cpu_quota, host.usable_cores) == (quota, int(quota))
    assert (host.cgroup_used_bytes, host.cgroup_limit_bytes) == (used, limit)
    assert host.free_bytes == limit - used
    assert dataclasses.replace(host, available_bytes=7).free_bytes == 7


@pytest.mark.parametrize(("job_used", "left"), [(1, 4), (30, 2)])
def test_the_cgroup_on_the_way_up_that_leaves_least_decides(big, job_used, left):
    write_line(big, "proc/self/cgroup", "0::/slurm/job/step")
    for path, limit, used, quota in (
        ("slurm", 64, 60, "6400000"),
        ("slurm/job", 32, job_used, "800000"),
        ("slurm/job/step", 99, 1, "max"),
    ):
        write_line(big, f"sys/fs/cgroup/{path}/memory.max", limit * GIB)
        write_line(big, f"sys/fs/cgroup/{path}/memory.current", used * GIB)
        write_line(big, f"sys/fs/cgroup/{path}/cpu.max", f"{quota} 100000")
    host = read_host(big)
    assert (host.free_bytes, host.cpu_quota) == (left * GIB, 8.0)


@pytest.mark.parametrize(
    ("time", "quota", "cores"), [(0.5, 0.5, 1), (63, 63.0, 63), (64, None, 64)]
)
def test_a_quota_of_all_the_cpus_or_more_is_none(big, time, quota, cores):
    """A pod of Kubernetes whose CPUs are its own."""
    write_line(big, "sys/fs/cgroup/cpu.max", f"{time * 10**5:.0f} 100000")
    write_line(big, "sys/fs/cgroup/memory.max", 256 * GIB)  # all of it
    host = read_host(big)
    assert (host.cpu_quota, host.usable_cores, host.cgroup_limit_bytes) == (quota, cores, None)


def test_without_sys_the_cores_come_from_cpuinfo(tmp_path):
    lines = (
        "processor: {}\nphysical id: {}\ncore id: {}\nflags: avx".format(*at)
        for at in ((4, 0, 0), (5, 0, 1), (6, 0, 0), (7, 1, 0))
    )
    write_line(tmp_path, "proc/cpuinfo", "\n\n".join(lines))
    write_line(tmp_path, "proc/meminfo", "MemTotal: 8 kB\nMemFree: 4 kB")
    write_line(tmp_path, "proc/self/status", "Cpus_allowed_list: 4-7")
    host = read_host(tmp_path)
    assert (host.sockets, host.cores, host.logical_cpus, host.numa_nodes) == (2, 3, 4, 1)
    assert host.available_bytes == 4096


def test_where_there_is_no_proc_psutil_is_asked(tmp_path):
    host = read_host(tmp_path)
    assert (host.logical_cpus, host.isa) == (psutil.cpu_count(), ())
    assert host.available_bytes < host.memory_bytes == psutil.virtual_memory().total

"""The lines about a process that is set up. Its places, which the kernel tells, are tested with `apply`."""

import pytest

from cpu3d.host.describe import describe
from cpu3d.host.thread_plan import thread_plan
from memory_estimator.host import Host

HOST = Host("Xeon", 2, 56, 112, 2, 2**40, 2**39, 64 * 2**30, 4 * 2**30, 7.0, ("amx_bf16",))
PLAN = thread_plan(HOST)


@pytest.fixture(autouse=True)
def planned(monkeypatch):
    """An environment that has the plan's variables."""
    for name, value in PLAN.environment.items():
        monkeypatch.setenv(name, value)


def test_the_description_says_what_the_process_may_use():
    assert describe(HOST, PLAN, "TensorFlow 2.15.1, oneDNN")[:4] == [
        "host: Xeon, 56 cores on 2 sockets and 2 NUMA nodes, 112 CPUs, quota 7 CPUs, fast bfloat16",
        "memory: 1.00 TiB, limit 64.00 GiB, 60.00 GiB free",
        "engine: TensorFlow 2.15.1, oneDNN",
        "threads: TF_NUM_INTRAOP_THREADS=7, TF_NUM_INTEROP_THREADS=1, OMP_NUM_THREADS=7, KMP_BLOCKTIME=1",
    ]
    assert "warning" not in "".join(describe(HOST, PLAN, ""))


def test_thread_numbers_of_the_user_s_own_are_warned_of_with_the_way_back(monkeypatch):
    """As a cluster sets them for everybody; how long threads spin is no number of them."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "2")
    monkeypatch.setenv("KMP_BLOCKTIME", "200")
    lines = describe(HOST, PLAN, "")
    assert "OMP_NUM_THREADS=1, KMP_BLOCKTIME=200" in lines[3]
    assert [line for line in lines if line.startswith("warning")] == [
        "warning: TF_NUM_INTEROP_THREADS must be 1 to use this host as planned, got 2 from your environment; "
        "`unset TF_NUM_INTEROP_THREADS`, unless you want it so",
        "warning: OMP_NUM_THREADS must be 7 to use this host as planned, got 1 from your environment; "
        "`unset OMP_NUM_THREADS`, unless you want it so",
    ]

import dataclasses

import pytest

from cpu3d.host.thread_plan import thread_plan
from memory_estimator.host import Host

ZEN = Host("Zen", 1, 2, 2, 1, 24 * 2**30, 20 * 2**30, None, 0, None, ("avx2", "avx512_bf16"))
XEON = Host("Xeon", 2, 56, 112, 2, 1536 * 2**30, 1500 * 2**30, None, 0, None, ("avx2",))
CONTAINER = dataclasses.replace(XEON, cpu_quota=7.0)
PINCH = dataclasses.replace(ZEN, cpu_quota=0.5)


@pytest.mark.parametrize(
    ("host", "threads", "affinity"),
    [
        (ZEN, 2, None),
        (XEON, 56, "granularity=fine,compact,1,0"),
        (CONTAINER, 7, None),
        (PINCH, 1, None),
    ],
)
def test_plan_by_host(host, threads, affinity):
    plan = thread_plan(host)
    assert (plan.intra_op, plan.inter_op, plan.omp_threads) == (threads, 1, threads)
    assert plan.environment.get("KMP_AFFINITY") == affinity
    assert plan.environment["TF_NUM_INTRAOP_THREADS"] == plan.environment["OMP_NUM_THREADS"] == str(threads)
    assert plan.environment["TF_NUM_INTEROP_THREADS"] == "1"
    assert plan.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert plan.environment["TF_ENABLE_ONEDNN_OPTS"] == plan.environment["TF_USE_LEGACY_KERAS"] == "1"


def test_a_plan_is_made_of_strings_alone():
    assert all(isinstance(value, str) for value in thread_plan(XEON).environment.values())

"""How many threads and which switches suit a host: the decision, as a pure function. `host.apply` carries it out."""

from dataclasses import dataclass
from typing import Mapping

from memory_estimator.host import Host


@dataclass(frozen=True)
class ThreadPlan:
    """What one training process on one host should set before TensorFlow is imported."""

    intra_op: int
    """Threads inside one operation."""
    inter_op: int
    """Operations at a time."""
    omp_threads: int
    """Threads of the OpenMP pool that ITEX runs oneDNN on; the same cores as `intra_op`, never both at once."""
    environment: Mapping[str, str]
    """Every variable to set, these three among them. A variable the user has set himself wins."""


def thread_plan(host: Host) -> ThreadPlan:
    """The plan for one process that has `host` to itself.

    One thread a physical core: oneDNN's kernels fill a core's vector units, so a second hyper-thread only
    halves its cache. One operation at a time: as fast as two and a memory peak 7 % lower, because parallel
    gradient operations delay each other's frees (measured on 2 cores, 128^3, bfloat16).
    """
    threads = host.usable_cores
    environment = {
        "TF_NUM_INTRAOP_THREADS": str(threads),
        "TF_NUM_INTEROP_THREADS": "1",
        "OMP_NUM_THREADS": str(threads),
        # From the launcher of ITEX 2.15 and its practice guide (0 or 1 for convolutional networks): after an operation
        # Intel's OpenMP spins this many ms before it sleeps. A step alone takes as long with 0, 1 or 200
        # (docs/log.md); that the data threads fare better with 1 than with 200 is assumed.
        "KMP_BLOCKTIME": "1",
        # TensorFlow itself turns oneDNN on only for CPUs with certain instructions; without it, 16x (records).
        "TF_ENABLE_ONEDNN_OPTS": "1",
        # TensorFlow 2.16 and later: tf.keras is Keras 2 (tf_keras). Not for TensorFlow 2.15, see host.apply.
        "TF_USE_LEGACY_KERAS": "1",
        # 3 is fatal only: at 2, every start without a GPU prints three harmless "Unable to register cuDNN factory".
        # A real error reaches Python as an exception whatever this says.
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "ITEX_CPP_MIN_LOG_LEVEL": "2",
        # CUDA counts cards from the fastest on, their driver by the slot they are in: gpu:0 is to be one card for both.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    if host.numa_nodes > 1 and host.cpu_quota is None:
        # Assumed, from the same guide: each thread stays on its core, so that memory it touched first stays near.
        # Not on one node, where nothing is far and a bound thread cannot make way for a data thread, and not under
        # a quota, where every container of the host would bind to the same first cores.
        environment["KMP_AFFINITY"] = "granularity=fine,compact,1,0"
    return ThreadPlan(intra_op=threads, inter_op=1, omp_threads=threads, environment=environment)

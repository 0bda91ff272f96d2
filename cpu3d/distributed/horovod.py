"""The sum by Horovod, over Gloo: for clusters that run it already. `./run.sh setup --horovod` builds it."""

from typing import Any, Callable

from cpu3d.distributed.cluster import Cluster
from cpu3d.errors import InputError


def horovod_sum(cluster: Cluster) -> Callable[[Any], Any]:
    """Join the others, where the variables of `horovodrun` tell, and return the function that sums a tensor.

    Raises InputError when Horovod is not installed, or when the process was not started by `horovodrun`.
    """
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise InputError(
            f"engine horovod must be installed, got {error}; run `./run.sh setup --horovod`, or leave --engine away"
        ) from None
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    if (rank, size) != (cluster.rank, cluster.workers):
        raise InputError(
            f"worker {cluster.rank} of {cluster.workers} must be that in Horovod too, got {rank} of {size}; start it "
            f"by `launch --engine horovod` or horovodrun"
        )
    return lambda vector: hvd.allreduce(vector, op=hvd.Sum, name="cpu3d.sum")

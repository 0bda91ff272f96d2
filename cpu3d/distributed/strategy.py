"""The exchange between the workers of a run: one vector a step, summed over all of them, the same bits on each.

    cluster = read_cluster(os.environ)
    exchange = join(cluster)             # right after TensorFlow is imported, before any operation
    total = exchange.sum(vector)         # float32 (n,); all workers call it, with the same n

Each worker computes with plain variables and plain functions of its own, as it would alone, so that a run of several
differs from one in nothing but this sum. Engines (`cluster.ENGINES`): "memory" is for the workers of one host;
"tensorflow" is `tf.distribute.MultiWorkerMirroredStrategy`'s ring over gRPC, "horovod" is Horovod's ring over Gloo
(`./run.sh setup --horovod`). In all of them one worker adds up each part of the vector and the others copy it: there is
one order of addition, so the bits cannot differ between workers.
"""

import contextlib
from typing import Any, Callable

import numpy as np

from cpu3d.distributed.cluster import HOROVOD, MEMORY, Cluster
from cpu3d.distributed.lost import lost_worker
from cpu3d.distributed.meeting import meet
from cpu3d.errors import WorkerLostError

MEETING_S = 300.0
"""How long a worker waits for the others at the start: the hosts of a queue do not start together."""


class Exchange:
    """The workers of a run. This one is for a run without others: the sum is what is put in."""

    rank = 0
    count = 1

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes the run's files."""
        return self.rank == 0

    def sum(self, vector: Any) -> Any:
        """The float32 tensor (n,) summed over all workers. Raises WorkerLostError when one of them is gone.

        It is noticed at once when its process has ended, within `lost.SILENCE_S` when it is stopped or cut off. For
        one that lives and does not come it waits for ever.
        """
        return vector

    def close(self) -> None:
        """Take leave of the others, who are at the same point. After it there is no other sum.

        Says nothing of one who is gone already: by then all of them know, by a sum of the run, that the chief has
        written all there is to write.
        """


ALONE = Exchange()


def join(
    cluster: Cluster,
    *,
    meeting_s: float = MEETING_S,
    say: Callable[[str], None] = lambda line: None,
) -> Exchange:
    """Wait for the other workers and return the exchange with them. Alone, at once and at no cost.

    Call it right after TensorFlow is imported: between hosts it must make its server before any operation. `say` gets a
    line when the others take long, and a warning of that server. Raises InputError when this worker's port is taken or
    the engine is not installed, WorkerLostError when a worker does not come within `meeting_s`.
    """
    if cluster.workers == 1:
        return ALONE
    if cluster.engine == HOROVOD:
        from cpu3d.distributed.horovod import horovod_sum  # imports TensorFlow, as mirrored does

        return _Joined(cluster, horovod_sum(cluster))
    peers = meet(cluster, meeting_s, say)
    if cluster.engine == MEMORY:
        from cpu3d.distributed.shared_memory import shared_memory_sum

        sum_of_arrays = shared_memory_sum(cluster, peers)
        return _Joined(cluster, lambda vector: sum_of_arrays(np.asarray(vector)))
    for peer in peers.values():
        peer.close()
    port = cluster.addresses[cluster.rank].rpartition(":")[2]
    say(
        f"warning: TensorFlow serves port {port} of this host on all its networks and asks for no password: whoever "
        "reaches it can read and write files as you; train on a network that is yours alone (docs/workers.md)"
    )
    from cpu3d.distributed.mirrored import mirrored_sum

    return _Joined(cluster, mirrored_sum(cluster))


# --- Private helpers ---


class _Joined(Exchange):
    """An exchange by an engine's sum."""

    def __init__(self, cluster: Cluster, sum_over_workers: Callable[[Any], Any]):
        import tensorflow as tf

        self.rank, self.count = cluster.rank, cluster.workers
        self._tf, self._cluster, self._sum = tf, cluster, sum_over_workers

    def sum(self, vector: Any) -> Any:
        errors = self._tf.errors
        try:
            total = self._sum(self._tf.convert_to_tensor(vector, self._tf.float32))
            return self._tf.convert_to_tensor(total)
        except (errors.InvalidArgumentError, errors.ResourceExhaustedError):
            raise  # vectors of different lengths, or no memory: nobody is lost
        except errors.OpError as error:
            raise lost_worker(str(error), self._cluster) from error

    def close(self) -> None:
        # When this sum is there, all before it have arrived everywhere; one who leaves right after it may break it off.
        with contextlib.suppress(WorkerLostError):
            self.sum(self._tf.zeros([1]))

"""The sum by TensorFlow's own engine: the all-reduce of MultiWorkerMirroredStrategy, without its variables.

Variables and functions made outside the strategy's scope stay plain: the same bits, the same speed and the same memory
as in a process without it.
"""

import os
from typing import Any, Callable

import tensorflow as tf
from tensorflow.python.eager import context  # limits and the state of TensorFlow's start have no public name

from cpu3d.distributed.cluster import Cluster
from cpu3d.distributed.lost import SILENCE_S, not_started

REGISTER_S = 60.0
"""For the servers of workers that have just met to find each other. TensorFlow itself would wait an hour."""

PIECE = 4 * 2**20
"""Numbers summed at a time. 16 MiB: 400 MB take 0.5 s so, 1.1 to 1.5 s and 1 GB more memory in one (2 workers on
one host, a core each); 22 MB take 25 ms either way."""


def mirrored_sum(cluster: Cluster) -> Callable[[Any], Any]:
    """Start this worker's server, find the others', and return the function that sums a float32 tensor (n,).

    Raises WorkerLostError where a worker has gone since they met, InputError where its port is taken, RuntimeError when
    TensorFlow has computed before.
    """
    if context.context()._context_handle is not None:
        raise RuntimeError("join must come before any operation of TensorFlow")
    try:
        strategy = _strategy(cluster)
    except tf.errors.OpError as error:
        raise not_started(str(error), cluster) from error

    def reduce(part: Any) -> Any:
        # Without tf.identity: "destinations can not be empty".
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(part))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def sum_of_piece(piece):
        return strategy.run(reduce, args=(piece,))

    def sum_over_workers(vector: Any) -> Any:
        sums = [sum_of_piece(vector[start : start + PIECE]) for start in range(0, int(vector.shape[0]), PIECE)]
        return sums[0] if len(sums) == 1 else tf.concat(sums, 0) if sums else vector

    return sum_over_workers


# --- Private helpers ---


def _strategy(cluster: Cluster) -> tf.distribute.MultiWorkerMirroredStrategy:
    # gRPC would go through the proxy that http_proxy names, to the next machine and even to its own.
    os.environ["no_grpc_proxy"] = ",".join(dict.fromkeys(cluster.hosts))  # noqa: SIM112 (gRPC reads it in small letters)
    jobs = tf.compat.v1.ConfigProto().experimental.coordination_config.coordinated_job_list
    jobs.add(name="worker", num_tasks=cluster.workers)
    context.context().configure_coordination_service(
        "standalone",
        service_leader="/job:worker/replica:0/task:0",
        cluster_register_timeout_in_ms=int(REGISTER_S * 1000),
        heartbeat_timeout_in_ms=int(SILENCE_S * 1000),  # beats are a thread's own: one that computes is heard
        coordinated_jobs=list(jobs),
    )
    return tf.distribute.MultiWorkerMirroredStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": list(cluster.addresses)}),
            task_type="worker",
            task_id=cluster.rank,
            rpc_layer="grpc",
            num_accelerators={"GPU": 0},  # the sum is on the CPU, whatever computes
        ),
        tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        ),
    )

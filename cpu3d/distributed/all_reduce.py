"""The exchange between the workers of a run: a vector a step, summed over all of them, the same
bits on each.

    cluster = read_cluster(os.environ)
    exchange = join(cluster)             # right after TensorFlow is imported, before any operation
    total = exchange.sum(vector)         # float32 (n,); all workers call it, with the same n

The workers of one host add up in memory that they share; between hosts the sum is the ring over
gRPC of `tf.distribute.MultiWorkerMirroredStrategy`. In both one worker adds up each part of the
vector and the others copy it, so the bits cannot differ between workers."""

import contextlib
import itertools
import math
import mmap
import os
import re
import signal
import socket
import struct
from typing import Any, Callable, Mapping, Optional

import numpy as np

from cpu3d.data.region import Array
from cpu3d.distributed.cluster import Cluster, host_and_port
from cpu3d.distributed.rendezvous import MEETING_S, meet
from cpu3d.errors import WorkerLostError
from cpu3d.run.heartbeat import LOST_S

# Numbers summed at a time: 400 MB take 0.5 s; in one sum 1.1 to 1.5 s, and 1 GB more memory.
PIECE = 4 * 2**20


class Exchange:
    """The workers of a run. This class is for a run of one worker: the sum is the vector itself."""

    rank = 0
    count = 1
    plan: Any = None  # of the chief, which sent it to all as they met

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes the run's files."""
        return self.rank == 0

    def sum(self, vector: Any) -> Any:
        """The float32 tensor (n,) summed over all workers. Raises WorkerLostError if one of them is
        gone."""
        return vector

    def close(self) -> None:
        """Leave the others, which are at the same point, after the last files of the chief; one may
        be gone."""


ALONE = Exchange()


def join(
    cluster: Cluster,
    *,
    plan: Any = None,
    meeting_s: float = MEETING_S,
    say: Callable[[str], None] = lambda line: None,
) -> Exchange:
    """Wait for the other workers and return the exchange with them, whose `plan` is the chief's,
    anything of JSON.

    Call it before any operation of TensorFlow, which between hosts makes a server. `say` gets a
    line if the others take long, and a warning of that server. Raises InputError if this worker's
    port is taken, and WorkerLostError if a worker does not come within `meeting_s`."""
    if cluster.workers == 1:
        return ALONE
    peers, plan = meet(cluster, meeting_s, say, plan)
    if cluster.shares_memory:
        memory = SharedMemory(cluster, peers)
        return _Joined(cluster, lambda vector: memory.sum(np.asarray(vector)), plan)
    for peer in peers.values():
        peer.close()
    _, port = host_and_port(cluster.addresses[cluster.rank])
    say(
        f"warning: TensorFlow opens port {port} of this host; anyone who reaches it can use it "
        "without a password, and read and write files as you (docs/clusters.md)"
    )
    return _Joined(cluster, _tensorflow_sum(cluster), plan)


# --- Sent by the chief ---


def array_from_chief(exchange: Exchange, array: Array) -> Array:
    """The chief's array to the bit, by the sum alone: every 16 bits travel as one float32, which
    holds them.

    The others give an array of the same shape and dtype, whose values do not count.
    """
    if exchange.count == 1:
        return array
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    halves = np.zeros(-(-raw.size // 2), np.uint16)
    if exchange.rank == 0:
        halves.view(np.uint8)[: raw.size] = raw
    for piece in np.split(halves, range(PIECE, halves.size, PIECE)):
        piece[:] = np.asarray(exchange.sum(piece.astype(np.float32)))
    return halves.view(np.uint8)[: raw.size].view(array.dtype).reshape(array.shape)


def text_from_chief(exchange: Exchange, text: str = "") -> str:
    """The chief's text; that of the others does not count."""
    if exchange.count == 1:
        return text
    raw = np.frombuffer(text.encode(), np.uint8)
    size = int(array_from_chief(exchange, np.array([raw.size], np.int64))[0])
    if exchange.rank != 0:
        raw = np.zeros(size, np.uint8)
    return array_from_chief(exchange, raw).tobytes().decode()


# --- Engines ---


class _Joined(Exchange):
    """An exchange by an engine's sum."""

    def __init__(self, cluster: Cluster, sum_over_workers: Callable[[Any], Any], plan: Any):
        import tensorflow as tf

        self.rank = cluster.rank
        self.count = cluster.workers
        self.plan = plan
        self._tf = tf
        self._cluster = cluster
        self._sum = sum_over_workers

    def sum(self, vector: Any) -> Any:
        errors = self._tf.errors
        try:
            total = self._sum(self._tf.convert_to_tensor(vector, self._tf.float32))
            return self._tf.convert_to_tensor(total)
        except (errors.InvalidArgumentError, errors.ResourceExhaustedError):
            raise  # vectors of different lengths, or no memory: no worker is lost
        except errors.OpError as error:
            raise lost_by_message(str(error), self._cluster) from error

    def close(self) -> None:
        # When this sum has come, all before it have arrived everywhere; a worker that leaves after
        # it may break it off.
        with contextlib.suppress(WorkerLostError):
            self.sum(self._tf.zeros([1]))


def _tensorflow_sum(cluster: Cluster) -> Callable[[Any], Any]:
    """Start this worker's server, find the others', and return the function that sums a float32
    tensor (n,).

    The all-reduce of MultiWorkerMirroredStrategy, without its variables: those made outside its
    scope stay plain, with the bits, the speed and the memory of a process without it. Raises
    WorkerLostError if a worker has gone since they met, and RuntimeError if TensorFlow has computed
    before."""
    import tensorflow as tf
    from tensorflow.python.eager import context  # limits have no public name

    # gRPC would go through the proxy that http_proxy names, to the next machine and even to its
    # own. It reads the name in small letters.
    os.environ["no_grpc_proxy"] = ",".join(dict.fromkeys(cluster.hosts))  # noqa: SIM112
    jobs = tf.compat.v1.ConfigProto().experimental.coordination_config.coordinated_job_list
    jobs.add(name="worker", num_tasks=cluster.workers)
    context.context().configure_coordination_service(
        "standalone",
        service_leader="/job:worker/replica:0/task:0",
        # of workers that have just met; TensorFlow itself would wait an hour
        cluster_register_timeout_in_ms=60_000,
        # a thread of its own beats, while the worker computes too
        heartbeat_timeout_in_ms=int(LOST_S * 1000),
        coordinated_jobs=list(jobs),
    )
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(cluster.addresses)}),
        task_type="worker",
        task_id=cluster.rank,
        rpc_layer="grpc",
        num_accelerators={"GPU": 0},  # the sum is on the CPU, also if a card computes
    )
    try:
        options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
        strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
    except tf.errors.OpError as error:
        raise lost_by_message(str(error), cluster) from error
    # Its server takes SIGTERM for itself and does nothing: one that came before the first step was
    # lost, and a time limit of Slurm's with it.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))

    def reduce(part: Any) -> Any:
        # Without tf.identity: "destinations can not be empty".
        context_of_replica = tf.distribute.get_replica_context()
        return context_of_replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(part))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def sum_of_piece(piece: Any) -> Any:
        return strategy.run(reduce, args=(piece,))

    def sum_over_workers(vector: Any) -> Any:
        starts = range(0, int(vector.shape[0]), PIECE)
        sums = [sum_of_piece(vector[start : start + PIECE]) for start in starts]
        return tf.concat(sums, 0) if sums else vector

    return sum_over_workers


# --- The sum between workers of one host, in memory that they share ---

MEMORY_BYTES = 32 * 2**20  # of all parts

NONE_LOST = -1  # instead of a rank


# What a worker sends when it is ready, and the chief to all when all are: how many numbers are to
# be summed, and the rank of the worker that the chief has lost.
WORD = struct.Struct("<qq")


class SharedMemory:
    """Memory that the workers of a host share; `peers` are the connections of `meet`.

    Each worker copies a piece of its vector to its part of the memory, adds up its share of all
    parts in the order of ranks, and copies the whole sum. A worker that is ready sends a word to
    the chief, and the chief one to all."""

    def __init__(self, cluster: Cluster, peers: Mapping[int, socket.socket]):
        self._cluster = cluster
        self._peers = peers
        try:
            handle = self._made() if cluster.is_chief else self._received()
        except (OSError, IndexError):
            raise lost_worker(cluster, 0, GONE) from None
        try:
            memory = np.frombuffer(mmap.mmap(handle, MEMORY_BYTES), np.float32)
        finally:
            os.close(handle)
        self._length = memory.size // (2 * cluster.workers)  # numbers of a worker's part
        shape = (2, cluster.workers, self._length)
        # In turns: when one half is written again, all workers have been ready in the other, so
        # have read this one.
        self._halves = itertools.cycle(memory[: math.prod(shape)].reshape(shape))

    def sum(self, vector: Array) -> Array:
        """A float32 array (n,) summed over all workers; the chief raises ValueError if one has
        another length."""
        rank = self._cluster.rank
        workers = self._cluster.workers
        total = np.empty_like(vector)
        for start in range(0, vector.size, self._length):
            piece = vector[start : start + self._length]
            parts = next(self._halves)[:, : piece.size]  # (workers, n)
            parts[rank] = piece
            self._wait_for_all(vector.size)
            share = slice(piece.size * rank // workers, piece.size * (rank + 1) // workers)
            for part in parts[1:, share]:
                parts[0, share] += part
            self._wait_for_all(vector.size)
            total[start : start + self._length] = parts[0]
        return total

    def _made(self) -> int:
        """The chief's memory, a file without a name, whose handle it sends to the others."""
        handle = os.memfd_create("cpu3d")
        # A page that cannot be had later would end the process.
        os.posix_fallocate(handle, 0, MEMORY_BYTES)
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # a peer that is gone is noticed by the first sum
                socket.send_fds(peer, [b"memory"], [handle])
        return handle

    def _received(self) -> int:
        self._peers[0].settimeout(LOST_S)
        _, handles, *_ = socket.recv_fds(self._peers[0], WORD.size, 1)
        return handles[0]

    def _send(self, size: int, lost: int = NONE_LOST) -> None:
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # one that is gone is noticed when its word is read
                peer.send(WORD.pack(size, lost))

    def _wait_for_all(self, size: int) -> None:
        """Return when all workers are ready for the same, however long it takes: `launch` ends one
        that hangs."""
        is_chief = self._cluster.is_chief
        lost = NONE_LOST
        if not is_chief:
            self._send(size)
        for rank, peer in self._peers.items():
            peer.settimeout(None)
            try:
                their_size, their_lost = WORD.unpack(peer.recv(WORD.size))
            except (OSError, struct.error):
                # read the others first: closing with a word unread would drop the words sent to
                # them
                lost = rank
                continue
            if their_lost != NONE_LOST:
                raise lost_worker(self._cluster, their_lost, "no answer to worker 0")
            if is_chief and their_size != size:
                got = f"{their_size} of worker {rank} and {size} of worker 0"
                raise ValueError(f"vectors must have one length, got {got}")
        if is_chief:
            self._send(size, lost)
        if lost != NONE_LOST:
            raise lost_worker(self._cluster, lost, GONE)


# --- A worker that is lost ---

GONE = "no connection: its process has ended or its host is gone"


def lost_worker(cluster: Cluster, rank: Optional[int], reason: str) -> WorkerLostError:
    """The error for the user: worker `rank` is gone, None if it is not known which, for
    `reason`."""
    name = f"all {cluster.workers} workers"
    if rank is not None:
        name = f"worker {rank} ({cluster.addresses[rank]})"
    rule = f"must answer worker {cluster.rank}"
    if rank == cluster.rank:
        rule = "must reach the others"
    todo = "see the logs, the same command continues from the last checkpoint"
    return WorkerLostError(f"{name} {rule}, got {reason}; {todo}")


def lost_by_message(message: str, cluster: Cluster) -> WorkerLostError:
    """The error from an engine's message, some twenty lines of C++: which worker is gone, as far as
    known, and how."""
    reason, *_ = message.rpartition("aborted by:")[2].strip().split("\n")
    named = {int(rank) for rank in re.findall(r"/job:worker(?:/replica:\d+)?/task:(\d+)", message)}
    if not named and "CoordinationService/" in message and not cluster.is_chief:
        named = {0}  # that service is the chief's
    others = named - {cluster.rank}
    # Another worker rather than this one, if both are named.
    rank = min(others or named, default=None)
    return lost_worker(cluster, rank, reason[:160])

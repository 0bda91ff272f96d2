"""The sum between workers of one host, in memory that they share.

TensorFlow's collectives need a server in every worker which listens on all interfaces and runs any graph for whoever
reaches it. This sum has no server and no port. Each worker copies a piece of its vector to its part of the memory, adds
up its share of all parts in the order of ranks, and copies the whole sum. Where one waits for the others, each tells
the chief that it is ready, and the chief tells all.
"""

import contextlib
import itertools
import mmap
import os
import socket
import struct
from typing import Callable, Mapping, Optional

import numpy as np

from cpu3d.distributed.cluster import Cluster
from cpu3d.errors import WorkerLostError

SILENCE_S = 20.0
"""A worker of whom nothing has been heard for so long, or that a signal has stopped for so long, is lost."""

GONE, SILENT = "no connection: its process has ended or its host is gone", "no sign of life: it hangs or is cut off"
"""How it is lost, in words."""

MEMORY_BYTES = 32 * 2**20
"""Of all parts."""

WORD = struct.Struct("<q")
"""The numbers of the vector, from one who is ready; -1 - rank where the chief has lost a worker."""


def shared_memory_sum(cluster: Cluster, peers: Mapping[int, socket.socket]) -> Callable[[np.ndarray], np.ndarray]:
    """The function that sums a float32 array (n,) over all workers.

    `peers` are the connections of `meet`, by rank: the chief's to all others, another's to the chief. The function
    raises WorkerLostError when a worker is gone, and ValueError on the chief for vectors of different lengths.
    """
    memory = np.frombuffer(_shared(cluster, peers), np.float32)
    length = memory.size // (2 * cluster.workers)
    # Two halves in turn: when one is written again, all workers have been ready in the other, so have read this one.
    halves = itertools.cycle(memory[: 2 * cluster.workers * length].reshape(2, cluster.workers, length))

    def sum_over_workers(vector: np.ndarray) -> np.ndarray:
        total = np.empty_like(vector)
        for start in range(0, vector.size, length):
            piece = vector[start : start + length]
            parts = next(halves)[:, : piece.size]
            parts[cluster.rank] = piece
            _wait_for_all(cluster, peers, vector.size)
            first, last = (piece.size * rank // cluster.workers for rank in (cluster.rank, cluster.rank + 1))
            for part in parts[1:, first:last]:
                parts[0, first:last] += part
            _wait_for_all(cluster, peers, vector.size)
            total[start : start + length] = parts[0]
        return total

    return sum_over_workers


def lost_worker(cluster: Cluster, rank: Optional[int], reason: str) -> WorkerLostError:
    """The error for the user: worker `rank` is gone, None where nobody knows which, by what `reason` tells of it."""
    name = f"all {cluster.workers} workers" if rank is None else f"worker {rank} ({cluster.addresses[rank]})"
    if rank == cluster.rank:
        problem = f"{name}, this one, must reach the others, got {reason}; mend its network"
    else:
        problem = f"{name} must answer worker {cluster.rank}, got {reason}; the logs may tell why"
    return WorkerLostError(f"{problem}, the same command continues from the last checkpoint")


# --- Private helpers ---


def _shared(cluster: Cluster, peers: Mapping[int, socket.socket]) -> mmap.mmap:
    """The chief makes the memory, a file without a name, and hands it to the others."""
    try:
        if cluster.is_chief:
            handle = os.memfd_create("cpu3d")
            os.posix_fallocate(handle, 0, MEMORY_BYTES)  # a page that cannot be had later would end the process
        else:
            peers[0].settimeout(SILENCE_S)
            handle = socket.recv_fds(peers[0], WORD.size, 1)[1][0]
    except (OSError, IndexError):
        raise lost_worker(cluster, 0, GONE) from None
    for peer in peers.values() if cluster.is_chief else ():
        with contextlib.suppress(OSError):  # who is gone is noticed by the first sum
            socket.send_fds(peer, [b"memory"], [handle])
    try:
        return mmap.mmap(handle, MEMORY_BYTES)
    finally:
        os.close(handle)


def _wait_for_all(cluster: Cluster, peers: Mapping[int, socket.socket], size: int) -> None:
    """Return when all workers are ready for the same."""
    if not cluster.is_chief:
        _tell(peers, size)
        word = _hear(cluster, peers, 0)
        if word < 0:
            raise lost_worker(cluster, -1 - word, "no answer to worker 0")
        return
    for rank in peers:
        try:
            heard = _hear(cluster, peers, rank)
        except WorkerLostError:
            _tell(peers, -1 - rank)
            raise
        if heard != size:
            raise ValueError(f"vectors must have one length, got {heard} of worker {rank} and {size} of worker 0")
    _tell(peers, size)


def _tell(peers: Mapping[int, socket.socket], word: int) -> None:
    for peer in peers.values():
        with contextlib.suppress(OSError):  # who is gone is noticed when he is heard
            peer.send(WORD.pack(word))


def _hear(cluster: Cluster, peers: Mapping[int, socket.socket], rank: int) -> int:
    """The word of a worker, however long it takes to come: one that hangs or is suspended is ended by `launch`."""
    peers[rank].settimeout(None)
    try:
        return WORD.unpack(peers[rank].recv(WORD.size))[0]
    except (OSError, struct.error):
        raise lost_worker(cluster, rank, GONE) from None

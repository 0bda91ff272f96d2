"""What an engine says when a worker is lost, some twenty lines from C++, in one sentence."""

import re
from typing import Optional

from cpu3d.distributed.cluster import Cluster
from cpu3d.errors import InputError, WorkerLostError

CONTINUE = "the same command continues from the last checkpoint"

SILENCE_S = 20.0
"""A worker of whom nothing has been heard for so long, or that a signal has stopped for so long, is lost."""

GONE = "no connection: its process has ended or its host is gone"
SILENT = "no sign of life: it hangs or is cut off"


def lost_worker(said: str, cluster: Cluster) -> WorkerLostError:
    """The error for the user, from what the engine has `said`: which worker is gone, as far as is known, and how."""
    return lost(cluster, lost_rank(said, cluster), _reason(said))


def lost(cluster: Cluster, rank: Optional[int], reason: str) -> WorkerLostError:
    """The error for the user: worker `rank` is gone, None where nobody knows which, by what `reason` tells of it."""
    if rank == cluster.rank:
        problem = f"worker {_name(cluster, rank)}, this one, must reach the others, got {reason}; mend its network"
        return WorkerLostError(f"{problem}, {CONTINUE}")
    if rank is not None:
        problem = f"worker {_name(cluster, rank)} must answer worker {cluster.rank}, got {reason}"
    else:
        problem = f"all {cluster.workers} workers must answer each other, got {reason}"
    return WorkerLostError(f"{problem}; {'its log' if rank is not None else 'their logs'} may tell why, {CONTINUE}")


def not_started(said: str, cluster: Cluster) -> InputError:
    """The error for the user where TensorFlow has not come to a server of its own, or has not found the others."""
    if not re.search(r"could not start grpc server|address already in use", said, re.IGNORECASE):
        return lost_worker(said, cluster)
    address = cluster.addresses[cluster.rank]
    return InputError(
        f"port {address.rpartition(':')[2]} of worker {cluster.rank} ({address}) must be free until TensorFlow takes "
        "it, got it taken by another process; give the same command again, or choose another port"
    )


def lost_rank(said: str, cluster: Cluster) -> Optional[int]:
    """The rank that TensorFlow's text blames, None where it names nobody. One's own only where it names no other."""
    named = [int(rank) for rank in re.findall(r"/job:worker(?:/replica:\d+)?/task:(\d+)", said)]
    known = [rank for rank in named if rank < cluster.workers]
    others = [rank for rank in known if rank != cluster.rank]
    if not known and "CoordinationService/" in said and not cluster.is_chief:
        return 0  # that service is the chief's
    return others[0] if others else known[0] if known else None


# --- Private helpers ---

_REASONS = (
    (r"incarnation|restarted", "another process at its address"),
    (r"heartbeat|deadline.exceeded", SILENT),
    (
        r"failed to connect|connection (refused|reset|closed)|reset by peer|socket closed|broken pipe|stream removed",
        GONE,
    ),
    (r"Horovod has been shut down", "no answer: one of them has ended, hangs or is cut off"),
)
"""Patterns in the order of what they tell, with our words."""


def _reason(said: str) -> str:
    for pattern, words in _REASONS:
        if re.search(pattern, said, re.IGNORECASE):
            return words
    told = re.search(r"aborted by: *(.+)", said) or re.search(r"(\S.*)", said)
    return told[1][:160] if told else "an error without words"


def _name(cluster: Cluster, rank: int) -> str:
    return f"{rank} ({cluster.addresses[rank]})"

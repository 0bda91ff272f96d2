"""The sum in memory that workers share, with threads for workers."""

import contextlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cpu3d.distributed import shared_memory
from cpu3d.distributed.cluster import MEMORY, Cluster
from cpu3d.distributed.meeting import meet
from cpu3d.distributed.shared_memory import shared_memory_sum
from cpu3d.errors import WorkerLostError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere TensorFlow sums, on one host too")

PORT = 1000


@pytest.fixture
def workers(monkeypatch):
    """A function that calls `work(rank, sum)` for each of `count` workers at once; what comes of it, by rank.

    The memory is small, so that vectors take several turns. A worker whose work has ended is gone.
    """
    monkeypatch.setattr(shared_memory, "MEMORY_BYTES", 4096)

    def together(count, work):
        addresses = tuple(f"127.0.0.1:{PORT + rank}" for rank in range(count))

        def one(rank):
            with contextlib.ExitStack() as stack:
                cluster = Cluster(addresses, rank, MEMORY)
                peers = meet(cluster, 10)
                for peer in peers.values():
                    stack.enter_context(peer)
                try:
                    return work(rank, shared_memory_sum(cluster, peers))
                except (WorkerLostError, ValueError) as error:
                    return error

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(one, range(count)))

    return together


@pytest.mark.parametrize("count", [2, 3, 5])
def test_all_get_the_sum_in_the_order_of_ranks_to_the_bit(workers, count):
    lengths = (0, 1, 2, 101, 5000, 3)
    vectors = [
        [np.random.default_rng([rank, n]).normal(size=n).astype(np.float32) for n in lengths] for rank in range(count)
    ]
    sums = workers(count, lambda rank, sum_over: [sum_over(vector) for vector in vectors[rank]])
    for i in range(len(lengths)):
        expected = vectors[0][i].copy()
        for rank in range(1, count):
            expected += vectors[rank][i]
        for rank in range(count):
            np.testing.assert_array_equal(sums[rank][i], expected)


@pytest.mark.parametrize("gone", [0, 2])
def test_all_others_name_the_worker_that_is_gone(workers, gone):
    def work(rank, sum_over):
        for _ in range(1 if rank == gone else 3):
            sum_over(np.ones(3000, np.float32))

    ends = workers(3, work)
    for rank in {0, 1, 2} - {gone}:
        assert isinstance(ends[rank], WorkerLostError)
        assert str(ends[rank]).startswith(f"worker {gone} (127.0.0.1:{PORT + gone}) must answer worker")


def test_one_that_a_signal_has_stopped_is_lost_and_one_that_computes_is_waited_for(workers, monkeypatch):
    monkeypatch.setattr(shared_memory, "LOOK_S", 0.02)
    monkeypatch.setattr(shared_memory, "SILENCE_S", 0.1)
    suspended = []
    monkeypatch.setattr(shared_memory, "is_suspended", lambda pid: bool(suspended))

    def work(rank, sum_over):
        time.sleep(0.3 * rank)
        assert sum_over(np.ones(1, np.float32)) == 2
        suspended.append(rank)
        time.sleep(0.3 * rank)
        sum_over(np.ones(1, np.float32))

    ends = workers(2, work)
    assert str(ends[0]).startswith(f"worker 1 (127.0.0.1:{PORT + 1}) must answer worker 0, got no sign of life")


def test_vectors_of_different_lengths_are_an_error(workers):
    ends = workers(2, lambda rank, sum_over: sum_over(np.ones(2 + rank, np.float32)))
    assert isinstance(ends[0], ValueError)
    assert isinstance(ends[1], WorkerLostError)

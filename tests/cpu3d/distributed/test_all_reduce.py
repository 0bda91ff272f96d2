"""The exchange: its sums to the bit, arrays and text of the chief, and the messages when a worker
is lost."""

import contextlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cpu3d.distributed import all_reduce
from cpu3d.distributed.all_reduce import (
    SharedMemory,
    array_from_chief,
    lost_by_message,
    text_from_chief,
)
from cpu3d.distributed.cluster import Cluster, free_ports
from cpu3d.distributed.rendezvous import meet
from cpu3d.errors import WorkerLostError
from cpu3d.util.child import ROOT
from tests.cpu3d.distributed.threads import together

# --- What the chief knows ---


@pytest.mark.parametrize(
    "array",
    [
        np.array([-0.0, np.nan, np.inf, 1e-45, 3.4e38, -1.5], np.float32),
        np.arange(255, dtype=np.uint8).reshape(5, 51),  # an odd number of bytes
        np.zeros((0, 3)),
    ],
)
def test_an_array_is_the_chief_s_to_the_bit_whatever_the_others_hold(array):
    def work(exchange):
        own = array if exchange.is_chief else np.zeros_like(array)
        return array_from_chief(exchange, own)

    for received in together(3, work):
        assert received.tobytes() == array.tobytes()
        assert (received.dtype, received.shape) == (array.dtype, array.shape)


def test_a_text_is_the_chief_s_whatever_its_length():
    texts = ("M\u00fcller" * 20001, "another")
    work = lambda exchange: text_from_chief(exchange, texts[exchange.rank])
    assert together(2, work) == [texts[0]] * 2


# --- Shared memory ---

on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere TensorFlow sums, on one host too"
)


@pytest.fixture
def workers(monkeypatch):
    """A function that calls `work(rank, sum)` for each of `count` workers at once; what comes of
    it, by rank.

    The memory is small, so that vectors take several turns. A worker whose work has ended is gone.
    """
    monkeypatch.setattr(all_reduce, "MEMORY_BYTES", 4096)

    def at_once(count, work):
        addresses = tuple(f"127.0.0.1:{1000 + rank}" for rank in range(count))

        def of_rank(rank):
            cluster = Cluster(addresses, rank)
            peers, _ = meet(cluster, 10)
            try:
                return work(rank, SharedMemory(cluster, peers).sum)
            except (WorkerLostError, ValueError) as error:
                return error
            finally:
                for peer in peers.values():
                    peer.close()

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(of_rank, range(count)))

    return at_once


@on_linux
@pytest.mark.parametrize("count", [2, 5])
def test_all_get_the_sum_in_the_order_of_ranks_to_the_bit(workers, count):
    rng = np.random.default_rng(0)
    vectors = [rng.normal(size=(count, n)).astype(np.float32) for n in (0, 1, 2, 101, 5000, 3)]
    expected = []
    for first, *others in vectors:
        expected.append(sum(others, first))
    work = lambda rank, sum_over: [sum_over(each[rank]) for each in vectors]
    for sums in workers(count, work):
        for found, array in zip(sums, expected):
            np.testing.assert_array_equal(found, array)


@on_linux
@pytest.mark.parametrize("gone", [0, 2])
def test_all_others_name_the_worker_that_is_gone(workers, gone):
    def work(rank, sum_over):
        for _ in range(1 if rank == gone else 3):
            sum_over(np.ones(3000, np.float32))

    ends = workers(3, work)
    assert ends.pop(gone) is None
    for error in ends:
        assert isinstance(error, WorkerLostError)
        assert f"worker {gone} (127.0.0.1:{1000 + gone}) must answer worker" in str(error)


@on_linux
def test_vectors_of_different_lengths_are_an_error(workers):
    ends = workers(2, lambda rank, sum_over: sum_over(np.ones(2 + rank, np.float32)))
    assert [type(end) for end in ends] == [ValueError, WorkerLostError]


# --- What engines say ---

KILLED = """Graph execution error:

Collective ops is aborted by: failed to connect to all addresses
Additional GRPC error information from remote target /job:worker/replica:0/task:2 while calling \
/tensorflow.Worker"""

STOPPED = "Error reported from /job:worker/task:2: Task /job:worker/replica:0/task:2 heartbeat"


@pytest.mark.parametrize(
    ("text", "rank", "message"),
    [
        (KILLED, 1, "worker 2 (h2:9) must answer worker 1, got failed to connect to all addresses"),
        (STOPPED, 2, "worker 2 (h2:9) must reach the others, got Error reported from /job:worker"),
        ("At task:2\n/job:worker/task:1 /job:worker/task:2", 1, "worker 2 (h2:9) must answer "),
        ("No\n\nRPC: /tensorflow.CoordinationService/Heartbeat", 1, "worker 0 (h0:9) must answer "),
        ("x" * 5000, 1, "all 3 workers must answer worker 1, got xxx"),
    ],
)
def test_the_worker_that_is_lost_is_named_with_its_address_and_how(text, rank, message):
    error = lost_by_message(text, Cluster(("h0:9", "h1:9", "h2:9"), rank))
    assert str(error).startswith(message)
    assert "\n" not in str(error)
    assert len(str(error)) < 400


# --- By engines ---


WORKER = """
import hashlib, os, sys
from cpu3d.distributed.all_reduce import join
from cpu3d.distributed.cluster import Cluster, read_cluster
from cpu3d.errors import InputError
from cpu3d.host.apply import import_tensorflow

tf = import_tensorflow()
try:
    Cluster.shares_memory = False  # as between hosts
    cluster = read_cluster(os.environ)
    exchange = join(cluster, meeting_s=60, plan=[cluster.rank])
    whole = exchange.sum(tf.range(9_000_001, dtype=tf.float32) % 1000 + 1000 * (exchange.rank + 1))
    noise = exchange.sum(tf.random.stateless_normal([5_000_000], [exchange.rank, 5])).numpy()
    found = (float(whole[i]) for i in (0, 1, 4_194_305, 9_000_000))
    print(exchange.plan, *found, hashlib.sha256(noise.tobytes()).hexdigest(), flush=True)
    while True:
        exchange.sum(tf.ones([5_000_000]))
except InputError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


@pytest.mark.slow
def test_three_workers_get_the_same_bits_and_name_the_one_that_is_ended():
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(3))
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"), "1")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        workers = []
        for rank in range(3):
            config = Cluster(addresses, rank).as_tf_config()
            environ = {**os.environ, **one_thread, "PYTHONPATH": str(ROOT), "TF_CONFIG": config}
            worker = subprocess.Popen([sys.executable, "-c", WORKER], env=environ, **pipes)
            workers.append(stack.enter_context(worker))
            stack.callback(worker.kill)
        sums = [worker.stdout.readline().split() for worker in workers]
        assert sums[0][:-1] == ["[0]", "6000.0", "6003.0", "6915.0", "6000.0"]
        assert sums[1] == sums[2] == sums[0]
        workers.pop().terminate()  # TensorFlow would keep SIGTERM for itself
        errors = [worker.communicate(timeout=60)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [6, 6]
    # Whoever hears of it later may hear first of the one that has ended for it.
    assert any("error: worker 2 " in error for error in errors), errors

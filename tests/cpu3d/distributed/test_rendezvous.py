"""Waiting for the others, with threads for workers."""

import contextlib
import dataclasses
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cpu3d.distributed import rendezvous
from cpu3d.distributed.cluster import Cluster, free_ports, host_and_port
from cpu3d.errors import InputError, WorkerLostError

PLAN = {"grid": [96, 96, 96], "why": "M\u00fcller " * 20_000}
"""Larger than what goes at a time."""

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="other systems share no memory")


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch):
    """Have workers that find no chief try again at once."""
    monkeypatch.setattr(rendezvous, "TRY_AGAIN_S", 0.02)


def addresses(count):
    """Addresses with free ports."""
    return tuple(f"127.0.0.1:{port}" for port in free_ports(count))


@pytest.fixture(params=[False, pytest.param(True, marks=ON_LINUX)], ids=["network", "memory"])
def three(request, monkeypatch):
    monkeypatch.setattr(Cluster, "shares_memory", request.param)
    return Cluster(addresses(3))


def meet(cluster, limit_s=10):
    """The plan that has come; connections are closed."""
    own = PLAN if cluster.is_chief else None
    connections, plan = rendezvous.meet(cluster, limit_s, plan=own)
    for connection in connections.values():
        connection.close()
    return plan


def meeting_of(clusters, limit_s=10):
    """The results of `meet` in each of these workers at once: the plan or the error."""

    def meeting(cluster):
        try:
            return meet(cluster, limit_s)
        except InputError as error:
            return error

    with ThreadPoolExecutor(len(clusters)) as pool:
        return list(pool.map(meeting, clusters))


def connected(cluster):
    """A connection to the chief, as soon as it listens."""
    for _ in range(200):
        with contextlib.suppress(OSError):
            return rendezvous.connect(cluster)
        time.sleep(0.02)
    raise AssertionError("the chief does not listen")


def test_all_come_with_the_chief_s_plan_and_their_ports_are_free_again(three):
    for _ in range(2):
        assert meeting_of([three.of_rank(rank) for rank in (2, 0, 1)]) == [PLAN] * 3
    for address in three.addresses:
        socket.create_server(host_and_port(address)).close()


@ON_LINUX
@pytest.mark.parametrize("stranger", "01")
def test_another_user_of_the_host_is_not_heard(monkeypatch, stranger):
    """By the chief, rank 0, or by the other, each of which is a thread that ends in its rank."""
    two = Cluster(addresses(2))
    is_stranger = lambda: threading.current_thread().name.endswith(stranger)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + is_stranger())
    for error in meeting_of([two, two.of_rank(1)], limit_s=0.3):
        assert isinstance(error, WorkerLostError)


def test_those_who_came_say_who_did_not(three):
    for error in meeting_of([three.of_rank(0), three.of_rank(2)], limit_s=1):
        assert isinstance(error, WorkerLostError)
        assert f"worker 1 ({three.addresses[1]}) must come within 1 s" in str(error)
        assert three.addresses[2] not in str(error)
    with pytest.raises(WorkerLostError, match=r"worker 0 \(127.* must come within 0.3 s"):
        meet(three.of_rank(1), 0.3)


def test_a_port_that_is_taken_is_named_at_once_and_for_shared_memory_none_is_open(three):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, three, 1)
        connected(three).close()
        with socket.socket() as endpoint:
            is_closed = endpoint.connect_ex(host_and_port(three.addresses[0])) > 0
        assert is_closed == three.shares_memory
        rule = r"port \d+ of worker 0 .* must be free, got Address already in use"
        with pytest.raises(InputError, match=rule):
            meet(three, 5)
        assert isinstance(first.exception(), WorkerLostError)


def test_workers_of_another_cluster_are_sent_away(three):
    stranger = dataclasses.replace(three, addresses=(three.addresses[0], *addresses(2)), rank=1)
    chief, sent_away = meeting_of([three, stranger], limit_s=1)
    assert "got addresses of worker 1 that worker 0 does not have" in str(sent_away)
    assert sent_away.exit_code == 2
    assert "worker 1" in str(chief)


@pytest.mark.parametrize("text", [b'{"rank": [1]}\n', b"\xff" * 9000])
def test_whoever_says_other_things_at_the_port_is_not_counted(three, monkeypatch, text):
    monkeypatch.setattr(rendezvous, "HELLO_S", 0.3)
    with ThreadPoolExecutor(1) as pool:
        chief = pool.submit(meet, three)
        with pytest.raises(WorkerLostError):  # and comes again
            meet(three.of_rank(1), 0.1)
        with connected(three) as stranger, connected(three):
            stranger.sendall(text)
            assert meeting_of([three.of_rank(1), three.of_rank(2)]) == [PLAN] * 2
        assert chief.result() == PLAN

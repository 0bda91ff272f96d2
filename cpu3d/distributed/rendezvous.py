"""The workers of a run meet before TensorFlow starts: its own wait lasts an hour, ignores Ctrl-C
and names no worker.

Each worker first takes its port, which shows that it is free; those of rank 1 and up connect to the
chief's port; and when all have come the chief sends its plan, and each worker frees its port for
TensorFlow. Workers that share memory meet by sockets of their host instead, which no network and no
other user reaches."""

import contextlib
import dataclasses
import hashlib
import json
import os
import select
import socket
import struct
import time
from typing import Any, Callable, Dict, Mapping, Sequence, Tuple

from cpu3d.data.fold import with_fold
from cpu3d.data.store import Store
from cpu3d.distributed.cluster import Cluster, host_and_port
from cpu3d.errors import InputError, WorkerLostError
from cpu3d.plan import Plan, with_forecast
from cpu3d.run.config_json import config_from_json
from memory_estimator.common.files import parse_json
from memory_estimator.host import Host

# How long a worker waits for the others: the hosts of a queue do not start together.
MEETING_S = 300.0
POLL_S = 0.05
TRY_AGAIN_S = 0.5
SAY_AFTER_S = 10.0
HELLO_S = 5.0  # for a caller that has connected to send its rank
HELLO_BYTES = 2**16  # the most that a caller may send
PLAN_BYTES = 2**24  # the same of the chief
MESSAGE_BYTES = 2**15  # sent at a time: a socket of the host takes no larger message


def meet(
    cluster: Cluster,
    limit_s: float,
    say: Callable[[str], None] = lambda line: None,
    plan: Any = None,
) -> Tuple[Dict[int, socket.socket], Any]:
    """Return when all workers of the cluster are there: (connections by rank, the chief's `plan`,
    of JSON).

    `say` gets a line if some take long. The connections, which the caller closes, are the chief's
    to all others, and another worker's to the chief.

    Raises InputError if this worker's port is taken or the workers have different clusters, and
    WorkerLostError on all that have come if others do not within `limit_s`."""
    until_s = time.monotonic() + limit_s
    say_at_s = time.monotonic() + SAY_AFTER_S

    def wait_for(missing: Sequence[int], is_over: bool = False) -> None:
        """Name the missing workers once, after a while. Raises WorkerLostError when the time is
        over."""
        nonlocal say_at_s
        workers = ", ".join(f"worker {rank} ({cluster.addresses[rank]})" for rank in missing)
        if is_over or time.monotonic() >= until_s:
            todo = "see whether it runs, worker 0 can be reached, and all have one order of --hosts"
            raise WorkerLostError(
                f"{workers} must come within {limit_s:g} s, got no connection; {todo}, then give "
                "the same command again"
            )
        if time.monotonic() >= say_at_s:
            why = "named by --hosts or TF_CONFIG; without these the run has one worker"
            say(f"waiting for {workers}, {why}")
            say_at_s = float("inf")

    with _listen(cluster) as listener:
        if cluster.is_chief:
            return _gather(listener, cluster, wait_for, plan), plan
        while True:
            answer: Dict[str, Any] = {}
            with contextlib.suppress(OSError), contextlib.ExitStack() as to_chief:
                connection = to_chief.enter_context(connect(cluster))
                if not _is_stranger(cluster, connection):
                    _send(connection, {"rank": cluster.rank, "cluster": cluster.addresses})
                    answer = _receive(connection, until_s - time.monotonic() + HELLO_S, PLAN_BYTES)
                if "go" in answer:
                    to_chief.pop_all()
                    return {0: connection}, answer.get("plan")
            if "wrong" in answer:
                todo = "give all one --hosts or TF_CONFIG, and one version of this project"
                raise InputError(f"{answer['wrong']}; {todo}")
            wait_for(answer.get("missing", [0]), "missing" in answer)
            time.sleep(TRY_AGAIN_S)


def plan_of_chief(content: Mapping[str, Any], store: Store, host: Host, engine: str) -> Plan:
    """The chief's plan, as `to_json` gave it with the name of its engine, for this worker's host.
    Its store and engine must be the chief's: of another engine the weights would differ."""
    if engine != content["engine_name"]:
        rule = f"engine must be the chief's, {content['engine_name']}, got {engine}"
        raise InputError(
            f"{rule}; give their hosts the same packages and kind of CPU, or "
            "CPU3D_INSTRUCTION_SET=avx2"
        )
    config = dataclasses.replace(
        config_from_json(dict(content["config"])), store=str(store.folder.resolve())
    )
    if config.split_hash != store.manifest.split_hash:
        got = f"split {store.manifest.split_hash} for {config.split_hash}"
        raise InputError(
            f"store {store.folder} must be the chief's, got {got}; copy that one to this host"
        )
    fields = {name: content[name] for name in ("continues", "workers", "chosen", "done")}
    plan = Plan(config, with_fold(store, config.fold), **fields)
    return with_forecast(plan, host, pick=False, force=True)


def connect(cluster: Cluster) -> socket.socket:
    """A connection to the chief. Raises OSError if it does not listen."""
    if cluster.shares_memory:
        return _of_host(cluster, 0, "connect")
    return socket.create_connection(host_and_port(cluster.addresses[0]), timeout=HELLO_S)


# --- Private helpers ---


def _listen(cluster: Cluster) -> socket.socket:
    """A socket that listens for the others: at no network for shared memory, else at the worker's
    port."""
    address = cluster.addresses[cluster.rank]
    port = host_and_port(address)[1]
    try:
        if cluster.shares_memory:
            listener = _of_host(cluster, cluster.rank, "bind")
            listener.listen(1024)
            return listener
        is_dual = socket.has_dualstack_ipv6()
        return socket.create_server(
            ("", port),
            family=socket.AF_INET6 if is_dual else socket.AF_INET,
            backlog=1024,
            dualstack_ipv6=is_dual,
        )
    except OSError as error:
        rule = f"port {port} of worker {cluster.rank} ({address}) must be free"
        todo = "end the process that has it, perhaps of an earlier run, or choose another port"
        raise InputError(f"{rule}, got {error.strerror}; {todo}") from None


def _of_host(cluster: Cluster, rank: int, method: str) -> socket.socket:
    """A socket that has done `method` with a worker's name: an abstract one, in no folder and gone
    with its process."""
    of_worker = hashlib.sha256(cluster.addresses[rank].encode()).hexdigest()
    name = f"\0cpu3d-{os.getuid()}-{of_worker}".encode()
    endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        endpoint.settimeout(HELLO_S)
        getattr(endpoint, method)(name)
    except OSError:
        endpoint.close()
        raise
    return endpoint


def _is_stranger(cluster: Cluster, connection: socket.socket) -> bool:
    """Whether another user of this host is at the other end, by the kernel."""
    if not cluster.shares_memory:
        return False
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _process, user, _group = struct.unpack("3i", credentials)
    return user != os.geteuid()


def _gather(
    listener: socket.socket, cluster: Cluster, wait_for: Callable[[Sequence[int]], None], plan: Any
) -> Dict[int, socket.socket]:
    """The chief's part: the connections by rank, once all have come."""
    here: Dict[int, socket.socket] = {}
    try:
        while missing := [rank for rank in range(1, cluster.workers) if rank not in here]:
            wait_for(missing)
            if select.select([listener], [], [], POLL_S)[0]:
                with contextlib.suppress(OSError):  # the caller has gone again
                    _hear(listener.accept()[0], cluster, here)
            for rank, caller in list(here.items()):
                if select.select([caller], [], [], 0)[0]:
                    # A caller that waits sends nothing: this one has gone again.
                    here.pop(rank).close()
        for connection in here.values():
            _send(connection, {"go": True, "plan": plan})
        return here
    except BaseException:
        for connection in here.values():
            _send(connection, {"missing": missing})
            connection.close()
        raise


def _hear(connection: socket.socket, cluster: Cluster, here: Dict[int, socket.socket]) -> None:
    """Add a caller to those that are `here`, if it is a worker that is not."""
    hello: Dict[str, Any] = {}
    if not _is_stranger(cluster, connection):
        hello = _receive(connection, HELLO_S, HELLO_BYTES)
    rank: Any = hello.get("rank")
    is_same = hello.get("cluster") == list(cluster.addresses)
    if is_same and rank in range(1, cluster.workers) and rank not in here:
        here[rank] = connection
        return
    if hello:
        rule = "workers must have the same addresses, and each a rank of its own"
        got = f"addresses of worker {rank} that worker 0 does not have"
        if is_same:
            got = f"rank {rank} twice"
        _send(connection, {"wrong": f"{rule}, got {got}"})
    connection.close()


def _send(connection: socket.socket, content: Any) -> None:
    line = json.dumps(content).encode() + b"\n"
    connection.settimeout(HELLO_S)
    with contextlib.suppress(OSError):  # a worker that is gone is noticed when TensorFlow needs it
        for start in range(0, len(line), MESSAGE_BYTES):
            connection.sendall(line[start : start + MESSAGE_BYTES])


def _receive(connection: socket.socket, limit_s: float, most_bytes: int) -> Dict[str, Any]:
    """A JSON object on one line; empty if none comes in time."""
    deadline_s = time.monotonic() + limit_s
    line = b""
    with contextlib.suppress(OSError, ValueError):
        while not line.endswith(b"\n") and len(line) < most_bytes:
            connection.settimeout(max(0.01, deadline_s - time.monotonic()))
            part = connection.recv(MESSAGE_BYTES)
            if not part:  # the other end is closed
                break
            line += part
        content = parse_json(line)
        return content if isinstance(content, dict) else {}
    return {}

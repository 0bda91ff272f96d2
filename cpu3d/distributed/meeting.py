"""The workers of a run wait for each other before TensorFlow does: with a time limit, and saying who has not come.

TensorFlow's own start waits an hour for a worker that does not come, deaf to Ctrl-C, and does not say for whom. So
each worker first takes its port, which shows that it is free; those of rank 1 and up tell the chief at its port that
they are there; and when all have come the chief tells them, and everyone gives its port free for TensorFlow. Workers
that share memory meet by sockets of their host instead, which no network reaches, and take no other user's word.
"""

import contextlib
import errno
import hashlib
import ipaddress
import json
import os
import select
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from cpu3d.distributed.cluster import MEMORY, Cluster, host_and_port
from cpu3d.distributed.hosts import addresses
from cpu3d.errors import InputError, WorkerLostError
from memory_estimator.files import parse_json

TRY_AGAIN_S = 0.5
SAY_AFTER_S = 10.0
HELLO_S = 5.0
"""For whoever has connected to say who he is."""
LINE = 4096
"""Bytes of what is said, at most."""


def meet(cluster: Cluster, limit_s: float, say: Callable[[str], None] = lambda line: None) -> Dict[int, socket.socket]:
    """Return when all workers of the cluster are there. `say` gets a line when some take long.

    Returns connections by rank, to be closed by the caller: the chief's to all others, another's to the chief.

    Raises InputError when this worker's port cannot be had or the workers have been given different clusters, and
    WorkerLostError on all that have come when others do not within `limit_s`.
    """
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(listener) for listener in _own_port(cluster)]
        deadline = time.monotonic() + limit_s
        if cluster.is_chief:
            return _gather(listeners, cluster, deadline, limit_s, say)
        return {0: _report(cluster, deadline, limit_s, say)}


def peer_of(connection: socket.socket) -> Tuple[int, int]:
    """The kernel's word of who is at the other end of a connection on this host: (process, user)."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[:2]


# --- Private helpers ---


def _own_port(cluster: Cluster) -> List[socket.socket]:
    """Sockets that listen for the others."""
    host, port = host_and_port(cluster.addresses[cluster.rank])
    try:
        if cluster.engine == MEMORY:
            with contextlib.ExitStack() as stack:
                listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                listener.bind(_name(cluster, cluster.rank))
                listener.listen(1024)
                stack.pop_all()
                return [listener]
        return _at_own_addresses(host, port)
    except OSError as error:
        raise InputError(
            f"port {port} of worker {cluster.rank} ({cluster.addresses[cluster.rank]}) must be free, got "
            f"{os.strerror(error.errno)}; end the process that has it, a former run's perhaps, or choose another port"
        ) from None


def _name(cluster: Cluster, rank: int) -> bytes:
    """Of a worker's socket on its host: an abstract one, which is in no folder and gone with its process."""
    return f"\0cpu3d-{os.getuid()}-{hashlib.sha256(cluster.addresses[rank].encode()).hexdigest()}".encode()


def _at_own_addresses(host: str, port: int) -> List[socket.socket]:
    """A listener at each address that this worker's host name stands for, so that no other network reaches it.

    At all of the host where that is none which the others could reach: a name may stand for 127.0.1.1 on its own host,
    or for an address that is translated on the way.
    """
    listeners: List[socket.socket] = []
    for address in sorted(addresses(host)):
        kind = ipaddress.ip_address(address)
        if address != host and (kind.is_loopback or kind.is_link_local):
            continue
        family = socket.AF_INET6 if kind.version == 6 else socket.AF_INET
        try:
            listeners.append(socket.create_server((address, port), family=family, backlog=1024))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    if listeners:
        return listeners
    if socket.has_dualstack_ipv6():
        return [socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)]
    return [socket.create_server(("", port), backlog=1024)]


def _is_stranger(cluster: Cluster, connection: socket.socket) -> bool:
    """Whether another user of this host is at its other end."""
    return cluster.engine == MEMORY and peer_of(connection)[1] != os.geteuid()


def _gather(
    listeners: Sequence[socket.socket], cluster: Cluster, deadline: float, limit_s: float, say: Callable[[str], None]
) -> Dict[int, socket.socket]:
    """The chief's part."""
    here: Dict[int, socket.socket] = {}
    callers: Dict[socket.socket, _Caller] = {}
    met = False
    for listener in listeners:
        listener.setblocking(False)
    say_at = time.monotonic() + SAY_AFTER_S
    try:
        while len(here) < cluster.workers - 1:
            now = time.monotonic()
            missing = [rank for rank in range(1, cluster.workers) if rank not in here]
            if now >= deadline:
                for connection in here.values():
                    _send(connection, {"missing": missing})
                raise _not_come(cluster, missing, limit_s)
            if now >= say_at:
                say(_waiting(cluster, missing))
                say_at = float("inf")
            ready = select.select([*listeners, *callers, *here.values()], [], [], min(TRY_AGAIN_S, deadline - now))[0]
            for rank in [rank for rank, connection in here.items() if connection in ready]:
                here.pop(rank).close()  # they have nothing to say while they wait: this one has gone again
            for connection, caller in list(callers.items()):
                if connection in ready and caller.has_said(connection):
                    del callers[connection]
                    _welcome(connection, caller.words, cluster, here)
                elif time.monotonic() >= caller.until_s:
                    callers.pop(connection).close()
            for listener in set(listeners).intersection(ready):
                with contextlib.suppress(OSError):  # who has gone again by now
                    connection = listener.accept()[0]
                    if _is_stranger(cluster, connection):
                        connection.close()
                        continue
                    connection.setblocking(False)
                    callers[connection] = _Caller(time.monotonic() + HELLO_S)
        for connection in here.values():
            _send(connection, {"go": True})
        met = True
        return here
    finally:
        for connection in (*callers, *(() if met else here.values())):
            connection.close()


@dataclass
class _Caller:
    """Who has connected and has not said yet who he is."""

    until_s: float
    """When he has had the time to."""
    words: bytes = b""

    def has_said(self, connection: socket.socket) -> bool:
        """Whether his line is there, or nothing more is to come; call it when there is something to read."""
        try:
            part = connection.recv(LINE - len(self.words))
        except BlockingIOError:
            return False
        except OSError:
            return True
        self.words += part
        return not part or self.words.endswith(b"\n") or len(self.words) >= LINE


def _welcome(connection: socket.socket, words: bytes, cluster: Cluster, here: Dict[int, socket.socket]) -> None:
    """Add a worker who says the right things to those who are `here`; to others say what is wrong, or nothing."""
    connection.settimeout(HELLO_S)
    hello = _content(words)
    if hello is None:
        connection.close()
        return
    rank, problem = hello.get("rank"), None
    if hello.get("cluster") != _digest(cluster):
        problem = f"workers must all be given the same addresses, worker {rank} has others than worker 0"
    elif rank in here:
        problem = f"workers must each have a rank of their own, got {rank} twice"
    elif rank not in range(1, cluster.workers):
        problem = f"rank must be in 1 to {cluster.workers - 1}, got {rank}"
    if problem:
        _send(connection, {"wrong": problem})
        connection.close()
        return
    here[rank] = connection


def _report(cluster: Cluster, deadline: float, limit_s: float, say: Callable[[str], None]) -> socket.socket:
    """The other workers' part."""
    say_at = time.monotonic() + SAY_AFTER_S
    while time.monotonic() < deadline:
        if time.monotonic() >= say_at:
            say(_waiting(cluster, [0]))
            say_at = float("inf")
        connection, answer = _asked(cluster, deadline)
        if connection:
            return connection
        if "wrong" in answer:
            raise InputError(f"{answer['wrong']}; start them all by `launch`, or mend TF_CONFIG")
        if "missing" in answer:
            raise _not_come(cluster, answer["missing"], limit_s)
        time.sleep(TRY_AGAIN_S)
    raise _not_come(cluster, [0], limit_s)


def _asked(cluster: Cluster, deadline: float) -> Tuple[Optional[socket.socket], Dict[str, Any]]:
    """A connection to the chief once all have come, else what he answers; nothing where he is out of reach, or gone."""
    answer: Dict[str, Any] = {}
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        connection = stack.enter_context(_connected(cluster, min(HELLO_S, max(0.1, deadline - time.monotonic()))))
        if not _is_stranger(cluster, connection):
            _send(connection, {"rank": cluster.rank, "cluster": _digest(cluster)})
            answer = _receive(connection, deadline + HELLO_S - time.monotonic()) or {}
        if "go" in answer:
            stack.pop_all()
            return connection, answer
    return None, answer


def _connected(cluster: Cluster, limit_s: float) -> socket.socket:
    if cluster.engine != MEMORY:
        return socket.create_connection(host_and_port(cluster.addresses[0]), timeout=limit_s)
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connection.settimeout(limit_s)
        connection.connect(_name(cluster, 0))
        stack.pop_all()
        return connection


def _send(connection: socket.socket, content: Any) -> None:
    with contextlib.suppress(OSError):  # who is gone is noticed when TensorFlow wants him
        connection.sendall(json.dumps(content).encode() + b"\n")


def _receive(connection: socket.socket, limit_s: float) -> Optional[Dict[str, Any]]:
    """One line of JSON; None where none comes in time."""
    deadline, line = time.monotonic() + limit_s, b""
    with contextlib.suppress(OSError):
        while not line.endswith(b"\n") and len(line) < LINE:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            part = connection.recv(LINE - len(line))
            if not part:
                return None
            line += part
    return _content(line)


def _content(line: bytes) -> Optional[Dict[str, Any]]:
    """Of a line of JSON; None for anything else."""
    with contextlib.suppress(ValueError):
        content = parse_json(line)
        return content if isinstance(content, dict) else None
    return None


def _digest(cluster: Cluster) -> str:
    return hashlib.sha256(",".join(cluster.addresses).encode()).hexdigest()


def _workers(cluster: Cluster, ranks: Sequence[int]) -> str:
    return ", ".join(f"worker {rank} ({cluster.addresses[rank]})" for rank in ranks)


def _waiting(cluster: Cluster, ranks: Sequence[int]) -> str:
    return f"waiting for {_workers(cluster, ranks)}, of this run by TF_CONFIG; without that variable it has one worker"


def _not_come(cluster: Cluster, missing: Sequence[int], limit_s: float) -> WorkerLostError:
    return WorkerLostError(
        f"{_workers(cluster, missing)} must come within {limit_s:g} s, got no sign; see whether it runs and whether "
        f"worker 0 can be reached at its port, then give the same command on all hosts"
    )

"""Which workers train one network together, which of them this process is, and on which hosts. No TensorFlow."""

import contextlib
import dataclasses
import itertools
import json
import math
import random
import re
import socket
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple

import psutil

from cpu3d.errors import InputError
from memory_estimator.common.files import parse_json, typed

ENGINES = MEMORY, TENSORFLOW = "memory", "tensorflow"
"""What sums over the workers, see `all_reduce`."""

LOOPBACK = "127.0.0.1"
"""The host of all workers where there is only one."""

MOST_HOSTS = 100_000  # in a list: one with more is a slip of the keyboard


@dataclass(frozen=True)
class Cluster:
    """The workers of one training and this process's place among them."""

    addresses: Tuple[str, ...]
    """ "host:port" of each worker, by rank; an IPv6 host is in brackets. None of them for a process alone."""
    rank: int = 0
    """This process's, from 0. The chief's is 0: it alone writes to the run."""
    engine: str = TENSORFLOW

    def __post_init__(self):
        form = re.compile(r"(?:[^\s/\[\]@,:]+|\[[^\s/\[\]@,]+\]):(\d{1,5})", re.ASCII)
        for address, times in Counter(self.addresses).items():
            found = form.fullmatch(address)
            if not found or not 0 < int(found[1]) < 65536:
                rule = "worker address must be host:port or [IPv6]:port"
                raise InputError(f"{rule}, got {address!r}; correct TF_CONFIG or --hosts")
            if times > 1:
                raise InputError(f"workers must each have an address, got {address} twice; change its port")

    @property
    def workers(self) -> int:
        """How many there are, this process included."""
        return max(1, len(self.addresses))

    @property
    def is_chief(self) -> bool:
        """Whether this process writes to the run."""
        return self.rank == 0

    @property
    def hosts(self) -> Tuple[str, ...]:
        """Of each worker, by rank; without brackets, in lower case."""
        return tuple(host_and_port(address)[0].lower() for address in self.addresses)

    @property
    def local_ranks(self) -> Tuple[int, ...]:
        """Ranks on this process's host, this process among them."""
        hosts = self.hosts
        return tuple(rank for rank, host in enumerate(hosts) if host == hosts[self.rank]) or (0,)

    @property
    def local_index(self) -> int:
        """Which of these this process is, from 0."""
        return self.local_ranks.index(self.rank)

    def as_tf_config(self) -> str:
        """The environment variable TF_CONFIG that says the same, all of them named workers."""
        return json.dumps({"cluster": {"worker": self.addresses}, "task": {"type": "worker", "index": self.rank}})

    def of_rank(self, rank: int) -> "Cluster":
        """The same workers, seen from another."""
        return dataclasses.replace(self, rank=rank)


ALONE = Cluster(())
"""A process that trains by itself."""


def read_cluster(environ: Mapping[str, str]) -> Cluster:
    """The cluster that the environment's TF_CONFIG tells of, else ALONE.

    The engine is MEMORY where all workers are on one host; it needs Linux. Raises InputError for a TF_CONFIG that is
    not whole, and for a parameter server or an evaluator.
    """
    if not environ.get("TF_CONFIG", "").strip():
        return ALONE
    cluster = from_tf_config(environ["TF_CONFIG"])
    share_memory = len(set(cluster.hosts)) == 1 and sys.platform == "linux"
    return dataclasses.replace(cluster, engine=MEMORY) if share_memory else cluster


def without_cluster(environ: Mapping[str, str]) -> Dict[str, str]:
    """The environment of a process that trains by itself, whatever was left over from a cluster."""
    return {name: value for name, value in environ.items() if name != "TF_CONFIG"}


def from_tf_config(text: str) -> Cluster:
    """Read TF_CONFIG: {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}.

    A chief that is named apart has rank 0 and the workers follow. Without a cluster, or an empty one, it is ALONE.
    """
    todo = "correct it, or unset it to train alone"
    try:
        content = typed(parse_json(text), Dict[str, Any])
        tasks = typed(content.get("cluster") or {}, Dict[str, Tuple[str, ...]], "cluster")
        task = typed(content.get("task") or {}, Dict[str, Any], "task")
    except ValueError as error:
        raise InputError(f"TF_CONFIG must be JSON of a cluster and a task, got {text!r} ({error}); {todo}") from None
    if not tasks:
        return ALONE
    chiefs, kind, index = tasks.get("chief", ()), task.get("type"), str(task.get("index"))
    own = tasks.get(kind, ()) if kind in ("chief", "worker") and set(tasks) <= {"chief", "worker"} else ()
    if len(chiefs) > 1 or not index.isdigit() or int(index) >= len(own):
        got = f"tasks {', '.join(sorted(tasks))} and {kind} {index} of {len(own)}"
        raise InputError(f"TF_CONFIG must name workers, at most one chief, and one of them as task, got {got}; {todo}")
    return Cluster(chiefs + tasks.get("worker", ()), int(index) + (len(chiefs) if kind == "worker" else 0))


def from_hosts(hosts: Sequence[str], workers: int, ports: Sequence[int], rank: int = 0) -> Cluster:
    """So many workers on each of `hosts`, ranks host by host; the first on a host has `ports[0]`, and so on.

    `hosts` are names or addresses, IPv6 with or without brackets. Raises InputError as `Cluster`.
    """
    names = [host.strip("[]").lower() for host in hosts]
    places = [f"[{name}]" if ":" in name else name for name in names]
    return Cluster(tuple(f"{place}:{port}" for place in places for port in ports[:workers]), rank)


def host_and_port(address: str) -> Tuple[str, int]:
    """Take "host:port" or "[IPv6]:port" of a cluster apart."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


# --- Hosts ---


def own_index(hosts: Sequence[str]) -> int:
    """Which of several `hosts` this one is: the one that has one of this host's addresses, or its name.

    Raises InputError where none or several are, or where one is a name that each host has for itself.
    """
    loopback, name, here = re.compile(r"localhost|127\..*|\[?::1\]?", re.IGNORECASE), socket.gethostname().lower(), []
    for host in map(str.lower, hosts):
        if loopback.fullmatch(host):
            raise InputError(f"--hosts must be what the others reach them by, got {host}; name it otherwise")
        # A name may stand for 127.0.1.1 on its own host, and one of two names may be without its domain.
        own = any(one in own_addresses() or loopback.fullmatch(one) for one in addresses(host))
        if own or f"{host}.".startswith(f"{name}.") or f"{name}.".startswith(f"{host}."):
            here.append(host)
    if len(here) != 1:
        got = f"{' and '.join(here) or 'none'} of {', '.join(hosts)}"
        raise InputError(f"--hosts must hold this host, {name}, once, got {got}; give --host-index, from 0")
    return list(map(str.lower, hosts)).index(here[0])


def own_addresses() -> FrozenSet[str]:
    """Of all network interfaces here, without the zone of a local IPv6 address."""
    return frozenset(one.address.partition("%")[0] for found in psutil.net_if_addrs().values() for one in found)


def addresses(host: str) -> FrozenSet[str]:
    """That a name resolves to; none where it does not."""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
        return frozenset(str(entry[4][0]).partition("%")[0] for entry in found)
    return frozenset()


def free_ports(count: int) -> Tuple[int, ...]:
    """Ports of this host that are free, below those that Linux hands out by itself."""
    with contextlib.ExitStack() as held:
        found: Dict[int, socket.socket] = {}
        for port in random.sample(range(20000, 32768), 12768):
            with contextlib.suppress(OSError):
                found[port] = held.enter_context(socket.create_server(("", port)))
            if len(found) == count:
                break
        return tuple(found)


# --- Slurm: the variables that srun(1), OUTPUT ENVIRONMENT VARIABLES, sets for a task ---

# By hand, as TensorFlow's SlurmClusterResolver needs TensorFlow imported and asks for NVIDIA cards.


def read_slurm(environ: Mapping[str, str]) -> Optional[Tuple[Tuple[str, ...], int, int]]:
    """(hosts of the job step, which of them this task is on, port of each host's first worker); None outside a step.

    A batch script is none: it runs once, on the first host. The port is by the job's number, so that jobs of one host
    seldom share it. Raises InputError, naming the variables, where there is not one task a host, numbered in order.
    """
    names = ("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID", "SLURM_JOB_ID")
    if not {"SLURM_STEP_NODELIST", "SLURM_PROCID"} <= set(environ):
        return None
    nodes, tasks, *numbers = (environ.get(name, "") for name in names)
    hosts, todo = expand_hosts(nodes), "start by srun --ntasks-per-node=1 --distribution=block, or name --hosts"
    for name, text in zip(names[2:], numbers):
        if not re.fullmatch(r"[0-9]+", text):
            raise InputError(f"{name} must be a whole number, got {text!r}; {todo}")
    rank, job = map(int, numbers)
    one_each = tasks in ("1", f"1(x{len(hosts)})") and rank < len(hosts)
    if not one_each or environ.get("SLURM_NODEID", str(rank)) != str(rank):
        got = f"SLURM_PROCID {rank} of {tasks} tasks on {len(hosts)} hosts"
        raise InputError(f"Slurm's step must have one task on each of its hosts, in order, got {got}; {todo}")
    return hosts, rank, 15000 + job % 1000 * 16  # below Linux's range for connections, from 32768 on


def expand_hosts(text: str) -> Tuple[str, ...]:
    """The names of Slurm's short form: "node[01-03,7],login" is node01, node02, node03, node7, login.

    Several brackets in one name are all combined, the last varying fastest. Raises InputError for anything else.
    """
    span = r"\d+(?:-\d+)?"
    hosts: List[str] = []
    for name in re.split(r",(?![^\[]*\])", text.strip()):
        choices: List[Sequence[str]] = []
        for words, spans in re.findall(r"([^\[\]]+)|\[([^\[\]]+)\]", name):
            choices.append([words] if words else [])
            for first, last in re.findall(r"(\d+)(?:-(\d+))?", spans):
                numbers = range(int(first), min(int(last or first), int(first) + MOST_HOSTS) + 1)
                choices[-1] = [*choices[-1], *(str(number).zfill(len(first)) for number in numbers)]
        form = re.fullmatch(rf"(?:[^\[\],\s]|\[{span}(?:,{span})*\])+", name)
        if not form or not 0 < math.prod(map(len, choices)) < MOST_HOSTS:
            raise InputError(f"host list must be like node[01-03,7],login, got {text!r}; name --hosts")
        hosts += map("".join, itertools.product(*choices))
    return tuple(hosts)

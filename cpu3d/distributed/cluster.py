"""The workers that train a network together, their hosts, and this process's place among them. No
TensorFlow."""

import contextlib
import dataclasses
import json
import random
import re
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from cpu3d.errors import InputError
from memory_estimator.common.files import parse_json, typed

LOOPBACK = "127.0.0.1"  # the host of all workers if there is only one


@dataclass(frozen=True)
class Cluster:
    """The workers of one training and this process's place among them."""

    addresses: Tuple[str, ...]
    """ "host:port" of each worker, by rank; an IPv6 host is in brackets. Empty for a process
    alone."""
    rank: int = 0
    """This process's rank, from 0. The chief's is 0: it alone writes to the run."""

    def __post_init__(self) -> None:
        form = re.compile(r"(?:[^\s/\[\]@,:]+|\[[^\s/\[\]@,]+\]):(\d{1,5})", re.ASCII)
        for address, times in Counter(self.addresses).items():
            match = form.fullmatch(address)
            if not match or not 0 < int(match[1]) < 65536:
                rule = "worker address must be host:port or [IPv6]:port"
                raise InputError(f"{rule}, got {address!r}; correct TF_CONFIG or --hosts")
            if times > 1:
                raise InputError(
                    f"workers must each have an address, got {address} twice; change its port"
                )

    @property
    def workers(self) -> int:
        """The number of workers, this process included."""
        return max(1, len(self.addresses))

    @property
    def is_chief(self) -> bool:
        return self.rank == 0

    @property
    def hosts(self) -> Tuple[str, ...]:
        """The host of each worker, by rank; without brackets, in lower case."""
        return tuple(host_and_port(address)[0].lower() for address in self.addresses)

    @property
    def shares_memory(self) -> bool:
        """Whether the workers add up in memory that they share, see `all_reduce`: on one host, of
        Linux."""
        return len(set(self.hosts)) == 1 and sys.platform == "linux"

    @property
    def local_ranks(self) -> Tuple[int, ...]:
        """Ranks on this process's host, this process among them."""
        hosts = self.hosts
        return tuple(rank for rank, host in enumerate(hosts) if host == hosts[self.rank]) or (0,)

    @property
    def local_index(self) -> int:
        """This process's place among them, from 0."""
        return self.local_ranks.index(self.rank)

    def as_tf_config(self) -> str:
        """The cluster as the environment variable TF_CONFIG, all of its tasks named workers."""
        task = {"type": "worker", "index": self.rank}
        return json.dumps({"cluster": {"worker": self.addresses}, "task": task})

    def of_rank(self, rank: int) -> "Cluster":
        """The same workers, seen from another."""
        return dataclasses.replace(self, rank=rank)


ALONE = Cluster(())  # a process that trains by itself


def read_cluster(environ: Mapping[str, str]) -> Cluster:
    """The cluster of the environment's TF_CONFIG; ALONE without one, and for one without a cluster.
    Several tasks of Slurm without one would each train the whole run: they are refused.

    TF_CONFIG is {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index":
    0}}; a chief that is named apart has rank 0 and the workers follow. Raises InputError for one
    that is not whole, and for a parameter server or an evaluator."""
    text = environ.get("TF_CONFIG", "").strip()
    if not text:
        tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
        if tasks != "1":
            todo = "start by srun --ntasks-per-node=1 ... launch train"
            raise InputError(f"a training must be one task of srun, got {tasks}; {todo}")
        return ALONE
    todo = "correct it, or unset it to train alone"
    try:
        content = typed(parse_json(text), Dict[str, Any])
        tasks = typed(content.get("cluster") or {}, Dict[str, Tuple[str, ...]], "cluster")
        task = typed(content.get("task") or {}, Dict[str, Any], "task")
    except ValueError as error:
        raise InputError(
            f"TF_CONFIG must be JSON of a cluster and a task, got {text!r} ({error}); {todo}"
        ) from None
    if not tasks:
        return ALONE
    kinds = ("chief", "worker")
    kind = task.get("type")
    index = str(task.get("index"))
    own: Tuple[str, ...] = ()  # addresses of the task's kind
    if kind in kinds and set(tasks) <= set(kinds):
        own = tasks.get(kind, ())
    chiefs = tasks.get("chief", ())
    if len(chiefs) > 1 or not index.isdigit() or int(index) >= len(own):
        rule = "TF_CONFIG must name workers, at most one chief, and one of them as task"
        got = f"tasks {', '.join(sorted(tasks))} and {kind} {index} of {len(own)}"
        raise InputError(f"{rule}, got {got}; {todo}")
    rank = int(index)
    if kind == "worker":
        rank += len(chiefs)
    return Cluster(chiefs + tasks.get("worker", ()), rank)


def without_cluster(environ: Mapping[str, str]) -> Dict[str, str]:
    """The environment of a process that trains by itself: without the variable of a cluster."""
    return {name: value for name, value in environ.items() if name != "TF_CONFIG"}


def from_hosts(hosts: Sequence[str], workers: int, ports: Sequence[int], rank: int = 0) -> Cluster:
    """A cluster of so many workers on each of `hosts`, ranks host by host; the first on a host has
    `ports[0]`.

    `hosts` are names or addresses, IPv6 with or without brackets. Raises InputError as `Cluster`.
    """
    names = [host.strip("[]").lower() for host in hosts]
    places = [f"[{name}]" if ":" in name else name for name in names]
    return Cluster(tuple(f"{place}:{port}" for place in places for port in ports[:workers]), rank)


def host_and_port(address: str) -> Tuple[str, int]:
    """The two parts of "host:port" or "[IPv6]:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


# --- Hosts ---


def own_index(hosts: Sequence[str]) -> int:
    """The place of this host among `hosts`. Raises InputError if none or several are."""
    here = [index for index, host in enumerate(hosts) if is_this_host(host)]
    if len(here) != 1:
        matching = " and ".join(hosts[index] for index in here) if here else "none"
        rule = f"--hosts must hold this host, {socket.gethostname()}, once"
        raise InputError(f"{rule}, got {matching} of {', '.join(hosts)}; give --host-index, from 0")
    return here[0]


def is_this_host(host: str) -> bool:
    """Whether a name or an address is this host's: a socket can be bound to no other."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, *_, address in socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family) as endpoint:
                endpoint.bind(address)
                return True
    return False


def free_ports(count: int) -> Tuple[int, ...]:
    """Free ports of this host, below those that Linux hands out by itself: they are bound only
    later."""
    ports: List[int] = []
    for port in random.sample(range(20000, 32768), 12768):
        if len(ports) < count:
            with contextlib.suppress(OSError), socket.create_server(("", port)):
                ports.append(port)
    return tuple(ports)


# --- Slurm: the variables that srun(1), OUTPUT ENVIRONMENT VARIABLES, sets for a task ---


def read_slurm(environ: Mapping[str, str]) -> Optional[Tuple[Tuple[str, ...], int, int]]:
    """(hosts of the job step, index of this task's host, port of each host's first worker); None
    outside a step.

    A batch script is none: it runs once, on the first host. The port is by the job's number, so
    that jobs of one host seldom share it. Raises InputError if there is not one task a host, and
    without Slurm's `scontrol`."""
    if "SLURM_STEP_NODELIST" not in environ:
        return None
    todo = "start by srun --ntasks-per-node=1, or name --hosts"
    command = ("scontrol", "show", "hostnames", environ["SLURM_STEP_NODELIST"])
    try:
        index = int(environ.get("SLURM_NODEID", ""))
        job = int(environ.get("SLURM_JOB_ID", "0"))
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        rule = "a step of Slurm must have whole numbers, and hosts that scontrol lists"
        raise InputError(f"{rule}, got {error}; {todo}") from None
    hosts = tuple(done.stdout.split())
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if tasks not in ("1", f"1(x{len(hosts)})"):
        rule = "Slurm's step must have one task on each of its hosts"
        raise InputError(f"{rule}, got {tasks} tasks on {len(hosts)} hosts; {todo}")
    return hosts, index, 15000 + job % 1000 * 16  # below Linux's range for connections

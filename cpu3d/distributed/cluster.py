"""Which workers train one network together, and which of them this process is. Pure: no TensorFlow, no network."""

import dataclasses
import json
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from cpu3d.distributed.slurm import bound_apart
from cpu3d.errors import InputError
from memory_estimator.files import parse_json

CHIEF, WORKER = "chief", "worker"
"""The kinds of task that train alike. TensorFlow's others, ps and evaluator, are of other ways to train."""

MEMORY, TENSORFLOW, HOROVOD = "memory", "tensorflow", "horovod"
ENGINES = (MEMORY, TENSORFLOW, HOROVOD)
"""What sums over the workers; `strategy` tells of each."""

PORTS = range(1, 65536)


@dataclass(frozen=True)
class Cluster:
    """The workers of one training and this process's place among them."""

    addresses: Tuple[str, ...]
    """ "host:port" of each worker, by rank; an IPv6 host is in brackets. None of them for a process alone."""
    rank: int = 0
    """This process's, from 0. The chief's is 0: it alone writes to the run."""
    engine: str = TENSORFLOW
    """One of ENGINES."""

    def __post_init__(self):
        problems = [problem for address in self.addresses for problem in _wrong_with(address)]
        if self.engine not in ENGINES:
            problems.append(f"engine must be one of {', '.join(ENGINES)}, got {self.engine}; choose one of them")
        twice = [address for address, count in Counter(self.addresses).items() if count > 1]
        problems += [f"workers must each have an address, got {address} twice; change its port" for address in twice]
        if self.rank not in range(self.workers):
            rule = "be 0 for a process alone" if self.workers == 1 else f"be in 0 to {self.workers - 1}"
            problems.append(f"rank must {rule}, got {self.rank}; number the workers from 0")
        if problems:
            raise InputError(*problems)

    @property
    def workers(self) -> int:
        """How many there are, this process included."""
        return max(1, len(self.addresses))

    @property
    def is_chief(self) -> bool:
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
        """Which of the host's workers this process is, from 0."""
        return self.local_ranks.index(self.rank)

    def as_tf_config(self) -> str:
        """The environment variable TF_CONFIG that says the same, all of them named workers."""
        task = {"type": WORKER, "index": self.rank}
        return json.dumps({"cluster": {WORKER: list(self.addresses)}, "task": task})

    def of_rank(self, rank: int) -> "Cluster":
        """The same workers, seen from another."""
        return dataclasses.replace(self, rank=rank)


ALONE = Cluster(())
"""A process that trains by itself."""


def read_cluster(environ: Mapping[str, str]) -> Cluster:
    """The cluster that the environment tells of: by TF_CONFIG, else by the variables of `horovodrun`, else ALONE.

    By TF_CONFIG the engine is MEMORY where all workers are on one host; it needs Linux.

    Raises InputError for a TF_CONFIG that is not whole, or of a parameter server or an evaluator.
    """
    if environ.get("TF_CONFIG", "").strip():
        cluster = from_tf_config(environ["TF_CONFIG"])
        share_memory = len(set(cluster.hosts)) == 1 and sys.platform == "linux"
        return dataclasses.replace(cluster, engine=MEMORY) if share_memory else cluster
    return from_horovod(environ) if "HOROVOD_RANK" in environ else ALONE


def share_of_host(cluster: Cluster, environ: Mapping[str, str]) -> Tuple[int, int]:
    """(index, count): which of how many workers that share the CPUs this process may use. (0, 1) has all of them.

    Those of a host, but where Slurm has bound each of its tasks to CPUs of its own already.
    """
    return (0, 1) if bound_apart(environ) else (cluster.local_index, len(cluster.local_ranks))


def from_tf_config(text: str) -> Cluster:
    """Read TF_CONFIG: {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}.

    A chief that is named apart has rank 0 and the workers follow. Without a cluster, or an empty one, it is ALONE.
    """
    try:
        content = parse_json(text)
    except ValueError as error:
        raise _bad_tf_config("be JSON", f"{text!r} ({error})") from None
    if not isinstance(content, dict):
        raise _bad_tf_config("be a JSON object", text)
    tasks, task = content.get("cluster") or {}, content.get("task") or {}
    if not tasks:
        return ALONE
    if not isinstance(tasks, dict) or not isinstance(task, dict):
        raise _bad_tf_config("hold objects named cluster and task", text)
    return Cluster(_addresses(tasks), _rank(tasks, task))


def from_horovod(environ: Mapping[str, str]) -> Cluster:
    """The cluster by Horovod's own variables, which name no addresses: those here are for messages and for counting.

    Horovod numbers the workers host by host, so those on this host are around this one.
    """
    rank, size = _whole(environ, "HOROVOD_RANK"), _whole(environ, "HOROVOD_SIZE")
    local, here = _whole(environ, "HOROVOD_LOCAL_RANK"), _whole(environ, "HOROVOD_LOCAL_SIZE")
    if not (0 <= local < here <= size and local <= rank < size and rank - local + here <= size):
        got = f"rank {rank} of {size}, {local} of {here} on this host"
        raise InputError(f"HOROVOD_RANK and its like must be of one job, got {got}; start by `launch` or horovodrun")
    if size == 1:
        return ALONE
    first = rank - local
    name = environ.get("HOROVOD_HOSTNAME") or "this-host"
    name = f"[{name}]" if ":" in name else name
    return Cluster(
        tuple(
            f"{name}:{1 + other - first}" if first <= other < first + here else f"not-{name.strip('[]')}:{1 + other}"
            for other in range(size)
        ),
        rank,
        engine=HOROVOD,
    )


def from_hosts(hosts: Sequence[str], workers: Sequence[int], ports: Sequence[int], rank: int = 0) -> Cluster:
    """`workers[i]` workers on `hosts[i]`, ranks host by host; the first on a host has `ports[0]`, and so on.

    `hosts` are names or addresses, IPv6 with or without brackets. Raises InputError for one named twice.
    """
    names = [host.strip().strip("[]").lower() for host in hosts]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputError(*(f"hosts must differ, got {name} twice; use --workers for two on one host" for name in twice))
    spelled = [join_address(name, 0).rpartition(":")[0] for name in names]
    pairs = zip(spelled, workers)
    return Cluster(tuple(f"{host}:{ports[index]}" for host, count in pairs for index in range(count)), rank)


def host_and_port(address: str) -> Tuple[str, int]:
    """Take "host:port" or "[IPv6]:port" apart. Raises ValueError for anything else."""
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not host or set(host) & set(" /[]@,") or (":" in host) != bracketed:
        raise ValueError(address)
    if not port.isascii() or not port.isdigit() or int(port) not in PORTS:
        raise ValueError(address)
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The opposite of `host_and_port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# --- Private helpers ---


def _wrong_with(address: Any) -> List[str]:
    try:
        host_and_port(address)
    except (ValueError, AttributeError):
        return [f"worker address must be host:port or [IPv6]:port, got {address!r}; mend TF_CONFIG or --hosts"]
    return []


def _addresses(tasks: Dict[str, Any]) -> Tuple[str, ...]:
    """Of the chief, where there is one, and of the workers."""
    others = sorted(set(tasks) - {CHIEF, WORKER})
    if others:
        raise _bad_tf_config("name a chief and workers only, as all train alike", ", ".join(others))
    lists = [tasks.get(kind, []) for kind in (CHIEF, WORKER)]
    if not all(isinstance(addresses, list) for addresses in lists):
        raise _bad_tf_config('hold lists of "host:port"', tasks)
    if len(lists[0]) > 1:
        raise _bad_tf_config("name one chief", f"{len(lists[0])} of them")
    return tuple(lists[0] + lists[1])


def _rank(tasks: Dict[str, Any], task: Dict[str, Any]) -> int:
    kind, index = task.get("type"), task.get("index")
    if kind not in (CHIEF, WORKER):
        raise _bad_tf_config("be of a worker or a chief, as all train alike", f"task type {kind!r}")
    count = len(tasks.get(kind, []))
    try:
        number = int(index)
    except (TypeError, ValueError):
        number = -1
    if number not in range(count):
        raise _bad_tf_config(f"have a task index below its {count} {kind} addresses", repr(index))
    return number + (len(tasks.get(CHIEF, [])) if kind == WORKER else 0)


def _bad_tf_config(rule: str, got: Any) -> InputError:
    return InputError(f"TF_CONFIG must {rule}, got {got}; mend it, or unset it to train alone")


def _whole(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdigit():
        raise InputError(f"{name} must be a whole number, got {text!r}; start by `launch` or horovodrun")
    return int(text)

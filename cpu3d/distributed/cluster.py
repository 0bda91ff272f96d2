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
from pathlib import Path
from typing import Any, Dict, FrozenSet, List, Mapping, Sequence, Tuple

import psutil

from cpu3d.errors import InputError
from memory_estimator.files import parse_json, typed

CHIEF, WORKER = "chief", "worker"
"""The kinds of task that train alike. TensorFlow's others, ps and evaluator, are of other ways to train."""

ENGINES = MEMORY, TENSORFLOW, HOROVOD = "memory", "tensorflow", "horovod"
"""What sums over the workers, see `all_reduce`."""

VARIABLES = ("TF_CONFIG", *(f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "HOSTNAME")))
"""Of the environment: they tell a worker of its cluster."""

LOOPBACK = "127.0.0.1"
"""The host of all workers where there is only one."""

OPEN_PORTS = range(20000, 32768)
"""Ports to choose from: below are more of known services, above those that Linux gives to whoever asks for any."""

FIRST_PORT, PORTS_A_JOB, JOBS = 15000, 16, 1000
"""Below Linux's own range for connections, which begins at 32768; so jobs of one host seldom share a port."""

MOST_HOSTS = 100_000
"""In a list: one with more is a slip of the keyboard."""


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
        form = re.compile(r"(?:[^\s/\[\]@,:]+|\[[^\s/\[\]@,]+\]):(\d{1,5})", re.ASCII)
        for address in self.addresses:
            found = form.fullmatch(address)
            if not found or not 0 < int(found[1]) < 65536:
                rule = "worker address must be host:port or [IPv6]:port"
                raise InputError(f"{rule}, got {address!r}; mend TF_CONFIG or --hosts")
        for address in (one for one, count in Counter(self.addresses).items() if count > 1):
            raise InputError(f"workers must each have an address, got {address} twice; change its port")
        if self.engine not in ENGINES:
            raise InputError(f"engine must be one of {', '.join(ENGINES)}, got {self.engine}; choose one of them")
        if self.rank not in range(self.workers):
            raise InputError(f"rank must be below {self.workers}, got {self.rank}; number the workers from 0")

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
        return json.dumps({"cluster": {WORKER: self.addresses}, "task": {"type": WORKER, "index": self.rank}})

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


def without_cluster(environ: Mapping[str, str]) -> Dict[str, str]:
    """The environment of a process that trains by itself, whatever was left over from a cluster."""
    return {name: value for name, value in environ.items() if name not in VARIABLES}


def share_of_host(cluster: Cluster, environ: Mapping[str, str]) -> Tuple[int, int]:
    """(index, count): which of how many workers that share the CPUs this process may use. (0, 1) has all of them.

    Those of a host, but where Slurm has bound each of its tasks to CPUs of its own already.
    """
    return (0, 1) if bound_apart(environ) else (cluster.local_index, len(cluster.local_ranks))


def from_tf_config(text: str) -> Cluster:
    """Read TF_CONFIG: {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}.

    A chief that is named apart has rank 0 and the workers follow. Without a cluster, or an empty one, it is ALONE.
    """
    todo = "mend it, or unset it to train alone"
    try:
        content = typed(parse_json(text), Dict[str, Any])
        tasks = typed(content.get("cluster") or {}, Dict[str, Tuple[str, ...]], "cluster")
        task = typed(content.get("task") or {}, Dict[str, Any], "task")
    except ValueError as error:
        raise InputError(f"TF_CONFIG must be JSON of a cluster and a task, got {text!r} ({error}); {todo}") from None
    if not tasks:
        return ALONE
    chiefs, kind, index = tasks.get(CHIEF, ()), task.get("type"), str(task.get("index"))
    if set(tasks) - {CHIEF, WORKER} or kind not in (CHIEF, WORKER) or len(chiefs) > 1:
        got = f"tasks {', '.join(sorted(tasks))} and this one a {kind}"
        raise InputError(f"TF_CONFIG must name workers and at most one chief, as all train alike, got {got}; {todo}")
    count = len(tasks.get(kind, ()))
    if not index.isdigit() or int(index) >= count:
        raise InputError(f"TF_CONFIG must have a task index below its {count} {kind} addresses, got {index}; {todo}")
    return Cluster(chiefs + tasks.get(WORKER, ()), int(index) + (len(chiefs) if kind == WORKER else 0))


def from_horovod(environ: Mapping[str, str]) -> Cluster:
    """The cluster by Horovod's own variables, which name no addresses: those here are for messages and for counting.

    Horovod numbers the workers host by host, so those on this host are around this one.
    """
    texts = [environ.get(name, "") for name in VARIABLES[1:5]]
    rank, size, local, here = (int(text) if text.isdigit() else -1 for text in texts)
    first = rank - local
    if not (0 <= local < here <= size and first >= 0 and first + here <= size):
        got = ", ".join(f"{name} {text!r}" for name, text in zip(VARIABLES[1:5], texts))
        raise InputError(f"HOROVOD_RANK and its like must be of one job, got {got}; start by `launch` or horovodrun")
    if size == 1:
        return ALONE
    name = environ.get("HOROVOD_HOSTNAME") or "this-host"
    hosts = [name if first <= other < first + here else f"not-{name}" for other in range(size)]
    return Cluster(tuple(join_address(host, 1 + other) for other, host in enumerate(hosts)), rank, engine=HOROVOD)


def from_hosts(hosts: Sequence[str], workers: Sequence[int], ports: Sequence[int], rank: int = 0) -> Cluster:
    """`workers[i]` workers on `hosts[i]`, ranks host by host; the first on a host has `ports[0]`, and so on.

    `hosts` are names or addresses, IPv6 with or without brackets. Raises InputError for one named twice.
    """
    names = [host.strip().strip("[]").lower() for host in hosts]
    for name in (one for one, count in Counter(names).items() if count > 1):
        raise InputError(f"hosts must differ, got {name} twice; use --workers for two on one host")
    places = [(name, port) for name, count in zip(names, workers) for port in ports[:count]]
    return Cluster(tuple(join_address(name, port) for name, port in places), rank)


def host_and_port(address: str) -> Tuple[str, int]:
    """Take "host:port" or "[IPv6]:port" of a cluster apart."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """The opposite of `host_and_port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# --- Hosts ---


def read_hosts(text: str) -> Tuple[str, ...]:
    """Names or addresses of a list "a,b", or of a file with one a line, where # begins a comment.

    Raises InputError for an empty list, or where a line holds more than a name.
    """
    path = Path(text)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else text.split(",")
    hosts = tuple(filter(None, (line.partition("#")[0].strip() for line in lines)))
    wrong = [host for host in hosts if set(host) & set(" \t/=@")]
    if wrong or not hosts:
        got = ", ".join(map(repr, wrong or [text]))
        raise InputError(f"--hosts must be names like a,b, or a file with one a line, got {got}; mend it")
    return hosts


def own_index(hosts: Sequence[str]) -> int:
    """Which of several `hosts` this one is: the one that has one of this host's addresses, or its name.

    Raises InputError where none or several are, or where one is a name that each host has for itself.
    """
    loopback, name, here = re.compile(r"localhost|127\..*|\[?::1\]?", re.IGNORECASE), socket.gethostname().lower(), []
    for index, host in enumerate(hosts):
        if len(hosts) > 1 and loopback.fullmatch(host):
            raise InputError(f"--hosts must be what the others reach them by, got {host}; name it otherwise")
        own = any(one in own_addresses() or loopback.fullmatch(one) for one in addresses(host))
        # One of them may be without its domain.
        short, own_short = host.lower().partition(".")[0], name.partition(".")[0]
        if own or host.lower() in (name, own_short) or (short == own_short and name == own_short):
            here.append(index)
    if len(here) != 1:
        got = f"{' and '.join(hosts[index] for index in here) or 'none'} of {', '.join(hosts)}"
        raise InputError(f"--hosts must hold this host, {name}, once, got {got}; give --host-index, from 0")
    return here[0]


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
    """Ports that nobody listens on, by chance, so that two launches at a time hardly meet."""
    taken: List[int] = []
    with contextlib.ExitStack() as held:
        for port in random.SystemRandom().sample(OPEN_PORTS, len(OPEN_PORTS)):
            if len(taken) == count:
                break
            with contextlib.suppress(OSError):
                held.enter_context(socket.socket()).bind(("", port))
                taken.append(port)
    return tuple(taken)


# --- What Slurm tells a task that `srun` has started, by the variables of srun(1), OUTPUT ENVIRONMENT VARIABLES ---

# By hand, as TensorFlow's SlurmClusterResolver needs TensorFlow imported and asks for NVIDIA cards.


@dataclass(frozen=True)
class SlurmTask:
    """A task of a job step."""

    hosts: Tuple[str, ...]
    """Of the step, in Slurm's order."""
    tasks: Tuple[int, ...]
    """Of the step on each host. Tasks are numbered host by host, Slurm's --distribution=block."""
    rank: int
    """This task's among all of them."""
    ports: Tuple[int, ...]
    """For the tasks of one host, or its workers. May be fewer than needed: then the port after the last is next."""

    @property
    def host_index(self) -> int:
        """Which of the hosts this task is on."""
        return next(index for index, end in enumerate(itertools.accumulate(self.tasks)) if self.rank < end)

    @property
    def is_worker(self) -> bool:
        """Whether each task is one worker, as some host has several; else each is its host's and starts workers."""
        return max(self.tasks) > 1


def in_slurm(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task of `srun`. A batch script by itself is none: it is once on the first host."""
    return "SLURM_PROCID" in environ and ("SLURM_STEP_NODELIST" in environ or "SLURM_STEP_ID" in environ)


def bound_apart(environ: Mapping[str, str]) -> bool:
    """Whether Slurm keeps the tasks of this host to CPUs of their own. Then none shares its CPUs with another."""
    return len(set(filter(None, environ.get("SLURM_CPU_BIND_LIST", "").split(",")))) > 1


def read_slurm(environ: Mapping[str, str]) -> SlurmTask:
    """The task that this process is. Raises InputError, naming the variables, where they do not agree."""

    def first_of(otherwise: str, *names: str) -> str:
        return next(filter(None, map(environ.get, names)), otherwise)

    hosts = expand_hosts(first_of("", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    of_each = first_of(f"1(x{len(hosts)})", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    job = first_of("0", "SLURM_JOB_ID", "SLURM_JOBID")
    for name, text in (("SLURM_PROCID", environ.get("SLURM_PROCID", "")), ("SLURM_JOB_ID", job)):
        if not re.fullmatch(r"[0-9]+", text):
            raise InputError(f"{name} must be a whole number, got {text!r}; start by srun")
    tasks, rank = expand_counts(of_each), int(environ["SLURM_PROCID"])
    count = first_of(str(sum(tasks)), "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if len(tasks) != len(hosts) or str(sum(tasks)) != count or rank >= sum(tasks):
        got = f"SLURM_PROCID {rank} and {of_each} of {count} tasks on {len(hosts)} hosts; start by srun"
        raise InputError(f"Slurm's step must have tasks on each of its hosts, got {got}, or name --hosts")
    reserved = environ.get("SLURM_STEP_RESV_PORTS", "")  # of `srun --resv-ports`
    first = FIRST_PORT + int(job) % JOBS * PORTS_A_JOB
    ports = map(int, expand_hosts(f"[{reserved}]")) if reserved else range(first, first + PORTS_A_JOB)
    task = SlurmTask(hosts, tasks, rank, tuple(ports))
    own = {"SLURM_NODEID": task.host_index, "SLURM_LOCALID": rank - sum(tasks[: task.host_index])}
    wrong = [f"{name} {environ[name]}" for name, mine in own.items() if environ.get(name, str(mine)) != str(mine)]
    if wrong:
        got = f"{', '.join(wrong)} for task {rank}; start by srun --distribution=block"
        raise InputError(f"Slurm's tasks must be numbered host by host, got {got}")
    return task


def expand_hosts(text: str) -> Tuple[str, ...]:
    """The names of Slurm's short form: "node[01-03,7],login" is node01, node02, node03, node7, login.

    Several brackets in one name are all combined, the last varying fastest. Raises InputError for anything else.
    """
    bad = InputError(f"host list must be like node[01-03,7],login, got {text!r}; start by srun, or name --hosts")
    hosts: List[str] = []
    for name in re.split(r",(?![^\[]*\])", text.strip()):
        if not re.fullmatch(r"(?:[^\[\],\s]|\[[\d,-]+\])+", name):
            raise bad
        choices: List[List[str]] = []
        for words, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", name):
            choices.append([words] if words else [])
            for part in ranges.split(",") if ranges else ():
                found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
                if not found or not 0 <= int(found[2] or found[1]) - int(found[1]) < MOST_HOSTS:
                    raise bad
                numbers = range(int(found[1]), int(found[2] or found[1]) + 1)
                choices[-1] += [str(number).zfill(len(found[1])) for number in numbers]
        if math.prod(map(len, choices)) > MOST_HOSTS:
            raise bad
        hosts += map("".join, itertools.product(*choices))
    return tuple(hosts)


def expand_counts(text: str) -> Tuple[int, ...]:
    """Slurm's short form of one number a host: "2(x3),1" is 2, 2, 2, 1."""
    found = [re.fullmatch(r"(\d+)(?:\(x(\d{1,5})\))?", part.strip()) for part in text.split(",")]
    if not all(found):
        raise InputError(f"SLURM_STEP_TASKS_PER_NODE must be like 2(x3),1, got {text!r}; start by srun")
    return tuple(int(one[1]) for one in found for _ in range(int(one[2] or 1)))

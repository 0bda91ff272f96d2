"""What a launch starts, decided before anything is: which workers there are, and which of them begin on this host.

Pure: what has to be asked of this host comes in as functions, so that a table of hosts and schedulers tests it.
"""

import sys
from dataclasses import dataclass
from typing import Callable, Dict, Mapping, Optional, Sequence, Tuple

from cpu3d.data.words import count as counted
from cpu3d.distributed.cluster import HOROVOD, TENSORFLOW, Cluster, from_hosts, from_tf_config, host_and_port
from cpu3d.distributed.hosts import LOOPBACK
from cpu3d.distributed.slurm import bound_apart, hosts_without_step, in_slurm, read_slurm
from cpu3d.errors import InputError
from cpu3d.util.child import PROGRAM

PORT = 29500
"""Of the first worker on each host where there are several hosts and nothing else is said: all have to know it."""

OF_A_CLUSTER = ("TF_CONFIG", *(f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "HOSTNAME")))
"""Variables that tell a worker of its cluster."""


@dataclass(frozen=True)
class Asked:
    """The options of a launch."""

    workers: Optional[int] = None
    """A host; None is by its sockets."""
    hosts: Tuple[str, ...] = ()
    host_index: Optional[int] = None
    port: Optional[int] = None
    engine: str = TENSORFLOW

    def __post_init__(self):
        problems = []
        if self.workers is not None and self.workers < 1:
            problems.append(f"--workers must be at least 1, got {self.workers}; leave it out for one a socket")
        if self.port is not None and not 1024 <= self.port < 65536:
            problems.append(f"--port must be in 1024 to 65535, got {self.port}; leave it out to have one chosen")
        if self.host_index is not None and self.host_index not in range(len(self.hosts)):
            problems.append(f"--host-index must be in --hosts, counted from 0, got {self.host_index}; leave it out")
        if problems:
            raise InputError(*problems)


@dataclass(frozen=True)
class ThisHost:
    """What a plan asks this host, when it has to."""

    default_workers: Callable[[], int]
    """One a socket."""
    index_among: Callable[[Sequence[str]], int]
    """Which of the hosts it is."""
    free_ports: Callable[[int], Sequence[int]]
    name: str = "this one"
    """In words."""


@dataclass(frozen=True)
class Plan:
    """The workers of a run, and those that start here."""

    cluster: Cluster
    """As the first of those sees it."""
    ranks: Tuple[int, ...]
    """Of the workers that start here."""
    engine: str
    found: str
    """Where the hosts are from, in words."""
    apart: bool = False
    """Whether something else has given each worker CPUs of its own."""
    note: str = ""
    """What the user may not have meant, or ""."""

    @property
    def hosts(self) -> Dict[str, int]:
        """Workers on each host."""
        counts: Dict[str, int] = {}
        for host in self.cluster.hosts:
            counts[host] = counts.get(host, 0) + 1
        return counts

    @property
    def sharing_here(self) -> int:
        """Workers that share the CPUs of this host."""
        return 1 if self.apart else len(self.cluster.local_ranks)

    @property
    def ports_here(self) -> Tuple[int, ...]:
        """That must be free on this host; workers of one host need none."""
        if self.engine == HOROVOD or len(self.hosts) == 1:
            return ()
        return tuple(host_and_port(self.cluster.addresses[rank])[1] for rank in self.ranks)

    @property
    def words(self) -> str:
        """Such as "4 workers on 2 hosts (Slurm), 2 of them here"."""
        workers, hosts = self.cluster.workers, len(self.hosts)
        here = "" if len(self.ranks) == workers else f", {len(self.ranks)} of them here"
        by = ", exchange by Horovod" if self.engine == HOROVOD else ""
        return f"{counted(workers, 'worker')} on {counted(hosts, 'host')} ({self.found}){here}{by}"


def make_plan(asked: Asked, environ: Mapping[str, str], host: ThisHost) -> Plan:
    """From --hosts, else TF_CONFIG, else Slurm, else this host alone. Raises InputError where they do not agree."""
    if asked.hosts:
        return _of_hosts(asked, host)
    if environ.get("TF_CONFIG", "").strip():
        return _of_tf_config(asked, environ)
    if in_slurm(environ):
        return _of_slurm(asked, environ, host)
    workers = asked.workers or host.default_workers()
    ports = _from(asked.port, workers) if asked.port else tuple(host.free_ports(workers))
    cluster = from_hosts((LOOPBACK,), (workers,), ports)
    others = len(hosts_without_step(environ)) - 1
    note = (
        f"the job has {counted(others, 'other host')}, which srun ./run.sh launch ... would use" if others > 0 else ""
    )
    return Plan(cluster, tuple(range(workers)), asked.engine, host.name, note=note)


def environ_of(plan: Plan, rank: int, environ: Mapping[str, str]) -> Dict[str, str]:
    """The whole environment of a worker: ours, and its place in the cluster. Alone it has none."""
    clean = of_nobody(environ)
    if plan.engine == TENSORFLOW and plan.cluster.workers > 1:
        clean["TF_CONFIG"] = plan.cluster.of_rank(rank).as_tf_config()
    return clean


def of_nobody(environ: Mapping[str, str]) -> Dict[str, str]:
    """The same for a process of no cluster, whatever was left over from one."""
    return {name: value for name, value in environ.items() if name not in OF_A_CLUSTER}


def horovod_command(plan: Plan, train: Sequence[str], logs: str) -> Tuple[str, ...]:
    """What starts all workers of all hosts at once: Horovod's launcher, over ssh where there are several."""
    hosts = {("localhost" if host == LOOPBACK else host): count for host, count in plan.hosts.items()}
    places = ",".join(f"{host}:{count}" for host, count in hosts.items())
    return (
        *(sys.executable, "-m", "cpu3d.distributed.horovodrun", "--gloo", "-np", str(plan.cluster.workers)),
        *("-H", places, "--output-filename", logs, *train),
    )


def train_command(options: Sequence[str]) -> Tuple[str, ...]:
    """What a worker does."""
    return (*PROGRAM, *options)


# --- Private helpers ---


def _of_hosts(asked: Asked, host: ThisHost) -> Plan:
    one = len(asked.hosts) == 1
    workers = asked.workers or host.default_workers()
    index = asked.host_index if asked.host_index is not None else 0 if one else host.index_among(asked.hosts)
    ports = _from(asked.port or PORT, workers) if asked.port or not one else tuple(host.free_ports(workers))
    first = index * workers
    cluster = from_hosts(asked.hosts, (workers,) * len(asked.hosts), ports, first)
    if asked.engine == HOROVOD:  # starts them on all hosts from one
        return Plan(cluster.of_rank(0), tuple(range(cluster.workers)), HOROVOD, "--hosts")
    return Plan(cluster, tuple(range(first, first + workers)), TENSORFLOW, "--hosts")


def _of_tf_config(asked: Asked, environ: Mapping[str, str]) -> Plan:
    _one_each(asked, "TF_CONFIG")
    cluster = from_tf_config(environ["TF_CONFIG"])
    return Plan(cluster, (cluster.rank,), TENSORFLOW, "TF_CONFIG", bound_apart(environ))


def _of_slurm(asked: Asked, environ: Mapping[str, str], host: ThisHost) -> Plan:
    task = read_slurm(environ)
    if task.is_worker:
        _one_each(asked, "Slurm with several tasks a host")
        counts = task.tasks
    else:
        _no_horovod(asked, "a task of srun")
        counts = (asked.workers or host.default_workers(),) * len(task.hosts)
    ports = _from(asked.port, max(counts)) if asked.port else _prolonged(task.ports, max(counts))
    if task.is_worker:
        cluster, here = from_hosts(task.hosts, counts, ports, task.rank), 1
    else:
        cluster, here = from_hosts(task.hosts, counts, ports, task.host_index * counts[0]), counts[0]
    ranks = tuple(range(cluster.rank, cluster.rank + here))
    return Plan(cluster, ranks, TENSORFLOW, "Slurm", task.is_worker and bound_apart(environ))


def _one_each(asked: Asked, found: str) -> None:
    """Where every launch is one worker."""
    _no_horovod(asked, found)
    if asked.workers not in (None, 1):
        raise InputError(f"--workers must be left out with {found}, where each is one worker, got {asked.workers}")


def _no_horovod(asked: Asked, found: str) -> None:
    if asked.engine == HOROVOD:
        raise InputError(
            f"--engine horovod must be launched once for all hosts, got it with {found}; name --hosts and start it on "
            "the first of them"
        )


def _from(port: Optional[int], count: int) -> Tuple[int, ...]:
    return _prolonged((port or PORT,), count)


def _prolonged(ports: Sequence[int], count: int) -> Tuple[int, ...]:
    """`ports`, and after the last of them the next ones, `count` in all."""
    return (*ports[:count], *range(ports[-1] + 1, ports[-1] + 1 + count - len(ports)))

"""Train with several workers: one a socket of this host, and on several hosts.

    ./run.sh launch train --store store --run runs/first --batch-per-worker 1
    ./run.sh launch --workers 2 train --store store --run runs/first --batch 4
    ./run.sh launch --dry-run --on-host paper-4x20 train --store store --run runs/first --batch 4
    ./run.sh launch --hosts node1,node2 train --store store --run runs/first --batch 8        (on each of them)
    srun --ntasks-per-node=1 --exclusive ./run.sh launch train --store store --run runs/first --batch 8
    srun --ntasks-per-socket=1 --exclusive ./run.sh launch train --store store --run runs/first --batch 8

The options of launch come before `train`, those of train after it. The workers share each batch, and learn what one
would with the same --batch. What each of them says is added to RUN/logs/worker-RANK.log; the first one's is shown too.
The first that fails ends all, is named with its last words, and gives its exit code. The same command again continues.

Hosts are those of --hosts, else of TF_CONFIG (then this is one worker, as it says), else of Slurm's step, else this
one. On several hosts the command is the same on each, --workers too: the first worker, the chief, writes the run; store
and program have to be on each. Under Slurm one task a host starts the host's workers, and of several tasks a host each
is one worker. --engine horovod is started on one host only; its launcher reaches the others by ssh.
"""

import argparse
import functools
import importlib.util
import json
import os
import shlex
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Mapping, Optional, Sequence, Tuple

from rich.console import Console
from rich.progress import Progress

from cpu3d.data.store import open_store
from cpu3d.distributed.cluster import (
    HOROVOD,
    LOOPBACK,
    TENSORFLOW,
    Cluster,
    bound_apart,
    free_ports,
    from_hosts,
    from_tf_config,
    in_slurm,
    own_index,
    read_hosts,
    read_slurm,
    without_cluster,
)
from cpu3d.distributed.supervise import Job, supervise, wait_for_earlier
from cpu3d.errors import InputError
from cpu3d.host.describe import describe_plans, overridden
from cpu3d.host.gpu import HostGpus
from cpu3d.host.thread_plan import default_workers, share_of, thread_plans
from cpu3d.host.topology import Topology, hosts_table, read_topology, topology_of
from cpu3d.plan import make_plan as plan_training
from cpu3d.training.heartbeat import Heartbeat, read_heartbeats
from cpu3d.util.atomic import writable_folder
from cpu3d.util.child import PROGRAM, ROOT, last_step
from cpu3d.util.progress import columns
from cpu3d.util.records import count as counted
from memory_estimator.schema import add_options, arguments, option
from memory_estimator.table import Table
from memory_estimator.units import format_seconds

PORT = 29500
"""Of the first worker on each host where there are several hosts and nothing else is said: all have to know it."""


@dataclass(frozen=True)
class Options:
    """The options of a launch."""

    workers: Optional[int] = option(None, "on each host (default: one for each of its sockets)", "N", at_least=1)
    hosts: Optional[str] = option(None, "names or addresses, or a file of them, one a line", "A,B|FILE")
    host_index: Optional[int] = option(None, "this one's in --hosts (default: by address)", "I", at_least=0)
    port: Optional[int] = option(
        None, "of each host's first worker (default: free, or 29500 with --hosts)", "P", at_least=1024, at_most=65535
    )
    engine: str = option(TENSORFLOW, "what adds up gradients of several hosts", choices=(TENSORFLOW, HOROVOD))
    dry_run: bool = option(False, "say what would be started, and start nothing")
    json: bool = option(False, "with --dry-run: print the plan that the training would write to RUN/plan.json")
    on_host: Optional[str] = option(None, 'with --dry-run: on another host; "list" tells of some', metavar="NAME|FILE")
    train: Tuple[str, ...] = option((), "train and its options", metavar="train ...", rest=True)


OPTIONS = (Options,)


def run(options: Options) -> int:
    """Start the workers and wait for their end, or print what would be started."""
    for name, given in (("--on-host", options.on_host), ("--json", options.json)):
        if given and not options.dry_run:
            raise InputError(f"{name} must come with --dry-run, got {given} without; leave it out")
    if options.on_host == "list":
        Console().print(hosts_table())
        return 0
    if options.train[:1] != ("train",):
        got = options.train[0] if options.train else "nothing"
        raise InputError(f"launch must be followed by its options and then by train and its own, got {got}; see --help")
    from cpu3d.training import train

    # Train's own reading of its options: one refusal before anything starts, and not one a worker.
    parser = argparse.ArgumentParser(prog="python -m cpu3d launch ... train")
    add_options(parser, *train.OPTIONS)
    training, settings = arguments(train.OPTIONS, parser.parse_args(options.train[1:]), InputError)
    topology = functools.lru_cache(lambda: topology_of(options.on_host) if options.on_host else read_topology())
    plan = make_plan(options, os.environ, lambda: default_workers(topology()))
    commands = plan.commands(options.train, training.run)
    if options.json:
        store = open_store(training.store)
        store.check_split()
        share = share_of(topology().host, len(plan.cluster.local_ranks), cpus_apart=plan.apart)
        more = {"gpus": HostGpus(), "workers": plan.cluster.workers, "force": training.force}
        planned = plan_training(store, training.run, share, settings, **more)
        print(json.dumps(planned.to_json(), indent=2))  # what the chief would write to plan.json
    elif options.dry_run:
        _show(plan, topology(), commands)
    else:
        thread_plans(topology(), 1 if plan.apart else len(plan.cluster.local_ranks))  # else each worker would refuse
        _launch(plan, commands, training.run)
    return 0


# --- The plan ---


@dataclass(frozen=True)
class Plan:
    """The workers of a run, and those that start here."""

    cluster: Cluster
    """As the first of those sees it."""
    ranks: range
    """Of the workers that start here."""
    found: str
    """Where the hosts are from, in words."""
    engine: str = TENSORFLOW
    apart: bool = False
    """Whether something else has given each worker CPUs of its own."""

    @property
    def words(self) -> str:
        """Such as "4 workers on 2 hosts (Slurm), 2 here"."""
        hosts = counted(len(set(self.cluster.hosts)), "host")
        return f"{counted(self.cluster.workers, 'worker')} on {hosts} ({self.found}), {len(self.ranks)} here"

    def environ_of(self, rank: int, environ: Mapping[str, str]) -> Dict[str, str]:
        """The whole environment of a worker: `environ`, and its place in the cluster. Alone it has none."""
        clean = without_cluster(environ)
        if self.engine == TENSORFLOW and self.cluster.workers > 1:
            clean["TF_CONFIG"] = self.cluster.of_rank(rank).as_tf_config()
        return clean

    def commands(self, train: Sequence[str], run: Path) -> Dict[int, Tuple[str, ...]]:
        """By the rank of the worker; with Horovod the one command that starts all workers of all hosts, by ssh."""
        if self.engine != HOROVOD:
            return dict.fromkeys(self.ranks, (*PROGRAM, *train))
        hosts = Counter("localhost" if host == LOOPBACK else host for host in self.cluster.hosts)
        places = ",".join(f"{host}:{workers}" for host, workers in hosts.items())
        launcher = (sys.executable, "-m", "cpu3d.distributed.horovodrun", "--gloo", "-np", str(self.cluster.workers))
        logs = str(run / "logs" / "horovod")
        return {0: (*launcher, "-H", places, "--output-filename", logs, *PROGRAM, *train)}


def make_plan(options: Options, environ: Mapping[str, str], one_a_socket: Callable[[], int]) -> Plan:
    """From --hosts, else TF_CONFIG, else Slurm, else this host alone. Raises InputError where they do not agree."""

    def check(found: str, one_each: bool = True) -> None:
        if options.engine == HOROVOD:
            todo = "name --hosts and start it on the first of them"
            raise InputError(f"--engine horovod must be launched once for all hosts, got it with {found}; {todo}")
        if one_each and options.workers not in (None, 1):
            raise InputError(f"--workers must be left out with {found}, where each is one, got {options.workers}")

    if not options.hosts and environ.get("TF_CONFIG", "").strip():
        check("TF_CONFIG")
        cluster = from_tf_config(environ["TF_CONFIG"])
        return Plan(cluster, range(cluster.rank, cluster.rank + 1), "TF_CONFIG", apart=bound_apart(environ))
    if not options.hosts and in_slurm(environ):
        task = read_slurm(environ)
        check("Slurm with several tasks a host" if task.is_worker else "a task of srun", task.is_worker)
        here = 1 if task.is_worker else options.workers or one_a_socket()
        counts = task.tasks if task.is_worker else (here,) * len(task.hosts)
        first = task.rank if task.is_worker else task.host_index * here
        ports = (options.port,) if options.port else task.ports
        ports = (*ports, *range(ports[-1] + 1, ports[-1] + max(counts)))  # after the last of them the next ones
        cluster, apart = from_hosts(task.hosts, counts, ports, first), task.is_worker and bound_apart(environ)
        return Plan(cluster, range(first, first + here), "Slurm", apart=apart)
    hosts = read_hosts(options.hosts) if options.hosts else (LOOPBACK,)
    workers, index = options.workers or one_a_socket(), options.host_index
    if index is None:
        index = own_index(hosts) if len(hosts) > 1 and not options.on_host else 0
    if index >= len(hosts):
        raise InputError(f"--host-index must be in --hosts, counted from 0, got {index}; leave it out")
    first, all_know = options.port or PORT, len(hosts) > 1 or options.port or options.on_host
    ports = range(first, first + workers) if all_know else free_ports(workers)
    cluster = from_hosts(hosts, (workers,) * len(hosts), ports, index * workers)
    ranks = range(index * workers, (index + 1) * workers)
    if options.engine == HOROVOD:  # starts them on all hosts from one
        cluster, ranks = cluster.of_rank(0), range(cluster.workers)
    return Plan(cluster, ranks, "--hosts" if options.hosts else options.on_host or "this one", options.engine)


# --- What is shown and started ---


def _show(plan: Plan, topology: Topology, commands: Mapping[int, Tuple[str, ...]]) -> None:
    """Print the plan on stdout. Workers on other hosts are shown as if those were like this one."""
    console, cluster = Console(), plan.cluster
    counts = Counter(cluster.hosts)
    places = [thread_plans(topology, many) for many in sorted({1} if plan.apart else set(counts.values()))]
    rows = []
    for rank, address in enumerate(cluster.addresses):
        index = cluster.of_rank(rank).local_index
        rows.append((address, str(rank), str(index), "yes" if rank in plan.ranks else "no"))
    say(f"{plan.words}; a dry run, nothing is started", console)
    header = ("address", "rank", "worker of its host", "starts here")
    note = "All hosts are taken to be like this one." if len(counts) > 1 else ""
    console.print(Table(header, rows, title="Workers", caption=note))
    console.print(*(describe_plans(topology, of_one_host) for of_one_host in places))
    for setting in overridden([place for of_one_host in places for place in of_one_host]):
        say(f"note: {setting} is set here, and wins", console)
    for rank, command in commands.items():
        given = [f"{name}={shlex.quote(value)}" for name, value in plan.environ_of(rank, {}).items()]
        whom = "all workers" if plan.engine == HOROVOD else f"worker {rank}"
        say(f"\n{whom}:\n{' '.join([*given, shlex.join(command)])}", console)


def _launch(plan: Plan, commands: Mapping[int, Tuple[str, ...]], run: Path) -> None:
    """Start the workers of this host; stderr gets the chief's lines as they come, and a terminal a bar of its steps."""
    horovod, is_chief = plan.engine == HOROVOD, plan.cluster.is_chief
    if horovod and importlib.util.find_spec("horovod") is None:
        raise InputError("horovod must be installed for --engine horovod, found none; run ./run.sh setup --horovod")
    wait_for_earlier(run, say)
    logs = writable_folder(run / "logs", "folder of logs")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    jobs = []
    for rank, command in commands.items():
        name, log = ("horovodrun", "horovod.log") if horovod else (f"worker {rank}", f"worker-{rank}.log")
        jobs.append(Job(name, command, plan.environ_of(rank, environ), logs / log))
    say(f"launch: {plan.words}; logs: {', '.join(str(job.log) for job in jobs)}")
    began_s, before, console = time.monotonic(), last_step(run), Console(stderr=True)
    read = jobs[0].log.stat().st_size if jobs[0].log.exists() else 0

    def show() -> None:
        nonlocal read
        if not is_chief or not jobs[0].log.exists():
            return
        with jobs[0].log.open("rb") as file:
            file.seek(read)
            lines = [line for line in file if line.endswith(b"\n")]
        read += sum(map(len, lines))
        for line in lines:
            if not line.startswith(b"--- "):  # a header
                say(line.decode("utf-8", errors="replace").rstrip("\n"), console)
        beat = None if progress.disable else read_heartbeats(run).get(0)
        if isinstance(beat, Heartbeat) and beat.steps:
            progress.update(bar, completed=beat.step, total=beat.steps)

    with Progress(*columns(), console=console, disable=not (is_chief and console.is_terminal)) as progress:
        bar = progress.add_task("train", total=None)
        supervise(jobs, run, show=show, say=functools.partial(say, console=console))
    after = last_step(run)
    steps = f"{after - before} steps, to step {after}" if is_chief else "the chief has counted the steps"
    say(f"launch: {plan.words}: ended well, {steps}, {format_seconds(time.monotonic() - began_s)}; logs in {logs}")


def say(line: str, console: Optional[Console] = None) -> None:
    """Print a line on stderr, or where `console` does, as it is."""
    (console or Console(stderr=True)).print(line, highlight=False, markup=False, soft_wrap=True)

"""Train with several workers: one per socket of this host, or on several hosts.

    ./run.sh launch train --store store --run runs/first --batch 2
    ./run.sh launch --workers 2 train --store store --run runs/first --batch 4
    ./run.sh launch --dry-run train --store store --run runs/first --batch 4
    ./run.sh launch --hosts node1,node2 train --store store --run runs/first --batch 8
    srun --ntasks-per-node=1 --exclusive ./run.sh launch train --store store --run runs/first \\
        --batch 8

The workers share each batch: the run is that of one worker with the same --batch. The output of
each worker is added to RUN/logs/worker-RANK.log; that of the first is also shown. If a worker
fails, all are stopped; `launch` prints its name and the end of its log, and ends with its exit
code. The same command continues.

Hosts come from --hosts; without it from TF_CONFIG, then Slurm, then this host alone. With TF_CONFIG
this process is one of its workers. On several hosts give the same command on each; each needs the
store and the program. The first worker, the chief, writes the run."""

import argparse
import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Mapping, Optional, Sequence, Tuple

from cpu3d.distributed.cluster import (
    ALONE,
    LOOPBACK,
    Cluster,
    free_ports,
    from_hosts,
    own_index,
    read_cluster,
    read_slurm,
    without_cluster,
)
from cpu3d.distributed.worker_processes import WorkerCommand, run_workers, wait_for_earlier
from cpu3d.errors import InputError
from cpu3d.host.thread_plan import default_workers, plan_lines, read_topology, thread_plans
from cpu3d.run.folds import refuse_folds
from cpu3d.settings import TRAIN_OPTIONS
from cpu3d.util.atomic import writable_folder
from cpu3d.util.child import PROGRAM, ROOT
from cpu3d.util.lock import locked
from cpu3d.util.progress import say
from cpu3d.util.records import count as counted
from memory_estimator.common.schema import add_options, arguments, option
from memory_estimator.common.units import format_seconds
from memory_estimator.installed import as_typed

PORT = 29500  # of the first worker on each of several hosts if none is chosen: all have to know it


@dataclass(frozen=True)
class Options:
    """Command-line options of `launch`."""

    workers: Optional[int] = option(
        None, "workers on each host (default: one for each socket)", "N", at_least=1
    )
    hosts: Optional[str] = option(None, "names or addresses of the hosts, the chief's first", "A,B")
    host_index: Optional[int] = option(
        None, "this host's place in --hosts, from 0 (default: found)", "I", at_least=0
    )
    port: Optional[int] = option(
        None,
        "port of each host's first worker (default: a free one, or 29500 with --hosts)",
        "P",
        at_least=1024,
        at_most=65535,
    )
    dry_run: bool = option(False, "print what would be started, and start nothing")
    train: Tuple[str, ...] = option((), "train and its options", metavar="train ...", rest=True)


OPTIONS = (Options,)


def run(options: Options) -> int:
    """Start the workers of this host and wait for their end, or print what would be started."""
    if options.train[:1] != ("train",):
        got = options.train[0] if options.train else "nothing"
        rule = "launch and its options must be followed by `train` and its options"
        raise InputError(f"{rule}, got {got}; see --help")
    # As `train` reads its options: one refusal before anything starts, instead of one for each
    # worker.
    parser = argparse.ArgumentParser(prog=as_typed("./run.sh launch ... train"))
    add_options(parser, *TRAIN_OPTIONS)
    training, _ = arguments(TRAIN_OPTIONS, parser.parse_args(options.train[1:]), InputError)
    if training.folds:
        loop = f"launch train --fold I/{training.folds} --run {training.run}/fold-I"
        rule = f"launch must train one run, got --folds {training.folds}"
        todo = f"run `{loop}` for each I, then the same `train --folds` alone, which scores them"
        raise InputError(f"{rule}; {todo}")
    if training.dry_run or training.json:
        todo = "give `launch --dry-run train ...`, or `train` alone"
        raise InputError(f"launch must start a training, got --dry-run or --json; {todo}")
    refuse_folds(training.run)
    topology = read_topology()
    placement = place_workers(options, os.environ, default_workers(topology))
    # Refused here, or each worker would refuse.
    threads = thread_plans(topology, len(placement.cluster.local_ranks))
    if not options.dry_run:
        _launch(placement, options.train, training.run)
        return 0
    say(f"{placement.words}; a dry run, nothing is started", *plan_lines(threads), stderr=False)
    for rank in placement.ranks:
        place = placement.environ_of(rank, {})
        words = [f"{name}={shlex.quote(value)}" for name, value in place.items()]
        words.append(shlex.join([*PROGRAM, *options.train]))
        say(f"worker {rank}: {' '.join(words)}", stderr=False)
    return 0


@dataclass(frozen=True)
class Placement:
    """The workers of a run, and those that start here."""

    cluster: Cluster  # as the first worker that starts here sees it
    ranks: range  # of the workers that start here
    origin: str  # of the hosts, in words

    @property
    def words(self) -> str:
        """The numbers, such as "4 workers on 2 hosts (Slurm), 2 here"."""
        workers = counted(self.cluster.workers, "worker")
        hosts = counted(len(set(self.cluster.hosts)), "host")
        return f"{workers} on {hosts} ({self.origin}), {len(self.ranks)} here"

    def environ_of(self, rank: int, environ: Mapping[str, str]) -> Dict[str, str]:
        """The whole environment of a worker: `environ`, and its place in the cluster. Alone it has
        none."""
        whole = without_cluster(environ)
        if self.cluster.workers > 1:
            whole["TF_CONFIG"] = self.cluster.of_rank(rank).as_tf_config()
        return whole


def place_workers(options: Options, environ: Mapping[str, str], one_a_socket: int) -> Placement:
    """The workers by --hosts, else TF_CONFIG, else Slurm, else of this host. Raises InputError if
    these disagree."""
    if options.host_index is not None and not options.hosts:
        raise InputError(
            f"--host-index must come with --hosts, got {options.host_index} alone; add them"
        )
    hosts: Tuple[str, ...] = (LOOPBACK,)
    index = 0  # of this host
    origin = "this one"
    port: Optional[int] = None  # of the first worker here; None for free ones
    here = one_a_socket if options.workers is None else options.workers
    if options.hosts:
        hosts = tuple(host.strip() for host in options.hosts.split(","))
        origin = "--hosts"
        port = PORT
        if options.host_index is not None:
            index = options.host_index
        elif len(hosts) > 1:
            index = own_index(hosts)
        if index >= len(hosts):
            rule = f"--host-index must be below {len(hosts)}, the number of hosts"
            raise InputError(f"{rule}, got {index}; leave it out")
    elif environ.get("TF_CONFIG") and (cluster := read_cluster(environ)) != ALONE:
        if options.workers not in (None, 1):
            raise InputError(
                f"--workers must be 1 with TF_CONFIG, got {options.workers}; leave it out"
            )
        return Placement(cluster, range(cluster.rank, cluster.rank + 1), "TF_CONFIG")
    elif (step := read_slurm(environ)) is not None:
        hosts, index, port = step
        origin = "Slurm"
    if options.port is not None:
        port = options.port
    ports = range(port, port + here) if port else free_ports(here)
    first = index * here  # rank of the first worker that starts here
    cluster = from_hosts(hosts, here, ports, first)
    return Placement(cluster, range(first, first + here), origin)


def _launch(placement: Placement, train: Sequence[str], run: Path) -> None:
    """Start the workers of this host; stderr gets the chief's lines as they come."""
    wait_for_earlier(run, say)
    logs = writable_folder(run / "logs", "folder of logs")
    if placement.cluster.is_chief:  # a worker's refusal would be in the log of who holds the run
        with locked(run, "run"):
            pass
    path = str(ROOT)
    if os.environ.get("PYTHONPATH"):
        path += os.pathsep + os.environ["PYTHONPATH"]
    environ = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    commands = []
    for rank in placement.ranks:
        place = placement.environ_of(rank, environ)
        log = logs / f"worker-{rank}.log"
        commands.append(WorkerCommand(f"worker {rank}", (*PROGRAM, *train), place, log))
    say(f"launch: {placement.words}; logs: {', '.join(str(command.log) for command in commands)}")
    began_s = time.monotonic()
    first_log = commands[0].log
    shown_bytes = first_log.stat().st_size if first_log.exists() else 0  # those of earlier attempts

    def show() -> None:
        nonlocal shown_bytes
        if not placement.cluster.is_chief or not first_log.exists():
            return
        with first_log.open("rb") as file:
            file.seek(shown_bytes)
            lines = [line for line in file if line.endswith(b"\n")]
        shown_bytes += sum(map(len, lines))
        for line in lines:
            if not line.startswith(b"--- "):  # a header
                say(line.decode("utf-8", errors="replace").rstrip("\n"))

    run_workers(commands, run, show=show, say=say)
    took = format_seconds(time.monotonic() - began_s)
    say(f"launch: {placement.words}: finished after {took}; logs in {logs}")

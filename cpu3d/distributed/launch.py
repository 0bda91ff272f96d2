"""Train with several workers: one a socket of this host, and on several hosts.

    ./run.sh launch train --store store --run runs/first --batch-per-worker 1
    ./run.sh launch --workers 2 train --store store --run runs/first --batch 4
    ./run.sh launch --dry-run --on-host paper-4x20 train --store store --run runs/first --batch 4
    ./run.sh launch --hosts node1,node2 train --store store --run runs/first --batch 8        (on each of them)
    srun --ntasks-per-node=1 --exclusive ./run.sh launch train --store store --run runs/first --batch 8
    srun --ntasks-per-socket=1 --exclusive ./run.sh launch train --store store --run runs/first --batch 8

The options of launch come before `train`, those of train after it. The workers share each batch, compute with a copy
of the network each and add up their gradients, so they learn what one worker would with the same --batch. What each
of them says is added to RUN/logs/worker-RANK.log; the first one's is shown as well. The first that fails ends all, is
named with its last words, and gives its exit code. The same command again continues.

Hosts are those of --hosts, else of TF_CONFIG (then this is one worker, as it says), else of Slurm's step, else this
one. On several hosts the command is the same on each, --workers too: the first worker, the chief, writes the run; store
and program have to be on each. Under Slurm one task a host starts the host's workers, and of several tasks a host each
is one worker. --engine horovod is started on one host only; its launcher reaches the others by ssh.
"""

import argparse
import functools
import importlib.util
import os
import socket
import time
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from rich.console import Console

from cpu3d.config import load_config
from cpu3d.distributed import dry_run
from cpu3d.distributed.beats import Beats
from cpu3d.distributed.cluster import HOROVOD, TENSORFLOW, Cluster
from cpu3d.distributed.earlier import wait_for_earlier
from cpu3d.distributed.follow import Follower, say
from cpu3d.distributed.hosts import check_free, free_ports, own_index, read_hosts
from cpu3d.distributed.patiently import Patiently
from cpu3d.distributed.plan import (
    PORT,
    Asked,
    Plan,
    ThisHost,
    environ_of,
    horovod_command,
    make_plan,
    train_command,
)
from cpu3d.distributed.running import Job
from cpu3d.distributed.silence import Silence, SilenceBelow
from cpu3d.distributed.supervise import supervise
from cpu3d.errors import InputError
from cpu3d.host.thread_plan import default_workers, thread_plans
from cpu3d.host.topology import Topology, hosts_table, read_topology, topology_of
from cpu3d.recipes import RECIPES
from cpu3d.training_options import chosen_settings
from cpu3d.util.atomic import writable_folder
from cpu3d.util.child import ROOT, last_step
from memory_estimator.units import format_seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, metavar="N", help="on each host (default: one for each of its sockets)")
    parser.add_argument("--hosts", metavar="A,B|FILE", help="names or addresses, or a file of them, one a line")
    parser.add_argument("--host-index", type=int, metavar="I", help="this one's in --hosts (default: by address)")
    parser.add_argument(
        "--port", type=int, metavar="P",
        help="of the first worker on each host, the next has the next (default: free ones, or 29500 with --hosts)",
    )  # fmt: skip
    parser.add_argument(
        "--engine", choices=(TENSORFLOW, HOROVOD), default=TENSORFLOW,
        help="what adds up gradients of several hosts (tensorflow); those of one host are added up in its memory",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="say what would be started, and start nothing")
    parser.add_argument("--on-host", metavar="NAME|FILE", help='with --dry-run: on another host; "list" tells of some')
    parser.add_argument("train", nargs=argparse.REMAINDER, metavar="train ...", help="train and its options")


def run(args: argparse.Namespace) -> int:
    if args.on_host and not args.dry_run:
        raise InputError(f"--on-host must come with --dry-run, got {args.on_host} without; leave it out to train here")
    if args.on_host == "list":
        Console().print(hosts_table())
        return 0
    training = _training(args.train)
    topology = functools.lru_cache(lambda: topology_of(args.on_host) if args.on_host else read_topology())
    asked = Asked(args.workers, read_hosts(args.hosts) if args.hosts else (), args.host_index, args.port, args.engine)
    plan = make_plan(asked, os.environ, _this_host(topology, args.on_host))
    _check_batch(training, plan.cluster)
    if args.dry_run:
        dry_run.show(plan, topology(), _commands(plan, args.train, Path(training.run)))
        return 0
    thread_plans(topology(), plan.sharing_here)  # else each worker would refuse
    _launch(plan, args.train, Path(training.run))
    return 0


# --- Private helpers ---


def _training(options: Sequence[str]) -> argparse.Namespace:
    """Train's own reading of its options: one refusal before anything starts, and not one a worker."""
    if not options or options[0] != "train":
        got = options[0] if options else "nothing"
        raise InputError(f"launch must be followed by its options and then by train and its own, got {got}; see --help")
    from cpu3d.training import train

    parser = argparse.ArgumentParser(prog="python -m cpu3d launch ... train")
    train.add_arguments(parser)
    return parser.parse_args(list(options[1:]))


def _this_host(topology: Callable[[], Topology], elsewhere: Optional[str]) -> ThisHost:
    """This one, or what --on-host names."""
    return ThisHost(
        default_workers=lambda: default_workers(topology()),
        index_among=(lambda hosts: 0) if elsewhere else own_index,
        free_ports=(lambda count: range(PORT, PORT + count)) if elsewhere else free_ports,
        name=elsewhere or ThisHost.name,
    )


def _check_batch(training: argparse.Namespace, cluster: Cluster) -> None:
    """That the batch can be shared, as far as that is known before the store is read. The chief's host has the run."""
    settings, run, workers = chosen_settings(training), Path(training.run), cluster.workers
    if "batch_per_worker" in settings or not (cluster.is_chief or "batch" in settings):
        return
    saved = training.recipe is None and (run / "config.json").is_file()
    start = load_config(run) if saved else RECIPES[training.recipe or "brats-regions"]()
    batch = settings.get("batch", start.batch)
    if batch % workers:
        more = -(-batch // workers) * workers
        raise InputError(
            f"--batch must be a multiple of the {workers} workers, got {batch}; take --batch {more}, or "
            "--batch-per-worker 1"
        )


def _commands(plan: Plan, options: Sequence[str], run: Path) -> Dict[int, Tuple[str, ...]]:
    """By the rank of the worker, or the one command that starts all of them."""
    if plan.engine == HOROVOD:
        return {0: horovod_command(plan, train_command(options), str(run / "logs" / "horovod"))}
    return {rank: train_command(options) for rank in plan.ranks}


def _launch(plan: Plan, options: Sequence[str], run: Path) -> None:
    if plan.engine == HOROVOD and importlib.util.find_spec("horovod") is None:
        raise InputError("horovod must be installed for --engine horovod, found none; run ./run.sh setup --horovod")
    wait_for_earlier(run)
    check_free(plan.ports_here)
    logs = writable_folder(run / "logs", "folder of logs")
    jobs = _jobs(plan, _commands(plan, options, run), logs)
    say(f"launch: {plan.words}; logs: {', '.join(str(job.log) for job in jobs)}")
    if plan.note:
        say(f"note: {plan.note}")
    began_s, before = time.monotonic(), last_step(run)
    with Follower(jobs[0].log if plan.cluster.is_chief else None, run) as follower:
        silence = SilenceBelow(run, follower.say) if plan.engine == HOROVOD else Silence(run)
        hanging = Patiently(silence, otherwise={}, late=functools.partial(_no_answer, run, follower.say))
        supervise(jobs, show=follower.show, say=follower.say, hanging=hanging, beats=Beats(run))
    after = last_step(run)
    steps = f"{after - before} steps, to step {after}" if plan.cluster.is_chief else "the chief has counted the steps"
    say(f"launch: {plan.words}: ended well, {steps}, {format_seconds(time.monotonic() - began_s)}; logs in {logs}")


def _no_answer(run: Path, say: Callable[[str], None], seconds: float) -> None:
    say(f"launch: the file system of {run} must answer, got nothing for {seconds:.0f} s; the workers wait for it too")


def _jobs(plan: Plan, commands: Mapping[int, Tuple[str, ...]], logs: Path) -> List[Job]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    jobs = []
    for rank, command in commands.items():
        if plan.engine == HOROVOD:
            name, log = "horovodrun", logs / "horovod.log"
        else:
            name, log = f"worker {rank}", logs / f"worker-{rank}.log"
        jobs.append(Job(name, socket.gethostname(), command, environ_of(plan, rank, environ), log))
    return jobs

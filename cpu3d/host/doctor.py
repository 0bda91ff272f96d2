"""Check this host: its parts, the settings that training would make, and whether TensorFlow works
as expected.

    ./run.sh doctor                                      # with a self-test of about half a minute
    ./run.sh doctor --workers 2 --no-self-test

Exit code 1 means that a check has failed; warnings alone leave it 0.
"""

import dataclasses
import json
import os
import resource
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from rich.console import Console

from cpu3d.errors import InputError
from cpu3d.host.apply import installed
from cpu3d.host.self_test import Check, self_test
from cpu3d.host.thread_plan import (
    LOPSIDED,
    ThreadPlan,
    Topology,
    default_workers,
    host_lines,
    plan_lines,
    read_topology,
    thread_plans,
)
from cpu3d.util.progress import say
from cpu3d.util.records import versions
from memory_estimator.common.schema import option
from memory_estimator.common.table import Bad, Good, Poor, Table, new_console
from memory_estimator.common.units import GIB, format_bytes
from memory_estimator.host import Host, instruction_set, memory_high
from memory_estimator.installed import ENGINES, as_typed, how_to_install
from models.native.library import VARIABLE

FEW_BYTES = (
    8 * GIB
)  # free for a worker: less than a whole brain takes in the reference network at policy speed

NO_SET = "no AVX2"  # of a CPU on which own operations do not run


@dataclass(frozen=True)
class Options:
    """Command-line options of `doctor`."""

    workers: Optional[int] = option(
        None, help="plan for N workers (default: one a socket)", metavar="N"
    )
    engine: Optional[str] = option(
        None, "engine to test (default: itex if it is installed)", choices=ENGINES
    )
    self_test: bool = option(True, help="do not start TensorFlow")
    json: bool = option(False, help="print everything as JSON")


OPTIONS = (Options,)


def run(options: Options) -> int:
    if not installed(options.engine):
        raise InputError(
            f"engine must be installed, got {options.engine}, which is not installed here; choose stock"
        )
    topology = read_topology()
    plans = thread_plans(
        topology, default_workers(topology) if options.workers is None else options.workers
    )
    if not options.json:
        say(*host_lines(topology.host), *plan_lines(plans), "", stderr=False)
    checks = [*host_checks(topology, plans), *process_checks(topology, plans)]
    if options.self_test and all(check.state != "fail" for check in checks):
        with Console(stderr=True).status("self-test of TensorFlow"):
            checks += self_test(options.engine)
    if options.json:
        content = {
            "topology": dataclasses.asdict(topology),
            "plans": [
                {**dataclasses.asdict(plan), "memory_policy": plan.memory_policy} for plan in plans
            ],
            "checks": [dataclasses.asdict(check) for check in checks],
        }
        print(json.dumps(content, indent=1))
    else:
        styles = {"ok": Good, "warn": Poor, "fail": Bad}
        results = ["\n-> ".join(filter(None, (check.result, check.advice))) for check in checks]
        states = [styles.get(check.state, str)(check.state) for check in checks]
        rows = list(zip([check.name for check in checks], states, results))
        new_console().print(
            Table(("check", "", "result, and what to do"), rows, title="Checks", names=3)
        )
    return int(any(check.state == "fail" for check in checks))


# --- The checks ---


def host_checks(topology: Topology, plans: Sequence[ThreadPlan]) -> List[Check]:
    """Checks of the host and of the plans of its workers."""
    host, threads = topology.host, [plan.intra_op for plan in plans]
    quota, limit, swap, free = (
        host.cpu_quota,
        host.cgroup_limit_bytes,
        topology.swap_bytes,
        host.free_bytes,
    )
    sockets = Counter(cpu.socket for cpu in topology.cpus).values()
    mask = f"{host.logical_cpus} CPUs"
    free_words = format_bytes(free // len(plans)) + (
        f" for each of {len(plans)} workers" if len(plans) > 1 else ""
    )
    memory = {node.number: node.memory_bytes for node in topology.nodes}
    near = [memory.get(node, 0) for node in sorted({cpu.node for cpu in topology.cpus})]
    least, most = format_bytes(min(near)), format_bytes(max(near))
    points = {  # name -> a problem, if there is one, and the result without
        "CPU quota": (
            quota and f"{quota:g} CPUs' worth of time: {host.usable_cores} threads, not bound",
            "none",
        ),
        "CPU mask": (
            max(sockets) > LOPSIDED * min(sockets)
            and f"{mask}, {' and '.join(map(str, sockets))} of them on a socket",
            mask,
        ),
        "workers": (
            min(threads) < max(threads)
            and f"{min(threads)} to {max(threads)} threads: all wait for the slowest",
            f"{threads[0]} threads each",
        ),
        "free memory": (free < FEW_BYTES * len(plans) and free_words, free_words),
        "memory limit": (
            limit and f"{format_bytes(limit)} of {format_bytes(host.memory_bytes)} (cgroup)",
            "none",
        ),
        "memory of nodes": (
            max(near) > 2 * min(near)
            and f"{least} to {most} a node: CPUs of a node without memory use that of another",
            f"{least} on each of {len(near)}",
        ),
        "swap": (
            swap and f"{format_bytes(swap)}: a step that needs it takes many times as long",
            "none",
        ),
    }
    return [*instruction_checks(host), *_checks(points)]


def instruction_checks(host: Host) -> List[Check]:
    """Checks of the instruction set that own operations compute with, beside the best that the CPU
    has."""
    own, name = host.own, "instruction set"
    cpu = instruction_set(host.isa, host.cpu_model) or NO_SET
    dtype = Check("dtype", "ok", "training computes in bfloat16")
    if not host.fast_bfloat16:
        words = "training computes in float32"
        more = "AVX512_BF16 or AMX would halve its time and its memory"
        dtype = Check("dtype", "note", f"{words}; {more}")
    result = f"{own.bfloat16} of own operations; the CPU has {cpu}"
    if not own.bfloat16:
        why = f"none of own operations ({own.why})"
        result = f"{why}: TensorFlow's layers compute; the CPU has {cpu}"
        if cpu == NO_SET:
            return [Check(name, "note", result), dtype]
        todo = "install a C compiler, then python -m models.native.build"
        return [Check(name, "warn", result, todo), dtype]
    if own.bfloat16 == cpu:
        return [Check(name, "ok", result), dtype]
    todo = "build them by a newer compiler: training is faster"
    if os.environ.get(VARIABLE):
        todo = f"unset {VARIABLE}"
    return [Check(name, "warn", result, todo), dtype]


def process_checks(topology: Topology, plans: Sequence[ThreadPlan]) -> List[Check]:
    """Checks of this process and this installation: limits beside the host's own, versions, the
    user's variables."""
    addresses, all_bytes = resource.getrlimit(resource.RLIMIT_AS)[0], topology.host.memory_bytes
    high, installed_versions = memory_high(Path("/"), all_bytes)[0], versions()
    tensorflow, itex = map(installed_versions.get, ("tensorflow", "intel-extension-for-tensorflow"))
    slows = high is not None and high < (topology.host.cgroup_limit_bytes or all_bytes)
    limited, planned = addresses != resource.RLIM_INFINITY, plans[0].environment
    own = [
        f"{name}={os.environ[name]}"
        for name, value in planned.items()
        if os.environ.get(name, value) != value
    ]
    points = {
        "ulimit -v": (
            limited and f"{format_bytes(addresses)} of addresses, mapped stores among them",
            "unlimited",
        ),
        "memory.high": (
            slows and f"{format_bytes(high)} (cgroup): above it the kernel slows a run down",
            "none",
        ),
        "environment": (", ".join(own), "no variable differs from the plan"),
    }
    if tensorflow is None:
        return [*_checks(points), Check("TensorFlow", "fail", "not installed", how_to_install())]
    return [
        *_checks({**points, "ITEX": (not itex and "not installed", itex)}),
        Check("TensorFlow", "ok", tensorflow),
    ]


def _advice() -> Dict[str, str]:
    """Name of a check -> what to do about its problem."""
    estimate = as_typed("./run.sh estimate")
    return {
        "CPU quota": "ask for whole CPUs (a cpuset) instead: threads then keep their caches",
        "CPU mask": "ask for the same number on every socket, or for one socket",
        "workers": "choose a number that divides the cores of a socket",
        "free memory": f"end other programs, take fewer workers, or see what fits: {estimate} --plan",
        "memory limit": "raise it if the machine is yours: above it a run is killed",
        "memory of nodes": "put the same memory on every socket, or lift the memory mask",
        "swap": "`swapoff -a`, or go by the memory plan, which does not count on it",
        "ulimit -v": "`ulimit -v unlimited`: at the limit TensorFlow ends the process",
        "memory.high": "raise it to the memory limit, or keep the memory plan below it",
        "environment": "unset them to have the plan's own",
        "ITEX": f"{how_to_install('itex')} with Python 3.9 to 3.11 on Linux x86-64: steps are faster with it",
    }


def _checks(points: Dict[str, Tuple[Any, Any]]) -> List[Check]:
    """A warning with its advice for each problem, else the result without."""
    advice = _advice()
    return [
        Check(name, "warn", problem, advice[name]) if problem else Check(name, "ok", well)
        for name, (problem, well) in points.items()
    ]

"""Look over this host: what it has, what training would set on it, and whether TensorFlow does as expected.

    ./run.sh doctor                                      # with a self-test of about half a minute
    ./run.sh doctor --workers 2 --no-self-test
    ./run.sh doctor --json > host.json                   # on a server ...
    ./run.sh doctor --on-host host.json --workers 4      # ... and its plan on a laptop
    ./run.sh doctor --on-host paper-4x20                 # a host of which no one is needed; `--on-host list` names them

Exit code 1 means that a check has failed; warnings alone leave it 0.
"""

import dataclasses
import json
import resource
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Optional, Sequence

from rich.console import Console

from cpu3d.errors import InputError
from cpu3d.host.apply import ENGINES, installed, installed_versions
from cpu3d.host.describe import describe_plans, host_lines, overridden
from cpu3d.host.self_test import TESTS, Check, self_test
from cpu3d.host.thread_plan import LOPSIDED, ThreadPlan, default_workers, thread_plans
from cpu3d.host.topology import Topology, hosts_table, read_topology, to_json, topology_of
from cpu3d.util.progress import bar
from memory_estimator.host import memory_high
from memory_estimator.schema import option
from memory_estimator.table import Bad, Good, Poor, Table
from memory_estimator.units import GIB, format_bytes

FEW_BYTES = 8 * GIB
"""Free for a worker: less than a whole brain in the reference network takes without a tighter policy."""


@dataclass(frozen=True)
class Options:
    """Command-line options of `doctor`."""

    workers: Optional[int] = option(None, help="plan for N workers; default: one a socket", metavar="N")
    on_host: Optional[str] = option(
        None, "plan for another host: an example (`list` names them), or a file of `doctor --json`", "NAME|FILE"
    )
    engine: Optional[str] = option(None, "what to try out; default: ITEX where it is installed", choices=ENGINES[:2])
    self_test: bool = option(True, help="only look, start no TensorFlow")
    json: bool = option(False, help="print it as JSON, the host in full")


OPTIONS = (Options,)


def run(options: Options) -> int:
    console = Console()
    if options.on_host == "list":
        console.print(hosts_table())
        return 0
    if not installed(options.engine):
        raise InputError(f"engine must be installed, got {options.engine} without it; choose stock")
    topology = topology_of(options.on_host) if options.on_host else read_topology()
    plans = thread_plans(topology, default_workers(topology) if options.workers is None else options.workers)
    if not options.json:
        console.print(*host_lines(topology.host), "", describe_plans(topology, plans), sep="\n", soft_wrap=True)
    checks = host_checks(topology, plans)
    if not options.on_host:
        checks += process_checks(topology, plans)
    if not options.on_host and options.self_test and all(check.state != "fail" for check in checks):
        with bar("self-test", total=len(TESTS)) as advance:
            for check in self_test(options.engine):
                checks.append(check)
                advance()
    if options.json:
        content = {
            "topology": to_json(topology),  # what --on-host reads
            "plans": [{**dataclasses.asdict(plan), "memory_policy": plan.memory_policy} for plan in plans],
            "checks": [dataclasses.asdict(check) for check in checks],
        }
        print(json.dumps(content, indent=1))
    else:
        styles = {"ok": Good, "warn": Poor, "fail": Bad}
        rows = [
            (one.name, styles.get(one.state, str)(one.state), one.found + (f"\n-> {one.advice}" if one.advice else ""))
            for one in checks
        ]
        console.print(Table(("check", "", "found, and what to do"), rows, title="Checks", names=3))
    return int(any(check.state == "fail" for check in checks))


# --- What is looked at ---


def host_checks(topology: Topology, plans: Sequence[ThreadPlan]) -> List[Check]:
    """The points that follow from what a host has and from the plans of its workers."""
    host, isa, threads = topology.host, topology.host.isa, [plan.intra_op for plan in plans]
    widest = "AVX-512" if "avx512f" in isa else "AVX2" if "avx2" in isa else "no AVX2"
    bfloat16 = Check(
        "bfloat16 instructions",
        "note",
        f"none ({widest}): training computes in float32; AVX512_BF16 or AMX would halve its time and its memory",
    )
    if host.fast_bfloat16:
        unit = "AMX" if "amx_bf16" in isa else "AVX512_BF16"
        bfloat16 = Check("bfloat16 instructions", "ok", f"{unit}: training computes in bfloat16")
    quota, limit, free = host.cpu_quota, host.cgroup_limit_bytes, host.free_bytes // len(plans)
    sockets = Counter(cpu.socket for cpu in topology.cpus).values()
    mask = f"{host.logical_cpus} of the machine's {topology.machine_cpus} CPUs"
    free_words = format_bytes(free) + (f" for each of {len(plans)} workers" if len(plans) > 1 else "")
    memory = {node.number: node.memory_bytes for node in topology.nodes}
    near = [memory.get(node, 0) for node in sorted({cpu.node for cpu in topology.cpus})]
    least, most = format_bytes(min(near)), format_bytes(max(near))
    return [
        bfloat16,
        _check(
            "CPU quota",
            quota and f"{quota:g} of {host.logical_cpus} CPUs' worth of time: {host.usable_cores} threads, not bound",
            "ask for whole CPUs (a cpuset) instead: threads then keep their caches",
        ),
        _check(
            "CPU mask",
            max(sockets) > LOPSIDED * min(sockets) and f"{mask}, {' and '.join(map(str, sockets))} of them on a socket",
            "ask for the same number on every socket, or for one socket",
            well=mask,
        ),
        _check(
            "workers",
            len(set(threads)) > 1
            and f"{min(threads)} to {max(threads)} threads each: at every step all wait for the slowest",
            "choose a number that divides the cores of a socket",
            well=f"{threads[0]} threads each",
        ),
        _check(
            "free memory",
            free < FEW_BYTES and free_words,
            "end other programs, take fewer workers, or see what fits: python -m memory_estimator --plan",
            well=free_words,
        ),
        _check(
            "memory limit",
            limit is not None and f"{format_bytes(limit)} of the machine's {format_bytes(host.memory_bytes)} (cgroup)",
            "raise it if the machine is yours: above it a run is killed",
        ),
        _check(
            "memory of nodes",
            max(near) > 2 * min(near) and f"{least} to {most} a node: CPUs without take theirs from far",
            "put the same memory on every socket, or lift the memory mask",
            well=f"{least} on each of {len(near)}",
        ),
        _check(
            "swap",
            topology.swap_bytes
            and f"{format_bytes(topology.swap_bytes)}: a step that needs it takes many times as long",
            "`swapoff -a`, or go by the memory plan, which does not count on it",
        ),
        Check("huge pages", "ok", f"{topology.huge_pages or 'unknown'}; a step takes as long with any setting"),
    ]


def process_checks(topology: Topology, plans: Sequence[ThreadPlan]) -> List[Check]:
    """Those of this process and this installation: limits beside the host's own, versions, variables of the user's."""
    addresses, all_bytes = resource.getrlimit(resource.RLIMIT_AS)[0], topology.host.memory_bytes
    high, (tensorflow, itex) = memory_high(Path("/"), all_bytes)[0], installed_versions()
    slows = high is not None and high < (topology.host.cgroup_limit_bytes or all_bytes)
    own = overridden(plans)
    checks = [
        _check(
            "ulimit -v",
            addresses != resource.RLIM_INFINITY
            and f"{format_bytes(addresses)} of addresses, mapped stores and libraries among them",
            "`ulimit -v unlimited`: at the limit TensorFlow ends the process",
            well="unlimited",
        ),
        _check(
            "memory.high",
            slows and f"{format_bytes(high)} (cgroup): above it the kernel slows a run down, to a standstill at worst",
            "raise it to the memory limit, or keep the memory plan below it",
        ),
    ]
    if tensorflow is None:
        return [*checks, Check("TensorFlow", "fail", "not installed", "run `./run.sh setup`")]
    unset = f"`unset {' '.join(setting.partition('=')[0] for setting in own)}` to have the plan's own"
    todo = "`./run.sh setup` has it for Python 3.9 to 3.11 on Linux x86-64: steps are faster with it"
    return [
        *checks,
        Check("TensorFlow", "ok", tensorflow),
        _check("ITEX", itex is None and "not installed", todo, well=itex or ""),
        *([Check("environment", "warn", f"your own settings win: {', '.join(own)}", unset)] if own else []),
    ]


# --- Private helpers ---


def _check(name: str, problem: Any, advice: str, well: str = "none") -> Check:
    """A warning with `advice` where there is a `problem`, else `well` is what was found."""
    return Check(name, "warn", problem, advice) if problem else Check(name, "ok", well)

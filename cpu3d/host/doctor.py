"""Look over this host: what it has, what training would set on it, and whether TensorFlow does as expected.

    ./run.sh doctor                                      # with a self-test of about half a minute
    ./run.sh doctor --workers 2 --no-self-test
    ./run.sh doctor --json > host.json                   # on a server ...
    ./run.sh doctor --on-host host.json --workers 4      # ... and its plan on a laptop
    ./run.sh doctor --on-host paper-4x20                 # a host of which no one is needed; `--on-host list` names them

Exit code 1 means that a check has failed; warnings alone leave it 0.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any, Dict, List, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cpu3d.errors import InputError
from cpu3d.host.apply import ENGINES, installed, installed_versions
from cpu3d.host.checks import Check, host_checks, process_checks, software_checks
from cpu3d.host.example_hosts import hosts_table, topology_of
from cpu3d.host.memory import address_limit_bytes
from cpu3d.host.plan_table import describe_host, describe_plans, overridden
from cpu3d.host.self_test import TESTS, self_test
from cpu3d.host.thread_plan import ThreadPlan, default_workers, thread_plans
from cpu3d.host.topology import Topology, read_topology, to_json
from cpu3d.util.progress import bar
from memory_estimator.proc import memory_high

COLOURS = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "bold red", "skipped": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, metavar="N", help="plan for N workers; default: one a socket")
    parser.add_argument(
        "--on-host",
        metavar="NAME|FILE",
        help="plan for another host: an example by name (`list` names them), or a file of `doctor --json`",
    )
    engines = [engine for engine in ENGINES if engine != "stock-no-onednn"]
    parser.add_argument("--engine", choices=engines, default="auto", help="what to try out; default: auto, as `train`")
    parser.add_argument("--no-self-test", action="store_true", help="only look, start no TensorFlow")
    parser.add_argument("--json", action="store_true", help="print it as JSON, the host in full")


def run(args: argparse.Namespace) -> int:
    console = Console()
    if args.on_host == "list":
        console.print(hosts_table())
        return 0
    if not installed(args.engine):
        raise InputError(f"engine must be installed, got {args.engine} without it; choose auto or stock")
    topology = topology_of(args.on_host) if args.on_host else read_topology()
    plans = thread_plans(topology, default_workers(topology) if args.workers is None else args.workers)
    checks = host_checks(topology, plans)
    if not args.json:
        console.print(describe_host(topology), describe_plans(topology, plans))
    if not args.on_host:
        high, _ = memory_high(Path("/"), topology.host.memory_bytes)
        checks += process_checks(topology, address_limit_bytes(), high)
        checks += software_checks(*installed_versions(), overridden(plans))
        if not args.no_self_test and all(check.state != "fail" for check in checks):
            checks += _tried(args.engine)
    if args.json:
        print(json.dumps(report(topology, plans, checks), indent=1))
    else:
        console.print(checks_table(checks))
    return int(any(check.state == "fail" for check in checks))


def report(topology: Topology, plans: Sequence[ThreadPlan], checks: Sequence[Check]) -> Dict[str, Any]:
    """All of it as JSON content; its "topology" is what `--on-host` reads."""
    return {
        "topology": to_json(topology),
        "plans": [{**dataclasses.asdict(plan), "memory_policy": plan.memory_policy} for plan in plans],
        "checks": [dataclasses.asdict(check) for check in checks],
    }


def checks_table(checks: Sequence[Check]) -> Table:
    """One line a check, what to do below what was found."""
    table = Table(title="Checks", title_justify="left")
    table.add_column("check")
    table.add_column("")
    table.add_column("found, and what to do", overflow="fold")
    for check in checks:
        table.add_row(check.name, Text(check.state, COLOURS[check.state]), Text(check.found))
        if check.advice:
            table.add_row("", "", Text(f"-> {check.advice}"))
    return table


# --- Private helpers ---


def _tried(engine: str) -> List[Check]:
    """The self-test's results, with a bar."""
    found = []
    with bar("self-test", total=len(TESTS)) as advance:
        for check in self_test(engine):
            found.append(check)
            advance()
    return found

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
from dataclasses import dataclass
from typing import List, Optional, Sequence

from rich.console import Console

from cpu3d.host.self_test import BUILD, Check, self_test
from cpu3d.host.thread_plan import (
    ThreadPlan,
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
from memory_estimator.host import Host, instruction_set
from memory_estimator.installed import ENGINES, as_typed, how_to_install
from models.native.library import VARIABLE

# Free for a worker: less than a whole brain takes in the reference network at policy speed.
FEW_BYTES = 8 * GIB

NO_SET = "no AVX2"  # of a CPU on which native operations do not run


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
    topology = read_topology()
    workers = options.workers
    if workers is None:
        workers = default_workers(topology)
    plans = thread_plans(topology, workers)
    if not options.json:
        say(*host_lines(topology.host), *plan_lines(plans), "", stderr=False)
    checks = [*host_checks(topology.host, plans), *process_checks(plans)]
    if options.self_test and all(check.state != "fail" for check in checks):
        with Console(stderr=True).status("self-test of TensorFlow"):
            checks += self_test(options.engine)
    if options.json:
        content = {
            "topology": dataclasses.asdict(topology),
            "plans": [dataclasses.asdict(plan) for plan in plans],
            "checks": [dataclasses.asdict(check) for check in checks],
        }
        print(json.dumps(content, indent=1))
    else:
        styles = {"ok": Good, "warn": Poor, "fail": Bad}
        rows = []
        for check in checks:
            style = styles.get(check.state, str)
            result = check.result
            if check.advice:
                result += f"\n-> {check.advice}"
            rows.append((check.name, style(check.state), result))
        columns = ("check", "", "result, and what to do")
        new_console().print(Table(columns, rows, title="Checks", names=3))
    return int(any(check.state == "fail" for check in checks))


# --- The checks ---


def _checked(name: str, problem: str, todo: str, *, well: str) -> Check:
    """A warning with what to do about a problem, else the result `well`."""
    return Check(name, "warn", problem, todo) if problem else Check(name, "ok", well)


def host_checks(host: Host, plans: Sequence[ThreadPlan]) -> List[Check]:
    """Checks of the host and of the plans of its workers."""
    checks = [instruction_check(host)]

    fewest = min(plan.intra_op for plan in plans)
    most = max(plan.intra_op for plan in plans)
    problem = ""
    if fewest < most:
        problem = f"{fewest} to {most} threads: all wait for the slowest"
    todo = "choose a number that divides the cores of a socket"
    checks.append(_checked("workers", problem, todo, well=f"{fewest} threads each"))

    free = format_bytes(host.free_bytes // len(plans))
    if len(plans) > 1:
        free += f" for each of {len(plans)} workers"
    problem = free if host.free_bytes < FEW_BYTES * len(plans) else ""
    todo = "end other programs, take fewer workers, or see what fits: "
    todo += as_typed("./run.sh estimate --plan")
    checks.append(_checked("free memory", problem, todo, well=free))
    return checks


def instruction_check(host: Host) -> Check:
    """Check the instruction set that native operations compute with against the best that the CPU
    has."""
    own = host.native
    name = "instruction set"
    cpu = instruction_set(host.isa, host.cpu_model) or NO_SET
    if not own.bfloat16:
        result = f"none ({own.why}): TensorFlow's layers compute; the CPU has {cpu}"
        if cpu == NO_SET:
            return Check(name, "note", result)
        return Check(name, "warn", result, BUILD)
    problem = ""
    if own.bfloat16 != cpu:
        problem = f"{own.bfloat16} of native operations; the CPU has {cpu}"
    todo = "build them by a newer compiler: training is faster"
    if os.environ.get(VARIABLE):
        todo = f"unset {VARIABLE}"
    return _checked(name, problem, todo, well=f"{cpu} of native operations")


def process_checks(plans: Sequence[ThreadPlan]) -> List[Check]:
    """Checks of this process and this installation: its limits, the user's variables, versions."""
    addresses, _hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    problem = ""
    if addresses != resource.RLIM_INFINITY:
        problem = f"{format_bytes(addresses)} of addresses, mapped stores among them"
    todo = "`ulimit -v unlimited`: at the limit TensorFlow ends the process"
    checks = [_checked("ulimit -v", problem, todo, well="unlimited")]

    own = [
        f"{name}={os.environ[name]}"
        for name, value in plans[0].environment.items()
        if os.environ.get(name, value) != value
    ]
    todo = "unset them to have the plan's own"
    well = "no variable differs from the plan"
    checks.append(_checked("environment", ", ".join(own), todo, well=well))

    tensorflow = versions().get("tensorflow")
    if tensorflow is None:
        return [*checks, Check("TensorFlow", "fail", "not installed", how_to_install())]
    itex = versions().get("intel-extension-for-tensorflow", "")
    todo = f"{how_to_install('itex')} with Python 3.9 to 3.11 on Linux x86-64"
    checks.append(_checked("ITEX", "" if itex else "not installed", todo, well=itex))
    return [*checks, Check("TensorFlow", "ok", tensorflow)]

"""Tell how a run is doing: phase, progress, memory, and what to do next.

    ./run.sh status --run runs/first
    ./run.sh status --run runs/first --watch
    ./run.sh status --run runs/first --json

Ends with 0 for a run that goes on or has finished, with 1 for one that needs somebody: a worker is dead, hangs, or has
ended before the run was done; with 2 for a folder that is no run. It only reads, on any host that sees the folder; on
the run's own host it also looks whether the processes live.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from cpu3d.report.status.description import describe
from cpu3d.report.status.run_status import RunStatus, run_status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", required=True, metavar="DIR", help="folder of the run")
    parser.add_argument("--json", action="store_true", help="print all that is known as JSON")
    parser.add_argument("--watch", action="store_true", help="show it anew until the run ends; Ctrl-C ends only this")
    parser.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between, with --watch (2)")


def run(args: argparse.Namespace) -> int:
    folder = Path(args.run)
    status = run_status(folder)
    if args.json:
        print(json.dumps(dataclasses.asdict(status), indent=1))
    elif args.watch:
        status = _watch(folder, status, max(args.every, 0.1))
    else:
        Console().print(describe(status))
    return 0 if status.is_fine else 1


# --- Private helpers ---


def _watch(folder: Path, status: RunStatus, every_s: float) -> RunStatus:
    """Show it until nothing goes on any more; returns the last one. Ctrl-C is a way to end it, not an interruption."""
    try:
        with Live(describe(status), console=Console(), auto_refresh=False) as live:
            while status.is_fine and status.state != "finished":
                time.sleep(every_s)
                status = run_status(folder)
                live.update(describe(status), refresh=True)
    except KeyboardInterrupt:
        pass
    return status

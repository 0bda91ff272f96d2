"""Kill a small run at random moments, again and again, and compare what comes of it with an undisturbed one.

    ./run.sh bench faults --kills 50 --workdir faults
    ./run.sh bench faults --kills 60 --seed 1 --workdir faults --record records/faults.jsonl
    ./run.sh bench faults --kills 12 --workers 2 --workdir faults-2 --record records/faults.jsonl

Phantoms, a store, a run to compare with; then folder after folder is prepared, or trained on that store, by commands
that get SIGKILL while they start, compute, validate, save or prepare, or one of their workers does, and that are given
again until they are done. After each kill every checkpoint has to load and none that was logged may be missing; at the
end weights, optimizer, averages, best weights, every step and validation, or the store's files, have to be the same to
the bit. Ends with code 1 where anything is not, and then keeps that folder. About 10 s a kill; one that comes too late
because the command was done before does not count, and is aimed anew. One run in four has batch norm, whose moving
statistics are compared as well. A fifth of the kills are of `prepare`, none with several workers.
"""

import argparse
import collections
import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any, Deque, Dict, List, Optional, Tuple

from rich.console import Console
from rich.table import Table

from cpu3d.bench.faults.aims import LIFE_KILLS, NORMS, PREPARING, STARTING, Aim, Life, lives
from cpu3d.bench.faults.checks import left_of_run, left_of_store, run_differences, store_differences
from cpu3d.bench.faults.markdown import HEADINGS, rows_of, summary_line
from cpu3d.bench.faults.processes import Ended, attempt
from cpu3d.bench.faults.undisturbed import CASES, KEEP, RUN, SHAPE, STEPS, Bench, undisturbed
from cpu3d.bench.faults.watch import LogTail, phase_hit, wait_for
from cpu3d.errors import InputError
from cpu3d.training.run_log import read_events
from cpu3d.util.atomic import writable_folder
from cpu3d.util.child import how_ended
from cpu3d.util.progress import bar
from cpu3d.util.records import append_record
from cpu3d.util.versions import versions
from memory_estimator.host import read_host

BARREN_LIVES = 10
"""Folders in a row of which none could be killed in time, after which the rest is given up."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdir", type=Path, required=True, metavar="DIR", help="an empty or a new folder")
    parser.add_argument("--kills", type=int, default=50, metavar="N", help="default: 50")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the moments (default: 0)")
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="above 1: `launch`, whose workers are killed (default: 1)"
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="append the result to a .jsonl file")


def run(args: argparse.Namespace) -> int:
    _check(args)
    workdir = writable_folder(args.workdir, "workdir").resolve()
    if any(workdir.iterdir()):
        raise InputError(f"workdir {workdir} must be empty, got other content; choose another, or empty it")
    if args.record:
        writable_folder(args.record.parent, "folder")
    result = campaign(workdir, kills=args.kills, seed=args.seed, workers=args.workers)
    table = Table(*HEADINGS)
    for row in rows_of(result):
        table.add_row(*row)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    console.print(summary_line(result))
    wrong = [problem for life in result["lives"] for problem in life["problems"]]
    for problem in wrong:
        console.print(f"wrong: {problem}")
    if args.record:
        append_record(args.record, "faults", result)
    return 1 if wrong or result["missed"] else 0


def campaign(workdir: Path, *, kills: int, seed: int, workers: int) -> Dict[str, Any]:
    """Do it all below `workdir`, which is empty; returns the content of a record."""
    begin = time.monotonic()
    planned: Deque[Life] = collections.deque(lives(kills, seed=seed, workers=workers))
    bench = undisturbed(workdir, workers, [life.norm for life in planned if life.norm])
    missed: List[Tuple[Life, Aim]] = []
    done: List[Dict[str, Any]] = []
    barren = 0
    with bar("kills", total=kills) as advance:
        while planned:
            life = planned.popleft()
            lived, left = _live(bench, life, workdir / f"{life.command}-{len(done) + 1}")
            done.append(lived)
            advance(len(lived["kills"]))
            # Half as far into the phase the next time: the machine may be faster now.
            missed += [(life, dataclasses.replace(aim, delay=aim.delay / 2)) for aim in left]
            barren = 0 if lived["kills"] else barren + 1
            if not planned and missed and barren < BARREN_LIVES:
                first = missed[0][0]
                again = [aim for of, aim in missed if of.command == first.command][:LIFE_KILLS]
                missed = [one for one in missed if one[1] not in again]
                planned.append(dataclasses.replace(first, aims=tuple(again)))
    reference = read_events(bench.reference(NORMS[0]))
    return {
        "workers": workers,
        "seed": seed,
        "steps": STEPS,
        "cases": CASES,
        "shape": list(SHAPE),
        "options": [str(option) for option in RUN],
        "usual_s": bench.usual.seconds,
        "lives": done,
        "missed": len(missed),
        "seconds": time.monotonic() - begin,
        "engine_name": next(event["engine"] for event in reference if event["event"] == "start"),
        "host": read_host().summary(),
        "versions": versions(),
    }


# --- Private helpers ---


def _check(args: argparse.Namespace) -> None:
    problems = [
        f"--{name} must be at least {least}, got {value}; raise it"
        for name, value, least in (("kills", args.kills, 1), ("seed", args.seed, 0), ("workers", args.workers, 1))
        if value < least
    ]
    if problems:
        raise InputError(*problems)


def _live(bench: Bench, life: Life, folder: Path) -> Tuple[Dict[str, Any], List[Aim]]:
    """One folder through its kills to its end; returns its part of the record, and the aims that came too late."""
    waiting = collections.deque(life.aims)
    kills: List[Dict[str, Any]] = []
    problems: List[str] = []
    begin = time.monotonic()
    while True:
        aim = waiting[0] if waiting else None
        tail = LogTail(folder)
        ended = attempt(
            bench.command(life, folder),
            bench.log,
            victim=aim.victim if aim and bench.workers > 1 and life.command == "train" else None,
            wait=lambda start, alive: aim is not None and wait_for(aim, bench.usual, folder, tail, start, alive),  # noqa: B023
        )
        problems += ended.problems
        if not ended.killed:
            if ended.exit_code != 0:
                problems.append(f"the command must end well, got {how_ended(ended.exit_code)}; see {bench.log}")
            break
        kills.append(_kill(bench, life.command, folder, tail, aim, ended))
        waiting.popleft()
        problems += kills[-1].pop("problems")
    if life.command == "prepare":
        problems += store_differences(bench.store, folder)
    else:
        problems += run_differences(bench.reference(life.norm), folder, KEEP)
    if not problems:
        shutil.rmtree(folder)
    seconds = time.monotonic() - begin
    told = [f"{folder.name}: {problem}" for problem in problems]
    return {"command": life.command, "norm": life.norm, "seconds": seconds, "kills": kills, "problems": told}, list(
        waiting
    )


def _kill(bench: Bench, command: str, folder: Path, tail: LogTail, aim: Optional[Aim], ended: Ended) -> Dict[str, Any]:
    """What is known of one kill: when, what was hit, what was lost, what is wrong."""
    if command == "prepare":
        cases, problems = left_of_store(folder)
        found: Dict[str, Any] = {"hit": PREPARING if (folder / "cases").is_dir() else STARTING, "cases": cases}
    else:
        left = left_of_run(folder)
        problems = left.problems
        found = {
            "hit": phase_hit(folder, tail, bench.usual),
            "step": left.logged_step,
            "saved_step": left.saved_step,
            "redone": left.redone,
        }
    problems = list(problems)
    if ended.exit_code == 0:
        problems.append("the command must not end with code 0 when one of its processes was killed")
    return {
        "aim": aim.phase,
        **found,
        "victim": aim.victim,
        "at_s": ended.at_s,
        "ended_s": ended.ended_s,
        "exit_code": ended.exit_code,
        "problems": problems,
    }

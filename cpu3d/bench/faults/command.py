"""Kill a small run at random moments, again and again, and compare what comes of it with an undisturbed one.

    ./run.sh bench faults --kills 50 --workdir faults
    ./run.sh bench faults --kills 60 --seed 1 --workdir faults --record records/faults.jsonl
    ./run.sh bench faults --kills 12 --workers 2 --workdir faults-2 --record records/faults.jsonl

Phantoms, a store, a run to compare with; then folder after folder is prepared, or trained on that store, by commands
that get SIGKILL while they start, compute, validate, save or prepare, or one of their workers does, and that are given
again until they are done. After each kill every checkpoint has to load and none that was logged may be missing; at the
end weights, optimizer, averages, best weights, every step and validation, or the store's files, have to be the same to
the bit. Ends with code 1 where anything is not, and then keeps that folder. About 10 s a kill.
"""

import argparse
import collections
import dataclasses
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Deque, Dict, List, Optional, Tuple

from rich.console import Console
from rich.table import Table

from cpu3d.atomic import writable_folder
from cpu3d.bench.faults.aims import (
    ANYWHERE,
    COMPUTING,
    LIFE_KILLS,
    PREPARING,
    SAVING,
    STARTING,
    VALIDATING,
    Aim,
    Life,
    lives,
)
from cpu3d.bench.faults.checks import left_of_run, left_of_store, run_differences, store_differences
from cpu3d.bench.faults.markdown import HEADINGS, rows_of, summary_line
from cpu3d.bench.faults.processes import Ended, attempt
from cpu3d.bench.faults.watch import LogTail, Usual, phase_hit, wait_for
from cpu3d.bench.record import append_record
from cpu3d.child import how_ended, last_words
from cpu3d.data.phantom import write_phantom
from cpu3d.data.words import count
from cpu3d.errors import InputError
from cpu3d.progress import bar
from cpu3d.run_log import read_events
from cpu3d.versions import versions
from memory_estimator.host import read_host

CASES, SHAPE = 16, (32, 40, 32)

STEPS, KEEP = 240, 3

RUN = (
    *("--steps", STEPS, "--validations", 12, "--batch", 2, "--save-minutes", 0.01, "--keep", KEEP, "--ema", 0.9),
    *("--filters", 4, "--depth", 3, "--dtype", "float32", "--policy", "speed", "--deterministic"),
)
"""Steps of milliseconds, enough of them to be killed in between, with saves by time and by validation."""

MORE_LIVES = 10
"""Most folders beyond the planned ones, for kills that came too late because the command was done before."""


@dataclass(frozen=True)
class Bench:
    """What all lives share."""

    folder: Path
    workers: int
    usual: Usual

    @property
    def log(self) -> Path:
        """What all the processes said."""
        return self.folder / "said.txt"

    def command(self, command: str, folder: Path) -> List[str]:
        """`prepare` or `train` into `folder`."""
        return _command(self.folder, command, folder, self.workers)


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
    if result["missed"]:
        console.print(f"not done: {count(result['missed'], 'kill')} that came too late each time")
    if args.record:
        append_record(args.record, "faults", result)
    return 1 if wrong or result["missed"] else 0


def campaign(workdir: Path, *, kills: int, seed: int, workers: int) -> Dict[str, Any]:
    """Do it all below `workdir`, which is empty; returns the content of a record."""
    begin = time.monotonic()
    bench = _undisturbed(workdir, workers)
    planned: Deque[Life] = collections.deque(lives(kills, seed=seed, workers=workers))
    missed: List[Tuple[str, Aim]] = []
    done: List[Dict[str, Any]] = []
    more = 0
    with bar("kills", total=kills) as advance:
        while planned:
            life = planned.popleft()
            lived, left = _live(bench, life, workdir / f"{life.command}-{len(done) + 1}")
            done.append(lived)
            advance(len(lived["kills"]))
            # Half as far into the phase the next time: the machine may be faster now.
            missed += [(life.command, dataclasses.replace(aim, delay=aim.delay / 2)) for aim in left]
            if not planned and missed and more < MORE_LIVES:
                more += 1
                command = missed[0][0]
                again = [aim for of, aim in missed if of == command][:LIFE_KILLS]
                missed = [one for one in missed if one[1] not in again]
                planned.append(Life(command, tuple(again)))
    reference = read_events(workdir / "reference")
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


def _command(workdir: Path, command: str, folder: Path, workers: int) -> List[str]:
    if command == "prepare":
        return ["prepare", "--dataset", str(workdir / "phantom"), "--store", str(folder), "--workers", "2"]
    launch = ["launch", "--workers", str(workers)] if workers > 1 else []
    return [*launch, "train", "--store", str(workdir / "store"), "--run", str(folder), *map(str, RUN)]


def _undisturbed(workdir: Path, workers: int) -> Bench:
    """The phantoms, the store and the run that all is compared with, and how long their phases took."""
    write_phantom(workdir / "phantom", cases=CASES, shape=SHAPE, seed=0)
    seconds: Dict[str, float] = {}
    bench = Bench(workdir, workers, Usual(seconds, STEPS, frozenset()))
    store, reference = workdir / "store", workdir / "reference"
    seen: Dict[str, float] = {}

    def first_seen(name, is_there):
        def wait(begin, alive):
            while alive():
                if name not in seen and is_there():
                    seen[name] = time.monotonic() - begin
                time.sleep(0.001)
            return False

        return wait

    ended = _whole(bench, "prepare", store, first_seen(PREPARING, (store / "cases").is_dir))
    seconds[PREPARING] = ended.at_s - seen.get(PREPARING, 0.0)
    tail = LogTail(reference)

    def has_started():
        tail.look()
        return tail.started

    ended = _whole(bench, "train", reference, first_seen(STARTING, has_started))
    events = read_events(reference)
    seconds[STARTING], seconds[ANYWHERE] = seen.get(STARTING, ended.at_s), ended.at_s
    for phase, event, name in (
        (COMPUTING, "step", "step_s"),
        (VALIDATING, "validation", "seconds"),
        (SAVING, "checkpoint", "seconds"),
    ):
        seconds[phase] = min(found[name] for found in events if found["event"] == event)
    validations = frozenset(found["step"] for found in events if found["event"] == "validation")
    return Bench(workdir, workers, Usual(seconds, STEPS, validations))


def _whole(bench: Bench, command: str, folder: Path, wait: Any) -> Ended:
    ended = attempt(bench.command(command, folder), bench.log, wait=wait)
    if ended.exit_code != 0:
        raise InputError(
            f"{command} without any kill must end well, got {how_ended(ended.exit_code)}; "
            f"{bench.log} ends:\n  {last_words(bench.log)}"
        )
    return ended


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
            bench.command(life.command, folder),
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
        problems += store_differences(bench.folder / "store", folder)
    else:
        problems += run_differences(bench.folder / "reference", folder, KEEP)
    if not problems:
        shutil.rmtree(folder)
    seconds = time.monotonic() - begin
    told = [f"{folder.name}: {problem}" for problem in problems]
    return {"command": life.command, "seconds": seconds, "kills": kills, "problems": told}, list(waiting)


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

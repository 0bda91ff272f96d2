"""Kill a small run at random moments, again and again, and compare what comes of it with an undisturbed one.

    ./run.sh bench faults --kills 50 --workdir faults
    ./run.sh bench faults --kills 60 --seed 1 --workdir faults --record records/faults.jsonl
    ./run.sh bench faults --kills 12 --workers 2 --workdir faults-2 --record records/faults.jsonl

Folder after folder is prepared, or trained on phantoms, by commands that get SIGKILL while they start, compute,
validate, save or prepare (or one of their workers does) and that are given again until they are done. After each kill
every checkpoint has to load and none that was logged may be missing; at the end weights, optimizer, averages, best
weights, every step and validation, or the store's files, have to be the same to the bit. Ends with code 1 where
anything is not, and then keeps that folder. About 10 s a kill; one that comes too late does not count, and is aimed
anew. A fifth of the kills are of `prepare`, none with several workers. One run in four has batch norm.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Sequence, Tuple

import numpy as np
import psutil
from rich.console import Console

from cpu3d.data.store import open_store
from cpu3d.data.stores.phantom import write_phantom
from cpu3d.errors import InputError
from cpu3d.training.checkpoint import load_checkpoint
from cpu3d.training.checkpoint_history import BEST, checkpoints, step_of
from cpu3d.training.checkpoint_history import newest as newest_checkpoint
from cpu3d.training.run_log import read_events
from cpu3d.util.atomic import writable_folder
from cpu3d.util.child import PROGRAM, ROOT, how_ended, last_words, start
from cpu3d.util.progress import bar
from cpu3d.util.records import append_record
from cpu3d.util.records import newest as newest_of
from cpu3d.util.versions import versions
from memory_estimator.host import read_host
from memory_estimator.schema import add_options, check, from_args, option
from memory_estimator.table import Table

STARTING, PREPARING, COMPUTING, VALIDATING, SAVING, ENDED = (
    "starting", "preparing", "computing", "validating", "saving", "ended",
)  # fmt: skip

PHASES = (STARTING, PREPARING, COMPUTING, VALIDATING, SAVING, ENDED)
"""What a kill can hit."""

SAVING_BY_TIME, ANYWHERE = "saving by time", "anywhere"
"""Aims only: a checkpoint that no validation comes before, which is SAVING, and any moment of the process."""

IN_TRAIN = (STARTING, COMPUTING, COMPUTING, VALIDATING, VALIDATING, SAVING, SAVING_BY_TIME, ANYWHERE)
"""What the kills of `train` are aimed at, in these shares."""

NORMS = ("instance", "batch", "instance", "instance")
"""Of one training life after the other: batch norm has statistics that move with each step."""

LIFE_KILLS, BARREN_LIVES = 5, 10
"""Most kills of one folder; folders in a row in which no kill came in time, after which the rest is given up."""

CASES, SHAPE, STEPS, KEEP = 16, (32, 40, 32), 240, 3

RUN = (
    *("--steps", STEPS, "--validations", 12, "--batch", 2, "--save-minutes", 0.004, "--keep", KEEP, "--ema", 0.9),
    *("--filters", 4, "--depth", 3, "--dtype", "float32", "--policy", "speed", "--deterministic"),
)
"""Steps of milliseconds, enough of them to be killed in between, with saves by time and by validation."""

EXACT = {
    "step": ("step", "epoch", "case_id", "loss", "dice", "learning_rate"),
    "validation": ("step", "epoch", "loss", "dice", "mean_dice", "best", "cases"),
}
"""Event -> its fields that follow from the run alone. JSON keeps a float to the bit."""

END_S = 60.0
"""Within which all processes of a command must have ended when one of them was killed."""

POLL_S, LOOK_S = 0.0005, 0.3
"""Between two looks at a run, whose phases last milliseconds; and for the worker that is to be killed."""

Alive = Callable[[], bool]


@dataclass(frozen=True)
class Options:
    """What `bench faults` does."""

    workdir: Path = option(help="an empty or a new folder", metavar="DIR")
    kills: int = option(50, at_least=1, metavar="N")
    seed: int = option(0, help="of the moments", at_least=0, metavar="S")
    workers: int = option(1, help="above 1: `launch`, whose workers are killed", at_least=1, metavar="N")
    record: Optional[Path] = option(None, help="append the result to a .jsonl file", metavar="FILE")

    def __post_init__(self):
        check(self, InputError)


@dataclass(frozen=True)
class Aim:
    """One kill to be."""

    phase: str
    not_before: float
    """Share of the run's steps, 0 to 1, that must be logged first."""
    delay: float
    """How far into the phase, as a share of what it took undisturbed: 0 to 1."""
    victim: int
    """Rank of the worker to kill."""


@dataclass(frozen=True)
class Life:
    """What one folder goes through: the kills in their order, then the same command until it is done."""

    command: str
    """ "prepare" or "train"."""
    aims: Tuple[Aim, ...] = ()
    norm: str = ""


@dataclass(frozen=True)
class Usual:
    """How the work goes undisturbed."""

    seconds: Dict[str, float]
    """Phase -> how long it takes, the shortest of those that come again; ANYWHERE is the whole process."""
    steps: int
    validations: FrozenSet[int]
    """Steps after which there is one."""


@dataclass(frozen=True)
class Bench:
    """What all lives share."""

    folder: Path
    workers: int
    usual: Usual

    @property
    def log(self) -> Path:
        """The output of all processes."""
        return self.folder / "said.txt"

    @property
    def store(self) -> Path:
        """The store that was prepared undisturbed."""
        return self.folder / "store"

    def reference(self, norm: str) -> Path:
        """The run that was trained undisturbed."""
        return self.folder / f"reference-{norm}"

    def command(self, life: Life, folder: Path) -> List[str]:
        """What a life does, into `folder`."""
        if life.command == "prepare":
            return ["prepare", "--dataset", str(self.folder / "phantom"), "--store", str(folder), "--workers", "2"]
        launch = ["launch", "--workers", str(self.workers)] if self.workers > 1 else []
        data = ["--store", str(self.store), "--run", str(folder)]
        return [*launch, "train", *data, "--norm", life.norm, *map(str, RUN)]


@dataclass(frozen=True)
class Ended:
    """How an attempt came to its end."""

    exit_code: int
    killed: bool
    at_s: float
    """From its start to the kill, or to its end without one."""
    ended_s: float
    """From the kill until no process was left."""
    problems: List[str]


class CommandFailedError(InputError):
    """A command that nobody has disturbed did not end well."""

    exit_code = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, Options)


def run(args: argparse.Namespace) -> int:
    options = from_args(Options, args)
    workdir = writable_folder(options.workdir, "workdir").resolve()
    if any(workdir.iterdir()):
        raise InputError(f"workdir {workdir} must be empty, got other content; choose another, or empty it")
    if options.record:
        writable_folder(options.record.parent, "folder")
    result = campaign(workdir, kills=options.kills, seed=options.seed, workers=options.workers)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(faults_table(result).rich())
    wrong = [problem for life in result["lives"] for problem in life["problems"]]
    for problem in wrong:
        console.print(f"wrong: {problem}")
    if options.record:
        append_record(options.record, "faults", result)
    return 1 if wrong or result["missed"] else 0


def campaign(workdir: Path, *, kills: int, seed: int, workers: int) -> Dict[str, Any]:
    """Do it all below `workdir`, which is empty; returns the content of a record."""
    begin = time.monotonic()
    planned = lives(kills, seed=seed, workers=workers)
    bench = undisturbed(workdir, workers, [life.norm for life in planned if life.norm])
    missed: List[Life] = []
    done: List[Dict[str, Any]] = []
    barren = 0
    with bar("kills", total=kills) as advance:
        while planned or (missed and barren < BARREN_LIVES):
            life = planned.pop(0) if planned else missed.pop(0)
            lived, left = live(bench, life, workdir / f"{life.command}-{len(done) + 1}")
            done.append(lived)
            advance(len(lived["kills"]))
            barren = 0 if lived["kills"] else barren + 1
            if left:  # half as far into the phase the next time: the machine may be faster now
                aims = tuple(dataclasses.replace(aim, delay=aim.delay / 2) for aim in left)
                missed.append(dataclasses.replace(life, aims=aims))
    return {
        "workers": workers,
        "seed": seed,
        "steps": STEPS,
        "cases": CASES,
        "shape": list(SHAPE),
        "options": [str(one) for one in RUN],
        "usual_s": bench.usual.seconds,
        "lives": done,
        "missed": sum(len(life.aims) for life in missed),
        "seconds": time.monotonic() - begin,
        "engine_name": next(e["engine"] for e in read_events(bench.reference(NORMS[0])) if e["event"] == "start"),
        "host": read_host().summary(),
        "versions": versions(),
    }


def lives(kills: int, *, seed: int, workers: int = 1) -> List[Life]:
    """So many kills, dealt to the fewest folders; the same seed gives the same.

    The steps that a life's kills wait for rise, so that each finds a run that has come further.
    """
    rng = np.random.default_rng([seed, workers])
    of_prepare = 0 if workers > 1 else round(kills / 5)
    found = []
    for command, phases, count in (("prepare", (PREPARING,), of_prepare), ("train", IN_TRAIN, kills - of_prepare)):
        # In whole rounds of all phases, so that each comes up even where there are few kills.
        dealt = [str(phase) for _ in range(0, count, len(phases)) for phase in rng.permutation(phases)][:count]
        for number, first in enumerate(range(0, count, LIFE_KILLS)):
            own = dealt[first : first + LIFE_KILLS]
            aims = []
            for index, phase in enumerate(own):
                wait, delay, victim = (index + rng.random()) / (len(own) + 1), rng.random(), rng.integers(workers)
                if phase in (SAVING, SAVING_BY_TIME):
                    victim = 0  # only the chief saves
                aims.append(Aim(phase, float(wait), float(delay), int(victim)))
            found.append(Life(command, tuple(aims), NORMS[number % len(NORMS)] if command == "train" else ""))
    return found


def undisturbed(workdir: Path, workers: int, norms: Sequence[str]) -> Bench:
    """The phantoms, the store and the runs that all is compared with, and how long the phases of the first took."""
    write_phantom(workdir / "phantom", cases=CASES, shape=SHAPE, seed=0)
    bench = Bench(workdir, workers, Usual({}, STEPS, frozenset()))
    seconds: Dict[str, float] = {}

    def whole(life: Life, folder: Path, name: str, is_there: Alive) -> float:
        """Seconds of the command; when `is_there` came first goes to `seconds`."""

        def wait(begin: float, alive: Alive) -> bool:
            while alive():
                if name not in seconds and is_there():
                    seconds[name] = time.monotonic() - begin
                time.sleep(0.001)
            return False

        ended = attempt(bench.command(life, folder), bench.log, wait=wait)
        if ended.exit_code != 0:
            raise CommandFailedError(
                f"{life.command} without any kill must end well, got {how_ended(ended.exit_code)}; "
                f"{bench.log} ends:\n  {last_words(bench.log)}"
            )
        return ended.at_s

    took_s = whole(Life("prepare"), bench.store, PREPARING, (bench.store / "cases").is_dir)
    seconds[PREPARING] = took_s - seconds.get(PREPARING, 0.0)  # from the first case on
    for norm in (NORMS[0], *sorted({*norms} - {NORMS[0]})):
        tail = Tail(bench.reference(norm))
        took_s = whole(Life("train", norm=norm), bench.reference(norm), STARTING, tail.has_started)
        seconds.setdefault(ANYWHERE, took_s)
    events = read_events(bench.reference(NORMS[0]))
    for phase, event, name in (
        (COMPUTING, "step", "step_s"),
        (VALIDATING, "validation", "seconds"),
        (SAVING, "checkpoint", "seconds"),
    ):
        seconds[phase] = min(found[name] for found in events if found["event"] == event)
    seconds[SAVING_BY_TIME] = seconds[SAVING]
    seconds.setdefault(STARTING, seconds[ANYWHERE])
    validations = frozenset(found["step"] for found in events if found["event"] == "validation")
    return Bench(workdir, workers, Usual(seconds, STEPS, validations))


def live(bench: Bench, life: Life, folder: Path) -> Tuple[Dict[str, Any], List[Aim]]:
    """One folder through its kills to its end; its part of the record, and the aims that came too late."""
    begin, waiting = time.monotonic(), list(life.aims)
    kills: List[Dict[str, Any]] = []
    problems: List[str] = []
    is_training = life.command == "train"
    while True:
        aim, tail = waiting[0] if waiting else None, Tail(folder)

        def wait(start_s: float, alive: Alive, aim=aim, tail=tail) -> bool:
            return aim is not None and wait_for(aim, bench.usual, folder, tail, start_s, alive)

        victim = aim.victim if aim and bench.workers > 1 and is_training else None
        ended = attempt(bench.command(life, folder), bench.log, victim=victim, wait=wait)
        problems += ended.problems
        if aim is None or not ended.killed:
            if ended.exit_code != 0:
                problems.append(f"the command must end well, got {how_ended(ended.exit_code)}; see {bench.log}")
            break
        if is_training:
            found, wrong = left_of_run(folder)
            hit = phase_hit(folder, tail, bench.usual)
        else:
            found, wrong = left_of_store(folder)
            hit = PREPARING if (folder / "cases").is_dir() else STARTING
        problems += wrong
        if ended.exit_code == 0:
            problems.append("the command must not end with code 0 when one of its processes was killed")
        how = {"victim": aim.victim, "at_s": ended.at_s, "ended_s": ended.ended_s, "exit_code": ended.exit_code}
        kills.append({"aim": aim.phase, "hit": hit, **found, **how})
        del waiting[0]
    if is_training:
        problems += run_differences(bench.reference(life.norm), folder, KEEP)
    else:
        problems += store_differences(bench.store, folder)
    if not problems:
        shutil.rmtree(folder)
    named = [f"{folder.name}: {problem}" for problem in problems]
    seconds = time.monotonic() - begin
    lived = {"command": life.command, "norm": life.norm, "seconds": seconds, "kills": kills, "problems": named}
    return lived, waiting


# --- A run seen from outside ---


class Tail:
    """The newest event of a run's log, and whether the attempt that is made now has begun."""

    def __init__(self, run: Path):
        self._path, self._state = Path(run) / "log.jsonl", None
        self._earlier = {line for line in self._lines() if _is_start(line)}
        self.started = False
        self.event: Dict[str, Any] = {}

    def has_started(self) -> bool:
        """Look at the log, of which whole lines count; whether this attempt has said that it begins."""
        with contextlib.suppress(FileNotFoundError):
            status = self._path.stat()
            if (status.st_ino, status.st_size) != self._state:
                lines = self._lines()
                self._state = status.st_ino, status.st_size
                self.started |= any(_is_start(line) and line not in self._earlier for line in lines)
                with contextlib.suppress(ValueError, IndexError):
                    self.event = json.loads(lines[-1])
        return self.started

    def _lines(self) -> List[bytes]:
        return self._path.read_bytes().rpartition(b"\n")[0].splitlines() if self._path.is_file() else []


def wait_for(aim: Aim, usual: Usual, folder: Path, tail: Tail, begin: float, alive: Alive) -> bool:
    """Wait until the moment that `aim` means; False when the process that began at `begin` has ended before."""

    def has_come() -> bool:
        if aim.phase in (STARTING, ANYWHERE):
            return True
        if aim.phase == PREPARING:
            return (folder / "cases").is_dir()
        if not tail.has_started() or tail.event["step"] < aim.not_before * usual.steps:
            return False
        is_step, is_validated = tail.event["event"] == "step", tail.event["step"] in usual.validations
        if aim.phase == SAVING:
            return tail.event["event"] == "validation"
        if aim.phase == SAVING_BY_TIME:
            return is_step and not is_validated and any(partials(folder / "checkpoints"))
        return is_step and (is_validated or aim.phase == COMPUTING)

    while alive():
        if has_come():
            since = begin if aim.phase in (STARTING, ANYWHERE) else time.monotonic()
            moment = since + aim.delay * usual.seconds[aim.phase]
            while alive() and time.monotonic() < moment:
                time.sleep(max(min(POLL_S, moment - time.monotonic()), 0))
            return alive()
        time.sleep(POLL_S)
    return False


def phase_hit(run: Path, tail: Tail, usual: Usual) -> str:
    """In which phase a training was that is dead now, by what it has left."""
    if not tail.has_started():
        return STARTING
    event, step = tail.event["event"], tail.event["step"]
    if event == "end":
        return ENDED
    newest = checkpoints(run)[:1]
    is_unlogged = event == "step" and bool(newest) and step_of(newest[0]) == step
    if event == "validation" or is_unlogged or any(partials(run / "checkpoints")):
        return SAVING
    return VALIDATING if event == "step" and step in usual.validations else COMPUTING


def partials(folder: Path) -> List[Path]:
    """What is being written in a folder, or was when its writer died."""
    return sorted(Path(folder).glob(".*.partial"))


def attempt(
    command: Sequence[str], log: Path, *, victim: Optional[int] = None, wait: Callable[[float, Alive], bool]
) -> Ended:
    """Do `python -m cpu3d command` and send SIGKILL once `wait(begin, alive)` returns True.

    `victim` is the rank of the worker to kill among those of `launch`; None is the process itself.
    """
    with log.open("a", encoding="utf-8") as output:
        output.write(f"$ cpu3d {shlex.join(command)}\n")
        output.flush()
        begin = time.monotonic()
        child = start([*PROGRAM, *command], output, cwd=ROOT)
        target = psutil.Process(child.pid) if victim is None else None
        looked_at = 0.0

        def alive() -> bool:
            nonlocal target, looked_at
            if target is None and time.monotonic() - looked_at > LOOK_S:  # a look takes milliseconds
                target, looked_at = _worker(child.pid, victim), time.monotonic()
            return child.poll() is None

        try:
            is_time = wait(begin, alive)
            while is_time and target is None and alive():
                time.sleep(LOOK_S / 10)
            killed, problems, at_s = False, [], time.monotonic() - begin
            if is_time and target is not None and alive():
                # Each worker of `launch` is in a session of its own.
                sessions = {child.pid, *(process.pid for process in _descendants(child.pid))}
                at_s = time.monotonic() - begin
                killed = _kill(target)
                members = [process for process in psutil.process_iter() if _session(process.pid) in sessions]
                problems = _wait_until_gone(child, members) if killed else []
            child.wait()
            return Ended(child.returncode, killed, at_s, time.monotonic() - begin - at_s, problems)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()


# --- What must hold ---


def left_of_run(run: Path) -> Tuple[Dict[str, int], List[str]]:
    """Look at a run folder after a kill: steps logged, saved and to be done again; and what is wrong.

    Every checkpoint has to be whole, none older than the log says, and no step left out.
    """
    problems: List[str] = []
    events, saved = read_events(run), 0
    logged = [event["step"] for event in events if event["event"] == "step"]
    saves = [event["step"] for event in events if event["event"] == "checkpoint"]
    for path in (run / "checkpoints").glob("*.npz"):  # what is being written has another name
        try:
            load_checkpoint(path)
        except InputError as error:
            problems += error.problems
    if not problems:
        found = newest_checkpoint(run)
        saved = found.state["step"] if found else 0
        if found and found.path not in checkpoints(run)[:1]:
            problems.append(f"the checkpoint taken must be the newest, got {found.path.name}")
    if saved < max(saves, default=0):
        problems.append(f"step {max(saves)} was logged as saved and must be there, got step {saved}")
    for before, step in zip([0, *logged], logged):
        if step != before + 1:
            problems.append(f"logged steps must be 1, 2, 3 and so on, got {step} after {before}")
            break
    last = logged[-1] if logged else 0
    return {"step": last, "saved_step": saved, "redone": max(last - saved, 0)}, problems


def left_of_store(store: Path) -> Tuple[Dict[str, int], List[str]]:
    """Look at a store after a kill: finished cases, and what is wrong. A manifest means that all is there."""
    cases = {"cases": len(list((store / "cases").glob("*.json")))}
    try:
        if (store / "manifest.json").exists():
            open_store(store)
    except InputError as error:
        return cases, list(error.problems)
    return cases, []


def run_differences(reference: Path, run: Path, keep: int) -> List[str]:
    """In what a finished run is not that of `reference`, to the bit, and what is left in its folder beyond it."""
    problems = []
    for event, names in EXACT.items():
        wanted, got = (
            [{name: one[name] for name in names} for one in read_events(folder) if one["event"] == event]
            for folder in (reference, run)
        )
        if wanted != got:
            first = next((f"{b} for {a}" for a, b in zip(wanted, got) if a != b), f"{len(got)} of them")
            problems.append(f"{event}s must be the {len(wanted)} of the reference, got {first}")
    last = read_events(run)[-1:]
    if [(event["event"], event.get("reason")) for event in last] != [("end", "finished")]:
        problems.append(f"the log must end with the end, got {last}")
    newest = [newest_checkpoint(folder) for folder in (reference, run)]
    if None in newest:
        return [*problems, "both runs must have a checkpoint"]
    problems += _array_differences("last", *((one.arrays, one.state) for one in newest))
    best = [folder / "checkpoints" / BEST for folder in (reference, run)]
    if all(path.is_file() for path in best):
        problems += _array_differences("best", *map(load_checkpoint, best))
    else:
        problems.append("both runs must have best weights")
    if len(checkpoints(run)) > keep:
        problems.append(f"at most {keep} checkpoints must be kept, got {len(checkpoints(run))}")
    problems += [f"nothing half-written must stay, got {path.name}" for path in partials(run / "checkpoints")]
    return problems


def store_differences(reference: Path, store: Path) -> List[str]:
    """Files that one of two stores has alone or that differ, by their hash."""
    wanted, got = (
        {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).digest()
            for path in folder.rglob("*")
            if path.is_file()
        }
        for folder in (reference, store)
    )
    names = sorted(name for name in {**wanted, **got} if wanted.get(name) != got.get(name))
    return [f"file {name} must be as in a store prepared at once" for name in names]


# --- The record as a table ---


def newest(records: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """The last record of every number of workers and CPU."""
    return newest_of(records, lambda record: (record["workers"], record["host"]["cpu"]))


def faults_table(record: Dict[str, Any]) -> Table:
    """A row for each phase that was hit: kills, and the steps that had to be done again."""
    kills = [kill for life in record["lives"] for kill in life["kills"]]
    rows = []
    for phase in PHASES:
        hit = [kill for kill in kills if kill["hit"] == phase]
        redone = [kill["redone"] for kill in hit if "redone" in kill]
        cells = [f"{statistics.median(redone):g}", str(max(redone))] if redone else ["-", "-"]
        rows += [[phase, str(len(hit)), *cells]] if hit else []
    host, wrong = record["host"], sum(bool(life["problems"]) for life in record["lives"])
    return Table(
        ("killed while", "kills", "steps done again, median", "most"),
        rows,
        title=f"SIGKILL to one of {record['workers']} workers, seed {record['seed']}, {record['steps']} steps in "
        f"float32, {host['cores']} cores of {host['cpu']}",
        caption=f"Folders that lost something or ended otherwise than undisturbed: {wrong} of {len(record['lives'])}; "
        f"kills that came too late each time: {record['missed']}.",
    )


def faults_lines(record: Dict[str, Any]) -> List[str]:
    """The table of one record as Markdown."""
    return faults_table(record).markdown()


# --- Private helpers ---


def _is_start(line: bytes) -> bool:
    return line.startswith(b'{"event": "start"')


def _array_differences(name: str, wanted: Tuple[Any, Dict[str, Any]], got: Tuple[Any, Dict[str, Any]]) -> List[str]:
    (arrays, state), (others, other_state) = wanted, got

    def is_same(key: str) -> bool:
        one, other = arrays.get(key), others.get(key)
        if one is None or other is None:
            return False
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()

    different = [key for key in sorted({*arrays, *others}) if not is_same(key)]
    problems = []
    if different:
        problems.append(f"{name}: {len(different)} of {len(arrays)} arrays differ, the first {different[0]}")
    timeless = [{**one, "trained_s": 0} for one in (state, other_state)]  # no two runs take the same time
    if timeless[0] != timeless[1]:
        problems.append(f"{name}: state must be {timeless[0]}, got {timeless[1]}")
    return problems


def _descendants(pid: int) -> List[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def _worker(pid: int, rank: Optional[int]) -> Optional[psutil.Process]:
    """The process below `pid` that was started as worker `rank`."""
    for process in _descendants(pid):
        with contextlib.suppress(psutil.Error, ValueError, KeyError, TypeError):
            if int(json.loads(process.environ()["TF_CONFIG"])["task"]["index"]) == rank:
                return process
    return None


def _session(pid: int) -> Optional[int]:
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return None


def _kill(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        process.send_signal(signal.SIGKILL)
        return True
    return False


def _wait_until_gone(child: subprocess.Popen, members: List[psutil.Process]) -> List[str]:
    """Wait for the command and all that it had started; end by force what does not go, and name it."""
    problems = []
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(END_S)
    if child.poll() is None:
        problems.append(f"the command must end within {END_S:g} s of the kill, it did not")
        child.kill()
    _, left = psutil.wait_procs([process for process in members if process.pid != child.pid], timeout=END_S)
    for process in left:
        problems.append(f"process {process.pid} must end within {END_S:g} s of the kill, it did not")
        _kill(process)
    return problems

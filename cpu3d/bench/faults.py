"""Kill a small run at random moments, again and again, and compare what comes of it with an undisturbed one.

    ./run.sh bench faults --kills 50 --workdir faults
    ./run.sh bench faults --kills 60 --seed 1 --workdir faults --record records/faults.jsonl
    ./run.sh bench faults --kills 12 --workers 2 --workdir faults-2 --record records/faults.jsonl

Folder after folder is prepared, or trained on phantoms, by commands that get SIGKILL while they start, compute,
validate, save or prepare (or one of their workers does) and that are given again until they are done. After each kill
every checkpoint has to load and none that was logged may be missing; at the end weights, optimizer, averages, best
weights, every step and validation, or the store's files, have to be the same to the bit. Ends with code 1 where
anything is not, and then keeps that folder. About 10 s a kill; one that comes too late does not count. A fifth of the
kills are of `prepare`, none with several workers. One run in four has batch norm.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import shlex
import shutil
import signal
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
import psutil

from cpu3d.bench.harness import Result, read_options, show
from cpu3d.data.store import open_store
from cpu3d.data.stores.phantom import write_phantom
from cpu3d.errors import InputError
from cpu3d.training.checkpoint import BEST, checkpoints, load_checkpoint, step_of
from cpu3d.training.checkpoint import newest as newest_checkpoint
from cpu3d.training.run_log import read_events
from cpu3d.util.atomic import writable_folder
from cpu3d.util.child import PROGRAM, ROOT, how_ended, last_words, start
from cpu3d.util.progress import bar
from cpu3d.util.records import append_record, versions
from memory_estimator.host import read_host
from memory_estimator.schema import add_options, option
from memory_estimator.table import Table

STARTING, PREPARING, COMPUTING, VALIDATING, SAVING, ENDED = PHASES = (
    "starting", "preparing", "computing", "validating", "saving", "ended",
)  # fmt: skip

SAVING_BY_TIME, ANYWHERE = "saving by time", "anywhere"
"""Aims only: a checkpoint that no validation comes before, which is SAVING, and any moment of the process."""

IN_TRAIN = (STARTING, COMPUTING, COMPUTING, VALIDATING, VALIDATING, SAVING, SAVING_BY_TIME, ANYWHERE)
"""What the kills of `train` are aimed at, in these shares."""

NORMS = ("instance", "batch", "instance", "instance")
"""Of one trained folder after the other: batch norm has statistics that move with each step."""

FOLDER_KILLS, IN_VAIN = 5, 10
"""Most kills of one folder; folders in a row in which no kill came in time, after which the rest is given up."""

CASES, SHAPE, STEPS, VALIDATED_EVERY, KEEP = 16, (32, 40, 32), 240, 20, 3

RUN = (
    *(
        "--steps",
        STEPS,
        "--validations",
        STEPS // VALIDATED_EVERY,
        "--batch",
        2,
        "--save-minutes",
        0.004,
        "--keep",
        KEEP,
        "--ema",
        0.9,
    ),
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

POLL_S = 0.0005
"""Between two looks at a run, whose phases last milliseconds."""

Alive = Callable[[], bool]


@dataclass(frozen=True)
class Options:
    """What `bench faults` does."""

    workdir: Path = option(help="an empty or a new folder", metavar="DIR")
    kills: int = option(50, at_least=1, metavar="N")
    seed: int = option(0, help="of the moments", at_least=0, metavar="S")
    workers: int = option(1, help="above 1: `launch`, whose workers are killed", at_least=1, metavar="N")
    record: Optional[Path] = option(None, help="append the result to a .jsonl file", metavar="FILE")


@dataclass(frozen=True)
class Aim:
    """One kill to be."""

    phase: str
    not_before: float = 0.0
    """Share of the run's steps, 0 to 1, that must be logged first."""
    delay: float = 0.0
    """How far into the phase, as a share of the shortest that it took undisturbed: 0 to 1."""
    victim: int = 0
    """Rank of the worker to kill."""


@dataclass(frozen=True)
class Ended:
    """How a command came to its end."""

    exit_code: int
    killed: bool
    at_s: float
    """From its start to the kill, or to its end without one."""
    ended_s: float
    """From the kill until no process was left."""
    problems: List[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, Options)


def run(args: argparse.Namespace) -> int:
    options = read_options(Options, args)
    workdir = writable_folder(options.workdir, "workdir").resolve()
    if any(workdir.iterdir()):
        raise InputError(f"workdir {workdir} must be empty, got other content; choose another, or empty it")
    if options.record:
        writable_folder(options.record.parent, "folder")
    result = campaign(workdir, kills=options.kills, seed=options.seed, workers=options.workers)
    show(faults_table(result))
    wrong = [problem for life in result["lives"] for problem in life["problems"]]
    for problem in wrong:
        print(f"wrong: {problem}")
    if options.record:
        append_record(options.record, "faults", result)
    return 1 if wrong or result["missed"] else 0


def campaign(workdir: Path, *, kills: int, seed: int, workers: int) -> Result:
    """Do it all below `workdir`, which is empty; returns the content of a record."""
    begin, bench, folders = time.monotonic(), Bench(workdir, workers), []
    of_prepare = 0 if workers > 1 else round(kills / 5)
    aims = drawn_aims(seed, workers)
    done = in_vain = 0
    with bar("kills", total=kills) as advance:
        while done < kills and in_vain < IN_VAIN:
            norm = "" if done < of_prepare else NORMS[sum(bool(one["norm"]) for one in folders) % len(NORMS)]
            left = (kills if norm else of_prepare) - done
            own = [aims(bool(norm), number) for number in range(min(FOLDER_KILLS, left))]
            folders.append(bench.kill_in(own, norm, workdir / f"{'train' if norm else 'prepare'}-{len(folders) + 1}"))
            landed = len(folders[-1]["kills"])
            advance(landed)
            done, in_vain = done + landed, 0 if landed else in_vain + 1
    return {
        "workers": workers,
        "seed": seed,
        "steps": STEPS,
        "cases": CASES,
        "shape": list(SHAPE),
        "options": [str(one) for one in RUN],
        "usual_s": bench.usual_s,
        "lives": folders,
        "missed": kills - done,
        "seconds": time.monotonic() - begin,
        "engine_name": next(e["engine"] for e in read_events(bench.reference(NORMS[0])) if e["event"] == "start"),
        "host": read_host().summary(),
        "versions": versions(),
    }


def drawn_aims(seed: int, workers: int) -> Callable[[bool, int], Aim]:
    """A function that draws the next aim, for `train` or for `prepare`, as that kill of a folder; the same for a seed.

    The steps that a folder's kills wait for rise, so that each finds a run that has come further.
    """
    rng = np.random.default_rng([seed, workers])
    phases = (str(phase) for _ in itertools.count() for phase in rng.permutation(IN_TRAIN))

    def aim(is_training: bool, number: int) -> Aim:
        phase = next(phases) if is_training else PREPARING
        not_before, delay = (number + rng.random()) / (FOLDER_KILLS + 1), rng.random()
        victim = 0 if phase in (SAVING, SAVING_BY_TIME) else int(rng.integers(workers))  # only the chief saves
        return Aim(phase, not_before, delay, victim)

    return aim


class Bench:
    """The phantoms, the store and the runs that all is compared with, made undisturbed; and the folders of kills."""

    def __init__(self, folder: Path, workers: int):
        """Makes them, and takes how long each phase of the first run lasted. Raises InputError where that fails."""
        self.folder, self.workers = folder, workers
        self.log, self.store = folder / "output.txt", folder / "store"
        write_phantom(folder / "phantom", cases=CASES, shape=SHAPE, seed=0)
        cases_s, whole_s = self._undisturbed("", self.store, (self.store / "cases").is_dir)
        self.usual_s = {PREPARING: whole_s - cases_s}
        tail, run = Tail(self.reference(NORMS[0])), self.reference(NORMS[0])
        self.usual_s[STARTING], self.usual_s[ANYWHERE] = self._undisturbed(NORMS[0], run, lambda: bool(tail.newest()))
        events = read_events(run)
        for phase, event, name in (
            (COMPUTING, "step", "step_s"),
            (VALIDATING, "validation", "seconds"),
            (SAVING, "checkpoint", "seconds"),
            (SAVING_BY_TIME, "checkpoint", "seconds"),
        ):
            self.usual_s[phase] = min(found[name] for found in events if found["event"] == event)

    def reference(self, norm: str) -> Path:
        """The folder of the run that was trained undisturbed."""
        return self.folder / f"reference-{norm}"

    def command(self, norm: str, folder: Path) -> List[str]:
        """What trains a run with a norm, or prepares a store without one, into `folder`."""
        if not norm:
            return ["prepare", "--dataset", str(self.folder / "phantom"), "--store", str(folder), "--workers", "2"]
        launch = ["launch", "--workers", str(self.workers)] if self.workers > 1 else []
        data = ["--store", str(self.store), "--run", str(folder)]
        return [*launch, "train", *data, "--norm", norm, *map(str, RUN)]

    def kill_in(self, aims: Sequence[Aim], norm: str, folder: Path) -> Result:
        """One folder through its kills to its end; its part of the record."""
        begin, kills, problems = time.monotonic(), [], []
        if norm and not self.reference(norm).is_dir():
            self._undisturbed(norm, self.reference(norm), lambda: True)
        for aim in (*aims, None):
            tail = Tail(folder)

            def wait(start_s: float, alive: Alive, aim=aim, tail=tail) -> bool:
                return aim is not None and wait_for(aim, self.usual_s[aim.phase], folder, tail, start_s, alive)

            victim = aim.victim if aim and norm and self.workers > 1 else None
            ended = attempt(self.command(norm, folder), self.log, victim=victim, wait=wait)
            problems += ended.problems
            if not ended.killed:
                if ended.exit_code != 0:
                    problems.append(f"the command must end well, got {how_ended(ended.exit_code)}; see {self.log}")
                break
            found, wrong = left_of_run(folder) if norm else left_of_store(folder)
            hit = phase_hit(folder, tail.newest()) if norm else PREPARING
            problems += wrong
            if ended.exit_code == 0:
                problems.append("the command must not end with code 0 when one of its processes was killed")
            how = {"victim": aim.victim, "at_s": ended.at_s, "ended_s": ended.ended_s, "exit_code": ended.exit_code}
            kills.append({"aim": aim.phase, "hit": hit, **found, **how})
        if norm:
            problems += run_differences(self.reference(norm), folder, KEEP)
        else:
            problems += store_differences(self.store, folder)
        if not problems:
            shutil.rmtree(folder)
        named = [f"{folder.name}: {problem}" for problem in problems]
        about = {"command": "train" if norm else "prepare", "norm": norm, "seconds": time.monotonic() - begin}
        return {**about, "kills": kills, "problems": named}

    def _undisturbed(self, norm: str, folder: Path, has_come: Callable[[], bool]) -> Tuple[float, float]:
        """Seconds of the command until `has_come`, and until its end."""
        came: List[float] = []

        def wait(begin: float, alive: Alive) -> bool:
            while alive():
                if not came and has_come():
                    came.append(time.monotonic() - begin)
                time.sleep(0.001)
            return False

        ended = attempt(self.command(norm, folder), self.log, wait=wait)
        if ended.exit_code != 0:
            raise InputError(
                f"{folder.name} without any kill must end well, got {how_ended(ended.exit_code)}; {self.log} ends:\n  "
                f"{last_words(self.log)}"
            )
        return (*came[:1], ended.at_s, ended.at_s)[:2]


# --- A run seen from outside ---


class Tail:
    """The newest event that a run logs from now on."""

    def __init__(self, run: Path):
        self._path = Path(run) / "log.jsonl"
        self._earlier = {line for line in self._lines() if _is_start(line)}

    def newest(self) -> Dict[str, Any]:
        """The last whole line of the log; {} until it has a start that was not there before."""
        lines = self._lines()
        if any(_is_start(line) and line not in self._earlier for line in lines):
            with contextlib.suppress(ValueError):
                return json.loads(lines[-1])
        return {}

    def _lines(self) -> List[bytes]:
        with contextlib.suppress(OSError):
            return self._path.read_bytes().rpartition(b"\n")[0].splitlines()
        return []


def wait_for(aim: Aim, usual_s: float, folder: Path, tail: Tail, begin: float, alive: Alive) -> bool:
    """Wait until the moment that `aim` means; False when the process that began at `begin` has ended before."""

    def has_come() -> bool:
        if aim.phase in (STARTING, ANYWHERE, PREPARING):
            return aim.phase != PREPARING or (folder / "cases").is_dir()
        event = tail.newest()
        if not event or event["step"] < aim.not_before * STEPS:
            return False
        is_step, is_validated = event["event"] == "step", event["step"] % VALIDATED_EVERY == 0
        if aim.phase == SAVING:
            return event["event"] == "validation"
        if aim.phase == SAVING_BY_TIME:
            return is_step and not is_validated and any(partials(folder / "checkpoints"))
        return is_step and (is_validated or aim.phase == COMPUTING)

    while alive():
        if has_come():
            since = begin if aim.phase in (STARTING, ANYWHERE) else time.monotonic()
            moment = since + aim.delay * usual_s
            while alive() and time.monotonic() < moment:
                time.sleep(max(min(POLL_S, moment - time.monotonic()), 0))
            return alive()
        time.sleep(POLL_S)
    return False


def phase_hit(run: Path, event: Dict[str, Any]) -> str:
    """In which phase a training was that is dead now, by its newest event and what it has left."""
    if not event:
        return STARTING
    kind, step = event["event"], event["step"]
    if kind == "end":
        return ENDED
    newest = checkpoints(run)[:1]
    is_unlogged = kind == "step" and bool(newest) and step_of(newest[0]) == step
    if kind == "validation" or is_unlogged or any(partials(run / "checkpoints")):
        return SAVING
    return VALIDATING if kind == "step" and step % VALIDATED_EVERY == 0 else COMPUTING


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
        try:
            process, problems = psutil.Process(child.pid), []
            target = process if victim is None else _worker(process, victim)
            is_time = wait(begin, lambda: child.poll() is None)
            at_s, killed = time.monotonic() - begin, False
            with contextlib.suppress(psutil.Error):
                if is_time and target:
                    members = process.children(recursive=True)
                    target.kill()
                    at_s, killed = time.monotonic() - begin, True
                    problems = _wait_until_gone(child, members)
            child.wait()
            if victim is None:  # one that had ended by then was not killed
                killed = child.returncode == -signal.SIGKILL
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


def faults_table(record: Result) -> Table:
    """A row for each phase that was hit: kills, and the steps that had to be done again."""
    kills = [kill for life in record["lives"] for kill in life["kills"]]
    rows = []
    for phase in PHASES:
        hit = [kill for kill in kills if kill["hit"] == phase]
        redone = [kill["redone"] for kill in hit if "redone" in kill]
        cells = [f"{statistics.median(redone):g}", str(max(redone))] if redone else ["-", "-"]
        rows += [[phase, str(len(hit)), *cells]] if hit else []
    host, wrong = record["host"], sum(bool(life["problems"]) for life in record["lives"])
    title = (
        f"SIGKILL to one of {record['workers']} workers, seed {record['seed']}, {record['steps']} steps in float32, "
        f"{host['cores']} cores of {host['cpu']}"
    )
    caption = (
        f"Folders that lost something or ended otherwise than undisturbed: {wrong} of {len(record['lives'])}; kills "
        f"that came too late each time: {record['missed']}."
    )
    return Table(("killed while", "kills", "steps done again, median", "most"), rows, title=title, caption=caption)


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


def _worker(process: psutil.Process, rank: int) -> Optional[psutil.Process]:
    """The process below one that was started as worker `rank`, once there is one; None where it ends before."""
    with contextlib.suppress(psutil.Error):
        while process.status() != psutil.STATUS_ZOMBIE:
            for child in process.children(recursive=True):
                with contextlib.suppress(psutil.Error, ValueError, KeyError, TypeError):
                    if int(json.loads(child.environ()["TF_CONFIG"])["task"]["index"]) == rank:
                        return child
            time.sleep(0.03)
    return None


def _wait_until_gone(child: subprocess.Popen, members: Sequence[psutil.Process]) -> List[str]:
    """Wait for the command and all that it had started; end by force what does not go, and name it."""
    problems = []
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(END_S)
    if child.poll() is None:
        problems.append(f"the command must end within {END_S:g} s of the kill, it did not")
        child.kill()
    for process in psutil.wait_procs(members, timeout=END_S)[1]:
        problems.append(f"process {process.pid} must end within {END_S:g} s of the kill, it did not")
        with contextlib.suppress(psutil.Error):
            process.kill()
    return problems

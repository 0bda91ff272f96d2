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

from cpu3d.bench.harness import Output, Result, read_options
from cpu3d.data.store import open_store
from cpu3d.data.stores.phantom import write_phantom
from cpu3d.errors import InputError
from cpu3d.training.checkpoint import BEST, checkpoints, load_checkpoint, step_of
from cpu3d.training.checkpoint import newest as newest_checkpoint
from cpu3d.training.run_log import read_events
from cpu3d.util.atomic import writable_folder
from cpu3d.util.child import PROGRAM, ROOT, how_ended, last_words, start
from cpu3d.util.progress import bar
from cpu3d.util.records import versions
from memory_estimator.host import read_host
from memory_estimator.schema import add_options, option
from memory_estimator.table import Table

STARTING, PREPARING, COMPUTING, VALIDATING, SAVING, ENDED = PHASES = (
    "starting", "preparing", "computing", "validating", "saving", "ended",
)  # fmt: skip

WHILE_STARTING = 0.15
"""Share of the kills of `train` that come before it has begun; the others after."""

NORMS = ("instance", "batch", "instance", "instance")
"""Of one trained folder after the other: batch norm has statistics that move with each step."""

FOLDER_KILLS, IN_VAIN = 5, 10
"""Most kills of one folder; folders in a row in which no kill came in time, after which the rest is given up."""

CASES, SHAPE, STEPS, VALIDATED_EVERY, KEEP = 16, (32, 40, 32), 240, 10, 3

RUN = (
    f"--steps {STEPS} --validations {STEPS // VALIDATED_EVERY} --batch 2 --save-minutes 0.001 --keep {KEEP} --ema 0.9 "
    "--filters 4 --depth 3 --dtype float32 --policy speed --deterministic"
).split()
"""Steps of milliseconds, validations and saves often enough that a random moment is as likely one as the other."""

EXACT = {
    "step": ("step", "epoch", "case_id", "loss", "dice", "learning_rate"),
    "validation": ("step", "epoch", "loss", "dice", "mean_dice", "best", "cases"),
}
"""Event -> its fields that follow from the run alone. JSON keeps a float to the bit."""

END_S = 60.0
"""Within which all processes of a command must have ended when one of them was killed."""

POLL_S = 0.0005
"""Between two looks at a run, whose phases last milliseconds."""


@dataclass(frozen=True)
class Options:
    """What `bench faults` does."""

    workdir: Path = option(help="an empty or a new folder", metavar="DIR")
    kills: int = option(50, at_least=1, metavar="N")
    seed: int = option(0, help="of the moments", at_least=0, metavar="S")
    workers: int = option(1, help="above 1: `launch`, whose workers are killed", at_least=1, metavar="N")


@dataclass(frozen=True)
class Ended:
    """How a command came to its end."""

    exit_code: int
    killed: bool
    begun_s: float
    """From its start until its work had begun."""
    at_s: float
    """From its start to the kill, or to its end without one."""
    ended_s: float
    """From the kill until no process was left."""
    problems: List[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, Options)
    add_options(parser, Output, only=("record",))


def run(args: argparse.Namespace) -> int:
    options, output = read_options(Options, args), read_options(Output, args)
    workdir = writable_folder(options.workdir, "workdir").resolve()
    if any(workdir.iterdir()):
        raise InputError(f"workdir {workdir} must be empty, got other content; choose another, or empty it")
    result = Campaign(workdir, options.workers, options.seed).run(options.kills)
    output.publish("faults", result, [faults_table(result)])
    wrong = [problem for life in result["lives"] for problem in life["problems"]]
    for problem in wrong:
        print(f"wrong: {problem}")
    return 1 if wrong or result["missed"] else 0


class Campaign:
    """The phantoms, the store and the runs that all is compared with, made undisturbed; and the folders of kills."""

    def __init__(self, folder: Path, workers: int, seed: int):
        """Makes the first of them below `folder`. Raises InputError where that fails."""
        self.folder, self.workers, self.seed = folder, workers, seed
        self.log, self.store, self.rng = folder / "output.txt", folder / "store", np.random.default_rng([seed, workers])
        self.begun_s: Dict[bool, float] = {}
        self.work_s: Dict[bool, float] = {}
        """Seconds until the work has begun and from then on, undisturbed: of prepare (False) and of train."""
        write_phantom(folder / "phantom", cases=CASES, shape=SHAPE, seed=0)
        self._undisturbed("", self.store)
        self._undisturbed(NORMS[0], self.reference(NORMS[0]))

    def run(self, kills: int) -> Result:
        """Kill so many times; returns the content of a record."""
        begin, folders, done, in_vain = time.monotonic(), [], 0, 0
        of_prepare, trained = 0 if self.workers > 1 else round(kills / 5), 0
        with bar("kills", total=kills) as advance:
            while done < kills and in_vain < IN_VAIN:
                norm = "" if done < of_prepare else NORMS[trained % len(NORMS)]
                trained += bool(norm)
                most = min(FOLDER_KILLS, (kills if norm else of_prepare) - done)
                name = f"{'train' if norm else 'prepare'}-{len(folders) + 1}"
                folders.append(self._kill_in(self.folder / name, norm, most))
                landed = len(folders[-1]["kills"])
                advance(landed)
                done, in_vain = done + landed, 0 if landed else in_vain + 1
        events = read_events(self.reference(NORMS[0]))
        about = {"workers": self.workers, "seed": self.seed, "steps": STEPS, "cases": CASES, "shape": list(SHAPE)}
        return {
            **about,
            "options": RUN,
            "lives": folders,
            "missed": kills - done,
            "seconds": time.monotonic() - begin,
            "engine_name": next(event["engine"] for event in events if event["event"] == "start"),
            "host": read_host().summary(),
            "versions": versions(),
        }

    def reference(self, norm: str) -> Path:
        """The folder of the run that was trained undisturbed."""
        return self.folder / f"reference-{norm}"

    def _kill_in(self, folder: Path, norm: str, most: int) -> Result:
        """One folder through its kills to its end; its part of the record."""
        begin, kills, problems = time.monotonic(), [], []
        if norm and not self.reference(norm).is_dir():
            self._undisturbed(norm, self.reference(norm))
        for number in range(most + 1):
            tail, victim = Tail(folder), int(self.rng.integers(self.workers))
            delay_s, is_starting = self.rng.random(), norm and self.rng.random() < WHILE_STARTING
            # Each attempt gets a part of the way only, so that all kills of a folder find it at work.
            delay_s *= self.begun_s[True] if is_starting else self.work_s[bool(norm)] / (FOLDER_KILLS + 1)
            ended = attempt(
                self._command(norm, folder),
                self.log,
                has_begun=None if is_starting else self._has_begun(norm, folder, tail),
                delay_s=delay_s if number < most else None,
                victim=victim if norm and self.workers > 1 else None,
            )
            problems += ended.problems
            if not ended.killed:
                if ended.exit_code != 0:
                    problems.append(f"the command must end well, got {how_ended(ended.exit_code)}; see {self.log}")
                break
            found, wrong = left_of_run(folder) if norm else left_of_store(folder)
            problems += wrong
            if ended.exit_code == 0:
                problems.append("the command must not end with code 0 when one of its processes was killed")
            hit = phase_hit(folder, tail.newest()) if norm else PREPARING
            how = {"victim": victim, "at_s": ended.at_s, "ended_s": ended.ended_s, "exit_code": ended.exit_code}
            kills.append({"hit": hit, **found, **how})
        if norm:
            problems += run_differences(self.reference(norm), folder, KEEP)
        else:
            problems += store_differences(self.store, folder)
        if not problems:
            shutil.rmtree(folder)
        named = [f"{folder.name}: {problem}" for problem in problems]
        about = {"command": "train" if norm else "prepare", "norm": norm, "seconds": time.monotonic() - begin}
        return {**about, "kills": kills, "problems": named}

    def _command(self, norm: str, folder: Path) -> List[str]:
        """What trains a run with a norm, or prepares a store without one, into `folder`."""
        if not norm:
            return ["prepare", "--dataset", str(self.folder / "phantom"), "--store", str(folder), "--workers", "2"]
        launch = ["launch", "--workers", str(self.workers)] if self.workers > 1 else []
        return [*launch, "train", "--store", str(self.store), "--run", str(folder), "--norm", norm, *RUN]

    def _has_begun(self, norm: str, folder: Path, tail: "Tail") -> Callable[[], bool]:
        return (lambda: bool(tail.newest())) if norm else (folder / "cases").is_dir

    def _undisturbed(self, norm: str, folder: Path) -> None:
        has_begun = self._has_begun(norm, folder, Tail(folder))
        ended = attempt(self._command(norm, folder), self.log, has_begun=has_begun)
        if ended.exit_code != 0:
            raise InputError(
                f"{folder.name} without any kill must end well, got {how_ended(ended.exit_code)}; {self.log} ends:\n  "
                f"{last_words(self.log)}"
            )
        self.begun_s[bool(norm)], self.work_s[bool(norm)] = ended.begun_s, ended.at_s - ended.begun_s


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
    command: Sequence[str],
    log: Path,
    *,
    has_begun: Optional[Callable[[], bool]] = None,
    delay_s: Optional[float] = None,
    victim: Optional[int] = None,
) -> Ended:
    """Do `python -m cpu3d command`, and send SIGKILL `delay_s` after `has_begun`; None is after its start, or never.

    `victim` is the rank of the worker to kill among those of `launch`; None is the process itself.
    """
    with log.open("a", encoding="utf-8") as output:
        output.write(f"$ cpu3d {shlex.join(command)}\n")
        output.flush()
        begin = time.monotonic()
        child = start([*PROGRAM, *command], output, cwd=ROOT)
        try:
            process, problems, killed, begun_s, at_s = psutil.Process(child.pid), [], False, None, 0.0
            while child.poll() is None and not killed:
                at_s = time.monotonic() - begin
                if begun_s is None and (has_begun is None or has_begun()):
                    begun_s = at_s
                if delay_s is not None and begun_s is not None and at_s >= begun_s + delay_s:
                    with contextlib.suppress(psutil.Error):
                        target, members = _target(process, victim)
                        target.kill()
                        at_s, killed = time.monotonic() - begin, True
                        problems = _wait_until_gone(child, members)
                time.sleep(POLL_S)
            child.wait()
            if victim is None:  # one that had ended by then was not killed
                killed = child.returncode == -signal.SIGKILL
            at_s = at_s if killed else time.monotonic() - begin
            return Ended(child.returncode, killed, begun_s or 0.0, at_s, time.monotonic() - begin - at_s, problems)
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


def _target(process: psutil.Process, rank: Optional[int]) -> Tuple[psutil.Process, List[psutil.Process]]:
    """The process that was started as worker `rank`, or `process` for None; and all below `process`.

    Raises psutil.Error where there is no such worker, yet or any more.
    """
    members = process.children(recursive=True)
    for child in members if rank is not None else ():
        with contextlib.suppress(psutil.Error, ValueError, KeyError, TypeError):
            if int(json.loads(child.environ()["TF_CONFIG"])["task"]["index"]) == rank:
                return child, members
    if rank is not None:
        raise psutil.NoSuchProcess(process.pid)
    return process, members


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

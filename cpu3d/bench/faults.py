"""Kill a small run at random moments, again and again, and compare what comes of it with an undisturbed one.

    ./run.sh bench faults --kills 50 --workdir faults
    ./run.sh bench faults --kills 60 --seed 1 --workdir faults --record records/faults.jsonl
    ./run.sh bench faults --kills 12 --workers 2 --workdir faults-2 --record records/faults.jsonl

Run after run is trained on phantoms by commands that get SIGKILL while they start, compute, validate or save (or one of
their workers does) and that are given again until they are done. After each kill every checkpoint has to load and none
that was logged may be missing; at the end weights, optimizer, averages, best weights, every step and validation have to
be the same to the bit. Ends with code 1 where anything is not, and then keeps that folder. About 10 s a kill; one that
comes too late does not count. One run in four has batch norm.
"""

import argparse
import contextlib
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

from cpu3d.bench.harness import Output, Result, host_of
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
from memory_estimator.schema import add_options, from_args, option
from memory_estimator.table import Table

HELP = "kill a small run at random moments and compare what comes of it with an undisturbed one"

STARTING, PREPARING, COMPUTING, VALIDATING, SAVING, ENDED = PHASES = (
    "starting", "preparing", "computing", "validating", "saving", "ended",
)  # fmt: skip
"""What a kill can hit; "preparing" stands in older records alone, of killed `prepare` commands."""

WHILE_STARTING = 0.15
"""Share of the kills that come before training has begun; the others after."""

NORMS = ("instance", "batch", "instance", "instance")
"""Of one run after the other: batch norm has statistics that move with each step."""

RUN_KILLS, IN_VAIN = 5, 10
"""Most kills of one run; runs in a row in which no kill came in time, after which the rest is given up."""

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
    options, output = from_args(Options, args), from_args(Output, args)
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
    """A store of phantoms, the undisturbed runs that others are compared with, and the runs that are killed."""

    def __init__(self, folder: Path, workers: int, seed: int):
        """Makes the store and the first undisturbed run below `folder`. Raises InputError where that fails."""
        self.folder, self.workers, self.seed = folder, workers, seed
        self.log, self.rng = folder / "output.txt", np.random.default_rng([seed, workers])
        write_phantom(folder / "phantom", cases=CASES, shape=SHAPE, seed=0)
        prepare = ["prepare", "--dataset", str(folder / "phantom"), "--store", str(folder / "store")]
        self._undisturbed(prepare, lambda: True)
        ended = self._reference(NORMS[0])
        self.begun_s, self.work_s = ended.begun_s, ended.at_s - ended.begun_s

    def run(self, kills: int) -> Result:
        """Kill so many times; returns the content of a record."""
        begin, lives, done, in_vain = time.monotonic(), [], 0, 0
        with bar("kills", total=kills) as advance:
            while done < kills and in_vain < IN_VAIN:
                norm = NORMS[len(lives) % len(NORMS)]
                lives.append(self._kill_in(f"train-{len(lives) + 1}", norm, min(RUN_KILLS, kills - done)))
                landed = len(lives[-1]["kills"])
                advance(landed)
                done, in_vain = done + landed, 0 if landed else in_vain + 1
        events = read_events(self.folder / f"reference-{NORMS[0]}")
        return {
            "workers": self.workers,
            "seed": self.seed,
            "steps": STEPS,
            "cases": CASES,
            "shape": list(SHAPE),
            "options": RUN,
            "lives": lives,
            "missed": kills - done,
            "seconds": time.monotonic() - begin,
            "engine_name": next(event["engine"] for event in events if event["event"] == "start"),
            "host": read_host().summary(),
            "versions": versions(),
        }

    def _kill_in(self, name: str, norm: str, most: int) -> Result:
        """One run through its kills to its end; its part of the record."""
        begin, folder, reference = time.monotonic(), self.folder / name, self.folder / f"reference-{norm}"
        kills: List[Result] = []
        problems: List[str] = []
        if not reference.is_dir():
            self._reference(norm)
        for number in range(most + 1):
            tail, victim = Tail(folder), int(self.rng.integers(self.workers))
            delay_s, is_starting = self.rng.random(), self.rng.random() < WHILE_STARTING
            # Each attempt gets a part of the way only, so that all kills of a run find it at work.
            delay_s *= self.begun_s if is_starting else self.work_s / (RUN_KILLS + 1)
            ended = attempt(
                self._command(norm, folder),
                self.log,
                has_begun=None if is_starting else lambda tail=tail: bool(tail.newest()),
                delay_s=delay_s if number < most else None,
                victim=victim if self.workers > 1 else None,
            )
            problems += ended.problems
            if not ended.killed:
                if ended.exit_code != 0:
                    problems.append(f"the command must end well, got {how_ended(ended.exit_code)}; see {self.log}")
                break
            found, wrong = left_of_run(folder)
            problems += wrong
            if ended.exit_code == 0:
                problems.append("the command must not end with code 0 when one of its processes was killed")
            how = {"victim": victim, "at_s": ended.at_s, "ended_s": ended.ended_s, "exit_code": ended.exit_code}
            kills.append({"hit": phase_hit(folder, tail.newest()), **found, **how})
        problems += run_differences(reference, folder, KEEP)
        if not problems:
            shutil.rmtree(folder)
        about = {"command": "train", "norm": norm, "seconds": time.monotonic() - begin}
        return {**about, "kills": kills, "problems": [f"{name}: {problem}" for problem in problems]}

    def _command(self, norm: str, folder: Path) -> List[str]:
        launch = ["launch", "--workers", str(self.workers)] if self.workers > 1 else []
        return [*launch, "train", "--store", str(self.folder / "store"), "--run", str(folder), "--norm", norm, *RUN]

    def _reference(self, norm: str) -> Ended:
        folder = self.folder / f"reference-{norm}"
        tail = Tail(folder)
        return self._undisturbed(self._command(norm, folder), lambda: bool(tail.newest()))

    def _undisturbed(self, command: Sequence[str], has_begun: Callable[[], bool]) -> Ended:
        ended = attempt(command, self.log, has_begun=has_begun)
        if ended.exit_code != 0:
            raise InputError(
                f"{shlex.join(command)} must end well, got {how_ended(ended.exit_code)}; {self.log} ends:\n  "
                f"{last_words(self.log)}"
            )
        return ended


# --- A run seen from outside ---


class Tail:
    """The newest event that a run logs from now on."""

    def __init__(self, run: Path):
        self._path = Path(run) / "log.jsonl"
        self._earlier = set(self._starts())

    def newest(self) -> Dict[str, Any]:
        """The last whole line of the log; {} until it has a start that was not there before."""
        if set(self._starts()) - self._earlier:
            with contextlib.suppress(ValueError):
                return json.loads(self._lines()[-1])
        return {}

    def _starts(self) -> List[bytes]:
        return [line for line in self._lines() if line.startswith(b'{"event": "start"')]

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
    if kind == "validation" or is_unlogged or _partials(run):
        return SAVING
    return VALIDATING if kind == "step" and step % VALIDATED_EVERY == 0 else COMPUTING


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
                        members = process.children(recursive=True)
                        target = process if victim is None else _worker(members, victim)
                        target.kill()
                        at_s, killed = time.monotonic() - begin, True
                        problems = _still_there(child, members)
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
    logged, saves = ([event["step"] for event in events if event["event"] == kind] for kind in ("step", "checkpoint"))
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
    gaps = [f"{step} after {before}" for before, step in zip([0, *logged], logged) if step != before + 1]
    if gaps:
        problems.append(f"logged steps must be 1, 2, 3 and so on, got {gaps[0]}")
    last = logged[-1] if logged else 0
    return {"step": last, "saved_step": saved, "redone": max(last - saved, 0)}, problems


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
    best = [folder / "checkpoints" / BEST for folder in (reference, run)]
    if None in newest or not all(path.is_file() for path in best):
        return [*problems, "both runs must have a checkpoint and best weights"]
    problems += _array_differences("last", *((one.arrays, one.state) for one in newest))
    problems += _array_differences("best", *map(load_checkpoint, best))
    if len(checkpoints(run)) > keep:
        problems.append(f"at most {keep} checkpoints must be kept, got {len(checkpoints(run))}")
    return problems + [f"nothing half-written must stay, got {path.name}" for path in _partials(run)]


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
    about = f"{record['workers']} workers, seed {record['seed']}, {record['steps']} steps in float32"
    wrong = sum(bool(life["problems"]) for life in record["lives"])
    caption = (
        f"Folders that lost something or ended otherwise than undisturbed: {wrong} of {len(record['lives'])}; kills "
        f"that came too late each time: {record['missed']}."
    )
    columns = ("killed while", "kills", "steps done again, median", "most")
    return Table(columns, rows, title=f"SIGKILL to one of {about}, {host_of(record)}", caption=caption)


# --- Private helpers ---


def _partials(run: Path) -> List[Path]:
    """Checkpoints that are being written, or were when their writer died."""
    return sorted((run / "checkpoints").glob(".*.partial"))


def _array_differences(name: str, wanted: Tuple[Any, Dict[str, Any]], got: Tuple[Any, Dict[str, Any]]) -> List[str]:
    """What differs between two checkpoints, (arrays, state) each; the seconds trained may."""
    contents = [
        {key: (array.dtype, array.shape, array.tobytes()) for key, array in checkpoint[0].items()}
        for checkpoint in (wanted, got)
    ]
    different = [key for key in sorted({**contents[0], **contents[1]}) if contents[0].get(key) != contents[1].get(key)]
    problems = []
    if different:
        problems.append(f"{name}: {len(different)} of {len(contents[0])} arrays differ, the first {different[0]}")
    states = [{**state, "trained_s": 0} for _, state in (wanted, got)]
    if states[0] != states[1]:
        problems.append(f"{name}: state must be {states[0]}, got {states[1]}")
    return problems


def _worker(members: Sequence[psutil.Process], rank: int) -> psutil.Process:
    """The process that was started as worker `rank`. Raises psutil.Error where there is none, yet or any more."""
    for child in members:
        with contextlib.suppress(psutil.Error, ValueError, KeyError, TypeError):
            if int(json.loads(child.environ()["TF_CONFIG"])["task"]["index"]) == rank:
                return child
    raise psutil.NoSuchProcess(0)


def _still_there(child: subprocess.Popen, members: Sequence[psutil.Process]) -> List[str]:
    """Wait for a command and what it had started; end by force what does not go, and name it."""
    problems = []
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(END_S)
    for process in [*([child] if child.poll() is None else []), *psutil.wait_procs(members, timeout=END_S)[1]]:
        problems.append(f"process {process.pid} must end within {END_S:g} s of the kill, it did not")
        with contextlib.suppress(psutil.Error):
            process.kill()
    return problems

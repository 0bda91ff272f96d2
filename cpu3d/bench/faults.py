"""Kill a small run at random moments, again and again, and compare what comes of it with an undisturbed one.

    ./run.sh bench faults --kills 50 --workdir faults
    ./run.sh bench faults --kills 60 --seed 1 --workdir faults --record records/faults.jsonl
    ./run.sh bench faults --kills 12 --workers 2 --workdir faults-2 --record records/faults.jsonl

Run after run is trained on phantoms by commands that get SIGKILL (or one of their workers does) and that are given
again until they are done. After each kill every checkpoint has to load and none that was logged may be missing; at the
end weights, optimizer, averages, every step and validation have to be the same to the bit. Ends with code 1 where
anything is not, and then keeps that folder. About 10 s a kill; one that comes too late does not count.
"""

import contextlib
import io
import math
import shlex
import shutil
import signal
import statistics
import subprocess
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import psutil

from cpu3d.bench.harness import Output, Result, host_of
from cpu3d.data.stores.phantom import write_phantom
from cpu3d.data.stores.prepare import prepare
from cpu3d.distributed.cluster import read_cluster
from cpu3d.errors import InputError
from cpu3d.training.checkpoint import BEST, MARKS, checkpoints, load_checkpoint
from cpu3d.training.checkpoint import newest as newest_checkpoint
from cpu3d.training.run_log import RATE_TEST, WENT_BACK, read_events
from cpu3d.util.atomic import writable_folder
from cpu3d.util.child import PROGRAM, ROOT, how_ended, last_words, start
from cpu3d.util.progress import bar
from cpu3d.util.records import versions
from memory_estimator.host import read_host
from memory_estimator.schema import option
from memory_estimator.table import Table

WHILE_STARTING, RUN_KILLS = 0.15, 5
"""Share of the kills that come before training has begun; most kills of one run."""

CASES, SHAPE, STEPS, VALIDATED_EVERY, KEEP = 16, (32, 40, 32), 240, 10, 3

RUN = (
    f"--steps {STEPS} --validations {STEPS // VALIDATED_EVERY} --batch 2 --save-minutes 0.001 --keep {KEEP} --ema 0.9 "
    "--filters 4 --depth 3 --norm batch --dtype float32 --policy speed --deterministic"
).split()
"""Steps of milliseconds, validations and saves often enough that a random moment is as likely one as the other."""

EXACT = {
    "step": ("step", "epoch", "case_id", "loss", "dice", "learning_rate"),
    "validation": ("step", "epoch", "loss", "dice", "mean_dice", "best", "cases"),
    RATE_TEST: ("rates", "losses", "learning_rate"),
    WENT_BACK: ("step", "diverged_at", "rate_share", "losses"),
}
"""Event -> its fields that follow from the run alone. JSON keeps a float to the bit."""

END_S, POLL_S = 60.0, 0.0005
"""Within which all processes of a command must have ended when one of them was killed; between two looks at a run,
whose phases last milliseconds."""


@dataclass(frozen=True)
class Options:
    """What `bench faults` does."""

    workdir: Path = option(help="an empty or a new folder", metavar="DIR")
    kills: int = option(50, at_least=1, metavar="N")
    seed: int = option(0, help="of the moments", at_least=0, metavar="S")
    workers: int = option(1, help="above 1: `launch`, whose workers are killed", at_least=1, metavar="N")


OPTIONS = (Options, Output)


class Ended(NamedTuple):
    """How a command ended. Seconds are from its start: until it trained, 0 for never; to the kill or the end."""

    exit_code: int
    killed: bool
    begun_s: float
    at_s: float
    newest: Mapping[str, Any]  # the last event that it logged, {} where its training had not begun
    problems: Sequence[str]


def run(options: Options, output: Output) -> int:
    begin, folder = time.monotonic(), writable_folder(options.workdir, "workdir").resolve()
    if any(folder.iterdir()):
        raise InputError(f"workdir {folder} must be empty, got other content; choose another, or empty it")
    with contextlib.redirect_stdout(io.StringIO()):
        write_phantom(folder / "phantom", cases=CASES, shape=SHAPE, seed=0)
        prepare(folder / "phantom", folder / "store")
    reference = train(folder, "reference", options.workers)
    if reference.exit_code != 0:
        how = f"got {how_ended(reference.exit_code)}; it ends:\n  {last_words(folder / 'output.txt')}"
        raise InputError(f"the undisturbed training in {folder} must end well, {how}")
    rng, lives, done = np.random.default_rng([options.seed, options.workers]), [], 0
    with bar("kills", total=options.kills) as advance:
        while done < options.kills and (not lives or lives[-1]["kills"]):
            most = min(RUN_KILLS, options.kills - done)
            lives.append(life(folder, f"train-{len(lives) + 1}", options.workers, reference, most, rng))
            done += len(lives[-1]["kills"])
            advance(len(lives[-1]["kills"]))
    start_event = next(event for event in read_events(folder / "reference") if event["event"] == "start")
    result = {"workers": options.workers, "seed": options.seed, "steps": STEPS, "cases": CASES, "shape": list(SHAPE)}
    result.update(options=RUN, lives=lives, missed=options.kills - done, seconds=time.monotonic() - begin)
    result.update(engine_name=start_event["engine"], host=read_host().summary(), versions=versions())
    output.publish("faults", result, faults_table(result))
    wrong = [f"wrong: {problem}" for one in lives for problem in one["problems"]]
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    return 1 if wrong or result["missed"] else 0


def life(folder: Path, name: str, workers: int, reference: Ended, most: int, rng: np.random.Generator) -> Result:
    """One run through at most so many kills to its end; its part of the record."""
    begin, kills, problems = time.monotonic(), [], []
    for left in range(most, -1, -1):
        share, is_starting = rng.random(), rng.random() < WHILE_STARTING
        rank = int(rng.integers(workers)) if workers > 1 else None
        # Each attempt gets a part of the way only, so that all kills of a run find it at work.
        way_s = reference.begun_s if is_starting else (reference.at_s - reference.begun_s) / (RUN_KILLS + 1)
        ended = train(folder, name, workers, share * way_s if left else math.inf, is_starting, rank)
        problems += ended.problems
        if not ended.killed:
            if ended.exit_code != 0:
                problems.append(f"the command must end well, got {how_ended(ended.exit_code)}; see output.txt")
            break
        found, wrong = left_of_run(folder / name)
        problems += wrong
        if ended.exit_code == 0:
            problems.append("the command must not end with code 0 when one of its processes was killed")
        how = {"victim": rank or 0, "at_s": ended.at_s, "exit_code": ended.exit_code}
        kills.append({"hit": ended.newest.get("event", "starting"), **found, **how})
    problems += run_differences(folder / "reference", folder / name, KEEP)
    if not problems:
        shutil.rmtree(folder / name)
    problems = [f"{name}: {problem}" for problem in problems]
    return {"command": "train", "seconds": time.monotonic() - begin, "kills": kills, "problems": problems}


# --- A command from outside ---


def train(folder: Path, name: str, workers: int, *kill: Any) -> Ended:
    """Begin or continue the run `name` in `folder`; `kill` are the last arguments of `attempt`."""
    launch = ["launch", "--workers", str(workers)] if workers > 1 else []
    own = ["train", "--store", str(folder / "store"), "--run", str(folder / name)]
    return attempt([*launch, *own, *RUN], folder / name, *kill)


def attempt(
    command: Sequence[str], run: Path, delay_s: float = math.inf, is_starting: bool = True, rank: Optional[int] = None
) -> Ended:
    """Do `python -m cpu3d command`, which writes to the folder `run`; what it prints goes to output.txt beside it.

    SIGKILL is sent `delay_s` after the command was started, or after its training has begun: to its process, or of
    `launch` to the worker `rank`.
    """
    earlier, begin, begun_s, problems = read_events(run), time.monotonic(), 0.0, None
    with (run.parent / "output.txt").open("a", encoding="utf-8") as output:
        print(f"$ cpu3d {shlex.join(command)}", file=output, flush=True)
        child = start([*PROGRAM, *command], output, cwd=ROOT)
    try:
        while child.poll() is None and problems is None:
            at_s = time.monotonic() - begin
            begun_s = begun_s or (at_s if newest_event(run, earlier) else 0.0)
            if at_s >= delay_s + (0.0 if is_starting else begun_s or math.inf):
                problems = _kill(child, rank)
            time.sleep(POLL_S)
        child.wait()
    finally:
        child.kill()
        child.wait()
    # One that had ended by then was not killed.
    killed = problems is not None and (rank is not None or child.returncode == -signal.SIGKILL)
    at_s = at_s if killed else time.monotonic() - begin
    return Ended(child.returncode, killed, begun_s, at_s, newest_event(run, earlier), problems or [])


def newest_event(run: Path, earlier: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The last event of a run's log; {} until that has a start which is not among the `earlier` events."""
    events = read_events(run)
    has_begun = any(event["event"] == "start" and event not in earlier for event in events)
    return events[-1] if has_begun else {}


def _kill(child: subprocess.Popen, rank: Optional[int]) -> Optional[List[str]]:
    """Kill a command, or the worker `rank` that it has started, and wait for all; what does not go is ended and named.

    None where there is no such process, yet or any more.
    """
    try:
        victim, left = psutil.Process(child.pid), psutil.Process(child.pid).children(recursive=True)
        if rank is not None:
            workers = {read_cluster(one.environ()).rank: one for one in left if "TF_CONFIG" in one.environ()}
            victim = workers[rank]
        victim.kill()
    except (psutil.Error, KeyError):
        return None
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(END_S)
    left = [*([child] if child.poll() is None else []), *psutil.wait_procs(left, timeout=END_S)[1]]
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return [f"process {process.pid} must end within {END_S:g} s of the kill, it did not" for process in left]


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
    last = (logged or [0])[-1]
    return {"step": last, "saved_step": saved, "redone": max(last - saved, 0)}, problems


def run_differences(reference: Path, run: Path, keep: int) -> List[str]:
    """In what a finished run is not that of `reference`, to the bit, and what is left in its folder beyond it."""
    problems, logs = [], [read_events(folder) for folder in (reference, run)]
    for kind, names in EXACT.items():
        wanted, got = ([{name: one[name] for name in names} for one in log if one["event"] == kind] for log in logs)
        if wanted != got:
            first = next((f"{b} for {a}" for a, b in zip(wanted, got) if a != b), f"{len(got)} of them")
            problems.append(f"{kind}s must be the {len(wanted)} of the reference, got {first}")
    if [(event["event"], event.get("reason")) for event in logs[1][-1:]] != [("end", "finished")]:
        problems.append(f"the log must end with the end, got {logs[1][-1:]}")
    newest = [newest_checkpoint(folder) for folder in (reference, run)]
    best = [folder / "checkpoints" / BEST for folder in (reference, run)]
    if None in newest or not all(path.is_file() for path in best):
        return [*problems, "both runs must have a checkpoint and best weights"]
    for name, pair in (("last", [(one.arrays, one.state) for one in newest]), ("best", map(load_checkpoint, best))):
        wanted, got = (
            {"state": {**state, "trained_s": 0}, **{key: (a.dtype, a.shape, a.tobytes()) for key, a in arrays.items()}}
            for arrays, state in pair
        )
        different = [key for key in sorted({**wanted, **got}) if wanted.get(key) != got.get(key)]
        if different:
            problems.append(f"{name}: {len(different)} of {len(wanted)} arrays differ, the first {different[0]}")
    if len(checkpoints(run)) > keep + MARKS:
        problems.append(f"at most {keep} + {MARKS} checkpoints must be kept, got {len(checkpoints(run))}")
    partial = (run / "checkpoints").glob(".*.partial")
    return problems + [f"nothing half-written must stay, got {path.name}" for path in partial]


# --- The record as a table ---


def faults_table(record: Result) -> Table:
    """A row for each event after which kills came, of older records for each phase: kills, and steps done again."""
    hits, rows = defaultdict(list), []
    for kill in (kill for life in record["lives"] for kill in life["kills"]):
        hits[kill["hit"]].append(kill.get("redone"))
    for phase, redone in sorted(hits.items()):
        known = [steps for steps in redone if steps is not None]
        cells = [f"{statistics.median(known):g}", str(max(known))] if known else ["-", "-"]
        rows.append([phase, str(len(redone)), *cells])
    about = f"{record['workers']} workers, seed {record['seed']}, {record['steps']} steps in float32"
    wrong = sum(bool(life["problems"]) for life in record["lives"])
    caption = (
        f"Folders that lost something or ended otherwise than undisturbed: {wrong} of {len(record['lives'])}; kills "
        f"that came too late each time: {record['missed']}."
    )
    columns = ("killed while or after", "kills", "steps done again, median", "most")
    return Table(columns, rows, title=f"SIGKILL to one of {about}, {host_of(record)}", caption=caption)

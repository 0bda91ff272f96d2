"""Runs carried out one after the other, each training and each evaluation in a process of its own.

    carry_out(runs, store, out, Evaluation())

A fresh process makes the peaks of memory honest and starts every run on equal terms. The same call continues where one
was cut off: what is trained is not trained again, what is half trained goes on, what has current scores keeps them.
"""

import contextlib
import json
import math
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, List, Optional, Sequence, Tuple

from rich.console import Console

from cpu3d.atomic import writable_folder
from cpu3d.config import load_config
from cpu3d.errors import InputError
from cpu3d.evaluate import UNTOUCHED, scores_path
from cpu3d.inference_options import Inference
from cpu3d.progress import bar
from cpu3d.run_log import read_events
from cpu3d.scores import TOLERANCE_MM

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = (sys.executable, "-m", "cpu3d")
"""What every run is done by."""

LAST_LINES = 12
"""Of a failed run's log that are shown."""

POLL_S = 1.0


@dataclass(frozen=True)
class PlannedRun:
    """One run that is to be there: trained, and perhaps evaluated."""

    variant: str
    seed: int
    folder: Path
    options: Tuple[str, ...]
    """Of `train`, all but --store and --run; --steps and --seed are among them."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.variant}, seed {self.seed}"


@dataclass(frozen=True)
class Evaluation:
    """How runs are scored."""

    split: str = UNTOUCHED
    tolerance_mm: float = TOLERANCE_MM

    def __post_init__(self):
        if not (math.isfinite(self.tolerance_mm) and self.tolerance_mm >= 0):
            raise InputError(f"--tolerance must be a number of mm from 0 on, got {self.tolerance_mm}; 1 is usual")


class RunFailedError(InputError):
    """A process that did not end well."""

    def __init__(self, problem: str, exit_code: int):
        super().__init__(problem)
        self.exit_code = exit_code


def carry_out(
    runs: Sequence[PlannedRun],
    store: Path,
    out: Path,
    evaluation: Optional[Evaluation] = None,
    *,
    force: bool = False,
) -> None:
    """Train and, with an `evaluation`, score all of `runs`, in their order.

    What the processes say is added to out/logs/NAME-train.txt and NAME-evaluate.txt, NAME being a run's folder's. The
    first failure ends it with RunFailedError, which has the last lines. SIGINT and SIGTERM are passed on once, the
    process saves, and KeyboardInterrupt is raised.
    """
    logs = writable_folder(Path(out) / "logs", "folder of logs")
    for number, run in enumerate(runs, 1):
        label = f"{number}/{len(runs)} {run.name}"
        if is_trained(run):
            _say(f"{label}: trained already")
        else:
            command = [
                "train",
                "--store",
                str(store),
                "--run",
                str(run.folder),
                *run.options,
                *["--force"][: int(force)],
            ]
            _watched(command, logs / f"{run.folder.name}-train.txt", f"{label}: train", run)
        if evaluation is not None and not is_evaluated(run, evaluation):
            _evaluate(run, store, evaluation, logs, label)


def evaluate_folder(folder: Path, store: Path, out: Path, evaluation: Evaluation, label: str) -> None:
    """Score a trained run where it has no current scores, in a process of its own, as `carry_out` does."""
    run = PlannedRun(label, 0, folder, ())
    if not is_evaluated(run, evaluation):
        _evaluate(run, store, evaluation, writable_folder(Path(out) / "logs", "folder of logs"), label)


def is_trained(run: PlannedRun) -> bool:
    """Whether the run has taken all of its steps, or has stopped early."""
    if not ((run.folder / "config.json").is_file() and (run.folder / "checkpoints" / "last.npz").is_file()):
        return False
    options = list(run.options)
    wanted = int(options[options.index("--steps") + 1]) if "--steps" in options else load_config(run.folder).steps
    ends = [event for event in read_events(run.folder) if event.get("event") == "end"]
    if not ends:
        return False
    last = ends[-1]
    return last["reason"] == "early stop" or (last["reason"] == "finished" and last["step"] >= wanted)


def is_evaluated(run: PlannedRun, evaluation: Evaluation) -> bool:
    """Whether the run has scores of this kind, younger than their weights, of the network applied as it was trained."""
    path, weights = scores_path(run.folder, evaluation.split), run.folder / "checkpoints" / "best.npz"
    try:
        scores = json.loads(path.read_text(encoding="utf-8"))
        config, inference = load_config(run.folder), scores["inference"]
        usual = {**Inference().to_json(), "window": list(config.grid) if config.is_patch else None}
        return (
            inference == {**usual, "one_pass": not config.is_patch}
            and scores["split_hash"] == config.split_hash
            and scores["tolerance_mm"] == evaluation.tolerance_mm
            and scores["weights"] == "best"
            and path.stat().st_mtime >= weights.stat().st_mtime
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False  # none, or a damaged one: they are made again


# --- Private helpers ---


def _say(line: str) -> None:
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


def _evaluate(run: PlannedRun, store: Path, evaluation: Evaluation, logs: Path, label: str) -> None:
    command = ["evaluate", "--run", str(run.folder), "--store", str(store)]
    command += ["--split", evaluation.split, "--tolerance", f"{evaluation.tolerance_mm:g}"]
    _watched(command, logs / f"{run.folder.name}-evaluate.txt", f"{label}: evaluate")


def _watched(command: List[str], log: Path, label: str, run: Optional[PlannedRun] = None) -> None:
    """Do `python -m cpu3d command`, its words going to `log`, with a bar of the run's steps."""
    options = list(run.options) if run else []
    total = int(options[options.index("--steps") + 1]) if "--steps" in options else 1
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ cpu3d {shlex.join(command)}\n")
        file.flush()
        with bar(label, total) as advance, _child([*PROGRAM, *command], file) as (child, told):
            shown = 0
            while child.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(POLL_S)
                step = min(_last_step(run.folder), total) if run else 0
                advance(step - shown)
                shown = step
            if child.returncode == 0:
                advance(total - shown)
    if told:
        raise KeyboardInterrupt("the same command continues")
    if child.returncode != 0:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        code = child.returncode if child.returncode in (1, 2, 3) else 1
        ended = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        last = "\n  ".join(lines[-LAST_LINES:])
        raise RunFailedError(f"{label} must end well, got {ended}; all of it is in {log}, which ends:\n  {last}", code)


@contextlib.contextmanager
def _child(command: List[str], output: Any) -> Iterator[Tuple[subprocess.Popen, List[int]]]:
    """A process and the signals it was told of. SIGINT and SIGTERM of ours reach it as SIGINT, each once.

    It is in a session of its own, as Ctrl-C of a terminal would reach it twice, and the second one stops it unsaved.
    """
    told: List[int] = []
    child = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)

    def pass_on(number, frame):
        told.append(number)
        child.send_signal(signal.SIGINT)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield child, told
    except BaseException:
        child.terminate()
        raise
    finally:
        child.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _last_step(folder: Path) -> int:
    """The last step in the run's log, read from its end; 0 for none yet."""
    try:
        with (folder / "log.jsonl").open("rb") as file:
            file.seek(max(file.seek(0, 2) - 4096, 0))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            step = json.loads(line).get("step")
            if isinstance(step, int):
                return step
    return 0

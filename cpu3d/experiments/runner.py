"""Train and score runs, each in processes of its own.

    failed = carry_out(runs, store, folder)

A fresh process has its own peak of memory, and all runs start on equal terms. What is whole in a
run's folder is not done again: the training, the rules of its post-processing and the scores are
each judged by their own file, so the same call continues after one that was cut off.
"""

import contextlib
import os
import shlex
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Optional, Sequence, Tuple

from cpu3d.distributed.cluster import without_cluster
from cpu3d.distributed.worker_processes import wait_for_earlier
from cpu3d.errors import ENDINGS, DivergedError, InputError, Interrupted
from cpu3d.inference.out_of_fold import EVALUATION, is_scored
from cpu3d.inference.postprocessing.run_rules import postprocessing_of
from cpu3d.inference.scores import TOLERANCE_MM
from cpu3d.inference.scores_file import UNTOUCHED, has_current_scores
from cpu3d.run.checkpoint import is_trained
from cpu3d.run.config_json import load_config
from cpu3d.run.folds import CONFIG
from cpu3d.run.log import last_event
from cpu3d.run.rules import has_rules
from cpu3d.training.heartbeat_writer import HeartbeatWriter
from cpu3d.util.atomic import writable_folder
from cpu3d.util.child import PROGRAM, ROOT, forward_signals, how_ended, last_words, start
from cpu3d.util.progress import bar, say
from cpu3d.util.records import listed, without_passwords

POLL_S = 1.0


class RunFailedError(InputError):
    """A process that failed."""

    def __init__(self, problem: str, exit_code: int, why: str = "failed"):
        super().__init__(problem)
        self.exit_code = exit_code
        self.why = why  # in a few words, without paths


@dataclass(frozen=True)
class PlannedRun:
    """A run to train and to score."""

    name: str  # such as "fold 2/5"
    folder: Path
    options: Tuple[str, ...]  # of `train`, but for its folders
    steps: int = 0  # 0 while a budget of minutes has not decided them
    is_fold: bool = False
    """Scored on the cases that it holds out, by its last weights; else on the test cases, by its
    best weights and its rules."""
    again: bool = False  # whether it is tried again though it has diverged

    @property
    def is_trained(self) -> bool:
        """Whether no step is left, as it is planned."""
        steps = self.steps
        if not steps and (self.folder / CONFIG).is_file():
            steps = load_config(self.folder).steps
        return is_trained(self.folder, steps)

    @property
    def has_rules(self) -> bool:
        """Whether its own post-processing is decided, with the weights that it has now."""
        return has_rules(self.folder, load_config(self.folder).split_hash)

    @property
    def is_scored(self) -> bool:
        """Whether its cases are scored, by the weights and the rules that it has now."""
        if self.is_fold:
            return is_scored(self.folder)
        rules = postprocessing_of(self.folder, load_config(self.folder))
        return has_current_scores(self.folder, UNTOUCHED, TOLERANCE_MM, postprocessing=rules)

    def train(self, store: Path, log: Path) -> None:
        """Have it trained to its end, and its rules decided. Raises as `call`, RunFailedError if it
        has diverged, as it would again, and InputError if another process trains it."""
        if self.is_trained and self.has_rules:
            return
        if last_event(self.folder).get("event") == "diverged" and not self.again:
            problem = f"{self.name}: it diverged before; remove {self.folder} to train it again"
            raise RunFailedError(problem, DivergedError.exit_code, "train diverged")
        wait_for_earlier(self.folder, say)
        command = ["train", "--run", str(self.folder), "--store", str(store), *self.options]
        call(command, log, f"{self.name}: train", run=self.folder, steps=self.steps)
        if not (self.is_fold or self.has_rules):
            rule = f"{self.name}: post-processing must be decided before the run is scored"
            problem = f"{rule}, got none; see {log}, and repeat the same command"
            raise RunFailedError(problem, 1, "post-processing was not decided")

    def score(self, store: Path, log: Path) -> None:
        """Have its cases scored. Raises as `call`."""
        if self.is_scored:
            return
        command = ["evaluate", "--run", str(self.folder), "--store", str(store)]
        if self.is_fold:
            command += EVALUATION
        call(command, log, f"{self.name}: evaluate")


def carry_out(
    runs: Sequence[PlannedRun],
    store: Path,
    folder: Path,
    publish: Callable[[], None] = lambda: None,
) -> Dict[str, RunFailedError]:
    """Train and score the runs in their order; returns those that failed, by their names. `publish`
    is called after each that is new.

    Output of the processes is added to folder/logs. Raises the last error if all fail, and
    Interrupted after a signal, once the run that trains is saved."""
    logs = writable_folder(folder / "logs", "folder of logs")
    failed: Dict[str, RunFailedError] = {}
    with HeartbeatWriter(folder, say=say) as heartbeat:
        for number, run in enumerate(runs):
            if run.is_trained and run.has_rules and run.is_scored:
                say(f"{run.name}: trained and scored already")
                continue
            name = "-".join(run.folder.relative_to(folder).parts)
            try:
                heartbeat.phase(f"training {run.name}", step=number, steps=len(runs))
                run.train(store, logs / f"{name}-train.txt")
                heartbeat.phase(f"scoring {run.name}", step=number, steps=len(runs))
                run.score(store, logs / f"{name}-evaluate.txt")
            except RunFailedError as error:
                failed[run.name] = error
                if len(failed) == len(runs):
                    raise
                say(f"error: {error}")
            publish()
        heartbeat.phase("writing the page", step=len(runs), steps=len(runs))
        if failed:
            code = list(failed.values())[-1].exit_code
            heartbeat.note_end(f"{listed(failed)} failed; the others are done", code)
    return failed


def call(
    command: Sequence[str],
    log: Path,
    label: str,
    *,
    run: Optional[Path] = None,
    steps: int = 0,
) -> None:
    """Run `python -m cpu3d command`, its output added to `log`, with a bar of the steps that the
    folder `run` logs.

    Signals are passed on as SIGINT. Raises RunFailedError with the last lines that the command
    printed, and Interrupted when it ended after a signal.
    """
    steps = steps or 1
    shown = 0
    children = []
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(log.open("a", encoding="utf-8"))
        file.write(f"$ cpu3d {without_passwords(shlex.join(command))}\n")
        file.flush()
        begin = os.fstat(file.fileno()).st_size  # all before is of an earlier attempt
        advance = stack.enter_context(bar(label, steps))
        forwarding = forward_signals(children, as_signal=lambda number: signal.SIGINT)
        signals = stack.enter_context(forwarding)
        child = start([*PROGRAM, *command], file, without_cluster(os.environ), cwd=ROOT)
        children.append(child)
        stack.callback(child.wait)
        if signals:  # while it was being started
            child.send_signal(signal.SIGINT)
        while child.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(POLL_S)
            done = last_event(run, "step").get("step", 0) if run else 0
            step = min(done, steps)
            advance(step - shown)
            shown = step
        advance(steps - shown if child.returncode == 0 else 0)
    if signals:
        raise Interrupted("the same command continues", signals[0])
    if child.returncode:
        code = child.returncode
        ended = how_ended(code)
        words = last_words(log, begin)
        problem = f"{label} must succeed, got {ended}; its output is in {log}"
        problem += f", which ends:\n  {words}"
        why = f"{command[0]} ended with {ended}"
        if code == DivergedError.exit_code:
            why = f"{command[0]} diverged"
        raise RunFailedError(problem, code if code > 0 and code in ENDINGS else 1, why)

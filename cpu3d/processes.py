"""Trainings and evaluations, each in a process of its own.

    train_run(run, store, options, log, "1/5 fold 1/5: train", steps=720)
    evaluate_run(run, store, options, log, "1/5 fold 1/5: evaluate")

A fresh process has its own peak of memory, and all runs start on equal terms. A run that is trained
is not trained again, and a half-trained one continues.
"""

import contextlib
import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Optional, Sequence

from cpu3d.distributed.cluster import without_cluster
from cpu3d.distributed.worker_processes import wait_for_earlier
from cpu3d.errors import ENDINGS, DivergedError, InputError, Interrupted
from cpu3d.run.checkpoint import BEST, is_over
from cpu3d.run.config_json import load_config
from cpu3d.run.decided import is_decided
from cpu3d.run.log import last_end, last_event
from cpu3d.util.child import PROGRAM, ROOT, forward_signals, how_ended, last_words, start
from cpu3d.util.progress import bar, say
from cpu3d.util.records import without_passwords

POLL_S = 1.0


class RunFailedError(InputError):
    """A process that failed."""

    def __init__(self, problem: str, exit_code: int, why: str = "failed"):
        super().__init__(problem)
        self.exit_code = exit_code
        self.why = why  # in a few words, without paths


def train_run(
    run: Path,
    store: Path,
    options: Sequence[str],
    log: Path,
    label: str,
    *,
    steps: int,
    again: bool = False,
) -> None:
    """Have a run trained to its end of `steps` steps, 0 if they are not known yet, and its
    post-processing decided; `options` are those of `train` besides its folders. One that diverged
    is not tried again, as it would diverge again, unless `again`. Raises as `call`, and
    RunFailedError if another process trains it."""
    if is_trained(run, steps) and has_rules(run):
        say(f"{label}: trained already")
        return
    if last_event(run).get("event") == "diverged" and not again:
        problem = f"{label}: it diverged before; remove {run} to train it again"
        raise RunFailedError(problem, DivergedError.exit_code, "train diverged")
    try:
        wait_for_earlier(run, say)
    except InputError as error:
        raise RunFailedError(str(error), error.exit_code, "another process trains it") from None
    command = ["train", "--run", str(run), "--store", str(store), *options]
    call(command, log, f"{label}: train", run=run, steps=steps)


def evaluate_run(run: Path, store: Path, options: Sequence[str], log: Path, label: str) -> None:
    """Have a run scored; `options` are those of `evaluate` besides its folders."""
    command = ["evaluate", "--run", str(run), "--store", str(store), *options]
    call(command, log, f"{label}: evaluate")


def is_trained(run: Path, steps: int) -> bool:
    """Whether a run has taken `steps` steps, or has stopped early, and has its last and its best
    weights: `train` replaces those that are lost."""
    if not (run / "checkpoints" / BEST).is_file() or not is_over(run):
        return False
    end = last_end(run)
    return end["reason"] == "early stop" or (steps > 0 and end["step"] >= steps)


def has_rules(run: Path) -> bool:
    """Whether a trained run's post-processing is decided, with the weights that it has now."""
    return is_decided(run, load_config(run).split_hash)


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

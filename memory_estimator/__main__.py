"""Predict the memory and the time of a training step, or of a whole run, before anything is
allocated. Needs no TensorFlow.

    ./run.sh estimate --shape 240 240 160 --channels 4 --filters 16 --batch 1 --dtype bfloat16
    ./run.sh estimate --recipe paper-2020 --host-memory 1.5TiB --plan
    ./run.sh estimate --run runs/first --json
    ./run.sh estimate --store brats-store                       # the run that `train` would plan
    ./run.sh estimate --shape 200 220 30 --spacing 0.9 0.9 5    # as `train` would halve and pad it

For another host, give its memory, its kind of CPU and its cores:
    ./run.sh estimate --recipe paper-2020 --host-memory 6TiB --calibration amx --threads 56

Needs msgspec and rich, which prints its tables, and outside Linux psutil; --store also numpy,
nibabel and psutil.
"""

import argparse
import dataclasses
import functools
import json
import os
import sys
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from memory_estimator import planner
from memory_estimator.common.schema import add_options, from_args, given_options, option
from memory_estimator.common.table import Table, new_console
from memory_estimator.common.terminal import printing
from memory_estimator.common.units import by, format_bytes, format_seconds
from memory_estimator.estimate import STORE_NOTE, Component, Estimate
from memory_estimator.forecast_text import steps_table, time_line, verdict
from memory_estimator.host import INSTRUCTION_SETS
from memory_estimator.installed import as_typed
from memory_estimator.job import (
    Job,
    JobOptions,
    job_from,
    padding_note,
    policy_is_open,
    statistics_note,
    why_strides,
)
from memory_estimator.planned_host import PlannedHost
from memory_estimator.sources import JobSource, source_job
from memory_estimator.training import Forecast
from memory_estimator.workers import batch_of_all, worker_estimate, worker_share
from models.config import POLICIES
from models.strides import strides_line

FITS = 0
FAILED = 1
BAD_INPUT = 2
DOES_NOT_FIT = 3
INTERRUPTED = 130
EXIT_CODES = (
    f"Exit codes: {FITS} the job fits, {DOES_NOT_FIT} it does not, {BAD_INPUT} bad input, "
    f"{FAILED} failed (a full disk, a missing package), {INTERRUPTED} interrupted."
)

CALIBRATION_HELP = (
    f"constants that `calibrate` wrote, or those of {', '.join(INSTRUCTION_SETS)} "
    "(default: this host's)"
)


Block = Union[str, Table]  # what is printed for reading


@dataclass(frozen=True)
class Options(JobOptions):
    """All options."""

    cases: int = option(0, "training cases of an epoch (default: unknown)", "N")
    from_store: bool = option(
        False,
        "also count the data pipeline of `train`: the next batch, samples in preparation (default "
        "with --run)",
    )
    host_memory: str = option(
        "", "memory to fit into, such as 1.5TiB (default: free on this host)", "SIZE"
    )
    calibration: str = option("", CALIBRATION_HELP, "FILE")
    plan: bool = option(False, "print the largest jobs that fit that memory")
    json: bool = option(False, "print one JSON object")


def main(argv: Optional[List[str]] = None) -> int:
    """Print the estimate; returns one of the exit codes."""
    return printing(lambda: _estimate(argv))


def _estimate(argv: Optional[List[str]]) -> int:
    args = make_parser().parse_args(argv)
    try:
        # All is computed before anything is printed: bad input never leaves half a table.
        content, blocks = _answer(args)
        if hasattr(args, "json"):
            print(json.dumps(content))
        else:
            console = new_console()
            for block in blocks:
                console.print(block)
        if sys.stdout is not None:
            sys.stdout.flush()  # a full disk is noticed here
        return FITS if content["fits"] else DOES_NOT_FIT
    except (ValueError, OverflowError) as error:
        return _failed(str(error), BAD_INPUT)
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED)
    except BrokenPipeError:
        raise
    except OSError as error:
        # The disk is full: the rest is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        todo = "free space where it goes"
        return _failed(f"the output must be written, got {error.strerror}; {todo}", FAILED)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog=as_typed("./run.sh estimate"),
        description=as_typed(__doc__),
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, Options)
    return parser


def _failed(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


def _answer(args: argparse.Namespace) -> Tuple[Dict[str, Any], List[Block]]:
    """The answer as JSON content, and for reading."""
    options = from_args(Options, args)
    host = PlannedHost(calibration=options.calibration, memory=options.host_memory)
    source = _source(args, host)
    workers = source.workers
    if not hasattr(args, "threads"):
        args.threads = max(1, host.here.usable_cores // workers)
    if hasattr(args, "batch"):
        workers = 1  # another batch is one worker's
    whole = job_from(args, source.job)  # of all workers
    host_bytes = host.memory_bytes or host.here.free_bytes
    memory_bytes = host_bytes  # of a worker
    label = "given" if host.memory_bytes else "free on this host"
    if workers > 1:  # as `launch` has them on one host
        label = f"for each of {workers} workers on one host"
        memory_bytes //= workers
    forecast = source.schedule.forecast(
        whole,
        host.constants,
        host.accuracy,
        workers=workers,
        budget_bytes=memory_bytes if policy_is_open(args) else None,
    )
    job = worker_share(whole, workers).with_unet(policy=forecast.full.job.policy)
    estimator_alone = functools.cache(source.schedule.estimator(host.constants, host.accuracy))

    @functools.cache
    def estimator(job: Job) -> Estimate:
        """Of a worker that computes this."""
        return worker_estimate(estimator_alone(batch_of_all(job, workers)), workers)

    content = forecast.full.to_json()
    content["upper_bound_bytes"] = forecast.upper_bound_bytes
    content["epoch_s"] = forecast.epoch_s
    content["host_memory_bytes"] = host_bytes
    content["workers"] = workers
    content["fits"] = forecast.upper_bound_bytes <= memory_bytes
    content["strides"] = {
        "strides": job.unet.every_stride,
        "reason": source.strides_why or why_strides(args, job),
    }
    reason = "given"
    if forecast.choice:
        reason = forecast.choice.reason(f"{format_bytes(memory_bytes)} {label}")
    picked = forecast.choice is not None
    content["policy"] = {"name": job.policy, "picked": picked, "reason": reason}
    notes = [*source.notes, padding_note(args, job, source.job), *host.assumptions(forecast.full)]
    content["notes"] = [note for note in notes if note]
    here = None if options.calibration else host.here
    content["constants"]["basis"] = host.constants.basis(job, here)
    content["advice"] = []
    if not content["fits"]:
        smaller = planner.nearest(job, estimator, memory_bytes, source.grids)
        content["advice"] = [f"fits with {option}" for option in smaller]
        if not smaller:
            content["advice"] = ["no smaller setting fits; use another host"]
    fits = verdict(forecast.upper_bound_bytes, memory_bytes, label)
    blocks = [*_blocks(job, forecast, content), "\n  ".join((fits, *content["advice"]))]
    if forecast.schedule.steps:
        content["run"] = forecast.run_json()
    if options.plan:
        content["plan"], table = _plan(job, estimator, memory_bytes)
        blocks.append(table)
    return content, blocks


def _source(args: argparse.Namespace, host: PlannedHost) -> JobSource:
    """The source of the job. Raises ValueError as those that read it, and for what a store has
    itself."""
    if hasattr(args, "store") or not (hasattr(args, "run") or hasattr(args, "recipe")):
        args.dtype = getattr(args, "dtype", host.best_dtype)  # as `train` takes it
    if not hasattr(args, "store"):
        return source_job(args)
    chosen = given_options(JobOptions, args)
    # This command stands above all rooms, as `cpu3d` does; nothing else of its room does.
    from cpu3d.plan import source_of_store

    return source_of_store(host.here, chosen)


def _blocks(job: Job, forecast: Forecast, content: Mapping[str, Any]) -> List[Block]:
    """The content for reading."""
    blocks: List[Block] = [job.describe()]
    if content["strides"]["reason"]:
        blocks.append(strides_line(job.unet.every_stride, content["strides"]["reason"]))
    policy = content["policy"]
    if policy["picked"]:
        blocks.append(f"policy {policy['name']}: {policy['reason']}")
    if content["workers"] > 1:
        share = "memory and time of its share of each batch"
        blocks.append(f"of one of {content['workers']} workers, {share}")
    blocks += _tables(forecast, content["constants"]["basis"])
    if forecast.schedule.steps:
        steps = steps_table(forecast)
        blocks.append(dataclasses.replace(steps, title="The run that `train` plans"))
        blocks.append(f"time: {time_line(forecast)}")
    notes = [*content["notes"], statistics_note(job.unet.norm, job.batch, job.micro)]
    if job.from_store:
        notes.insert(0, STORE_NOTE)
    blocks += [f"note: {note}" for note in notes if note]
    return blocks


def _tables(forecast: Forecast, basis: str) -> List[Block]:
    """The bill, the predictions with their errors, and the source of the seconds."""
    predicted = forecast.full
    time_error = predicted.error("step_s")
    of_epoch = "add --cases N"
    if forecast.epoch_s is not None:
        of_epoch = f"{time_error}; {predicted.job.cases} cases, validation not counted"
    figures = []
    if predicted.allocator_peak_bytes:  # it counts no tensors below 256 KiB
        peak = format_bytes(predicted.allocator_peak_bytes)
        figures.append(("allocator peak of a step", peak, predicted.error("allocator_peak")))
    process_peak = format_bytes(predicted.process_peak_bytes)
    figures += [
        ("process peak of a step", process_peak, predicted.error("process_peak")),
        ("upper bound", format_bytes(predicted.upper_bound_bytes), predicted.margin),
        ("step", format_seconds(predicted.step_s), time_error),
        ("volume", format_seconds(predicted.volume_s), time_error),
        ("epoch", format_seconds(forecast.epoch_s), of_epoch),
    ]
    errors = "prediction error: unknown, as nothing similar was measured"
    if predicted.kind:
        errors = f"prediction error, median and worst, over {predicted.kind}"
    line = predicted.timeline
    title = f"Held at the peak, in the {line.peak_phase} ({line.peak_op})"
    tables = [_bill(title, predicted.components)]
    if predicted.extra:
        title = "Held by a run besides its steps, in the upper bound alone"
        tables.append(_bill(title, predicted.extra))
    tables.append(Table(("", "", errors), figures, "Predicted", names=3))
    return [*tables, f"seconds: {basis} ({predicted.constants.record})"]


def _bill(title: str, lines: Sequence[Component]) -> Table:
    rows = [(line.name, format_bytes(line.bytes), line.source) for line in lines]
    return Table(("", "bytes", "how it is known"), rows, title, names=3)


def _plan(
    job: Job, estimator: planner.Estimator, memory_bytes: int
) -> Tuple[List[Dict[str, Any]], Table]:
    """The largest batch, filters and extent that fit under each policy."""
    content = []
    rows = []
    for policy in POLICIES:
        largest = planner.plan(job.with_unet(policy=policy), estimator, memory_bytes)
        found: Dict[str, Any] = {"policy": policy}
        for name, value in largest.items():
            found[name] = value.to_json() if value else None
            cells = ("none", "", "")
            if value:
                sizes = {
                    "batch": str(value.job.batch),
                    "filters": str(value.job.unet.filters),
                    "extent": by(value.job.shape, " x "),
                }
                bound = format_bytes(value.upper_bound_bytes)
                cells = (sizes[name], bound, format_seconds(value.volume_s))
            rows.append((policy, name, *cells))
        content.append(found)
    title = f"The largest that fits {format_bytes(memory_bytes)}, with all other options as given"
    note = "batch: computed at once; a larger one fits in micro-batches (--micro-batch)"
    columns = ("policy", "", "largest", "upper bound", "a volume")
    return content, Table(columns, rows, title, note, names=2)


if __name__ == "__main__":
    sys.exit(main())

"""Predict the memory and the time of a training step, or of a whole run, before anything is
allocated. Needs no TensorFlow.

    ./run.sh estimate --shape 240 240 160 --channels 4 --filters 16 --batch 1 --dtype bfloat16
    ./run.sh estimate --recipe paper-2020 --host-memory 1.5TiB --plan
    ./run.sh estimate --run runs/first --json
    ./run.sh estimate --store brats-store                       # the run that `train` would plan
    ./run.sh estimate --shape 200 220 30 --spacing 0.9 0.9 5    # as `train` would halve and pad it

For another host, give its memory, its kind of CPU and its cores:
    ./run.sh estimate --recipe paper-2020 --host-memory 6TiB --calibration amx --threads 56

For several hosts that train together (predicted from one worker's step, its gradients and the
network):
    ./run.sh estimate --shape 240 240 160 --hosts 1 2 4 8 --link 25Gbit/s --cases 484 --epochs 25

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
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from memory_estimator import planner
from memory_estimator.common.schema import add_options, from_args, given_options, option
from memory_estimator.common.table import Table, new_console
from memory_estimator.common.terminal import printing, use_utf8
from memory_estimator.common.units import by, format_bytes, format_seconds
from memory_estimator.estimate import STORE_NOTE, Component, Estimate
from memory_estimator.forecast_text import steps_table, time_line, verdict
from memory_estimator.host import INSTRUCTION_SETS
from memory_estimator.installed import as_typed
from memory_estimator.job import (
    Job,
    JobOptions,
    box_note,
    job_from,
    padding_note,
    policy_is_open,
    statistics_note,
    why_depth,
    why_strides,
)
from memory_estimator.planned_host import PlannedHost
from memory_estimator.scaling import (
    ScalingOptions,
    check_options,
    several_hosts,
    worker_price,
    worker_share,
)
from memory_estimator.sources import JobSource, source_job
from memory_estimator.training import Forecast
from models.config import POLICIES
from models.strides import Shape3, strides_line

FITS = 0
FAILED = 1
BAD_INPUT = 2
DOES_NOT_FIT = 3
INTERRUPTED = 130
EXIT_CODES = (
    f"Exit codes: {FITS} the job fits, {DOES_NOT_FIT} it does not, {BAD_INPUT} bad input, "
    f"{FAILED} failed (a full disk, a missing package), {INTERRUPTED} interrupted."
)

OF_STORE = ("shape", "spacing", "channels", "classes", "cases")
"""Options whose values a store has itself."""

CALIBRATION_HELP = (
    f"constants that `calibrate` wrote, or those of {', '.join(INSTRUCTION_SETS)} "
    "(default: this host's)"
)


class Answer(NamedTuple):
    """What is printed."""

    content: Dict[str, Any]  # of JSON
    blocks: List[Union[str, Table]]  # the same for reading


@dataclass(frozen=True)
class Options(JobOptions):
    """All options but `ScalingOptions`."""

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
    if argv is None:
        use_utf8()
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
    except ModuleNotFoundError as error:
        package = (error.name or "?").partition(".")[0]
        todo = f"run `pip install {package}`"
        return _failed(f"package {package} must be installed, got none; {todo}", FAILED)
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
    add_options(parser, Options, ScalingOptions)
    return parser


def _failed(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


@dataclass(frozen=True)
class _Asked:
    """What is asked for: a step, alone or of a training, on a host."""

    host: PlannedHost
    source: JobSource
    whole: Job  # of all workers; its policy is for the time being if that is open
    workers: int  # each of which computes an equal share of every batch
    is_open: bool  # whether the policy is to be picked
    why: str  # what the strides follow from

    @property
    def job(self) -> Job:
        """That of one worker."""
        return worker_share(self.whole, self.workers)

    def forecast(self, memory_bytes: int) -> Forecast:
        """What it costs, with the policy picked for a worker's memory if it is open."""
        return self.source.course.forecast(
            self.whole,
            self.host.constants,
            self.host.accuracy,
            workers=self.workers,
            budget_bytes=memory_bytes if self.is_open else None,
        )

    @functools.cached_property
    def price(self) -> planner.Price:
        """The price of jobs of one worker; its upper bound is that of the whole run."""
        of_whole = self.source.course.price(self.host.constants, self.host.accuracy)
        return functools.cache(worker_price(of_whole, self.workers))


def _answer(args: argparse.Namespace) -> Answer:
    options = from_args(Options, args)
    scaling = from_args(ScalingOptions, args)
    check_options(args)
    host = PlannedHost(calibration=options.calibration, memory=options.host_memory)
    source = _source(args, host)
    whole, workers = _whole(args, source, host)
    notes = [
        why_depth(args, whole, source.job),
        box_note(args),
        padding_note(args, whole, source.job),
    ]
    if not any(hasattr(args, name) for name in ("dtype", "store", "run", "recipe")):
        notes.append(_dtype_note(whole, host))
    notes = [*source.notes, *filter(None, notes)]
    source = dataclasses.replace(source, notes=notes)
    asked = _Asked(
        host=host,
        source=source,
        whole=whole,
        workers=workers,
        is_open=policy_is_open(args),
        why=source.strides_why or why_strides(args, whole),
    )
    if scaling.hosts:
        return _several_hosts(scaling, asked)
    return _one_host(options, asked)


def _one_host(options: Options, asked: _Asked) -> Answer:
    """Memory and time on one host, whose memory is described, or else what is free here."""
    host = asked.host
    memory_bytes = host.memory_bytes
    label = "given"
    if not memory_bytes:
        memory_bytes = host.here.free_bytes
        label = "free on this host"
    workers = asked.workers
    if workers > 1:  # as `launch` has them on one host
        label = f"for each of {workers} workers on one host"
        memory_bytes //= workers
    forecast = asked.forecast(memory_bytes)
    predicted = forecast.full
    job = asked.job.with_unet(policy=predicted.job.policy)
    price = asked.price
    reason = "given"
    if forecast.choice:
        reason = forecast.choice.reason(f"{format_bytes(memory_bytes)} {label}")
    content = predicted.to_json()
    content["upper_bound_bytes"] = forecast.upper_bound_bytes
    content["host_memory_bytes"] = memory_bytes * workers
    if workers > 1:
        content["workers"] = workers
    content["fits"] = forecast.upper_bound_bytes <= memory_bytes
    content["advice"] = []
    if not content["fits"]:
        content["advice"] = _advice(job, price, memory_bytes, asked.source.grids)
    if forecast.course.steps:
        content["run"] = forecast.run_json()
    content["strides"] = _strides(job, asked.why)
    content["policy"] = {"name": job.policy, "picked": asked.is_open, "reason": reason}
    content["notes"] = [*asked.source.notes, *host.assumptions(predicted)]
    measured_here = None if options.calibration else host.here
    content["constants"]["basis"] = predicted.constants.basis(job, measured_here)
    blocks = _blocks(job, forecast, content)
    fits = verdict(forecast.upper_bound_bytes, memory_bytes, label)
    blocks.append("\n  ".join((fits, *content["advice"])))
    if options.plan:
        content["plan"], table = _plan(job, price, memory_bytes)
        blocks.append(table)
    return Answer(content, blocks)


def _dtype_note(job: Job, host: PlannedHost) -> str:
    """A sentence if `train` would take another dtype on the host than a job of no chosen one."""
    if job.unet.dtype == host.best_dtype:
        return ""
    other = f"`train` takes {host.best_dtype} on this host by itself"
    return (
        f"no dtype was given, so {job.unet.dtype} is estimated; {other}: --dtype {host.best_dtype}"
    )


def _source(args: argparse.Namespace, host: PlannedHost) -> JobSource:
    """The source of the job. Raises ValueError as those that read it, and for what a store has
    itself."""
    if not hasattr(args, "store"):
        return source_job(args)
    for name in OF_STORE:
        if hasattr(args, name):
            todo = "leave one of them out"
            if name == "spacing":
                todo += "; `prepare --spacing` makes stores of another"
            raise ValueError(f"--{name} must come without --store, which has it, got both; {todo}")
    args.dtype = getattr(args, "dtype", host.best_dtype)
    chosen = given_options(JobOptions, args)
    folder = chosen.pop("store")
    chosen.pop("threads", None)
    # This command stands above all rooms, as `cpu3d` does; nothing else of its room does.
    from cpu3d.plan import source_of_store

    return source_of_store(folder, host.here, chosen)


def _whole(args: argparse.Namespace, source: JobSource, host: PlannedHost) -> Tuple[Job, int]:
    """The job of all workers, and their number: each computes an equal share of each batch."""
    if not hasattr(args, "threads"):
        workers_here = source.workers
        if hasattr(args, "hosts"):
            workers_here = getattr(args, "workers_per_host", 1)
        args.threads = max(1, host.here.usable_cores // workers_here)
    workers = 1 if hasattr(args, "batch") else source.workers  # another batch is one worker's
    return job_from(args, source.job), workers


def _strides(job: Job, why: str) -> Dict[str, Any]:
    """The strides of a job as JSON content, and what they follow from."""
    return {"strides": job.unet.every_stride, "reason": why}


def _advice(
    job: Job,
    price: planner.Price,
    memory_bytes: int,
    grids: Optional[Sequence[Tuple[str, Shape3]]],
) -> List[str]:
    """Changes that make a job fit which does not."""
    options = planner.nearest(job, price, memory_bytes, grids)
    if not options:
        return ["no smaller setting fits; use another host"]
    return [f"fits with {option}" for option in options]


def _blocks(job: Job, forecast: Forecast, content: Mapping[str, Any]) -> List[Union[str, Table]]:
    """The content for reading."""
    blocks: List[Union[str, Table]] = _described(job, content["strides"]["reason"])
    policy = content["policy"]
    if policy["picked"]:
        blocks.append(f"policy {policy['name']}: {policy['reason']}")
    if "workers" in content:
        share = "memory and time of its share of each batch"
        blocks.append(f"of one of {content['workers']} workers, {share}")
    blocks += _tables(forecast.full, content["constants"]["basis"])
    if "run" in content:
        steps = steps_table(forecast, errors=False)
        blocks.append(dataclasses.replace(steps, title="The run that `train` plans"))
        blocks.append(f"time: {time_line(forecast)}")
    notes = [*content["notes"], statistics_note(job.unet.norm, job.batch, job.micro)]
    if job.from_store:
        notes.insert(0, STORE_NOTE)
    blocks += [f"note: {note}" for note in notes if note]
    return blocks


def _described(job: Job, why: str) -> List[Union[str, Table]]:
    """A job for reading, and its strides if they follow from something."""
    lines: List[Union[str, Table]] = [job.describe()]
    if why:
        lines.append(strides_line(job.unet.every_stride, why))
    return lines


def _several_hosts(options: ScalingOptions, asked: _Asked) -> Answer:
    """Time on several hosts. Whether it fits is answered if their memory is described: this host's
    is another."""
    job = asked.job
    price = asked.price
    if options.global_batch:  # the fewest workers have the largest share of it
        fewest = min(options.hosts) * options.workers_per_host
        job = dataclasses.replace(job, batch=max(1, options.global_batch // fewest))
    memory_bytes = asked.host.memory_bytes // options.workers_per_host
    price_of_worker = worker_price(price, max(options.hosts) * options.workers_per_host)
    if memory_bytes and asked.is_open:
        choice = planner.fastest_that_fits(job, price_of_worker, memory_bytes)
        job = job.with_unet(policy=choice.policy)
    content, table = several_hosts(options, price(job))
    worker = price_of_worker(job)
    notes = asked.source.notes
    content["strides"] = _strides(job, asked.why)
    content["notes"] = list(notes)
    blocks = [*_described(job, asked.why), table, *(f"note: {note}" for note in notes)]
    if memory_bytes:
        fits = verdict(worker.upper_bound_bytes, memory_bytes, "its share of a host")
        blocks.append(f"a worker {fits}")
    content["upper_bound_bytes"] = worker.upper_bound_bytes
    content["fits"] = not memory_bytes or worker.upper_bound_bytes <= memory_bytes
    return Answer(content, blocks)


def _tables(predicted: Estimate, basis: str) -> List[Union[str, Table]]:
    """The bill, the predictions with their errors, and the source of the seconds."""
    time_error = predicted.error("step_s")
    of_epoch = "add --cases N"
    if predicted.epoch_s is not None:
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
        ("epoch", format_seconds(predicted.epoch_s), of_epoch),
    ]
    errors = "prediction error: unknown, as nothing similar was measured"
    if predicted.kind:
        errors = f"prediction error, median and worst, over {predicted.kind}"
    line = predicted.timeline
    title = f"Held at the peak, in the {line.peak_phase} ({line.peak_op})"
    tables = [_bill(title, predicted.components)]
    if predicted.beside:
        title = "Held by a run besides its steps, in the upper bound alone"
        tables.append(_bill(title, predicted.beside))
    tables.append(Table(("", "", errors), figures, "Predicted", names=3))
    return [*tables, f"seconds: {basis} ({predicted.constants.record})"]


def _bill(title: str, lines: Sequence[Component]) -> Table:
    rows = [(line.name, format_bytes(line.bytes), line.source) for line in lines]
    return Table(("", "bytes", "how it is known"), rows, title, names=3)


def _plan(job: Job, price: planner.Price, memory_bytes: int) -> Tuple[List[Dict[str, Any]], Table]:
    """The largest batch, filters and extent that fit under each policy."""
    content = []
    rows = []
    for policy in POLICIES:
        largest = planner.plan(job.with_unet(policy=policy), price, memory_bytes)
        found: Dict[str, Any] = {"policy": policy}
        for name, value in largest.items():
            found[name] = value.to_json() if value else None
            cells = ("none", "", "")
            if value:
                bound = format_bytes(value.upper_bound_bytes)
                cells = (_size_of(name, value.job), bound, format_seconds(value.volume_s))
            rows.append((policy, "batch at once" if name == "batch" else name, *cells))
        content.append(found)
    title = f"The largest that fits {format_bytes(memory_bytes)}, with all other options as given"
    note = (
        "batch at once: in micro-batches (--micro-batch), a larger batch takes the memory of one "
        "and a set of gradients"
    )
    columns = ("policy", "", "largest", "upper bound", "a volume")
    return content, Table(columns, rows, title, note, names=2)


def _size_of(name: str, job: Job) -> str:
    """A job's "batch", "filters" or "extent"."""
    if name == "batch":
        return str(job.batch)
    return str(job.unet.filters) if name == "filters" else by(job.shape, " x ")


if __name__ == "__main__":
    sys.exit(main())

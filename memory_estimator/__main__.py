"""Predict the memory and the time of a training step before anything is allocated. Needs no
TensorFlow.

    ./run.sh estimate --shape 240 240 160 --channels 4 --filters 16 --batch 1 --dtype bfloat16
    ./run.sh estimate --recipe paper-2020 --host-memory 1.5TiB --plan
    ./run.sh estimate --run runs/first --json

For another host, give its memory, its kind of CPU and its cores:
    ./run.sh estimate --recipe paper-2020 --host-memory 6TiB --calibration amx --threads 56

For several hosts that train together (predicted from one worker's step, its gradients and the
network):
    ./run.sh estimate --shape 240 240 160 --hosts 1 2 4 8 --link 25Gbit/s --cases 484 --epochs 25

Needs msgspec and rich, which prints its tables, and outside Linux psutil.
"""

import argparse
import dataclasses
import functools
import json
import os
import sys
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from memory_estimator import planner
from memory_estimator.accuracy import load_accuracy
from memory_estimator.calibration import HostConstants, find_constants, load_constants
from memory_estimator.common.schema import add_options, from_args, option
from memory_estimator.common.table import Table, new_console
from memory_estimator.common.terminal import printing, use_utf8
from memory_estimator.common.units import by, format_bytes, format_seconds, parse_bytes
from memory_estimator.estimate import STORE_NOTE, Component, Estimate, estimate
from memory_estimator.host import INSTRUCTION_SETS, Host, read_host
from memory_estimator.installed import as_typed, has_tensorflow, installed_versions
from memory_estimator.job import (
    Job,
    JobOptions,
    JobSource,
    job_from,
    policy_is_open,
    source_job,
    statistics_note,
)
from memory_estimator.scaling import (
    ScalingOptions,
    check_options,
    several_hosts,
    worker_price,
    worker_share,
)
from models.config import POLICIES
from models.native.build import check_platform, find_compiler

FITS, FAILED, BAD_INPUT, DOES_NOT_FIT, INTERRUPTED = 0, 1, 2, 3, 130
EXIT_CODES = (
    f"Exit codes: {FITS} the job fits, {DOES_NOT_FIT} it does not, {BAD_INPUT} bad input, "
    f"{FAILED} failed (a full disk, a missing package), {INTERRUPTED} interrupted."
)

CALIBRATION_HELP = f"constants that `calibrate` wrote, or those of {', '.join(INSTRUCTION_SETS)} (default: this host's)"

Answer = Tuple[Dict[str, Any], List[Union[str, Table]]]  # JSON content, and the same for reading


@dataclass(frozen=True)
class Options(JobOptions):
    """All options but `ScalingOptions`."""

    cases: int = option(0, "training cases of an epoch (default: unknown)", "N")
    from_store: bool = option(
        False,
        "also count the data pipeline of `train`: the next batch, samples in preparation (default with --run)",
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
        content, parts = _answer(args)
        if hasattr(args, "json"):
            print(json.dumps(content))
        else:
            console = new_console()
            for part in parts:
                console.print(part)
        if sys.stdout is not None:
            sys.stdout.flush()  # a full disk is noticed here
        return FITS if content["fits"] else DOES_NOT_FIT
    except (ValueError, OverflowError) as error:
        return _failed(str(error), BAD_INPUT)
    except ModuleNotFoundError as error:
        package = (error.name or "?").partition(".")[0]
        return _failed(
            f"package {package} must be installed, got none; run `pip install {package}`", FAILED
        )
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED)
    except BrokenPipeError:
        raise
    except OSError as error:
        # The disk is full: the rest is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _failed(str(error), FAILED)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        as_typed("./run.sh estimate"), None, as_typed(__doc__), EXIT_CODES
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_options(parser, Options, ScalingOptions)
    return parser


def verdict(estimate: Estimate, memory_bytes: int, label: str) -> str:
    """Whether it fits, in one sentence; `label` describes `memory_bytes`, such as "free on this
    host"."""
    spare_bytes = memory_bytes - estimate.upper_bound_bytes
    fits, rest = ("does not fit", "short") if spare_bytes < 0 else ("fits", "to spare")
    needed, memory, difference = map(
        format_bytes, (estimate.upper_bound_bytes, memory_bytes, abs(spare_bytes))
    )
    return f"{fits}: needs up to {needed}, {memory} {label}, {difference} {rest}"


def _failed(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


def _answer(args: argparse.Namespace) -> Answer:
    options, scaling = from_args(Options, args), from_args(ScalingOptions, args)
    check_options(args)
    host = functools.cache(read_host)  # not read if the options describe one
    source, given_bytes = (
        source_job(args),
        parse_bytes(options.host_memory) if options.host_memory else None,
    )
    job, workers = _share(args, source, host)
    price, is_open = _price(options, host), policy_is_open(args)
    if scaling.hosts:
        return _several_hosts(
            scaling, job, price, given_bytes and given_bytes // scaling.workers_per_host, is_open
        )
    memory_bytes, label = (
        (given_bytes, "given") if given_bytes else (host().free_bytes, "free on this host")
    )
    if workers > 1:  # as `launch` has them on one host
        price, label = worker_price(price, workers), f"for each of {workers} workers on one host"
        memory_bytes //= workers
    choice = planner.fastest_that_fits(job, price, memory_bytes) if is_open else None
    predicted = choice.estimate if choice else price(job)
    job = job.with_unet(policy=predicted.job.policy)
    content = {
        **predicted.to_json(),
        "host_memory_bytes": memory_bytes * workers,
        **({"workers": workers} if workers > 1 else {}),
        "fits": predicted.upper_bound_bytes <= memory_bytes,
        "advice": _advice(job, predicted, price, memory_bytes),
        "policy": {"name": job.policy, "picked": bool(choice), "reason": "given"},
        "notes": [*source.notes, *_assumptions(options, predicted, host)],
    }
    if choice:
        content["policy"]["reason"] = choice.reason(f"{format_bytes(memory_bytes)} {label}")
    content["constants"]["basis"] = predicted.constants.basis(
        job, None if options.calibration else host()
    )
    parts = _parts(job, predicted, content)
    parts.append("\n  ".join((verdict(predicted, memory_bytes, label), *content["advice"])))
    if options.plan:
        content["plan"], table = _plan(job, price, memory_bytes)
        parts.append(table)
    return content, parts


def _share(
    args: argparse.Namespace, source: JobSource, host: Callable[[], Host]
) -> Tuple[Job, int]:
    """The job of one worker, and the number of workers that compute such a share of each batch."""
    if not hasattr(args, "threads"):
        workers_here = (
            getattr(args, "workers_per_host", 1) if hasattr(args, "hosts") else source.workers
        )
        args.threads = max(1, host().usable_cores // workers_here)
    workers = 1 if hasattr(args, "batch") else source.workers  # another batch is one worker's
    return worker_share(job_from(args, source.job), workers), workers


def _price(options: Options, host: Callable[[], Host]) -> planner.Price:
    """The estimate of a job on the host of --calibration, else on this one."""
    constants = _constants(options, host)
    # A host that is described has no engines installed here: the recorded ones are assumed.
    is_described = options.calibration or options.host_memory
    accuracy = load_accuracy(versions=None if is_described else installed_versions())
    return functools.cache(lambda job: estimate(job, constants, accuracy))


def _constants(options: Options, host: Callable[[], Host]) -> HostConstants:
    """Those of --calibration, else of what computes on this host, or on one with its CPU that is
    set up as it should be: own operations run there."""
    if options.calibration:
        return load_constants(options.calibration)
    if not _is_assumed(options, host):
        return find_constants(host())
    described = dataclasses.replace(host(), is_here=False)
    return find_constants(described) if described.instructions else load_constants("avx2")


def _is_assumed(options: Options, host: Callable[[], Host]) -> bool:
    """Whether own operations are assumed, and not asked for: on a host that is described, and here
    before TensorFlow is installed, as the set-up builds both."""
    if options.host_memory:
        return True
    return not (has_tensorflow() or host().instructions or _no_compiler())


def _no_compiler() -> str:
    """Why a set-up here could not build own operations; "" if it could."""
    try:
        check_platform()
        find_compiler()
    except OSError as error:
        return str(error)
    return ""


def _assumptions(options: Options, predicted: Estimate, host: Callable[[], Host]) -> List[str]:
    """Notes on the assumptions of an estimate."""
    notes = []
    if not predicted.constants.instructions:
        why = host().own.why or _no_compiler()
        rough = "TensorFlow's layers compute here, so memory and time are rough"
        notes.append(f"{rough}; no own operations: {why}")
    elif not options.calibration and _is_assumed(options, host):
        name = predicted.constants.instructions
        setup = as_typed("./run.sh setup")
        notes.append(f"assumes that own operations compute, with {name}, as `{setup}` builds them")
    constants, threads = predicted.constants, predicted.job.threads
    if constants.instructions and threads != constants.threads:
        busy = f"{threads} threads share the work of an operation in pieces, which keep them busy"
        notes.append(f"assumes that {busy} {predicted.busy_share:.0%} of its time")
    if predicted.kind and predicted.job.engine not in predicted.accuracy.versions:
        notes.append(f"assumes the recorded engine, {' or '.join(predicted.kind.versions)}")
    return notes


def _advice(job: Job, predicted: Estimate, price: planner.Price, memory_bytes: int) -> List[str]:
    """Changes that make a job fit; none if it does."""
    if predicted.upper_bound_bytes <= memory_bytes:
        return []
    smaller = [f"fits with {option}" for option in planner.nearest(job, price, memory_bytes)]
    return smaller or ["no smaller setting fits; use another host"]


def _parts(job: Job, predicted: Estimate, content: Mapping[str, Any]) -> List[Union[str, Table]]:
    """The content for reading."""
    policy, workers = content["policy"], content.get("workers")
    notes = (*content["notes"], statistics_note(job.unet.norm, job.batch, job.micro))
    return [
        job.describe(),
        *([f"policy {policy['name']} picked: {policy['reason']}"] if policy["picked"] else []),
        *(
            [f"of one of {workers} workers, memory and time of its share of each batch"]
            if workers
            else []
        ),
        *_tables(predicted, content["constants"]["basis"]),
        *([f"note: {STORE_NOTE}"] if job.from_store else []),
        *[f"note: {note}" for note in notes if note],
    ]


def _several_hosts(
    options: ScalingOptions,
    job: Job,
    price: planner.Price,
    memory_bytes: Optional[int],
    is_open: bool,
) -> Answer:
    """Time on several hosts. `memory_bytes` are a worker's, if they were given: this host's memory
    is another."""
    fewest, most = (number(options.hosts) * options.workers_per_host for number in (min, max))
    if options.global_batch:  # the fewest workers have the largest share of it
        job = dataclasses.replace(job, batch=max(1, options.global_batch // fewest))
    price_of_worker = worker_price(price, most)
    if memory_bytes and is_open:
        job = job.with_unet(
            policy=planner.fastest_that_fits(job, price_of_worker, memory_bytes).policy
        )
    content, table = several_hosts(options, price(job))
    worker, parts = price_of_worker(job), [job.describe(), table]
    if memory_bytes:
        parts.append(f"a worker {verdict(worker, memory_bytes, 'its share of a host')}")
    needed = worker.upper_bound_bytes
    return {
        **content,
        "upper_bound_bytes": needed,
        "fits": not memory_bytes or needed <= memory_bytes,
    }, parts


def _tables(predicted: Estimate, basis: str) -> List[Union[str, Table]]:
    """The bill, the predictions with their errors, and the source of the seconds."""
    time, epoch, line = (
        predicted.error("step_s"),
        ("epoch", "-", "add --cases N"),
        predicted.timeline,
    )
    if predicted.epoch_s is not None:
        error = f"{time}; {predicted.job.cases} cases, validation not counted"
        epoch = ("epoch", format_seconds(predicted.epoch_s), error)
    figures = (
        (
            "allocator peak",
            format_bytes(predicted.allocator_peak_bytes),
            predicted.error("allocator_peak"),
        ),
        (
            "process peak",
            format_bytes(predicted.process_peak_bytes),
            predicted.error("process_peak"),
        ),
        ("upper bound", format_bytes(predicted.upper_bound_bytes), predicted.margin),
        ("step", format_seconds(predicted.step_s), time),
        ("volume", format_seconds(predicted.volume_s), time),
        epoch,
    )
    kind = predicted.kind
    errors = (
        f"error, median and worst, over {kind}"
        if kind
        else "error: no step like this one was measured"
    )
    bills = [
        _bill(f"Held at the peak, in the {line.peak_phase} ({line.peak_op})", predicted.components)
    ]
    if predicted.beside:
        bills.append(
            _bill("Held by a run besides its steps, in the upper bound alone", predicted.beside)
        )
    table = Table(("", "", errors), figures, "Predicted", names=3)
    return [*bills, table, f"seconds: {basis} ({predicted.constants.record})"]


def _bill(title: str, lines: Sequence[Component]) -> Table:
    rows = [(line.name, format_bytes(line.bytes), line.source) for line in lines]
    return Table(("", "bytes", "how it is known"), rows, title, names=3)


def _plan(job: Job, price: planner.Price, memory_bytes: int) -> Tuple[List[Dict[str, Any]], Table]:
    """The largest batch, filters and extent that fit under each policy."""
    content, rows = [], []
    for policy in POLICIES:
        largest = planner.plan(job.with_unet(policy=policy), price, memory_bytes)
        content.append(
            {
                "policy": policy,
                **{name: value and value.to_json() for name, value in largest.items()},
            }
        )
        for name, value in largest.items():
            cells = ("none", "", "")
            if value:
                fit = value.job
                sizes = {
                    "batch": fit.batch,
                    "filters": fit.unet.filters,
                    "extent": by(fit.shape, " x "),
                }
                cells = (
                    str(sizes[name]),
                    format_bytes(value.upper_bound_bytes),
                    format_seconds(value.volume_s),
                )
            rows.append((policy, "batch at once" if name == "batch" else name, *cells))
    title = f"The largest that fits {format_bytes(memory_bytes)}, with all other options as given"
    note = "batch at once: in parts (--micro-batch), a larger batch takes the memory of one part and a set of gradients"
    return content, Table(
        ("policy", "", "largest", "upper bound", "a volume"), rows, title, note, names=2
    )


if __name__ == "__main__":
    sys.exit(main())

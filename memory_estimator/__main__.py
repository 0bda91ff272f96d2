"""Predict the memory and the time of a training step before anything is allocated. Needs no TensorFlow.

    ./run.sh estimate --shape 240 240 160 --channels 4 --filters 16 --batch 1 --dtype bfloat16
    ./run.sh estimate --recipe paper-2020 --host-memory 1.5TiB --plan
    ./run.sh estimate --run runs/first --json

For another host, give its memory, its kind of CPU and its cores:
    ./run.sh estimate --recipe paper-2020 --host-memory 6TiB --calibration amx --threads 56

For several hosts that train together (predicted from one worker's step, its gradients and the network):
    ./run.sh estimate --shape 240 240 160 --hosts 1 2 4 8 --link 25Gbit/s --cases 484 --epochs 25

Needs msgspec and rich, which prints its tables, and outside Linux psutil.
Exit codes: 0 the job fits, 3 it does not, 2 bad input, 1 failed (a full disk, a missing package), 130 interrupted.
"""

import argparse
import dataclasses
import functools
import json
import os
import sys
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from memory_estimator import planner
from memory_estimator.accuracy import load_accuracy
from memory_estimator.calibration import find_constants, load_constants
from memory_estimator.common.schema import add_options, from_args, option
from memory_estimator.common.table import Table, new_console
from memory_estimator.common.units import format_bytes, format_seconds, parse_bytes
from memory_estimator.estimate import STORE_NOTE, Component, Estimate, estimate
from memory_estimator.host import INSTRUCTION_SETS, read_host
from memory_estimator.installed import as_typed, installed_versions
from memory_estimator.job import Job, JobOptions, job_from, policy_is_open, source_job, statistics_note
from memory_estimator.scaling import ScalingOptions, check_options, of_worker, several_hosts, share_of
from models.config import POLICIES

FITS, FAILED, BAD_INPUT, DOES_NOT_FIT, INTERRUPTED = 0, 1, 2, 3, 130  # exit codes

CALIBRATION_HELP = f"constants that `calibrate` wrote, or of {', '.join(INSTRUCTION_SETS)} (default: this host's)"

Answer = Tuple[Dict[str, Any], List[Union[str, Table]]]  # JSON content, and the same for reading


@dataclass(frozen=True)
class Options(JobOptions):
    """What is asked of a job, besides `ScalingOptions`."""

    cases: int = option(0, "training cases of an epoch (default: unknown)", "N")
    from_store: bool = option(
        False, "count what feeds the step in `train` too: the next batch, a volume in preparation (default with --run)"
    )
    host_memory: str = option("", "memory to fit into, such as 1.5TiB (default: free on this host)", "SIZE")
    calibration: str = option("", CALIBRATION_HELP, "FILE")
    plan: bool = option(False, "print what fits that memory")
    json: bool = option(False, "print one JSON object")


def main(argv: Optional[List[str]] = None) -> int:
    """Print the estimate; returns one of the exit codes."""
    args = make_parser().parse_args(argv)
    try:
        # All is worked out before anything is printed: bad input then leaves half a table nowhere.
        content, parts = _answer(args)
        if hasattr(args, "json"):
            print(json.dumps(content))
        else:
            console = new_console()
            for part in parts:
                console.print(part)
        sys.stdout.flush()  # a reader that went away is noticed here, not when Python ends
        return FITS if content["fits"] else DOES_NOT_FIT
    except (ValueError, OverflowError) as error:
        return _failed(str(error), BAD_INPUT)
    except ModuleNotFoundError as error:
        package = (error.name or "?").partition(".")[0]
        return _failed(f"package {package} must be installed, got none; run `pip install {package}`", FAILED)
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED)
    except OSError as error:
        # The reader of our output went away, as `head` does, or the disk is full: what is left goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED if isinstance(error, BrokenPipeError) else _failed(str(error), FAILED)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=as_typed("./run.sh estimate"), description=as_typed(__doc__))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_options(parser, Options, ScalingOptions)
    return parser


def verdict(estimate: Estimate, memory_bytes: int, whose: str) -> str:
    """Whether it fits, in one sentence; `whose` says what `memory_bytes` is, such as "free on this host"."""
    needed = estimate.upper_bound_bytes
    fits, left = needed <= memory_bytes, format_bytes(abs(memory_bytes - needed))
    return (
        f"{'fits' if fits else 'does not fit'}: needs up to {format_bytes(needed)}, "
        f"{format_bytes(memory_bytes)} {whose}, {left} {'to spare' if fits else 'short'}"
    )


def _failed(why: str, code: int) -> int:
    print(f"error: {why}", file=sys.stderr)
    return code


def _answer(args: argparse.Namespace) -> Answer:
    options, scaling = from_args(Options, args), from_args(ScalingOptions, args)
    check_options(args)
    host = functools.lru_cache(maxsize=None)(read_host)  # not asked where everything is given
    given_bytes = parse_bytes(options.host_memory) if options.host_memory else None
    source = source_job(args)
    if options.threads is None:
        workers_here = source.workers if scaling.hosts is None else scaling.workers_per_host
        args.threads = max(1, host().usable_cores // workers_here)
    job = job_from(args, source.job)
    workers = 1 if hasattr(args, "batch") else source.workers  # another batch is one worker's
    job = share_of(job, workers)
    named = options.calibration
    constants = load_constants(named) if named else find_constants(host())
    # Of a host that is described nothing is installed here: its engines are taken to be those that were recorded.
    accuracy = load_accuracy(versions=None if named or given_bytes else installed_versions())
    price = functools.lru_cache(maxsize=None)(lambda one: estimate(one, constants, accuracy))
    is_open = policy_is_open(args)
    if scaling.hosts is not None:
        return _several_hosts(scaling, job, price, given_bytes and given_bytes // scaling.workers_per_host, is_open)
    memory_bytes, whose = (given_bytes, "given") if given_bytes else (host().free_bytes, "free on this host")
    if workers > 1:  # as `launch` has them on one host
        price, whose = of_worker(price, workers), f"for each of {workers} workers on one host"
        memory_bytes //= workers
    choice = planner.fastest_that_fits(job, price, memory_bytes) if is_open else None
    found = choice.estimate if choice else price(job)
    job, fits = job.with_unet(policy=found.job.policy), found.upper_bound_bytes <= memory_bytes
    smaller = [] if fits else planner.nearest(job, price, memory_bytes)
    nothing = [] if fits or smaller else ["nothing smaller fits either; use another host"]
    reason = choice.reason(f"{format_bytes(memory_bytes)} {whose}") if choice else "given"
    assumed = []
    if not (named or given_bytes or host().instructions):
        assumed.append("a step is predicted as own kernels compute it, which take a CPU with AVX2")
    if found.kind and job.engine not in accuracy.versions:
        assumed.append(f"the engine is taken to be what was recorded, {' or '.join(found.kind.versions)}")
    content: Dict[str, Any] = {
        **found.to_json(),
        "host_memory_bytes": memory_bytes * workers,
        **({"workers": workers} if workers > 1 else {}),
        "fits": fits,
        "advice": [f"fits with {option}" for option in smaller] + nothing,
        "policy": {"name": job.policy, "picked": bool(choice), "reason": reason},
        "notes": [*source.notes, *assumed],
    }
    content["constants"]["basis"] = found.constants.basis(job, None if named else host())
    shared = [f"of one of {workers} workers, memory and time of its share of each batch"] if workers > 1 else []
    parts = [job.describe(), *shared, *_tables(found, content["constants"]["basis"])]
    if choice:
        parts.insert(1, f"policy {job.policy} picked: {reason}")
    notes = (
        STORE_NOTE if job.from_store else "",
        *content["notes"],
        statistics_note(job.unet.norm, job.batch, job.micro),
    )
    parts += [f"note: {note}" for note in notes if note]
    parts.append("\n  ".join((verdict(found, memory_bytes, whose), *content["advice"])))
    if options.plan:
        content["plan"], table = _plan(job, price, memory_bytes)
        parts.append(table)
    return content, parts


def _several_hosts(
    options: ScalingOptions, job: Job, price: planner.Price, memory_bytes: Optional[int], is_open: bool
) -> Answer:
    """Time on several hosts. Memory, a worker's, is looked at where it was given: this host's says nothing of it."""
    workers = max(options.hosts) * options.workers_per_host
    share = job
    if options.global_batch:  # the fewest workers have the largest share of it
        share = dataclasses.replace(
            job, batch=max(1, options.global_batch // (min(options.hosts) * options.workers_per_host))
        )

    price_of_worker = of_worker(price, workers)
    if memory_bytes and is_open:
        share = share.with_unet(policy=planner.fastest_that_fits(share, price_of_worker, memory_bytes).policy)
    content, table = several_hosts(options, price(share))
    worker, parts = price_of_worker(share), [share.describe(), table]
    if memory_bytes:
        parts.append(f"a worker {verdict(worker, memory_bytes, 'its share of a host')}")
    needed = worker.upper_bound_bytes
    return {**content, "upper_bound_bytes": needed, "fits": not memory_bytes or needed <= memory_bytes}, parts


def _tables(found: Estimate, basis: str) -> List[Union[str, Table]]:
    """The bill, the predictions with their errors, and what speed and baseline rest on."""
    job, constants = found.job, found.constants
    time, epoch = found.error("step_s"), ("epoch", "-", "add --cases N")
    if found.epoch_s is not None:
        epoch = ("epoch", format_seconds(found.epoch_s), f"{time}; {job.cases} cases, validation not counted")
    predicted = (
        ("allocator peak", format_bytes(found.allocator_peak_bytes), found.error("allocator_peak")),
        ("process peak", format_bytes(found.process_peak_bytes), found.error("process_peak")),
        ("upper bound", format_bytes(found.upper_bound_bytes), found.margin),
        ("step", format_seconds(found.step_s), time),
        ("volume", format_seconds(found.volume_s), time),
        epoch,
    )
    error = f"error, median and worst, over {found.kind}" if found.kind else "error: no step like this one was measured"
    beside = [_bill("Held by a run besides its steps, in the upper bound alone", found.beside)] if found.beside else []
    return [
        _bill(f"Held at the peak, while {found.timeline.peak_op} runs", found.components),
        *beside,
        Table(("", "", error), predicted, "Predicted", names=3),
        f"seconds: {basis} ({constants.record})",
    ]


def _bill(title: str, lines: Sequence[Component]) -> Table:
    rows = [(line.name, format_bytes(line.bytes), line.source) for line in lines]
    return Table(("", "bytes", "how it is known"), rows, title, names=3)


def _plan(job: Job, price: planner.Price, memory_bytes: int) -> Tuple[List[Dict[str, Any]], Table]:
    """The largest batch, filters and extent that fit under each policy."""
    content, rows = [], []
    for policy in POLICIES:
        found = planner.plan(job.with_unet(policy=policy), price, memory_bytes)
        content.append({"policy": policy, **{name: one and one.to_json() for name, one in found.items()}})
        for name, one in found.items():
            taken = ("none", "", "")
            if one:
                extent = " x ".join(map(str, one.job.shape))
                sizes = {"batch": one.job.batch, "filters": one.job.unet.filters, "extent": extent}
                taken = (str(sizes[name]), format_bytes(one.upper_bound_bytes), format_seconds(one.volume_s))
            rows.append((policy, "batch at once" if name == "batch" else name, *taken))
    title = f"The largest that fits {format_bytes(memory_bytes)}, with all other options as given"
    note = "batch at once: in parts (--micro-batch), a larger batch takes the memory of one part and a set of gradients"
    return content, Table(("policy", "", "largest", "upper bound", "a volume"), rows, title, note, names=2)


if __name__ == "__main__":
    sys.exit(main())

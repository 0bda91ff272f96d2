"""How much memory a training step takes, and how long, before anything is allocated. Needs no TensorFlow.

    python -m memory_estimator --shape 240 240 160 --channels 4 --filters 16 --batch 1 --dtype bfloat16
    python -m memory_estimator --recipe paper-2020 --host-memory 1.5TiB --plan
    python -m memory_estimator --run runs/first --json

Exit codes: 0 the job fits, 3 it does not, 2 bad input.
"""

import argparse
import dataclasses
import functools
import json
import os
import sys
from pathlib import Path
from typing import List, Optional, Tuple

from memory_estimator import gpu, planner, report
from memory_estimator.calibration import find_constants, load_constants
from memory_estimator.estimate import estimate
from memory_estimator.host import read_host
from memory_estimator.job import Job
from memory_estimator.options import add_job_options, installed_engine, job_from
from memory_estimator.recipes import JOBS
from memory_estimator.saved_run import job_of_run
from memory_estimator.units import parse_bytes

FITS, FAILED, BAD_INPUT, DOES_NOT_FIT = 0, 1, 2, 3
"""Exit codes."""


def main(argv: Optional[List[str]] = None) -> int:
    """Print the estimate. Exit codes: 0 the job fits, 3 it does not, 2 bad input."""
    args = _parser().parse_args(argv)
    try:
        code = _answer(args)
        sys.stdout.flush()  # a reader that went away is noticed here, not when Python ends
        return code
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        # The reader of our output went away, as `head` does; nothing is left to say and nowhere to say it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


# --- Private helpers ---


def _answer(args: argparse.Namespace) -> int:
    """Work everything out before anything is printed: bad input then leaves half a table nowhere."""
    job = _job(args)
    memory_bytes, whose = _memory(args)
    gpu_bytes = parse_bytes(args.gpu_memory) if args.gpu_memory else None
    constants = load_constants(args.calibration) if args.calibration else find_constants(job.threads)
    price = functools.lru_cache(maxsize=None)(lambda one: estimate(one, constants))
    here = price(job)
    fits = here.upper_bound_bytes <= memory_bytes
    advice = planner.advice(here, price, memory_bytes)
    plans = [planner.plan(job, price, memory_bytes)] if args.plan else []
    savings = planner.savings(job, price) if args.plan else []
    patch = gpu.largest_patch(job, gpu_bytes) if gpu_bytes else None
    if args.picture:
        _draw(args.picture, job, price, memory_bytes)
    if args.json:
        content = {**here.to_json(), "host_memory_bytes": memory_bytes, "fits": fits, "advice": advice}
        if args.plan:
            content["plan"] = [one.to_json() for one in plans]
            content["savings"] = [option.to_json() for option in savings]
        if gpu_bytes:
            content["gpu"] = patch and patch.to_json()
        print(json.dumps(content))
    else:
        report.print_estimate(here, memory_bytes=memory_bytes, whose=whose, advice=advice)
        if args.plan:
            report.print_plan(plans, savings, here, memory_bytes=memory_bytes)
        if gpu_bytes:
            report.print_patch(patch, memory_bytes=gpu_bytes)
    return FITS if fits else DOES_NOT_FIT


def _job(args: argparse.Namespace) -> Job:
    """From a recipe or a run and the options over it. Threads are this host's where none are given."""
    if not hasattr(args, "threads"):
        args.threads = read_host().usable_cores
    base = None
    if args.recipe:
        base = dataclasses.replace(JOBS[args.recipe], engine=installed_engine())
    elif args.run:
        base = job_of_run(args.run, installed_engine())
    return job_from(args, base)


def _memory(args: argparse.Namespace) -> Tuple[int, str]:
    """The memory to fit into, and whose it is."""
    if args.host_memory:
        return parse_bytes(args.host_memory), "given"
    return read_host().free_bytes, "free on this host"


def _draw(path: Path, job: Job, price: planner.Price, memory_bytes: int) -> None:
    """The paper's Fig. 1 for this job. Takes seconds, for matplotlib's sake."""
    from memory_estimator.pictures import draw_sizes, size_panels
    from memory_estimator.validation import PUBLISHED, read_measured

    measured = read_measured(PUBLISHED) if PUBLISHED.is_file() else ()
    panels = size_panels(job, lambda one: price(one).process_peak_bytes, measured)
    unet = job.unet
    title = f"Memory of a training step: {unet.network}, {unet.depth} levels, {unet.dtype}, {job.engine}"
    try:
        path.write_bytes(draw_sizes(panels, title=title, host_bytes=memory_bytes))
    except OSError as error:
        raise ValueError(f"picture {path} must be a file to write, got {error.strerror}; choose another") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m memory_estimator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--recipe", choices=sorted(JOBS), help="a named run's job; options given besides win over it")
    source.add_argument("--run", type=Path, metavar="DIR", help="the job of a run folder that `train` has written")
    add_job_options(parser)
    parser.add_argument("--cases", type=int, default=argparse.SUPPRESS, metavar="N", help="training cases of an epoch")
    parser.add_argument(
        "--from-store",
        action="store_true",
        default=argparse.SUPPRESS,
        help="count what feeds the step in `train` too: the next batch, a volume in preparation (default with --run)",
    )
    parser.add_argument(
        "--host-memory", metavar="SIZE", help="memory to fit into, such as 1.5TiB (default: free on this host)"
    )
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="host constants that `calibrate` has written")
    parser.add_argument("--plan", action="store_true", help="what fits that memory, and what would save what")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="the largest patch that a GPU of this size trains")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw memory over input size as a PNG")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())

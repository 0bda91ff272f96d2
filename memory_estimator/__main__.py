"""How much memory a training step takes, and how long, before anything is allocated. Needs no TensorFlow.

    python -m memory_estimator --shape 240 240 160 --channels 4 --filters 16 --batch 1 --dtype bfloat16
    python -m memory_estimator --recipe paper-2020 --host-memory 1.5TiB --plan
    python -m memory_estimator --run runs/first --json
    python -m memory_estimator --shape 240 240 160 --batch 16 --micro-batch 4 --policy lean

Planning for a host that is not this one: its memory, its kind of CPU and its cores, as in
    python -m memory_estimator --recipe paper-2020 --host-memory 6TiB --calibration amx --threads 56

Several hosts that train together, as predicted from one worker's step, its gradients and the network:
    python -m memory_estimator --shape 240 240 160 --hosts 1 2 4 8 --link 25Gbit/s --cases 484 --epochs 25
    python -m memory_estimator --shape 144 192 144 --step-s 2.1 --hosts --cases 48884 --epochs 10 --against 90 4

Needs rich, unless --json is given, and outside Linux psutil.
Exit codes: 0 the job fits, 3 it does not, 2 bad input, 1 failed (a full disk, a missing package), 130 interrupted.
"""

import argparse
import functools
import json
import os
import sys
from pathlib import Path
from typing import List, Optional

from memory_estimator import gpu, planner, report
from memory_estimator.accuracy import load_accuracy
from memory_estimator.calibration import NAMED, HostConstants, find_constants, named_constants
from memory_estimator.engines import installed_engine
from memory_estimator.estimate import estimate
from memory_estimator.files import write_whole
from memory_estimator.host import read_host
from memory_estimator.job import ENGINES, Job
from memory_estimator.options import add_job_options, add_source_options, job_from, policy_is_open, source_job
from memory_estimator.saved_run import notes_on_run
from memory_estimator.scaling import options as scaling_options
from memory_estimator.scaling import report as scaling_report
from memory_estimator.scaling.memory import price_of_one
from memory_estimator.units import format_bytes, parse_bytes
from models.config import POLICIES

FITS, FAILED, BAD_INPUT, DOES_NOT_FIT, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit codes."""


def main(argv: Optional[List[str]] = None) -> int:
    """Print the estimate; returns one of the exit codes."""
    args = _parser().parse_args(argv)
    try:
        code = _answer(args)
        sys.stdout.flush()  # a reader that went away is noticed here, not when Python ends
        return code
    except ValueError as error:
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


# --- Private helpers ---


def _failed(why: str, code: int) -> int:
    print(f"error: {why}", file=sys.stderr)
    return code


def _answer(args: argparse.Namespace) -> int:
    """Work everything out before anything is printed: bad input then leaves half a table nowhere."""
    host = functools.lru_cache(maxsize=None)(read_host)  # not asked where everything is given
    given_bytes = parse_bytes(args.host_memory) if args.host_memory else None
    gpu_bytes = parse_bytes(args.gpu_memory) if args.gpu_memory else None
    is_scale = scaling_options.is_asked(args)
    per_host = scaling_options.workers_per_host(args) if is_scale else 1
    if not hasattr(args, "threads"):
        args.threads = max(1, host().usable_cores // per_host)
    job = job_from(args, source_job(args))
    constants = named_constants(args.calibration) if args.calibration else find_constants(job.threads, host())
    accuracy, host_bytes = load_accuracy(), given_bytes or host().memory_bytes
    price = functools.lru_cache(maxsize=None)(lambda one: estimate(one, constants, accuracy, host_bytes))
    if is_scale:
        return _answer_for_hosts(args, job, price, constants, given_bytes and given_bytes // per_host)
    memory_bytes, whose = (given_bytes, "given") if given_bytes else (host().free_bytes, "free on this host")
    choice = planner.fastest_that_fits(job, price, memory_bytes) if policy_is_open(args) else None
    picked = choice.reason(f"{format_bytes(memory_bytes)} {whose}") if choice else ""
    asked = choice.estimate if choice else price(job)
    job = asked.job
    fits = asked.upper_bound_bytes <= memory_bytes
    advice = planner.advice(asked, price, memory_bytes)
    notes = notes_on_run(args.run) if args.run else []
    caveats = asked.constants.for_threads(job.threads).caveats(None if args.calibration else host())
    policies = POLICIES if args.plan else ()
    plans = [planner.plan(planner.with_policy(job, policy), price, memory_bytes) for policy in policies]
    # Another engine is worth a line where it can be had: stock TensorFlow always, ITEX where it is, or nothing is yet.
    engines = ENGINES if installed_engine() == "itex" else ("stock",)
    savings = planner.savings(job, price, engines) if args.plan else []
    patch = gpu.largest_patch(job, gpu_bytes) if gpu_bytes else None
    if args.picture:
        _draw(args.picture, job, price, memory_bytes)
    if args.json:
        content = {**asked.to_json(), "host_memory_bytes": memory_bytes, "fits": fits, "advice": advice}
        content["policy"] = {"name": job.policy, "picked": bool(choice), "reason": picked or "given"}
        content["constants"]["caveats"] = caveats
        content["notes"] = notes
        if args.plan:
            content["plan"] = [one.to_json() for one in plans]
            content["savings"] = [option.to_json() for option in savings]
        if gpu_bytes:
            content["gpu"] = patch and patch.to_json()
        print(json.dumps(content))
    else:
        report.print_estimate(
            asked, memory_bytes=memory_bytes, whose=whose, advice=advice, caveats=caveats, picked=picked, notes=notes
        )
        if args.plan:
            report.print_plan(plans, savings, asked, memory_bytes=memory_bytes)
        if gpu_bytes:
            report.print_patch(patch, memory_bytes=gpu_bytes)
    return FITS if fits else DOES_NOT_FIT


def _answer_for_hosts(
    args: argparse.Namespace,
    job: Job,
    price: planner.Price,
    constants: HostConstants,
    worker_memory_bytes: Optional[int],
) -> int:
    """Time on several hosts. Memory is looked at where that of a host was given: this one's is nobody's business."""
    price_of_worker = price_of_one(price, scaling_options.most_workers(args))
    if worker_memory_bytes and policy_is_open(args):
        policy = planner.fastest_that_fits(job, price_of_worker, worker_memory_bytes).policy
        job = planner.with_policy(job, policy)
    request = scaling_options.request_from(args, price(job), constants.of(job.engine, job.unet.dtype))
    worker = price_of_worker(job)
    fits = not worker_memory_bytes or worker.upper_bound_bytes <= worker_memory_bytes
    if args.picture:
        from memory_estimator.scaling.picture import draw_scaling

        _write_picture(args.picture, draw_scaling(request))
    if args.json:
        content = {**scaling_report.to_json(request), "upper_bound_bytes": worker.upper_bound_bytes, "fits": fits}
        print(json.dumps(content))
    else:
        scaling_report.print_scaling(request)
        if worker_memory_bytes:
            print(f"a worker {report.verdict(worker, worker_memory_bytes, 'its share of a host')}")
    return FITS if fits else DOES_NOT_FIT


def _draw(path: Path, job: Job, price: planner.Price, memory_bytes: int) -> None:
    """The paper's Fig. 1 for this job. Takes seconds, for matplotlib's sake."""
    from memory_estimator.pictures import draw_sizes, size_panels
    from memory_estimator.validation import PUBLISHED, read_measured

    measured = read_measured(PUBLISHED) if PUBLISHED.is_file() else ()
    panels = size_panels(job, lambda one: price(one).process_peak_bytes, measured)
    unet = job.unet
    title = f"Memory of a training step: {unet.network}, {unet.depth} levels, {unet.dtype}, {job.engine}, {job.policy}"
    _write_picture(path, draw_sizes(panels, title=title, host_bytes=memory_bytes))


def _write_picture(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise ValueError(f"picture {path} must be a file to write, got {error.strerror}; choose another") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m memory_estimator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_source_options(parser)
    add_job_options(parser, may_pick=True)
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
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help=f"host constants that `calibrate` has written, or a kind of CPU: {', '.join(NAMED)} "
        "(default: this host's own, else its kind's)",
    )
    parser.add_argument("--plan", action="store_true", help="what fits that memory, and what would save what")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="the largest patch that a GPU of this size trains")
    scaling_options.add_scaling_options(parser)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw memory over input size as a PNG")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())

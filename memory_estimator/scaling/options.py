"""The command line of an estimate for several hosts: what is asked, put together as `scaling.Scaling`."""

import argparse
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional, Tuple

from memory_estimator.calibration import HostConstants
from memory_estimator.closed_form.writer import DTYPE_BYTES
from memory_estimator.estimate import Estimate
from memory_estimator.job import Job
from memory_estimator.report import count_of
from memory_estimator.scaling.costs import ASSUMED, PUBLISHED, ExchangeCosts, pooled, read_scaling
from memory_estimator.scaling.model import Claim, Hosts, Scaling, Training, Work, predicted_errors
from memory_estimator.timing import step_seconds
from memory_estimator.training_step import training_step
from memory_estimator.units import format_rate, parse_duration, parse_rate
from models.layer_plan import layer_plan

HOSTS = (1, 2, 4, 8, 16, 32, 64)
LINK, LATENCY = "25Gbit/s", "50us"
LEARNING_RATE = 2e-3
"""What `train` starts one worker from (`cpu3d.config.RunConfig`)."""

NEEDS_HOSTS = (
    *("workers_per_host", "link", "latency", "step_s", "epochs", "validation_cases", "global_batch"),
    *("learning_rate", "storage", "shared_storage", "record", "against"),
)
"""Options that say nothing without --hosts."""


@dataclass(frozen=True)
class ScaleRequest:
    """All that an estimate for several hosts is made of."""

    job: Job
    hosts: Tuple[int, ...]
    fixed: Scaling
    """Strong scaling."""
    growing: Scaling
    """Weak scaling."""
    learning_rate: float
    claim: Optional[Claim]
    notes: Tuple[str, ...]
    """What the figures rest on, a sentence each."""
    errors: Tuple[float, ...]
    """Of predicted steps of several workers on one host; () where nothing was measured."""
    is_in_sample: bool
    """Whether these errors are of the very record that the constants are from."""


def add_scaling_options(parser: argparse.ArgumentParser) -> None:
    """Add --hosts and what belongs to it. Options that are not given leave no attribute."""
    group = parser.add_argument_group("several hosts, data parallel")

    def add(name: str, **more) -> None:
        group.add_argument(name, default=argparse.SUPPRESS, **more)

    numbers = " ".join(map(str, HOSTS))
    add("--hosts", type=int, nargs="*", metavar="N",
        help=f"time on so many hosts (without a number: {numbers}); --batch is then of one worker, --threads "
        "its cores, --host-memory of one host, --picture draws time over hosts")  # fmt: skip
    add("--workers-per-host", type=int, metavar="W", help="processes of a host, as one a socket (default: 1)")
    add("--link", metavar="RATE", help=f"of a host's link, as it is sold (default: {LINK}, assumed)")
    add("--latency", metavar="TIME", help=f"of a message between two hosts (default: {LATENCY}, assumed)")
    add("--step-s", type=float, metavar="S",
        help="a measured step of one worker, of --batch volumes (default: as estimated)")  # fmt: skip
    add("--epochs", type=int, metavar="E", help="of --cases each (default: 1)")
    add("--validation-cases", type=int, metavar="N", help="predicted after every epoch (default: 0)")
    add("--global-batch", type=int, metavar="G",
        help="volumes a step of all, where that stays (default: --batch for each of the most workers)")  # fmt: skip
    add("--learning-rate", type=float, metavar="R", help=f"that suits one worker's batch (default: {LEARNING_RATE:g})")
    add("--storage", metavar="RATE", help="what each host reads, such as 2GB/s (default: enough)")
    add("--shared-storage", metavar="RATE", help="what all hosts together read (default: enough)")
    add("--record", type=Path, metavar="FILE",
        help=f"what `bench scaling` has measured (default: records/{PUBLISHED.name}, if it is there)")  # fmt: skip
    add("--against", type=float, nargs=2, metavar=("ONE", "MANY"),
        help="published hours on one host and on several, to be compared with")  # fmt: skip


def is_asked(args: argparse.Namespace) -> bool:
    """Whether several hosts are asked for. Raises ValueError for options that need --hosts and have it not."""
    if hasattr(args, "hosts"):
        if args.plan or args.gpu_memory:
            raise ValueError("--hosts must stand without --plan and --gpu-memory, got one of them; ask one at a time")
        return True
    idle = [f"--{name.replace('_', '-')}" for name in NEEDS_HOSTS if hasattr(args, name)]
    if idle:
        raise ValueError(f"--hosts must be given with {', '.join(idle)}, got none; add --hosts")
    return False


def workers_per_host(args: argparse.Namespace) -> int:
    """Raises ValueError unless there is one at least, and where a host is described whose cores are not.

    This host's would say nothing: seconds, and scratch memory, go by a worker's threads.
    """
    if not hasattr(args, "threads"):
        if args.host_memory:
            raise ValueError("--threads must be given with --host-memory, got none; add a worker's cores on that host")
        if hasattr(args, "workers_per_host") and not hasattr(args, "step_s"):
            raise ValueError("--threads must be given with --workers-per-host, got none; add it, or --step-s")
    return int(_at_least(args, "workers_per_host", 1, 1))


def most_workers(args: argparse.Namespace) -> int:
    """Of all the numbers of hosts that are asked for. Raises ValueError for a number below one."""
    return max(_hosts(args)) * workers_per_host(args)


def request_from(args: argparse.Namespace, asked: Estimate, constants: HostConstants) -> ScaleRequest:
    """Put it together; `asked` is the estimate of one worker. Raises ValueError for what cannot be."""
    job = asked.job
    numbers = _hosts(args)
    step_s = _positive(args, "step_s")
    costs, errors, is_in_sample = _costs(args)
    per_host = workers_per_host(args)
    hosts = Hosts(
        per_host,
        network_bytes_per_s=parse_rate(getattr(args, "link", LINK)),
        latency_s=parse_duration(getattr(args, "latency", LATENCY)),
        storage_bytes_per_s=_rate(args, "storage"),
        shared_bytes_per_s=_rate(args, "shared_storage"),
    )
    training = Training(job.cases, int(_at_least(args, "epochs", 1, 1)), int(_at_least(args, "validation_cases", 0, 0)))
    volume_s = (step_s or asked.step_s) / job.batch
    work = Work(
        volume_s,
        gradient_bytes=gradient_bytes(job),
        forward_s=volume_s * forward_share(job, constants),
        case_bytes=case_bytes(job),
        in_parts=job.parts > 1,
    )
    batch = int(_at_least(args, "global_batch", job.batch * per_host * max(numbers), 1))
    growing = Scaling(work, costs, hosts, training, batch_per_worker=job.batch)
    claim = _claim(args, job)
    return ScaleRequest(
        job=job,
        hosts=numbers,
        fixed=dataclasses.replace(growing, batch=batch),
        growing=growing,
        learning_rate=_positive(args, "learning_rate") or LEARNING_RATE,
        claim=claim,
        notes=tuple(_notes(args, asked, growing, step_s)),
        errors=errors,
        is_in_sample=is_in_sample,
    )


def forward_share(job: Job, constants: HostConstants) -> float:
    """Of a training step, what predicts: all up to the first gradient, the loss among it."""
    program = training_step(job)
    times = step_seconds(program, constants, job).op_s
    first = next(index for index, op in enumerate(program.ops) if "gradient" in op.kind)
    return sum(times[:first]) / sum(times)


def gradient_bytes(job: Job) -> int:
    """Of all gradients as they are exchanged: in float32, whatever they were computed in."""
    return 4 * sum(op.trainable for op in layer_plan(job.unet, job.shape))


def case_bytes(job: Job) -> int:
    """What a store holds of the voxels that a volume has: int16 channels, or in part float16, and labels of a byte."""
    return math.prod(job.shape) * (DTYPE_BYTES["bfloat16"] * job.unet.channels + 1)


# --- Private helpers ---


def _hosts(args: argparse.Namespace) -> Tuple[int, ...]:
    numbers = tuple(dict.fromkeys(args.hosts or HOSTS))
    if min(numbers) < 1:
        raise ValueError(f"hosts must be at least 1, got {min(numbers)}; give positive numbers")
    return numbers


def _positive(args: argparse.Namespace, name: str) -> Optional[float]:
    value = getattr(args, name, None)
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{_option(name)} must be positive, got {value:g}; give a positive number")
    return value


def _at_least(args: argparse.Namespace, name: str, default: float, least: float) -> float:
    value = getattr(args, name, default)
    if value < least:
        raise ValueError(f"{_option(name)} must be at least {least}, got {value}; give a larger number")
    return value


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _rate(args: argparse.Namespace, name: str) -> float:
    return parse_rate(getattr(args, name)) if hasattr(args, name) else math.inf


def _costs(args: argparse.Namespace) -> Tuple[ExchangeCosts, Tuple[float, ...], bool]:
    """The constants, and how far predictions by them are off where that was measured."""
    path = getattr(args, "record", PUBLISHED if PUBLISHED.is_file() else None)
    if path is None:
        return ASSUMED, (), False
    records = read_scaling(path)
    return pooled(records, path.name), tuple(predicted_errors(records)), len(records) < 2


def _claim(args: argparse.Namespace, job: Job) -> Optional[Claim]:
    if not hasattr(args, "against"):
        return None
    claim = Claim(*args.against)
    if not 0 < claim.many_h <= claim.one_h < math.inf:
        raise ValueError(f"--against must be hours, the more on one host, got {args.against}; write it like 90 4")
    if not job.cases:
        raise ValueError("--cases must be given with --against, got none; add --cases N and --epochs E")
    return claim


def _notes(args: argparse.Namespace, asked: Estimate, scaling: Scaling, step_s: Optional[float]) -> List[str]:
    def given(name: str) -> str:
        return "given" if hasattr(args, name) else "assumed"

    costs, hosts, said = scaling.costs, scaling.hosts, asked.constants
    if step_s:
        source = "as given"
    else:
        threads = count_of(asked.job.threads, "thread")
        source = f"on {threads}, estimated ({asked.accuracy.error('step_s')}; speed: {said.origin}, {said.name})"
    passed_s = costs.endpoint_s_per_byte + 1 / hosts.network_bytes_per_s
    wire = 1 / hosts.network_bytes_per_s / passed_s
    lines = [
        f"one worker alone: {scaling.work.volume_s:.3g} s a volume, {source}",
        f"network: {format_rate(hosts.network_bytes_per_s)} ({given('link')}), {hosts.latency_s * 1e6:.3g} us "
        f"({given('latency')}); with what the ends of a connection take, {format_rate(1 / costs.endpoint_s_per_byte)} "
        f"between two processes, gradients pass at {wire:.0%} of it"
        if costs.endpoint_s_per_byte
        else f"network: {format_rate(hosts.network_bytes_per_s)} ({given('link')})",
        f"costs of the exchange: {costs.origin}; workers differ by {costs.spread:.1%}, "
        f"{'' if costs.is_measured else 'assumed too, '}each for the whole of a step",
    ]
    if hosts.workers_per_host > 1:
        workers = f"{hosts.workers_per_host} workers on a host slow each other"
        lines.append(
            f"{workers} by {costs.contention:.1%}, the same for any number of them; of workers on sockets of their own "
            "this is not known"
            if costs.is_measured
            else f"how much {workers} is not measured, and taken as nothing"
        )
    if math.isinf(min(hosts.storage_bytes_per_s, hosts.shared_bytes_per_s)):
        lines.append("data are taken to be read in time; --storage and --shared-storage ask whether they are")
    return lines

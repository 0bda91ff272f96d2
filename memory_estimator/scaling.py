"""Data-parallel training on several hosts: how long a step and a whole training take, from one
worker's step.

One after the other come the slowest worker's share (`largest_of`), adding gradients up, packing
them into one float32 vector, its sum over all workers by a ring for each 16 MiB, and a short wait
for data: the trainer hides nothing of the sum behind the backward pass. The costs of working
together were measured on one host."""

import argparse
import dataclasses
import functools
import math
import re
import statistics
from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

from memory_estimator.common.schema import given_options, option
from memory_estimator.common.table import Table
from memory_estimator.common.units import UNITS, counted, format_bytes, format_seconds
from memory_estimator.estimate import Component, Estimate
from memory_estimator.job import Job
from models.layer_plan import layer_plan

# of the vector, summed at a time by a ring of its own (`cpu3d.distributed.all_reduce`)
RING_BYTES = 16 * 2**20
LATENCY_S = 50e-6  # of a message between two hosts, besides the cost of one inside a host
# of a step's computing, waiting for data that are read in time (records/log.md, loading)
DATA_WAIT_SHARE = 0.0004
# of the gradients, while they are summed: sent, received, the network's buffers; not measured
SENT_COPIES = 4

HOSTS_HELP = (
    "time on so many hosts; --batch is then of one worker, --threads its cores, "
    "--host-memory of one host"
)
NOT_COUNTED = (
    "not counted: validation, start-up, checkpoints, restarts, other traffic, slow storage; "
    "whether a larger batch learns as much"
)

# Costs of working together, by TensorFlow's own collectives over gRPC: medians of two jobs of a
# core a worker, 240x240x160 and 128^3, 16 filters, 22.6 MB of gradients.
COSTS = {
    # that sender and receiver spend, without a network between them
    "endpoint_s_per_byte": 1.956e-9,
    "call_s": 0.8547e-3,  # that a sum takes at any length and number of workers
    # of a message without content between two processes of one host; an upper bound
    "message_s": 92.56e-6,
    # of putting all gradients into one vector, and of taking them out of the sum
    "packing_s_per_byte": 0.23e-9,
    # standard deviation of the workers' seconds for the same work: the slowest is waited for
    "spread": 0.005946,
    # share by which a worker is slower if others compute on the same host, on other cores
    "contention": 0.0312,
}
ORIGIN = "measured: 2026-11-21, 2 workers on one AMD EPYC (records/log.md)"
# of the predicted steps of two workers in these two jobs, each by the constants of the other
ERRORS = (0.063, -0.002)


# --- The formula ---


def step_costs(
    alone_s: float,
    vector_bytes: int,
    hosts: int = 1,
    workers_per_host: int = 1,
    network_bytes_per_s: float = math.inf,
) -> Dict[str, float]:
    """Seconds of each part of a step of several workers, one after the other. A worker alone
    computes its share in `alone_s`. The network is one host's link, each way.

    Gradients, one vector, are summed in pieces, one after the other. Each goes round a ring: 2 (n -
    1) rounds, in each of which every worker passes an n-th on to its neighbour, at once with all
    others (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009). The slowest link sets the
    pace: the one out of each host, if there are several."""
    workers = hosts * workers_per_host
    compute_s = alone_s
    if workers_per_host > 1:
        compute_s *= 1 + COSTS["contention"]
    packing_s = 0.0
    exchange_s = 0.0
    if workers > 1:
        s_per_byte = COSTS["endpoint_s_per_byte"]
        message_s = COSTS["message_s"]
        if hosts > 1:
            s_per_byte += 1 / network_bytes_per_s
            message_s += LATENCY_S
        pieces = math.ceil(vector_bytes / RING_BYTES)
        rounds_s = 2 * (workers - 1) * (vector_bytes / workers * s_per_byte + pieces * message_s)
        exchange_s = rounds_s + pieces * COSTS["call_s"]
        packing_s = vector_bytes * COSTS["packing_s_per_byte"]
    return {
        "compute_s": compute_s,  # of the mean worker
        # that the slowest takes longer
        "slowest_s": compute_s * COSTS["spread"] * largest_of(workers),
        "packing_s": packing_s,
        "exchange_s": exchange_s,
        "data_s": DATA_WAIT_SHARE * compute_s,
    }


def largest_of(count: int) -> float:
    """The largest of `count` standard normal values, on average; 0 for a single one. Blom's
    approximation (1958)."""
    if count == 1:
        return 0.0
    return statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def worker_estimate(whole: Estimate, workers: int) -> Estimate:
    """The estimate of one of so many workers, from that of the whole batch, which is a micro-batch
    for each at least. Each computes its share of the micro-batches; the upper bound includes the
    exchange. Alone it is `whole`."""
    if workers == 1:
        return whole
    sums = sum(part.bytes for part in whole.components if part.name == "gradient sums")
    exchange = Component("summing gradients", SENT_COPIES * sums, "derived: copies of their sums")
    return dataclasses.replace(whole.with_beside(exchange), step_s=whole.step_s / workers)


def worker_share(job: Job, workers: int) -> Job:
    """The part of a job's batches that one of so many workers computes."""
    if workers == 1:
        return job
    return dataclasses.replace(job, batch=job.batch // workers, micro_batch=job.micro)


def worker_price(price: Callable[[Job], Estimate], workers: int) -> Callable[[Job], Estimate]:
    """As `price`, for one of so many workers, each of which computes the job that is asked for."""

    if workers == 1:
        return price

    def price_of_worker(job: Job) -> Estimate:
        whole = dataclasses.replace(job, batch=job.batch * workers, micro_batch=job.micro)
        return worker_estimate(price(whole), workers)

    return price_of_worker


def parse_rate(text: str) -> float:
    """Bytes a second of a rate such as "25Gbit/s" or "2GB/s". Raises ValueError for others, as
    "25Gb/s"."""
    words = r"(\d{1,18}(?:\.\d{1,18})?)\s*(?:([kMGT]?)bit|([kMGT]?B|[KMGT]iB))/s"
    match = re.fullmatch(words, text.strip(), re.ASCII)
    if not match or not float(match[1]):
        rule = "rate must be a positive number with its unit"
        raise ValueError(f"{rule}, got {text!r}; write it like 25Gbit/s or 2GB/s")
    if match[3]:
        return float(match[1]) * UNITS[match[3]]
    bits = 1000 ** ("", "k", "M", "G", "T").index(match[2])
    return float(match[1]) * (bits / 8)


# --- The command line ---

_option = functools.partial(option, group="several hosts, data parallel")


@dataclass(frozen=True)
class ScalingOptions:
    """--hosts and its options."""

    hosts: Tuple[int, ...] = _option((), HOSTS_HELP, "N", at_least=1)
    workers_per_host: int = _option(
        1, "processes of a host, such as one per socket", "W", at_least=1
    )
    link: str = _option("25Gbit/s", "nominal rate of a host's network link", "RATE")
    epochs: int = _option(1, "epochs, each of --cases", "E", at_least=1)
    global_batch: Optional[int] = _option(
        None,
        "volumes a step of all workers together (default: --batch for each, so it grows)",
        "G",
        at_least=1,
    )


def check_options(args: argparse.Namespace) -> None:
    """Raise ValueError for options that need --hosts, or exclude it, and for a described host
    without cores."""
    chosen = given_options(ScalingOptions, args)
    if "hosts" not in chosen:
        if chosen:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in chosen)
            raise ValueError(f"--hosts must be given with {names}, got none; add --hosts")
        return
    if hasattr(args, "plan"):
        raise ValueError("--hosts must be given without --plan, got both; leave one of them out")
    described = ""
    if "workers_per_host" in chosen:
        described = "--workers-per-host"
    if hasattr(args, "host_memory"):
        described = "--host-memory"
    if described and not hasattr(args, "threads"):
        rule = f"--threads must be given with {described}"
        raise ValueError(f"{rule}, got none; add a worker's cores on that host")


def several_hosts(options: ScalingOptions, worker: Estimate) -> Tuple[Dict[str, Any], Table]:
    """The answer from the estimate of a worker, a row for each number of hosts, as JSON content and
    as a table. Raises ValueError for an unreadable rate, and for a batch that cannot be dealt to
    the workers evenly."""
    job = worker.job
    per_host = options.workers_per_host
    gradient_bytes = 4 * sum(op.trainable for op in layer_plan(job.unet, job.shape))  # in float32
    network_bytes_per_s = parse_rate(options.link)
    rows = []
    for hosts in options.hosts:
        workers = hosts * per_host
        batch = options.global_batch or workers * job.batch
        if batch % workers:
            rule = f"--global-batch must be a multiple of the {workers} workers"
            raise ValueError(f"{rule}, got {batch}; choose another")
        alone_s = batch // workers * worker.volume_s
        costs_s = step_costs(alone_s, gradient_bytes, hosts, per_host, network_bytes_per_s)
        step_s = sum(costs_s.values())
        row: Dict[str, Any] = {"hosts": hosts, "workers": workers, "batch": batch}
        row.update(costs_s)
        row["step_s"] = step_s
        row["epoch_s"] = None  # without cases, or with fewer than a batch
        if job.cases >= batch:  # whole ones only, as `train` counts them
            row["epoch_s"] = job.cases // batch * step_s
        row["efficiency"] = alone_s * (1 + DATA_WAIT_SHARE) / step_s  # 1 without any losses
        row["cases_per_s"] = batch / step_s
        row["network_share"] = costs_s["exchange_s"] / step_s
        row["total_s"] = None
        if row["epoch_s"] is not None:
            row["total_s"] = options.epochs * row["epoch_s"]
        rows.append(row)
    content = {
        "job": job.to_json(),
        "volume_s": worker.volume_s,
        "gradient_bytes": gradient_bytes,
        "network_bytes_per_s": network_bytes_per_s,
        "rows": rows,
        "workers_per_host": per_host,
        "latency_s": LATENCY_S,
        "costs": COSTS,
        "errors": list(ERRORS),
    }
    return content, _table_of(rows, per_host, gradient_bytes)


def _table_of(rows: Sequence[Dict[str, Any]], per_host: int, gradient_bytes: int) -> Table:
    lines = []
    for row in rows:
        sizes = (str(row["hosts"]), str(row["batch"]), f"{row['step_s']:.3g}")
        shares = (f"{row['network_share']:.0%}", f"{row['cases_per_s']:.3g}")
        times = (format_seconds(row["epoch_s"]), format_seconds(row["total_s"]))
        lines.append([*sizes, *shares, f"{row['efficiency']:.0%}", *times])
    columns = ("hosts", "batch", "s a step", "summing", "cases/s", "efficiency")
    title = (
        f"{counted(per_host, 'worker')} a host, {format_bytes(gradient_bytes)} of gradients summed"
    )
    worst = f"{max(ERRORS, key=abs):+.1%} of a step, workers on one host"
    caption = f"costs of summing: {ORIGIN}\nworst error: {worst}\n{NOT_COUNTED}"
    return Table((*columns, "an epoch", "in all"), lines, title, caption, names=0)

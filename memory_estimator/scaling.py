"""Several workers that train together: what one of them takes, and how long a step of several hosts
takes, from one worker's step and the sum of its gradients.

The trainer sums after the backward pass, one float32 vector in pieces of 16 MiB. The costs of the
sum were measured on one host; nothing beyond it is verified."""

import dataclasses
import math
from typing import Any, Dict, List, Sequence

from memory_estimator.common.table import Table
from memory_estimator.common.units import format_bytes, format_seconds
from memory_estimator.estimate import Component, Estimate
from memory_estimator.job import Job
from models.layer_plan import layer_plan

# of the vector, summed at a time by a ring of its own (`cpu3d.distributed.all_reduce`)
RING_BYTES = 16 * 2**20
# of the gradients, while they are summed: sent, received, the network's buffers; not measured
SENT_COPIES = 4

# By TensorFlow's own collectives over gRPC: 2 workers on one AMD EPYC, 2026-11-21 (records/log.md).
ENDPOINT_S_PER_BYTE = 1.956e-9  # that sender and receiver spend, without a network between them
PIECE_S = 0.8547e-3  # that the sum of a piece takes at any length and number of workers
MESSAGE_S = 92.56e-6 + 50e-6  # of a message without content, and the latency between two hosts

NOT_COUNTED = (
    "not verified beyond one host; not counted: differences between hosts, validation, start-up, "
    "checkpoints, slow storage; whether a larger batch learns as much"
)


def sum_seconds(vector_bytes: int, workers: int, link_bytes_per_s: float) -> float:
    """Seconds of the sum of a vector over so many workers, one a host. Each piece goes round a
    ring: 2 (n - 1) rounds, in each of which every worker passes an n-th on to its neighbour, at
    once with all others (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009)."""
    if workers == 1:
        return 0.0
    pieces = math.ceil(vector_bytes / RING_BYTES)
    round_s = vector_bytes / workers * (ENDPOINT_S_PER_BYTE + 1 / link_bytes_per_s)
    return 2 * (workers - 1) * (round_s + pieces * MESSAGE_S) + pieces * PIECE_S


def worker_estimate(whole: Estimate, workers: int) -> Estimate:
    """The estimate of one of so many workers, from that of the whole batch, which is a micro-batch
    for each at least. Each computes its share of the micro-batches; the upper bound includes the
    exchange. Alone it is `whole`."""
    if workers == 1:
        return whole
    sums = sum(part.bytes for part in whole.components if part.name == "gradient sums")
    exchange = Component("summing gradients", SENT_COPIES * sums, "derived: copies of their sums")
    return dataclasses.replace(whole.with_extra(exchange), step_s=whole.step_s / workers)


def worker_share(job: Job, workers: int) -> Job:
    """The part of a job's batches that one of so many workers computes."""
    if workers == 1:
        return job
    return dataclasses.replace(job, batch=job.batch // workers, micro_batch=job.micro)


def batch_of_all(job: Job, workers: int) -> Job:
    """The job whose share of so many workers is `job`."""
    if workers == 1:
        return job
    return dataclasses.replace(job, batch=job.batch * workers, micro_batch=job.micro)


def host_rows(
    job: Job, step_s: float, hosts: Sequence[int], link_gbit_s: float
) -> List[Dict[str, Any]]:
    """A row for each number of hosts, each of which computes `job` in `step_s` at each step."""
    link_bytes_per_s = link_gbit_s * 1e9 / 8
    gradient_bytes = 4 * sum(op.trainable for op in layer_plan(job.unet, job.shape))  # in float32
    rows = []
    for count in hosts:
        sum_s = sum_seconds(gradient_bytes, count, link_bytes_per_s)
        batch = count * job.batch
        epoch_s = None  # without cases, or with fewer than a batch
        if job.cases >= batch:  # whole ones only, as `train` counts them
            epoch_s = job.cases // batch * (step_s + sum_s)
        rows.append(
            {
                "hosts": count,
                "batch": batch,
                "gradient_bytes": gradient_bytes,
                "compute_s": step_s,
                "sum_s": sum_s,
                "step_s": step_s + sum_s,
                "epoch_s": epoch_s,
            }
        )
    return rows


def hosts_table(rows: Sequence[Dict[str, Any]]) -> Table:
    """The rows for reading."""
    lines = []
    for row in rows:
        sizes = (str(row["hosts"]), str(row["batch"]), format_seconds(row["step_s"]))
        share = row["sum_s"] / row["step_s"]
        lines.append([*sizes, f"{share:.0%}", format_seconds(row["epoch_s"])])
    title = f"A worker a host, {format_bytes(rows[0]['gradient_bytes'])} of gradients summed"
    columns = ("hosts", "batch", "a step", "of it summing", "an epoch")
    return Table(columns, lines, title, NOT_COUNTED, names=0)

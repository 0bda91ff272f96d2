"""Data-parallel training on several hosts: how long a step and a whole training take, from one worker's measured step.

Every worker computes the gradients of its share of the batch, the gradients are summed over all, each worker updates
its own weights. One after the other come the slowest worker's share (`largest_of`), adding gradients up, packing them
into one float32 vector, its exchange by a ring over all workers for each 16 MiB (`exchange_s`), and a short wait for
data: the trainer hides nothing of the exchange behind the backward pass. `bench scaling` measures on one host what
workers lose to each other; without its record it is assumed.
"""

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Mapping, Optional, Sequence, Tuple

from memory_estimator.estimate import Component, Estimate
from memory_estimator.files import read_records

ALONE, IN_PARTS, TOGETHER, APART, WIDE = "alone", "in parts", "together", "apart", "wide"
"""Rows of a record: one worker; one that adds its gradients up and updates apart, as several do; several that exchange;
as many that do the same and do not exchange; one with the cores of all of them."""

PIECE_BYTES = 16 * 2**20
"""Of the vector, summed at a time, each piece by a ring of its own (`cpu3d.distributed.all_reduce`)."""

DATA_WAIT_SHARE = 0.0004
"""Of a step's computing, waiting for data that are read in time (records/data.jsonl, training on whole volumes)."""

EXCHANGED_COPIES = 4
"""Of the gradients, while they are summed: what is sent, what has come, the network's buffers. Not measured."""


@dataclass(frozen=True)
class ExchangeCosts:
    """What workers lose to each other. All of it is of TensorFlow's own collectives over gRPC."""

    endpoint_s_per_byte: float
    """Seconds that sender and receiver spend on a byte, without what a network between them takes."""
    call_s: float  # seconds that a sum takes whatever its length and the number of workers
    message_s: float  # of a message without content between two processes of one host; an upper bound
    packing_s_per_byte: float  # of putting all gradients into one vector, and of taking them out of the sum
    in_parts_s_per_byte: float
    """That a step takes longer because gradients are added up first and the weights updated after."""
    spread: float
    """Standard deviation of the workers' seconds for the same work, as a share of them: the slowest is waited for."""
    contention: float
    """By what share a worker's own work is slower where others compute on the same host, on cores of their own."""
    origin: str  # where these are from, for printing


ASSUMED = ExchangeCosts(
    endpoint_s_per_byte=20e-3 / 22.6e6,  # 22.6 MB between two processes took 10 to 30 ms on the development host
    call_s=1e-3,
    message_s=100e-6,
    packing_s_per_byte=4 / 10e9,  # written and read on the way in and on the way out, at 10 GB/s
    in_parts_s_per_byte=5 / 10e9,  # set to zero; read, and the sum read and written; read again: at 10 GB/s
    spread=0.03,
    contention=0.0,
    origin="assumed: no record of `bench scaling` is there",
)
"""Stands in for a measurement."""


def exchange_s(
    vector_bytes: int, workers: int, *, s_per_byte: float, message_s: float = 0.0, call_s: float = 0.0
) -> float:
    """Seconds to sum a vector over all workers, in pieces that pass one after the other; 0 for one worker. Each piece
    goes round a ring: 2 (n - 1) rounds, in each of which every worker passes an n-th on to its neighbour, at once with
    all others (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009). The slowest link sets the pace."""
    if workers == 1:
        return 0.0
    pieces = math.ceil(vector_bytes / PIECE_BYTES)
    return 2 * (workers - 1) * (vector_bytes / workers * s_per_byte + pieces * message_s) + pieces * call_s


def largest_of(count: int) -> float:
    """The largest of `count` standard normal values, on average; 0 of one. Blom's approximation (1958)."""
    return statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


@dataclass(frozen=True)
class Point:
    """A number of hosts, and what it comes to. Seconds are of a step."""

    hosts: int
    workers: int
    batch: int  # volumes a step, of all workers
    compute_s: float  # of the mean worker
    slowest_s: float  # what the slowest takes more: a share of all that it computes in a step
    in_parts_s: float
    packing_s: float
    exchange_s: float
    data_s: float
    step_s: float  # all parts one after the other
    cases_per_s: float
    network_share: float  # of a step, exchanging
    efficiency: float
    """Volumes a second, as a share of what as many workers would do that lose nothing to each other."""
    epoch_s: Optional[float]
    """Whole batches only, as `train` counts them, and the validation; None without cases, or of fewer than a batch."""
    total_s: Optional[float]  # all epochs; None where an epoch's time is unknown


@dataclass(frozen=True)
class Scaling:
    """One job on any number of hosts, all alike. Either the batch is fixed, or each worker's share of it is."""

    volume_s: float  # seconds of one worker's training step for each of its volumes, the update included
    gradient_bytes: int  # of all gradients, in float32
    costs: ExchangeCosts
    forward_s: float = 0.0  # seconds to predict a volume, for validation
    in_parts: bool = False
    """Whether a worker's step is of several micro-batches: adding up their gradients is then in its seconds."""
    workers_per_host: int = 1
    network_bytes_per_s: float = 25e9 / 8  # of a host's link, each way, as it is sold
    latency_s: float = 50e-6  # of a message between two hosts; what a message costs inside one comes on top
    cases: int = 0  # of an epoch; 0 is unknown
    epochs: int = 1
    validation_cases: int = 0  # predicted after every epoch, dealt to all workers
    batch: int = 0
    """Volumes a step of all workers together, which is strong scaling; 0: the batch grows, which is weak scaling."""
    batch_per_worker: int = 1  # where it grows

    def point(self, hosts: int) -> Point:
        """What so many hosts come to. Raises ValueError where the batch cannot be dealt to their workers evenly."""
        costs, per_host = self.costs, self.workers_per_host
        workers = hosts * per_host
        if self.batch % workers:
            raise ValueError(f"batch must be a multiple of the {workers} workers, got {self.batch}; see --global-batch")
        share = self.batch // workers or self.batch_per_worker
        slower = 1 + costs.contention * (per_host > 1)
        compute_s = share * self.volume_s * slower
        passed_bytes = self.gradient_bytes if workers > 1 else 0
        # A ring whose neighbours lie on the same host but for one link out of each, which is then the slowest.
        network_s, latency_s = (1 / self.network_bytes_per_s, self.latency_s) if hosts > 1 else (0, 0)
        passing = {"s_per_byte": costs.endpoint_s_per_byte + network_s, "message_s": costs.message_s + latency_s}
        slowest_s = compute_s * costs.spread * largest_of(workers)
        in_parts_s = passed_bytes * costs.in_parts_s_per_byte * (not self.in_parts)
        packing_s = passed_bytes * costs.packing_s_per_byte
        exchanging_s = exchange_s(self.gradient_bytes, workers, **passing, call_s=costs.call_s)
        data_s = DATA_WAIT_SHARE * compute_s
        step_s = compute_s + slowest_s + in_parts_s + packing_s + exchanging_s + data_s
        batch, epoch_s = share * workers, None
        if self.cases >= batch:
            epoch_s = self.cases // batch * step_s + -(-self.validation_cases // workers) * self.forward_s * slower
        parts = (compute_s, slowest_s, in_parts_s, packing_s, exchanging_s, data_s)
        return Point(
            *(hosts, workers, batch, *parts, step_s),
            cases_per_s=batch / step_s,
            network_share=exchanging_s / step_s,
            efficiency=share * self.volume_s * (1 + DATA_WAIT_SHARE) / step_s,
            epoch_s=epoch_s,
            total_s=None if epoch_s is None else self.epochs * epoch_s,
        )


def of_one(whole: Estimate, workers: int) -> Estimate:
    """The estimate of one of so many workers, from that of the whole batch, which is a micro-batch for each at least.
    Each computes its share of the micro-batches; what the exchange takes is in the upper bound. Alone it is `whole`."""
    if workers == 1:
        return whole
    sums = sum(part.bytes for part in whole.components if part.name == "gradient sums")
    exchange = Component("exchange of gradients", EXCHANGED_COPIES * sums, "derived: copies of their sums")
    return dataclasses.replace(whole.with_beside(exchange), step_s=whole.step_s / workers)


def read_scaling(path: Path) -> Tuple[Mapping[str, Any], ...]:
    """The records in a file: the newest of each step, cores, engine and CPU. Raises ValueError for none or damage."""

    def checked(record: Mapping[str, Any]) -> Tuple[str, Mapping[str, Any]]:
        costs_of(record)
        if not all(row["step_s"] > 0 for row in record["rows"]):
            raise ValueError("steps without seconds")
        names = ("shape", "batch", "micro_batch", "unet", "optimizer", "cores_per_worker", "engine_name")
        return json.dumps([*(record[name] for name in names), record["host"]["cpu"]], sort_keys=True), record

    found = dict(read_records(path, "scaling", checked))
    if not found:
        raise ValueError(f"record file {path} must hold a record of `bench scaling`, got none; name another")
    return tuple(found.values())


def row_of(record: Mapping[str, Any], name: str, workers: int) -> Mapping[str, Any]:
    """One row of a record. Raises KeyError where there is none."""
    for row in record["rows"]:
        if row["name"] == name and row["workers"] == workers:
            return row
    raise KeyError(f"row {name} of {workers}")


def costs_of(record: Mapping[str, Any]) -> ExchangeCosts:
    """The constants that one record comes to, from its fewest workers above one. Raises KeyError for what is none."""
    count = min(row["workers"] for row in record["rows"] if row["name"] == TOGETHER)
    alone, in_parts = row_of(record, ALONE, 1), row_of(record, IN_PARTS, 1)
    together, apart = row_of(record, TOGETHER, count), row_of(record, APART, count)
    size, call_s, message_s = record["gradient_bytes"], together["call_s"], together["message_s"]
    passing_s = together["exchange_s"] - exchange_s(size, count, s_per_byte=0, message_s=message_s, call_s=call_s)
    return ExchangeCosts(
        endpoint_s_per_byte=max(0.0, passing_s) / exchange_s(size, count, s_per_byte=1),
        call_s=call_s,
        message_s=message_s,
        packing_s_per_byte=together["packing_s"] / size,
        in_parts_s_per_byte=max(0.0, in_parts["compute_s"] - alone["step_s"]) / size,
        spread=max(0.0, together["wait_s"]) / together["compute_s"] / largest_of(count),
        contention=max(0.0, apart["compute_s"] / in_parts["compute_s"] - 1),
        origin=f"measured: bench scaling, {record.get('date', '')}, {count} workers on one {record['host']['cpu']}",
    )


def pooled(records: Sequence[Mapping[str, Any]]) -> ExchangeCosts:
    """The medians over the records, of which there must be one."""
    found = [costs_of(record) for record in records]
    names = [field.name for field in dataclasses.fields(ExchangeCosts) if field.type is float]
    return dataclasses.replace(
        found[-1], **{name: statistics.median(getattr(one, name) for one in found) for name in names}
    )


def predicted_errors(records: Sequence[Mapping[str, Any]]) -> List[float]:
    """How far predicted steps of several workers on one host are off, as signed shares of the measured ones. Each is
    predicted from its own record's one worker and the constants of the *other* records. Where there is no other, they
    are its own, which flatters."""
    errors = []
    for record in records:
        costs = pooled([one for one in records if one is not record] or [record])
        volume_s = row_of(record, ALONE, 1)["step_s"] / (1 + DATA_WAIT_SHARE)
        one = Scaling(volume_s, record["gradient_bytes"], costs, in_parts=record["batch"] > record["micro_batch"])
        for row in (row for row in record["rows"] if row["name"] == TOGETHER):
            predicted = dataclasses.replace(one, workers_per_host=row["workers"]).point(1)
            errors.append(predicted.step_s / row["step_s"] - 1)
    return errors

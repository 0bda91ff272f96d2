"""What it costs that workers exchange their gradients, and how far they get in each other's way: measured, or assumed.

`bench scaling` measures it on one host, between its processes.
"""

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Sequence, Tuple

from memory_estimator.files import read_records

KIND = "scaling"

PUBLISHED = Path(__file__).resolve().parents[2] / "records" / "scaling.jsonl"
"""The record that comes with the project; it may not be there."""

ALONE, IN_PARTS, TOGETHER, APART, WIDE = "alone", "in parts", "together", "apart", "wide"
"""Rows of a record: one worker; one that adds its gradients up and updates apart, as several do; several that exchange;
as many that do the same and do not exchange; one with the cores of all of them."""

PIECE_BYTES = 16 * 2**20
"""Of the vector, summed at a time, each piece by a ring of its own (`cpu3d.distributed.all_reduce`)."""


@dataclass(frozen=True)
class ExchangeCosts:
    """What workers lose to each other. All of it is of TensorFlow's own collectives over gRPC."""

    endpoint_s_per_byte: float
    """Seconds that sender and receiver spend on a byte, without what a network between them takes."""
    call_s: float
    """Seconds that a sum takes whatever its length and the number of workers."""
    message_s: float
    """Seconds of a message without content between two processes of one host. An upper bound: what the graph takes for
    a sum of its own is in it."""
    packing_s_per_byte: float
    """Seconds a byte of putting all gradients into one vector, and of taking them out of the sum."""
    in_parts_s_per_byte: float
    """Seconds a byte of gradients that a step takes longer because they are added up first and the weights updated
    after, where one worker's step does both at once."""
    spread: float
    """Standard deviation of the workers' seconds for the same work, as a share of them: the slowest is waited for."""
    contention: float
    """By what share a worker's own work is slower where others compute on the same host, on cores of their own."""
    origin: str
    """Where these are from, for printing."""
    is_measured: bool = True


ASSUMED = ExchangeCosts(
    endpoint_s_per_byte=20e-3 / 22.6e6,  # 22.6 MB between two processes took 10 to 30 ms on the development host
    call_s=1e-3,
    message_s=100e-6,
    packing_s_per_byte=4 / 10e9,  # written and read on the way in and on the way out, at 10 GB/s
    in_parts_s_per_byte=5 / 10e9,  # set to zero; read, and the sum read and written; read again: at 10 GB/s
    spread=0.03,
    contention=0.0,
    origin="assumed: no record of `bench scaling` is there",
    is_measured=False,
)
"""Stands in for a measurement."""


def ring_s(vector_bytes: int, workers: int, *, s_per_byte: float, message_s: float) -> float:
    """Seconds to sum a vector over all workers by a ring; 0 for one worker.

    2 (n - 1) rounds, in each of which every worker passes an n-th of the vector on to its neighbour, at once with all
    others (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel
    Distrib. Comput. 69, 2009). The slowest link of the ring sets the pace.
    """
    return 2 * (workers - 1) * (vector_bytes / workers * s_per_byte + message_s)


def exchange_s(vector_bytes: int, workers: int, *, s_per_byte: float, message_s: float, call_s: float) -> float:
    """Seconds to sum a vector as the trainer does, in pieces that pass one after the other; 0 for one worker."""
    if workers == 1:
        return 0.0
    pieces = math.ceil(vector_bytes / PIECE_BYTES)
    return ring_s(vector_bytes, workers, s_per_byte=s_per_byte, message_s=pieces * message_s) + pieces * call_s


def largest_of(count: int) -> float:
    """The largest of `count` standard normal values, on average; 0 of one.

    Blom's approximation (1958): 0.589 of two, which is 0.564; closer for more.
    """
    return statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def read_scaling(path: Path) -> Tuple[Mapping[str, Any], ...]:
    """The records of `bench scaling` in a file: the newest of each job and host.

    Raises ValueError for a file that is missing or has none, and for a line that is damaged or of another schema.
    """
    found = {key_of(record): record for record in read_records(path, KIND, _checked)}
    if not found:
        raise ValueError(f"record file {path} must hold a record of `bench scaling`, got none; name another")
    return tuple(found.values())


def costs_of(record: Mapping[str, Any]) -> ExchangeCosts:
    """The constants that one record comes to, from its fewest workers above one. Raises KeyError for what is none."""
    count = min(row["workers"] for row in record["rows"] if row["name"] == TOGETHER)
    alone, in_parts = row_of(record, ALONE, 1), row_of(record, IN_PARTS, 1)
    together, apart = row_of(record, TOGETHER, count), row_of(record, APART, count)
    size, call_s, message_s = record["gradient_bytes"], together["call_s"], together["message_s"]
    passing_s = together["exchange_s"] - exchange_s(size, count, s_per_byte=0, message_s=message_s, call_s=call_s)
    return ExchangeCosts(
        endpoint_s_per_byte=max(0.0, passing_s) / ring_s(size, count, s_per_byte=1, message_s=0),
        call_s=call_s,
        message_s=message_s,
        packing_s_per_byte=together["packing_s"] / size,
        in_parts_s_per_byte=max(0.0, in_parts["compute_s"] - alone["step_s"]) / size,
        spread=max(0.0, together["wait_s"]) / together["compute_s"] / largest_of(count),
        contention=max(0.0, apart["compute_s"] / in_parts["compute_s"] - 1),
        origin=f"measured: bench scaling, {record.get('date', '')}, {count} workers on one {record['host']['cpu']}",
    )


def pooled(records: Sequence[Mapping[str, Any]], file: str = "") -> ExchangeCosts:
    """The medians over the records, of which there must be one; `file` is their name."""
    found = [costs_of(record) for record in records]
    names = [field.name for field in dataclasses.fields(ExchangeCosts) if field.name not in ("origin", "is_measured")]
    return ExchangeCosts(
        **{name: statistics.median(getattr(one, name) for one in found) for name in names},
        origin=f"{found[-1].origin}{f' ({file})' if file else ''}",
    )


def row_of(record: Mapping[str, Any], name: str, workers: int) -> Mapping[str, Any]:
    """One row of a record. Raises KeyError where there is none."""
    for row in record["rows"]:
        if row["name"] == name and row["workers"] == workers:
            return row
    raise KeyError(f"row {name} of {workers}")


def key_of(record: Mapping[str, Any]) -> str:
    """Equal for records of the same step, cores, engine and CPU, of which the newest counts."""
    names = ("shape", "batch", "micro_batch", "unet", "optimizer", "cores_per_worker", "engine_name")
    return json.dumps([*(record[name] for name in names), record["host"]["cpu"]], sort_keys=True)


# --- Private helpers ---


def _checked(record: Mapping[str, Any]) -> Mapping[str, Any]:
    costs_of(record)  # complete, or refused here
    key_of(record)
    if not all(row["step_s"] > 0 for row in record["rows"]):
        raise ValueError("steps without seconds")
    return record

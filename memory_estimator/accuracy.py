"""Errors of predictions by kind of measured step, and the margin of an upper bound that follows
from them.

accuracy.json holds them for the records in records/memory: `records.tables --accuracy` writes it,
from `measured`."""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, Mapping, Optional, Tuple

from memory_estimator.common.files import read_record, typed
from memory_estimator.common.units import counted
from memory_estimator.job import Job

SCHEMA = 1
SHIPPED = Path(__file__).with_name("hosts") / "accuracy.json"

WIDE_SHARE = 0.25  # of a peak, by which the bound is above it if there are no records at all


@dataclass(frozen=True)
class Bound:
    """Errors as shares of measured values, without their signs."""

    median: float
    worst: float


@dataclass(frozen=True)
class Kind:
    """Measured steps of one kind: which they are, how far predictions were off, and the margin."""

    dtype: str
    policy: str  # of memory
    versions: Tuple[str, ...]  # of the engines, as of `engine_version`
    hosts: Tuple[str, ...]  # the CPUs' names
    instructions: Tuple[str, ...]  # the instruction sets of native operations that were measured
    threads: Tuple[int, ...]  # numbers of threads that were measured
    networks: Tuple[str, ...]  # that were measured
    records: int  # measured steps; the margin is made of all of them
    held_out: int  # of them, larger than any that constants were fitted to: the errors are theirs
    allocator_peak: Optional[Bound]
    process_peak: Optional[Bound]
    step_s: Optional[Bound]  # None if no seconds were recorded
    margin_share: float  # of the process's peak, by which the upper bound is above it
    margin_bytes: int  # the least by which it is

    def upper_bound(self, process_peak_bytes: int) -> int:
        """Memory that must be free for a predicted peak: the peak and the margin."""
        margin = math.ceil(process_peak_bytes * self.margin_share)
        return process_peak_bytes + max(margin, self.margin_bytes)

    def __str__(self) -> str:
        """Such as "49 steps on AMD EPYC, bfloat16, policy lean, 2 threads"."""
        threads = " or ".join(map(str, self.threads))
        hosts = " and ".join(self.hosts)
        steps = f"{self.held_out} steps on {hosts}"
        return f"{steps}, {self.dtype}, policy {self.policy}, {threads} threads"


@dataclass(frozen=True)
class Accuracy:
    """Errors of predictions, by kind of record: the content of accuracy.json, and the engines in
    use."""

    kinds: Tuple[Kind, ...]
    # engine -> its `engine_version`; one missing is as recorded
    versions: Dict[str, str] = field(default_factory=dict)

    def covering(self, job: Job, instructions: str) -> Tuple[Optional[Kind], str]:
        """The kind of records that covers a job by native operations of an instruction set; None,
        and what was not measured, if there is none. For "" TensorFlow's layers compute, which no
        kind covers."""
        if not instructions:
            return None, "TensorFlow's layers"
        for kind in self.kinds:
            if (kind.dtype, kind.policy) == (job.unet.dtype, job.policy):
                uncovered = self._uncovered(kind, job, instructions)
                return (None, uncovered) if uncovered else (kind, "")
        return None, f"{job.unet.dtype} under policy {job.policy}"

    def _uncovered(self, kind: Kind, job: Job, instructions: str) -> str:
        """What was not measured of a job; "" if all was."""
        version = self.versions.get(job.engine)
        if version and version not in kind.versions:
            return version
        if job.unet.network not in kind.networks:
            return job.unet.network
        if instructions not in kind.instructions:
            return instructions
        return "" if job.threads in kind.threads else counted(job.threads, "thread")

    def widest(self, process_peak_bytes: int) -> int:
        """The upper bound for a predicted peak by the widest margin of any kind of native
        operations' steps."""
        bounds = [kind.upper_bound(process_peak_bytes) for kind in self.kinds]
        return max(bounds, default=bound_of_layers(process_peak_bytes))


def bound_of_layers(process_peak_bytes: int) -> int:
    """The upper bound for a predicted peak of TensorFlow's layers, of which there are no
    records."""
    return math.ceil(process_peak_bytes * (1 + WIDE_SHARE))


def load_accuracy(versions: Optional[Mapping[str, str]] = None) -> Accuracy:
    """The shipped digest; `versions` are those of the engines, if known. Raises ValueError for a
    damaged file."""
    todo = "restore it, or make it from the records"
    accuracy: Accuracy = read_record(
        SHIPPED, SCHEMA, lambda content: typed(content, Accuracy, "accuracy"), todo
    )
    return dataclasses.replace(accuracy, versions=dict(versions or {}))

"""Data-parallel training on several hosts: how long a step and a whole training take, from one worker's measured step.

Synchronous: every worker computes the gradients of its share of the batch, the gradients are summed over all, each
worker updates its own weights. A step lasts as long as

    the slowest worker's share   volumes x seconds a volume, slower where workers share a host, and what the slowest
                                 of n takes more than the mean (`costs.largest_of`)
    in parts                     gradients are added up and the weights updated after, not both at once as by one worker
    packing                      all gradients into one float32 vector, and out of the sum
    the exchange                 a ring over all workers, host by host, for each 16 MiB of the vector: in all 2 (n-1)/n
                                 vectors through its slowest link, and for each ring a call and 2 (n-1) messages one
                                 after the other (`costs.exchange_s`)
    data                         what reading the share takes longer than computing it, and a wait that is always there

one after the other: the trainer hides nothing of the exchange behind the backward pass. Not counted: start-up,
checkpoints, restarts, the first step's compiling, other traffic, and that a larger batch may need more epochs. What the
slowest takes more is a share of all that it computes in a step: a host that is slow is slow for all of it. Were it
single volumes that differ, it would grow with the square root of their number only.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from memory_estimator.estimate import Estimate
from memory_estimator.job import DTYPE_BYTES, Job
from memory_estimator.planner import Price
from memory_estimator.scaling.costs import ALONE, TOGETHER, ExchangeCosts, exchange_s, largest_of, pooled, row_of
from models.layer_plan import layer_plan

DATA_WAIT_SHARE = 0.0004
"""Of a step's computing, waiting for data that are read in time (records/data.jsonl, training on whole volumes)."""

MOST_HOSTS = 4096
"""Where the search for a number of hosts ends."""

EXCHANGED_COPIES = 4
"""Of the gradients, while they are summed over the workers: what is sent, what has come, and the network's buffers of
both. Counted, not measured."""


@dataclass(frozen=True)
class Work:
    """What one worker has to do, alone on its host."""

    volume_s: float
    """Seconds of a training step for each of its volumes, the update included."""
    gradient_bytes: int
    """Of all gradients, in float32."""
    forward_s: float = 0.0
    """Seconds to predict a volume, for validation."""
    case_bytes: int = 0
    """Read of a store for a volume."""
    in_parts: bool = False
    """Whether its step is of several micro-batches: what adding up their gradients takes is then in its seconds."""


@dataclass(frozen=True)
class Hosts:
    """What the workers run on. All hosts are alike."""

    workers_per_host: int = 1
    network_bytes_per_s: float = 25e9 / 8
    """Of a host's link, each way, as it is sold."""
    latency_s: float = 50e-6
    """Of a message between two hosts; what a message costs inside one comes on top."""
    storage_bytes_per_s: float = math.inf
    """What each host reads by itself."""
    shared_bytes_per_s: float = math.inf
    """What all hosts together read, as from one file server."""


@dataclass(frozen=True)
class Training:
    """What is to be done in all."""

    cases: int = 0
    """Of an epoch; 0 is unknown."""
    epochs: int = 1
    validation_cases: int = 0
    """Predicted after every epoch, dealt to all workers."""


@dataclass(frozen=True)
class Point:
    """A number of hosts, and what it comes to. Seconds are of a step."""

    hosts: int
    workers: int
    batch: int
    """Volumes a step, of all workers."""
    compute_s: float
    """Of the mean worker."""
    slowest_s: float
    """What the slowest takes more."""
    in_parts_s: float
    packing_s: float
    exchange_s: float
    data_s: float
    efficiency: float
    """Volumes a second, as a share of what as many workers would do that lose nothing to each other."""
    epoch_s: Optional[float]
    """Whole batches only, as `train` counts them, and the validation; None where there are no cases, or fewer than a
    batch."""
    epochs: int

    @property
    def step_s(self) -> float:
        """All parts one after the other."""
        return self.compute_s + self.slowest_s + self.in_parts_s + self.packing_s + self.exchange_s + self.data_s

    @property
    def cases_per_s(self) -> float:
        """Of all workers."""
        return self.batch / self.step_s

    @property
    def total_s(self) -> Optional[float]:
        """All epochs; None where an epoch's time is unknown."""
        return None if self.epoch_s is None else self.epochs * self.epoch_s

    @property
    def network_share(self) -> float:
        """Of a step, exchanging."""
        return self.exchange_s / self.step_s

    def to_json(self) -> Dict[str, Any]:
        """Fields and what follows from them."""
        derived = ("step_s", "cases_per_s", "network_share", "total_s")
        return {**dataclasses.asdict(self), **{name: getattr(self, name) for name in derived}}


@dataclass(frozen=True)
class Scaling:
    """One job on any number of hosts. Either the batch is fixed, or each worker's share of it is."""

    work: Work
    costs: ExchangeCosts
    hosts: Hosts = Hosts()
    training: Training = Training()
    batch: int = 0
    """Volumes a step of all workers together, which is strong scaling; 0: the batch grows, which is weak scaling."""
    batch_per_worker: int = 1
    """Where it grows."""

    def point(self, hosts: int) -> Point:
        """What so many hosts come to. Raises ValueError where the batch cannot be dealt to their workers evenly."""
        workers = hosts * self.hosts.workers_per_host
        if self.batch % workers:
            raise ValueError(f"batch must be a multiple of the {workers} workers, got {self.batch}; see --global-batch")
        return self._point(hosts)

    def first(self, holds: Callable[[Point], bool]) -> Optional[Point]:
        """The least number of hosts for which something holds, up to MOST_HOSTS or a volume a worker; None for none.

        Of a fixed batch shares are taken as they come, whole or not: where the limit lies is no matter of divisors.
        """
        most = min(MOST_HOSTS, self.batch // self.hosts.workers_per_host) if self.batch else MOST_HOSTS
        return next((found for found in map(self._point, range(1, most + 1)) if holds(found)), None)

    def first_within(self, seconds: float) -> Optional[Point]:
        """The fewest hosts that take no longer in all."""
        return self.first(lambda point: point.total_s is not None and point.total_s <= seconds)

    def limits(self) -> Dict[float, Optional[int]]:
        """Share of a step -> from how many hosts on the exchange takes more than it; None where none do."""
        found = {share: self.first(lambda point, share=share: point.network_share > share) for share in (0.1, 0.5)}
        return {share: point and point.hosts for share, point in found.items()}

    def rates(self, learning_rate: float, point: Point) -> Dict[str, float]:
        """The learning rate at a point, from one that suits one worker, under each rule of `train`; fixed with the
        batch.

        "linear": Goyal et al. 2017, for SGD; "sqrt": Malladi et al. 2022, for Adam.
        """
        times = point.batch / (self.batch or self.batch_per_worker)
        return {"sqrt": learning_rate * math.sqrt(times), "linear": learning_rate * times}

    # --- Private helpers ---

    def _point(self, hosts: int) -> Point:
        work, costs, per_host = self.work, self.costs, self.hosts.workers_per_host
        workers = hosts * per_host
        share = self.batch / workers if self.batch else self.batch_per_worker
        slower = 1 + costs.contention * (per_host > 1)
        compute_s = share * work.volume_s * slower
        passed_bytes = work.gradient_bytes if workers > 1 else 0
        # A ring whose neighbours lie on the same host but for one link out of each, which is then the slowest.
        s_per_byte = costs.endpoint_s_per_byte + (1 / self.hosts.network_bytes_per_s if hosts > 1 else 0)
        message_s = costs.message_s + (self.hosts.latency_s if hosts > 1 else 0)
        ring = {"s_per_byte": s_per_byte, "message_s": message_s, "call_s": costs.call_s}
        rate = min(self.hosts.storage_bytes_per_s, self.hosts.shared_bytes_per_s / hosts)
        found = Point(
            hosts=hosts,
            workers=workers,
            batch=round(share * workers),
            compute_s=compute_s,
            slowest_s=compute_s * costs.spread * largest_of(workers),
            in_parts_s=passed_bytes * costs.in_parts_s_per_byte * (not work.in_parts),
            packing_s=passed_bytes * costs.packing_s_per_byte,
            exchange_s=exchange_s(work.gradient_bytes, workers, **ring),
            data_s=max(DATA_WAIT_SHARE * compute_s, share * per_host * work.case_bytes / rate - compute_s),
            efficiency=1.0,
            epoch_s=None,
            epochs=self.training.epochs,
        )
        alone_s = share * work.volume_s * (1 + DATA_WAIT_SHARE)
        steps, epoch_s = self.training.cases // found.batch, None
        if steps:
            each = -(-self.training.validation_cases // workers)
            epoch_s = steps * found.step_s + max(
                each * work.forward_s * slower, each * per_host * work.case_bytes / rate
            )
        return dataclasses.replace(found, efficiency=alone_s / found.step_s, epoch_s=epoch_s)


def predicted_errors(records: Sequence[Mapping[str, Any]]) -> List[float]:
    """How far predicted steps of several workers on one host are off, as signed shares of the measured ones.

    Each is predicted from its own record's one worker and the constants of the *other* records. Where there is no
    other, they are its own, which flatters.
    """
    errors = []
    for record in records:
        others = [one for one in records if one is not record] or [record]
        alone = row_of(record, ALONE, 1)
        in_parts = record["batch"] > record["micro_batch"]
        work = Work(alone["step_s"] / (1 + DATA_WAIT_SHARE), record["gradient_bytes"], in_parts=in_parts)
        for row in (row for row in record["rows"] if row["name"] == TOGETHER):
            predicted = Scaling(work, pooled(others), Hosts(workers_per_host=row["workers"])).point(1)
            errors.append(predicted.step_s / row["step_s"] - 1)
    return errors


# --- What the model is asked with: one worker's work and memory ---


def gradient_bytes(job: Job) -> int:
    """Of all gradients as they are exchanged: in float32, whatever they were computed in."""
    return 4 * sum(op.trainable for op in layer_plan(job.unet, job.shape))


def case_bytes(job: Job) -> int:
    """What a store holds of the voxels that a volume has: int16 channels, or in part float16, and labels of a byte."""
    return math.prod(job.shape) * (DTYPE_BYTES["bfloat16"] * job.unet.channels + 1)


def of_one(whole: Estimate, workers: int) -> Estimate:
    """The estimate of one of so many workers, from that of the whole batch, which is a micro-batch for each at least.

    Each computes its share of the micro-batches; what the exchange takes is in the upper bound. Alone it is `whole`.
    """
    if workers == 1:
        return whole
    sums = sum(part.bytes for part in whole.components if part.name == "gradient sums")
    bound = whole.upper_bound_bytes + EXCHANGED_COPIES * sums
    return dataclasses.replace(whole, upper_bound_bytes=bound, step_s=whole.step_s / workers)


def price_of_one(price: Price, workers: int) -> Price:
    """What a job takes on one of so many workers, each of which has a batch like the job's."""

    def of_worker(job: Job) -> Estimate:
        every = dataclasses.replace(job, batch=job.batch * workers, micro_batch=job.micro, cases=0)
        return of_one(price(every), workers)

    return of_worker if workers > 1 else price

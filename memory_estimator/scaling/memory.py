"""What a step of one of several workers takes in memory, from the step of all their batch."""

import dataclasses

from memory_estimator.estimate import Estimate
from memory_estimator.job import Job
from memory_estimator.planner import Price

EXCHANGED_COPIES = 4
"""Of the gradients, while they are summed over the workers: what is sent, what has come, and the network's buffers of
both. Counted, not measured."""


def of_one(said: Estimate, workers: int) -> Estimate:
    """The estimate of one of so many workers, from that of the whole batch, which is a micro-batch for each at least.

    Each computes its share of the micro-batches; what the exchange takes is in the upper bound. Alone it is `said`.
    """
    if workers == 1:
        return said
    sums = sum(part.bytes for part in said.components if part.name == "gradient sums")
    bound = said.upper_bound_bytes + EXCHANGED_COPIES * sums
    return dataclasses.replace(said, upper_bound_bytes=bound, step_s=said.step_s / workers)


def price_of_one(price: Price, workers: int) -> Price:
    """What a job takes on one of so many workers, each of which has a batch like the job's.

    The estimate is of the batch of all of them.
    """

    def of_worker(job: Job) -> Estimate:
        every = dataclasses.replace(job, batch=job.batch * workers, micro_batch=job.micro, cases=0)
        return of_one(price(every), workers)

    return of_worker if workers > 1 else price

"""Several workers that train together: what one of them takes, from the estimate of all."""

import dataclasses

from memory_estimator.estimate import Component, Estimate
from memory_estimator.job import Job

# of the gradients, while they are summed: sent, received, the network's buffers; not measured
SENT_COPIES = 4


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

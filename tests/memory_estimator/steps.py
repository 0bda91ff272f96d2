"""A small network's step on paper, and how tests look into it."""

import dataclasses

from memory_estimator.job import Job
from memory_estimator.step.training_step import training_step
from models.config import UNetConfig

SMALL = UNetConfig(channels=1, outputs=1, filters=8, depth=2, policy="speed")


def step(shape=(16, 16, 16), batch=1, micro_batch=None, engine="itex", threads=2, optimizer="adam", **unet):
    """Of a batch that is computed at once, under policy speed, unless told otherwise."""
    network, micro = dataclasses.replace(SMALL, **unet), micro_batch or batch
    job = Job(network, shape, batch, micro_batch=micro, engine=engine, threads=threads, optimizer=optimizer)
    return training_step(job)


def op(program, name):
    return next(each for each in program.ops if each.name == name)


def names(program, *kinds):
    return [each.name for each in program.ops if each.kind in kinds]


def written(program, name):
    made = [tensor for each in (*program.before, *program.ops) for tensor in (*each.writes, *each.keeps)]
    return next(tensor for tensor in [*made, *program.resident] if tensor.name == name)

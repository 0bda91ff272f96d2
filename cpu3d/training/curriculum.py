"""The curriculum of a run: its first steps at half the resolution, then those in full.

How many of each it has follows from its length, `RunConfig.with_coarse_share`. Here is what becomes of them when the
length changes: in a run that is continued with another one, and in one that is cut to a budget of minutes. A step that
is done stays as it was, and at least one step is in full.
"""

import dataclasses
from typing import Sequence

from cpu3d.errors import InputError
from cpu3d.settings import RunConfig


def continued(config: RunConfig, *, step: int, steps: int, saved_coarse_steps: int) -> RunConfig:
    """A run of `steps` steps that goes on after `step`, from a checkpoint of one with `saved_coarse_steps`.

    Where the checkpoint is of a full step the run keeps its coarse steps; where it is of a coarse one it has at least
    the `step` that are done. Raises InputError where no step would be in full.
    """
    if step >= saved_coarse_steps:
        return dataclasses.replace(config, coarse_steps=saved_coarse_steps)
    if steps <= step:
        rule = f"steps must be above the {step} that the run has done at half the resolution"
        raise InputError(f"{rule}, got {steps}; raise it, so that the run ends in full")
    return dataclasses.replace(config, coarse_steps=max(config.coarse_steps, step))


def cut(config: RunConfig, *, step: int, steps: int) -> RunConfig:
    """A run that has done `step` steps, with `steps` in all; no full step becomes coarse."""
    config = dataclasses.replace(config, steps=steps)
    coarse = min(config.with_coarse_share(steps).coarse_steps, config.coarse_steps)
    return dataclasses.replace(config, coarse_steps=max(coarse, min(step, config.coarse_steps)))


def steps_within(
    config: RunConfig, *, step: int, steps: int, at_least: int, left_s: float, step_s: Sequence[float]
) -> int:
    """How many of a run's `steps` it takes in all, where `left_s` are left after `step` of them: `at_least` so many.

    `step_s` are the seconds of a coarse step and of a full one, or of a full one alone where no coarse one is left.
    """

    def needed_s(total: int) -> float:
        coarse = max(cut(config, step=step, steps=total).coarse_steps - step, 0)
        return coarse * step_s[0] + (total - step - coarse) * step_s[-1]

    fits = (total for total in range(steps, step, -1) if needed_s(total) <= left_s)
    most = next(fits, step + (left_s > 0))
    return min(max(most, at_least, step + len(step_s) - 1), steps)

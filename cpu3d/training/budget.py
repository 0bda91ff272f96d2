"""A budget of minutes: how many steps of a run fit it.

steps = steps_within(config, step=0, steps=8400, at_least=1, left_s=1800, step_s=[0.3, 2.1])
config = cut(config, step=0, steps=steps)
"""

import dataclasses
from typing import Sequence

from cpu3d.settings import RunConfig
from memory_estimator.planner import largest_number


def cut(config: RunConfig, *, step: int, steps: int) -> RunConfig:
    """A run that has done `step` steps, with `steps` in all; no full step becomes coarse."""
    return dataclasses.replace(config.shortened(step, steps), steps=steps)


def steps_within(
    config: RunConfig,
    *,
    step: int,
    steps: int,
    at_least: int,
    left_s: float,
    step_s: Sequence[float],
) -> int:
    """The number of a run's `steps` that it takes in all if `left_s` are left after `step` of them,
    `at_least` so many.

    `step_s` are the seconds of a coarse step and of a full one, or of a full one alone if no coarse
    one is left.
    """

    def needed_s(total: int) -> float:
        coarse = max(cut(config, step=step, steps=total).coarse_steps - step, 0)
        return coarse * step_s[0] + (total - step - coarse) * step_s[-1]

    # More steps never need less time: with each either a coarse or a full one is added.
    fits = step + largest_number(lambda more: needed_s(step + more), left_s, steps - step)
    return min(max(fits, at_least, step + len(step_s) - 1), steps)

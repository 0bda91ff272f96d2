"""How long a run is, and the learning rate of a step: pure functions, so that a restart needs no schedule state."""

import math

SCHEDULES = ("cosine", "polynomial", "constant")

POLYNOMIAL_POWER = 0.9
"""nnU-Net's exponent."""


def steps_within(minutes: float, step_s: float) -> int:
    """Steps of `step_s` seconds that fill so many minutes, to the nearest one, at least 1."""
    return max(round(minutes * 60 / step_s), 1)


def learning_rate(step: int, *, peak: float, steps: int, warmup_steps: int, schedule: str) -> float:
    """The rate of step `step` (0 is the first) of `steps`: linear warm-up to `peak`, then decay towards 0.

    A run extended to more steps decays over its new length, so its rate rises again at the join.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / (steps - warmup_steps)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    if schedule == "polynomial":
        return peak * (1 - progress) ** POLYNOMIAL_POWER
    return peak

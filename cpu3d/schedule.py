"""The learning rate of a step: a pure function, so that a restart needs no schedule state."""

import math

SCHEDULES = ("cosine", "polynomial", "constant")

POLYNOMIAL_POWER = 0.9
"""nnU-Net's exponent."""


def learning_rate(step: int, *, peak: float, steps: int, warmup_steps: int, schedule: str) -> float:
    """The rate of step `step` (0 is the first) of `steps`: linear warm-up to `peak`, then decay towards 0.

    Past the last step the rate stays at the last step's, so that a run may be extended.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = min(step - warmup_steps, steps - 1 - warmup_steps) / max(steps - warmup_steps, 1)
    progress = max(progress, 0.0)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (1 - progress) ** POLYNOMIAL_POWER

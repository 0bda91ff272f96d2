"""When a run has diverged: its loss is too high, or its weights are not finite."""

from typing import Any, Mapping, Sequence

import numpy as np

from cpu3d.training.learner import Outcome

# Above this a run has diverged; a network that predicts nothing has 1 to 2.
HIGHEST_LOSS = 10.0


def wrong_loss(outcome: Outcome, names: Sequence[str], step: int) -> str:
    """What is wrong with the loss of a step on cases of these names, and on which of them; "" for
    nothing."""
    if outcome.loss <= HIGHEST_LOSS:  # NaN is not either
        return ""
    cases_of_one = len(names) // len(outcome.losses)
    losses = np.repeat(outcome.losses, cases_of_one)  # for each case of a micro-batch
    bad = [name for name, loss in zip(names, losses) if not loss <= HIGHEST_LOSS]
    if not bad:  # the mean of all is too high
        bad = list(names)
    cases = ", ".join(dict.fromkeys(bad))
    rule = f"loss must be finite and at most {HIGHEST_LOSS:g}"
    return f"{rule}, got {outcome.loss:g} at step {step} on {cases}"


def wrong_weights(arrays: Mapping[str, Any], step: int) -> str:
    """What is wrong with the arrays of a learner after a step; "" for nothing. The loss of a step
    is of the weights before its update, so it does not tell."""
    for name, array in arrays.items():
        # By two numbers: a mask would take memory. Both are NaN if one value is.
        low = np.min(array)
        high = np.max(array)
        if not np.isfinite([low, high]).all():
            return f"weights must be finite, got {low} to {high} in {name} after step {step}"
    return ""

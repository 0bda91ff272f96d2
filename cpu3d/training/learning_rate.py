"""The learning rate of a run that leaves it open, and whether a run diverges; both are told from losses.

The rate is found by a range test (Smith 2017, "Cyclical Learning Rates for Training Neural Networks").
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import List, Optional, Sequence

RATES = tuple(0.001 * 300 ** (i / 9) for i in range(10))
"""0.001 to 0.3, tried one after another on one batch, a step each."""

TOLERANCE = 0.1
"""By which a loss may lie above the lowest before it and its rate still be good: one batch's loss wavers by less."""

SHARE = 1 / 8
"""Of the highest good rate. That one still learns the batch that it is tried on; a quarter of it was worse on untouched
cases (docs/log.md)."""

FEW = 6
"""Losses in a row that are too high when a run counts as diverged."""

NOTHING, RISE = 1.0, 0.2
"""What a network costs that predicts nothing; and by which a loss has to lie above that, and above the first, to be too
high. Single cases may cost as much as nothing predicted, however well the network does on others."""

FAR = 10.0
"""Times the level: one such loss is enough."""


def best_rate(losses: Sequence[float]) -> float:
    """The learning rate by a range test: `losses` before the step with each of RATES, and after the last. They may end
    earlier, with one that is too high or not finite. A share of the lowest rate where none is good."""
    lowest, best = losses[0], RATES[0]
    for rate, loss in zip(RATES, losses[1:]):
        if not loss <= lowest + TOLERANCE:
            break
        lowest, best = min(lowest, loss), rate
    return float(f"{SHARE * best:.2g}")


def is_over(losses: Sequence[float]) -> bool:
    """Whether a range test has seen enough: all rates, or a loss after which no rate is good."""
    last = losses[-1]
    return len(losses) > len(RATES) or not math.isfinite(last) or last > min(losses) + TOLERANCE


@dataclass
class LossWatch:
    """What of a run's losses tells whether it diverges; all of it is in a checkpoint's state. A network that has come
    to predict nothing is not noticed: single cases may cost as much under a good one."""

    first: Optional[float] = None
    """Of the weights as they were drawn."""
    recent: List[float] = dataclasses.field(default_factory=list)
    """The last FEW."""

    @property
    def level(self) -> float:
        """What losses must not lie above for long."""
        return max(NOTHING, self.first or 0.0) + RISE

    @property
    def high_steps(self) -> int:
        """How many of the last losses are too high, in a row."""
        return len(list(itertools.takewhile(lambda loss: loss > self.level, reversed(self.recent))))

    def diverges(self, loss: float) -> bool:
        """Take up the loss of the next step; whether it is not finite or FAR too high, or the last FEW are too high."""
        if not math.isfinite(loss):
            return True
        self.first = loss if self.first is None else self.first
        self.recent = [*self.recent, loss][-FEW:]
        return self.high_steps == FEW or loss > FAR * self.level

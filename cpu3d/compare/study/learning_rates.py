"""Where a search for the learning rate starts, which rates it tries, and which one wins: pure functions of numbers.

The start follows the batch: linearly for SGD (Krizhevsky 2014, Goyal et al. 2017), with its square root for Adam
(Krizhevsky 2014; Malladi et al. 2022 derive it for adaptive optimizers). Both are rules for large batches, and say
nothing about resolution, so they are a start and no more.
"""

from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple

from cpu3d.errors import InputError

EXTENSIONS = 2
"""How often a search goes on beyond its range."""

_SCALING = {"adam": 0.5, "sgd": 1.0}
"""Optimizer -> the power of the batch that its learning rate grows with."""


@dataclass(frozen=True)
class Trial:
    """A short run with one learning rate."""

    rate: float
    dice: Optional[float]
    """Best mean Dice on the validation cases; None where the loss diverged."""


def start_rate(rate: float, *, batch: int, base_batch: int, optimizer: str) -> float:
    """The learning rate at `batch` to start a search from, where `rate` is that at `base_batch`."""
    return rounded(rate * (batch / base_batch) ** _SCALING[optimizer])


def candidates(start: float, factors: Sequence[float]) -> Tuple[float, ...]:
    """The rates to try first, in ascending order, each once."""
    return tuple(sorted({rounded(start * factor) for factor in factors}))


def by_dice(trials: Sequence[Trial]) -> List[Trial]:
    """The trials that ended well from the best to the worst, the lower rate first of equals.

    Raises InputError when all diverged.
    """
    finished = [trial for trial in trials if trial.dice is not None]
    if not finished:
        rates = ", ".join(f"{trial.rate:g}" for trial in trials)
        raise InputError(f"a learning rate must train to a finite loss, none of {rates} did; lower --learning-rates")
    return sorted(finished, key=lambda trial: (-trial.dice, trial.rate))


def winner(trials: Sequence[Trial]) -> Trial:
    """The best trial. Raises InputError when all diverged."""
    return by_dice(trials)[0]


def rate_beyond(trials: Sequence[Trial]) -> Optional[float]:
    """The rate to try next: one more step of the same ratio where the best is the lowest or highest that was tried.

    Where all diverged that is a lower one. None where the best lies inside, or there is no ratio as one rate was tried.
    """
    rates = sorted(trial.rate for trial in trials)
    if len(rates) < 2:
        return None
    best = winner(trials).rate if any(trial.dice is not None for trial in trials) else rates[0]
    if best == rates[0]:
        return rounded(best * best / rates[1])
    # A higher rate that diverged closes its side: the best is then not the highest that was tried.
    return rounded(best * best / rates[-2]) if best == rates[-1] else None


def is_at_an_end(trials: Sequence[Trial]) -> bool:
    """Whether the best rate has no worse one on either side, so that a better one may lie beyond."""
    return rate_beyond(trials) is not None


def rounded(rate: float) -> float:
    """To four digits, so that a rate reads the same in a folder's name, on a command line and in a record."""
    return float(f"{rate:.4g}")

"""When each process of a fault campaign is killed: drawn beforehand from a seed, aimed at every phase of the work."""

from dataclasses import dataclass
from typing import Tuple

import numpy as np

STARTING, COMPUTING, VALIDATING, SAVING, PREPARING = "starting", "computing", "validating", "saving", "preparing"

SAVING_BY_TIME = "saving by time"
"""An aim at a checkpoint that no validation comes before; it hits SAVING."""

ENDED = "ended"
"""After the last step was logged as the end; only a kill without an aim hits it."""

ANYWHERE = "anywhere"
"""An aim without one: any moment of a run from its start to its end."""

IN_PREPARE = (PREPARING, PREPARING)
IN_TRAIN = (STARTING, COMPUTING, COMPUTING, VALIDATING, VALIDATING, SAVING, SAVING_BY_TIME, ANYWHERE)
"""What the kills of `prepare` and of `train` are aimed at, in these shares."""

NORMS = ("instance", "batch", "instance", "instance")
"""Of one training life after the other: batch norm has statistics that move with each step, and count as weights do."""

LIFE_KILLS = 5
"""Most kills that one folder suffers before it is let through to its end and compared."""


@dataclass(frozen=True)
class Aim:
    """One kill to be."""

    phase: str
    not_before: float
    """Share of the run's steps, 0 to 1, that must be logged first; nothing to a phase that has no steps."""
    delay: float
    """How far into the phase, as a share of what it took undisturbed: 0 to 1."""
    victim: int
    """Rank of the worker to kill."""


@dataclass(frozen=True)
class Life:
    """What one folder goes through: the kills in their order, then the same command until it is done."""

    command: str
    """What is killed: "prepare" or "train"."""
    aims: Tuple[Aim, ...]
    norm: str = ""
    """Of the network that is trained."""


def lives(kills: int, *, seed: int, workers: int = 1) -> Tuple[Life, ...]:
    """So many kills, dealt to the fewest lives; the same seed gives the same.

    With several workers only training is killed: they prepare nothing. The steps that a life's kills wait for rise, so
    that each finds a run that has come further.
    """
    rng = np.random.default_rng([seed, workers])
    preparing = () if workers > 1 else IN_PREPARE
    of_prepare = round(kills * len(preparing) / (len(preparing) + len(IN_TRAIN)))
    return (
        *_lives("prepare", preparing, of_prepare, workers, rng),
        *_lives("train", IN_TRAIN, kills - of_prepare, workers, rng),
    )


# --- Private helpers ---


def _lives(
    command: str, phases: Tuple[str, ...], kills: int, workers: int, rng: np.random.Generator
) -> Tuple[Life, ...]:
    # In whole rounds of all phases, so that each comes up even where there are few kills.
    dealt = [str(phases[i]) for _ in range(0, kills, len(phases) or 1) for i in rng.permutation(len(phases))][:kills]
    count = -(-kills // LIFE_KILLS)
    found = []
    for number in range(count):
        own = dealt[number * kills // count : (number + 1) * kills // count]
        aims = [
            Aim(
                phase=phase,
                not_before=float((index + rng.random()) / (len(own) + 1)),
                delay=float(rng.random()),
                victim=int(rng.integers(workers))
                if phase not in (SAVING, SAVING_BY_TIME)
                else 0,  # only the chief saves
            )
            for index, phase in enumerate(own)
        ]
        norm = NORMS[number % len(NORMS)] if command == "train" else ""
        found.append(Life(command, tuple(aims), norm))
    return tuple(found)

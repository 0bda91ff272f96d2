"""One budget for all: the steps that each variant may take of voxels seen, or of wall time. Pure functions."""

import math
from dataclasses import dataclass
from typing import Optional

from cpu3d.config import RunConfig
from cpu3d.errors import InputError

KINDS = ("epochs", "voxels", "minutes")

TIMED_STEPS = 20
"""Steps of a short run that tells a step's time: its first half compiles and warms up, its second one is told."""

WARMUP_SHARE = 10
"""The warm-up is at most a tenth of a run: one of large batches or patches may have few steps."""


@dataclass(frozen=True)
class Budget:
    """What every run may spend."""

    kind: str
    """ "epochs": voxels of so many epochs of the baseline; "voxels"; "minutes": wall time of the steps."""
    amount: float

    def __post_init__(self):
        if not (math.isfinite(self.amount) and self.amount > 0):
            raise InputError(f"--{self.kind} must be positive, got {self.amount:g}; it is the budget of every run")

    def words(self, baseline: str) -> str:
        """What every run may spend, as in "each for the voxels of 25 epochs of whole"."""
        if self.kind == "voxels":
            return f"{self.amount / 1e6:,.4g} million voxels"
        amount = f"{self.amount:,g} {self.kind if self.amount != 1 else self.kind[:-1]}"
        return f"the voxels of {amount} of {baseline}" if self.kind == "epochs" else f"{amount} of steps"


def budget_of(epochs: Optional[float], voxels: Optional[float], minutes: Optional[float], usual_epochs: int) -> Budget:
    """The budget asked for, by default the recipe's epochs. Raises InputError where there is more than one."""
    given = {kind: amount for kind, amount in zip(KINDS, (epochs, voxels, minutes)) if amount is not None}
    if len(given) > 1:
        options = " and ".join(f"--{kind}" for kind in given)
        raise InputError(f"the budget must be one of --epochs, --voxels and --minutes, got {options}; choose one")
    return Budget(*next(iter(given.items()), ("epochs", usual_epochs)))


def step_voxels(config: RunConfig) -> int:
    """Voxels that the network sees in a step."""
    return config.batch * math.prod(config.grid)


def voxels_of_epochs(epochs: float, config: RunConfig, cases: int) -> float:
    """Voxels of so many passes over `cases` in the whole of the grid of `config`, a patch's as many as make it up."""
    return epochs * cases * config.patches_per_case * math.prod(config.grid)


def steps_for(voxels: float, config: RunConfig) -> int:
    """Steps that see `voxels`, to the nearest one, at least 1."""
    return max(round(voxels / step_voxels(config)), 1)


def warmup_within(warmup_steps: int, steps: int) -> int:
    """The warm-up's steps in a run of so many: no more than the share that a warm-up may have."""
    return min(warmup_steps, steps // WARMUP_SHARE)


def validate_every(steps: int, steps_per_epoch: int, validations: int) -> int:
    """Epochs between validations so that there are `validations` of them, the one at the end included.

    There are fewer where the run has fewer epochs: it is validated between epochs and at its end.
    """
    return max(math.ceil(steps / steps_per_epoch / validations), 1)

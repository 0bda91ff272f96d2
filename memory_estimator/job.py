"""What is to be estimated: one training step's network, grid, batch, optimizer and engine, as a frozen record."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Tuple

from models.config import UNetConfig

OPTIMIZERS = ("adam", "sgd")
ENGINES = ("itex", "stock")


@dataclass(frozen=True)
class Job:
    """One training job. Everything that its memory and time depend on, the host's speed aside."""

    unet: UNetConfig = field(default_factory=UNetConfig)
    """The network, its compute dtype and its memory policy included."""
    shape: Tuple[int, int, int] = (128, 128, 128)
    """Voxels X, Y, Z that the network sees."""
    batch: int = 1
    """Volumes a step, for one update."""
    micro_batch: int = 0
    """Volumes computed at a time, a divisor of `batch`; 0 is by rule, as `micro_of` says."""
    optimizer: str = "adam"
    engine: str = "itex"
    """ "itex": TensorFlow with Intel's extension; "stock": without it. Both with oneDNN."""
    threads: int = 1
    """Threads inside one operation: some scratch is taken once a thread."""
    averaged: bool = False
    """Whether an exponential moving average of the weights is kept."""
    from_store: bool = False
    """Whether a store feeds the step, as in `train`: one batch ahead and one volume in preparation count too. False is
    `bench memory`, which gives the same batch again and again."""
    resampled: bool = False
    """Whether a store's volumes are rotated or scaled, which takes them whole and in float32."""
    cases: int = 0
    """Training cases, which make an epoch; 0 is unknown."""

    def __post_init__(self):
        self.unet.check_shape(self.shape)
        for name in ("batch", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}; give a positive number")
        if self.cases < 0:
            raise ValueError(f"cases must be at least 0, got {self.cases}; 0 is unknown")
        check_micro_batch(self.batch, self.micro_batch)
        for name, allowed in (("optimizer", OPTIMIZERS), ("engine", ENGINES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}; pick one")

    @property
    def policy(self) -> str:
        """What a step trades for memory: one of `models.config.POLICIES`."""
        return self.unet.policy

    @property
    def micro(self) -> int:
        """Volumes computed at a time: what all maps of a step, and the inputs that it is given, are sized by."""
        return micro_of(self.unet.norm, self.batch, self.micro_batch)

    @property
    def parts(self) -> int:
        """Micro-batches of a step. With more than one their gradients are summed before the update."""
        return self.batch // self.micro

    @property
    def canonical(self) -> "Job":
        """The same job with a micro-batch that the rule gives left to the rule: equal jobs then compare equal."""
        by_rule = dataclasses.replace(self, micro_batch=0)
        return by_rule if by_rule.micro == self.micro else self

    @property
    def voxels(self) -> int:
        """Of a micro-batch, so of all that is computed at a time."""
        return self.micro * math.prod(self.shape)


def micro_of(norm: str, batch: int, micro_batch: int) -> int:
    """Volumes computed at a time: `micro_batch`, and by rule where that is 0.

    The rule is 1 where the norm is per sample: the sum of the gradients is then the whole batch's, to rounding, in the
    least memory. With batch norm, whose statistics are of what is computed together, it is the whole batch.
    """
    return micro_batch or (batch if norm == "batch" else 1)


def check_micro_batch(batch: int, micro_batch: int) -> None:
    """Raise ValueError unless a batch can be computed so many volumes at a time; 0 is by rule, which always can be."""
    if micro_batch < 0 or (micro_batch and batch % micro_batch):
        raise ValueError(
            f"micro_batch must divide the batch of {batch}, got {micro_batch}; "
            f"give one of {', '.join(map(str, divisors(batch)))}"
        )


def statistics_note(norm: str, batch: int, micro: int) -> str:
    """What batch norm makes of a batch computed `micro` volumes at a time, in a sentence; "" where that is nothing."""
    if norm != "batch" or micro == batch:
        return ""
    return (
        f"batch norm's statistics are of {micro} of a batch's {batch} volumes at a time, so training differs from that "
        "on whole batches"
    )


def divisors(number: int) -> Tuple[int, ...]:
    """From 1 to `number`: the micro-batches that a batch can be computed in."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return (*small, *(number // n for n in reversed(small) if n * n != number))

"""What is to be estimated: one training step's network, grid, batch, optimizer and engine, as a frozen record."""

import math
from dataclasses import dataclass, field
from typing import Tuple

from models.config import POLICIES, UNetConfig

OPTIMIZERS = ("adam", "sgd")
ENGINES = ("itex", "stock")


@dataclass(frozen=True)
class Job:
    """One training job. Everything that its memory and time depend on, the host's speed aside."""

    unet: UNetConfig = field(default_factory=UNetConfig)
    """The network, its compute dtype included."""
    shape: Tuple[int, int, int] = (128, 128, 128)
    """Voxels X, Y, Z that the network sees."""
    batch: int = 1
    """Volumes a step."""
    optimizer: str = "adam"
    engine: str = "itex"
    """ "itex": TensorFlow with Intel's extension; "stock": without it. Both with oneDNN."""
    policy: str = "speed"
    """One of POLICIES."""
    threads: int = 1
    """Threads inside one operation: some scratch is taken once a thread."""
    averaged: bool = False
    """Whether an exponential moving average of the weights is kept."""
    from_store: bool = False
    """Whether a store feeds the step, as in `train`: one batch ahead and one volume in preparation count too. False is
    `bench memory`, which gives the same batch again and again."""
    cases: int = 0
    """Training cases, which make an epoch; 0 is unknown."""

    def __post_init__(self):
        self.unet.check_shape(self.shape)
        for name in ("batch", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}; give a positive number")
        if self.cases < 0:
            raise ValueError(f"cases must be at least 0, got {self.cases}; 0 is unknown")
        for name, allowed in (("optimizer", OPTIMIZERS), ("engine", ENGINES), ("policy", POLICIES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}; pick one")

    @property
    def voxels(self) -> int:
        """Of the whole batch."""
        return self.batch * math.prod(self.shape)

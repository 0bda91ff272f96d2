"""A training run for timing how it is fed: the trainer's own step, with the wait for data told apart."""

import time
from typing import Any, Dict, Iterator, List, Tuple

from cpu3d.host.memory import resident
from memory_estimator.host import read_host


class Waiting:
    """An iterator that counts the seconds its user waits for it."""

    def __init__(self, parts: Iterator[Any]):
        self._parts = parts
        self.waited_s = 0.0

    def __iter__(self) -> "Waiting":
        return self

    def __next__(self) -> Any:
        begin = time.perf_counter()
        try:
            return next(self._parts)
        finally:
            self.waited_s += time.perf_counter() - begin


def best_dtype() -> str:
    """What this host trains fastest in."""
    return read_host().best_dtype


def learner(
    grid: Tuple[int, int, int], *, channels: int, outputs: int, filters: int, depth: int, batch: int, norm: str = "none"
) -> Any:
    """The trainer's learner for a U-Net of a size, in the host's best dtype; a batch is computed at once.

    Without norm unless one is asked for: with as few filters as the small networks here have, norms take most of a
    step, and the step is to be short.
    """
    from cpu3d.config import RunConfig
    from cpu3d.training.learner import Learner
    from models.config import UNetConfig

    unet = UNetConfig(channels=channels, outputs=outputs, filters=filters, depth=depth, norm=norm, dtype=best_dtype())
    return Learner(RunConfig(grid=tuple(grid), unet=unet, batch=batch, micro_batch=batch))


def train(model: Any, feed: Iterator[Any], warm_up: int, steps: int) -> Dict[str, Any]:
    """Seconds a step over `steps` steps after those to warm up, and the share of them spent waiting for data."""
    begin = time.perf_counter()
    parts = Waiting(feed)
    model.step(parts, 1e-4)
    first_s = time.perf_counter() - begin
    for _ in range(warm_up - 1):
        model.step(parts, 1e-4)
    parts.waited_s, begin = 0.0, time.perf_counter()
    for _ in range(steps):
        model.step(parts, 1e-4)
    total_s = time.perf_counter() - begin
    now = resident()
    return {
        "step_s": total_s / steps,
        "wait_share": parts.waited_s / total_s,
        "first_step_s": first_s,
        "anonymous_bytes": now.anonymous_bytes if now else 0,
        "file_bytes": now.file_bytes if now else 0,
    }


def slope(values: List[float]) -> float:
    """What a series gains a step: the least-squares line through it."""
    import numpy as np

    return float(np.polyfit(np.arange(len(values)), values, 1)[0]) if len(values) > 1 else 0.0

"""What a norm fused with its ReLU keeps for the gradient: where the ReLU was open. One rule for both engines of the
estimator, from oneDNN's kernels for AVX-512 CPUs and the allocator's log."""

from typing import Tuple

VECTOR_CHANNELS = {"bfloat16": 16, "float32": 8}
"""Channels that oneDNN's vector kernel takes at a time."""


def is_narrow(channels: int, dtype: str) -> bool:
    """Whether the channels leave part of a vector empty: oneDNN then norms with a plain kernel, many times as slow."""
    return channels % VECTOR_CHANNELS.get(dtype, VECTOR_CHANNELS["float32"]) != 0


def mask_bytes(elements: int, channels: int, dtype: str, engine: str) -> int:
    """A bit an element where the vector kernel runs, else a byte. Stock TensorFlow takes that number of float32s."""
    workspace = elements if is_narrow(channels, dtype) else elements // 8
    return workspace if engine == "itex" else 4 * workspace


def mask_touched(size_bytes: int, engine: str) -> Tuple[Tuple[int, int], ...]:
    """Where a mask of that size is written, as of `memory_estimator.program.Tensor`: of stock's a quarter."""
    return () if engine == "itex" else ((0, size_bytes // 4),)

"""The one region that a lean step's memory is taken from: how large it is.

TensorFlow's allocator grows by regions that double in size, and of its free pieces takes the smallest that fits. Maps
that are nearly all of one size then lie scattered: in the gaps of small regions, and at the end of the last. From one
region that is larger than the step needs, it fills the gaps first. Nothing but the pages that tensors lie in becomes
resident, and the region's table (3 % of it). "speed" gains nothing: its scratch needs gaps of its own (docs/log.md).
"""

from typing import Optional, Tuple

from models.config import UNetConfig
from models.layer_plan import layer_plan

SHARES = {"balanced": 1.15, "lean": 0.9}
"""Of all the layers' outputs together; half as much again as the policies need at least, so that what is left at the
region's end is larger than any gap."""

COPIES_OF_WEIGHTS = 4
"""Weights, the optimizer's two slots, gradients: float32 each."""

MIB = 2**20


def region_bytes(unet: UNetConfig, shape: Tuple[int, int, int], micro: int, host_bytes: Optional[int] = None) -> int:
    """For steps of `micro` volumes of `shape` (X, Y, Z) at a time; 0 is no region of its own.

    A power of two, which is what the allocator makes of any size; the largest that a host of `host_bytes` has, where it
    has less than that. Raises ValueError for a shape that the network cannot take.
    """
    if unet.policy not in SHARES:
        return 0
    plan = layer_plan(unet, shape)
    maps = micro * sum(op.elements for op in plan) * (2 if unet.dtype == "bfloat16" else 4)
    weights = 4 * COPIES_OF_WEIGHTS * sum(op.trainable for op in plan)
    size = MIB
    while size < SHARES[unet.policy] * maps + weights:
        size *= 2
    while host_bytes is not None and size > host_bytes:
        size //= 2
    return size

"""What a GPU could train of the same network: patches, since a whole volume does not fit. Assumed, not verified."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

from memory_estimator.job import Job
from memory_estimator.liveness import timeline
from memory_estimator.planner import largest_number
from memory_estimator.program import StepOp, Tensor
from memory_estimator.training_step import training_step
from memory_estimator.units import format_bytes
from models.layer_plan import Shape3

CONTEXT_BYTES = 2**30
"""CUDA's context, cuDNN's and cuBLAS's handles and kernels."""

WORKSPACE_BYTES = 4 * 2**30
"""The most that TensorFlow lets cuDNN take for one convolution (TF_CUDNN_WORKSPACE_LIMIT_IN_MB)."""

BOTTOM = 2
"""Least voxels of the deepest level along an axis: a norm leaves nothing of a single voxel but zero."""

ASSUMPTIONS = (
    "assumed, not verified on a GPU: policy speed, the same step and order as on the CPU without oneDNN's scratch, for "
    "cuDNN a workspace as large as what the convolution reads and writes (4 GiB at most), 1 GiB for context and handles"
)


@dataclass(frozen=True)
class Patch:
    """The largest patch that fits."""

    job: Job
    """With the patch for its shape."""
    bytes: int
    share_of_volume: float
    """Voxels of the patch over those of the volume, 0 to 1."""

    @property
    def holds_volume(self) -> bool:
        """Whether the card trains a whole volume, so that no patches are needed."""
        return self.share_of_volume == 1

    def to_json(self) -> Dict[str, Any]:
        return {
            "patch": list(self.job.shape),
            "batch": self.job.batch,
            "peak_bytes": self.bytes,
            "share_of_volume": self.share_of_volume,
            "holds_volume": self.holds_volume,
            "assumptions": ASSUMPTIONS,
        }


def largest_patch(job: Job, memory_bytes: int) -> Optional[Patch]:
    """The largest of `patch_shapes` of the volumes of `job` that a GPU trains; None where not even the smallest fits.

    As many of them are computed at a time as the job says: one where that is left to the rule, but for batch norm.
    """
    shapes = patch_shapes(job.shape, job.unet.divisor)
    found = largest_number(lambda number: gpu_bytes(_of(job, shapes[number - 1])), memory_bytes, len(shapes))
    if not found:
        return None
    patch = _of(job, shapes[found - 1])
    return Patch(patch, gpu_bytes(patch), math.prod(patch.shape) / math.prod(job.shape))


def patch_for(job: Job, memory_bytes: int, name: str = "gpu_memory") -> Shape3:
    """The shape of `largest_patch`. Raises ValueError, with what the smallest would take, where none fits.

    `name` is what the error calls the memory.
    """
    found = largest_patch(job, memory_bytes)
    if found:
        return found.job.shape
    least = _of(job, least_patch(job.shape, job.unet.divisor))
    at_once = f", {job.micro} at a time," if job.micro > 1 else ","
    lower = "--filters or --micro-batch" if job.micro > 1 else "--filters"
    raise ValueError(
        f"{name} must hold a patch of at least {' x '.join(map(str, least.shape))}{at_once} which takes "
        f"{format_bytes(gpu_bytes(least))}, got {format_bytes(memory_bytes)}; lower {lower}, or use a larger card"
    )


def least_patch(volume: Shape3, divisor: int) -> Shape3:
    """The smallest patch of a `volume` that a network learns from: BOTTOM voxels along each axis at the deepest level,
    or as many as the volume has."""
    return tuple(min(BOTTOM * divisor, side) for side in volume)


def patch_shapes(volume: Shape3, divisor: int) -> Tuple[Shape3, ...]:
    """The patches to choose from, each one `divisor` longer along one axis than the one before; the last is `volume`.

    Cubes and near-cubes as far as the volume allows: the axis that grows is the shortest one that is not yet as long as
    the volume, of equals the first. The first is `least_patch`. All axes are divisible, as the volume's are.
    """
    shape = list(least_patch(volume, divisor))
    shapes = [tuple(shape)]
    while shapes[-1] != tuple(volume):
        axis = min((axis for axis in range(3) if shape[axis] < volume[axis]), key=lambda axis: shape[axis])
        shape[axis] += divisor
        shapes.append(tuple(shape))
    return tuple(shapes)


def gpu_bytes(job: Job) -> int:
    """Memory of a card that one training step takes under policy speed, by the assumptions of this module."""
    unet = dataclasses.replace(job.unet, policy="speed")  # the others are measured on CPUs alone
    program = training_step(dataclasses.replace(job, unet=unet, engine="stock", threads=1))
    ops = tuple(dataclasses.replace(op, scratch=_workspace(op), hidden_bytes=0) for op in program.ops)
    return CONTEXT_BYTES + timeline(dataclasses.replace(program, ops=ops)).peak_bytes


# --- Private helpers ---


def _of(job: Job, shape: Shape3) -> Job:
    return dataclasses.replace(job, shape=shape)


def _workspace(op: StepOp) -> Tuple[Tensor, ...]:
    if "conv" not in op.kind:
        return ()
    return (Tensor(f"{op.name}/workspace", min(op.traffic_bytes, WORKSPACE_BYTES), "scratch"),)

"""What a GPU could train of the same network: patches, since a whole volume does not fit. Assumed, not verified."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

from memory_estimator.job import Job
from memory_estimator.liveness import timeline
from memory_estimator.planner import cubes, largest_number
from memory_estimator.program import StepOp, Tensor
from memory_estimator.training_step import training_step

CONTEXT_BYTES = 2**30
"""CUDA's context, cuDNN's and cuBLAS's handles and kernels."""

WORKSPACE_BYTES = 4 * 2**30
"""The most that TensorFlow lets cuDNN take for one convolution (TF_CUDNN_WORKSPACE_LIMIT_IN_MB)."""

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
    """Voxels of the patch over those of the volume, 0 to 1 or more."""
    holds_volume: bool
    """Whether the card trains a whole volume, so that no patches are needed."""

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
    """The largest cube or near-cube that a GPU trains, one at a time; None where not even the smallest fits."""
    volume = dataclasses.replace(job, batch=1, micro_batch=1)
    chain = cubes(volume)
    found = largest_number(lambda number: gpu_bytes(chain(number)), memory_bytes)
    if not found:
        return None
    patch = chain(found)
    whole = gpu_bytes(volume) <= memory_bytes
    return Patch(patch, gpu_bytes(patch), math.prod(patch.shape) / math.prod(job.shape), whole)


def gpu_bytes(job: Job) -> int:
    """Memory of a card that one training step takes under policy speed, by the assumptions of this module."""
    unet = dataclasses.replace(job.unet, policy="speed")  # the others are measured on CPUs alone
    program = training_step(dataclasses.replace(job, unet=unet, engine="stock", threads=1))
    ops = tuple(dataclasses.replace(op, scratch=_workspace(op), hidden_bytes=0) for op in program.ops)
    return CONTEXT_BYTES + timeline(dataclasses.replace(program, ops=ops)).peak_bytes


# --- Private helpers ---


def _workspace(op: StepOp) -> Tuple[Tensor, ...]:
    if "conv" not in op.kind:
        return ()
    return (Tensor(f"{op.name}/workspace", min(op.traffic_bytes, WORKSPACE_BYTES), "scratch"),)

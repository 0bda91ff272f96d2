"""The recipes' jobs: what each named run asks of a host. The rest of a recipe, which no memory hangs on, is cpu3d's."""

from typing import Dict

from memory_estimator.job import Job
from models.config import UNetConfig

BRAIN_BOX = (144, 192, 144)
"""The box that holds every brain of the demo's phantoms, padded to a multiple of 16. Real brains fill about 135 x 174 x
136 voxels; the box of a store of one's own is in the first lines of `train`."""

FULL_GRID = (240, 240, 160)
"""The whole BraTS grid, 155 slices padded to a multiple of 16."""

USUAL_PATCH = (128, 128, 128)
"""nnU-Net's patch for BraTS (Isensee et al. 2021), where nothing is said and no card sets a limit."""

JOBS: Dict[str, Job] = {
    "demo": Job(UNetConfig(dtype="bfloat16"), BRAIN_BOX, cases=8),
    "paper-flair": Job(UNetConfig(channels=1, outputs=1, norm="batch", dtype="bfloat16"), FULL_GRID, cases=484),
    "paper-2020": Job(
        UNetConfig(channels=1, outputs=1, filters=32, depth=4, network="cicek2016", norm="batch"),
        (240, 240, 144),
        batch=16,
        micro_batch=1,
        cases=484,
    ),
    "brats-regions": Job(UNetConfig(dtype="bfloat16"), BRAIN_BOX),
    "gpu-patch": Job(UNetConfig(filters=32, dtype="bfloat16"), USUAL_PATCH, batch=2),
}
"""The grids are those of typical stores: `train` takes a store's own, or the patch that the card trains, and the dtype
from the host unless one is asked for. "paper-2020" is as published, in float32 on a grid cropped to 144 slices, but
computes its 16 volumes one at a time where the paper took them at once: that is a fraction of the memory, and batch
norm's statistics are of one volume."""

"""What was decided for a data set, each with its reason.

strides, why = strides_of_store(store, shape, depth)
"""

from typing import Tuple

from cpu3d.data.manifest import FOLD_SPLITS
from cpu3d.data.region import Shape3
from cpu3d.data.store import Store
from models.strides import Strides, common_spacing, strides_for, strides_reason


def strides_of_store(store: Store, shape: Shape3, depth: int) -> Tuple[Strides, str]:
    """The strides of a network of `depth` levels that sees `shape` voxels of a store's cases, and
    why: by the size of voxels in training and validation together, so that the networks of all
    folds are alike."""
    records = (record for split in FOLD_SPLITS for record in store.cases(split))
    spacing_mm = common_spacing(record.spacing_mm for record in records)
    strides = strides_for(spacing_mm, shape, depth)
    return strides, strides_reason(strides, spacing_mm, shape)

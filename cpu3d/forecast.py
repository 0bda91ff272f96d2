"""What a run costs: the time and memory of its steps, with what stands beside them, and the smaller
grids that it could have.

    price = price_of(config, store, workers, constants, accuracy)
    price(job).upper_bound_bytes
    smaller_grids(config, store)     # [("--patch 64 64 64", (64, 64, 64)), ...]"""

import math
from typing import List, Optional, Tuple

from cpu3d.data.region import Shape3
from cpu3d.data.store import Store, grid_size
from cpu3d.decisions import volume_shape
from cpu3d.settings import RunConfig
from memory_estimator import planner
from memory_estimator.accuracy import Accuracy
from memory_estimator.calibration import HostConstants
from memory_estimator.common.units import by
from memory_estimator.estimate import Estimate
from memory_estimator.training import Beside, price_of_run


def price_of(
    config: RunConfig,
    store: Store,
    workers: int,
    constants: HostConstants,
    accuracy: Accuracy,
    coarse: Optional[Estimate] = None,
) -> planner.Price:
    """The price of jobs as steps of a run on a store, as its fold sees it, after coarse steps if
    `coarse` is their estimate."""
    manifest = store.manifest
    whole: Optional[Shape3] = None
    sees_less = config.is_patch or config.resolution < 1  # than a validation
    if sees_less and manifest.split["val"]:
        whole = volume_shape(store, config)
    copies = 0  # of the variables
    if config.coarse_steps:
        copies += 1
    if config.has_open_length:
        copies += 1
    beside = Beside(
        volume_shape=whole,
        resolution=config.resolution_by_axis,
        copies=copies,
        left_bytes=coarse.allocator_peak_bytes if coarse else 0,
        scored_shape=_scored_shape(store),
        cases=len(manifest.cases),
        has_ignored=manifest.ignore is not None,
    )
    return price_of_run(constants, accuracy, beside, workers=workers)


def smaller_grids(config: RunConfig, store: Store) -> List[Tuple[str, Shape3]]:
    """Smaller grids that a run could have, each with its option, the smallest first."""
    if config.is_patch:
        *smaller, _ = planner.patch_shapes(config.grid, config.unet.divisors)
        return [(f"--patch {by(shape, ' ')}", shape) for shape in smaller]
    if config.resolution < 1 or config.extent == "brain":
        return []
    brain = grid_size(store, extent="brain", multiple=config.unet.divisors)
    return [("--extent brain", brain)]


def _scored_shape(store: Store) -> Optional[Shape3]:
    """The largest grid that answers on validation cases are brought back to; None if there are no
    such cases, or they were not resampled."""
    shapes = [record.scored_shape for record in store.cases("val") if record.resampled_from]
    return max(shapes, key=math.prod, default=None)

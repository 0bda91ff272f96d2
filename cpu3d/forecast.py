"""What a run does besides its full steps, as the estimator takes it, and the smaller grids that it
could have.

    course = course_of(config, store, steps, validations)
    course.forecast(job, constants, accuracy).upper_bound_bytes
    smaller_grids(config, store)     # [("--patch 64 64 64", (64, 64, 64)), ...]"""

import dataclasses
import math
from typing import List, Optional, Tuple

from cpu3d.data.region import Shape3
from cpu3d.data.store import Store, grid_size
from cpu3d.data.windows import window_count
from cpu3d.decisions import volume_shape
from cpu3d.settings import LEAST_CASES, RunConfig
from memory_estimator import planner
from memory_estimator.common.units import by
from memory_estimator.training import Beside, RunCourse


def course_of(config: RunConfig, store: Store, steps: int, validations: int) -> RunCourse:
    """The course of a run of so many steps and validations on a store, as its fold sees it."""
    held_out = len(store.manifest.split["val"])
    decided = _decided(config, store)
    scored_shape = _scored_shape(store)
    judged_shape = scored_shape if decided else None
    course = RunCourse(
        steps=steps,
        beside=_beside(config, store, judged_shape),
        budget_s=60 * config.budget_minutes if config.has_open_length else None,
        validations=validations,
        held_out=held_out,
        windows=_windows(config, store),
        decided=decided,
        flips=2 ** len(config.mirrored_axes),
        scored_voxels=math.prod(scored_shape or store.manifest.largest_shape),
    )
    if not config.coarse_steps:
        return course
    first = config.at(0)
    return dataclasses.replace(
        course,
        coarse_steps=config.coarse_steps,
        coarse_shape=first.grid,
        coarse_beside=_beside(first, store, judged_shape),
        coarse_windows=_windows(first, store),
    )


def smaller_grids(config: RunConfig, store: Store) -> List[Tuple[str, Shape3]]:
    """Smaller grids that a run could have, each with its option, the smallest first."""
    if config.is_patch:
        *smaller, _ = planner.patch_shapes(config.grid, config.unet.divisors)
        return [(f"--patch {by(shape, ' ')}", shape) for shape in smaller]
    if config.resolution < 1 or config.extent == "brain":
        return []
    brain = grid_size(store, extent="brain", multiple=config.unet.divisors)
    return [("--extent brain", brain)]


def _beside(config: RunConfig, store: Store, judged_shape: Optional[Shape3]) -> Beside:
    """What a worker holds beside the last steps of a configuration: full ones, if it has coarse
    ones before them."""
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
    return Beside(
        volume_shape=whole,
        resolution=config.resolution_by_axis,
        copies=copies,
        judged_shape=judged_shape,
        cases=len(manifest.cases),
        has_ignored=manifest.ignore is not None,
    )


def _windows(config: RunConfig, store: Store) -> int:
    """The windows that cover a whole volume."""
    if not config.is_patch:
        return 1
    return window_count(volume_shape(store, config), config.grid)


def _decided(config: RunConfig, store: Store) -> int:
    """The validation cases that post-processing is decided on; 0 if no region is in LEAST_CASES of
    them: then no network need be asked."""
    labelled = 0
    cases_with = dict.fromkeys(config.regions, 0)
    for record in store.cases("val"):  # each is read from disk
        labelled += record.has_label
        for name in cases_with:
            codes = config.region_codes[name]
            cases_with[name] += not record.label_voxels.keys().isdisjoint(codes)
    return labelled if max(cases_with.values(), default=0) >= LEAST_CASES else 0


def _scored_shape(store: Store) -> Optional[Shape3]:
    """The largest grid that validation cases are scored on; None if there are no such cases."""
    shapes = [record.scored_shape for record in store.cases("val")]
    return max(shapes, key=math.prod, default=None)

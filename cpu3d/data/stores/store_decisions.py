"""What was decided for a data set, each with its reason: how its channels are normalised, the size
of its voxels, the boxes that volumes are cut to, the levels, strides and coarse steps of the
default network, its regions.

    console.print(decided_table(store))               # at the end of `prepare`, and in `store info`
    strides, why = strides_of_store(store, median_extent(store, "brain"), depth)
"""

import dataclasses
import math
import statistics
from typing import List, NamedTuple, Sequence, Tuple

from cpu3d.data.cases.kinds import FROM_SHARE
from cpu3d.data.cases.resample import THICK_SLICES, in_mm, range_in_mm, target_spacing, thick_axis
from cpu3d.data.datasets.layouts import regions_of
from cpu3d.data.manifest import CaseRecord, Manifest
from cpu3d.data.nifti import ras_shape, ras_spacing_mm
from cpu3d.data.region import Shape3, round_up
from cpu3d.data.sampling import VolumeSampling
from cpu3d.data.store import Store, case_box
from cpu3d.util.records import count
from memory_estimator.common.table import Table
from memory_estimator.common.units import by
from models.config import UNetConfig
from models.strides import (
    LEAST_COARSE_VOXELS,
    Spacing3,
    Strides,
    axes_text,
    coarse_grid,
    common_spacing,
    depth_for,
    depth_reason,
    divisors_text,
    shape3,
    strides_for,
    strides_reason,
    strides_text,
)

# The cases that decide the network: together, so that the networks of all folds are alike.
DECIDING = ("train", "val")


class DecidedRow(NamedTuple):
    """A row of the table of what was decided for a store."""

    name: str
    value: str
    why: str


def decisions_of(store: Store) -> List[DecidedRow]:
    """What was decided for the data set of a store."""
    manifest = store.manifest
    median = median_extent(store, "brain")
    depth, why_depth = depth_of_store(store, median, UNetConfig().depth)
    strides, why_strides = strides_of_store(store, median, depth)
    unet = UNetConfig(depth=depth, strides=strides)
    curriculum, why_halved = curriculum_of_store(store, median, unet)
    multiples = f"of each case its content box, in multiples of {divisors_text(unet.divisors)}"
    grids = [round_up(record.box.size, unet.divisors) for record in manifest.cases]
    return [
        *_normalised(manifest),
        _spacing(store),
        DecidedRow("levels", str(depth), why_depth),
        DecidedRow("strides", strides_text(strides), why_strides),
        DecidedRow("grids", grids_text(grids), multiples),
        DecidedRow("half resolution", curriculum, why_halved),
        *_regions(manifest),
    ]


def decided_table(store: Store) -> Table:
    """The decisions for reading."""
    title = f"Decided for {store.manifest.name}"
    return Table(("", "decided", "why"), decisions_of(store), title=title, names=3)


def strides_of_store(store: Store, shape: Shape3, depth: int) -> Tuple[Strides, str]:
    """The strides of a network of `depth` levels that sees `shape` voxels of a store's cases, and
    why: by the size of voxels."""
    spacing_mm = _spacing_of(store)
    strides = strides_for(spacing_mm, shape, depth)
    return strides, strides_reason(spacing_mm, shape, depth)


def depth_of_store(
    store: Store, shape: Shape3, most: int, what: str = "the median case"
) -> Tuple[int, str]:
    """The levels of a network, `most` at most, that sees `shape` voxels of a store's cases, and
    why."""
    spacing_mm = _spacing_of(store)
    depth = depth_for(spacing_mm, shape, most)
    return depth, depth_reason(what, shape, depth, most)


def curriculum_of_store(
    store: Store, extent: Shape3, unet: UNetConfig, is_patch: bool = False
) -> Tuple[str, str]:
    """The curriculum that no setting gives, and why: half the grid of `extent`, along the axes that
    the first level halves, for no step, the first ones, or of whole volumes all."""
    stride = unet.stride(0)
    coarse = coarse_grid(extent, stride, unet.divisors)
    halved = f"{axes_text(stride)} halved, as by the first level: {by(coarse.grid, ' x ')}"
    if not coarse.is_taken:
        least = round(LEAST_COARSE_VOXELS ** (1 / 3))
        return "off", f"{halved} has fewer than {least}^3 voxels"
    if thick_axis(_spacing_of(store)) is not None and not is_patch:
        thick = f"slices are at least {THICK_SLICES} times as thick as voxels are wide"
        return "all", f"{thick}; {halved}"
    return "half", halved


def crop_share_of_store(store: Store, extent: str, unet: UNetConfig) -> float:
    """The voxels of crops around the labels as a share of those of whole volumes."""
    volumes = VolumeSampling(extent, multiple=unet.divisors)
    crops = dataclasses.replace(volumes, is_crop=True)
    records = _of_splits(store.manifest, *DECIDING)
    cropped, whole = [
        sum(math.prod(sampling.grid_of(record)) for record in records)
        for sampling in (crops, volumes)
    ]
    return cropped / whole


def median_extent(store: Store, extent: str) -> Shape3:
    """The median voxels X, Y, Z of the cases as `extent` cuts them, by which a network's levels and
    strides are decided, as in nnU-Net."""
    deciding = _of_splits(store.manifest, *DECIDING)
    sides = zip(*(case_box(record, extent).size for record in deciding))
    return shape3(round(statistics.median(lengths)) for lengths in sides)


def grids_text(grids: Sequence[Shape3]) -> str:
    """The smallest, the median and the largest of some grids, such as "64 x 64 x 32 to 96 x 96 x
    64, 80 x 64 x 32 in the median"."""
    ordered = sorted(grids, key=math.prod)
    smallest, middle, largest = (by(ordered[n], " x ") for n in (0, len(ordered) // 2, -1))
    if smallest == largest:
        return largest
    return f"{smallest} to {largest}, {middle} in the median"


# --- Private helpers ---


def _of_splits(manifest: Manifest, *names: str) -> List[CaseRecord]:
    """The cases of these splits, or all if there are none."""
    ids = {case_id for name in names for case_id in manifest.split[name]}
    return [record for record in manifest.cases if record.case_id in ids or not ids]


def _spacing_of(store: Store) -> Spacing3:
    return common_spacing(record.spacing_mm for record in _of_splits(store.manifest, *DECIDING))


def _normalised(manifest: Manifest) -> List[DecidedRow]:
    """The normalisation of each channel."""
    foregrounds: List[List[float]] = [[] for _ in manifest.channels]  # share of the voxels
    for record in manifest.cases:
        for shares, voxels in zip(foregrounds, record.channel_voxels):
            shares.append(voxels / math.prod(record.shape))
    lines = []
    for name, each, shares in zip(manifest.channels, manifest.normalisations, foregrounds):
        empty = 1 - statistics.median(shares)
        why = each.why or f"0 in {empty:.0%} of the voxels, background {FROM_SHARE}"
        lines.append(DecidedRow(f"channel {name}", each.words, why))
    return lines


def _spacing(store: Store) -> DecidedRow:
    """The size of voxels, and whether cases were resampled to it."""
    spacings = []
    shapes = []
    for record in _of_splits(store.manifest, "train"):  # as their files have them
        spacings.append(ras_spacing_mm(record.geometry))
        shapes.append(ras_shape(record.geometry))
    found = f"voxels of training cases have {range_in_mm(spacings)}"
    target_mm = store.manifest.target_spacing_mm
    by_itself = target_spacing(spacings, shapes)
    if by_itself != target_mm:
        found += "; by --spacing, or as the store was begun"
    if target_mm is None:
        value = f"{in_mm(common_spacing(spacings))}, as the files have them"
    else:
        resampled = sum(record.resampled_from is not None for record in store.manifest.cases)
        value = f"{in_mm(target_mm)}, {count(resampled, 'case')} resampled"
    return DecidedRow("spacing", value, found)


def _regions(manifest: Manifest) -> List[DecidedRow]:
    """The regions that are learnt, and the label that is not."""
    names = {code: f"{code} {name}" for code, name in manifest.labels.items()}
    why = "as the data set or --regions names them"
    if manifest.regions == {manifest.labels[code]: (code,) for code in names if code}:
        why = "a label is a region"
    elif manifest.regions == regions_of(manifest.labels, manifest.ignore):
        why = "by the labels' names"
    lines = []
    for region, codes in manifest.regions.items():
        labels = ", ".join(names.get(code, str(code)) for code in codes)
        lines.append(DecidedRow(f"region {region}", labels, why))
    if manifest.ignore is not None:
        why = "not annotated: neither learnt nor scored"
        lines.append(DecidedRow("ignored label", names[manifest.ignore], why))
    return lines

"""Tries an exported network on a case: with the program of USAGE.md it must answer as `predict`."""

import dataclasses
import math
from pathlib import Path
from typing import Any, Dict

import numpy as np

from cpu3d.data.cases.resample import TIE, resample_image, resampled_shape, to_source_grid
from cpu3d.data.labels import label_from_regions
from cpu3d.data.manifest import CaseRecord, SourceGrid
from cpu3d.data.nifti import ras_steps_mm
from cpu3d.data.normalise import Kind, in_units
from cpu3d.data.region import Array, Shape3, xyz
from cpu3d.errors import InputError
from cpu3d.inference.export.segment import (
    kinds_of,
    load_network,
    painted,
    probabilities_at,
    probabilities_of,
    processed,
    seen_of,
)
from cpu3d.inference.postprocessing.rules import PostProcessing
from cpu3d.inference.scores import voxel_mm3
from memory_estimator.common.units import by

# Largest difference of a probability from the same network in float32. In a brain of 144 x 176 x
# 128 voxels it is 2e-6 in ONNX and 0 as a SavedModel.
TOLERANCE = 1e-4
FINER = 0.8  # voxels of an image that the program's resampling is tried on, of the network's


def check_case_fits(record: CaseRecord, exact: Any) -> None:
    """Raise InputError unless the region of the case that `predict` would read is of the network's
    size."""
    config = exact.config
    size = exact.region(record).size
    if not config.is_patch and size != config.grid:
        if config.extent == "brain":
            extent = "brain"
            needed = record.box.size
        else:
            extent = "volume"
            needed = record.shape
        rule = f"case {record.case_id} must fit into {by(config.grid, ' x ')}"
        todo = f"export with --size {by(size, ' ')}, or name another --case"
        raise InputError(f"{rule}, got a {extent} of {by(needed, ' x ')}; {todo}")


def verify(
    about: Dict[str, Any],
    folder: Path,
    record: CaseRecord,
    image: np.ndarray,
    exact: Any,
    own: Any,
    postprocessing: PostProcessing,
) -> Dict[str, Any]:
    """Differences of the exported network, in one pass of the program of USAGE.md, from `exact`,
    the predictor in float32, and from `own`, in the run's dtype as `predict` computes, as in
    export.json; "passed" is whether it may be used. Both may be one predictor. Labels are compared
    after the run's `postprocessing`, those of `predict --raw` without it. `image` has the channels
    of the run. Raises InputError if `exact`'s answer is not finite."""
    regions = exact.regions
    steps_mm = ras_steps_mm(record.geometry)
    values = in_units(image, record.units).astype(np.float32)
    one_pass = {**about, "mirrored_axes": ()}
    network = load_network(folder, about)
    answer = probabilities_at(network, one_pass, values, record.spacing_mm)
    expected = [exact.probabilities(image, record, exact.inputs)]
    if own is exact:
        expected.append(expected[0])
    else:
        expected.append(own.probabilities(image, record, exact.inputs))
    raw = painted(answer, about)
    label = processed(answer, about, voxel_mm3(steps_mm))
    differ = {
        name: int(np.count_nonzero(label != postprocessing.paint(other, regions, steps_mm)))
        for name, other in zip(("float32", "predict"), expected)
    }
    differ["predict --raw"] = int(np.count_nonzero(raw != label_from_regions(expected[1], regions)))
    largest, from_predict = (float(np.abs(answer - other).max()) for other in expected)
    differences = {"largest_difference": largest}
    if about["target_spacing_mm"]:
        differences.update(_resampling_differences(network, one_pass, values, record))
    passed = all(difference <= TOLERANCE for difference in differences.values())  # none is NaN
    differences["largest_difference_from_predict"] = from_predict
    return {
        "case_id": record.case_id,
        "passed": passed,
        "tolerance": TOLERANCE,
        **{name: each if math.isfinite(each) else None for name, each in differences.items()},
        "voxels": int(np.prod(exact.region(record).size)),
        "different_labels": differ,
        "label_voxels": int(np.count_nonzero(label)),
        "postprocessed_voxels": int(np.count_nonzero(label != raw)),
    }


def _resampling_differences(
    network: Any, about: Dict[str, Any], values: Array, record: CaseRecord
) -> Dict[str, float]:
    """The largest differences of the program's resampling from that of `predict`, on an image whose
    voxels are finer than the network's: of what the network sees, as a share of its channel's
    range, and of the answer that is brought back.

    Where half of a voxel is background, rounding decides whether it is: it is left out of the
    first, and the second is of one and the same image that is seen."""
    target_mm = about["target_spacing_mm"]
    finer_mm = xyz(FINER * length for length in target_mm)
    own_shape = xyz(values.shape[:3])
    shape = resampled_shape(record.case_id, own_shape, finer_mm, target_mm)
    seen = seen_of(about, values, finer_mm)
    if seen.shape[:3] != shape:
        return {"largest_difference_resampled": math.inf}
    of_image = []
    for channel, each in enumerate(kinds_of(about)):
        volume = values[..., channel]
        outside = 0.0 if each["kind"] == Kind.FOREGROUND.value else None
        expected = resample_image(volume, shape, finer_mm, outside)
        apart = np.abs(seen[..., channel] - expected)
        if outside is not None:
            shares = _on_grid((volume != outside)[..., None], shape, record)[..., 0]
            apart[np.abs(shares - 0.5) <= TIE] = 0
        of_image.append(float(apart.max()) / max(float(np.ptp(volume)), 1e-30))
    answer = probabilities_of(network, about, seen)
    brought_back = probabilities_at(network, about, values, finer_mm)
    apart = np.abs(brought_back - _on_grid(answer, own_shape, record))
    return {
        "largest_difference_resampled": float(np.max(of_image)),
        "largest_difference_brought_back": float(apart.max()),
    }


def _on_grid(answers: Array, shape: Shape3, record: CaseRecord) -> Array:
    """Probabilities `(X, Y, Z, R)` as `predict` brings them to a grid of another shape."""
    made = dataclasses.replace(
        record, shape=xyz(answers.shape[:3]), resampled_from=SourceGrid(shape, {}, "")
    )
    return to_source_grid(answers, made)

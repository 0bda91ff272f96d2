"""Tries an exported network on a case: it must answer as the run's own does."""

from typing import Any, Dict, Sequence

import numpy as np

from cpu3d.data.labels import label_from_regions
from cpu3d.data.manifest import CaseRecord
from cpu3d.data.nifti import ras_steps_mm
from cpu3d.inference.postprocessing.rules import PostProcessing

# Largest difference of a probability from the same network in float32, which is computed by its
# definition in all programs: 2e-6 in a brain of 144 x 176 x 128 voxels. One sum over all of a map
# in float32, as of a fused norm, is 1.6e-4 off.
TOLERANCE = 2e-5


def verify(
    exported: Any,
    exact: Any,
    own: Any,
    image: np.ndarray,
    record: CaseRecord,
    channels: Sequence[str],
    postprocessing: PostProcessing,
) -> Dict[str, Any]:
    """How far the predictor of an exported network is from `exact`, that of the run in float32, and
    from `own`, in the run's dtype, on a case's own grid, as export.json has it; "passed" is whether
    the network may be used. Labels are compared after `postprocessing`, those of `predict --raw`
    without it."""
    answer = exported.probabilities(image, record, channels)
    expected = exact.probabilities(image, record, channels)
    as_predicted = expected
    if own is not exact:
        as_predicted = own.probabilities(image, record, channels)
    steps_mm = ras_steps_mm(record.geometry)

    def painted(answers: np.ndarray) -> np.ndarray:
        return postprocessing.paint(answers, exact.regions, steps_mm)

    raw = label_from_regions(answer, exact.regions)
    label = painted(answer)
    pairs = {
        "float32": (label, painted(expected)),
        "predict": (label, painted(as_predicted)),
        "predict --raw": (raw, label_from_regions(as_predicted, exact.regions)),
    }
    largest = float(np.abs(answer - expected).max())
    return {
        "case_id": record.case_id,
        "passed": largest <= TOLERANCE,
        "tolerance": TOLERANCE,
        "largest_difference": largest,
        "largest_difference_from_predict": float(np.abs(answer - as_predicted).max()),
        "voxels": int(np.prod(answer.shape[:3])),
        "different_labels": {
            name: int(np.count_nonzero(one != other)) for name, (one, other) in pairs.items()
        },
        "label_voxels": int(np.count_nonzero(label)),
        "postprocessed_voxels": int(np.count_nonzero(label != raw)),
    }

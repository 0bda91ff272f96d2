"""Labels made of boxes, and answers that are made of such boxes with a probability each."""

import numpy as np

from cpu3d.data.labels import region_mask
from cpu3d.inference.postprocessing.evidence import gather
from tests.cpu3d.conftest import REGIONS

MM = (1.0, 1.0, 1.0)
SHAPE = (60, 40, 40)
SURE = 0.99  # the probability of a box that has none of its own
UNSURE = 0.9

# Boxes: code, corner and size along X, Y, Z.
BIG = (1, (2, 2, 2), (20, 20, 20))  # 8000 voxels
CORE = (2, (4, 4, 4), (12, 12, 12))
ENHANCING = (3, (5, 5, 5), (6, 6, 6))  # 216 voxels in the core


def label_of(*boxes):
    """A label of boxes."""
    label = np.zeros(SHAPE, np.uint8)
    for code, corner, size, *_ in boxes:
        label[_slices(corner, size)] = code
    return label


def answers_of(*boxes, regions=REGIONS):
    """Probabilities whose label is that of the boxes, which may have a probability as fourth."""
    label = label_of(*boxes)
    answers = np.stack([region_mask(label, codes) for codes in regions.values()], -1)
    probability = np.full(SHAPE, SURE, np.float32)
    for _, corner, size, *of_box in boxes:
        probability[_slices(corner, size)] = of_box[0] if of_box else SURE
    return answers * probability[..., None]


def unsure(box):
    """A box that the network is not sure of."""
    return (*box, UNSURE)


def evidences_of(*pairs, regions=REGIONS):
    """The evidence of cases of (predicted boxes, true boxes)."""
    evidences = []
    for predicted, true in pairs:
        answers = answers_of(*predicted, regions=regions)
        evidences.append(gather(answers, label_of(*true), regions, MM))
    return evidences


def _slices(corner, size):
    return tuple(slice(at, at + n) for at, n in zip(corner, size))

"""What is annotated of a label that has a code for voxels to be ignored."""

import numpy as np

from cpu3d.data.region import Array, bounding_box, xyz
from cpu3d.errors import InputError


def check_annotated(label: Array, ignore: int, name: str, where: str) -> None:
    """Raise InputError for a label, or a box of it, of which all is to be ignored; `where` are
    words for the box."""
    if (label == ignore).all():
        rule = f"{name} must have annotated voxels"
        todo = "annotate some there, leave the case out, or resample it less with --spacing"
        raise InputError(f"{rule}, got {ignore}, to be ignored, in {where}; {todo}")


def ignored_in_box(label: Array, image: Array, ignore: int) -> Array:
    """Make ignored voxels background outside of the box around annotated voxels and voxels that
    are not zero in some channel."""
    mask = image.any(axis=-1) | ((label != ignore) & (label > 0))
    box = bounding_box(mask).slices(xyz(label.shape))
    inside = np.zeros_like(label)
    inside[box] = label[box]
    return inside

"""Where in a file a box of its array lies."""

from typing import List, Sequence, Tuple

import numpy as np

GAP_BYTES = 16 * 1024
"""Two parts of a file that lie closer than this are read as one: a read of its own costs more than so many bytes."""


def byte_runs(shape: Sequence[int], itemsize: int, slices: Sequence[slice], offset: int) -> List[Tuple[int, int]]:
    """The parts (first byte, length) of a file that hold a box of its C-ordered array, gaps under `GAP_BYTES` included.

    `slices`: a start and a stop along each axis, none of them empty. `offset`: where the array begins in the file.
    """
    # What is whole along its last axes is one row; the axes before it tell where the rows begin.
    strides = [itemsize * int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]
    last = max((axis for axis, n in enumerate(shape) if slices[axis].stop - slices[axis].start < n), default=0)
    starts = np.zeros(1, np.int64)
    for axis in range(last):
        steps = np.arange(slices[axis].start, slices[axis].stop, dtype=np.int64) * strides[axis]
        starts = (starts[:, None] + steps).reshape(-1)
    length = (slices[last].stop - slices[last].start) * strides[last]
    starts += offset + slices[last].start * strides[last]
    apart = np.flatnonzero(np.diff(starts) - length >= GAP_BYTES) + 1
    first = np.concatenate([[0], apart])
    end = np.concatenate([apart, [len(starts)]]) - 1
    return [(int(starts[a]), int(starts[b] - starts[a] + length)) for a, b in zip(first, end)]

"""The probabilities of a case on the full grid of its image, as many of them as are asked for.

    answers = predictor.probabilities(image, record)
    answers[..., 0]         # of a region, (X, Y, Z)
    answers[20:40]          # of slices along X, (20, Y, Z, R)
    answers[20:40, ..., 0]  # of a region in them, (20, Y, Z)

They are in memory on the network's grid alone: on one of 512 x 512 x 400 voxels each region takes
400 MiB, and four of them more than the network."""

from typing import Any, Callable

import numpy as np

from cpu3d.data.region import Array, Shape3

Make = Callable[[int, slice], Array]  # region, rows along X -> probabilities (rows, Y, Z) float32


class Answers:
    """Like an array (X, Y, Z, R) float32, of which a part is made when it is asked for."""

    dtype = np.dtype(np.float32)

    def __init__(self, shape: Shape3, regions: int, make: Make):
        self.shape = (*shape, regions)
        self._make = make

    def __getitem__(self, index: Any) -> Array:
        if isinstance(index, slice):
            return np.stack([self._make(region, index) for region in range(self.shape[3])], -1)
        *rows, others, region = index
        if others is not ...:
            raise IndexError(
                f"answers must be read by rows and region, got {index}; use np.asarray"
            )
        return self._make(region, rows[0] if rows else slice(None))

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        return self[:]

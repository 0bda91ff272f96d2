"""The operations in float64 with NumPy, and the C functions through ctypes."""

import itertools
import os

import ml_dtypes
import numpy as np

from models.native.calls import load  # noqa: F401
from models.native.instruction_sets import INSTRUCTION_SETS
from models.native.library import BFLOAT16, FLOAT32
from records.calls import operation

LIBRARY = os.environ.get("CPU3D_KERNELS")
KERNELS = [
    (name, dtype)
    for name, each in INSTRUCTION_SETS.items()
    for dtype in ("float32", "bfloat16")
    if dtype == "bfloat16" or not each.bfloat16_alone
]
DTYPES = {"float32": (FLOAT32, np.float32), "bfloat16": (BFLOAT16, ml_dtypes.bfloat16)}
THREADS = (1, 2, 3, 8, 56)  # of an operation
MOST_AT_ONCE = 5
ITERATION = (3.4445, -4.7750, 2.0315)  # Jordan's, of an orthogonal matrix
ROUNDS = 5


class Kernel:
    """The C functions of an instruction set, for maps of a dtype."""

    def __init__(self, library, name, dtype):
        self.library = library
        self.name = name
        self.dtype = dtype
        self.numpy = DTYPES[dtype][1]

    def run(self, kind, shape, threads, *arguments, **arrays):
        """An operation. More threads than MOST_AT_ONCE compute one after the other: every later
        operation would wake all that were ever started."""
        call = operation(kind, self.dtype, shape, threads, *arguments, **arrays)
        self.library.native_time_on_paper(threads > MOST_AT_ONCE)
        code = self.library.native_run(self.name.encode(), call)
        self.library.native_time_on_paper(0)
        assert code == 0

    def maps(self, rng, shape, *channels):
        return [rng.standard_normal((*shape, width)).astype(self.numpy) for width in channels]


def coefficients_of(rng, shape, channels):
    """Coefficients of a norm, or of its gradient; floors are ReLUs, others, and none."""
    coefficients = rng.standard_normal((shape[0], 6, channels)).astype(np.float32)
    coefficients[:, 2] = rng.choice([0, 0.5, -np.inf], (shape[0], channels))
    return coefficients


def rows_of(coefficients):
    """Each of the coefficients [batch, 6, channels] over a grid, in float64."""
    return np.moveaxis(coefficients.astype(np.float64), 1, 0)[:, :, None, None, None, :]


def formed(maps, coefficients=None, raw=None):
    """Convolved values in float64: maps, with a norm, or the gradient of a map."""
    values = np.concatenate([array.astype(np.float64) for array in maps], -1)
    if coefficients is None:
        return values
    scale, shift, floor, a, b, c = rows_of(coefficients)
    if raw is None:
        return np.maximum(scale * values + shift, floor)
    raw = raw.astype(np.float64)
    return a * np.where(scale * raw + shift > floor, values, 0) + b * raw + c


def norm_sums(gradient, raw, coefficients):
    """Both sums that a norm's gradient needs, of a map that was written."""
    scale, shift, floor, mean, rstd, _ = rows_of(coefficients)
    raw = raw.astype(np.float64)
    passed = np.where(scale * raw + shift > floor, gradient.astype(np.float64), 0)
    return np.stack([passed, passed * (raw - mean) * rstd], 1).sum((2, 3, 4))


def parts_of(fine, strides):
    """(voxels, batch, x, y, z, channels): those under each of the coarser grid, the last axis
    first."""
    starts = itertools.product(*map(range, strides))
    x, y, z = strides
    return np.stack([fine[:, i::x, j::y, k::z] for i, j, k in starts])


def whole(parts, strides):
    """`parts_of` undone."""
    _, batch, *sides, channels = parts.shape
    made = np.zeros((batch, *np.multiply(sides, strides), channels))
    x, y, z = strides
    for (i, j, k), part in zip(itertools.product(*map(range, strides)), parts):
        made[:, i::x, j::y, k::z] = part
    return made


def first_of_largest(values, grad, strides):
    """The gradient of a max pool's input."""
    parts = parts_of(values, strides)
    voxels = np.arange(len(parts))[:, None, None, None, None, None]
    return whole((voxels == parts.argmax(0)) * grad, strides)


def shifted(values):
    """The 27 shifted maps of "same" zero padding, in the order of the filters' taps."""
    x, y, z = values.shape[1:4]
    padded = np.pad(values, ((0, 0), (1, 1), (1, 1), (1, 1), (0, 0)))
    starts = itertools.product(range(3), repeat=3)
    return [padded[:, i : i + x, j : j + y, k : k + z] for i, j, k in starts]


def convolved(values, filters):
    taps = filters.astype(np.float64).reshape(27, *filters.shape[3:])
    return sum(part @ tap for part, tap in zip(shifted(values), taps))


def filter_gradient_of(values, gradient):
    flat = gradient.reshape(-1, gradient.shape[-1])
    parts = [part.reshape(-1, part.shape[-1]).T @ flat for part in shifted(values)]
    return np.stack(parts).reshape(3, 3, 3, values.shape[-1], -1)


def orthogonal(matrix):
    """Newton and Schulz' iteration on the matrix itself."""
    x = matrix.astype(np.float64)
    scale = max(1.0, x.shape[0] / x.shape[1]) ** 0.5
    x /= np.linalg.norm(x)
    a, b, c = ITERATION
    for _ in range(ROUNDS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return scale * x

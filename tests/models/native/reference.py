"""The operations in float64 with NumPy, and the C functions through ctypes."""

import ctypes
import os
from ctypes import POINTER, c_char_p, c_int, c_void_p

import ml_dtypes
import numpy as np

FLOAT32, BFLOAT16 = 0, 1
LIBRARY = os.environ.get("CPU3D_KERNELS")
KERNELS = [
    *(("avx2", "float32"), ("avx2", "bfloat16"), ("avx512", "float32"), ("avx512", "bfloat16")),
    *(("avx512_bf16", "bfloat16"), ("amx", "bfloat16"), ("amx_in_c", "bfloat16")),
    ("amx_in_c_avx512", "bfloat16"),
]
DTYPES = {"float32": (FLOAT32, np.float32), "bfloat16": (BFLOAT16, ml_dtypes.bfloat16)}


KINDS = ("convolve", "input_gradient", "filter_gradient")
KINDS += ("max_pool", "max_pool_gradient", "residual_sum", "residual_gradient", "to_raw", "project", "project_gradient")
KINDS += ("project_sums", "project_to_raw", "up_convolve", "up_input_gradient", "up_filter_gradient")
LOSSES = ("loss_sums", "loss_slope")
KINDS += (*LOSSES, "orthogonal")  # as in native.h


class Operation(ctypes.Structure):
    _fields_ = (
        *((name, c_int) for name in ("kind", "dtype", "threads", "batch", "x", "y", "z")),
        *(("channels", c_int * 2), ("outputs", c_int)),
        *((name, c_void_p * 2) for name in ("maps", "others")),
        *((name, c_void_p) for name in ("coefficients", "other_coefficients", "filters", "bias")),
        *((name, c_void_p) for name in ("map", "sums_to", "filter_gradient", "bias_gradient", "scratch")),
        ("finer", c_int * 3),
    )


def operation(kind, dtype, shape, threads, maps, outputs, others=(), **arrays):
    """An Operation on NumPy arrays; it does not keep them."""
    made = Operation(KINDS.index(kind), DTYPES[dtype][0], threads, *shape, outputs=outputs)
    for i, array in enumerate(maps):
        made.maps[i], made.channels[i] = pointer(array), array.shape[-1]
    for i, array in enumerate(others):
        made.others[i] = pointer(array)
    for name, array in arrays.items():
        setattr(made, name, pointer(array))
    return made


def load(path):
    library = ctypes.CDLL(str(path))
    library.native_run.argtypes = (c_char_p, POINTER(Operation))
    library.native_kernels.argtypes = (c_char_p, c_int)
    library.native_kernels.restype = c_void_p
    return library


def pointer(array):
    return None if array is None else array.ctypes.data


def formed(maps, coefficients=None, raw=None):
    """Convolved values in float64: maps, with a norm (coefficients [batch, 6, channels]), or the gradient of a map."""
    values = np.concatenate([array.astype(np.float64) for array in maps], -1)
    if coefficients is None:
        return values
    scale, shift, floor, a, b, c = np.moveaxis(coefficients.astype(np.float64), 1, 0)[:, :, None, None, None, :]
    if raw is None:
        return np.maximum(scale * values + shift, floor)
    raw = raw.astype(np.float64)
    return a * np.where(scale * raw + shift > floor, values, 0) + b * raw + c


def shifted(values):
    """The 27 shifted maps of "same" zero padding, in the order of the filters' taps."""
    x, y, z = values.shape[1:4]
    padded = np.pad(values, ((0, 0), (1, 1), (1, 1), (1, 1), (0, 0)))
    return [padded[:, i : i + x, j : j + y, k : k + z] for i in range(3) for j in range(3) for k in range(3)]


def convolved(values, filters):
    taps = filters.astype(np.float64).reshape(27, *filters.shape[3:])
    return sum(part @ tap for part, tap in zip(shifted(values), taps))


def filter_gradient_of(values, gradient):
    flat = gradient.reshape(-1, gradient.shape[-1])
    parts = [part.reshape(-1, part.shape[-1]).T @ flat for part in shifted(values)]
    return np.stack(parts).reshape(3, 3, 3, values.shape[-1], -1)

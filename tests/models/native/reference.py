"""The operations in float64 with NumPy, and the C functions through ctypes."""

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_void_p

import ml_dtypes
import numpy as np

FLOAT32, BFLOAT16 = 0, 1
RAW, NORM_RELU, NORM_RELU_GRADIENT = 0, 1, 2
NO_SUMS, MOMENTS, NORM_SUMS = 0, 1, 2
DTYPES = {"float32": (FLOAT32, np.float32), "bfloat16": (BFLOAT16, ml_dtypes.bfloat16)}


class Input(ctypes.Structure):
    _fields_ = (
        ("form", c_int),
        ("channels", c_int * 2),
        ("maps", c_void_p * 2),
        ("raw", c_void_p),
        ("coefficients", c_void_p),
    )


class Output(ctypes.Structure):
    _fields_ = (
        ("channels", c_int),
        ("map", c_void_p),
        ("sums", c_int),
        ("sums_to", c_void_p),
        ("raw", c_void_p),
        ("below", c_void_p),
    )


class Operation(ctypes.Structure):
    _fields_ = (
        ("dtype", c_int),
        ("batch", c_int),
        ("x", c_int),
        ("y", c_int),
        ("z", c_int),
        ("threads", c_int),
        ("input", Input),
        ("filters", POINTER(c_float)),
        ("transposed", c_int),
        ("output", Output),
        ("gradient", Input),
        ("filter_gradient", POINTER(c_float)),
    )


def load(path):
    library = ctypes.CDLL(str(path))
    for function in (library.native_convolve, library.native_filter_gradient):
        function.argtypes = (c_char_p, POINTER(Operation))
    library.native_kernels.argtypes = (c_char_p, c_int)
    library.native_kernels.restype = c_void_p
    return library


def pointer(array):
    return None if array is None else array.ctypes.data


def as_floats(array):
    return array.ctypes.data_as(POINTER(c_float))


def given(maps, coefficients=None, raw=None):
    """An Input: one map or two, with a norm (coefficients [batch, 6, channels]), or the gradient of a norm."""
    form = RAW if coefficients is None else NORM_RELU if raw is None else NORM_RELU_GRADIENT
    channels = [one.shape[-1] for one in maps] + [0] * (2 - len(maps))
    pointers = [pointer(one) for one in maps] + [None] * (2 - len(maps))
    return Input(form, (c_int * 2)(*channels), (c_void_p * 2)(*pointers), pointer(raw), pointer(coefficients))


def formed(maps, coefficients=None, raw=None):
    """What `given` stands for, in float64."""
    values = np.concatenate([one.astype(np.float64) for one in maps], -1)
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

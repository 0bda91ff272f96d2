"""The C functions of own operations by ctypes, without TensorFlow: for measurements and tests.

library = load(own_operations().kernels)
call = operation("to_raw", "float32", (1, 8, 8, 8), 2, [raw], 16, [gradient], map=made)
library.native_run(None, call)  # 0; None is the best instruction set
"""

import ctypes
from pathlib import Path
from typing import Any, Sequence, Tuple, Union

from models.native.library import BFLOAT16, FLOAT32
from models.native.shared import KINDS

CODES = {"float32": FLOAT32, "bfloat16": BFLOAT16}


class Operation(ctypes.Structure):
    """`struct operation` of native.h."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("kind", "dtype", "threads", "batch", "x", "y", "z")),
        *(("channels", ctypes.c_int * 2), ("outputs", ctypes.c_int)),
        *((name, ctypes.c_void_p * 2) for name in ("maps", "others")),
        *((name, ctypes.c_void_p) for name in ("coefficients", "other_coefficients")),
        *((name, ctypes.c_void_p) for name in ("filters", "bias", "map", "sums_to")),
        *((name, ctypes.c_void_p) for name in ("filter_gradient", "bias_gradient", "scratch")),
        ("finer", ctypes.c_int * 3),
    )


def load(path: Union[str, Path]) -> ctypes.CDLL:
    """The library of `build.Libraries.kernels`."""
    library = ctypes.CDLL(str(path))
    library.native_run.argtypes = (ctypes.c_char_p, ctypes.POINTER(Operation))
    library.native_kernels.argtypes = (ctypes.c_char_p, ctypes.c_int)
    library.native_kernels.restype = ctypes.c_void_p
    library.native_time_on_paper.argtypes = (ctypes.c_int,)
    library.native_time_on_paper.restype = ctypes.c_double
    return library


def operation(
    kind: str,
    dtype: str,
    shape: Tuple[int, int, int, int],
    threads: int,
    maps: Sequence[Any],
    outputs: int,
    others: Sequence[Any] = (),
    **arrays: Any,
) -> Operation:
    """An Operation on NumPy arrays, or None in place of one; it does not keep them. `shape` is
    batch, x, y, z; `arrays` are other fields by their names."""
    made = Operation(list(KINDS).index(kind), CODES[dtype], threads, *shape, outputs=outputs)
    for i, array in enumerate(maps):
        made.maps[i] = pointer(array)
        made.channels[i] = array.shape[-1]
    for i, array in enumerate(others):
        made.others[i] = pointer(array)
    for name, array in arrays.items():
        setattr(made, name, pointer(array))
    return made


def pointer(array: Any) -> Any:
    return None if array is None else array.ctypes.data

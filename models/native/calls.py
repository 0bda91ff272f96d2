"""The C functions of native operations by ctypes, without TensorFlow: for measurements and tests.

library = load(native_operations().kernels)
call = operation("to_raw", "float32", (1, 8, 8, 8), 2, [raw], 16, [gradient], map=made)
library.native_run(None, call)  # 0; None is the best instruction set
"""

import ctypes
from pathlib import Path
from typing import Any, Optional, Sequence, Tuple, Union

from models.native.library import DTYPE_CODES
from models.native.shared import KIND_CODES


class Operation(ctypes.Structure):
    """`struct operation` of native.h."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("dtype", ctypes.c_int),
        ("threads", ctypes.c_int),
        ("batch", ctypes.c_int),
        ("x", ctypes.c_int),
        ("y", ctypes.c_int),
        ("z", ctypes.c_int),
        ("channels", ctypes.c_int * 2),
        ("outputs", ctypes.c_int),
        ("maps", ctypes.c_void_p * 2),
        ("others", ctypes.c_void_p * 2),
        ("coefficients", ctypes.c_void_p),
        ("other_coefficients", ctypes.c_void_p),
        ("filters", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("map", ctypes.c_void_p),
        ("sums_to", ctypes.c_void_p),
        ("filter_gradient", ctypes.c_void_p),
        ("bias_gradient", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("finer", ctypes.c_int * 3),
    )


def load(path: Union[str, Path]) -> ctypes.CDLL:
    """The library of `build.Libraries.kernels`. Raises OSError for one that does not load."""
    library = ctypes.CDLL(str(path))
    library.native_run.argtypes = (ctypes.c_char_p, ctypes.POINTER(Operation))
    library.native_scratch.argtypes = (ctypes.c_char_p, ctypes.POINTER(Operation))
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
    strides: Sequence[int] = (2, 2, 2),
    **arrays: Any,
) -> Operation:
    """An Operation on NumPy arrays, or None in place of one; it does not keep them. `shape` is
    batch, x, y, z; `strides` are voxels of the finer grid for one of the coarser, where there are
    two; `arrays` are other fields by their names."""
    made = Operation(KIND_CODES[kind], DTYPE_CODES[dtype], threads, *shape, outputs=outputs)
    made.finer[:] = strides
    for i, array in enumerate(maps):
        made.maps[i] = pointer(array)
        made.channels[i] = array.shape[-1]
    for i, array in enumerate(others):
        made.others[i] = pointer(array)
    for name, array in arrays.items():
        setattr(made, name, pointer(array))
    return made


def scratch_of(
    library: ctypes.CDLL, instructions: str, call: Operation, l2_bytes: int
) -> Optional[Tuple[int, int, int, float]]:
    """What an operation takes besides its maps with an instruction set, on any CPU: threads that
    keep memory, bytes of each of them, bytes that pass on, and the share of all threads' time in
    which they compute. None if the library is not built for the instruction set."""
    answer = (ctypes.c_size_t * 4)(l2_bytes)
    call.scratch = ctypes.addressof(answer)
    if library.native_scratch(instructions.encode(), ctypes.byref(call)):
        return None
    threads, kept_bytes, passing_bytes, millionths = answer
    return threads, kept_bytes, passing_bytes, millionths / 1e6


def pointer(array: Any) -> Any:
    return None if array is None else array.ctypes.data

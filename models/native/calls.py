"""The C functions of native operations by ctypes, without TensorFlow. The memory estimator asks
them what they would take; records/calls.py runs them."""

import ctypes
from pathlib import Path
from typing import Optional, Tuple, Union


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

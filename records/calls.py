"""Native operations by their C functions, without TensorFlow: for measurements and tests.

library = load(native_operations().kernels)
call = operation("to_raw", "float32", (1, 8, 8, 8), 2, [raw], 16, [gradient], map=made)
library.native_run(None, call)  # 0; None is the best instruction set
"""

import ctypes
import time
from typing import Any, Sequence, Tuple

from models.native.calls import Operation, load
from models.native.library import DTYPE_CODES, native_operations
from models.native.shared import KIND_CODES


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


def products_per_s(dtype: str, threads: int) -> float:
    """Multiplications and additions a second of the products alone, of values in the cache L1: the
    most of a few runs. A short convolution may be counted as faster, as it needs fewer of them."""
    library = load(native_operations().kernels)
    library.native_products.restype = ctypes.c_double
    code = DTYPE_CODES[dtype]
    best = 0.0
    for _ in range(5):
        begin = time.perf_counter()
        done = library.native_products(None, code, threads, ctypes.c_long(10_000))
        best = max(best, done / (time.perf_counter() - begin))
    return best


def pointer(array: Any) -> Any:
    return None if array is None else array.ctypes.data

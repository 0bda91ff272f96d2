"""How fast native operations could compute here."""

import ctypes
import time

from models.native.calls import load
from models.native.library import DTYPE_CODES, NativeOperations, native_operations


def products_per_s(dtype: str, threads: int) -> float:
    """Multiplications and additions a second of the products alone, of values in the cache L1: the
    most of a few runs. A short convolution may be counted as faster, as it needs fewer of them."""
    library = _library(native_operations())
    library.native_products.restype = ctypes.c_double
    code = DTYPE_CODES[dtype]
    best = 0.0
    for _ in range(5):
        begin = time.perf_counter()
        done = library.native_products(None, code, threads, ctypes.c_long(10_000))
        best = max(best, done / (time.perf_counter() - begin))
    return best


def _library(native: NativeOperations) -> ctypes.CDLL:
    """The functions of native.h."""
    if native.kernels is None:
        raise RuntimeError(f"native operations must load here, got none: {native.why}")
    return load(native.kernels)

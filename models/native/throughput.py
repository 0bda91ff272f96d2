"""How fast native operations compute here, and how fast they could."""

import ctypes
import time
from typing import NamedTuple

import tensorflow as tf

from models.native.calls import load
from models.native.instruction_sets import INSTRUCTION_SETS
from models.native.library import DTYPE_CODES, NativeOperations, native_operations
from models.native.operations import Source, convolve


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


class Speed(NamedTuple):
    """Multiplications and additions a second, of a transformed convolution those that it does."""

    convolution: float
    limit: float  # `products_per_s`

    @property
    def share(self) -> float:
        return self.convolution / self.limit


EDGE = 48  # voxels along each axis of the convolution that is timed
CHANNELS = 32  # of its map and of its outputs


def speed(dtype: str) -> Speed:
    """How fast a convolution is here, with the instruction set and the threads that a training
    would have: the fastest of a few runs, beside the limit measured just before."""
    native = native_operations()
    name = native.of(dtype)
    limit = products_per_s(dtype, _library(native).thread_count())
    shape = (1, EDGE, EDGE, EDGE, CHANNELS)
    source = Source(tf.cast(tf.random.stateless_uniform(shape, (1, 2), -1.0), dtype))
    filters = tf.random.stateless_uniform((3, 3, 3, CHANNELS, CHANNELS), (3, 4), -1.0)
    fastest_s = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        raw = convolve([source], filters).map
        raw[0, 0, 0, 0].numpy()  # until it is there
        fastest_s = min(fastest_s, time.perf_counter() - begin)
    plain = 2 * 27 * CHANNELS**2 * EDGE**3
    return Speed(plain * INSTRUCTION_SETS[name].products_share / fastest_s, limit)


def _library(native: NativeOperations) -> ctypes.CDLL:
    """The functions of native.h."""
    if native.kernels is None:
        raise RuntimeError(f"native operations must load here, got none: {native.why}")
    return load(native.kernels)

"""Memory of native operations outside TensorFlow's allocator, and how busy they keep their threads,
as their library answers (models/native/calls.py).

A buffer for each thread stays from operation to operation, and one passes from each operation to
the next. A buffer is as large as the largest operation so far has made it, whichever that was.
"""

import contextlib
import ctypes
import functools
from typing import Iterable, List, NamedTuple, Optional

from memory_estimator.step.timeline import NativeOperation, StepOp
from models.native import build, calls
from models.native.instruction_sets import INSTRUCTION_SETS
from models.native.library import DTYPE_CODES
from models.native.shared import KIND_CODES

LINE_BYTES = 64  # in front of a buffer
PAGE_BYTES = 4096  # what a buffer is rounded up to
THREAD_BYTES = 3 * 2**19  # of `_bound`: sums of a thread's part of the grid

WITH_FILTERS = (
    "project",
    "project_gradient",
    "project_sums",
    "project_to_raw",
    "up_convolve",
    "up_input_gradient",
)
WITH_FILTER_GRADIENT = ("project_gradient", "project_sums", "up_filter_gradient")
"""Kinds that hold filters, or their gradient, as they are asked for."""

MOST_ASKED = 2**24  # rows, values of a row, filters: far larger ones would not fit C's integers


class Scratch(NamedTuple):
    """What one operation takes besides its maps."""

    threads: int  # that keep some: one for each piece
    kept_bytes: int  # of each of them
    passing_bytes: int
    busy_share: float  # of all threads' time in which they do not wait for the largest piece


def scratch_bytes(ops: Iterable[StepOp], threads: int, instructions: str, l2_bytes: int) -> int:
    """All buffers after these operations, with an instruction set and so large a cache L2; at most,
    where no library can be asked."""
    native_ops = [op for op in ops if op.native]
    every: List[Scratch] = []
    for op in native_ops:
        scratch = _answer(op, threads, instructions, l2_bytes)
        if scratch is None:
            return scratch_bound(native_ops, threads, l2_bytes)
        every.append(scratch)
    total = _mapped(max((each.passing_bytes for each in every), default=0))
    counted = 0
    for count in sorted({each.threads for each in every}):
        largest = max(each.kept_bytes for each in every if each.threads >= count)
        total += (count - counted) * _mapped(largest)
        counted = count
    return total


def busy_share(op: StepOp, threads: int, instructions: str) -> float:
    """The share of so many threads' time in which they compute the pieces of an operation, and do
    not wait for the largest; 1 where it is not known, and of TensorFlow's operations, which are
    taken to divide evenly."""
    scratch = _answer(op, threads, instructions, 0)  # whatever the cache
    return scratch.busy_share if scratch else 1.0


def scratch_bound(ops: Iterable[StepOp], threads: int, l2_bytes: int) -> int:
    """`scratch_bytes` at most, with any instruction set, some times too high: rows in the caches,
    maps that are written in place, transformed filters and their sums."""
    kept = 0
    filters = 0
    for op in ops:
        native = op.native
        if native and native.kind != "orthogonal":
            _, y, z = native.grid
            channels = 32 + native.channels + native.outputs
            saved = 2 * (y + 2) * z * native.outputs * native.value_bytes if op.is_in_place else 0
            kept = max(kept, 2**6 * (z + 16) * channels + saved)
            filters = max(filters, native.channels * native.outputs)
    return threads * (l2_bytes + kept + THREAD_BYTES) + 3 * 216 * filters


def _answer(op: StepOp, threads: int, instructions: str, l2_bytes: int) -> Optional[Scratch]:
    if op.native is None or not instructions:
        return None
    return scratch_of(op.native, threads, instructions, l2_bytes, op.is_in_place)


@functools.lru_cache(maxsize=4096)  # a validation has the operations of a step
def scratch_of(
    op: NativeOperation,
    threads: int,
    instructions: str,
    l2_bytes: int,
    in_place: bool = False,
) -> Optional[Scratch]:
    """Scratch of one operation; `in_place` if it writes over the first map that it reads. None if
    no library knows, and of sizes that no host has memory for."""
    library = _library()
    x, y, z = op.grid
    sizes = (op.batch * x * y, z * op.channels, z * op.outputs, op.channels * op.outputs)
    if library is None or max(sizes) > MOST_ASKED:
        return None
    dtype = "bfloat16" if op.value_bytes == 2 else "float32"
    chosen = INSTRUCTION_SETS[instructions]
    if chosen.bfloat16_alone and dtype == "float32":
        instructions = "avx512" if chosen.lanes == 16 else "avx2"
    call = calls.Operation(
        KIND_CODES[op.kind], DTYPE_CODES[dtype], threads, op.batch, *op.grid, outputs=op.outputs
    )
    call.channels[0] = op.channels
    if in_place and op.kind == "convolve":  # over the first of two joined maps, if there are two
        call.channels[:] = (op.outputs, op.channels - op.outputs)
    call.finer[:] = op.strides
    # Which pointers there are, and whether two are the same, is all that is looked at.
    call.maps[0] = call.others[0] = LINE_BYTES
    call.map = LINE_BYTES if in_place else 2 * LINE_BYTES
    if op.kind in WITH_FILTERS:
        call.filters = LINE_BYTES
    if op.kind in WITH_FILTER_GRADIENT:
        call.filter_gradient = LINE_BYTES
    answer = calls.scratch_of(library, instructions, call, l2_bytes)
    return Scratch(*answer) if answer else None


@functools.cache
def _library() -> Optional[ctypes.CDLL]:
    """A library that loads here, whatever this CPU computes with."""
    pair = build.existing()
    with contextlib.suppress(OSError):
        if pair:
            return calls.load(pair.kernels)
    return None


def _mapped(size_bytes: int) -> int:
    return -(-(LINE_BYTES + size_bytes) // PAGE_BYTES) * PAGE_BYTES

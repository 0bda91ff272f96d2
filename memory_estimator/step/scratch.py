"""oneDNN's buffers: those that live during one convolution, and the masks of norms fused with a ReLU.

Of AMX in `amx.py`; here of all other hosts, from oneDNN 3's own rules (`init_conf`, `balance` and `init_scratchpad` of
src/cpu/x64/jit_avx512_core_bf16_conv_kernel.cpp). Checked against the allocator's log with 2, 4 and 8 threads on
AVX512_BF16, with 2 on AVX-512 without bfloat16 and, in float32, on AVX2; below AVX2 nothing is modelled.
"""

import functools
import math
from dataclasses import dataclass
from typing import Tuple

from memory_estimator.step import amx
from memory_estimator.step.onednn import VECTOR, Convolution, Setting, padded, up


@dataclass(frozen=True)
class Buffers:
    """Memory of an operation that is neither its input nor its output, in bytes. ITEX takes it from the allocator, and
    with it the kernel once more in the layout that oneDNN prefers: its forward kernels keep that copy, the others take
    it again each time. Stock TensorFlow leaves both to oneDNN, outside the allocator."""

    scratch: Tuple[int, ...] = ()  # of the allocator, for the duration of the operation
    touched: Tuple[Tuple[int, int], ...] = ()  # where the first of `scratch` is written, as of `Tensor`
    comes_first: bool = False  # whether it is taken before the outputs, as by ITEX's forward convolutions (conv_ops.h)
    keeps: int = 0  # of the allocator, from its first run on
    hidden: int = 0  # outside the allocator, for the duration of the operation


NONE = Buffers()

_once = functools.lru_cache(maxsize=128)  # several operations and policies ask for the same convolution

ALIGNMENT_BYTES = 8 * 1024  # barriers, guards and alignment: what the log shows beyond the buffers themselves


@_once
def forward_buffers(conv: Convolution, on: Setting) -> Buffers:
    """Of a convolution, and of an up-convolution's input gradient: of the allocator in stock TensorFlow too, whose
    oneDNN is older and with AMX takes up to a third less."""
    scratch = amx.forward_bytes(conv, on) if on.amx else _emulated_head_bytes(conv, on, conv.out_channels)
    touched = () if on.amx else ((0, 0),)
    keeps = _kernel_bytes(conv, on) if on.itex else 0
    return Buffers(scratch=(scratch,), touched=touched, comes_first=on.itex, keeps=keeps)


@_once
def input_gradient_buffers(conv: Convolution, on: Setting) -> Buffers:
    """Of an input gradient. With a stride it is an up-convolution, which copies its input, a sample at a time; outside
    the allocator once for all threads."""
    strided = conv.stride > 1 and conv.kernel[0] > 1 and not on.emulated
    if not on.itex:
        return Buffers(hidden=_sample_bytes(conv, on) if strided else 0)
    if not on.amx:
        scratch = up_convolution_bytes(conv, on) if strided else _emulated_head_bytes(conv, on, conv.in_channels)
        return Buffers(scratch=(scratch, _kernel_bytes(conv, on)), touched=() if strided else ((0, 0),))
    if conv.stride == 1:
        return Buffers(scratch=(amx.input_gradient_bytes(conv, on), _kernel_bytes(conv, on)))
    scratch = (amx.up_convolution_bytes(conv, on), _kernel_bytes(conv, on))
    return Buffers(scratch=scratch, touched=amx.up_convolution_touched(conv, on))


@_once
def filter_gradient_buffers(conv: Convolution, on: Setting) -> Buffers:
    """Of a filter gradient."""
    if not on.itex:
        return Buffers(
            hidden=amx.hidden_filter_gradient_bytes(conv, on) if on.amx else hidden_filter_gradient_bytes(conv, on)
        )
    if on.amx:
        scratch = (amx.filter_gradient_bytes(conv, on), amx.kernel_bytes(conv))
        return Buffers(scratch=scratch, touched=amx.filter_gradient_touched(conv, on))
    scratch = (filter_gradient_bytes(conv, on), _kernel_bytes(conv, on))
    return Buffers(scratch=scratch, touched=filter_gradient_touched(conv, on))


def filter_gradient_bytes(conv: Convolution, on: Setting) -> int:
    """Scratch of one filter gradient, in bytes. float32 needs next to none: it reads both maps as they are; but without
    AVX-512 a padded one is a matrix product, of the input transposed and a slice of it once a voxel of the kernel
    (gemm_convolution_utils.cpp, `init_conf`), a sample at a time but for small ones."""
    if on.dtype != "bfloat16":
        if on.kernels.isa.startswith("avx512") or not any(conv.padding):
            return 0
        slice_ = math.prod(conv.target[1:])
        at_once = on.threads if conv.batch > 1 and slice_ // on.threads < 256 else 1
        copied = math.prod(conv.source) + conv.taps * slice_
        return at_once * 4 * (conv.in_channels * copied + 4 * conv.weights)
    (in_blocks, source), (out_blocks, target), weights = _buffers(conv)
    return depth_groups(conv, on.threads) * (in_blocks * source + out_blocks * target + weights) + ALIGNMENT_BYTES


def filter_gradient_touched(conv: Convolution, on: Setting) -> Tuple[Tuple[int, int], ...]:
    """Where that scratch is written, as offsets in bytes: each group of threads fills its share of maps of its own.
    Read off the pages of a process (/proc/self/pagemap) with two threads: of the map that the filter slides over a
    group fills the last share, of the other its own, and of the head's as much as it has channels. () is everywhere."""
    groups = depth_groups(conv, on.threads)
    if on.dtype != "bfloat16" or groups == 1:
        return ()
    (in_blocks, source), (out_blocks, target), weights = _buffers(conv)
    shares = max(1, groups // conv.batch)
    found, start = [], 0
    for blocks, size, is_source in ((in_blocks, source, True), (out_blocks, target, False)):
        for copy in range(groups):
            share = shares - 1 if is_source else copy % shares
            if conv.in_channels < VECTOR and conv.kernel[2] > 1:
                share = 0
            for block in range(blocks):
                first = start + (copy * blocks + block) * size
                if conv.kernel[2] == 1 and not is_source:
                    filled = min(1.0, conv.out_channels / VECTOR) * size
                    found.append((first, first + int(filled / shares)))
                else:
                    found.append((first + size * share // shares, first + size * (share + 1) // shares))
        start += groups * blocks * size
    return (*found, (start, start + groups * weights))


def up_convolution_bytes(conv: Convolution, on: Setting) -> int:
    """Scratch of an up-convolution's forward pass: one sample's input once a thread."""
    return on.threads * (_sample_bytes(conv, on) + ALIGNMENT_BYTES) + ALIGNMENT_BYTES


def hidden_filter_gradient_bytes(conv: Convolution, on: Setting) -> int:
    """What stock TensorFlow's filter gradient touches of its scratch, which lies outside the allocator. Its thread pool
    has no barriers, so oneDNN does not share transposed maps: each thread has buffers for one block of channels of both
    maps and fills its share of a sample's depth, or whole samples where there are enough of them. The gradient is
    summed once a thread, in float32: on wide networks of few voxels that is the most, of 32 to 48 filters twice the
    largest kernel with two threads."""
    sums = on.threads * 4 * conv.weights
    if on.dtype != "bfloat16":
        return filter_gradient_bytes(conv, on) + sums
    in_block, groups = min(conv.in_channels, VECTOR), depth_groups(conv, on.threads)
    source = in_block * _source_row(conv) * conv.source[0] * conv.source[1]
    target = VECTOR * _even(conv.target[2]) * conv.target[0] * conv.target[1]
    return up(on.threads, groups) * min(groups, conv.batch) * 2 * (source + target) + sums


def depth_groups(conv: Convolution, threads: int) -> int:
    """Groups of threads that share the depth, by oneDNN's own search for the split that moves the least memory."""
    slabs = conv.batch * conv.target[0]
    if conv.kernel[2] == 1:
        return min(threads, slabs)  # a kernel of its own, which splits the voxels alone
    in_block = min(conv.in_channels, VECTOR)
    in_blocks, out_blocks = up(conv.in_channels, in_block), up(conv.out_channels, VECTOR)
    row = _source_row(conv) if conv.in_channels > 1 else conv.source[2]
    source = conv.batch * in_block * conv.source[0] * conv.source[1] * row
    target = conv.batch * VECTOR * conv.target[0] * conv.target[1] * _even(conv.target[2])
    weights = conv.taps * in_block * VECTOR
    ratio = out_blocks / in_blocks
    maps = conv.in_channels / in_block * source + conv.out_channels / VECTOR * target
    scale = maps / (4 * conv.out_channels * conv.in_channels * conv.taps)
    source_weight = max(1 / ratio, 1.0) * (4 if scale < 1 else 1) / conv.stride**3

    def cost(groups: int, over_out: int, over_in: int) -> float:
        share = up(slabs, groups) / slabs
        ins, outs = up(in_blocks, over_in), up(out_blocks, over_out)
        moved = source_weight * share * ins * source + max(ratio, 1.0) * share * outs * target
        return moved + max(scale, 1.0) * outs * ins * weights

    best, found = cost(1, 1, 1), 1
    for groups in range(1, min(threads, slabs) + 1):
        left = threads // groups
        for over_out in range(1, min(left, out_blocks) + 1):
            now = cost(groups, over_out, min(left // over_out, in_blocks))
            if now <= best:
                best, found = now, groups
    return min(slabs, threads) if threads / 2 < found < threads else found


def mask_bytes(elements: int, channels: int, dtype: str, engine: str) -> int:
    """A bit an element where channels fill the vectors, else a byte. Stock TensorFlow takes that number of float32s."""
    workspace = elements // 8 if channels % (16 if dtype == "bfloat16" else 8) == 0 else elements
    return workspace if engine == "itex" else 4 * workspace


def mask_touched(size_bytes: int, engine: str) -> Tuple[Tuple[int, int], ...]:
    """Where a mask of that size is written, as of `Tensor.touched`: of stock's a quarter."""
    return () if engine == "itex" else ((0, size_bytes // 4),)


def _emulated_head_bytes(conv: Convolution, on: Setting, channels: int) -> int:
    """Of a 1x1x1 convolution, or its input gradient, that writes so many channels: sums in float32, all of them once a
    thread, which only many channels fill (jit_avx512_core_bf16_1x1_conv_kernel.cpp, `init_scratchpad`)."""
    if not on.emulated or conv.taps > 1:
        return 0
    return 4 * on.threads * math.prod(conv.target) * padded(channels, VECTOR)


def _kernel_bytes(conv: Convolution, on: Setting) -> int:
    return conv.weights * on.value_bytes


def _sample_bytes(conv: Convolution, on: Setting) -> int:
    """Of the map that an up-convolution reads."""
    return math.prod(conv.target) * conv.out_channels * on.value_bytes


def _buffers(conv: Convolution) -> Tuple[Tuple[int, int], Tuple[int, int], int]:
    """One group's: (blocks of channels, bytes of a block) of both transposed maps, and bytes of float32 weights."""
    in_block = VECTOR if conv.kernel[2] == 1 else min(conv.in_channels, VECTOR)
    in_blocks, out_blocks = up(conv.in_channels, in_block), up(conv.out_channels, VECTOR)
    row = 0 if in_block == 1 else _source_row(conv)
    source = 2 * in_block * row * conv.source[0] * conv.source[1]
    target = 2 * VECTOR * _even(conv.target[2]) * conv.target[0] * conv.target[1]
    weights = in_blocks * in_block * out_blocks * VECTOR * conv.taps
    bias = out_blocks * VECTOR if conv.bias else 0
    return (in_blocks, source), (out_blocks, target), 4 * (weights + bias)


def _even(number: int) -> int:
    return number + number % 2


def _source_row(conv: Convolution) -> int:
    """A transposed row with its padding, which two neighbours share."""
    if conv.kernel[2] == 1:
        return conv.source[2]
    padding = conv.kernel[2] // 2 + 1 if conv.stride == 1 else 1
    return _even(math.ceil(conv.source[2] / conv.stride) + _even(padding)) * conv.stride

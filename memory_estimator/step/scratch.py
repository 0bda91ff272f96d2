"""oneDNN's buffers: those that live during one convolution, and the masks of norms fused with a ReLU.

From oneDNN 3's own rules for AVX-512 CPUs (`init_conf`, `balance` and `init_scratchpad` of
src/cpu/x64/jit_avx512_core_bf16_conv_kernel.cpp), read beside the allocator's log. Two things drive it: the bfloat16
filter gradient transposes both its maps, once for every group of threads that shares the depth, and the up-convolution
copies its input once a thread. Both therefore grow with the number of threads. Checked against the log with 2, 4 and 8
threads; AMX has kernels of its own, with the same buffers by their source, not checked.
"""

import math
from dataclasses import dataclass
from typing import Tuple


@dataclass(frozen=True)
class Buffers:
    """Memory of an operation that is neither its input nor its output, in bytes. ITEX takes it from the allocator, and
    with it the kernel once more in the layout that oneDNN prefers: its forward kernels keep that copy, the others take
    it anew each time. Stock TensorFlow leaves both to oneDNN, outside the allocator."""

    scratch: Tuple[int, ...] = ()  # of the allocator, for the duration of the operation
    touched: Tuple[Tuple[int, int], ...] = ()
    """Where the first of `scratch` is written, as of `memory_estimator.step.program.Tensor`."""
    keeps: int = 0  # of the allocator, from its first run on
    hidden: int = 0  # outside the allocator, for the duration of the operation


NONE = Buffers()


@dataclass(frozen=True)
class Kernels:
    """Which of oneDNN's kernels a host runs, and what sizes their buffers."""

    isa: str = "avx512_core_bf16"
    """The highest instruction set that oneDNN may use, as it calls it in ONEDNN_VERBOSE: "avx2", "avx512_core",
    "avx512_core_bf16", "avx512_core_amx" ..."""
    l1_bytes: int = 48 * 1024  # data cache of a core
    l2_bytes: int = 2 * 2**20  # of a core
    cores: int = 2  # physical cores of a socket


USUAL = Kernels()

ALIGNMENT_BYTES = 8 * 1024  # barriers, guards and alignment: what the log shows beyond the buffers themselves
VECTOR = 16  # channels are worked on in blocks of as many float32 values as a register holds


@dataclass(frozen=True)
class FilterGradient:
    """A convolution's filter gradient as oneDNN sees it."""

    batch: int
    source: Tuple[int, int, int]
    """Voxels of the map that the filter slides over; the up-convolution's is its output."""
    target: Tuple[int, int, int]  # voxels of the other map
    in_channels: int
    out_channels: int
    kernel: int
    stride: int
    bias: bool
    flat: bool = False
    """Whether the kernel has one plane: a convolution in two dimensions, of maps that are one voxel deep."""

    @property
    def taps(self) -> int:
        """Voxels of the kernel."""
        return self.kernel ** (2 if self.flat else 3)


def filter_gradient_buffers(job: FilterGradient, dtype: str, threads: int, written_bytes: int, itex: bool) -> Buffers:
    """Of a filter gradient that writes so many bytes."""
    if not itex:
        return Buffers(hidden=hidden_filter_gradient_bytes(job, dtype, threads))
    scratch = (filter_gradient_bytes(job, dtype, threads), written_bytes)
    return Buffers(scratch=scratch, touched=filter_gradient_touched(job, dtype, threads))


def up_convolution_buffers(input_bytes: int, kernel_bytes: int, threads: int, itex: bool) -> Buffers:
    """Of an up-convolution, which copies its input, a sample at a time; outside the allocator once for all threads."""
    if not itex:
        return Buffers(hidden=input_bytes)
    return Buffers(scratch=(up_convolution_bytes(input_bytes, threads), kernel_bytes))


def filter_gradient_bytes(job: FilterGradient, dtype: str, threads: int) -> int:
    """Scratch of one filter gradient, in bytes. float32 needs next to none: it reads both maps as they are."""
    if dtype != "bfloat16":
        return 0
    (in_blocks, source), (out_blocks, target), weights = _buffers(job)
    return depth_groups(job, threads) * (in_blocks * source + out_blocks * target + weights) + ALIGNMENT_BYTES


def filter_gradient_touched(job: FilterGradient, dtype: str, threads: int) -> Tuple[Tuple[int, int], ...]:
    """Where that scratch is written, as offsets in bytes: each group of threads fills its share of maps of its own.
    Read off the pages of a process (/proc/self/pagemap) with two threads: of the map that the filter slides over a
    group fills the last share, of the other its own, and of the head's as much as it has channels. () is everywhere."""
    groups = depth_groups(job, threads)
    if dtype != "bfloat16" or groups == 1:
        return ()
    (in_blocks, source), (out_blocks, target), weights = _buffers(job)
    shares = max(1, groups // job.batch)
    found, start = [], 0
    for blocks, size, is_source in ((in_blocks, source, True), (out_blocks, target, False)):
        for copy in range(groups):
            share = shares - 1 if is_source else copy % shares
            if job.in_channels < VECTOR and job.kernel > 1:
                share = 0
            for block in range(blocks):
                first = start + (copy * blocks + block) * size
                if job.kernel == 1 and not is_source:
                    filled = min(1.0, job.out_channels / VECTOR) * size
                    found.append((first, first + int(filled / shares)))
                else:
                    found.append((first + size * share // shares, first + size * (share + 1) // shares))
        start += groups * blocks * size
    return (*found, (start, start + groups * weights))


def up_convolution_bytes(input_bytes: int, threads: int) -> int:
    """Scratch of an up-convolution's forward pass: one sample's input once a thread."""
    return threads * (input_bytes + ALIGNMENT_BYTES) + ALIGNMENT_BYTES


def hidden_filter_gradient_bytes(job: FilterGradient, dtype: str, threads: int) -> int:
    """What stock TensorFlow's filter gradient touches of its scratch, which lies outside the allocator. Its thread pool
    has no barriers, so oneDNN does not share transposed maps: each thread has buffers for one block of channels of both
    maps and fills its share of a sample's depth, or whole samples where there are enough of them."""
    if dtype != "bfloat16":
        return 0
    in_block, groups = min(job.in_channels, VECTOR), depth_groups(job, threads)
    source = in_block * _source_row(job) * job.source[0] * job.source[1]
    target = VECTOR * _even(job.target[2]) * job.target[0] * job.target[1]
    return _up(threads, groups) * min(groups, job.batch) * 2 * (source + target)


def depth_groups(job: FilterGradient, threads: int) -> int:
    """Groups of threads that share the depth, by oneDNN's own search for the split that moves the least memory."""
    slabs = job.batch * job.target[0]
    if job.kernel == 1:
        return min(threads, slabs)  # a kernel of its own, which splits the voxels alone
    in_block = min(job.in_channels, VECTOR)
    in_blocks, out_blocks = _up(job.in_channels, in_block), _up(job.out_channels, VECTOR)
    row = _source_row(job) if job.in_channels > 1 else job.source[2]
    source = job.batch * in_block * job.source[0] * job.source[1] * row
    target = job.batch * VECTOR * job.target[0] * job.target[1] * _even(job.target[2])
    weights = job.taps * in_block * VECTOR
    ratio = out_blocks / in_blocks
    maps = job.in_channels / in_block * source + job.out_channels / VECTOR * target
    scale = maps / (4 * job.out_channels * job.in_channels * job.taps)
    source_weight = max(1 / ratio, 1.0) * (4 if scale < 1 else 1) / job.stride**3

    def cost(groups: int, over_out: int, over_in: int) -> float:
        share = _up(slabs, groups) / slabs
        ins, outs = _up(in_blocks, over_in), _up(out_blocks, over_out)
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


def is_narrow(channels: int, dtype: str) -> bool:
    """Whether the channels leave part of a vector empty: oneDNN then norms with a plain kernel, many times as slow."""
    return channels % (16 if dtype == "bfloat16" else 8) != 0


def mask_bytes(elements: int, channels: int, dtype: str, engine: str) -> int:
    """A bit an element where the vector kernel runs, else a byte. Stock TensorFlow takes that number of float32s."""
    workspace = elements if is_narrow(channels, dtype) else elements // 8
    return workspace if engine == "itex" else 4 * workspace


def mask_touched(size_bytes: int, engine: str) -> Tuple[Tuple[int, int], ...]:
    """Where a mask of that size is written, as of `Tensor.touched`: of stock's a quarter."""
    return () if engine == "itex" else ((0, size_bytes // 4),)


def _buffers(job: FilterGradient) -> Tuple[Tuple[int, int], Tuple[int, int], int]:
    """One group's: (blocks of channels, bytes of a block) of both transposed maps, and bytes of float32 weights."""
    in_block = VECTOR if job.kernel == 1 else min(job.in_channels, VECTOR)
    in_blocks, out_blocks = _up(job.in_channels, in_block), _up(job.out_channels, VECTOR)
    row = 0 if in_block == 1 else _source_row(job)
    source = 2 * in_block * row * job.source[0] * job.source[1]
    target = 2 * VECTOR * _even(job.target[2]) * job.target[0] * job.target[1]
    weights = in_blocks * in_block * out_blocks * VECTOR * job.taps
    bias = out_blocks * VECTOR if job.bias else 0
    return (in_blocks, source), (out_blocks, target), 4 * (weights + bias)


def _up(number: int, block: int) -> int:
    return -(-number // block)


def _even(number: int) -> int:
    return number + number % 2


def _source_row(job: FilterGradient) -> int:
    """A transposed row with its padding, which two neighbours share."""
    if job.kernel == 1:
        return job.source[2]
    padding = job.kernel // 2 + 1 if job.stride == 1 else 1
    return _even(math.ceil(job.source[2] / job.stride) + _even(padding)) * job.stride

"""Buffers of oneDNN's bfloat16 convolutions for AMX (brgemm, `avx512_core_amx`).

oneDNN 3.3's own rules, from shapes, channels, threads and cache sizes; functions named are those of its
src/cpu/x64/jit_brgemm_conv_utils.cpp, "strided" those of jit_brgemm_conv_bwd_utils.cpp beside it. Held against what
1,140 operations with two and four threads asked TensorFlow's allocator for, in maps of up to 144 voxels a side.
"""

import math
from dataclasses import replace
from itertools import product
from typing import List, Tuple

from memory_estimator.step.onednn import VECTOR, Convolution, Grid, Setting, padded, up

PAGE, ELEMENT = 4096, 40  # Bytes: of a page, to which most buffers are aligned, and of a `brgemm_batch_element_t`
ROW = 32  # bfloat16 values in a row of a tile

Spans = Tuple[Tuple[int, int], ...]


# --- Filter gradient: both maps transposed, and the filter in float32, once a group of threads ---


def filter_gradient_bytes(conv: Convolution, on: Setting) -> int:
    """`init_scratchpad_bwd_w`."""
    conv = _in_lines(conv)
    (groups, over_out, over_in), (source, target), row = _transposed(conv, on)
    (ins, outs), threads = conv.blocks, groups * over_out * over_in
    barriers = sum(threads // shared + 1 for shared in (over_out, over_in) if shared > 1) + 2
    guards = 2 * (ROW + row * VECTOR) + barriers * PAGE + 4 * 128 + 64
    weights = 4 * ins * outs * VECTOR**2 * conv.taps
    return groups * (ins * source + outs * target + weights) + guards + _fixed(math.prod(conv.target[:2]), threads)


def filter_gradient_touched(conv: Convolution, on: Setting) -> Spans:
    """Where that is written: a group fills the start of its maps (jit_brgemm_conv_bwd_w.cpp, `tr_src_off`)."""
    conv = _in_lines(conv)
    (groups, _, _), sizes, _ = _transposed(conv, on)
    axis = 1 if conv.target[0] == 1 else 0
    slabs = min(conv.target[axis], up(conv.batch * conv.target[axis], groups))
    reach = min(conv.source[axis], (slabs - 1) * conv.stride + conv.kernel[axis])
    found, start = [], 0
    for size, blocks, share in zip(sizes, conv.blocks, (reach / conv.source[axis], slabs / conv.target[axis])):
        for _ in range(groups * blocks):
            found.append((start, start + int(size * share)))
            start += size
    return (*found, (start, start + 4 * groups * math.prod(conv.blocks) * VECTOR**2 * conv.taps))


def hidden_filter_gradient_bytes(conv: Convolution, on: Setting) -> int:
    """What stock TensorFlow's touches outside the allocator. Its thread pool has no barriers, so each thread transposes
    for itself, two blocks of channels of both maps at a time, its share of a sample's depth or whole samples; its
    oneDNN is older and takes all lines of a slice at once."""
    conv = _in_lines(conv)
    (groups, _, _), _, _ = _transposed(conv, on)
    maps = zip(conv.blocks, _rows(conv), (conv.source, conv.target))
    pairs = sum(min(2, blocks) * 2 * VECTOR * row * math.prod(grid[:2]) for blocks, row, grid in maps)
    weights = 4 * groups * math.prod(conv.blocks) * VECTOR**2 * conv.taps
    return up(on.threads, groups) * min(groups, conv.batch) * pairs + weights


def kernel_bytes(conv: Convolution) -> int:
    """Of a kernel in the layout that the filter gradient writes."""
    return 2 * conv.taps * padded(conv.in_channels, ROW) * padded(conv.out_channels, VECTOR)


def _in_lines(conv: Convolution) -> Convolution:
    """Of a 1x1x1 kernel short rows become one long one (`init_conf_bwd_w`, `make_1d`)."""
    if conv.kernel[1:] != (1, 1) or conv.stride > 1 or conv.source[2] > 28:
        return conv
    line = (conv.source[0], 1, conv.source[1] * conv.source[2])
    return replace(conv, source=line, target=line)


def _transposed(conv: Convolution, on: Setting) -> Tuple[Grid, Tuple[int, int], int]:
    """The split of the threads, bytes of a block of channels of both maps, and the source's row (`init_conf_bwd_w`). As
    many lines of a slice are transposed at a time as fit into the L2 cache, read and transposed."""
    (row, target_row), (ins, outs), height = _rows(conv), conv.blocks, conv.target[1]
    split = _split(conv, row, target_row, on)
    read, met = 64 * row * up(ins, split[2]), 64 * target_row * up(outs, split[1])
    limit = max(1, int((0.8 * on.kernels.l2_bytes - conv.kernel[1] * read) / (read + met)))
    lines = up(height, up(height, limit))
    reach = min(conv.source[1], conv.stride * ((lines - 1) * conv.stride + conv.kernel[1]))
    sizes = row * reach * conv.source[0], target_row * lines * conv.target[0]
    return split, (2 * VECTOR * sizes[0], 2 * VECTOR * sizes[1]), row


def _rows(conv: Convolution) -> Tuple[int, int]:
    """Transposed rows of both maps: padded to whole tiles, the target's to what divides best into them."""
    even = padded(conv.target[2], 2)
    rows = range(even, padded(even, ROW) + 1, 2) if even > ROW else [even]
    target_row = min(rows, key=lambda n: n // max(part for part in range(2, ROW + 1, 2) if n % part == 0))
    return padded(up(conv.source[2] + conv.padding[2], conv.stride), ROW) * conv.stride, target_row


def _split(conv: Convolution, row: int, target_row: int, on: Setting) -> Grid:
    """Groups of threads, and threads over output and input channels (`balance_bwd_w`): what moves the least memory."""
    threads, taps, channels = on.threads, conv.taps, (conv.in_channels, conv.out_channels)
    if min(channels) >= 64 and threads <= on.kernels.cores and conv.batch <= threads // 2:
        return _even_split(conv, threads)
    pairs, widths = [up(blocks, 2) for blocks in conv.blocks], [VECTOR * min(2, blocks) for blocks in conv.blocks]
    slabs = conv.batch * (conv.target[1] if conv.target[0] == 1 else conv.target[0])
    source = conv.batch * math.prod(conv.source[:2]) * row
    target = conv.batch * math.prod(conv.target[:2]) * target_row
    scale = (source * channels[0] + target * channels[1]) / (4 * math.prod(channels) * taps)
    source_weight = max(pairs[0] / pairs[1], 1) * (4 if scale < 1 else 1) / conv.stride**3

    def cost(groups: int, _, over_in: int) -> float:
        share, ins = up(slabs, groups) / slabs, up(pairs[0], over_in) * widths[0]
        maps = source_weight * ins * source + max(pairs[1] / pairs[0], 1) * widths[1] * target
        return share * maps + 2 * max(scale, 1) * widths[1] * ins * taps

    splits = [
        (groups, over_out, min(threads // groups // over_out, conv.blocks[0] // min(2, conv.blocks[0])))
        for groups in range(1, min(threads, slabs) + 1)
        for over_out in range(1, min(threads // groups, pairs[1]) + 1)
    ]
    groups, *others = min(reversed(splits), key=lambda split: cost(*split))
    return (min(slabs, threads) if threads / 2 < groups < threads else groups, *others)


def _even_split(conv: Convolution, threads: int) -> Grid:
    """Many channels, few samples: pieces as long in tiles of voxels as, with weights, in blocks of channels."""
    ins, outs = conv.blocks
    lengths = up(conv.batch * math.prod(conv.target), ROW), 3 * outs * conv.taps, 5 * ins * conv.taps
    most = conv.batch * math.prod(conv.target[:2]), up(outs, 2), up(ins, 2)
    low, high = 0.0, float(max(lengths))
    for _ in range(64):  # the length of a piece of which there are as many as threads
        edge = (low + high) / 2
        wanted = [min(max(length / edge, 1), limit) for length, limit in zip(lengths, most)]
        low, high = (edge, high) if math.prod(wanted) > threads else (low, edge)

    def misfit(split: Grid) -> Tuple[float, int]:
        parts = zip(split, wanted, most)
        off = math.prod(padded(limit, n) / limit * want * max(n / want, want / n) / n for n, want, limit in parts)
        return round(off, 9), -math.prod(split)  # of equals the one with the most threads

    splits = product(*(range(1, min(threads, limit) + 1) for limit in most))
    return min((split for split in splits if math.prod(split) <= threads), key=misfit)


# --- Forward, and the input gradient at stride 1: each thread copies its block of the source, padded ---


def input_gradient_bytes(conv: Convolution, on: Setting) -> int:
    """A forward convolution inside another registry (jit_brgemm_conv_bwd.cpp)."""
    return forward_bytes(replace(conv, in_channels=conv.out_channels, out_channels=conv.in_channels), on) + 128


def forward_bytes(conv: Convolution, on: Setting) -> int:
    """`init_scratchpad`, with the buffers of `init_conf`: the block, a mask of what is copied, and sums in float32
    where the input channels come in parts.
    At stride 2, with channels that fill rows, two neighbours are one voxel of twice the channels (`init_jcp`). Without
    padding and with long rows the source is read as it is. A 1x1x1 kernel copies a sample a thread, where the channels
    must be filled up (`init_1x1_conf`)."""
    (depth, height, width), step = conv.target, conv.stride
    skipped = conv.padding[2] if step == 1 else width  # voxels of a line of the block that are not in the target
    if step == 2 and conv.in_channels % (VECTOR if conv.in_channels > VECTOR else 2) == 0:
        source, kernel = (*conv.source[:2], conv.source[2] // 2), (*conv.kernel[:2], 1)
        conv, step = replace(conv, source=source, in_channels=2 * conv.in_channels, kernel=kernel), 1
    filled = padded(conv.in_channels, ROW if conv.in_channels > ROW else 2)
    fixed = _fixed(conv.taps, on.threads)
    if conv.taps == 1 and filled > conv.in_channels:
        return fixed + on.threads * 2 * filled * math.prod(conv.source) + 2 * PAGE
    if not any(conv.padding) and (width > 50 or conv.taps == 1) and filled == conv.in_channels:
        return fixed
    in_block = _in_block(conv)
    out_block, slab, lines = _blocks(conv, on, in_block)
    deep, high, wide = (size + pad for size, pad in zip(conv.source, conv.padding))
    deep = min(deep, (slab - 1) * conv.stride + conv.kernel[0]) + conv.padding[0]
    high = min(high, (lines - 1) * conv.stride + conv.kernel[1]) + conv.padding[1]
    tiled = 0  # voxels of a slice of the block in whole tiles, of each line again
    while tiled < width * lines + skipped * (lines - 1):
        tiled += 16 if tiled % (width + skipped) < width else 1
    high = up(padded(high * wide, tiled), wide) + conv.kernel[1]
    parts = up(conv.in_channels, in_block)
    source = 2 * padded(deep * high * wide * parts * in_block * step, PAGE)
    mask = padded(up(depth, slab) * up(height, lines) * parts, PAGE)
    sums = on.threads * 4 * out_block * width * lines + PAGE if parts > 1 else 0
    return fixed + on.threads * (source + mask) + 2 * PAGE + sums


def _in_block(conv: Convolution) -> int:
    """Input channels at once (`select_ic_block`)."""
    channels, planes = conv.in_channels, math.prod(conv.kernel[:2])
    if 2 * planes * channels <= 8 * 1024:
        return padded(channels, ROW if channels > ROW else 2)
    blocks = range(padded(up(512, planes), 2), VECTOR - 1, -2)
    return next((block for block in blocks if channels % block == 0), channels)


def _blocks(conv: Convolution, on: Setting, in_block: int) -> Grid:
    """Output channels, slices and lines at once: of the blocks allowed (`init_conf`, `fast_check_oc_block`) the one
    estimated to be fastest (`est_eff`, where its caches hold what they are meant to)."""
    jobs = up(conv.batch * up(math.prod(conv.target), 64) * up(conv.out_channels, 64), on.threads)
    wide = jobs >= 64 and conv.out_channels >= 256
    allowed = [block for block in _out_blocks(conv.out_channels) if block <= (64 if wide else 32)]

    def speed(blocks: Grid) -> float:
        block, slab, lines = blocks
        rows, parts, tiles = conv.target[2] * lines, up(conv.out_channels, block), block // VECTOR
        chunks, odd = up(math.prod(conv.target), rows), min(conv.out_channels, block) % 32 == 16
        divisor = max(n for n in range(1, 17) if rows % n == 0)
        unrolled = divisor * min(3 if odd else 2, rows // divisor)
        calls = conv.batch * parts * up(conv.target[0], slab) * up(conv.target[1], lines) * chunks
        reads = math.prod(conv.target) * parts + 3 * up(conv.out_channels, ROW) * chunks * up(rows, unrolled)
        cost = up(conv.batch, on.threads) * conv.taps * conv.in_channels * reads
        cost += 1000 * up(calls, on.threads) * up(conv.in_channels, in_block)
        kernel = tiles * unrolled / (tiles + unrolled) * (1 + unrolled * (2 - min(1.9, unrolled / rows)) / 64)
        return kernel * _fill(conv.out_channels, block) * _fill(rows, unrolled) / cost

    return max(((block, *_slab(conv, on, in_block, block)) for block in allowed), key=speed)


def _out_blocks(channels: int) -> List[int]:
    channels = padded(channels, VECTOR)
    large = [block for block, most in ((64, 368), (48, 768)) if channels % block == 0 and channels <= most]
    return large + [block for block in (32, 16) if block <= channels]


def _slab(conv: Convolution, on: Setting, in_block: int, out_block: int) -> Tuple[int, int]:
    """Slices of the target at once, and lines of each (`iterate_ker_block`): what fits into L2, or better into L1."""
    depth, height, width = conv.target
    deep, high, wide = (size + pad for size, pad in zip(conv.source, conv.padding))
    line = 4 * in_block * wide + 2 * width * out_block
    l2, weights = on.kernels.l2_bytes, 2 * conv.taps * in_block * out_block
    free = max(0, min(l2 // 2, l2 - weights - 128 * out_block))
    slab, lines = 1, height
    if deep * high * line > free:
        slab = min(max(1, free // (high * line)), depth)
        lines = min(max(1, free // line), height) if slab == 1 else height
    most, low, line = slab, lines, 2 * conv.in_channels * wide + 2 * width * out_block
    if line < on.kernels.l1_bytes:
        most = min(max(1, on.kernels.l1_bytes // (high * line)), depth)
        low = min(max(1, on.kernels.l1_bytes // line), height) if most == 1 else low
    tile = 0.8 * padded(width, 16)
    fits = [(n, low) for n in range(most, 1, -1) if _fill(depth, n) > 0.9 and n * low * wide > tile]
    fits += [(1, n) for n in range(low, 1, -1) if _fill(height, n) > 0.9 and n * wide > 128]
    slab, lines = fits[0] if fits else (slab, lines)
    share = up(on.threads, conv.batch * up(conv.out_channels, out_block))  # threads to a block of channels
    thick = up(depth, share)
    return min(slab, thick), min(lines, up(height, share * up(depth, thick)))


# --- The up-convolution: each thread has a copy of a sample, and fills what it reads of it ---


def up_convolution_bytes(conv: Convolution, on: Setting) -> int:
    """`init_scratchpad` of "strided": beside the copy a page for a mask, and a line of sums in float32."""
    sums = 4 * _out_blocks(conv.in_channels)[0] * conv.target[2]
    return _fixed(conv.taps, on.threads) + on.threads * (_copy(conv) + PAGE + sums) + 3 * PAGE


def up_convolution_touched(conv: Convolution, on: Setting) -> Spans:
    """Where that scratch is written (jit_brgemm_conv_bwd_strided.cpp, `maybe_trans_inp`)."""
    size, share = _copy(conv), _copy(conv) // on.threads
    return tuple((n * (size + share), n * (size + share) + share) for n in range(on.threads))


def _copy(conv: Convolution) -> int:
    channels = padded(conv.out_channels, ROW if conv.out_channels > ROW else 2)
    return 2 * padded(math.prod(conv.target) * channels, PAGE)


# --- Private helpers ---


def _fill(size: int, block: int) -> float:
    return size / padded(size, block)


def _fixed(products: int, threads: int) -> int:
    """Of every kernel: addresses of the matrix products that it adds up, and a buffer for four tiles with a guard."""
    addresses = padded(padded(products * ELEMENT, PAGE), ELEMENT)
    return threads * (addresses + 2 * PAGE) + 2 * PAGE

"""Own operations by direct products of tiles, of the code for AMX (direct*.c in models/native):
their pieces, and their memory besides the maps."""

import math
from typing import Tuple

from memory_estimator.step.call import (
    GROUP,
    LINE_BYTES,
    Call,
    Scratch,
    copies,
    unit_of,
    work_of_planes,
    work_of_up_filters,
)
from memory_estimator.step.cut import Cut, ceil_div, cut_of, round_up
from memory_estimator.step.timeline import OwnOperation
from models.native import shared


def _columns(op: OwnOperation) -> Tuple[int, int, int]:
    """Of direct.c: blocks of outputs, voxels of a line of a tile, rows that are multiplied at
    once."""
    blocks = ceil_div(op.outputs, GROUP)
    if _width(op.channels) <= 16:
        return blocks, 2, 2
    return blocks, 1, 2 if blocks > 1 else 4


def cut_of_convolution(call: Call) -> Cut:
    _, _, together = _columns(call.op)
    work = work_of_planes(
        call,
        shared.DIRECT_PRODUCTS_COST,
        unit=unit_of(call, 2),
        load=shared.DIRECT_LOAD_COST,
        together=together,
    )
    return cut_of(work, call.threads)


def cut_of_filters(call: Call) -> Cut:
    op = call.op
    pitch = round_up(op.grid[2] + 1, 2)
    products = shared.DIRECT_PRODUCTS_COST
    work = work_of_planes(
        call,
        products,
        inputs=ceil_div(_width(op.channels), GROUP),
        load=products * shared.DIRECT_LOAD_POSITIONS // pitch,
        sums=products * shared.DIRECT_SUMS_POSITIONS // pitch,
        form_outputs=1,
    )
    return cut_of(work, call.threads)


def of_convolution(call: Call, cut: Cut) -> Scratch:
    """`job_of` in direct.c: a ring of four planes of bfloat16 rows, three of them in the cache, and
    the sums of twice four tiles; packed filters, the positions' sums and the pieces' copies."""
    op = call.op
    z = op.grid[2]
    width = _width(op.channels)
    blocks, voxels, together = _columns(op)
    terms = (voxels + 2) * width
    depth = min(16, terms // 2)
    terms = round_up(terms, 2 * depth)

    lines = ceil_div(z, voxels)
    tiles = ceil_div(lines, 16)
    lines = tiles * ceil_div(lines, tiles)
    row = 2 * ((lines - 1) * voxels * width + terms)
    row = LINE_BYTES * (ceil_div(row, LINE_BYTES) | 1)
    budget = call.l2_bytes * shared.DIRECT_RING_PERMILLE // 1000
    most = max(shared.MOST_TILE_ROWS, budget // (3 * row) - 2)
    y_rows = min(cut.rows, round_up(ceil_div(cut.rows, ceil_div(cut.rows, most)), together))
    kept = 2 * 4 * 4 * 16 * 16 + 4 * (y_rows + 2) * row

    passing = blocks * (9 * terms + (voxels - 1) * width) * 16 * 2
    passing += cut.positions * 8 * (op.batch * 2 * blocks * GROUP + 16)
    return Scratch(
        threads=cut.pieces, kept_bytes=kept, passing_bytes=passing + cut.pieces * copies(call, cut)
    )


def of_filters(call: Call, cut: Cut) -> Scratch:
    """`job_of` in direct_filters.c: planes of pairs of positions in the cache, values' and
    gradients', of these one ahead; a row and the sums of six tiles; and the positions' sums."""
    op = call.op
    width = _width(op.channels)
    groups = ceil_div(width, GROUP)
    blocks = ceil_div(op.outputs, GROUP)
    shifts = 3
    arrays = 2 * cut.inputs
    if width < 16:  # voxels along Z share a line
        shifts = width // 4
        arrays = cut.inputs
    pitch = round_up(op.grid[2] + 1, 2)

    budget = call.l2_bytes * shared.POSITIONS_PERMILLE // 1000
    most = (budget - 3 * arrays * 64 * (pitch + 1)) // (1024 * (3 * arrays + cut.outputs))
    most = min(cut.rows, max(1, most * 32 // pitch))
    y_rows = ceil_div(cut.rows, ceil_div(cut.rows, most))
    steps = ceil_div(y_rows * pitch, 32)
    values = arrays * 64 * (pitch + 16 * steps + 1)
    gradients = 1024 * cut.outputs * steps
    enough = min(shared.MOST_PLANES, ceil_div(shared.ENOUGH_STEPS, steps), cut.planes)
    planes = min(enough, max(1, (budget - 2 * values) // (values + gradients)))

    line_width = max(min(width, cut.inputs * GROUP), cut.outputs * GROUP)
    kept = 4 * 6 * 256 + 2 * round_up((pitch + 6) * line_width, 32)
    gradient_planes = max(2, planes)
    kept += (planes + 2) * values + gradient_planes * gradients
    sums = 4 * 9 * shifts * groups * blocks * 256
    return Scratch(threads=cut.pieces, kept_bytes=kept, passing_bytes=cut.positions * sums)


# --- Between two grids ---


def of_up(call: Call, cut: Cut) -> Scratch:
    op = call.op
    z_edge = op.strides[2]
    return _of_fine_rows(call, cut, 1, ceil_div(op.channels, 32), z_edge, op.outputs)


def of_up_gradient(call: Call, cut: Cut) -> Scratch:
    op = call.op
    x_edge, y_edge, z_edge = op.strides
    steps = ceil_div(op.outputs, 32 // z_edge)
    return _of_fine_rows(call, cut, x_edge * y_edge, steps, 1, op.channels)


def _of_fine_rows(call: Call, cut: Cut, rows: int, steps: int, voxels: int, made: int) -> Scratch:
    """`job_of` in direct_up.c: formed rows, and the sums of four tiles; packed filters, and the
    pieces' sums. `rows` are formed at a time, for `steps` of a product; a row has so many `voxels`
    for one of the coarser grid, and the map that is made so many channels."""
    op = call.op
    z = op.grid[2]
    x_edge, y_edge, _ = op.strides
    fine_rows = x_edge * y_edge
    width = round_up(made, GROUP)
    tiles = ceil_div(z, 16)
    kept = 4 * 4 * 256 + rows * tiles * ceil_div(z, tiles) * 64 * steps
    passing = width // GROUP * voxels * fine_rows * steps * 1024
    passing += cut.pieces * 8 * (op.batch * 2 * width + 16)
    return Scratch(threads=cut.pieces, kept_bytes=kept, passing_bytes=passing)


def of_projection(call: Call, cut: Cut) -> Scratch:
    """`job_of` in direct_up.c: a formed row, and the sums of four tiles; packed parts of the
    filters, the bias and the pieces' sums."""
    op = call.op
    z = op.grid[2]
    channels = GROUP if op.channels <= GROUP else round_up(op.channels, 2 * GROUP)
    width = round_up(op.outputs, GROUP)
    tiles = ceil_div(z, 16)
    kept = 4 * 4 * 256 + tiles * ceil_div(z, tiles) * 2 * channels
    passing = shared.WEIGHT_PARTS * width * 2 * channels + 4 * width
    passing += cut.pieces * 8 * (op.batch * 2 * width + 16)
    return Scratch(threads=cut.pieces, kept_bytes=kept, passing_bytes=passing)


def cut_of_up_filters(call: Call) -> Cut:
    cost = shared.UP_DIRECT_PRODUCTS_COST
    return cut_of(work_of_up_filters(call, cost, shared.DIRECT_SUMS_POSITIONS), call.threads)


def of_up_filters(call: Call, cut: Cut) -> Scratch:
    """`job_of` in direct_up_filters.c: pairs of positions of some rows in the cache, a row, and the
    sums of six tiles; and the positions' sums."""
    op = call.op
    groups = ceil_div(op.channels, GROUP)
    blocks = ceil_div(op.outputs, GROUP)
    pitch = round_up(op.grid[2], 2)
    taps = math.prod(op.strides)
    arrays = cut.inputs + taps * cut.outputs
    rows = min(ceil_div(shared.ENOUGH_STEPS * 32, pitch), cut.planes)
    budget = call.l2_bytes * shared.POSITIONS_PERMILLE // 1000
    rows = max(1, min(rows, budget // (arrays * 32 * pitch)))
    fine = op.strides[2] * cut.outputs
    kept = 4 * 6 * 256 + 2 * round_up(pitch * GROUP * max(cut.inputs, fine), 32)
    kept += arrays * 1024 * ceil_div(rows * pitch, 32)
    return Scratch(
        threads=cut.pieces,
        kept_bytes=kept,
        passing_bytes=cut.positions * 4 * taps * blocks * groups * 256,
    )


def _width(channels: int) -> int:
    """`width_of` in direct.h: few channels are padded to a part of a tile's line."""
    return next((width for width in (4, 8) if channels <= width), round_up(channels, GROUP))

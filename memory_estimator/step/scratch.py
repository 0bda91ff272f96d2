"""Memory of own operations outside TensorFlow's allocator, as models/native takes it:
convolutions.c, direct*.c, pointwise.c, loss.c, orthogonal.c and pool.c.

A buffer for each thread stays from operation to operation, and one passes from each operation to
the next. A buffer is as large as the largest operation so far has made it, whichever that was.
"""

import math
from typing import Dict, Iterable, List, NamedTuple, Tuple

from memory_estimator.step.cut import Cut, Work, ceil_div, cut_of, cut_of_rows, round_up
from memory_estimator.step.program import OwnOperation, StepOp
from models.native import shared
from models.native.instruction_sets import BFLOAT16_PRODUCTS

KINDS = {
    "convolve": "convolve",
    "input_gradient": "input_gradient",
    "filter_gradient": "filter_gradient",
    "max_pool": "pass",
    "max_pool_gradient": "pass",
    "residual_sum": "pass",
    "residual_gradient": "pass",
    "to_raw": "pass",
    "project": "project",
    "project_gradient": "project",
    "project_sums": "project",
    "project_to_raw": "project",
    "up_convolve": "up",
    "up_input_gradient": "up",
    "up_filter_gradient": "up",
    "loss_sums": "loss",
    "loss_slope": "loss",
    "orthogonal": "update",
}
"""Own operations, as native.h has them -> kinds that cost the same, of `calibration.FEATURES`."""

CONVOLUTIONS = ("convolve", "input_gradient", "filter_gradient")
FILTER_GRADIENTS = ("filter_gradient", "project_gradient", "project_sums", "up_filter_gradient")
GROUP = 16  # channels that are stored together
TILES = ("amx", "amx_in_c", "amx_in_c_avx512")  # direct products, of bfloat16 maps
LOSS_TERMS = 4  # sums of each region
LINE_BYTES = 64  # in front of a buffer
PAGE_BYTES = 4096  # what a buffer is rounded up to


class Scratch(NamedTuple):
    """What one operation takes besides its maps."""

    threads: int  # that keep some: one for each piece
    kept_bytes: int  # of each of them
    passing_bytes: int


class Rows(NamedTuple):
    """The rows that an instruction set multiplies."""

    streams: int
    tile: int  # voxels along Z
    unit: int  # values in 4 bytes
    lanes: int  # of a vector of float32

    @property
    def most_sums(self) -> int:
        """Tiles of a product, whose sums are in registers."""
        return 28 if self.lanes == 16 else 6


def scratch_bytes(ops: Iterable[StepOp], threads: int, instructions: str, l2_bytes: int) -> int:
    """All buffers after these operations, with an instruction set and so large a cache L2."""
    every: List[Scratch] = []
    for op in ops:
        if op.own:
            in_place = op.takes_over == op.reads[0]
            every.append(scratch_of(op.own, threads, instructions, l2_bytes, in_place))
    total = _mapped(max((each.passing_bytes for each in every), default=0))
    counted = 0
    for count in sorted({each.threads for each in every}):
        largest = max(each.kept_bytes for each in every if each.threads >= count)
        total += (count - counted) * _mapped(largest)
        counted = count
    return total


def scratch_of(
    op: OwnOperation,
    threads: int,
    instructions: str,
    l2_bytes: int,
    in_place: bool = False,
) -> Scratch:
    """Scratch of one operation; `in_place` if it writes over the first map that it reads."""
    if op.kind == "orthogonal":
        return _of_orthogonal(op, rows_of(instructions, op.value_bytes).lanes)
    cut = cut_for(op, threads, instructions, in_place)
    rows = rows_of(instructions, op.value_bytes)
    if op.kind.startswith("loss_"):
        return _of_loss(op, cut, rows.lanes)
    in_tiles = is_in_tiles(op, instructions)
    if in_tiles and op.kind in ("up_convolve", "up_input_gradient"):
        return _of_direct_up(op, cut)
    if in_tiles and op.kind == "up_filter_gradient":
        return _of_direct_up_filters(op, cut, l2_bytes)
    if op.kind not in CONVOLUTIONS:
        return _of_pass(op, cut, rows.lanes)
    if not in_tiles:
        return _of_convolution(op, cut, rows, l2_bytes, in_place)
    if op.kind == "filter_gradient":
        return _of_direct_filters(op, cut, l2_bytes)
    return _of_direct_convolution(op, cut, l2_bytes, in_place)


def is_in_tiles(op: OwnOperation, instructions: str) -> bool:
    """Whether the code for AMX computes it, as far as it has the kind."""
    return op.value_bytes == 2 and instructions in TILES


def cut_for(op: OwnOperation, threads: int, instructions: str, in_place: bool = False) -> Cut:
    """The pieces of one operation."""
    x, y, z = op.grid
    rows = rows_of(instructions, op.value_bytes)
    in_tiles = is_in_tiles(op, instructions)
    if op.kind == "orthogonal":
        return _cut_of_orthogonal(op, threads, rows.lanes)
    if op.kind.startswith("loss_"):
        return cut_of_rows(_loss_blocks(op), threads)
    if op.kind == "up_filter_gradient":
        blocks = {"inputs": ceil_div(op.channels, GROUP), "outputs": ceil_div(op.outputs, GROUP)}
        if in_tiles:
            products = shared.UP_DIRECT_PRODUCTS_COST
            sums = products * shared.DIRECT_SUMS_POSITIONS // z
        else:
            products = shared.UP_PRODUCTS_COST
            sums = products * shared.UP_SUMS_VOXELS // z
        form_outputs = shared.UP_FORM_FINE
        work = Work(
            op.batch * x * y, products=products, sums=sums, form_outputs=form_outputs, **blocks
        )
        return cut_of(work, threads)
    if op.kind not in CONVOLUTIONS:
        return cut_of_rows(op.batch * x * y, threads)
    grid = {"planes": op.batch * x, "rows": y, "outputs": ceil_div(op.outputs, GROUP), "border": 1}
    if op.kind == "filter_gradient":
        return cut_of(_work_of_filters(op, grid, rows, in_tiles), threads)
    unit = grid["outputs"] if in_place else 1
    if in_tiles:
        unit = grid["outputs"] if in_place else 2
        _, _, together = _direct_columns(op)
        products = shared.DIRECT_PRODUCTS_COST
        load = shared.DIRECT_LOAD_COST
        work = Work(**grid, unit=unit, products=products, load=load, together=together)
        return cut_of(work, threads)
    tiles = _padded_tiles(z, rows)
    together = 1
    while together < 8 and 2 * together * tiles <= rows.most_sums:
        together *= 2
    products = shared.ROW_PRODUCTS_COST
    load = products * shared.ROW_LOAD_TILES // tiles
    work = Work(**grid, unit=unit, products=products, load=load, together=together)
    return cut_of(work, threads)


def _work_of_filters(op: OwnOperation, grid: Dict[str, int], rows: Rows, in_tiles: bool) -> Work:
    z = op.grid[2]
    if in_tiles:
        inputs = ceil_div(_direct_width(op.channels), GROUP)
        pitch = round_up(z + 1, 2)
        products = shared.DIRECT_PRODUCTS_COST
        load = products * shared.DIRECT_LOAD_POSITIONS // pitch
        sums = products * shared.DIRECT_SUMS_POSITIONS // pitch
    else:
        inputs = ceil_div(op.channels, GROUP)
        units = _padded_tiles(z, rows) // rows.unit
        products = shared.ROW_PRODUCTS_COST
        load = products * shared.ROW_LOAD_UNITS // units
        sums = products * shared.ROW_SUMS_UNITS // units
    return Work(**grid, inputs=inputs, products=products, load=load, sums=sums, form_outputs=1)


def rows_of(instructions: str, value_bytes: int) -> Rows:
    """Rows of maps of so many bytes a value. Without products of bfloat16 values they are of
    float32."""
    lanes = 8 if instructions in ("avx2", "amx_in_c") else 16
    if value_bytes == 2 and instructions in BFLOAT16_PRODUCTS:
        return Rows(4, 2, 2, lanes)
    return Rows(6, 4, 1, lanes)


def _of_convolution(
    op: OwnOperation,
    cut: Cut,
    rows: Rows,
    l2_bytes: int,
    in_place: bool,
) -> Scratch:
    """`job_of` in convolutions.c: a ring of transformed rows in the cache, two rows in float32 and
    sums of a row; packed filters, the positions' sums and, in place, of each piece the rows that
    others overwrite."""
    z = op.grid[2]
    is_gradient = op.kind == "filter_gradient"
    width = round_up(op.channels, GROUP)
    output_width = round_up(op.outputs, GROUP)
    tiles = _padded_tiles(z, rows)

    ring_width = cut.inputs * GROUP if is_gradient else width
    line_width = cut.outputs * GROUP if is_gradient else GROUP
    row = _row_bytes(ring_width, tiles, rows)
    gradient_row = _row_bytes(line_width, tiles, rows) if is_gradient else 0
    most = max(1, l2_bytes * shared.RING_PERMILLE // 1000 // (3 * row + gradient_row) - 2)
    y_rows = ceil_div(cut.rows, ceil_div(cut.rows, most))
    kept = (3 * (y_rows + 2) + 1) * row + y_rows * gradient_row
    kept += 4 * (tiles * rows.tile + 2) * (ring_width + line_width)  # two lines
    kept += 4 * rows.streams * max(tiles, 64) * GROUP  # sums
    kept += 16 * y_rows  # two pointers

    if is_gradient:
        sums = 4 * 9 * rows.streams * width * output_width
        return Scratch(cut.pieces, kept, cut.positions * sums)
    packed = ceil_div(op.channels, rows.unit)
    passing = 4 * output_width * rows.streams * 9 * packed
    passing += cut.positions * 8 * (op.batch * 2 * output_width + 16)
    passing += cut.pieces * _copies(op, cut, in_place)
    return Scratch(cut.pieces, kept, passing)


def _copies(op: OwnOperation, cut: Cut, in_place: bool) -> int:
    """`saved_bytes` in pieces.h: the rows that are read after they are overwritten."""
    if not in_place:
        return 0
    rows = 2 * cut.rows + cut.planes
    if cut.is_along_y:
        rows += 4 + cut.planes
    return round_up(rows * op.grid[2] * op.outputs * op.value_bytes, LINE_BYTES)


def _direct_columns(op: OwnOperation) -> Tuple[int, int, int]:
    """Of direct.c: blocks of outputs, voxels of a line of a tile, rows that are multiplied at
    once."""
    blocks = ceil_div(op.outputs, GROUP)
    voxels = 2 if _direct_width(op.channels) <= 16 else 1
    return blocks, voxels, 2 if voxels == 2 or blocks > 1 else 4


def _of_direct_convolution(
    op: OwnOperation,
    cut: Cut,
    l2_bytes: int,
    in_place: bool,
) -> Scratch:
    """`job_of` in direct.c: a ring of three planes of bfloat16 rows in the cache, and the sums of
    twice four tiles; packed filters, the positions' sums and the pieces' copies."""
    z = op.grid[2]
    width = _direct_width(op.channels)
    blocks, voxels, together = _direct_columns(op)
    terms = (voxels + 2) * width
    depth = min(16, terms // 2)
    terms = round_up(terms, 2 * depth)

    lines = ceil_div(z, voxels)
    tiles = ceil_div(lines, 16)
    lines = tiles * ceil_div(lines, tiles)
    row = 2 * ((lines - 1) * voxels * width + terms)
    row = LINE_BYTES * (ceil_div(row, LINE_BYTES) | 1)
    budget = l2_bytes * shared.DIRECT_RING_PERMILLE // 1000
    most = max(shared.MOST_TILE_ROWS, budget // (3 * row) - 2)
    y_rows = min(cut.rows, round_up(ceil_div(cut.rows, ceil_div(cut.rows, most)), together))
    kept = 2 * 4 * 4 * 16 * 16 + 3 * (y_rows + 2) * row

    passing = blocks * (9 * terms + (voxels - 1) * width) * 16 * 2
    passing += cut.positions * 8 * (op.batch * 2 * blocks * GROUP + 16)
    return Scratch(cut.pieces, kept, passing + cut.pieces * _copies(op, cut, in_place))


def _of_direct_filters(op: OwnOperation, cut: Cut, l2_bytes: int) -> Scratch:
    """`job_of` in direct_filters.c: planes of pairs of positions in the cache, values' and
    gradients', a row and the sums of six tiles; and the positions' sums."""
    z = op.grid[2]
    width = _direct_width(op.channels)
    groups = ceil_div(width, GROUP)
    blocks = ceil_div(op.outputs, GROUP)
    shifts = width // 4 if width < 16 else 3
    arrays = cut.inputs * (1 if width < 16 else 2)
    pitch = round_up(z + 1, 2)

    budget = l2_bytes * shared.POSITIONS_PERMILLE // 1000
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
    kept += (planes + 2) * values + planes * gradients
    sums = 4 * 9 * shifts * groups * blocks * 256
    return Scratch(cut.pieces, kept, cut.positions * sums)


def _of_direct_up(op: OwnOperation, cut: Cut) -> Scratch:
    """`job_of` in direct_up.c: formed rows, and the sums of four tiles; packed filters, and the
    pieces' sums."""
    z = op.grid[2]
    x_edge, y_edge, z_edge = op.strides
    fine_rows = x_edge * y_edge
    if op.kind == "up_convolve":
        rows = 1
        steps = ceil_div(op.channels, 32)
        voxels = z_edge
        made = op.outputs
    else:
        rows = fine_rows
        steps = ceil_div(op.outputs, 32 // z_edge)
        voxels = 1
        made = op.channels
    width = round_up(made, GROUP)
    tiles = ceil_div(z, 16)
    kept = 4 * 4 * 256 + rows * tiles * ceil_div(z, tiles) * 64 * steps
    passing = width // GROUP * voxels * fine_rows * steps * 1024
    passing += cut.pieces * 8 * (op.batch * 2 * width + 16)
    return Scratch(cut.pieces, kept, passing)


def _of_direct_up_filters(op: OwnOperation, cut: Cut, l2_bytes: int) -> Scratch:
    """`job_of` in direct_up_filters.c: pairs of positions of some rows in the cache, a row, and the
    sums of six tiles; and the positions' sums."""
    z = op.grid[2]
    groups = ceil_div(op.channels, GROUP)
    blocks = ceil_div(op.outputs, GROUP)
    pitch = round_up(z, 2)
    taps = math.prod(op.strides)
    arrays = cut.inputs + taps * cut.outputs
    rows = min(ceil_div(shared.ENOUGH_STEPS * 32, pitch), cut.planes)
    budget = l2_bytes * shared.POSITIONS_PERMILLE // 1000
    rows = max(1, min(rows, budget // (arrays * 32 * pitch)))
    fine = op.strides[2] * cut.outputs
    kept = 4 * 6 * 256 + 2 * round_up(pitch * GROUP * max(cut.inputs, fine), 32)
    kept += arrays * 1024 * ceil_div(rows * pitch, 32)
    return Scratch(cut.pieces, kept, cut.positions * 4 * taps * blocks * groups * 256)


def _direct_width(channels: int) -> int:
    """`width_of` in direct.h: few channels are padded to a part of a tile's line."""
    return next((width for width in (4, 8) if channels <= width), round_up(channels, GROUP))


def _of_pass(op: OwnOperation, cut: Cut, lanes: int) -> Scratch:
    """`job_of` in pointwise.c: a row of both maps; sums of each position, and packed filters."""
    taps = math.prod(op.strides) if op.kind.startswith("up_") else 1
    width = round_up(op.channels, lanes)
    output_width = round_up(op.outputs, lanes)
    filters = taps * width * output_width
    kept = 4 * op.grid[2] * (width + output_width * taps)
    if op.kind == "up_filter_gradient":
        of_outputs = min(output_width, cut.outputs * GROUP)
        kept = 4 * op.grid[2] * (min(width, cut.inputs * GROUP) + of_outputs * taps)
    sums = op.batch * 2 * width
    if op.kind in FILTER_GRADIENTS:
        sums += filters + output_width
    takes_filters = op.kind.startswith(("project", "up_")) and op.kind != "up_filter_gradient"
    return Scratch(cut.pieces, kept, cut.positions * 8 * sums + 4 * filters * takes_filters)


def _loss_blocks(op: OwnOperation) -> int:
    """Blocks of rows, of which a loss has its sums."""
    x, y, z = op.grid
    return op.batch * ceil_div(x * y, max(1, shared.LOSS_BLOCK_VALUES // (z * op.channels)))


def _of_loss(op: OwnOperation, cut: Cut, lanes: int) -> Scratch:
    """`LOSS` in loss.c: sums of a row in float32 and of a block in float64, and a row of the
    target; the sums of all blocks."""
    row_values = op.grid[2] * op.channels
    kept = LOSS_TERMS * op.channels * lanes * (4 + 8) + row_values
    sums = 8 * LOSS_TERMS * op.channels * _loss_blocks(op)
    return Scratch(cut.pieces, kept, sums if op.kind == "loss_sums" else 0)


def _of_orthogonal(op: OwnOperation, lanes: int) -> Scratch:
    """`ORTHOGONALIZE` in orthogonal.c: the matrix and five square ones of its smaller side, in
    panels; all threads share them."""
    block_rows, block_columns = _orthogonal_block(lanes)
    rows = op.grid[0]
    columns = op.outputs
    width = round_up(min(rows, columns), block_columns)
    tall = max(rows, columns, block_rows)
    return Scratch(0, 0, 4 * (width * tall + 5 * width**2))


def _cut_of_orthogonal(op: OwnOperation, threads: int, lanes: int) -> Cut:
    """`threads_for` in orthogonal.c: the blocks of a symmetric matrix, in turn to as many threads
    as have enough of them."""
    block_rows, block_columns = _orthogonal_block(lanes)
    across = ceil_div(min(op.grid[0], op.outputs), block_columns)
    blocks = block_columns // block_rows * across * (across + 1) // 2
    taking = max(1, min(blocks // shared.ORTHOGONAL_BLOCKS, threads))
    cut = cut_of_rows(blocks, taking)
    return cut._replace(efficiency=cut.efficiency * taking / threads)


def _orthogonal_block(lanes: int) -> Tuple[int, int]:
    """Rows and columns of a block whose sums are in registers, in orthogonal.c."""
    return (8, 32) if lanes == 16 else (4, 16)


def _padded_tiles(z: int, rows: Rows) -> int:
    tiles = ceil_div(z, rows.tile)
    return round_up(tiles, 2 if tiles >= 8 else rows.unit)


def _row_bytes(width: int, tiles: int, rows: Rows) -> int:
    """From one row to the next: 17 lines above a multiple of 32, so that rows spread over the
    cache."""
    lines = ceil_div(rows.streams * width * tiles // rows.unit, 16)
    return LINE_BYTES * (lines + (49 - lines % 32) % 32)


def _mapped(size_bytes: int) -> int:
    return round_up(LINE_BYTES + size_bytes, PAGE_BYTES)

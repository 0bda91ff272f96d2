"""Memory of own operations outside TensorFlow's allocator, as models/native takes it: operations.c,
direct*.c, passes.c, loss.c, orthogonal.c and pool.c.

A buffer for each thread stays from operation to operation, and one passes from each operation to
the next. A buffer is as large as the largest operation so far has made it, whichever that was.
"""

from typing import Iterable, List, NamedTuple

from memory_estimator.step.program import OwnOperation, StepOp
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
MOST_THREADS = 256  # that compute an operation (native.h)
GROUP = 16  # channels that are stored together
TILES = ("amx", "amx_in_c", "amx_in_c_avx512")  # direct products, of bfloat16 maps
LOSS_TERMS = 4  # sums of each region
BLOCK_VALUES = 8192  # logits of a block of rows, of which a loss has its sums
LINE_BYTES, PAGE_BYTES = 64, 4096  # in front of a buffer; what a buffer is rounded up to


class Scratch(NamedTuple):
    """What one operation takes besides its maps."""

    threads: int  # that keep some: one for each slab of planes along X, or of rows
    kept_bytes: int  # of each of them
    passing_bytes: int


class Rows(NamedTuple):
    """The rows that an instruction set multiplies."""

    streams: int
    tile: int  # voxels along Z
    unit: int  # values in 4 bytes
    lanes: int  # of a vector of float32


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
    if op.kind.startswith("loss_"):
        return _of_loss(op, threads, rows_of(instructions, op.value_bytes).lanes)
    slabs = min(threads, MOST_THREADS, op.batch * op.grid[0])
    rows = rows_of(instructions, op.value_bytes)
    in_tiles = op.value_bytes == 2 and instructions in TILES
    if in_tiles and op.kind in ("up_convolve", "up_input_gradient"):
        return _of_direct_up(op, slabs)
    if in_tiles and op.kind == "up_filter_gradient":
        return _of_direct_up_filters(op, slabs, l2_bytes)
    if op.kind not in CONVOLUTIONS:
        return _of_pass(op, slabs, rows.lanes)
    if not in_tiles:
        return _of_convolution(op, slabs, rows, l2_bytes, in_place)
    if op.kind == "filter_gradient":
        return _of_direct_filters(op, slabs, l2_bytes)
    return _of_direct_convolution(op, slabs, l2_bytes, in_place)


def rows_of(instructions: str, value_bytes: int) -> Rows:
    """Rows of maps of so many bytes a value. Without products of bfloat16 values they are of
    float32."""
    lanes = 8 if instructions in ("avx2", "amx_in_c") else 16
    if value_bytes == 2 and instructions in BFLOAT16_PRODUCTS:
        return Rows(4, 2, 2, lanes)
    return Rows(6, 4, 1, lanes)


def _of_convolution(
    op: OwnOperation,
    slabs: int,
    rows: Rows,
    l2_bytes: int,
    in_place: bool,
) -> Scratch:
    """`job_of` in operations.c: a ring of transformed rows in the cache, two lines in float32 and
    sums of a row; packed filters, and of each slab the sums or, in place, the rows that other
    slabs still read."""
    _, y, z = op.grid
    is_gradient = op.kind == "filter_gradient"
    width = _up(op.channels, GROUP)
    output_width = _up(op.outputs, GROUP)
    tiles = _padded_tiles(z, rows)

    row = _row_bytes(width, tiles, rows)
    gradient_row = _row_bytes(output_width, tiles, rows) if is_gradient else 0
    most = max(1, l2_bytes * 5 // 8 // (3 * row + gradient_row) - 2)
    y_rows = _parts(y, _parts(y, most))
    kept = (3 * (y_rows + 2) + 1) * row + y_rows * gradient_row
    kept += 4 * (tiles * rows.tile + 2) * (width + output_width)  # two lines
    kept += 4 * rows.streams * max(tiles, 64) * GROUP  # sums
    kept += 16 * y_rows  # two pointers

    if is_gradient:
        return Scratch(slabs, kept, slabs * 4 * 9 * rows.streams * width * output_width)
    packed = _parts(op.channels, rows.unit)
    passing = 4 * output_width * rows.streams * 9 * packed
    passing += slabs * 8 * (op.batch * 2 * output_width + 16)
    passing += slabs * _copies(op, slabs, in_place)
    return Scratch(slabs, kept, passing)


def _copies(op: OwnOperation, slabs: int, in_place: bool) -> int:
    """`copies_bytes` in slabs.h: the rows that are read after they are overwritten."""
    if not in_place:
        return 0
    x, y, z = op.grid
    planes = _parts(op.batch * x, slabs)
    return _up((2 * y + planes) * z * op.outputs * op.value_bytes, LINE_BYTES)


def _of_direct_convolution(
    op: OwnOperation,
    slabs: int,
    l2_bytes: int,
    in_place: bool,
) -> Scratch:
    """`job_of` in direct.c: a ring of three planes of bfloat16 rows in the cache, and the sums of
    twice four tiles; packed filters, the slabs' sums and copies."""
    _, y, z = op.grid
    width = _direct_width(op.channels)
    blocks = _parts(op.outputs, GROUP)
    voxels = 2 if width <= 16 else 1  # of a line of a tile
    columns = 2 if voxels == 2 or blocks > 1 else 1
    terms = (voxels + 2) * width
    depth = min(16, terms // 2)
    terms = _up(terms, 2 * depth)

    lines = _parts(z, voxels)
    tiles = _parts(lines, 16)
    lines = tiles * _parts(lines, tiles)
    row = 2 * ((lines - 1) * voxels * width + terms)
    row = LINE_BYTES * (_parts(row, LINE_BYTES) | 1)
    most = max(4, l2_bytes * 2 // 5 // (3 * row) - 2)
    y_rows = min(y, _up(_parts(y, _parts(y, most)), 4 // columns))
    kept = 2 * 4 * 4 * 16 * 16 + 3 * (y_rows + 2) * row

    passing = blocks * (9 * terms + (voxels - 1) * width) * 16 * 2
    passing += slabs * (8 * (op.batch * 2 * blocks * GROUP + 16) + _copies(op, slabs, in_place))
    return Scratch(slabs, kept, passing)


def _of_direct_filters(op: OwnOperation, slabs: int, l2_bytes: int) -> Scratch:
    """`job_of` in direct_filters.c: planes of pairs of positions in the cache, values' and
    gradients', a row and the sums of six tiles; and the slabs' sums."""
    x, y, z = op.grid
    width = _direct_width(op.channels)
    groups = _parts(width, GROUP)
    blocks = _parts(op.outputs, GROUP)
    shifts = width // 4 if width < 16 else 3
    arrays = groups * (1 if width < 16 else 2)
    pitch = _up(z + 1, 2)

    budget = l2_bytes * 5 // 8
    most = (budget - 3 * arrays * 64 * (pitch + 1)) // (1024 * (3 * arrays + blocks))
    most = min(y, max(1, most * 32 // pitch))
    y_rows = _parts(y, _parts(y, most))
    position_blocks = _parts(y_rows * pitch, 32)
    values = arrays * 64 * (pitch + 16 * position_blocks + 1)
    gradients = 1024 * blocks * position_blocks
    enough = min(8, _parts(64, position_blocks), _parts(op.batch * x, slabs))
    planes = min(enough, max(1, (budget - 2 * values) // (values + gradients)))

    kept = 4 * 6 * 256 + 2 * _up((pitch + 6) * max(width, blocks * GROUP), 32)
    kept += (planes + 2) * values + planes * gradients
    return Scratch(slabs, kept, slabs * 4 * 9 * shifts * groups * blocks * 256)


def _of_direct_up(op: OwnOperation, slabs: int) -> Scratch:
    """`job_of` in direct_up.c: formed rows, and the sums of four tiles; packed filters, and the
    slabs' sums."""
    z = op.grid[2]
    if op.kind == "up_convolve":
        rows, steps, voxels, made = 1, _parts(op.channels, 32), 2, op.outputs
    else:
        rows, steps, voxels, made = 4, _parts(op.outputs, GROUP), 1, op.channels
    width = _up(made, GROUP)
    tiles = _parts(z, 16)
    kept = 4 * 4 * 256 + rows * tiles * _parts(z, tiles) * 64 * steps
    passing = width // GROUP * voxels * 4 * steps * 1024
    return Scratch(slabs, kept, passing + slabs * 8 * (op.batch * 2 * width + 16))


def _of_direct_up_filters(op: OwnOperation, slabs: int, l2_bytes: int) -> Scratch:
    """`job_of` in direct_up_filters.c: pairs of positions of some rows in the cache, a row, and the
    sums of six tiles; and the slabs' sums."""
    x, y, z = op.grid
    groups = _parts(op.channels, GROUP)
    blocks = _parts(op.outputs, GROUP)
    pitch = _up(z, 2)
    arrays = groups + 8 * blocks
    rows = min(_parts(64 * 32, pitch), y * _parts(op.batch * x, slabs))
    rows = max(1, min(rows, l2_bytes * 5 // 8 // (arrays * 32 * pitch)))
    kept = 4 * 6 * 256 + 2 * _up(pitch * GROUP * max(groups, 2 * blocks), 32)
    kept += arrays * 1024 * _parts(rows * pitch, 32)
    return Scratch(slabs, kept, slabs * 4 * 8 * blocks * groups * 256)


def _direct_width(channels: int) -> int:
    """`width_of` in direct.h: few channels are padded to a part of a tile's line."""
    return next((width for width in (4, 8) if channels <= width), _up(channels, GROUP))


def _of_pass(op: OwnOperation, slabs: int, lanes: int) -> Scratch:
    """`PASSES` in passes.c: a line of both maps; sums of each slab, and packed filters."""
    taps = 8 if op.kind.startswith("up_") else 1
    width = _up(op.channels, lanes)
    output_width = _up(op.outputs, lanes)
    filters = taps * width * output_width
    kept = 4 * op.grid[2] * (width + output_width * taps)
    sums = op.batch * 2 * width
    if op.kind in FILTER_GRADIENTS:
        sums += filters + output_width
    takes_filters = op.kind.startswith(("project", "up_")) and op.kind != "up_filter_gradient"
    return Scratch(slabs, kept, slabs * 8 * sums + 4 * filters * takes_filters)


def _of_loss(op: OwnOperation, threads: int, lanes: int) -> Scratch:
    """`LOSS` in loss.c: sums of a row in float32 and of a block in float64, and a row of the
    target; the sums of all blocks."""
    x, y, z = op.grid
    row_values = z * op.channels
    blocks = op.batch * _parts(x * y, max(1, BLOCK_VALUES // row_values))
    kept = LOSS_TERMS * op.channels * lanes * (4 + 8) + row_values
    passing = 8 * LOSS_TERMS * op.channels * blocks if op.kind == "loss_sums" else 0
    return Scratch(min(threads, MOST_THREADS, blocks), kept, passing)


def _of_orthogonal(op: OwnOperation, lanes: int) -> Scratch:
    """`MAKE_ORTHOGONAL` in orthogonal.c: the matrix and five square ones of its smaller side, in
    panels; all threads share them."""
    rows, columns = op.grid[0], op.outputs
    width = _up(min(rows, columns), 32 if lanes == 16 else 16)
    tall = max(rows, columns, 8 if lanes == 16 else 4)
    return Scratch(0, 0, 4 * (width * tall + 5 * width**2))


def _padded_tiles(z: int, rows: Rows) -> int:
    tiles = _parts(z, rows.tile)
    return _up(tiles, 2 if tiles >= 8 else rows.unit)


def _row_bytes(width: int, tiles: int, rows: Rows) -> int:
    """From one row to the next: 17 lines above a multiple of 32, so that rows spread over the cache."""
    lines = _parts(rows.streams * width * tiles // rows.unit, 16)
    return LINE_BYTES * (lines + (49 - lines % 32) % 32)


def _mapped(size_bytes: int) -> int:
    return _up(LINE_BYTES + size_bytes, PAGE_BYTES)


def _parts(number: int, size: int) -> int:
    return -(-number // size)


def _up(number: int, to: int) -> int:
    return to * _parts(number, to)

"""Memory of own operations outside TensorFlow's allocator, as models/native takes it: operations.c,
passes.c, loss.c and pool.c.

A buffer for each thread stays from operation to operation, and one passes from each operation to
the next. A buffer is as large as the largest operation so far has made it, whichever that was.
"""

from typing import Iterable, List, NamedTuple

from memory_estimator.step.program import OwnOperation, StepOp

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
}
"""Own operations, as native.h has them -> kinds that cost the same, of `calibration.FEATURES`."""

CONVOLUTIONS = ("convolve", "input_gradient", "filter_gradient")
FILTER_GRADIENTS = ("filter_gradient", "project_gradient", "project_sums", "up_filter_gradient")
MOST_THREADS = 256  # that compute an operation (native.h)
GROUP = 16  # channels that are stored together
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
    in_registers: bool  # AMX: whole registers of tiles


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
    if op.kind.startswith("loss_"):
        return _of_loss(op, threads, rows_of(instructions, op.value_bytes).lanes)
    slabs = min(threads, MOST_THREADS, op.batch * op.grid[0])
    rows = rows_of(instructions, op.value_bytes)
    if op.kind in CONVOLUTIONS:
        return _of_convolution(op, slabs, rows, l2_bytes, in_place)
    return _of_pass(op, slabs, rows.lanes)


def rows_of(instructions: str, value_bytes: int) -> Rows:
    """Rows of maps of so many bytes a value. Without products of bfloat16 values they are of
    float32."""
    lanes = 16 if instructions in ("avx512", "avx512_bf16", "amx") else 8
    if value_bytes == 2 and instructions in ("avx512_bf16", "amx", "amx_in_c"):
        return Rows(4, 2, 2, lanes, in_registers=instructions != "avx512_bf16")
    return Rows(6, 4, 1, lanes, in_registers=False)


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
    tiles = _padded_tiles(z, rows, is_gradient)

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
    packed = _up(op.channels, GROUP if rows.in_registers else rows.unit) // rows.unit
    passing = 4 * output_width * rows.streams * 9 * packed
    passing += slabs * 8 * (op.batch * 2 * output_width + 16)
    if in_place:
        planes = _parts(op.batch * op.grid[0], slabs)
        passing += slabs * _up((2 * y + planes) * z * op.outputs * op.value_bytes, LINE_BYTES)
    return Scratch(slabs, kept, passing)


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


def _padded_tiles(z: int, rows: Rows, is_gradient: bool) -> int:
    tiles = _parts(z, rows.tile)
    step = 2 if tiles >= 8 else rows.unit
    if rows.in_registers:  # of up to 16 tiles, or 16 pairs of them, and equally high
        registers = _parts(tiles, 32 if is_gradient else 16)
        step = _up(_parts(tiles, registers), 2)
    return _up(tiles, step)


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

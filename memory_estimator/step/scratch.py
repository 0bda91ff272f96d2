"""Memory of own operations outside TensorFlow's allocator, as models/native takes it:
convolutions.c, direct*.c, pointwise.c, loss.c, orthogonal.c and pool.c.

A buffer for each thread stays from operation to operation, and one passes from each operation to
the next. A buffer is as large as the largest operation so far has made it, whichever that was.
"""

import functools
import math
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

from memory_estimator.step import direct
from memory_estimator.step.call import (
    GROUP,
    LINE_BYTES,
    Call,
    Rows,
    Scratch,
    copies,
    unit_of,
    work_of_planes,
    work_of_up_filters,
)
from memory_estimator.step.cut import Cut, ceil_div, cut_of, cut_of_rows, round_up
from memory_estimator.step.timeline import OwnOperation, StepOp
from models.native import shared
from models.program import Kind

MOST_SUMS = {8: shared.MOST_TILES_OF_8_LANES, 16: shared.MOST_TILES_OF_16_LANES}
"""Lanes of a vector -> tiles of a product, whose sums are in registers."""
PAGE_BYTES = 4096  # what a buffer is rounded up to


class Way(NamedTuple):
    """How operations are computed."""

    cut: Callable[[Call], Cut]
    scratch: Callable[[Call, Cut], Scratch]


class OwnKind(NamedTuple):
    """A kind of own operations."""

    costs: str  # of `calibration.FEATURES`: kinds that cost the same
    way: Way
    in_tiles: Optional[Way] = None  # by the code for AMX, if it has the kind


def scratch_bytes(ops: Iterable[StepOp], threads: int, instructions: str, l2_bytes: int) -> int:
    """All buffers after these operations, with an instruction set and so large a cache L2."""
    every: List[Scratch] = []
    for op in ops:
        if op.own:
            every.append(scratch_of(op.own, threads, instructions, l2_bytes, op.is_in_place))
    total = _mapped(max((each.passing_bytes for each in every), default=0))
    counted = 0
    for count in sorted({each.threads for each in every}):
        largest = max(each.kept_bytes for each in every if each.threads >= count)
        total += (count - counted) * _mapped(largest)
        counted = count
    return total


@functools.lru_cache(maxsize=1024)  # a validation has the operations of a step
def scratch_of(
    op: OwnOperation,
    threads: int,
    instructions: str,
    l2_bytes: int,
    in_place: bool = False,
) -> Scratch:
    """Scratch of one operation; `in_place` if it writes over the first map that it reads."""
    call = Call(op, threads, instructions, l2_bytes, in_place)
    way = _way_of(call)
    return way.scratch(call, way.cut(call))


def cut_for(op: OwnOperation, threads: int, instructions: str, in_place: bool = False) -> Cut:
    """The pieces of one operation."""
    call = Call(op, threads, instructions, 0, in_place)  # whatever the cache
    return _way_of(call).cut(call)


def _way_of(call: Call) -> Way:
    kind = OWN_KINDS[call.op.kind]
    if kind.in_tiles is not None and call.is_in_tiles:
        return kind.in_tiles
    return kind.way


def costs_of(kind: Kind) -> str:
    """The kind of `calibration.FEATURES` that operations of a kind of models/program.py cost."""
    return "pass" if kind in OF_TENSORFLOW else OWN_KINDS[kind.value].costs


# --- Rows that have nothing to do with each other ---


def _cut_of_pass(call: Call) -> Cut:
    x, y, _ = call.op.grid
    return cut_of_rows(call.op.batch * x * y, call.threads)


def _of_pass(call: Call, cut: Cut) -> Scratch:
    """`job_of` in pointwise.c and pool.c: a row of both maps, and sums of each position."""
    return _of_rows(call, cut, 1)


def _of_filters(call: Call, cut: Cut) -> Scratch:
    """The same with packed filters: of a 1x1x1 convolution."""
    return _of_rows(call, cut, 1, takes_filters=True)


def _of_filters_and_gradient(call: Call, cut: Cut) -> Scratch:
    """With packed filters, and sums of their gradient."""
    return _of_rows(call, cut, 1, takes_filters=True, has_gradient=True)


def _of_up(call: Call, cut: Cut) -> Scratch:
    """With packed filters, for each voxel of the finer grid."""
    return _of_rows(call, cut, math.prod(call.op.strides), takes_filters=True)


def _of_rows(
    call: Call, cut: Cut, taps: int, takes_filters: bool = False, has_gradient: bool = False
) -> Scratch:
    op = call.op
    width = round_up(op.channels, call.rows.lanes)
    output_width = round_up(op.outputs, call.rows.lanes)
    filters = taps * width * output_width
    kept = 4 * op.grid[2] * (width + output_width * taps)
    sums = op.batch * 2 * width
    if has_gradient:
        sums += filters + output_width
    passing = cut.positions * 8 * sums
    if takes_filters:
        passing += 4 * filters
    return Scratch(threads=cut.pieces, kept_bytes=kept, passing_bytes=passing)


def _cut_of_up_filters(call: Call) -> Cut:
    cost = shared.UP_PRODUCTS_COST
    return cut_of(work_of_up_filters(call, cost, shared.UP_SUMS_VOXELS), call.threads)


def _of_up_filters(call: Call, cut: Cut) -> Scratch:
    """`job_of` in pointwise.c: a row of both maps, of a piece's channels; sums of each position."""
    op = call.op
    taps = math.prod(op.strides)
    width = round_up(op.channels, call.rows.lanes)
    output_width = round_up(op.outputs, call.rows.lanes)
    of_inputs = min(width, cut.inputs * GROUP)
    of_outputs = min(output_width, cut.outputs * GROUP)
    kept = 4 * op.grid[2] * (of_inputs + of_outputs * taps)
    sums = op.batch * 2 * width + taps * width * output_width + output_width
    return Scratch(threads=cut.pieces, kept_bytes=kept, passing_bytes=cut.positions * 8 * sums)


# --- 3x3x3 convolutions by transformed rows ---


def _cut_of_convolution(call: Call) -> Cut:
    rows = call.rows
    tiles = _padded_tiles(call.op.grid[2], rows)
    together = 1
    while together < 8 and 2 * together * tiles <= MOST_SUMS[rows.lanes]:
        together *= 2
    products = shared.ROW_PRODUCTS_COST
    load = products * shared.ROW_LOAD_TILES // tiles
    unit = unit_of(call, 1)
    work = work_of_planes(call, products, unit=unit, load=load, together=together)
    return cut_of(work, call.threads)


def _cut_of_row_filters(call: Call) -> Cut:
    op = call.op
    rows = call.rows
    units = _padded_tiles(op.grid[2], rows) // rows.unit
    products = shared.ROW_PRODUCTS_COST
    work = work_of_planes(
        call,
        products,
        inputs=ceil_div(op.channels, GROUP),
        load=products * shared.ROW_LOAD_UNITS // units,
        sums=products * shared.ROW_SUMS_UNITS // units,
        form_outputs=1,
    )
    return cut_of(work, call.threads)


def _of_convolution(call: Call, cut: Cut) -> Scratch:
    """`job_of` in convolutions.c: a ring of transformed rows in the cache, two rows in float32 and
    sums of a row; packed filters, the positions' sums and, in place, of each piece the rows that
    others overwrite."""
    op = call.op
    rows = call.rows
    output_width = round_up(op.outputs, GROUP)
    kept = _kept_of_rows(call, cut, round_up(op.channels, GROUP))
    packed = ceil_div(op.channels, rows.unit)
    passing = 4 * output_width * rows.streams * 9 * packed
    passing += cut.positions * 8 * (op.batch * 2 * output_width + 16)
    return Scratch(
        threads=cut.pieces, kept_bytes=kept, passing_bytes=passing + cut.pieces * copies(call, cut)
    )


def _of_row_filters(call: Call, cut: Cut) -> Scratch:
    """The same of a filter gradient, whose rings are of a piece's channels: with transformed rows
    of the gradient, and the positions' sums."""
    op = call.op
    kept = _kept_of_rows(call, cut, cut.inputs * GROUP, cut.outputs * GROUP)
    sums = 9 * call.rows.streams * round_up(op.channels, GROUP) * round_up(op.outputs, GROUP)
    return Scratch(threads=cut.pieces, kept_bytes=kept, passing_bytes=cut.positions * 4 * sums)


def _kept_of_rows(call: Call, cut: Cut, width: int, gradient_width: int = 0) -> int:
    """Bytes of a ring of rows of `width` channels, with rows of a gradient beside it if that has
    a width."""
    rows = call.rows
    tiles = _padded_tiles(call.op.grid[2], rows)
    row = _row_bytes(width, tiles, rows)
    gradient_row = 0
    line_width = GROUP
    if gradient_width:
        gradient_row = _row_bytes(gradient_width, tiles, rows)
        line_width = gradient_width
    ring_bytes = call.l2_bytes * shared.RING_PERMILLE // 1000
    most = max(1, ring_bytes // (3 * row + gradient_row) - 2)
    y_rows = ceil_div(cut.rows, ceil_div(cut.rows, most))
    kept = (3 * (y_rows + 2) + 1) * row + y_rows * gradient_row
    kept += 4 * (tiles * rows.tile + 2) * (width + line_width)  # two lines
    kept += 4 * rows.streams * max(tiles, 64) * GROUP  # sums
    kept += 16 * y_rows  # two pointers
    return kept


# --- A loss, and an optimizer's update ---


def _loss_blocks(op: OwnOperation) -> int:
    """Blocks of rows, of which a loss has its sums."""
    x, y, z = op.grid
    return op.batch * ceil_div(x * y, max(1, shared.LOSS_BLOCK_VALUES // (z * op.channels)))


def _cut_of_loss(call: Call) -> Cut:
    return cut_of_rows(_loss_blocks(call.op), call.threads)


def _of_loss_slope(call: Call, cut: Cut) -> Scratch:
    """`LOSS` in loss.c: sums of a row in float32 and of a block in float64, and a row of the
    target."""
    op = call.op
    row_values = op.grid[2] * op.channels
    kept = shared.LOSS_TERMS * op.channels * call.rows.lanes * (4 + 8) + row_values
    return Scratch(threads=cut.pieces, kept_bytes=kept, passing_bytes=0)


def _of_loss_sums(call: Call, cut: Cut) -> Scratch:
    """The same, with the sums of all blocks."""
    sums = 8 * shared.LOSS_TERMS * call.op.channels * _loss_blocks(call.op)
    return _of_loss_slope(call, cut)._replace(passing_bytes=sums)


def _of_orthogonal(call: Call, cut: Cut) -> Scratch:
    """`ORTHOGONALIZE` in orthogonal.c: the matrix and five square ones of its smaller side, in
    panels; all threads share them."""
    op = call.op
    block_rows, block_columns = _orthogonal_block(call)
    rows = op.grid[0]
    columns = op.outputs
    width = round_up(min(rows, columns), block_columns)
    tall = max(rows, columns, block_rows)
    return Scratch(threads=0, kept_bytes=0, passing_bytes=4 * (width * tall + 5 * width**2))


def _cut_of_orthogonal(call: Call) -> Cut:
    """`threads_for` in orthogonal.c: the blocks of a symmetric matrix, in turn to as many threads
    as have enough of them."""
    op = call.op
    block_rows, block_columns = _orthogonal_block(call)
    across = ceil_div(min(op.grid[0], op.outputs), block_columns)
    blocks = block_columns // block_rows * across * (across + 1) // 2
    taking = max(1, min(blocks // shared.ORTHOGONAL_BLOCKS, call.threads))
    cut = cut_of_rows(blocks, taking)
    return cut._replace(efficiency=cut.efficiency * taking / call.threads)


def _orthogonal_block(call: Call) -> Tuple[int, int]:
    """Rows and columns of a block whose sums are in registers, in orthogonal.c: two vectors."""
    lanes = call.rows.lanes
    return lanes // 2, 2 * lanes


# --- Sizes ---


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


PASS = Way(cut=_cut_of_pass, scratch=_of_pass)
PROJECTION = Way(cut=_cut_of_pass, scratch=_of_filters)
PROJECTION_GRADIENT = Way(cut=_cut_of_pass, scratch=_of_filters_and_gradient)
UP = Way(cut=_cut_of_pass, scratch=_of_up)
CONVOLUTION = Way(cut=_cut_of_convolution, scratch=_of_convolution)
DIRECT_CONVOLUTION = Way(cut=direct.cut_of_convolution, scratch=direct.of_convolution)

OF_TENSORFLOW = (
    Kind.NORM_GRADIENT,
    Kind.ADD,
    Kind.KERNEL_ROWS,
    Kind.KERNEL_TAPS,
    Kind.PLAIN,
    Kind.PLAIN_GRADIENT,
    Kind.JOIN_GRADIENTS,
)
"""Kinds of a step that no own operation computes."""

OWN_KINDS: Dict[str, OwnKind] = {
    "convolve": OwnKind(costs="convolve", way=CONVOLUTION, in_tiles=DIRECT_CONVOLUTION),
    "input_gradient": OwnKind(costs="input_gradient", way=CONVOLUTION, in_tiles=DIRECT_CONVOLUTION),
    "filter_gradient": OwnKind(
        costs="filter_gradient",
        way=Way(cut=_cut_of_row_filters, scratch=_of_row_filters),
        in_tiles=Way(cut=direct.cut_of_filters, scratch=direct.of_filters),
    ),
    "max_pool": OwnKind(costs="pass", way=PASS),
    "max_pool_gradient": OwnKind(costs="pass", way=PASS),
    "residual_sum": OwnKind(costs="pass", way=PASS),
    "residual_gradient": OwnKind(costs="pass", way=PASS),
    "to_raw": OwnKind(costs="pass", way=PASS),
    "project": OwnKind(
        costs="project",
        way=PROJECTION,
        in_tiles=Way(cut=_cut_of_pass, scratch=direct.of_projection),
    ),
    "project_gradient": OwnKind(costs="project", way=PROJECTION_GRADIENT),
    "project_sums": OwnKind(costs="project", way=PROJECTION_GRADIENT),
    "project_to_raw": OwnKind(costs="project", way=PROJECTION),
    "up_convolve": OwnKind(
        costs="up", way=UP, in_tiles=Way(cut=_cut_of_pass, scratch=direct.of_up)
    ),
    "up_input_gradient": OwnKind(
        costs="up", way=UP, in_tiles=Way(cut=_cut_of_pass, scratch=direct.of_up_gradient)
    ),
    "up_filter_gradient": OwnKind(
        costs="up",
        way=Way(cut=_cut_of_up_filters, scratch=_of_up_filters),
        in_tiles=Way(cut=direct.cut_of_up_filters, scratch=direct.of_up_filters),
    ),
    "loss_sums": OwnKind(costs="loss", way=Way(cut=_cut_of_loss, scratch=_of_loss_sums)),
    "loss_slope": OwnKind(costs="loss", way=Way(cut=_cut_of_loss, scratch=_of_loss_slope)),
    "orthogonal": OwnKind(costs="update", way=Way(cut=_cut_of_orthogonal, scratch=_of_orthogonal)),
}
"""Own operations by their names in native.h: those of `Kind`, and of the update."""

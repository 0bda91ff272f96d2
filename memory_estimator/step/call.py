"""An own operation as it is computed: by which instruction set, on how many threads, and what its
pieces have in common."""

from typing import NamedTuple

from memory_estimator.step.cut import Cut, Work, ceil_div, round_up
from memory_estimator.step.timeline import OwnOperation
from models.native import shared
from models.native.instruction_sets import BFLOAT16_PRODUCTS, DIRECT_PRODUCTS, INSTRUCTION_SETS

GROUP = shared.GROUP  # channels that are stored together
LINE_BYTES = 64  # in front of a buffer, and in the cache


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


class Call(NamedTuple):
    """An own operation as it is computed."""

    op: OwnOperation
    threads: int
    instructions: str
    l2_bytes: int  # of a core's cache L2
    in_place: bool  # whether it writes over the first map that it reads

    @property
    def rows(self) -> Rows:
        return rows_of(self.instructions, self.op.value_bytes)

    @property
    def is_in_tiles(self) -> bool:
        """Whether the code for AMX computes it, if that has the kind."""
        return self.op.value_bytes == 2 and self.instructions in DIRECT_PRODUCTS


def rows_of(instructions: str, value_bytes: int) -> Rows:
    """Rows of maps of so many bytes a value. Without products of bfloat16 values they are of
    float32."""
    lanes = INSTRUCTION_SETS[instructions].lanes
    if value_bytes == 2 and instructions in BFLOAT16_PRODUCTS:
        return Rows(4, 2, 2, lanes)
    return Rows(6, 4, 1, lanes)


def work_of_planes(call: Call, products: int, **more: int) -> Work:
    """Planes, rows and blocks of outputs; `more` as of `Work`."""
    op = call.op
    x, y, _ = op.grid
    blocks = ceil_div(op.outputs, GROUP)
    return Work(planes=op.batch * x, rows=y, outputs=blocks, border=1, products=products, **more)


def unit_of(call: Call, blocks: int) -> int:
    """Blocks of outputs that a piece has at least: in place all of them."""
    return ceil_div(call.op.outputs, GROUP) if call.in_place else blocks


def copies(call: Call, cut: Cut) -> int:
    """`saved_bytes` in pieces.h: the rows that are read after they are overwritten."""
    op = call.op
    if not call.in_place:
        return 0
    rows = 2 * cut.rows + cut.planes
    if cut.is_along_y:
        rows += 4 + cut.planes
    return round_up(rows * op.grid[2] * op.outputs * op.value_bytes, LINE_BYTES)


def work_of_up_filters(call: Call, products: int, sums_voxels: int) -> Work:
    """`sums_voxels`: those whose products take as long as clearing and adding up sums."""
    op = call.op
    x, y, z = op.grid
    return Work(
        op.batch * x * y,
        inputs=ceil_div(op.channels, GROUP),
        outputs=ceil_div(op.outputs, GROUP),
        products=products,
        sums=products * sums_voxels // z,
        form_outputs=shared.UP_FORM_FINE,
    )

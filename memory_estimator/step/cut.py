"""How own operations are cut into pieces, one for each thread that takes part: `cut_of` in
models/native/pieces.h.

The cut is the one whose largest piece costs least. The unit of a cost is what it takes to form a
row, all voxels along Z, of a block of 16 channels.
"""

import functools
from typing import NamedTuple, Sequence

from models.native.shared import MOST_THREADS


class Work(NamedTuple):
    """What can be cut, and what it costs."""

    planes: int  # of all samples
    rows: int = 1  # of a plane
    inputs: int = 1  # blocks of input channels; 1 where all belong together
    outputs: int = 1  # blocks of outputs, cut in units of so many:
    unit: int = 1
    border: int = 0  # planes and rows on each side of a piece that are formed for it as well
    products: int = 1  # cost of the products of a row, a block of inputs and one of outputs
    together: int = 0  # rows whose products share a load of filters; 0: all of a piece's plane
    load: int = 0  # cost of such a load, for a block of inputs and one of outputs
    form_outputs: int = 0  # cost of forming a row of a block of outputs: of a filter's gradient
    sums: int = 0  # cost of clearing and adding up the sums of two such blocks


class Cut(NamedTuple):
    """Numbers of pieces, and the largest one."""

    pieces: int
    positions: int  # pieces along X times those along Y: each has sums that its pieces share
    is_along_y: bool
    planes: int
    rows: int
    inputs: int
    outputs: int
    efficiency: float  # cost of all in one piece over that of the largest piece on every thread


@functools.cache
def cut_of(work: Work, threads: int) -> Cut:
    """The cut for at most so many threads; of equally good ones that of the fewest pieces, then
    with the most along X."""
    most = min(threads, MOST_THREADS)
    units = ceil_div(work.outputs, work.unit)
    products = work.planes * work.rows * work.products * work.inputs * work.outputs
    best = (_cost(work, most, 1, 1, 1, 1), 1)  # cost, pieces
    counts = (1, 1, 1, 1)
    for x in _counts(work.planes, most):
        for y in _counts(work.rows, most // x):
            for inputs in _counts(work.inputs, most // (x * y)):
                for outputs in _counts(units, most // (x * y * inputs)):
                    pieces = x * y * inputs * outputs
                    if products > best[0] * pieces:  # no cost is so low; this saves time
                        continue
                    candidate = (_cost(work, most, x, y, inputs, outputs), pieces)
                    if candidate < best:
                        best = candidate
                        counts = (x, y, inputs, outputs)
    cost, pieces = best
    x, y, inputs, outputs = counts
    whole = _cost(work, 1, 1, 1, 1, 1)
    return Cut(
        pieces=pieces,
        positions=x * y,
        is_along_y=y > 1,
        planes=ceil_div(work.planes, x),
        rows=ceil_div(work.rows, y),
        inputs=ceil_div(work.inputs, inputs),
        outputs=min(work.outputs, work.unit * ceil_div(units, outputs)),
        efficiency=whole / (threads * cost),
    )


def cut_of_rows(count: int, threads: int) -> Cut:
    """The cut of rows that have nothing to do with each other."""
    return cut_of(Work(count), threads)


def ceil_div(number: int, size: int) -> int:
    return -(-number // size)


def round_up(number: int, size: int) -> int:
    """The next multiple."""
    return size * ceil_div(number, size)


@functools.cache
def _counts(whole: int, most: int) -> Sequence[int]:
    """Numbers of pieces up to `most`, each the fewest of its largest piece; the most first."""
    counts = []
    count = 1
    while count <= min(whole, most):
        counts.append(count)
        largest = ceil_div(whole, count)
        count = ceil_div(whole, largest - 1) if largest > 1 else whole + 1
    return counts[::-1]


def _cost(work: Work, threads: int, x: int, y: int, inputs: int, outputs: int) -> int:
    """What the largest piece costs."""
    planes = ceil_div(work.planes, x)
    rows = ceil_div(work.rows, y)
    of_inputs = ceil_div(work.inputs, inputs)
    of_outputs = min(work.outputs, work.unit * ceil_div(ceil_div(work.outputs, work.unit), outputs))
    products = rows * work.products + _loads(rows, work.together) * work.load
    cost = planes * products * of_inputs * of_outputs
    cost += (planes + 2 * work.border) * (rows + 4 * work.border) * of_inputs
    cost += planes * rows * of_outputs * work.form_outputs
    return cost + work.sums * x * y * ceil_div(work.inputs * work.outputs, threads)


def _loads(rows: int, together: int) -> int:
    if not together:
        return 1
    return rows // together + bin(rows % together).count("1")

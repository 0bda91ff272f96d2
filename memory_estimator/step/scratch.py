"""Memory of own operations outside TensorFlow's allocator, as models/native (operations.c, passes.c) has it."""

from dataclasses import dataclass

CACHE_BYTES = 2**20  # L2 of a core: a thread's ring of rows fills five eighths of it
TAPS = {"pass": 0, "project": 1, "up": 8}  # of the filters, by the kind of operation; others have 27
LANES = 16  # channels of a group, and values of a line of the cache


@dataclass(frozen=True)
class Shape:
    """The maps of an operation, and its threads. Channels of two sources are counted together."""

    batch: int
    grid: tuple  # voxels X, Y, Z
    inputs: int
    outputs: int
    value_bytes: int  # of the maps: 2 is bfloat16
    threads: int


def scratch_bytes(kind: str, shape: Shape, in_place: bool) -> int:
    """Scratch of an operation; `in_place` if it may write over a map that it reads."""
    if kind == "filter_gradient":
        return filter_gradient_bytes(shape)
    return pass_bytes(shape, TAPS[kind]) if kind in TAPS else convolve_bytes(shape, in_place)


def convolve_bytes(shape: Shape, in_place: bool) -> int:
    """Scratch of a 3x3x3 convolution or its input gradient: packed filters, each thread's ring and sums, and in place
    the rows that other threads still read."""
    streams, _, unit = _tiles(shape)
    x, y, z = shape.grid
    packed = 4 * _padded(shape.outputs) * streams * 9 * _parts(shape.inputs, unit)
    sums = 8 * (shape.batch * 2 * _padded(shape.outputs) + LANES)
    planes = _parts(shape.batch * x, shape.threads)
    rows = (2 * y + planes) * z * shape.inputs * shape.value_bytes * in_place
    return packed + shape.threads * (_thread_bytes(shape, with_gradient=False) + sums + rows)


def filter_gradient_bytes(shape: Shape) -> int:
    """Scratch of a 3x3x3 filter gradient, which every thread sums for itself."""
    sums = 4 * 9 * _tiles(shape)[0] * _padded(shape.inputs) * _padded(shape.outputs)
    return shape.threads * (_thread_bytes(shape, with_gradient=True) + sums)


def pass_bytes(shape: Shape, taps: int) -> int:
    """Scratch of all other operations; `taps` are those of the filters, 0 without."""
    inputs, outputs = _padded(shape.inputs), _padded(shape.outputs)
    row = 4 * shape.grid[2] * (inputs + outputs * max(taps, 1))
    filters = 4 * taps * inputs * outputs
    return filters + shape.threads * (row + 16 * shape.batch * inputs + 2 * filters)


def _tiles(shape: Shape) -> tuple:
    """Streams, outputs of a tile along Z, and values of a unit: products are of the maps' dtype."""
    return (4, 2, 2) if shape.value_bytes == 2 else (6, 4, 1)


def _thread_bytes(shape: Shape, with_gradient: bool) -> int:
    """Bytes of `job_of` in C: a ring of transformed rows in the cache, two lines in float32 and sums."""
    streams, tile, unit = _tiles(shape)
    _, y, z = shape.grid
    tiles = _parts(z, tile)
    pairs = 2 if tiles >= 8 else unit  # short rows are not padded to pairs
    tiles = pairs * _parts(tiles, pairs)
    inputs, outputs = _padded(shape.inputs), _padded(shape.outputs)

    def row_bytes(width: int) -> int:
        lines = _parts(streams * width * tiles // unit, LANES)
        return 64 * (lines + (49 - lines % 32) % 32)

    row, of_gradient = row_bytes(inputs), row_bytes(outputs) if with_gradient else 0
    most = max(1, CACHE_BYTES * 5 // 8 // (3 * row + of_gradient) - 2)
    rows = _parts(y, _parts(y, most))
    lines = 4 * ((tiles * tile + 2) * (inputs + outputs) + streams * max(tiles, 64) * LANES)
    return (3 * (rows + 2) + 1) * row + rows * (of_gradient + 16) + lines


def _parts(number: int, size: int) -> int:
    return -(-number // size)


def _padded(channels: int) -> int:
    return LANES * _parts(channels, LANES)

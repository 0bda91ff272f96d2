"""What is multiplied and loaded, counted by tiles in plain C, is what records/kernels.md draws."""

import ctypes

import numpy as np
import pytest

from tests.models.native.reference import operation

GRID = (4, 8, 64)  # whole tiles along Z, pairs and fours of rows
SHORT = (4, 4, 30)  # with two zeros after each row, whole blocks of 32 positions
VOXELS = int(np.prod(GRID))
TILE_BYTES = 16 * 64


class Counts:
    """Of one operation in tiles in plain C."""

    def __init__(self, library, *arguments, **arrays):
        every = (ctypes.c_long * 4).in_dll(library, "tile_counts")
        before = np.array(every)
        assert library.native_run(b"amx_in_c", operation(*arguments, **arrays)) == 0
        counts = np.array(every) - before
        self.products, self.multiplications, self.loads, self.loaded_bytes = map(int, counts)


def maps_of(grid, *channels):
    return [np.zeros((1, *grid, width), np.uint16) for width in channels]


@pytest.mark.parametrize("kind", ["convolve", "input_gradient"])
@pytest.mark.parametrize(
    ("channels", "outputs", "useful", "loads"),
    [
        (4, 16, 0.75, 1),  # pairs of voxels: three of the four voxels of a line
        (8, 16, 0.75, 1),
        (16, 16, 0.75, 1),
        (16, 32, 0.75, 1),
        (32, 32, 1, 1),  # two tiles A and two tiles B make four products
        (64, 64, 1, 1),
        (32, 16, 1, 1.25),  # four tiles A and one tile B
        (48, 32, 0.9, 1),  # 144 values of K in steps of 32
    ],
)
def test_a_convolution_multiplies_and_loads_what_is_drawn(
    library, kind, channels, outputs, useful, loads
):
    values, made = maps_of(GRID, channels, outputs)
    filters = np.zeros((3, 3, 3, channels, outputs), np.float32)
    arguments = (kind, "bfloat16", (1, *GRID), 2, [values], outputs)
    counts = Counts(library, *arguments, filters=filters, map=made)
    assert counts.multiplications == pytest.approx(27 * channels * outputs * VOXELS / useful)
    assert counts.loads == loads * counts.products
    tile_bytes = TILE_BYTES if channels > 4 else TILE_BYTES // 2  # K = 16 values
    assert counts.loaded_bytes == counts.loads * tile_bytes


@pytest.mark.parametrize(
    ("channels", "outputs", "useful", "targets"),
    [
        (4, 16, 12 / 16, 9),  # of the 16 values of a line three taps along Z times the channels
        (8, 16, 3 / 4, 18),
        (16, 16, 1, 27),
        (32, 48, 1, 27),
    ],
)
def test_a_filter_gradient_multiplies_and_loads_what_is_drawn(
    library, channels, outputs, useful, targets
):
    values, gradient = maps_of(SHORT, channels, outputs)
    made = np.zeros((3, 3, 3, channels, outputs), np.float32)
    arguments = ("filter_gradient", "bfloat16", (1, *SHORT), 2, [values], outputs, [gradient])
    counts = Counts(library, *arguments, filter_gradient=made)
    x, y, z = SHORT
    positions = x * y * (z + 2)
    assert counts.multiplications == pytest.approx(27 * channels * outputs * positions / useful)
    sixes = -(-targets // 6)  # a tile A is loaded once for six tiles B
    assert counts.loads * targets == counts.products * (targets + sixes)
    assert counts.loaded_bytes == counts.loads * TILE_BYTES


@pytest.mark.parametrize(
    ("kind", "channels", "outputs", "loads"),
    [
        ("up_convolve", 32, 16, 1),  # two tiles A and two tiles B make four products
        ("up_convolve", 64, 32, 1),
        ("up_input_gradient", 32, 16, 1),
        ("up_input_gradient", 16, 32, 1.25),  # four tiles A and one tile B
    ],
)
def test_a_transposed_convolution_multiplies_nothing_in_vain(
    library, kind, channels, outputs, loads
):
    (coarse,) = maps_of(GRID, channels)
    (fine,) = maps_of(np.multiply(GRID, 2), outputs)
    filters = np.zeros((2, 2, 2, outputs, channels), np.float32)
    made = fine
    others = []
    if kind == "up_input_gradient":
        made = coarse.copy()
        others = [fine]
    arguments = (kind, "bfloat16", (1, *GRID), 2, [coarse], outputs, others)
    counts = Counts(library, *arguments, filters=filters, map=made)
    assert counts.multiplications == 8 * channels * outputs * VOXELS
    assert counts.loads == loads * counts.products
    assert counts.loaded_bytes == counts.loads * TILE_BYTES


def test_a_filter_gradient_of_a_transposed_convolution_multiplies_nothing_in_vain(library):
    grid, channels, outputs = (4, 4, 32), 32, 16
    (coarse,) = maps_of(grid, channels)
    (fine,) = maps_of(np.multiply(grid, 2), outputs)
    made = np.zeros((2, 2, 2, outputs, channels), np.float32)
    arguments = ("up_filter_gradient", "bfloat16", (1, *grid), 2, [coarse], outputs, [fine])
    counts = Counts(library, *arguments, filter_gradient=made)
    assert counts.multiplications == 8 * channels * outputs * np.prod(grid)
    assert counts.loads * 8 == counts.products * 10  # a tile A for six of 8 tiles B, and for two


def test_a_projection_multiplies_three_parts_of_its_weights(library):
    (values,) = maps_of(GRID, 16)
    (made,) = maps_of(GRID, 3)
    arrays = {"filters": np.zeros((16, 3), np.float32), "bias": np.zeros(3, np.float32)}
    arguments = ("project", "bfloat16", (1, *GRID), 2, [values], 3)
    counts = Counts(library, *arguments, **arrays, map=made)
    assert counts.multiplications == 3 * 16 * 16 * VOXELS  # 16 outputs, of which 3 are useful
    assert (
        counts.loads * 12 == counts.products * 19
    )  # of a row: 4 x 3 tiles A, 3 tiles B, 4 of bias

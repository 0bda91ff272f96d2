"""What is multiplied and loaded, counted by tiles in plain C, is what records/kernels.md draws."""

import ctypes

import numpy as np
import pytest

from tests.models.native.reference import operation

GRID = (4, 8, 64)  # whole tiles along Z, pairs and fours of rows


def maps_of(grid, channels):
    return np.zeros((1, *grid, channels), np.uint16)


@pytest.mark.parametrize(
    ("kind", "channels", "outputs", "useful", "loads"),
    [
        ("convolve", 4, 16, 0.75, 1),  # pairs of voxels: three of the four voxels of a line
        ("convolve", 32, 16, 1, 1.25),  # four tiles A and one tile B
        ("input_gradient", 48, 32, 0.9, 1),  # 144 values of K in steps of 32
        ("up_convolve", 32, 16, 1, 1),
    ],
)
def test_a_convolution_multiplies_and_loads_what_is_drawn(
    library, kind, channels, outputs, useful, loads
):
    filters = np.zeros((3, 3, 3, channels, outputs), np.float32)
    made = maps_of(GRID, outputs)
    if kind == "up_convolve":
        filters = np.zeros((2, 2, 2, outputs, channels), np.float32)
        made = maps_of(np.multiply(GRID, 2), outputs)
    arrays = {"filters": filters, "map": made}
    read = [maps_of(GRID, channels)]
    every = (ctypes.c_long * 4).in_dll(library, "tile_counts")
    before = np.array(every)
    call = operation(kind, "bfloat16", (1, *GRID), 2, read, outputs, **arrays)
    assert library.native_run(b"amx_in_c", call) == 0
    products, multiplications, loaded, _ = np.array(every) - before
    taps = np.prod(filters.shape[:3])
    expected = taps * channels * outputs * np.prod(GRID) / useful
    assert multiplications == pytest.approx(expected)
    assert loaded == loads * products

"""oneDNN's buffers by rule against what TensorFlow's profiler recorded with 2, 4 and 8 threads."""

import pytest

from memory_estimator.step.scratch import (
    FilterGradient,
    filter_gradient_bytes,
    hidden_filter_gradient_bytes,
    up_convolution_bytes,
)

KIB, MIB = 2**10, 2**20

SLACK_BYTES = 8 * KIB
"""A thread: barriers and guards, for all of which the rule counts 8 KiB."""


def convolution(side, in_channels, out_channels, kernel=3):
    grid = (side, side, side)
    return FilterGradient(1, grid, grid, in_channels, out_channels, kernel, 1, False)


def up_convolution(side, in_channels, out_channels):
    """From `side` / 2 voxels to `side`; the filter slides over the output."""
    grid, below = (side, side, side), (side // 2,) * 3
    return FilterGradient(1, grid, below, out_channels, in_channels, 2, 2, False)


def plane(grid, in_channels, out_channels, kernel=3):
    """A plane of a filter gradient by planes, as many planes of the volume being the batch."""
    flat = (1, *grid[1:])
    return FilterGradient(grid[0], flat, flat, in_channels, out_channels, kernel, 1, False, flat=True)


def network(side):
    """The filter gradients of the default network (four channels, 16 filters, depth 5) on a cube of `side` voxels."""
    return {
        "head": convolution(side, 16, 3, kernel=1),
        "decoder0_conv2": convolution(side, 16, 16),
        "decoder0_conv1": convolution(side, 32, 16),
        "decoder0_up": up_convolution(side, 32, 16),
        "encoder4_conv1": convolution(side // 16, 128, 256),
        "encoder0_conv1": convolution(side, 4, 16),
    }


LAYERS = ("head", "decoder0_conv2", "decoder0_conv1", "decoder0_up", "encoder4_conv1", "encoder0_conv1")
# Bytes of region "temp" in the profiler's list of allocations: TensorFlow 2.15.1, ITEX 2.15.0.0, AVX-512 with bfloat16.
RECORDED = {
    (2, 96): (113256832, 114489732, 172347780, 36602244, 3740036, 71088004),
    (4, 64): (67121926, 68276612, 51511684, 22073732, 3629444, 42241412),
    (8, 64): (134235142, 136544644, 103010692, 44134788, 3637636, 84474244),
}


@pytest.mark.parametrize(("threads", "side"), RECORDED)
def test_the_bfloat16_filter_gradient_takes_what_was_recorded(threads, side):
    layers = network(side)
    for name, recorded in zip(LAYERS, RECORDED[threads, side]):
        found = filter_gradient_bytes(layers[name], "bfloat16", threads)
        assert found == pytest.approx(recorded, abs=threads * SLACK_BYTES), name


@pytest.mark.parametrize(
    ("level", "in_channels", "out_channels", "kernel", "recorded_mib"),
    # Two threads, bfloat16, the levels of a grid of 240 x 240 x 160.
    [(0, 16, 16, 3, 4.7), (0, 32, 16, 3, 7.1), (0, 4, 16, 3, 2.9), (0, 16, 3, 1, 4.7)]
    + [(1, 32, 32, 3, 2.5), (1, 64, 32, 3, 3.7), (2, 64, 64, 3, 1.5)],
)
def test_by_planes_it_takes_what_was_recorded(level, in_channels, out_channels, kernel, recorded_mib):
    job = plane([side // 2**level for side in (240, 240, 160)], in_channels, out_channels, kernel)
    assert filter_gradient_bytes(job, "bfloat16", 2) / MIB == pytest.approx(recorded_mib, abs=0.1)


@pytest.mark.parametrize(
    ("threads", "side", "recorded"),
    [
        (2, 96, {16: 14194736, 32: 3577904, 64: 923696}),
        (4, 64, {16: 8446048, 32: 2154592, 64: 581728}),
        (8, 64, {16: 16875712, 32: 4292800, 64: 1147072, 128: 352448}),
    ],
)
def test_the_up_convolution_takes_its_input_once_a_thread(threads, side, recorded):
    for filters, bytes_ in recorded.items():
        below = side * 16 // filters // 2
        input_bytes = below**3 * 2 * filters * 2
        found = up_convolution_bytes(input_bytes, threads)
        assert found == pytest.approx(bytes_, abs=threads * SLACK_BYTES)


def test_one_threads_buffers_by_hand():
    # Both maps once, 16 channels of 2 bytes: rows of 8 and 2 of padding in the source, of 8 in the target; weights.
    job = convolution(8, 16, 16)
    maps = 8 * 8 * (8 + 2) * 16 * 2 + 8 * 8 * 8 * 16 * 2
    assert filter_gradient_bytes(job, "bfloat16", 1) == maps + 27 * 16 * 16 * 4 + 8 * KIB


MIB = 2**20


@pytest.mark.parametrize(
    ("side", "filters", "measured_mib"),
    # Peak of the process above its resting size: TensorFlow 2.15.1, two threads, the widest convolution of a network.
    [(96, 16, (55, 63)), (112, 8, (66, 88)), (128, 16, (126, 148)), (80, 32, (38, 40))],
)
def test_it_agrees_with_measured_processes(side, filters, measured_mib):
    shape = (side, side, side)
    job = FilterGradient(1, shape, shape, 2 * filters, filters, 3, 1, False)
    found = hidden_filter_gradient_bytes(job, "bfloat16", 2) / MIB
    assert measured_mib[0] - 8 <= found <= measured_mib[1] + 8

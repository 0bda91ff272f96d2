"""oneDNN's buffers by rule against what TensorFlow's profiler recorded with 2, 4 and 8 threads."""

import pytest

from memory_estimator.step.onednn import Convolution, Kernels, Setting, highest_isa
from memory_estimator.step.scratch import filter_gradient_buffers, forward_buffers, input_gradient_buffers

KIB, MIB = 2**10, 2**20

SLACK_BYTES = 8 * KIB
"""A thread: barriers and guards, for all of which the rule counts 8 KiB."""

AMX = Kernels("avx512_core_amx", l1_bytes=48 * KIB, l2_bytes=2 * MIB, cores=2)


def maps(grid, in_channels, out_channels, kernel=3, batch=1):
    return Convolution(batch, grid, grid, in_channels, out_channels, (kernel, kernel, kernel))


def convolution(side, *channels, kernel=3):
    return maps((side, side, side), *channels, kernel=kernel)


def up_convolution(grid, in_channels, out_channels):
    """To `grid` from half as many voxels a side; the filter slides over the output."""
    return Convolution(1, grid, tuple(side // 2 for side in grid), out_channels, in_channels, (2, 2, 2), stride=2)


def plane(grid, in_channels, out_channels, kernel=3):
    """A plane of a filter gradient by planes, as many planes of the volume being the batch."""
    flat = (1, *grid[1:])
    return Convolution(grid[0], flat, flat, in_channels, out_channels, (1, kernel, kernel))


def network(side):
    """The filter gradients of the default network (four channels, 16 filters, depth 5) on a cube of `side` voxels."""
    return {
        "head": convolution(side, 16, 3, kernel=1),
        "decoder0_conv2": convolution(side, 16, 16),
        "decoder0_conv1": convolution(side, 32, 16),
        "decoder0_up": up_convolution((side, side, side), 32, 16),
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
        found = filter_gradient_buffers(layers[name], Setting(threads=threads)).scratch[0]
        assert found == pytest.approx(recorded, abs=threads * SLACK_BYTES), name


@pytest.mark.parametrize(
    ("level", "in_channels", "out_channels", "kernel", "recorded_mib"),
    # Two threads, bfloat16, the levels of a grid of 240 x 240 x 160.
    [(0, 16, 16, 3, 4.7), (0, 32, 16, 3, 7.1), (0, 4, 16, 3, 2.9), (0, 16, 3, 1, 4.7)]
    + [(1, 32, 32, 3, 2.5), (1, 64, 32, 3, 3.7), (2, 64, 64, 3, 1.5)],
)
def test_by_planes_it_takes_what_was_recorded(level, in_channels, out_channels, kernel, recorded_mib):
    job = plane([side // 2**level for side in (240, 240, 160)], in_channels, out_channels, kernel)
    assert filter_gradient_buffers(job, Setting()).scratch[0] / MIB == pytest.approx(recorded_mib, abs=0.1)


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
        job = up_convolution((2 * below,) * 3, 2 * filters, filters)
        found = input_gradient_buffers(job, Setting(threads=threads)).scratch[0]
        assert found == pytest.approx(bytes_, abs=threads * SLACK_BYTES)


@pytest.mark.parametrize(
    ("side", "filters", "measured_mib"),
    # Peak of the process above its resting size: TensorFlow 2.15.1, two threads, the widest convolution of a network.
    [(96, 16, (55, 63)), (112, 8, (66, 88)), (128, 16, (126, 148)), (80, 32, (38, 40))],
)
def test_it_agrees_with_measured_processes(side, filters, measured_mib):
    job = convolution(side, 2 * filters, filters)
    found = filter_gradient_buffers(job, Setting(itex=False)).hidden / MIB
    assert measured_mib[0] - 8 <= found <= measured_mib[1] + 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stock_tensorflow_sums_a_filter_gradient_once_a_thread(dtype):
    """In processes with two threads, 32 and 48 filters held twice their largest kernel beside what is counted else."""
    wide = maps((3, 3, 3), 768, 768)
    hidden = filter_gradient_buffers(wide, Setting(dtype, itex=False, threads=2)).hidden
    assert hidden == pytest.approx(2 * 4 * 27 * 768**2, rel=0.01)


@pytest.mark.parametrize(
    ("buffers", "job", "threads", "recorded"),
    # Requests of 256 KiB and more beside the output: a Xeon with AMX, 48 KiB and 2 MiB of cache a core.
    [
        (forward_buffers, maps((32, 32, 32), 20, 20), 2, [311344]),
        (forward_buffers, up_convolution((64, 64, 64), 32, 16), 4, [606304]),
        (forward_buffers, maps((16, 24, 40), 256, 256), 4, [19873888]),
        (forward_buffers, maps((32, 32, 32), 128, 64), 4, [2703456]),
        (forward_buffers, up_convolution((48, 96, 64), 48, 24), 2, [671792]),
        (input_gradient_buffers, maps((112, 144, 96), 32, 32), 4, [1605856]),
        (input_gradient_buffers, maps((64, 64, 64), 16, 16, batch=2), 2, [590000]),
        (input_gradient_buffers, up_convolution((32, 32, 32), 48, 24), 4, [2191456]),
        (input_gradient_buffers, up_convolution((112, 144, 96), 16, 8), 2, [12445744]),
        (input_gradient_buffers, up_convolution((112, 144, 96), 32, 16), 4, [49643616]),
        (filter_gradient_buffers, maps((64, 64, 64), 20, 20, batch=2), 2, [84471424]),
        (filter_gradient_buffers, maps((112, 144, 96), 1, 16), 2, [118827712]),
        (filter_gradient_buffers, maps((48, 96, 64), 128, 128), 4, [103431808, 884736]),
        (filter_gradient_buffers, maps((112, 144, 96), 16, 1, kernel=1), 4, [200826624]),
        (filter_gradient_buffers, up_convolution((48, 96, 64), 256, 128), 4, [172227232, 524288]),
        (filter_gradient_buffers, plane((1, 64, 64), 64, 64), 4, [1736416]),
    ],
)
def test_with_amx_they_are_what_was_recorded(buffers, job, threads, recorded):
    found = buffers(job, Setting(threads=threads, kernels=AMX)).scratch
    assert [size for size in found if size >= 256 * KIB] == recorded


def test_bfloat16_without_instructions_for_it_copies_no_map_and_sums_the_head_once_a_thread():
    """As recorded at 64^3 voxels, 16 filters, two threads; ITEX and stock TensorFlow take the forward sums alike."""
    emulated, head, up = Kernels("avx512_core"), convolution(64, 16, 3, kernel=1), up_convolution((64, 64, 64), 32, 16)
    for itex in (True, False):
        (found,) = forward_buffers(head, Setting(itex=itex, kernels=emulated)).scratch
        assert found == pytest.approx(33554816, abs=KIB)
    assert sum(input_gradient_buffers(up, Setting(kernels=emulated)).scratch) < MIB
    assert input_gradient_buffers(up, Setting(itex=False, kernels=emulated)).hidden == 0


@pytest.mark.parametrize("buffers", [forward_buffers, input_gradient_buffers, filter_gradient_buffers])
@pytest.mark.parametrize("job", [maps((32, 32, 32), 16, 32), up_convolution((32, 32, 32), 32, 16)])
def test_amx_changes_nothing_in_float32(buffers, job):
    with_amx, without = (Setting("float32", kernels=Kernels(isa)) for isa in ("avx512_core_amx", "avx512_core"))
    assert buffers(job, with_amx) == buffers(job, without)


XEON = ("avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16")


@pytest.mark.parametrize(
    ("flags", "most", "isa"),
    [
        ((), None, "sse41"),
        (("avx", "avx2", "fma"), "AVX512_CORE", "avx2"),
        (XEON[:7], None, "avx512_core_bf16"),
        (XEON, None, "avx512_core_fp16"),
        (XEON, "avx512_core_bf16", "avx512_core_bf16"),
        (XEON, "AVX2_VNNI", "avx2_vnni"),
        ((*XEON, "amx_tile", "amx_bf16", "amx_int8"), "AVX512_CORE_BF16", "avx512_core_bf16"),
    ],
)
def test_the_instruction_set_is_the_highest_that_the_cpu_has_and_the_environment_allows(flags, most, isa):
    assert highest_isa(flags, most) == isa

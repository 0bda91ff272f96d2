"""Every operation in every instruction set of this machine against float64, through the C functions
alone."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from models.config import MOST_CHANNELS
from models.native.build import build
from models.native.instruction_sets import DIRECT_PRODUCTS
from tests.models.native.reference import (
    BFLOAT16,
    DTYPES,
    FLOAT32,
    KERNELS,
    LIBRARY,
    MOST_AT_ONCE,
    THREADS,
    convolved,
    filter_gradient_of,
    formed,
    operation,
    run,
)

ROUNDED_ROWS = ("avx512_bf16", "amx", "amx_in_c", "amx_in_c_avx512")
SHAPES = [(5, 7, 9), (3, 5, 33), (1, 1, 1), (2, 3, 66), (1, 6, 4), (2, 3, 3), (3, 3, 2)]
# several rows at once; several registers a row
SHAPES += [(2, 11, 4), (1, 13, 12), (1, 7, 20), (1, 2, 130), (2, 3, 28), (1, 4, 11), (2, 1, 19)]
CHANNELS = [(1, 16), (3, 6), (6, 2), (16, 4), (8, 13), (20, 32), (16, 16), (48, 8), (33, 48)]
CHANNELS += [(16, 32), (32, 16)]
FILES = [
    str(Path(__file__).with_name(f"test_{name}.py"))
    for name in ("pointwise", "loss", "tiles", "orthogonal")
]
# Root mean square errors relative to the size of a sum:
EXACT = 2e-6  # float32
ROUNDED = 2.2e-3  # a bfloat16 map
ROUNDED_PRODUCTS = 5e-3  # bfloat16 products as well


@pytest.fixture(params=KERNELS, ids=lambda kernel: "-".join(kernel))
def kernel(request, library):
    name, dtype = request.param
    if not library.native_kernels(name.encode(), DTYPES[dtype][0]):
        pytest.skip(f"needs a CPU with {name}")
    return Kernel(library, name, dtype)


class Kernel:
    """The C functions of an instruction set, for maps of a dtype."""

    def __init__(self, library, name, dtype):
        self.library = library
        self.name = name
        self.dtype = dtype
        self.code, self.numpy = DTYPES[dtype]
        self.filter_error = ROUNDED_PRODUCTS if name in ROUNDED_ROWS else EXACT
        self.map_error = self.filter_error
        if dtype == "bfloat16":
            self.map_error = max(ROUNDED, self.filter_error)
        self.raw_filter_error = EXACT if name.startswith("amx") else self.filter_error

    def run(self, *arguments, **arrays):
        assert run(self.library, self.name, operation(*arguments, **arrays)) == 0

    def convolve(
        self, shape, threads, maps, filters, coefficients=None, *, add=None, sums=True, over=None
    ):
        """The map, plus `add`, written over the map `over` or a new one, and its moments."""
        outputs = filters.shape[4]
        result = np.full((*shape, outputs), 7, self.numpy) if over is None else over
        moments = np.full((shape[0], 2, outputs), np.nan, np.float32)
        others = [] if add is None else [add]
        arrays = {
            "filters": filters,
            "coefficients": coefficients,
            "map": result,
            "sums_to": moments if sums else None,
        }
        self.run("convolve", self.dtype, shape, threads, maps, outputs, others, **arrays)
        return result, moments

    def input_gradient(
        self, shape, threads, gradient, filters, above=(None, None), below=(None, None), over=None
    ):
        """The map, likewise, and the sums of the norm below; above and below are a raw map and its
        coefficients."""
        result = np.full((*shape, filters.shape[3]), 7, self.numpy) if over is None else over
        sums = np.full((shape[0], 2, filters.shape[3]), np.nan, np.float32)
        arrays = {"filters": filters, "map": result, "sums_to": sums}
        arrays.update(coefficients=above[1], other_coefficients=below[1])
        self.run(
            "input_gradient",
            self.dtype,
            shape,
            threads,
            [gradient],
            filters.shape[3],
            [below[0], above[0]],
            **arrays,
        )
        return result, sums

    def filter_gradient(
        self, shape, threads, maps, gradient, coefficients=None, above=(None, None)
    ):
        """`above` is the raw map of the gradient and its coefficients."""
        channels = sum(array.shape[-1] for array in maps), gradient.shape[-1]
        result = np.full((3, 3, 3, *channels), np.nan, np.float32)
        arrays = {
            "coefficients": coefficients,
            "other_coefficients": above[1],
            "filter_gradient": result,
        }
        self.run(
            "filter_gradient",
            self.dtype,
            shape,
            threads,
            maps,
            channels[1],
            [gradient, above[0]],
            **arrays,
        )
        return result

    def maps(self, rng, shape, *channels):
        return [rng.standard_normal((*shape, width)).astype(self.numpy) for width in channels]


def filters_of(rng, channels):
    return (rng.standard_normal((3, 3, 3, *channels)) / 10).astype(np.float32)


def coefficients_of(rng, shape, channels):
    """Coefficients of a norm, or of its gradient; floors are ReLUs, others, and none."""
    coefficients = rng.standard_normal((shape[0], 6, channels)).astype(np.float32)
    coefficients[:, 2] = rng.choice([0, 0.5, -np.inf], (shape[0], channels))
    return coefficients


def rms(values):
    return float(np.sqrt(np.mean(np.square(np.asarray(values, np.float64)))))


def error(result, truth, values, factors, terms):
    """Root mean square error, relative to that of a sum of so many products of both."""
    return rms(result.astype(np.float64) - truth) / (
        np.sqrt(terms) * rms(values) * rms(factors) + 1e-30
    )


def cases():
    """Shapes with a batch, channels and threads: every second pair of a shape and channels.

    So each shape and each pair of channels meets every number of threads and a batch of 1 and of
    2. And each pair of channels meets rows of each remainder by 8, short and long ones, and a map
    of one row or plane: SHAPES has such at odd and at even places."""
    pairs = itertools.product(enumerate(SHAPES), enumerate(CHANNELS))
    taken = [(grid, channels) for (i, grid), (j, channels) in pairs if (i + j) % 2 == 0]
    for number, (grid, channels) in enumerate(taken):
        shape = (2 - number % 2, *grid)
        threads = THREADS[number % len(THREADS)]
        name = "{}-{}to{}-on{}".format("x".join(map(str, shape)), *channels, threads)
        yield pytest.param(shape, *channels, threads, id=name)


EVERY_CASE = pytest.mark.parametrize(("shape", "channels", "outputs", "threads"), [*cases()])


def two_parts(channels):
    """Channels of two maps that are read as one; not always whole vectors."""
    if channels <= 2:
        return (channels,)
    return channels // 3, channels - channels // 3


@EVERY_CASE
def test_convolution_of_raw_and_normalised_maps_one_or_two_with_moments(
    kernel, shape, channels, outputs, threads
):
    rng = np.random.default_rng(1)
    filters = filters_of(rng, (channels, outputs))
    parts = two_parts(channels)
    norms = coefficients_of(rng, shape, channels)
    first_raw = norms.copy()
    first_raw[:, :3, : parts[0]] = np.array([1, 0, -np.inf])[:, None]
    for channels_of_maps, coefficients in (
        ((channels,), None),
        (parts, None),
        (parts, norms),
        (parts, first_raw),
    ):
        maps = kernel.maps(rng, shape, *channels_of_maps)
        values = formed(maps, coefficients)
        truth = convolved(values, filters)
        result, _ = kernel.convolve(shape, threads, maps, filters, coefficients)
        assert error(result, truth, values, filters, 27 * channels) < kernel.map_error
        (noise,) = kernel.maps(rng, shape, outputs)
        add = (rms(truth) / 2 * noise.astype(np.float32)).astype(kernel.numpy)
        alone, _ = kernel.convolve(shape, threads, maps, filters, coefficients, add=add, sums=False)
        result, moments = kernel.convolve(
            shape, threads, maps, filters, coefficients, add=add, over=add.copy()
        )
        truth += add.astype(np.float64)
        assert error(result, truth, values, filters, 27 * channels) < kernel.map_error
        assert alone.tobytes() == result.tobytes()
        written = result.astype(np.float64)
        expected = np.stack([written.mean((1, 2, 3)), written.var((1, 2, 3))], 1)
        np.testing.assert_allclose(moments, expected, rtol=1e-5, atol=1e-6)


@EVERY_CASE
def test_input_gradient_through_a_norm_with_the_sums_of_the_norm_below(
    kernel, shape, channels, outputs, threads
):
    rng = np.random.default_rng(2)
    filters = filters_of(rng, (channels, outputs))
    gradient, raw = kernel.maps(rng, shape, outputs, outputs)
    (raw_below,) = kernel.maps(rng, shape, channels)
    coefficients = coefficients_of(rng, shape, outputs)
    below = coefficients_of(rng, shape, channels)
    result, sums = kernel.input_gradient(
        shape, threads, gradient, filters, (raw, coefficients), (raw_below, below)
    )
    values = formed([gradient], coefficients, raw)
    flipped = np.swapaxes(filters[::-1, ::-1, ::-1], 3, 4)
    truth = convolved(values, flipped)
    assert error(result, truth, values, filters, 27 * outputs) < kernel.map_error

    rows = np.moveaxis(below.astype(np.float64), 1, 0)
    scale, shift, floor, mean, rstd, _ = rows[:, :, None, None, None, :]
    r = raw_below.astype(np.float64)
    g = np.where(scale * r + shift > floor, result.astype(np.float64), 0)
    for total, terms in ((sums[:, 0], g), (sums[:, 1], g * (r - mean) * rstd)):
        size = np.abs(terms).sum((1, 2, 3)).max() + 1e-30
        np.testing.assert_allclose(total / size, terms.sum((1, 2, 3)) / size, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "channels", "threads"),
    [
        *itertools.product([(1, 7, 9, 11)], (5, 16, 32), (*THREADS, MOST_AT_ONCE)),
        *itertools.product([(2, 5, 6, 7), (3, 1, 2, 5)], [5], THREADS),
        *itertools.product([(1, 5, 15, 400), (2, 5, 4, 3000)], [5], (2, 8)),
        ((1, 9, 128, 128), 16, 2),
    ],
)
def test_over_the_map_that_is_read_come_the_same_bits_as_elsewhere(
    kernel, shape, channels, threads
):
    """Rows of 400 and 3,000 voxels are so long that a part along y has one or a few; the last map
    is so large that AMX's results go past the caches."""
    rng = np.random.default_rng(3)
    filters = filters_of(rng, (channels, channels))
    source, raw, raw_below = kernel.maps(rng, shape, channels, channels, channels)
    norm = coefficients_of(rng, shape, channels)
    above = (raw, norm)
    below = (raw_below, coefficients_of(rng, shape, channels))
    over = source.copy()
    expected = kernel.convolve(shape, threads, [source], filters, norm)
    results = kernel.convolve(shape, threads, [over], filters, norm, over=over)
    assert [each.tobytes() for each in results] == [each.tobytes() for each in expected]
    over = source.copy()
    expected = kernel.input_gradient(shape, threads, source, filters, above, below)
    results = kernel.input_gradient(shape, threads, over, filters, above, below, over=over)
    assert [each.tobytes() for each in results] == [each.tobytes() for each in expected]


@pytest.mark.parametrize("threads", [*THREADS, MOST_AT_ONCE])
def test_in_place_many_channels_are_as_elsewhere(kernel, threads):
    """Elsewhere outputs may be computed by several threads, which add up sums in another order."""
    rng = np.random.default_rng(9)
    shape = (2, 3, 4, 7)
    channels = 40
    filters = filters_of(rng, (channels, channels))
    (source,) = kernel.maps(rng, shape, channels)
    expected, moments = kernel.convolve(shape, threads, [source], filters)
    over = source.copy()
    result, sums = kernel.convolve(shape, threads, [over], filters, over=over)
    assert result.tobytes() == expected.tobytes()
    np.testing.assert_allclose(sums, moments, rtol=1e-5, atol=1e-6)


def test_one_thread_after_the_other_computes_what_all_at_once_do(kernel):
    rng = np.random.default_rng(10)
    shape = (1, 5, 6, 9)
    values, gradient = kernel.maps(rng, shape, 20, 32)
    filters = filters_of(rng, (20, 32))

    def computed():
        made, moments = kernel.convolve(shape, MOST_AT_ONCE, [values], filters)
        change = kernel.filter_gradient(shape, MOST_AT_ONCE, [values], gradient)
        return [each.tobytes() for each in (made, moments, change)]

    at_once = computed()
    kernel.library.native_time_on_paper(1)
    assert computed() == at_once
    assert kernel.library.native_time_on_paper(0) > 0
    assert kernel.library.native_time_on_paper(0) == 0  # no more was counted


FORMED = pytest.mark.parametrize("are_formed", [False, True], ids=["raw", "formed"])


@EVERY_CASE
@FORMED
def test_filter_gradient_of_raw_and_formed_maps(
    kernel, shape, channels, outputs, threads, are_formed
):
    parts = two_parts(channels) if are_formed else (channels,)
    hold_filter_gradient(kernel, shape, threads, parts, outputs, are_formed)


@FORMED
@pytest.mark.parametrize(("parts", "outputs"), [((16,), 16), ((32, 16), 48), ((4,), 16)])
@pytest.mark.parametrize("shape", [(2, 4, 31, 70), (1, 5, 33, 69)])
def test_filter_gradient_of_planes_so_large_that_one_is_taken_at_a_time(
    kernel, shape, parts, outputs, are_formed
):
    """The next plane is then formed between the products of this one."""
    if kernel.name not in DIRECT_PRODUCTS:
        pytest.skip("is of products in tiles")
    hold_filter_gradient(kernel, shape, 2, parts, outputs, are_formed)


def hold_filter_gradient(kernel, shape, threads, parts, outputs, are_formed):
    rng = np.random.default_rng(4)
    gradient, raw = kernel.maps(rng, shape, outputs, outputs)
    coefficients = above = raw_above = None
    limit = kernel.raw_filter_error
    if are_formed:
        coefficients = coefficients_of(rng, shape, sum(parts))
        above = coefficients_of(rng, shape, outputs)
        raw_above = raw
        limit = kernel.filter_error
    maps = kernel.maps(rng, shape, *parts)
    result = kernel.filter_gradient(
        shape, threads, maps, gradient, coefficients, (raw_above, above)
    )
    values = formed(maps, coefficients)
    gradients = formed([gradient], above, raw_above)
    truth = filter_gradient_of(values, gradients)
    assert error(result, truth, values, gradients, np.prod(shape)) < limit


@pytest.mark.parametrize(("parts", "outputs"), [((16,), 16), ((16, 16), 16), ((32, 16), 48)])
@pytest.mark.parametrize("shape", [(1, 5, 9, 34), (2, 6, 4, 33)])
def test_convolution_of_normalised_maps_of_whole_blocks_of_channels(kernel, shape, parts, outputs):
    """With AMX their rows are formed between the products of the planes before."""
    rng = np.random.default_rng(6)
    channels = sum(parts)
    filters = filters_of(rng, (channels, outputs))
    norms = coefficients_of(rng, shape, channels)
    maps = kernel.maps(rng, shape, *parts)
    values = formed(maps, norms)
    result, moments = kernel.convolve(shape, 2, maps, filters, norms)
    truth = convolved(values, filters)
    assert error(result, truth, values, filters, 27 * channels) < kernel.map_error
    written = result.astype(np.float64)
    expected = np.stack([written.mean((1, 2, 3)), written.var((1, 2, 3))], 1)
    np.testing.assert_allclose(moments, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("threads", [*THREADS, MOST_AT_ONCE])
def test_moments_hold_far_from_zero_for_any_number_of_threads(kernel, threads):
    rng = np.random.default_rng(5)
    shape = (1, 24, 40, 50)
    values = (100 + rng.standard_normal((*shape, 8))).astype(kernel.numpy)
    filters = np.zeros((3, 3, 3, 8, 8), np.float32)
    filters[1, 1, 1] = np.eye(8)
    result, moments = kernel.convolve(shape, threads, [values], filters)
    written = result.astype(np.float64)
    np.testing.assert_allclose(moments[0, 0], written.mean((0, 1, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(moments[0, 1], written.var((0, 1, 2, 3)), rtol=2e-5)


def test_equal_threads_give_equal_bits_and_maps_do_not_depend_on_threads(kernel):
    rng = np.random.default_rng(6)
    shape = (2, 7, 9, 21)
    values, gradient = kernel.maps(rng, shape, 20, 32)
    filters = filters_of(rng, (20, 32))

    def once(threads):
        result, moments = kernel.convolve(shape, threads, [values], filters)
        change = kernel.filter_gradient(shape, threads, [values], gradient)
        return result.tobytes(), moments.tobytes() + change.tobytes()

    every = (*THREADS, MOST_AT_ONCE)
    first = {threads: once(threads) for threads in every}
    assert first == {threads: once(threads) for threads in every}
    assert len({result for result, _ in first.values()}) == 1


def test_nan_is_not_hidden_by_the_relu_on_load(kernel):
    shape = (1, 3, 3, 5)
    filters = np.ones((3, 3, 3, 4, 4), np.float32)
    values = np.ones((*shape, 4), kernel.numpy)
    values[0, 1, 1, 2, 0] = np.nan
    coefficients = np.ones((1, 6, 4), np.float32)
    result, _ = kernel.convolve(shape, 1, [values], filters, coefficients)
    assert np.isnan(result[0, 1, 1, 2].astype(np.float32)).all()


def test_emulated_tiles_are_taken_by_name_alone_and_for_bfloat16_alone(library, monkeypatch):
    monkeypatch.delenv("CPU3D_INSTRUCTION_SET", raising=False)
    best = [library.native_kernels(None, code) for code in (FLOAT32, BFLOAT16)]
    monkeypatch.setenv("CPU3D_INSTRUCTION_SET", "amx_in_c")
    named = [library.native_kernels(None, code) for code in (FLOAT32, BFLOAT16)]
    assert named[0] == best[0]
    assert named[1] not in best


@pytest.mark.parametrize(("channels", "outputs"), [(MOST_CHANNELS, 5), (5, MOST_CHANNELS)])
def test_maps_of_as_many_channels_as_a_network_may_have_are_computed(kernel, channels, outputs):
    """One voxel, so that the middle tap alone counts."""
    rng = np.random.default_rng(8)
    shape = (1, 1, 1, 1)
    limit = 8 * kernel.map_error  # sums of so many terms round more than short ones
    filters = np.zeros((3, 3, 3, channels, outputs), np.float32)
    middle = filters[1, 1, 1]
    middle[:] = rng.standard_normal((channels, outputs)) / 10
    values, gradient = kernel.maps(rng, shape, channels, outputs)
    read = values.astype(np.float64)
    written = gradient.astype(np.float64)
    result, _ = kernel.convolve(shape, 2, [values], filters)
    assert error(result, read @ middle, values, middle, channels) < limit
    back, _ = kernel.input_gradient(shape, 2, gradient, filters)
    assert error(back, written @ middle.T, gradient, middle, outputs) < limit
    change = kernel.filter_gradient(shape, 2, [values], gradient)
    truth = read.reshape(-1, 1) * written.reshape(1, -1)
    assert error(change[1, 1, 1], truth, values, gradient, 1) < kernel.filter_error


def test_large_buffers_ask_for_huge_pages(library):
    """In a fresh process: "hg" among a mapping's flags, where the system knows them."""
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("needs a system with huge pages")
    script = f"""
from tests.models.native.reference import *
library = load({library._name!r})

def huge():
    lines = open("/proc/self/smaps").read().splitlines()
    return sum(line.startswith("VmFlags") and "hg" in line.split() for line in lines)

shape, filters = (1, 2, 2, 8), np.zeros((3, 3, 3, 256, 256), np.float32)
values, result = (np.zeros((*shape, 256), np.float32) for _ in range(2))
before = huge()
call = operation("convolve", "float32", shape, 1, [values], 256, filters=filters, map=result)
assert library.native_run(b"avx2", call) == 0
assert huge() > before
"""
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "channels"),
    [((256, 256, 192), (32, 32)), ((256, 256, 224), (32, 32)), ((512, 256, 192), (16, 32))],
    ids=lambda numbers: "x".join(map(str, numbers)),
)
def test_shapes_that_end_the_process_in_onednn_on_amx_are_taken(library, grid, channels):
    """Three planes along x of each, in the best kernels of this machine and in those of AMX."""
    rng = np.random.default_rng(7)
    shape = (1, 3, *grid[1:])
    threads = 2
    best = next(
        name
        for name in ("amx", "avx512_bf16", "avx512", "avx2")
        if library.native_kernels(name.encode(), BFLOAT16)
    )
    kernels = [Kernel(library, name, "bfloat16") for name in (best, "amx_in_c")]
    values, gradient = kernels[0].maps(rng, shape, *channels)
    filters = filters_of(rng, channels)
    flipped = np.swapaxes(filters[::-1, ::-1, ::-1], 3, 4)
    forward = convolved(formed([values]), filters)
    backward = convolved(formed([gradient]), flipped)
    of_filters = filter_gradient_of(formed([values]), formed([gradient]))
    for kernel in kernels:
        made, _ = kernel.convolve(shape, threads, [values], filters, sums=False)
        back, _ = kernel.input_gradient(shape, threads, gradient, filters)
        change = kernel.filter_gradient(shape, threads, [values], gradient)
        of_map = error(made, forward, values, filters, 27 * channels[0])
        assert of_map < kernel.map_error, kernel.name
        of_input = error(back, backward, gradient, filters, 27 * channels[1])
        assert of_input < kernel.map_error, kernel.name
        of_change = error(change, of_filters, values, gradient, np.prod(shape))
        assert of_change < kernel.filter_error, kernel.name


def test_a_child_of_fork_starts_threads_of_its_own(library):
    script = f"""
import os, signal
import numpy as np
from tests.models.native.reference import *
library = load({library._name!r})
signal.alarm(60)
values, filters = np.ones((1, 4, 4, 8, 4), np.float32), np.ones((3, 3, 3, 4, 4), np.float32)
result = np.zeros_like(values)
call = operation("convolve", "float32", (1, 4, 4, 8), 3, [values], 4, filters=filters, map=result)
assert library.native_run(None, call) == 0 and result[0, 1, 1, 1, 0] == 108
child = os.fork()
result[:] = 0
assert library.native_run(None, call) == 0 and result[0, 1, 1, 1, 0] == 108
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True, timeout=120)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_process_may_fork_at_any_moment_and_its_children_compute(library, threads):
    """Operations of growing size run in a thread meanwhile; a child that waits for that thread
    ends after a minute."""
    script = f"""
import os, signal, threading
import numpy as np
from tests.models.native.reference import *
library = load({library._name!r})

def computed(channels):
    shape = (1, 6, 6, 8)
    values = np.ones((*shape, channels), np.float32)
    filters = np.ones((3, 3, 3, channels, 4), np.float32)
    result = np.zeros((*shape, 4), np.float32)
    arrays = dict(filters=filters, map=result)
    call = operation("convolve", "float32", shape, {threads}, [values], 4, **arrays)
    assert library.native_run(None, call) == 0
    return result[0, 1, 1, 1, 0] == 27 * channels

done = threading.Event()
def meanwhile():
    channels = 0
    while not done.is_set():
        channels = channels % 640 + 16
        computed(channels)
thread = threading.Thread(target=meanwhile)
thread.start()
for channels in range(4, 124, 10):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(not computed(8 * channels))
    assert os.waitpid(child, 0)[1] == 0
done.set()
thread.join()
"""
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True, timeout=120)


WITH_THREADS = "equal_threads or in_place or one_thread or moments"  # names of tests


@pytest.mark.slow
@pytest.mark.skipif(bool(LIBRARY), reason="this is the run under sanitizers")
@pytest.mark.parametrize(
    ("sanitizers", "runtime", "tests"),
    [
        ("address,undefined", "libasan.so", [__file__, *FILES]),
        ("thread", "libtsan.so", [__file__, "-k", WITH_THREADS]),
        ("thread", "libtsan.so", FILES),
    ],
    ids=["memory", "threads of convolutions", "threads of all else"],
)
def test_no_sanitizer_finds_anything(tmp_path, sanitizers, runtime, tests):
    # Checked code of -O3 would take ten minutes to compile.
    options = (f"-fsanitize={sanitizers}", "-fno-sanitize-recover=undefined", "-g", "-O1")
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *tests]
    if sanitizers == "thread":  # knows no addresses that are drawn by lot
        command = ["setarch", "--addr-no-randomize", *command]
        if subprocess.run([*command[:2], "true"], check=False).returncode:
            pytest.skip("needs a system that lets a process choose its addresses")
    try:
        path = build(options, tmp_path).kernels
    except OSError as error:
        pytest.skip(str(error))
    library = subprocess.check_output(["cc", f"-print-file-name={runtime}"], text=True).strip()
    # A buffer that mremap moves leaves its addresses to another thread's: that is not seen. A long
    # history tells who used them before.
    suppressions = tmp_path / "suppressions"
    suppressions.write_text("race:at_least_so_large\n")
    environment = {
        **os.environ,
        "CPU3D_KERNELS": str(path),
        "LD_PRELOAD": library,
        "OPENBLAS_NUM_THREADS": "1",  # NumPy's own threads are not looked at
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": f"suppressions={suppressions}:history_size=7",
    }
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    assert ended.returncode == 0, ended.stdout + ended.stderr

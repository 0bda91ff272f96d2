"""Every convolution in every instruction set of this machine against float64, through the C
functions alone."""

import itertools
import os

import numpy as np
import pytest

from models.config import MOST_CHANNELS
from models.native.shared import MOST_THREADS
from tests.models.native.reference import (
    MOST_AT_ONCE,
    THREADS,
    coefficients_of,
    convolved,
    filter_gradient_of,
    formed,
    norm_sums,
)
from tests.test_imports import run_python

ROUNDED_ROWS = ("avx512_bf16", "amx", "amx_in_c", "amx_in_c_avx512")
SHAPES = [(5, 7, 9), (3, 5, 33), (1, 1, 1), (2, 3, 66), (1, 6, 4), (2, 3, 3), (3, 3, 2)]
# several rows at once; several registers a row
SHAPES += [(2, 11, 4), (1, 13, 12), (1, 7, 20), (1, 2, 130), (2, 3, 28), (1, 4, 11), (2, 1, 19)]
CHANNELS = [(1, 16), (3, 6), (6, 2), (16, 4), (8, 13), (20, 32), (16, 16), (48, 8), (33, 48)]
CHANNELS += [(16, 32), (32, 16)]
MORE = [
    # whole blocks of channels, which AMX forms between the products of the planes before
    ((1, 5, 9, 34), 16, 16, 2),
    ((1, 5, 9, 34), 32, 16, 2),
    ((2, 6, 4, 33), 48, 48, 2),
    # planes so large that a filter gradient takes one at a time
    ((2, 4, 31, 70), 16, 16, 2),
    ((1, 5, 33, 69), 48, 48, 2),
    ((2, 4, 31, 70), 4, 16, 2),
    ((1, 1, 1, 1), MOST_CHANNELS, 5, 2),
    ((1, 1, 1, 1), 5, MOST_CHANNELS, 2),
    # rows so long that a part along y has one or a few; a map past the caches; many threads
    ((1, 5, 15, 400), 5, 5, 2),
    ((1, 5, 4, 3000), 5, 5, 8),
    ((1, 3, 128, 128), 16, 16, 2),
    *(((2, 3, 4, 7), 40, 40, threads) for threads in THREADS),
]
# Root mean square errors relative to the size of a sum:
EXACT = 3e-6  # float32, all of it added up by a single thread
ROUNDED = 2.2e-3  # a bfloat16 map
ROUNDED_PRODUCTS = 5e-3  # bfloat16 products as well


def map_and_sums(kernel, kind, shape, threads, maps, width, others, over=None, **arrays):
    """What a convolution makes, or its input gradient: a map of a `width`, over another one if that
    is given; and its moments, or the sums of the norm below."""
    made = np.full((*shape, width), 7, kernel.numpy) if over is None else over
    sums = np.full((shape[0], 2, width), np.nan, np.float32)
    kernel.run(kind, shape, threads, maps, width, others, map=made, sums_to=sums, **arrays)
    return made, sums


def convolve(kernel, shape, threads, maps, filters, coefficients=None, add=None, over=None):
    about = ("convolve", shape, threads, maps, filters.shape[4], [add], over)
    return map_and_sums(kernel, *about, filters=filters, coefficients=coefficients)


def filter_gradient(kernel, shape, threads, maps, gradient, raw=None, **coefficients):
    """`raw` is the map of the gradient."""
    outputs = gradient.shape[-1]
    made = np.full((27, sum(each.shape[-1] for each in maps), outputs), np.nan, np.float32)
    about = ("filter_gradient", shape, threads, maps, outputs, [gradient, raw])
    kernel.run(*about, filter_gradient=made, **coefficients)
    return made.reshape(3, 3, 3, *made.shape[1:])


def product_error(kernel):
    return ROUNDED_PRODUCTS if kernel.name in ROUNDED_ROWS else EXACT


def map_error(kernel):
    rounded = ROUNDED if kernel.dtype == "bfloat16" else 0
    return max(rounded, product_error(kernel))


def filters_of(rng, channels):
    return (rng.standard_normal((3, 3, 3, *channels)) / 10).astype(np.float32)


def rms(values):
    return float(np.sqrt(np.mean(np.square(np.asarray(values, np.float64)))))


def error(result, truth, values, factors, terms):
    """Root mean square error, relative to that of a sum of so many products of both; of very many
    less, as they round more."""
    size = np.sqrt(terms) * rms(values) * rms(factors) * min(1 + terms / 2**13, 8)
    return rms(result.astype(np.float64) - truth) / (size + 1e-30)


def cases():
    """Shapes with a batch, channels, outputs and threads: every second pair of a shape and
    channels.

    As there is an odd number of CHANNELS, each shape and each pair of channels meets every number
    of threads and a batch of 1 and of 2. And each pair of channels meets rows of each remainder by
    8, short and long ones, and a map of one row or plane: SHAPES has such at odd and at even
    places."""
    pairs = [*itertools.product(SHAPES, CHANNELS)]
    for number, (grid, channels) in enumerate(pairs[::2]):
        yield (2 - number % 2, *grid), *channels, THREADS[number % len(THREADS)]
    yield from MORE


EVERY_CASE = pytest.mark.parametrize(("shape", "channels", "outputs", "threads"), [*cases()])


def two_parts(channels):
    """Channels of two maps that are read as one; not always whole vectors."""
    if channels <= 2:
        return (channels,)
    first = 16 if channels in (32, 48) else channels // 3
    return first, channels - first


def moments_of(written):
    values = written.astype(np.float64)
    return np.stack([values.mean((1, 2, 3)), values.var((1, 2, 3))], 1)


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
    for widths, coefficients in (((channels,), None), ((channels,), norms), (parts, first_raw)):
        maps = kernel.maps(rng, shape, *widths)
        values = formed(maps, coefficients)
        truth = convolved(values, filters)
        (noise,) = kernel.maps(rng, shape, outputs)
        add = (rms(truth) / 2 * noise.astype(np.float32)).astype(kernel.numpy)
        ways = [(maps, None, None), (maps, add, add.copy())]  # what is read, added, written over
        if widths == (outputs,):
            ways.append((maps, None, maps[0]))
        for read, term, over in ways:
            made, moments = convolve(
                kernel, shape, threads, read, filters, coefficients, term, over
            )
            expected = truth if term is None else truth + add.astype(np.float64)
            assert error(made, expected, values, filters, 27 * channels) < map_error(kernel)
            np.testing.assert_allclose(moments, moments_of(made), rtol=1e-5, atol=1e-6)


@EVERY_CASE
def test_input_gradient_through_a_norm_with_the_sums_of_the_norm_below(
    kernel, shape, channels, outputs, threads
):
    rng = np.random.default_rng(12)  # no value is so near a floor that rounding decides it
    filters = filters_of(rng, (channels, outputs))
    gradient, raw = kernel.maps(rng, shape, outputs, outputs)
    (raw_below,) = kernel.maps(rng, shape, channels)
    coefficients = coefficients_of(rng, shape, outputs)
    below = coefficients_of(rng, shape, channels)
    arrays = {"filters": filters, "coefficients": coefficients, "other_coefficients": below}
    others = [raw_below, raw]

    def run(gradient, over=None):
        about = ("input_gradient", shape, threads, [gradient], channels, others, over)
        return map_and_sums(kernel, *about, **arrays)

    result, sums = run(gradient)
    values = formed([gradient], coefficients, raw)
    flipped = np.swapaxes(filters[::-1, ::-1, ::-1], 3, 4)
    truth = convolved(values, flipped)
    assert error(result, truth, values, filters, 27 * outputs) < map_error(kernel)
    if channels == outputs:
        again = run(gradient, over=gradient)
        assert [each.tobytes() for each in again] == [result.tobytes(), sums.tobytes()]
    expected = norm_sums(result, raw_below, below)
    size = np.linalg.norm(expected) + 1e-30
    assert np.linalg.norm(sums - expected) < 1e-5 * size


@EVERY_CASE
@pytest.mark.parametrize("are_formed", [False, True])
def test_filter_gradient_of_raw_and_formed_maps(
    kernel, shape, channels, outputs, threads, are_formed
):
    rng = np.random.default_rng(4)
    gradient, raw = kernel.maps(rng, shape, outputs, outputs)
    limit = product_error(kernel)
    if are_formed:
        maps = kernel.maps(rng, shape, *two_parts(channels))
        norms = coefficients_of(rng, shape, channels)
        through = coefficients_of(rng, shape, outputs)
    else:
        maps = kernel.maps(rng, shape, channels)
        norms = through = raw = None
        if kernel.name.startswith("amx"):
            limit = EXACT
    about = {"coefficients": norms, "other_coefficients": through}
    result = filter_gradient(kernel, shape, threads, maps, gradient, raw, **about)
    values = formed(maps, norms)
    gradients = formed([gradient], through, raw)
    truth = filter_gradient_of(values, gradients)
    assert error(result, truth, values, gradients, np.prod(shape)) < limit


@pytest.mark.parametrize("threads", [*THREADS, MOST_AT_ONCE])
def test_moments_hold_far_from_zero_for_any_number_of_threads(kernel, threads):
    rng = np.random.default_rng(5)
    shape = (1, 24, 40, 50)
    values = (100 + rng.standard_normal((*shape, 8))).astype(kernel.numpy)
    filters = np.zeros((3, 3, 3, 8, 8), np.float32)
    filters[1, 1, 1] = np.eye(8)
    result, moments = convolve(kernel, shape, threads, [values], filters)
    np.testing.assert_allclose(moments, moments_of(result), rtol=2e-5)


def test_equal_threads_give_equal_bits_and_maps_do_not_depend_on_threads(kernel):
    rng = np.random.default_rng(6)
    shape = (2, 7, 9, 21)
    values, gradient = kernel.maps(rng, shape, 20, 32)
    filters = filters_of(rng, (20, 32))

    def once(threads):
        result, moments = convolve(kernel, shape, threads, [values], filters)
        change = filter_gradient(kernel, shape, threads, [values], gradient)
        return result.tobytes(), moments.tobytes() + change.tobytes()

    every = (*THREADS, MOST_AT_ONCE)
    first = {threads: once(threads) for threads in every}
    assert first == {threads: once(threads) for threads in every}
    assert len({result for result, _ in first.values()}) == 1


CPUS = min(len(os.sched_getaffinity(0)), MOST_THREADS)


@pytest.mark.parametrize(("wanted", "threads"), [("3", 3), ("999", MOST_THREADS), ("0", CPUS)])
def test_threads_are_as_many_as_wanted_or_one_for_each_cpu(library, monkeypatch, wanted, threads):
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", wanted)
    assert library.thread_count() == threads


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
thread = threading.Thread(target=meanwhile, daemon=True)
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
    ended = run_python(script)
    assert ended.returncode == 0, ended.stderr

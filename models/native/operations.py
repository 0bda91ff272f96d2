"""Own operations of a 3D U-Net: convolutions, pools, projections with norm and ReLU formed on load; their gradients.

Maps are (batch, x, y, z, channels), float32 or bfloat16; filters, statistics and sums are float32, and (N, C) is a
value for each channel of each sample. Products of bfloat16 maps are of bfloat16 values where the CPU multiplies those,
sums always float32. Equal inputs and threads give equal bits. An output is written over the input of its shape that it
is made of, where nobody else has that one. TF_NUM_INTRAOP_THREADS threads take part, by default one for each CPU that
the process may use. CPU3D_INSTRUCTION_SET (avx2, avx512, avx512_bf16, amx) takes other kernels than the fastest.

All raise RuntimeError where `available` is false, and InvalidArgumentError for shapes that do not fit.
"""

import ctypes
import functools
import time
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from models.native.build import door_library, kernels_library

Tensor = tf.Tensor


class Norm(NamedTuple):
    """Of a raw map, (N, C) each: r's value is max(scale * r + shift, floor). A floor of 0 is a ReLU, of -inf none."""

    scale: Tensor
    shift: Tensor
    mean: Tensor
    rstd: Tensor  # 1 / standard deviation
    floor: Tensor


class Source(NamedTuple):
    """A map that is read; without a norm its values are the raw ones."""

    raw: Tensor
    norm: Optional[Norm] = None


class Gradient(NamedTuple):
    """The gradient of a map; with a source, which has a norm, the gradient g of the norm's values stands for that of
    the raw map: a * (g where scale * raw + shift > floor, else 0) + b * raw + c."""

    map: Tensor
    source: Optional[Source] = None
    a: Optional[Tensor] = None
    b: Optional[Tensor] = None
    c: Optional[Tensor] = None


def available() -> bool:
    """Whether the operations are built, for this TensorFlow and CPU."""
    return _loaded() is not None


# --- 3 x 3 x 3 convolutions, stride 1, "same": filters (3, 3, 3, in, out) ---


def convolve(sources: Sequence[Source], filters: Tensor, add: Optional[Tensor] = None) -> Tuple[Tensor, Tensor, Tensor]:
    """The raw sum (batch, x, y, z, out), plus `add`, and its mean and variance over the grid, each (N, out). Two
    sources count as concatenated."""
    maps, others = [source.raw for source in sources], [] if add is None else [add]
    raw, sums, *_ = _run(CONVOLVE, maps, others, filters, coefficients=_coefficients(sources))
    batch, *grid, _ = maps[0].shape
    raw.set_shape((batch, *grid, filters.shape[4])), sums.set_shape((batch, 2, filters.shape[4]))
    return (raw, *_rows(sums))


def input_gradient(
    gradient: Gradient, filters: Tensor, below: Optional[Source] = None
) -> Tuple[Tensor, Tensor, Tensor]:
    """The gradient g of what was convolved, (batch, x, y, z, in), and two sums, each (N, in): with `below`, of g where
    scale * raw + shift > floor, and of that times (raw - mean) * rstd; else 0. Of concatenated maps call it with each
    one's part of the filters."""
    others = [source.raw for source in (below, gradient.source) if source and source.norm]
    coefficients, of_below = _gradient_coefficients(gradient), _norm_coefficients(below.norm if below else None)
    g, sums, *_ = _run(INPUT_GRADIENT, [gradient.map], others, filters, None, coefficients, of_below)
    batch, *grid, _ = gradient.map.shape
    g.set_shape((batch, *grid, filters.shape[3])), sums.set_shape((batch, 2, filters.shape[3]))
    return (g, *_rows(sums))


def filter_gradient(sources: Sequence[Source], gradient: Gradient) -> Tensor:
    """The gradient of the filters, (3, 3, 3, in, out)."""
    maps = [source.raw for source in sources]
    others = [gradient.map, *([gradient.source.raw] if gradient.source else [])]
    coefficients, of_gradient = _coefficients(sources), _gradient_coefficients(gradient)
    result = _run(FILTER_GRADIENT, maps, others, None, None, coefficients, of_gradient)[2]
    result.set_shape((3, 3, 3, sum(one.shape[-1] for one in maps), gradient.map.shape[-1]))
    return result


# --- Between two grids ---


def max_pool(source: Source) -> Tensor:
    """The largest value of every 2 x 2 x 2 voxels."""
    return _pass(MAX_POOL, source, grid=0.5)[0]


def max_pool_gradient(source: Source, pooled_gradient: Tensor, add: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """The gradient of the source's values: that of the pooled map at the first of the largest, plus `add`, of the
    source's shape; and two sums of it as of `input_gradient`."""
    g, sums, *_ = _pass(MAX_POOL_GRADIENT, source, [pooled_gradient, add])
    return (g, *_rows(sums))


def up_convolve(source: Source, filters: Tensor) -> Tensor:
    """The transposed convolution of kernel and stride 2, (batch, 2x, 2y, 2z, out); filters are (2, 2, 2, out, in)."""
    return _pass(UP_CONVOLVE, source, filters=filters, grid=2, channels=filters.shape[3])[0]


def up_input_gradient(gradient: Tensor, filters: Tensor, below: Source) -> Tuple[Tensor, Tensor, Tensor]:
    """The gradient of the values of `below`, which was convolved, and two sums of it as of `input_gradient`."""
    g, sums, *_ = _pass(UP_INPUT_GRADIENT, below, [gradient], filters)
    return (g, *_rows(sums))


def up_filter_gradient(source: Source, gradient: Tensor) -> Tensor:
    """(2, 2, 2, out, in)."""
    of_filters = _pass(UP_FILTER_GRADIENT, source, [gradient])[2]
    of_filters.set_shape((2, 2, 2, gradient.shape[-1], source.raw.shape[-1]))
    return of_filters


# --- Voxel by voxel ---


def project(source: Source, filters: Tensor, bias: Tensor, add: Optional[Tensor] = None) -> Tensor:
    """A 1 x 1 x 1 convolution with a bias, plus `add`; filters are (1, 1, 1, in, out)."""
    return _pass(PROJECT, source, [] if add is None else [add], filters, bias, channels=filters.shape[4])[0]


def project_gradient(
    source: Source, gradient: Tensor, filters: Tensor, add: Optional[Tensor] = None
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradient of the source's values, plus `add`; two sums of it as of `input_gradient`; and the gradients of the
    filters and the bias."""
    others = [gradient] if add is None else [gradient, add]
    g, sums, of_filters, of_bias = _pass(PROJECT_GRADIENT, source, others, filters)
    of_filters.set_shape(filters.shape)
    of_bias.set_shape(filters.shape[4:])
    return (g, *_rows(sums), of_filters, of_bias)


def project_sums(source: Source, gradient: Tensor, filters: Tensor) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """All of `project_gradient` but the gradient of the source's values."""
    _, sums, of_filters, of_bias = _pass(PROJECT_SUMS, source, [gradient], filters)
    of_filters.set_shape(filters.shape)
    of_bias.set_shape(filters.shape[4:])
    return (*_rows(sums), of_filters, of_bias)


def project_to_raw(at: Gradient, filters: Tensor) -> Gradient:
    """As `to_raw`, of a source whose values were projected; `at.map` is the gradient of the projection."""
    return Gradient(_pass(PROJECT_TO_RAW, at.source, [at.map], filters, coefficients=_gradient_coefficients(at))[0])


def residual_sum(source: Source, other: Tensor) -> Tensor:
    """max(value + other, 0)."""
    return _pass(RESIDUAL_SUM, source, [other])[0]


def residual_gradient(source: Source, output: Tensor, gradient: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """The gradient where the sum, `output`, is positive, which is that of both terms; and two sums of it as of
    `input_gradient`."""
    g, sums, *_ = _pass(RESIDUAL_GRADIENT, source, [output, gradient])
    return (g, *_rows(sums))


def to_raw(at: Gradient) -> Gradient:
    """The gradient of a raw map, formed as a map of its own."""
    return Gradient(_pass(TO_RAW, at.source, [at.map], coefficients=_gradient_coefficients(at))[0])


# --- A limit ---


def products_per_s(dtype: str, threads: int) -> float:
    """Multiplications and additions a second of the products alone, of values in the cache L1: the most of a few runs.
    A short convolution may be counted as faster, as it needs fewer of them."""
    library = ctypes.CDLL(str(kernels_library()))
    library.native_products.restype = ctypes.c_double
    best, code = 0.0, ("float32", "bfloat16").index(dtype)
    for _ in range(5):
        begin = time.perf_counter()
        done = library.native_products(None, code, threads, ctypes.c_long(10_000))
        best = max(best, done / (time.perf_counter() - begin))
    return best


# --- The library ---

CONVOLVE, INPUT_GRADIENT, FILTER_GRADIENT, MAX_POOL, MAX_POOL_GRADIENT, RESIDUAL_SUM, RESIDUAL_GRADIENT = range(7)
TO_RAW, PROJECT, PROJECT_GRADIENT, PROJECT_SUMS, PROJECT_TO_RAW = range(7, 12)
UP_CONVOLVE, UP_INPUT_GRADIENT, UP_FILTER_GRADIENT = range(12, 15)  # all as in native.h


def _run(
    kind: int,
    maps: Sequence[Tensor],
    others: Sequence[Tensor],
    filters: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    coefficients: Optional[Tensor] = None,
    other_coefficients: Optional[Tensor] = None,
) -> List[Tensor]:
    """Map, sums, gradients of filters and bias; those that the kind does not make are empty."""
    return _operations().cpu_operation(
        filters=_none() if filters is None else filters,
        bias=_none() if bias is None else bias,
        coefficients=_none() if coefficients is None else coefficients,
        other_coefficients=_none() if other_coefficients is None else other_coefficients,
        maps=list(maps),
        others=list(others),
        kind=kind,
    )


def _pass(
    kind: int,
    source: Source,
    others: Sequence[Tensor] = (),
    filters: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    grid: float = 1,
    channels: Optional[int] = None,
    coefficients: Optional[Tensor] = None,
) -> List[Tensor]:
    """`_run` on one map; the one that is made has `grid` times as many voxels along an axis."""
    coefficients = _norm_coefficients(source.norm) if coefficients is None else coefficients
    outputs = _run(kind, [source.raw], others, filters, bias, coefficients)
    batch, *size, width = source.raw.shape
    if kind not in (PROJECT_SUMS, UP_FILTER_GRADIENT):
        size = [side and int(side * grid) for side in size]
        outputs[0].set_shape((batch, *size, channels or width))
    if kind in (MAX_POOL_GRADIENT, RESIDUAL_GRADIENT, PROJECT_GRADIENT, PROJECT_SUMS, UP_INPUT_GRADIENT):
        outputs[1].set_shape((batch, 2, width))
    return outputs


@functools.cache
def _loaded() -> Optional[Any]:
    """TensorFlow's module of the operations; None where they are not built or of no use here."""
    path = door_library()
    if path is None:
        return None
    try:
        module = tf.load_op_library(str(path))
        kernels = ctypes.CDLL(str(path)).native_kernels
    except (OSError, tf.errors.OpError):
        return None
    kernels.restype = ctypes.c_void_p
    return module if kernels(None, 0) or kernels(None, 1) else None


def _operations() -> Any:
    module = _loaded()
    if module is None:
        raise RuntimeError("own kernels must be built, on a CPU with AVX2: run python -m models.native.build")
    return module


def _rows(sums: Tensor) -> List[Tensor]:
    return tf.unstack(sums, axis=1)


def _none() -> Tensor:
    return tf.zeros((0,), tf.float32)


def _coefficients(sources: Sequence[Source]) -> Tensor:
    """(batch, 6, channels): scale, shift, floor, and three that are not read; empty where all is raw."""
    if not any(source.norm for source in sources):
        return _none()
    parts = []
    for source in sources:
        if source.norm:
            rows = [source.norm.scale, source.norm.shift, source.norm.floor]
        else:
            ones = tf.ones((tf.shape(source.raw)[0], source.raw.shape[-1]))
            rows = [ones, 0 * ones, -float("inf") * ones]
        parts.append(tf.stack([*rows, *rows], 1))
    return tf.concat(parts, 2) if len(parts) > 1 else parts[0]


def _gradient_coefficients(gradient: Gradient) -> Tensor:
    """(batch, 6, channels): scale, shift, floor, a, b, c."""
    if gradient.source is None:
        return _none()
    norm = gradient.source.norm
    return tf.stack([norm.scale, norm.shift, norm.floor, gradient.a, gradient.b, gradient.c], 1)


def _norm_coefficients(norm: Optional[Norm]) -> Tensor:
    """(batch, 6, channels): scale, shift, floor, mean, rstd, and one that is not read; empty without a norm."""
    return _none() if norm is None else tf.stack([*norm[:2], norm.floor, norm.mean, norm.rstd, norm.rstd], 1)

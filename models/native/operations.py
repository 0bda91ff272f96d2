"""Own operations of a 3D U-Net: convolutions, pools, projections with norm and ReLU formed on load;
their gradients.

Maps are (batch, x, y, z, channels), float32 or bfloat16; filters, statistics and sums are float32,
and (N, C) is a value for each channel of each sample. Products of bfloat16 maps are of bfloat16
values if the CPU multiplies these, sums always float32. Equal inputs and threads give equal bits.
An output is written over the input of its shape that it is made from, if no other operation reads
that. TF_NUM_INTRAOP_THREADS threads take part, by default one for each CPU that the process may
use. CPU3D_INSTRUCTION_SET (avx2, avx512, avx512_bf16, amx) replaces the fastest instruction set.

All raise RuntimeError if `available` is false, and InvalidArgumentError for shapes that do not fit;
InstructionSetError for a CPU3D_INSTRUCTION_SET that is none, or none of this CPU.
"""

import functools
import sys
import types
from pathlib import Path
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

import models.native.gradients  # noqa: F401, for tapes that record the operations
from models.native.library import does_not_load, own_operations
from models.native.shared import KIND_CODES, WITH_SUMS

Strides = Tuple[int, int, int]
HALVED: Strides = (2, 2, 2)  # voxels of the finer grid along X, Y, Z for one of the coarser


class Norm(NamedTuple):
    """A raw map's norm, (N, C) each: r's value is max(scale * r + shift, floor). A floor of 0 is a
    ReLU, -inf none."""

    scale: tf.Tensor
    shift: tf.Tensor
    mean: tf.Tensor
    rstd: tf.Tensor  # 1 / standard deviation
    floor: tf.Tensor


class Source(NamedTuple):
    """A map that is read; without a norm its values are the raw ones."""

    raw: tf.Tensor
    norm: Optional[Norm] = None


class Gradient(NamedTuple):
    """The gradient of a map; with a source, which has a norm, the gradient g of the norm's values
    stands for that of the raw map: a * (g where scale * raw + shift > floor, else 0) + b * raw +
    c."""

    map: tf.Tensor
    source: Optional[Source] = None
    a: Optional[tf.Tensor] = None
    b: Optional[tf.Tensor] = None
    c: Optional[tf.Tensor] = None


class AtValues(NamedTuple):
    """The gradient g of the values of a map, and two sums of it, (N, C): of g where scale * raw +
    shift > floor, and of that times (raw - mean) * rstd. Without a norm both are meaningless."""

    map: tf.Tensor
    sum1: tf.Tensor
    sum2: tf.Tensor


def available() -> bool:
    """Whether the operations are built, for this TensorFlow and CPU."""
    return _loaded() is not None


def in_use() -> bool:
    """Whether they compute what is called now: on a CPU for which they are built, and in no step
    that XLA compiles."""
    if GraphOrParentsInXlaContext(ops.get_default_graph()):
        return False
    return available() and not tf.config.list_logical_devices("GPU")


# --- 3 x 3 x 3 convolutions, stride 1, "same": filters (3, 3, 3, in, out) ---


def convolve(
    sources: Sequence[Source], filters: tf.Tensor, add: Optional[tf.Tensor] = None
) -> Tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The raw sum (batch, x, y, z, out), plus `add`, and its mean and variance over the grid, each
    (N, out). Two sources count as concatenated."""
    maps = [source.raw for source in sources]
    made = (*maps[0].shape[:4], filters.shape[4])
    floats = (filters, None, _norms(sources))
    at, _, _ = _run("convolve", maps, _given(add), *floats, made=made)
    return tuple(at)


def input_gradient(
    gradient: Gradient, filters: tf.Tensor, below: Optional[Source] = None
) -> AtValues:
    """The gradient of the convolved map, (batch, x, y, z, in), whose norm is that of `below`. For
    concatenated maps call it with each map's part of the filters."""
    extras = [source.raw for source in _given(below, gradient.source) if source.norm]
    made = (*gradient.map.shape[:4], filters.shape[3])
    floats = (filters, None, _through(gradient), _norms(_given(below)))
    at, _, _ = _run("input_gradient", [gradient.map], extras, *floats, made=made)
    return at


def filter_gradient(sources: Sequence[Source], gradient: Gradient) -> tf.Tensor:
    """The gradient of the filters, (3, 3, 3, in, out)."""
    maps = [source.raw for source in sources]
    extras = [gradient.map]
    if gradient.source:
        extras.append(gradient.source.raw)
    _, result, _ = _run(
        "filter_gradient", maps, extras, None, None, _norms(sources), _through(gradient)
    )
    result.set_shape((3, 3, 3, sum(map_.shape[-1] for map_ in maps), gradient.map.shape[-1]))
    return result


# --- Between two grids ---


def max_pool(source: Source, strides: Strides = HALVED) -> tf.Tensor:
    """The largest value of every 2 x 2 x 2 voxels, or of fewer as `strides` say."""
    size = [_times(side, 1, stride) for side, stride in zip(source.raw.shape[1:4], strides)]
    return _pass("max_pool", source, strides=strides, size=size)[0].map


def max_pool_gradient(
    source: Source, pooled_gradient: tf.Tensor, add: tf.Tensor, strides: Strides = HALVED
) -> AtValues:
    """The gradient of the pooled map at the first of the largest, plus `add`, of the source's
    shape."""
    return _pass("max_pool_gradient", source, [pooled_gradient, add], strides=strides)[0]


def up_convolve(source: Source, filters: tf.Tensor) -> tf.Tensor:
    """The transposed convolution whose stride is its kernel's shape, such as (batch, 2x, 2y, 2z,
    out) for filters (2, 2, 2, out, in)."""
    *strides, channels, _ = filters.shape
    size = [_times(side, stride, 1) for side, stride in zip(source.raw.shape[1:4], strides)]
    more = {"strides": strides, "size": size, "channels": channels}
    return _pass("up_convolve", source, (), filters, **more)[0].map


def up_input_gradient(gradient: tf.Tensor, filters: tf.Tensor, below: Source) -> AtValues:
    """The gradient of `below`, which was convolved."""
    strides = filters.shape[:3]
    return _pass("up_input_gradient", below, [gradient], filters, strides=strides)[0]


def up_filter_gradient(source: Source, gradient: tf.Tensor, strides: Strides = HALVED) -> tf.Tensor:
    """The gradient of the filters, (*strides, out, in)."""
    _, of_filters, _ = _pass("up_filter_gradient", source, [gradient], strides=strides)
    of_filters.set_shape((*strides, gradient.shape[-1], source.raw.shape[-1]))
    return of_filters


# --- Voxel by voxel ---


def project(
    source: Source, filters: tf.Tensor, bias: tf.Tensor, add: Optional[tf.Tensor] = None
) -> tf.Tensor:
    """A 1 x 1 x 1 convolution with a bias, plus `add`; filters are (1, 1, 1, in, out)."""
    channels = filters.shape[4]
    return _pass("project", source, _given(add), filters, bias, channels=channels)[0].map


def project_gradient(
    source: Source, gradient: tf.Tensor, filters: tf.Tensor, add: Optional[tf.Tensor] = None
) -> Tuple[AtValues, tf.Tensor, tf.Tensor]:
    """The gradient of the source's values, plus `add`; and those of the filters and the bias."""
    return _pass("project_gradient", source, _given(gradient, add), filters)


def project_sums(
    source: Source, gradient: tf.Tensor, filters: tf.Tensor
) -> Tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """The results of `project_gradient` but the gradient of the source's values."""
    at, *of_weights = _pass("project_sums", source, [gradient], filters)
    return (at.sum1, at.sum2, *of_weights)


def residual_sum(source: Source, term: tf.Tensor) -> tf.Tensor:
    """max(value + term, 0)."""
    return _pass("residual_sum", source, [term])[0].map


def residual_gradient(source: Source, output: tf.Tensor, gradient: tf.Tensor) -> AtValues:
    """The gradient of both terms: that of the sum, `output`, where it is positive."""
    return _pass("residual_gradient", source, [output, gradient])[0]


def to_raw(at: Gradient, filters: Optional[tf.Tensor] = None) -> Gradient:
    """The gradient of a raw map, formed as a map of its own; with filters, of a source whose values
    were projected: `at.map` is the gradient of the projection."""
    if at.source is None:
        raise ValueError(
            "a gradient must have a source to be formed of, got none; leave it as it is"
        )
    kind = "to_raw" if filters is None else "project_to_raw"
    return Gradient(_pass(kind, at.source, [at.map], filters, coefficients=_through(at))[0].map)


# --- The loss: logits (batch, x, y, z, R) against a target uint8 that is 0, not 0, or IGNORED ---


def loss_sums(logits: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """Sums over the voxels of each sample and region, (batch, 4, R): of cross-entropies, of p where
    the target is not 0, of p, and of such voxels, with p the sigmoid of a logit.

    Their bits do not depend on the number of threads. Of a target on a finer grid every 2nd, 3rd
    ... voxel counts, as each axis has it. A logit that is not finite makes a sum not finite.
    Where the target is IGNORED a logit is in no sum, whatever it is.
    """
    sums = _module().cpu_loss_sums(logits, target)
    sums.set_shape((logits.shape[0], 4, logits.shape[-1]))
    return sums


def loss_slope(logits: tf.Tensor, target: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """The gradient of a loss by the logits, in their dtype, from its derivatives by the first three
    of `loss_sums`, (batch, 3, R); 0 where the target is IGNORED."""
    slope = _module().cpu_loss_slope(logits, target, factors)
    slope.set_shape(logits.shape)
    return slope


# --- An optimizer's update ---


def orthogonal(kernel: tf.Tensor) -> tf.Tensor:
    """The orthogonal matrix nearest to a kernel (..., A, B), float32, as a matrix of B columns,
    roughly, in the kernel's shape: singular values of 0.7 to 1.2, times the root of its rows over
    its columns if that is more than 1. `cpu3d.training.optimizers.orthogonal` is the same by
    TensorFlow. Its bits do not depend on the number of threads."""
    made = _module().cpu_orthogonal(kernel)
    made.set_shape(kernel.shape)
    return made


# --- The library ---

REGISTERED = ("CpuOperation", "CpuLossSums", "CpuLossSlope", "CpuOrthogonal")  # TensorFlow's names


def _run(
    kind: str,
    maps: Sequence[tf.Tensor],
    extras: Sequence[tf.Tensor],
    *floats: Optional[tf.Tensor],
    made: Sequence[Optional[int]] = (),
    strides: Sequence[int] = HALVED,
) -> Tuple[AtValues, tf.Tensor, tf.Tensor]:
    """Map with its two sums, gradients of filters and bias; results that the kind does not make are
    empty. `floats` are filters, bias, coefficients and other coefficients, if any; `made` is the
    shape of the map, or of the map that has the sums. `strides` are between two grids."""
    module = _module()
    absent = tf.zeros((0,))
    inputs = [absent if array is None else array for array in floats]
    inputs += [absent] * (4 - len(inputs))
    made_map, sums, of_filters, of_bias = module.cpu_operation(
        *inputs, list(maps), list(extras), kind=KIND_CODES[kind], strides=list(strides)
    )
    if made and kind in WITH_SUMS:
        sums.set_shape((made[0], 2, made[4]))
    if made and kind not in ("project_sums", "up_filter_gradient"):
        made_map.set_shape(made)
    if kind in ("project_gradient", "project_sums"):
        of_filters.set_shape(inputs[0].shape)
        of_bias.set_shape(inputs[0].shape[4:])
    if kind not in WITH_SUMS:
        return AtValues(made_map, sums, sums), of_filters, of_bias
    return AtValues(made_map, *tf.unstack(sums, 2, 1)), of_filters, of_bias


def _pass(
    kind: str,
    source: Source,
    extras: Sequence[tf.Tensor] = (),
    filters: Optional[tf.Tensor] = None,
    bias: Optional[tf.Tensor] = None,
    coefficients: Optional[tf.Tensor] = None,
    strides: Sequence[int] = HALVED,
    size: Optional[Sequence[Optional[int]]] = None,
    channels: Optional[int] = None,
) -> Tuple[AtValues, tf.Tensor, tf.Tensor]:
    """`_run` on one map; the new map has as many voxels and channels unless `size` and `channels`
    say others."""
    batch, *own_size, width = source.raw.shape
    if size is None:
        size = own_size
    if channels is None:
        channels = width
    made = (batch, *size, channels)
    if coefficients is None:
        coefficients = _norms([source])
    floats = (filters, bias, coefficients)
    return _run(kind, [source.raw], extras, *floats, made=made, strides=strides)


def _given(*values: Any) -> List[Any]:
    """Those of some values that are there."""
    return [value for value in values if value is not None]


def _times(side: Optional[int], times: int, over: int) -> Optional[int]:
    """A side of a coarser or finer grid; None stays unknown."""
    return None if side is None else side * times // over


def _module() -> Any:
    module = _loaded()
    if module is None:
        raise RuntimeError(f"own operations must load here, got none: {own_operations().why}")
    return module


@tf.autograph.experimental.do_not_convert
def _loaded() -> Optional[Any]:
    """TensorFlow's module of the operations; None if they are not built or do not run here."""
    own = own_operations()
    return _module_of(own.door) if own.door else None


@functools.cache
def _module_of(door: Path) -> Optional[Any]:
    """TensorFlow's module of a library; None, with a warning, for one that this TensorFlow does not
    take."""
    try:
        module = tf.load_op_library(str(door))
        if hasattr(module, "cpu_operation"):
            return module
        return _module_of_registered()
    except (OSError, ImportError, AttributeError, tf.errors.OpError) as error:
        reason = str(error).strip().splitlines()[0]
        why = f"TensorFlow {tf.__version__} does not load them: {reason}"
        print(f"warning: own operations are left out: {why}", file=sys.stderr)
        does_not_load(why)
        return None


def _module_of_registered() -> Any:
    """The module of operations that are registered already: `load_op_library` makes one only of
    what a library registers when it is opened, and another part of this process has opened it
    before."""
    from tensorflow.core.framework import op_def_pb2
    from tensorflow.python.client import pywrap_tf_session  # noqa: F401, the next one needs it
    from tensorflow.python.framework import _pywrap_python_op_gen, op_def_registry

    known = [op_def_registry.get(name) for name in REGISTERED]
    if None in known:
        raise ImportError("another part of this process opened the library before TensorFlow")
    definitions = op_def_pb2.OpList(op=known).SerializeToString()
    source = _pywrap_python_op_gen.GetPythonWrappers(definitions)
    module = types.ModuleType("cpu_operation")
    exec(source, module.__dict__)
    vars(module)["_IS_TENSORFLOW_PLUGIN"] = True  # as load_op_library's, for AutoGraph
    return module


def _norms(sources: Sequence[Source]) -> Optional[tf.Tensor]:
    """(batch, 6, channels): scale, shift, floor, mean, rstd, and one that is not read; None if all
    are raw."""
    if not any(source.norm for source in sources):
        return None
    parts = []
    for raw, norm in sources:
        if norm is None:
            ones = tf.ones((tf.shape(raw)[0], raw.shape[-1]))
            norm = Norm(ones, 0 * ones, 0 * ones, ones, -float("inf") * ones)
        rows = (norm.scale, norm.shift, norm.floor, norm.mean, norm.rstd, norm.rstd)
        parts.append(tf.stack(rows, 1))
    if len(parts) == 1:  # an operation less in the graph
        return parts[0]
    return tf.concat(parts, 2)


def _through(gradient: Gradient) -> Optional[tf.Tensor]:
    """(batch, 6, channels): scale, shift, floor, a, b, c; None for a raw map's gradient."""
    if gradient.source is None:
        return None
    norm = gradient.source.norm
    if norm is None:
        rule = "the source of a gradient must have a norm, got none"
        raise ValueError(f"{rule}; leave out a source without one")
    return tf.stack([norm.scale, norm.shift, norm.floor, gradient.a, gradient.b, gradient.c], 1)

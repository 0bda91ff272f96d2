"""Native operations of a 3D U-Net: convolutions, pools, projections with norm and ReLU formed on
load; their gradients.

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
from pathlib import Path
from typing import Any, List, NamedTuple, Optional, Sequence

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from models.native.library import does_not_load, native_operations
from models.native.shared import KIND_CODES, WITH_SUMS
from models.strides import EVERY_AXIS


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


class Made(NamedTuple):
    """What an operation makes; what its kind does not make is empty.

    Of the gradient g of a map's values it makes two sums, (N, C): of g where scale * raw + shift >
    floor, and of that times (raw - mean) * rstd. Without a norm both are meaningless. Of a raw sum
    they are its mean and variance."""

    map: tf.Tensor
    sum1: tf.Tensor
    sum2: tf.Tensor
    filter_gradient: tf.Tensor  # the gradient
    bias_gradient: tf.Tensor


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
) -> Made:
    """The raw sum (batch, x, y, z, out), plus `add`. Two sources count as concatenated."""
    maps = [source.raw for source in sources]
    made = (*maps[0].shape[:4], filters.shape[4])
    return _run("convolve", maps, _given(add), filters, None, _norms(sources), made=made)


def input_gradient(gradient: Gradient, filters: tf.Tensor, below: Optional[Source] = None) -> Made:
    """The gradient of the convolved map, (batch, x, y, z, in), whose norm is that of `below`. For
    concatenated maps call it with each map's part of the filters."""
    others = [source.raw for source in _given(below, gradient.source) if source.norm]
    made = (*gradient.map.shape[:4], filters.shape[3])
    floats = (filters, None, _through(gradient), _norms(_given(below)))
    return _run("input_gradient", [gradient.map], others, *floats, made=made)


def filter_gradient(sources: Sequence[Source], gradient: Gradient) -> tf.Tensor:
    """The gradient of the filters, (3, 3, 3, in, out)."""
    maps = [source.raw for source in sources]
    others = [gradient.map]
    if gradient.source:
        others.append(gradient.source.raw)
    floats = (None, None, _norms(sources), _through(gradient))
    result = _run("filter_gradient", maps, others, *floats).filter_gradient
    result.set_shape((3, 3, 3, sum(map_.shape[-1] for map_ in maps), gradient.map.shape[-1]))
    return result


# --- Others ---


def operate(
    kind: str,
    source: Source,
    others: Sequence[tf.Tensor] = (),
    filters: Any = None,
    bias: Optional[tf.Tensor] = None,
    strides: Sequence[int] = EVERY_AXIS,
) -> Made:
    """An operation on one map, of a kind of models/program.py:

    max_pool            the largest value of every 2 x 2 x 2 voxels, or of fewer as `strides` say
    max_pool_gradient   of others (gradient, add): at the first of the largest, plus `add`
    up_convolve         a transposed convolution of filters (*strides, out, in)
    up_input_gradient, up_filter_gradient    of others (gradient,)
    project             a 1 x 1 x 1 convolution with a bias, plus others (add,) if there
    project_gradient    of others (gradient,), or plus the second; and of the filters and the bias
    project_sums        the same without the map
    residual_sum        max(value + term, 0) of others (term,)
    residual_gradient   of others (sum, gradient): where the sum is positive
    """
    batch, *grid, channels = source.raw.shape
    if kind == "max_pool":
        grid = [side and side // stride for side, stride in zip(grid, strides)]
    elif kind == "up_convolve":
        grid = [side and side * stride for side, stride in zip(grid, strides)]
        channels = filters.shape[3]
    elif kind == "project":
        channels = filters.shape[4]
    floats = (filters, bias, _norms([source]))
    made_shape = (batch, *grid, channels)
    made = _run(kind, [source.raw], others, *floats, made=made_shape, strides=strides)
    if kind == "up_filter_gradient":
        made.filter_gradient.set_shape((*strides, others[0].shape[-1], channels))
    return made


def to_raw(grad: Gradient, filters: Optional[tf.Tensor] = None) -> Gradient:
    """The gradient of a raw map, formed as a map of its own; with filters, of a source whose values
    were projected: `grad.map` is the gradient of the projection."""
    if grad.source is None:
        raise ValueError(
            "a gradient must have a source to be formed of, got none; leave it as it is"
        )
    kind = "to_raw" if filters is None else "project_to_raw"
    raw = grad.source.raw
    return Gradient(
        _run(kind, [raw], [grad.map], filters, None, _through(grad), made=raw.shape).map
    )


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


def _run(
    kind: str,
    maps: Sequence[tf.Tensor],
    others: Sequence[tf.Tensor],
    *floats: Optional[tf.Tensor],
    made: Sequence[Optional[int]] = (),
    strides: Sequence[int] = EVERY_AXIS,
) -> Made:
    """`floats` are filters, bias, coefficients and other coefficients, if any; `made` is the shape
    of the map, or of the map that has the sums. `strides` are between two grids."""
    absent = tf.zeros((0,))
    inputs = [absent if array is None else array for array in floats]
    inputs += [absent] * (4 - len(inputs))
    map_, sums, filter_gradient, bias_gradient = _module().cpu_operation(
        *inputs, list(maps), list(others), kind=KIND_CODES[kind], strides=list(strides)
    )
    if made and kind not in ("project_sums", "up_filter_gradient"):
        map_.set_shape(made)
    if kind in ("project_gradient", "project_sums"):
        filter_gradient.set_shape(inputs[0].shape)
        bias_gradient.set_shape(inputs[0].shape[4:])
    if kind not in WITH_SUMS:
        return Made(map_, sums, sums, filter_gradient, bias_gradient)
    sums.set_shape((made[0], 2, made[4]))
    sum1, sum2 = tf.unstack(sums, 2, 1)
    return Made(map_, sum1, sum2, filter_gradient, bias_gradient)


@tf.RegisterGradient("CpuOperation")
def _refuse_gradient(*_: Any) -> None:
    """A training step does not come here: models/step.py has gradients by native operations."""
    rule = "gradients must be first ones, and in a tf.function of training=True, got others"
    todo = "take those of its layers, tf.keras.Model(model.input, model.output)"
    raise NotImplementedError(f"{rule}; {todo}")


def _given(*values: Any) -> List[Any]:
    """Those of some values that are there."""
    return [value for value in values if value is not None]


def _module() -> Any:
    module = _loaded()
    if module is None:
        raise RuntimeError(f"native operations must load here, got none: {native_operations().why}")
    return module


@tf.autograph.experimental.do_not_convert
def _loaded() -> Optional[Any]:
    """TensorFlow's module of the operations; None if they are not built or do not run here."""
    native = native_operations()
    return _module_of(native.tf_ops) if native.tf_ops else None


@functools.cache
def _module_of(tf_ops: Path) -> Optional[Any]:
    """TensorFlow's module of a library; None, with a warning, for one that this TensorFlow does not
    take."""
    try:
        return tf.load_op_library(str(tf_ops))
    except (OSError, tf.errors.OpError) as error:
        reason = str(error).strip().splitlines()[0]
        why = f"TensorFlow {tf.__version__} does not load them: {reason}"
        print(f"warning: native operations are left out: {why}", file=sys.stderr)
        does_not_load(why)
        return None


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

"""A U-Net's forward and backward pass, computed operation by operation as models/program.py lists
them, by native operations (models/native/operations.py).

Each operation waits for the one before, so the maps in memory at a time are known, and a map whose
last reader has its shape is written over.
"""

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import tensorflow as tf

from models.config import EPSILON
from models.layers import NormActivation, grid_sum
from models.native import operations
from models.native.operations import Gradient, Made, Norm, Source
from models.network import network_program
from models.plain import PLAIN
from models.program import Kind, Op, Value, ValueKind, needed


class Pass:
    """One pass over the weights of a model of `build_unet3d`, in training or not. `values` replace
    its variables, by their names.

    Of the program's values a map is a `Source`, the gradient of a map's values a `Made` with its
    sums, and that of a raw sum, formed or not, a `Gradient`; the others are tensors.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        training: bool,
        values: Optional[Dict[str, tf.Tensor]] = None,
    ):
        self.unet = model.unet
        self.layer = model.get_layer
        self.training = training
        self.program = network_program(model.unet)
        self.gradients: Dict[str, tf.Tensor] = {}  # of weights, by the variables' names
        self._replaced = values or {}
        self._made: Dict[Value, Any] = {}
        self._last: List[tf.Tensor] = []

    # Nothing in it branches on a tensor, and to convert it takes seconds.
    @tf.autograph.experimental.do_not_convert
    def forward(self, image: tf.Tensor) -> List[tf.Tensor]:
        """Logits of each head, the finest first, of an image (N, X, Y, Z, C)."""
        sides = image.shape[1:4]
        if sides.is_fully_defined():
            self.unet.check_shape(tuple(sides))
        self._made[self.program.image] = Source(image)
        self._run(self.program.forward)
        return [self._made[head].raw for head in self.program.logits]

    def backward(self, slopes: Sequence[tf.Tensor]) -> Dict[str, tf.Tensor]:
        """Gradients of the weights, by the variables' names, from those of the logits of each
        head."""
        self.gradients = {}  # a tape may ask twice
        self._made.update(zip(self.program.slopes, map(Gradient, slopes)))
        self._run(self.program.backward)
        return self.gradients

    def image_gradient(self) -> tf.Tensor:
        """The gradient of the image, (N, X, Y, Z, C), after `backward`. Nothing waits for it: a
        graph leaves it out unless it is asked for."""
        self._run(self.program.to_image)
        return self._made[self.program.to_image[-1].made].map

    def _run(self, ops: Sequence[Op]) -> None:
        for op in ops:
            made = COMPUTE[op.kind](self, op)
            if op.kind is Kind.PLAIN_GRADIENT:
                self._made.update(zip(op.makes, made))
            else:
                self._made[op.made] = made

    # --- What the operations below are made of ---

    def __getitem__(self, value: Value) -> Any:
        """What was made of a value of the program."""
        if value.kind is ValueKind.KERNEL and value not in self._made:
            return self.value(self.layer(value.layer).kernel)
        return self._made[value]

    def maps(self, op: Op) -> List[Source]:
        return [self[each] for each in op.maps]

    def kernel(self, op: Op) -> tf.Tensor:
        return self[needed(op.kernel)]

    def gradient(self, op: Op) -> Any:
        """What it computes with, a `Made` or `Gradient`."""
        return self[needed(op.gradient)]

    def add(self, op: Op) -> Optional[tf.Tensor]:
        """The map that is added to the result, raw or a gradient, None without."""
        if op.add is None:
            return None
        made = self[op.add]
        return made.raw if isinstance(made, Source) else made.map

    def in_turn(self, operation: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """The outputs of an operation, computed after the one before it."""
        with tf.control_dependencies(self._last):
            outputs = operation(*arguments, **more)
        self._last = tf.nest.flatten(outputs)[:1]
        return outputs

    def value(self, variable: tf.Variable) -> tf.Tensor:
        return self._replaced.get(variable.name, variable)

    def moves(self, layer: NormActivation) -> bool:
        """Whether a norm is a batch norm that takes the batch's statistics."""
        return layer.norm == "batch" and self.training and layer.trainable

    def keep_kernel_gradient(self, op: Op, gradient: tf.Tensor) -> tf.Tensor:
        self.gradients[self.layer(op.layer).kernel.name] = gradient
        return gradient


# --- 3x3x3 convolutions ---


def _convolve(run: Pass, op: Op) -> Source:
    terms = (run.kernel(op), run.add(op))
    made = run.in_turn(operations.convolve, run.maps(op), *terms)
    if not op.norm:
        return Source(made.map)
    return Source(made.map, _norm(run, run.layer(op.norm), made, op.again))


def _input_gradient(run: Pass, op: Op) -> Made:
    return run.in_turn(operations.input_gradient, run.gradient(op), run.kernel(op), *run.maps(op))


def _filter_gradient(run: Pass, op: Op) -> tf.Tensor:
    gradient = run.in_turn(operations.filter_gradient, run.maps(op), run.gradient(op))
    return run.keep_kernel_gradient(op, gradient)


# --- Between the grids of two levels, and voxel by voxel ---


def _operate(run: Pass, op: Op, **more: Any) -> Made:
    """What is made of one map, the gradient or the map that is added, and a kernel."""
    source, *maps = run.maps(op)
    others = [each.raw for each in maps]
    if op.gradient is not None:
        others.append(run.gradient(op).map)
    if op.add is not None:
        others.append(run.add(op))
    kernel = None if op.kernel is None else run.kernel(op)
    more["strides"] = op.strides
    return run.in_turn(operations.operate, op.kind.value, source, others, kernel, **more)


def _map(run: Pass, op: Op) -> Source:
    return Source(_operate(run, op).map)


def _up_filter_gradient(run: Pass, op: Op) -> tf.Tensor:
    return _operate(run, op).filter_gradient


def _project(run: Pass, op: Op) -> Source:
    layer = run.layer(op.layer)
    bias = tf.zeros(layer.filters)
    if layer.bias is not None:
        bias = run.value(layer.bias)
    return Source(_operate(run, op, bias=bias).map)


def _project_gradient(run: Pass, op: Op) -> Made:
    layer = run.layer(op.layer)
    made = _operate(run, op)
    gradient = made.filter_gradient
    first, past = op.span
    rows = layer.kernel.shape[3]
    if past - first < rows:
        around = ((0, 0), (0, 0), (0, 0), (first, rows - past), (0, 0))
        gradient = run.in_turn(tf.pad, gradient, around)
    known = run.gradients.get(layer.kernel.name)
    if known is not None:
        gradient = run.in_turn(tf.add, known, gradient)
    run.keep_kernel_gradient(op, gradient)
    if layer.bias is not None:
        run.gradients[layer.bias.name] = made.bias_gradient
    return made


def _project_sums(run: Pass, op: Op) -> Made:
    layer = run.layer(op.layer)
    made = _operate(run, op)
    run.keep_kernel_gradient(op, made.filter_gradient)
    run.gradients[layer.bias.name] = made.bias_gradient
    return made._replace(map=run.gradient(op).map)


def _to_raw(run: Pass, op: Op) -> Gradient:
    kernel = None if op.kernel is None else run.kernel(op)
    return run.in_turn(operations.to_raw, run.gradient(op), kernel)


def _add(run: Pass, op: Op) -> Made:
    """Of gradients, with their sums."""
    first = run.gradient(op)
    pairs = zip(first[:3], run[needed(op.add)][:3])
    return Made(*(run.in_turn(tf.add, *pair) for pair in pairs), *first[3:])


# --- By TensorFlow ---


def _values(source: Source) -> tf.Tensor:
    """The values of a map, float32."""
    raw = tf.cast(source.raw, tf.float32)
    if source.norm is None:
        return raw
    scale, shift, _, _, floor = map(_over_grid, source.norm)
    return tf.maximum(scale * raw + shift, floor)


def _values_of(run: Pass, op: Op) -> List[tf.Tensor]:
    """Of each map of a plain operation."""
    if PLAIN[op.plain].in_float32:
        return list(map(_values, run.maps(op)))
    return [source.raw for source in run.maps(op)]


def _over_grid(numbers: tf.Tensor) -> tf.Tensor:
    """(N, C) as (N, 1, 1, 1, C)."""
    return numbers[:, None, None, None]


def _plain(run: Pass, op: Op) -> Source:
    layer = run.layer(op.layer)

    def compute() -> tf.Tensor:
        weights = {name: run.value(each) for name, each in layer.by_name.items()}
        made = layer.compute(_values_of(run, op), weights)
        return tf.cast(made, run.unet.dtype)

    return Source(run.in_turn(compute))


def _plain_gradient(run: Pass, op: Op) -> List[Made]:
    """Of the values of each map, and of the weights."""
    layer = run.layer(op.layer)
    grad = run.gradient(op).map
    if PLAIN[op.plain].in_float32:
        grad = tf.cast(grad, tf.float32)

    def compute() -> Tuple[List[Made], Dict[str, tf.Tensor]]:
        weights = {
            name: tf.convert_to_tensor(run.value(each)) for name, each in layer.by_name.items()
        }
        values = _values_of(run, op)
        with tf.GradientTape() as tape:
            tape.watch([values, weights])
            made = layer.compute(values, weights)
        value_gradients, weight_gradients = tape.gradient(
            made, [values, weights], grad, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        return list(map(_with_sums, run.maps(op), value_gradients)), weight_gradients

    made, weight_gradients = run.in_turn(compute)
    for name, gradient in weight_gradients.items():
        run.gradients[layer.by_name[name].name] = gradient
    return made


def _with_sums(source: Source, gradient: tf.Tensor) -> Made:
    """The gradient of a map's values with the sums that its norm needs."""
    sum1 = tf.zeros((tf.shape(gradient)[0], gradient.shape[-1]))
    sum2 = sum1
    if source.norm is not None:
        raw = tf.cast(source.raw, tf.float32)
        scale, shift, mean, rstd, floor = map(_over_grid, source.norm)
        passed = tf.where(scale * raw + shift > floor, gradient, 0.0)
        sum1 = grid_sum(passed)
        sum2 = grid_sum(passed * (raw - mean) * rstd)
    empty = tf.zeros((0,))
    return Made(tf.cast(gradient, source.raw.dtype), sum1, sum2, empty, empty)


# --- Norms ---


def _norm(
    run: Pass,
    layer: NormActivation,
    made: Made,
    again: bool,
) -> Norm:
    """The norm of a raw sum that is made with its mean and variance of each sample, (N, C); `again`
    moves no moving statistics."""
    raw, mean, variance, *_ = made
    ones = tf.ones_like(mean)
    floor = (0.0 if layer.activate else -float("inf")) * ones
    if layer.norm == "none":
        return Norm(ones, run.value(layer.bias) * ones, 0 * ones, ones, floor)
    if run.moves(layer):
        sample_mean = mean
        mean = tf.reduce_mean(mean, 0, keepdims=True)
        between = tf.math.squared_difference(sample_mean, mean)
        variance = tf.reduce_mean(variance + between, 0, keepdims=True)
        if not again:
            elements = _voxels(raw) * tf.cast(tf.shape(raw)[0], tf.float32)
            layer.move(mean[0], variance[0] * (elements / (elements - 1)))
    elif layer.norm == "batch":
        mean = tf.convert_to_tensor(layer.moving_mean)
        variance = tf.convert_to_tensor(layer.moving_variance)
    if layer.norm == "batch":  # one of all samples
        mean = mean * ones
        variance = variance * ones
    rstd = tf.math.rsqrt(variance + EPSILON)
    scale = run.value(layer.gamma) * rstd
    return Norm(scale, run.value(layer.beta) - mean * scale, mean, rstd, floor)


def _norm_gradient(run: Pass, op: Op) -> Gradient:
    """The gradient of a raw sum, to be formed on reading, from that of the norm's values (Ioffe and
    Szegedy 2015)."""
    (source,) = run.maps(op)
    grad: Made = run.gradient(op)
    layer = run.layer(op.layer)
    norm = source.norm
    if norm is None:
        rule = f"the map that {op.layer} reads must have a norm"
        raise ValueError(f"{rule}, got none; name it at its convolution")
    scale: tf.Tensor = norm.scale
    if layer.norm == "none":
        run.gradients[layer.bias.name] = tf.reduce_sum(grad.sum1, 0)
    else:
        run.gradients[layer.gamma.name] = tf.reduce_sum(grad.sum2, 0)
        run.gradients[layer.beta.name] = tf.reduce_sum(grad.sum1, 0)
    if layer.norm != "instance" and not run.moves(layer):
        return Gradient(grad.map, source, scale, 0 * scale, 0 * scale)
    mean1 = grad.sum1 / _voxels(source.raw)
    mean2 = grad.sum2 / _voxels(source.raw)
    if layer.norm == "batch":
        mean1 = tf.reduce_mean(mean1, 0, keepdims=True)
        mean2 = tf.reduce_mean(mean2, 0, keepdims=True)
    raw_factor = -scale * norm.rstd * mean2
    constant = -scale * mean1 - raw_factor * norm.mean
    return Gradient(grad.map, source, scale, raw_factor, constant)


def _voxels(raw: tf.Tensor) -> tf.Tensor:
    """Voxels of a sample, float32."""
    sides = tf.shape(raw, tf.int64)[1:4]
    return tf.cast(tf.reduce_prod(sides), tf.float32)


# --- Kernels ---


def _kernel_rows(run: Pass, op: Op) -> tf.Tensor:
    return run.in_turn(lambda: _slice(run.kernel(op), 3, op.span))


def _kernel_taps(run: Pass, op: Op) -> tf.Tensor:
    """Nearest neighbour and a 1x1x1 kernel commute: equal taps, such as (2, 2, 2, out, in)."""
    kernel = run.kernel(op)
    if op.span[1] - op.span[0] < kernel.shape[4]:
        kernel = run.in_turn(lambda: _slice(run.kernel(op), 4, op.span))
    times = (*op.strides, 1, 1)
    return run.in_turn(lambda: tf.tile(tf.transpose(kernel, (0, 1, 2, 4, 3)), times))


def _slice(kernel: tf.Tensor, axis: int, span: Sequence[int]) -> tf.Tensor:
    begin = [0] * 5
    size = list(kernel.shape)
    begin[axis] = span[0]
    size[axis] = span[1] - span[0]
    return tf.slice(kernel, begin, size)


def _join_gradients(run: Pass, op: Op) -> tf.Tensor:
    """The gradient of a whole kernel, from those of its parts; of an up-sampled 1x1x1 kernel that
    of all taps together."""
    parts = [run[each] for each in op.parts]
    whole = parts[0]
    if len(parts) > 1:
        whole = run.in_turn(tf.concat, parts, 3)
    if run.layer(op.layer).kernel.shape[:3] == (1, 1, 1):
        taps_sum = tf.reduce_sum(whole, (0, 1, 2), keepdims=True)
        whole = tf.transpose(taps_sum, (0, 1, 2, 4, 3))
    return run.keep_kernel_gradient(op, whole)


COMPUTE: Dict[Kind, Callable[[Pass, Op], Any]] = {
    Kind.CONVOLVE: _convolve,
    Kind.INPUT_GRADIENT: _input_gradient,
    Kind.FILTER_GRADIENT: _filter_gradient,
    Kind.MAX_POOL: _map,
    Kind.MAX_POOL_GRADIENT: _operate,
    Kind.UP_CONVOLVE: _map,
    Kind.UP_INPUT_GRADIENT: _operate,
    Kind.UP_FILTER_GRADIENT: _up_filter_gradient,
    Kind.PROJECT: _project,
    Kind.PROJECT_GRADIENT: _project_gradient,
    Kind.PROJECT_SUMS: _project_sums,
    Kind.PROJECT_TO_RAW: _to_raw,
    Kind.RESIDUAL_SUM: _map,
    Kind.RESIDUAL_GRADIENT: _operate,
    Kind.PLAIN: _plain,
    Kind.PLAIN_GRADIENT: _plain_gradient,
    Kind.NORM_GRADIENT: _norm_gradient,
    Kind.TO_RAW: _to_raw,
    Kind.ADD: _add,
    Kind.KERNEL_ROWS: _kernel_rows,
    Kind.KERNEL_TAPS: _kernel_taps,
    Kind.JOIN_GRADIENTS: _join_gradients,
}
"""Kind -> what the first value is that an operation makes. The loss has a table of its own, in
models/supervision.py."""

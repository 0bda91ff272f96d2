"""The layers of a U-Net as plain ones of Keras."""

import itertools
import zlib
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import tensorflow as tf

from models.config import DTYPES, EPSILON, MOMENTUM, UNetConfig
from models.layer_plan import NORM_KINDS, LayerKind, LayerOp
from models.plain import PLAIN

PRIOR_LOGIT = -2.944
"""First bias of the head: a sigmoid of 0.05 (Lin et al. 2017), as tumour is a few per cent of a
brain. Dice WT/TC/ET of one real glioma after 40 steps: 0.96/0.93/0.75, from 0.5 0.88/0.84/0.71."""


def plain_layer(config: UNetConfig, op: LayerOp) -> tf.keras.layers.Layer:
    """The Keras layer of a layer of the plan. Only heads have a bias: the layers after the others
    normalise or add one. Logits are of the compute dtype, as all else: the loss casts them to
    float32."""
    native: Dict[str, Any] = {"name": op.name, "dtype": DTYPES[config.dtype].keras_policy}
    if op.kind in NORM_KINDS:
        has_relu = op.kind is LayerKind.NORM_ACT
        return NormActivation(config.norm, has_relu, **native)
    plain: Dict[LayerKind, Callable[[], Any]] = {
        LayerKind.POOL: lambda: FirstMaxPool(op.strides, **native),
        LayerKind.UPSAMPLE: lambda: tf.keras.layers.UpSampling3D(op.strides, **native),
        LayerKind.CONCAT: lambda: tf.keras.layers.Concatenate(**native),
        LayerKind.ACT: lambda: tf.keras.layers.ReLU(**native),
    }
    if op.kind in plain:
        return plain[op.kind]()
    width = op.shape[3]
    if op.kind is LayerKind.PLAIN:
        return PlainLayer(op, config.seed, **native)
    native["kernel_initializer"] = initial_kernel(config.seed, op.name)
    if op.kind is LayerKind.SHORTCUT:
        return ShortcutSum(width, **native)
    if op.kind is LayerKind.UP_CONV:
        native.update(strides=op.strides, use_bias=False)
        return tf.keras.layers.Conv3DTranspose(width, op.kernel, **native)
    native.update(padding="same")
    if op.shape[0] == 2 and op.kernel[0] == 3:
        native["dtype"] = "float32"  # oneDNN's filter gradient is wrong in bfloat16, or NaN
    if op.kind is LayerKind.HEAD:
        bias = tf.keras.initializers.Constant(PRIOR_LOGIT)
        return Head(width, op.kernel, bias_initializer=bias, **native)
    return tf.keras.layers.Conv3D(width, op.kernel, use_bias=False, **native)


def one_or_all(tensors: List[Any]) -> Any:
    """Tensors as Keras takes and gives them: several in a list, and one by itself."""
    return tensors if len(tensors) > 1 else tensors[0]


class NormActivation(tf.keras.layers.Layer):
    """Instance, batch or no norm over (N, X, Y, Z, C), then ReLU unless `activate` is false. Same
    shape and dtype out. Without a norm it adds a bias, so that convolutions never need one.
    Statistics, scale and shift are float32."""

    def __init__(self, norm: str = "instance", activate: bool = True, **kwargs: Any):
        super().__init__(**kwargs)
        self.norm = norm
        self.activate = activate

    def get_config(self) -> Dict[str, Any]:
        return {**super().get_config(), "norm": self.norm, "activate": self.activate}

    def build(self, input_shape: tf.TensorShape) -> None:
        single: Dict[str, Any] = {"shape": (input_shape[-1],), "dtype": "float32"}
        single["experimental_autocast"] = False
        if self.norm == "none":
            self.bias = self.add_weight(name="bias", initializer="zeros", **single)
        else:
            self.gamma = self.add_weight(name="gamma", initializer="ones", **single)
            self.beta = self.add_weight(name="beta", initializer="zeros", **single)
        if self.norm == "batch":
            more = {"trainable": False, **single}
            self.moving_mean = self.add_weight(name="moving_mean", initializer="zeros", **more)
            self.moving_variance = self.add_weight(
                name="moving_variance", initializer="ones", **more
            )
        super().build(input_shape)

    # Nothing in it branches on a tensor, and to convert it takes seconds.
    @tf.autograph.experimental.do_not_convert
    def call(self, x: tf.Tensor, training: Optional[bool] = None) -> tf.Tensor:
        if self.norm == "none":
            y = _with_bias(x, self.bias)
        elif self.norm == "instance":
            y, _, _ = _normed(x, self.gamma, self.beta, axes=(3, 2, 1))
        elif training and self.trainable:
            y, mean, variance = _normed(x, self.gamma, self.beta, axes=(3, 2, 1, 0))
            count = _count(x) / x.shape[-1]
            self.move(mean[0, 0, 0, 0], variance[0, 0, 0, 0] * (count / (count - 1)))
        else:
            scale = self.gamma * tf.math.rsqrt(self.moving_variance + EPSILON)
            y = tf.cast(x, tf.float32) * scale + (self.beta - self.moving_mean * scale)
            y = tf.cast(y, x.dtype)
        if self.activate:
            y = tf.nn.relu(y)
        return y

    def move(self, mean: tf.Tensor, variance: tf.Tensor) -> None:
        """Move batch norm's statistics towards those of a batch, (C,), as training does."""
        for moving, moment in ((self.moving_mean, mean), (self.moving_variance, variance)):
            moving.assign_sub((moving - moment) * (1 - MOMENTUM))


def _normed(
    x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, axes: Sequence[int]
) -> Tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """A norm over some axes of (N, X, Y, Z, C), by its definition; mean and variance, which have no
    gradient.

    TensorFlow's fused norm adds up a map in float32 with one sum for each channel. An error of its
    gradient's mean is that of all voxels alike: where gradients of the layers before nearly
    cancel, as those of a shift before another norm do, they were off by more than themselves."""

    @tf.custom_gradient
    def computed(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> Tuple[Any, Any]:
        values = tf.cast(x, tf.float32)
        mean = _mean(values, axes)
        variance = _mean(tf.math.squared_difference(values, mean), axes)
        rstd = tf.math.rsqrt(variance + EPSILON)
        scale = gamma * rstd
        y = tf.cast(values * scale + (beta - mean * scale), x.dtype)

        def gradient(upstream: tf.Tensor, *_: Any) -> Tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            with tf.control_dependencies([upstream]):  # else maps are made in the forward pass
                values = tf.cast(tf.identity(x), tf.float32)
            grad = tf.cast(upstream, tf.float32)
            mean1 = _mean(grad, axes)
            mean2 = _mean(grad * (values - mean), axes) * rstd
            x_factor = -scale * rstd * mean2
            grad_x = grad * scale + (values * x_factor - (scale * mean1 + x_factor * mean))
            count = _count(x) / _count(mean)
            others = (0, 1, 2, 3)
            grad_gamma = tf.reduce_sum(mean2, others) * count
            grad_beta = tf.reduce_sum(mean1, others) * count
            return tf.cast(grad_x, x.dtype), grad_gamma, grad_beta

        return (y, mean, variance), gradient

    return computed(x, tf.convert_to_tensor(gamma), tf.convert_to_tensor(beta))


def _with_bias(x: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    """A map plus a number for each channel, whose gradient is added up as that of a norm."""

    @tf.custom_gradient
    def computed(x: tf.Tensor, bias: tf.Tensor) -> Tuple[tf.Tensor, Any]:
        def gradient(grad: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
            mean = _mean(tf.cast(grad, tf.float32), (3, 2, 1, 0))
            return grad, mean[0, 0, 0, 0] * (_count(grad) / _count(mean))

        return x + tf.cast(bias, x.dtype), gradient

    return computed(x, tf.convert_to_tensor(bias))


def grid_sum(map_: tf.Tensor) -> tf.Tensor:
    """(N, C) of (N, X, Y, Z, C), in the same way."""
    for _ in range(3):
        map_ = tf.reduce_sum(map_, -2)
    return map_


def _count(map_: tf.Tensor) -> tf.Tensor:
    """Its values, float32."""
    return tf.cast(tf.size(map_, tf.int64), tf.float32)


def _mean(map_: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
    """Over one axis after the other, so that no sum has more terms than an axis has voxels."""
    for axis in axes:
        map_ = tf.reduce_mean(map_, axis, keepdims=True)
    return map_


class FirstMaxPool(tf.keras.layers.MaxPool3D):
    """A max pool whose gradient goes to the first of a window's largest values. TensorFlow's goes
    to all of them, in full to each: to every voxel of what surrounds a brain."""

    @tf.autograph.experimental.do_not_convert
    def call(self, x: tf.Tensor, training: Optional[bool] = None) -> tf.Tensor:
        pool = super().call
        strides = self.strides  # TensorFlow keeps a gradient's function, and would keep the layer

        @tf.custom_gradient
        def computed(x: tf.Tensor) -> Tuple[tf.Tensor, Any]:
            largest = pool(x)
            return largest, lambda grad: _to_first(x, largest, grad, strides)

        return computed(x)


def _to_first(
    x: tf.Tensor, largest: tf.Tensor, grad: tf.Tensor, strides: Sequence[int]
) -> tf.Tensor:
    """The gradient of a map, from that of the largest values of its windows."""
    with tf.control_dependencies([grad]):  # else maps are made in the forward pass
        x = tf.identity(x)
    parts = []  # of each place in a window
    is_open = tf.ones_like(largest, tf.bool)
    for place in itertools.product(*map(range, strides)):
        steps = [slice(first, None, stride) for first, stride in zip(place, strides)]
        is_largest = x[(slice(None), *steps)] == largest
        parts.append(tf.where(is_open & is_largest, grad, tf.zeros_like(grad)))
        is_open = is_open & ~is_largest
    for axis in (3, 2, 1):  # the last place changes first
        stride = strides[axis - 1]
        shape = tf.unstack(tf.shape(parts[0]))
        shape[axis] *= stride
        groups = [parts[first : first + stride] for first in range(0, len(parts), stride)]
        parts = [tf.reshape(tf.stack(group, axis + 1), shape) for group in groups]
    return parts[0]


class PlainLayer(tf.keras.layers.Layer):
    """An operation of models/plain.py. Takes one map, or a list."""

    def __init__(self, op: LayerOp, seed: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.compute = PLAIN[op.plain].compute
        self.in_float32 = PLAIN[op.plain].in_float32
        self.shapes = op.weights
        self.seed = seed
        self.by_name: Dict[str, tf.Variable] = {}

    def build(self, input_shape: Any) -> None:
        single: Dict[str, Any] = {"dtype": "float32", "experimental_autocast": False}
        for name, shape in self.shapes:
            drawn: Any = "zeros"
            if not name.endswith("bias"):
                drawn = initial_kernel(self.seed, f"{self.name}/{name}")
            self.by_name[name] = self.add_weight(name, shape, initializer=drawn, **single)
        super().build(input_shape)

    @tf.autograph.experimental.do_not_convert
    def call(self, inputs: Any, training: Optional[bool] = None) -> tf.Tensor:
        values = tf.nest.flatten(inputs)
        if self.in_float32:
            values = [tf.cast(each, tf.float32) for each in values]
        return tf.cast(self.compute(values, self.by_name), self.compute_dtype)


class Head(tf.keras.layers.Conv3D):
    """A convolution and a bias."""

    @tf.autograph.experimental.do_not_convert
    def call(self, inputs: tf.Tensor, training: Optional[bool] = None) -> tf.Tensor:
        made = self.convolution_op(inputs, self.kernel)
        return _with_bias(made, self.bias)


class ShortcutSum(tf.keras.layers.Conv3D):
    """A residual block's sum: its last maps (N, X, Y, Z, filters) plus a 1x1x1 convolution of its
    input, without bias. Takes [maps, entry]."""

    def __init__(self, filters: int, **kwargs: Any):
        super().__init__(filters, 1, use_bias=False, **kwargs)
        self.input_spec = None  # that of one map

    def build(self, input_shape: Sequence[tf.TensorShape]) -> None:
        super().build(input_shape[1])
        self.input_spec = None

    def call(self, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        maps, entry = inputs
        return maps + super().call(entry)


def initial_kernel(seed: int, name: str) -> tf.keras.initializers.Initializer:
    """Glorot's uniform, from the network's seed and the layer's name: no layer depends on those
    built before. On one real glioma Glorot's smaller kernels learn in 20 steps as much as He's in
    30."""
    drawn = zlib.crc32(f"{seed}/{name}".encode()) & 0x7FFFFFFF
    return tf.keras.initializers.GlorotUniform(seed=drawn)

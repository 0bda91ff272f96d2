"""The network of a run in the two formats: a SavedModel of TensorFlow, and an ONNX graph written
from the layer plan.

A SavedModel is readable by TensorFlow alone, without this project or Keras. The ONNX graph needs no
converter: tf2onnx pins a protobuf older than TensorFlow's. ONNX has channels first, so the image is
transposed on the way in and the answer on the way out."""

from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import numpy as np
import tensorflow as tf

from cpu3d.data.normalise import Kind, Normalisation
from cpu3d.errors import InputError
from cpu3d.inference.export.contract import OUTPUT, SIDES, inputs_of
from cpu3d.settings import RunConfig
from cpu3d.util.atomic import write_bytes
from models.config import EPSILON
from models.layer_plan import NORM_KINDS, LayerKind, LayerOp, layer_plan
from models.network import network_program
from models.unet3d import build_unet3d, finest
from models.weights import network_weights

# Of 2022: every onnxruntime from 1.12 on reads them.
OPSET = 17
IR_VERSION = 8


# As in models/unet3d.py: AutoGraph would write a file, and warn if it has no room.
@tf.autograph.experimental.do_not_convert
def write_saved_model(config: RunConfig, weights: Sequence[np.ndarray], folder: Path) -> None:
    """Write the network of an `exported_config` with a run's weights, in Keras' order, to `folder`,
    with the one signature "serving_default". Raises OSError for a full disk."""
    model = build_unet3d(config.unet, batch_size=1)
    model.set_weights(weights)
    network = tf.keras.Model(model.input, finest(model.output))  # of plain layers

    def answer(image, mean=None, std=None):
        normalised = _normalised_tensor(config, image, mean, std)
        return {OUTPUT: network(normalised[None], training=False)[0]}

    module = tf.Module()
    module.weights = network.weights  # not the Keras model, whose layers would be saved as well
    signature = []
    for name, spec in inputs_of(config).items():
        shape = [None if side in SIDES else side for side in spec["shape"]]
        signature.append(tf.TensorSpec(shape, spec["dtype"], name=name))
    module.answer = tf.function(answer, signature, autograph=False)
    # Gradients would be saved as well, twice the graph, and nothing is trained any more.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    try:
        tf.saved_model.save(module, str(folder), {"serving_default": module.answer}, options)
    except tf.errors.ResourceExhaustedError as error:
        raise OSError(f"{folder} must have room, got {error.message}") from None


def write_onnx(config: RunConfig, weights: Sequence[np.ndarray], path: Path) -> None:
    """Write the network of an `exported_config` with a run's weights, in Keras' order, to `path`.
    Names, shapes and dtypes are checked to fit together."""
    import onnx

    write_bytes(path, onnx_model(config, weights).SerializeToString())
    onnx.checker.check_model(str(path), full_check=True)


def onnx_model(config: RunConfig, weights: Sequence[np.ndarray]) -> Any:
    """The ModelProto of an `exported_config` with weights in Keras' order."""
    import onnx

    graph = _Graph(onnx)
    unet = config.unet
    # {"encoder0_conv1": {"kernel": (3, 3, 3, in, out)}, ...}
    by_layer: Dict[str, Dict[str, np.ndarray]] = {}
    for weight, array in zip(network_weights(unet), weights):
        by_layer.setdefault(weight.layer, {})[weight.name] = array
    channels_first = graph.add("Transpose", [_normalised(graph, config)], perm=[3, 0, 1, 2])
    image = graph.add("Unsqueeze", [channels_first, graph.constant(np.int64([0]))])
    tensors = {}
    for op in layer_plan(unet, unet.divisors):
        if op.kind is LayerKind.INPUT:
            tensors[op.name] = image
        elif op.kind is not LayerKind.HEAD or op.level == 0:  # other heads are for the loss alone
            inputs = [tensors[name] for name in op.inputs]
            tensors[op.name] = _layer(graph, op, unet.norm, inputs, by_layer.get(op.name, {}))
    logits = tensors[network_program(unet).logits[0].name]
    turned = graph.add("Transpose", [logits], perm=[0, 2, 3, 4, 1])
    graph.add("Squeeze", [turned, graph.constant(np.int64([0]))], OUTPUT)
    helper = onnx.helper

    def info(name: str, shape: Sequence[Any]) -> Any:
        return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)

    inputs = [info(name, spec["shape"]) for name, spec in inputs_of(config).items()]
    outputs = [info(OUTPUT, [*SIDES, unet.outputs])]
    whole = helper.make_graph(graph.nodes, "cpu3d", inputs, outputs, graph.constants)
    return helper.make_model(
        whole,
        producer_name="cpu3d",
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET)],
    )


def _windows(config: RunConfig) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How channels are normalised, each (C,): the least and the largest value that is read,
    float32; and bool, whether 0 is a value like others, not background."""
    usual = (Normalisation(Kind.FOREGROUND),) * len(config.channels)
    kinds = config.normalisation_of(config.channels) or usual
    most = float(np.finfo(np.float32).max)  # not infinity, which an operator need not take
    low = [-most if each.low is None else each.low for each in kinds]
    high = [most if each.high is None else each.high for each in kinds]
    has_none = [not each.has_background for each in kinds]
    return np.float32(low), np.float32(high), np.array(has_none)


def _normalised_tensor(config: RunConfig, image, mean: Any = None, std: Any = None):
    """(value - mean) / std of voxels that are not 0, else 0: (X, Y, Z, C) float32. A channel
    without contrast is 0. Statistics are float64, as in a store's records: a sum over millions of
    voxels loses digits in float32. In some channels 0 is a value like others."""
    low, high, has_no_background = _windows(config)
    present = tf.logical_or(tf.not_equal(image, 0), has_no_background)
    image = tf.clip_by_value(image, low, high)
    if mean is None:
        values = tf.cast(image, tf.float64)
        mask = tf.cast(present, tf.float64)
        count = tf.maximum(tf.reduce_sum(mask, (0, 1, 2)), 1)
        mean = tf.reduce_sum(values, (0, 1, 2)) / count
        std = tf.sqrt(tf.reduce_sum(tf.square((values - mean) * mask), (0, 1, 2)) / count)
    mean = tf.cast(mean, tf.float64)
    std = tf.cast(std, tf.float64)
    scale = tf.math.divide_no_nan(tf.ones_like(std), std)
    shift = tf.cast(-mean * scale, tf.float32)
    return tf.where(present, image * tf.cast(scale, tf.float32) + shift, 0.0)


class _Graph:
    """The nodes and constants of an ONNX graph."""

    def __init__(self, onnx: Any):
        self._onnx = onnx
        self.nodes = []
        self.constants = []

    def add(self, kind: str, inputs: Sequence[str], name: str = "", **attributes: Any) -> str:
        """A node of one output, which is named `name`; returns that name."""
        name = name or f"{kind.lower()}_{len(self.nodes)}"
        make_node = self._onnx.helper.make_node
        self.nodes.append(make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, array: np.ndarray, name: str = "") -> str:
        """An initializer; weights have names."""
        name = name or f"constant_{len(self.constants)}"
        self.constants.append(self._onnx.numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def cast(self, tensor: str, dtype: str) -> str:
        return self.add("Cast", [tensor], to=getattr(self._onnx.TensorProto, dtype))


def _normalised(graph: _Graph, config: RunConfig) -> str:
    """The image as by `_normalised_tensor`."""
    zero = graph.constant(np.float64(0))
    unit = graph.constant(np.float64(1))
    background = graph.constant(np.float32(0))
    present = graph.add("Not", [graph.add("Equal", ["image", background])])
    low, high, has_no_background = _windows(config)
    present = graph.add("Or", [present, graph.constant(has_no_background)])
    image = graph.add("Max", ["image", graph.constant(low)])
    image = graph.add("Min", [image, graph.constant(high)])
    if "mean" in inputs_of(config):
        mean = graph.cast("mean", "DOUBLE")
        std = graph.cast("std", "DOUBLE")
    else:
        grid = graph.constant(np.int64([0, 1, 2]))
        values = graph.cast("image", "DOUBLE")
        mask = graph.cast(present, "DOUBLE")
        count = graph.add("Max", [graph.add("ReduceSum", [mask, grid], keepdims=0), unit])
        mean = graph.add("Div", [graph.add("ReduceSum", [values, grid], keepdims=0), count])
        off = graph.add("Mul", [graph.add("Sub", [values, mean]), mask])
        squares = graph.add("ReduceSum", [graph.add("Mul", [off, off]), grid], keepdims=0)
        std = graph.add("Sqrt", [graph.add("Div", [squares, count])])
    has_contrast = graph.add("Greater", [std, zero])
    scale = graph.add("Where", [has_contrast, graph.add("Div", [unit, std]), zero])
    shift = graph.add("Neg", [graph.add("Mul", [mean, scale])])
    scaled = graph.add("Mul", [image, graph.cast(scale, "FLOAT")])
    scores = graph.add("Add", [scaled, graph.cast(shift, "FLOAT")])
    return graph.add("Where", [present, scores, background])


def _layer(
    graph: _Graph, op: LayerOp, norm: str, inputs: List[str], weights: Mapping[str, np.ndarray]
) -> str:
    """The nodes of one layer of the plan; returns its output."""
    if op.name == "average":
        return graph.add("AveragePool", inputs, kernel_shape=op.strides, strides=op.strides)
    if op.name == "interpolate":
        scales = graph.constant(np.float32([1, 1, *op.strides]))
        return graph.add("Resize", [inputs[0], "", scales], mode="linear")
    if op.kind is LayerKind.PLAIN:
        raise InputError(
            f"--format must be savedmodel for layer {op.name}, which only TensorFlow computes, got "
            "onnx; choose it"
        )
    weight = {
        name: graph.constant(array, f"{op.name}/{name}")
        for name, array in weights.items()
        if name != "kernel"
    }
    if "kernel" in weights:
        # (x, y, z, in, out) -> (out, in, x, y, z); a transposed one has (..., out, in) in Keras
        turned = np.transpose(weights["kernel"], (4, 3, 0, 1, 2))
        kernel = graph.constant(turned, f"{op.name}/kernel")
        if op.kind is LayerKind.UP_CONV:
            return graph.add("ConvTranspose", [inputs[0], kernel], strides=op.strides)
        pads = [side // 2 for side in op.kernel] * 2
        convolved = graph.add("Conv", [inputs[-1], kernel, *weight.values()], pads=pads)
        if op.kind is LayerKind.SHORTCUT:
            return graph.add("Add", [inputs[0], convolved])
        return convolved
    if op.kind in NORM_KINDS:
        if norm == "none":
            column = graph.constant(np.int64([1, -1, 1, 1, 1]))
            y = graph.add("Add", [inputs[0], graph.add("Reshape", [weight["bias"], column])])
        else:
            if norm == "batch":
                moments = [weight["moving_mean"], weight["moving_variance"]]
            else:
                moments = _moments(graph, inputs[0])
            tensors = [*inputs, weight["gamma"], weight["beta"], *moments]
            y = graph.add("BatchNormalization", tensors, epsilon=EPSILON)
        return y if op.kind is LayerKind.NORM else graph.add("Relu", [y])
    if op.kind is LayerKind.UPSAMPLE:
        scales = graph.constant(np.float32([1, 1, *op.strides]))
        nearest = {
            "mode": "nearest",
            "nearest_mode": "floor",
            "coordinate_transformation_mode": "asymmetric",
        }
        return graph.add("Resize", [inputs[0], "", scales], **nearest)
    if op.kind is LayerKind.POOL:
        return graph.add("MaxPool", inputs, kernel_shape=op.strides, strides=op.strides)
    if op.kind is LayerKind.CONCAT:
        return graph.add("Concat", inputs, axis=1)
    if op.kind is LayerKind.ACT:
        return graph.add("Relu", inputs)
    raise ValueError(f"a layer's kind must be one that ONNX has nodes for, got {op.kind.value}")


def _moments(graph: _Graph, tensor: str) -> Sequence[str]:
    """Mean and variance (C,) of one sample's maps, axis by axis, so that no sum has more than a few
    hundred terms: onnxruntime's InstanceNormalization adds up a whole map in float32, which put
    probabilities off by 0.03."""
    mean = tensor
    grid = graph.constant(np.int64([0, 2, 3, 4]))
    for axis in (4, 3, 2):
        mean = graph.add("ReduceMean", [mean], axes=[axis])
    off = graph.add("Sub", [tensor, mean])
    variance = graph.add("Mul", [off, off])
    for axis in (4, 3, 2):
        variance = graph.add("ReduceMean", [variance], axes=[axis])
    return [graph.add("Squeeze", [moment, grid]) for moment in (mean, variance)]

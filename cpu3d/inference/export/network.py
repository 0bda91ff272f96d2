"""The network of a run in the two formats: a SavedModel of TensorFlow, and an ONNX graph written from the layer plan.

A SavedModel is a graph and its weights, readable by TensorFlow alone, without this project or Keras. The ONNX graph
needs no converter: tf2onnx pins a protobuf older than TensorFlow's and does not know the fused batch norm in training
mode, which is what instance norm is here (models/norm.py). The layer plan says all that is needed: a test holds it
against the Keras model, another one these graphs. ONNX has channels first, so the image is turned on the way in and the
answer on the way out.
"""

import contextlib
from pathlib import Path
from typing import Any, BinaryIO, Dict, List, Mapping, Optional, Sequence

import numpy as np
import tensorflow as tf

from cpu3d.data.region import Shape3
from cpu3d.inference.export.contract import Contract, require_onnx
from cpu3d.inference.predictor import Predictor
from cpu3d.training.learner import finest
from models.config import EPSILON, UNetConfig
from models.layer_plan import LayerOp, layer_plan
from models.unet3d import build_unet3d

OPSET, IR_VERSION = 17, 8
"""Of 2022: every onnxruntime from 1.12 on reads them."""

MOST_BYTES = 2**31 - 2**24
"""Of weights in one file: protobuf writes 2 GiB at most, the graph's nodes included."""

Weights = Mapping[str, Mapping[str, np.ndarray]]
"""Layer -> weight -> array as Keras has it: {"encoder0_conv1": {"kernel": (3, 3, 3, in, out)}, ...}."""


def exported_network(contract: Contract, weights: List[np.ndarray]) -> tf.keras.Model:
    """The Keras model of `contract` with the run's weights, in Keras' order: one answer, the finest."""
    model = build_unet3d(contract.config.unet, contract.size, batch_size=1)
    model.set_weights(weights)
    return tf.keras.Model(model.input, finest(model.output))


def layer_weights(network: tf.keras.Model) -> Dict[str, Dict[str, np.ndarray]]:
    """Layer -> weight -> array, of a network under the policy "speed", whose layers are those of the plan."""
    return {
        layer.name: {weight.name.split("/")[-1].split(":")[0]: weight.numpy() for weight in layer.weights}
        for layer in network.layers
        if layer.weights
    }


def write_saved_model(contract: Contract, network: tf.keras.Model, folder: Path) -> None:
    """Write the network of `contract` to `folder`, with the one signature "serving_default"."""
    module = _Module(contract, network)
    # Gradients would be saved as well, twice the graph, and nothing is trained any more.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    tf.saved_model.save(module, str(folder), signatures={"serving_default": module.answer}, options=options)


class ExactPredictor(Predictor):
    """A predictor whose instance norm is computed by its definition, as other programs do.

    The fused kernel adds up a whole map in float32, as onnxruntime's own does: with 144 x 176 x 128 voxels and ITEX
    that puts a probability off by 0.025 here and there, as much as bfloat16 does. Slower, and it takes more memory.
    """

    def _network(self, size: Shape3):
        model = build_unet3d(self.config.unet, size)
        model.set_weights(self.weights)
        image = tf.TensorSpec((None, *size, self.config.unet.channels))  # of no known batch: no fused kernel takes it
        return tf.function(lambda image: finest(model(image, training=False)), input_signature=[image])


# --- ONNX ---


def write_onnx(contract: Contract, network: tf.keras.Model, path: Path) -> None:
    """Write the network of `contract` to `path`, weights of more than MOST_BYTES to a file of their own: `path`.data.

    It is checked: names, shapes and dtypes fit together.
    """
    onnx, weights = require_onnx(), layer_weights(network)
    apart = sum(array.nbytes for layer in weights.values() for array in layer.values()) > MOST_BYTES
    with path.with_name(f"{path.name}.data").open("wb") if apart else contextlib.nullcontext() as data:
        model = onnx_model(contract, weights, data)
    path.write_bytes(model.SerializeToString())
    onnx.checker.check_model(str(path), full_check=True)


def onnx_model(contract: Contract, weights: Weights, data: Optional[BinaryIO] = None) -> Any:
    """The ModelProto of `contract`; its weights go to the file `data`, if there is one, which it then refers to."""
    graph = _Graph(require_onnx(), data)
    image = _channels_first(graph, _normalised(graph, contract))
    logits = _network(graph, contract.config.unet, contract.size, weights, image)
    answer = logits if contract.slides else graph.add("Sigmoid", [logits])
    turned = graph.add("Transpose", [answer], perm=[0, 2, 3, 4, 1])
    graph.add("Squeeze", [turned, graph.constant(np.int64([0]))], contract.output)
    shape = (*contract.size, len(contract.regions))
    return graph.model(contract.inputs(), contract.output, shape)


# --- Private helpers: SavedModel ---


class _Module(tf.Module):
    """What is saved. It holds the variables and not the Keras model, whose layers would be written down as well."""

    def __init__(self, contract: Contract, network: tf.keras.Model):
        super().__init__()
        self.weights = network.weights
        signature = [tf.TensorSpec(one["shape"], one["dtype"], name=name) for name, one in contract.inputs().items()]

        def answer(image, mean=None, std=None):
            logits = network(_normalised_tensor(image, mean, std)[None], training=False)[0]
            return {contract.output: logits if contract.slides else tf.sigmoid(logits)}

        self.answer = tf.function(answer, input_signature=signature)


def _normalised_tensor(image, mean: Any = None, std: Any = None):
    """(value - mean) / std where a voxel is not 0, else 0: (X, Y, Z, C) float32. A channel without contrast is 0.

    Statistics are float64, as in a store's records: a sum over millions of voxels loses digits in float32.
    """
    present = tf.not_equal(image, 0)
    if mean is None:
        values, mask = tf.cast(image, tf.float64), tf.cast(present, tf.float64)
        count = tf.maximum(tf.reduce_sum(mask, (0, 1, 2)), 1)
        mean = tf.reduce_sum(values, (0, 1, 2)) / count
        std = tf.sqrt(tf.reduce_sum(tf.square((values - mean) * mask), (0, 1, 2)) / count)
    mean, std = tf.cast(mean, tf.float64), tf.cast(std, tf.float64)
    scale = tf.math.divide_no_nan(tf.ones_like(std), std)
    return tf.where(present, image * tf.cast(scale, tf.float32) + tf.cast(-mean * scale, tf.float32), 0.0)


# --- Private helpers: ONNX ---


class _Graph:
    """Collects nodes and constants; every tensor has a name of its own."""

    def __init__(self, onnx: Any, data: Optional[BinaryIO] = None):
        self._onnx, self._data = onnx, data
        self._nodes: List[Any] = []
        self._constants: List[Any] = []

    def add(self, kind: str, inputs: Sequence[str], name: str = "", **attributes: Any) -> str:
        """A node of one output, which is named `name`; returns that name."""
        name = name or f"{kind.lower()}_{len(self._nodes)}"
        self._nodes.append(self._onnx.helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, array: np.ndarray, name: str = "") -> str:
        """A given tensor. Weights have names; what has none is the graph's own and stays in it."""
        array, proto = np.ascontiguousarray(array), self._onnx.TensorProto
        if self._data is None or not name:
            tensor = self._onnx.numpy_helper.from_array(array, name or f"constant_{len(self._constants)}")
        else:
            tensor = proto(name=name, dims=array.shape, data_type=proto.FLOAT, data_location=proto.EXTERNAL)
            place = {"location": Path(self._data.name).name, "offset": self._data.tell(), "length": array.nbytes}
            for key, value in place.items():
                tensor.external_data.add(key=key, value=str(value))
            self._data.write(array)
        self._constants.append(tensor)
        return tensor.name

    def cast(self, tensor: str, dtype: str) -> str:
        return self.add("Cast", [tensor], to=getattr(self._onnx.TensorProto, dtype))

    def model(self, inputs: Mapping[str, Mapping[str, Any]], output: str, shape: Sequence[int]) -> Any:
        helper, float32 = self._onnx.helper, self._onnx.TensorProto.FLOAT
        taken = [helper.make_tensor_value_info(name, float32, one["shape"]) for name, one in inputs.items()]
        given = [helper.make_tensor_value_info(output, float32, list(shape))]
        graph = helper.make_graph(self._nodes, "cpu3d", taken, given, self._constants)
        opsets = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, producer_name="cpu3d", ir_version=IR_VERSION, opset_imports=opsets)


def _normalised(graph: _Graph, contract: Contract) -> str:
    """(value - mean) / std where a voxel is not 0, else 0: (X, Y, Z, C) float32. A channel without contrast is 0.

    Statistics are float64, as in a store's records: a sum over millions of voxels loses digits in float32.
    """
    zero = graph.constant(np.float32(0))
    present = graph.add("Not", [graph.add("Equal", ["image", zero])])
    if contract.slides:
        mean, std = graph.cast("mean", "DOUBLE"), graph.cast("std", "DOUBLE")
    else:
        mean, std = _statistics(graph, present)
    varies = graph.add("Greater", [std, graph.constant(np.float64(0))])
    inverse = graph.add("Div", [graph.constant(np.float64(1)), std])
    shift = graph.add("Neg", [graph.add("Mul", [mean, inverse])])
    scale, shift = (
        graph.add("Where", [varies, graph.cast(one, "FLOAT"), zero], name)
        for one, name in ((inverse, "scale"), (shift, "shift"))
    )
    scores = graph.add("Add", [graph.add("Mul", ["image", scale]), shift])
    return graph.add("Where", [present, scores, zero], "normalised")


def _statistics(graph: _Graph, present: str) -> Sequence[str]:
    """Mean and standard deviation (C,) float64 of each channel's non-zero voxels."""
    grid = graph.constant(np.int64([0, 1, 2]))
    values, mask = graph.cast("image", "DOUBLE"), graph.cast(present, "DOUBLE")

    def total(tensor: str) -> str:
        return graph.add("ReduceSum", [tensor, grid], keepdims=0)

    count = graph.add("Max", [total(mask), graph.constant(np.float64(1))])
    mean = graph.add("Div", [total(values), count])
    off = graph.add("Mul", [graph.add("Sub", [values, mean]), mask])
    variance = graph.add("Div", [total(graph.add("Mul", [off, off])), count])
    return mean, graph.add("Sqrt", [variance])


def _channels_first(graph: _Graph, image: str) -> str:
    """(X, Y, Z, C) -> (1, C, X, Y, Z)."""
    return graph.add("Unsqueeze", [graph.add("Transpose", [image], perm=[3, 0, 1, 2]), graph.constant(np.int64([0]))])


def _network(graph: _Graph, unet: UNetConfig, size: Sequence[int], weights: Weights, image: str) -> str:
    """The layers of the plan, but for the heads that only a loss reads; returns the logits (1, R, X, Y, Z)."""
    tensors: Dict[str, str] = {}
    for op in layer_plan(unet, tuple(size)):
        if op.kind == "input":
            tensors[op.name] = image
        elif op.kind != "head" or op.name == "head":
            inputs = [tensors[name] for name in op.inputs]
            tensors[op.name] = _layer(graph, op, unet.norm, inputs, weights.get(op.name, {}))
    return tensors["head"]


def _layer(graph: _Graph, op: LayerOp, norm: str, inputs: List[str], weights: Mapping[str, np.ndarray]) -> str:
    """The nodes of one layer of the plan. Every kind but a norm's is one node of ONNX."""
    if op.kind in ("conv", "shortcut", "head", "up_conv"):
        bias = [graph.constant(weights["bias"], f"{op.name}/bias")] if op.kind == "head" else []
        # (x, y, z, in, out) -> (out, in, x, y, z); a transposed one has (..., out, in) in Keras
        kernel = graph.constant(np.transpose(weights["kernel"], (4, 3, 0, 1, 2)), f"{op.name}/kernel")
        if op.kind == "up_conv":
            return graph.add("ConvTranspose", [inputs[0], kernel], op.name, strides=[2, 2, 2])
        name = "" if op.kind == "shortcut" else op.name
        convolved = graph.add("Conv", [inputs[-1], kernel, *bias], name, pads=[op.kernel // 2] * 6)
        return graph.add("Add", [inputs[0], convolved], op.name) if op.kind == "shortcut" else convolved
    if op.kind == "norm":
        return _norm(graph, norm, inputs[0], op, weights, op.name)
    if op.kind == "norm_act":
        return graph.add("Relu", [_norm(graph, norm, inputs[0], op, weights)], op.name)
    if op.kind == "act":
        return graph.add("Relu", inputs, op.name)
    if op.kind == "pool":
        return graph.add("MaxPool", inputs, op.name, kernel_shape=[2, 2, 2], strides=[2, 2, 2])
    if op.kind == "upsample":
        scales = graph.constant(np.float32([1, 1, 2, 2, 2]))
        nearest = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
        return graph.add("Resize", [inputs[0], "", scales], op.name, **nearest)
    if op.kind == "concat":
        return graph.add("Concat", inputs, op.name, axis=1)
    raise NotImplementedError(f"layer {op.name} is of a kind that has no ONNX yet: {op.kind}; add it here")


def _norm(graph: _Graph, norm: str, tensor: str, op: LayerOp, weights: Mapping[str, np.ndarray], name: str = "") -> str:
    def weight(one: str) -> str:
        return graph.constant(weights[one], f"{op.name}/{one}")

    if norm == "none":
        column = graph.constant(np.int64([1, -1, 1, 1, 1]))
        return graph.add("Add", [tensor, graph.add("Reshape", [weight("bias"), column])], name)
    moments = list(map(weight, ("moving_mean", "moving_variance"))) if norm == "batch" else _moments(graph, tensor)
    return graph.add("BatchNormalization", [tensor, weight("gamma"), weight("beta"), *moments], name, epsilon=EPSILON)


def _moments(graph: _Graph, tensor: str) -> Sequence[str]:
    """Mean and variance (C,) of one sample's maps, axis by axis, so that no sum has more than a few hundred terms.

    onnxruntime's InstanceNormalization adds up a whole map in float32: with 144 x 176 x 128 voxels that put
    probabilities off by 0.03.
    """
    mean, grid = tensor, graph.constant(np.int64([0, 2, 3, 4]))
    for axis in (4, 3, 2):
        mean = graph.add("ReduceMean", [mean], axes=[axis])
    off = graph.add("Sub", [tensor, mean])
    variance = graph.add("Mul", [off, off])
    for axis in (4, 3, 2):
        variance = graph.add("ReduceMean", [variance], axes=[axis])
    return [graph.add("Squeeze", [moment, grid]) for moment in (mean, variance)]

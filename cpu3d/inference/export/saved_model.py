"""The network as a SavedModel: a graph and its weights, readable by TensorFlow alone, without this project or Keras.

Beside it what an export begins with and is held against: the float32 network of a run's weights.
"""

from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import tensorflow as tf

from cpu3d.data.region import Shape3
from cpu3d.inference.export.contract import Contract
from cpu3d.inference.predictor import Predictor
from cpu3d.training.learner import finest
from models.unet3d import build_unet3d


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


# --- Private helpers ---


class _Module(tf.Module):
    """What is saved. It holds the variables and not the Keras model, whose layers would be written down as well."""

    def __init__(self, contract: Contract, network: tf.keras.Model):
        super().__init__()
        self.weights = network.weights
        signature = [tf.TensorSpec(one["shape"], one["dtype"], name=name) for name, one in contract.inputs().items()]

        def answer(image, mean=None, std=None):
            logits = network(_normalised(image, mean, std)[None], training=False)[0]
            return {contract.output: logits if contract.slides else tf.sigmoid(logits)}

        self.answer = tf.function(answer, input_signature=signature)


def _normalised(image, mean: Any = None, std: Any = None):
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

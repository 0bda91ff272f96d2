"""The 3D U-Net as a Keras model: plain layers, and native operations in their place if they run."""

import sys
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import tensorflow as tf
from tensorflow.python.saved_model.save_context import in_save_context

from models.config import UNetConfig
from models.engine import check_layers
from models.layer_plan import layer_plan
from models.layers import one_or_all, plain_layer
from models.losses import LOSSES, Formula
from models.native import operations
from models.network import network_program
from models.step import Pass
from models.strides import Shape3
from models.supervision import head_weights, supervise
from models.weights import array_name


@tf.keras.utils.register_keras_serializable("cpu3d")
class UNet3D(tf.keras.Model):
    """The model of `build_unet3d`.

    Its file holds that function's arguments, from which it is built on loading, its weights,
    `trainable` of each layer and its compile arguments.
    """

    def __init__(self, unet: UNetConfig, image: Any, logits: Any):
        super().__init__(image, logits, name=unet.network)
        self.unet = unet

    def get_config(self) -> Dict[str, Any]:
        batch_size, *shape, _ = self.input_shape
        return {
            **super().get_config(),  # in a SavedModel the layers themselves
            "unet": self.unet.to_json(),
            "shape": None if None in shape else shape,
            "batch_size": batch_size,
            "frozen": [layer.name for layer in self.layers if not layer.trainable],
        }

    def call(self, inputs: Any, training: Optional[bool] = None, mask: Any = None) -> Any:
        """The logits as Keras asks for them: by native operations if they run, else layer by layer.
        A SavedModel and a step that XLA compiles have the layers, as neither can hold native
        operations.

        A tape has gradients of the weights and of the image by native operations, but for a
        `training=False` inside of a `tf.function`.
        """
        if self.jit_compile or in_save_context() or not operations.in_use():
            return super().call(inputs, training, mask)
        (image,) = tf.nest.flatten(inputs)
        image = tf.cast(image, self.unet.dtype)
        if training is False and not tf.executing_eagerly():
            # TensorFlow keeps a function that has gradients of its own for good, with its graph.
            return one_or_all(Pass(self, False).forward(image))
        return one_or_all(self._logits(image, bool(training)))

    # Nothing in it branches on a tensor, and to convert it takes seconds.
    @tf.autograph.experimental.do_not_convert
    def _logits(self, image: tf.Tensor, training: bool) -> List[tf.Tensor]:
        """The logits of each head, with the backward pass of `Pass` as their gradient."""
        read = [weight for weight in self.weights if weight.trainable]  # a frozen layer's too
        names = [weight.name for weight in read]

        @tf.custom_gradient
        def computed(image: tf.Tensor, *values: tf.Tensor) -> Tuple[List[tf.Tensor], Any]:
            network = Pass(self, training, dict(zip(names, values)))

            def gradient(*slopes: tf.Tensor) -> Tuple[Optional[tf.Tensor], ...]:
                by_name = network.backward(slopes)
                return (network.image_gradient(), *map(by_name.get, names))

            return network.forward(image), gradient

        # Weights are read once: an optimizer may change one during the pass.
        return computed(image, *map(tf.convert_to_tensor, read))

    def loss_and_gradients(
        self,
        loss: Union[str, Formula],
        image: tf.Tensor,
        target: tf.Tensor,
        share: Union[float, tf.Tensor] = 1.0,
    ) -> Tuple[tf.Tensor, tf.Tensor, List[tf.Tensor]]:
        """The loss of (image, target uint8 (N, X, Y, Z, R)) in training, a score (N, R), and the
        gradients of `share` times the loss by `trainable_weights`. `loss` is a name or a formula
        of models/losses.py."""
        formula = LOSSES[loss] if isinstance(loss, str) else loss
        weights = head_weights(self.unet)
        if operations.in_use():
            network = Pass(self, True)
            supervised = supervise(formula, target, network.forward(image), weights)
            by_name = network.backward(supervised.slopes(share))
            gradients = [by_name[weight.name] for weight in self.trainable_weights]
            return supervised.loss, supervised.score, gradients
        with tf.GradientTape() as tape:
            logits = tf.nest.flatten(self(image, training=True))
        supervised = supervise(formula, target, logits, weights)
        gradients = tape.gradient(logits, self.trainable_weights, supervised.slopes(share))
        return supervised.loss, supervised.score, gradients

    def export(self, filepath: str, *args: Any, **kwargs: Any) -> None:
        """Keras' `export`, of plain layers: other hosts have no native operations."""
        layers = tf.keras.Model(self.input, self.output, name=self.name)
        layers.export(filepath, *args, **kwargs)

    @classmethod
    def from_config(cls, config: Dict[str, Any], custom_objects: Any = None) -> "UNet3D":
        unet = UNetConfig(**config["unet"])
        model = build_unet3d(unet, config["shape"], config["batch_size"])
        for name in config["frozen"]:
            model.get_layer(name).trainable = False
        return model


def build_unet3d(
    config: UNetConfig, shape: Optional[Shape3] = None, batch_size: Optional[int] = None
) -> UNet3D:
    """The Keras model of `config` for images of `shape` (X, Y, Z), or of any size that is a
    multiple of `config.divisors`, after Ojika et al. 2020 and Cicek et al. 2016.

    Takes (batch, X, Y, Z, channels) in `config.dtype` and gives logits (batch, X, Y, Z, outputs) in
    the same dtype; with deep supervision a list of logits: the finest first, then each coarser
    decoder level, deepest first. The model is compiled, fitted and saved as any of Keras' own; its
    losses and metrics take logits (cpu3d/training/losses.py has some). Raises ValueError when the
    shape does not divide, InstructionSetError for a dtype that nothing computes in here, and
    ImportError if tf.keras is not Keras 2."""
    _check_keras()
    if not operations.available() and not tf.config.list_logical_devices("GPU"):
        check_layers(config.dtype)
    return _built(config, shape, batch_size)


def finest(logits: Any) -> tf.Tensor:
    """The full-resolution logits of a network's output, which is a list under deep supervision."""
    return logits[0] if isinstance(logits, (list, tuple)) else logits


def weight_names(weights: Sequence[tf.Variable]) -> List[str]:
    """A network's weights as checkpoints name them, in Keras' order."""
    return [array_name(place) for place in range(len(weights))]


# --- Private helpers ---


# Nothing in a layer's call branches on a tensor. AutoGraph would write each to a file before it
# converts it, and warn if a full disk has no room for that.
@tf.autograph.experimental.do_not_convert
def _built(config: UNetConfig, shape: Optional[Shape3], batch_size: Optional[int]) -> UNet3D:
    """The model, layer by layer."""
    plan = layer_plan(config, shape or config.divisors)
    size = (*(shape or (None, None, None)), config.channels)
    image = tf.keras.Input(size, batch_size, dtype=config.dtype, name="image")
    maps = {"image": image}
    for op in plan[1:]:
        maps[op.name] = plain_layer(config, op)(one_or_all([maps[name] for name in op.inputs]))
    logits = [maps[value.name] for value in network_program(config).logits]
    return UNet3D(config, image, logits if config.deep_supervision else logits[0])


def _check_keras() -> None:
    package = sys.modules[tf.keras.layers.Layer.__module__.partition(".")[0]]
    if not package.__version__.startswith("2."):
        todo = "install tf_keras, and set TF_USE_LEGACY_KERAS=1 before TensorFlow is imported"
        raise ImportError(f"tf.keras must be Keras 2, got {package.__version__}; {todo}")

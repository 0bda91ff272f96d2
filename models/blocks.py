"""The block of a U-Net's level: its single layers, and the base of layers that compute it with less memory."""

import zlib

import tensorflow as tf

from models.config import UNetConfig
from models.norm import NormActivation
from models.ordered import Convolution, Join, ShortcutSum, UpConvolution
from models.passes import custom_gradient

PRIOR_LOGIT = -2.944
"""First bias of the head: a sigmoid of 0.05 (Lin et al. 2017), as tumour is a few per cent of a brain. Dice WT/TC/ET of
one real glioma after 40 steps: 0.96/0.93/0.75, from 0.5 0.88/0.84/0.71."""


class Block(tf.keras.layers.Layer):
    """Two 3x3x3 convolutions, each with norm and ReLU; `residual` adds the entry before the last ReLU.

    An encoder's block takes its entry; a decoder's takes [skip, below], doubles the grid of `below` and joins the two.

    A subclass is one layer, with the weights of the single layers in their order, and has the methods

        forward(inputs, weights, *more)                    outputs, each norm's statistics of the batch, what is kept
        backward(upstream, kept, inputs, weights, *more)   gradients of inputs and of weights
    """

    def __init__(self, unet: UNetConfig, side: str, level: int):
        """`side` is "encoder" or "decoder"; its name is that and the level."""
        name, own = f"{side}{level}", {"dtype": precision(unet)}
        super().__init__(name=name, **own)
        self.unet, self.skip_width, self.below_width, self.up = unet, 0, 0, []
        if side == "decoder":
            self.widths, up_width = unet.decoder_widths(level), unet.up_width(level)
            self.skip_width, self.below_width = unet.encoder_widths(level)[1], unet.encoder_widths(level + 1)[1]
            self.entry_width = self.skip_width + up_width
            self.up = up_layers(unet, f"{name}_up", up_width)
            self.join = Join(name=f"{name}_concat", **own)
        else:
            self.widths = unet.encoder_widths(level)
            self.entry_width = unet.encoder_widths(level - 1)[1] if level else unet.channels
        self.conv1 = convolution_layer(unet, f"{name}_conv1", self.widths[0], 3)
        self.norm1 = NormActivation(unet.norm, name=f"{name}_act1", **own)
        self.conv2 = convolution_layer(unet, f"{name}_conv2", self.widths[1], 3)
        last = f"{name}_norm2" if unet.residual else f"{name}_act2"
        self.norm2 = NormActivation(unet.norm, activate=not unet.residual, name=last, **own)
        self.shortcut = None
        if unet.residual:
            shortcut, of_image = f"{name}_shortcut", name == "encoder0"
            kernel = initial_kernel(unet, shortcut)
            self.shortcut = ShortcutSum(self.widths[1], kernel, entry_learns=not of_image, name=shortcut, **own)
            self.last = tf.keras.layers.ReLU(name=f"{name}_act2", **own)

    def layer_by_layer(self, *inputs):
        """The block from its single layers."""
        y = inputs[-1]
        for layer in self.up:
            y = layer(y)
        entry = self.join([inputs[0], y]) if self.up else y
        y = self.norm2(self.conv2(self.norm1(self.conv1(entry))))
        return self.last(self.shortcut([y, entry])) if self.shortcut else y

    # --- As one layer ---

    def build(self, input_shape=None):
        """The weights, from the configuration alone."""
        first, second = self.widths
        if self.up:
            build_within(self.up[0], self.below_width)
        reads = ((self.conv1, self.entry_width), (self.norm1, first), (self.conv2, first), (self.norm2, second))
        for layer, channels in reads:
            build_within(layer, channels)
        if self.shortcut:
            build_within(self.shortcut, second, self.entry_width)
        super().build(input_shape)

    @property
    def weights(self):
        """Layer by layer, as a model of single layers lists them: batch norm's statistics beside its scale."""
        layers = (*self.up, self.conv1, self.norm1, self.conv2, self.norm2, self.shortcut)
        return [weight for layer in layers if layer for weight in layer.weights]

    def learn(self, inputs, weights, *more):
        """The outputs of `forward`, with the gradients of `backward`; moves batch norm's statistics."""
        arguments, structure = (inputs, weights), []

        @custom_gradient
        def computed(*flat):
            # A tape that is persistent, or eager, would look for the gradients of single operations.
            inputs, weights = tf.nest.pack_sequence_as(arguments, [tf.stop_gradient(tensor) for tensor in flat])
            outputs, statistics, kept = self.forward(inputs, weights, *more)
            structure[:] = [(outputs, statistics)]

            def gradient(*upstream):
                of_outputs, _ = tf.nest.pack_sequence_as(structure[0], upstream)
                return tf.nest.flatten(self.backward(of_outputs, kept, inputs, weights, *more))

            return tf.nest.flatten(structure[0]), gradient

        flat = computed(*tf.nest.flatten(arguments))
        outputs, statistics = tf.nest.pack_sequence_as(structure[0], flat)
        for norm, moments in zip((self.norm1, self.norm2), statistics):
            if moments:
                norm.move(*moments)
        return outputs


def precision(config: UNetConfig) -> str:
    """Keras' name for "compute in `config.dtype`, keep weights in float32"."""
    return "mixed_bfloat16" if config.dtype == "bfloat16" else "float32"


def initial_kernel(config: UNetConfig, name: str):
    """Glorot's uniform, from the network's seed and the layer's name: no layer depends on what was built before.
    On one real glioma Glorot's smaller kernels reach in 20 steps what He's reach in 30."""
    return tf.keras.initializers.GlorotUniform(seed=zlib.crc32(f"{config.seed}/{name}".encode()) & 0x7FFFFFFF)


def convolution_layer(config: UNetConfig, name: str, channels: int, kernel: int, **more):
    """A convolution that keeps the grid, without bias: what follows normalises or adds one."""
    return Convolution(
        channels,
        kernel,
        kernel_initializer=initial_kernel(config, name),
        dtype=precision(config),
        name=name,
        **{"use_bias": False, **more},
    )


def up_layers(config: UNetConfig, name: str, width: int):
    """Layers that double the grid, without bias: the next norm removes a constant."""
    if config.up == "transposed":
        return [
            UpConvolution(width, kernel_initializer=initial_kernel(config, name), dtype=precision(config), name=name)
        ]
    # The 1x1x1 convolution and nearest-neighbour copying commute; on the coarse grid it costs an eighth.
    copy = tf.keras.layers.UpSampling3D(2, dtype=precision(config), name=name)
    return [convolution_layer(config, f"{name}_conv", width, 1), copy]


def head_layer(config: UNetConfig, name: str):
    """One logit per output and voxel, in the compute dtype: the loss casts them to float32.
    Casting the head's *input* instead would hold a float32 copy of the widest map of the network."""
    more = {"use_bias": True, "bias_initializer": tf.keras.initializers.Constant(PRIOR_LOGIT)}
    return convolution_layer(config, name, config.outputs, 1, by_planes=config.policy != "speed", **more)


def build_within(layer: tf.keras.layers.Layer, *channels: int) -> None:
    """Make the weights of a layer within another one, under its name, for inputs of so many channels."""
    shapes = [(None, None, None, None, each) for each in channels]
    with tf.name_scope(layer.name):
        layer.build(shapes[0] if len(shapes) == 1 else shapes)

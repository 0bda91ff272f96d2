"""Operations of a network that TensorFlow computes, with gradients by its tape: a new block needs
no C. They take longer and more memory than native operations.

    PLAIN["gate"] = PlainOperation(weights=gate_weights, compute=gate)

models/network.py emits one by its name (`Emitter.plain`, `Emitter.plain_gradients`); the layers of
Keras, the checkpoint, the estimate and a SavedModel follow.
"""

import functools
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Sequence, Tuple

from models.strides import STRIDES, Shape3, strides_text

Shapes = Dict[str, Tuple[int, ...]]


@dataclass(frozen=True)
class PlainOperation:
    """An operation on the values of one map or several, (N, X, Y, Z, C)."""

    weights: Callable[[Sequence[int]], Shapes]
    """Channels of the maps -> name and shape of each weight. A bias is at first 0."""
    compute: Callable[[List[Any], Dict[str, Any]], Any]
    """Values of the maps, and weights by their names -> a map on the grid of what it makes."""
    in_float32: bool = True  # else as the network's maps, which then have no norm
    held_maps: float = 4.0
    """Memory on the way, over that of what it reads and makes: a bound for the process, in which
    TensorFlow takes some beside its allocator."""


def average(values: List[Any], weights: Dict[str, Any], *, strides: Shape3) -> Any:
    """The mean of the voxels along X, Y, Z that become one."""
    import tensorflow as tf  # on use: the estimator reads this table too

    return tf.nn.avg_pool3d(values[0], strides, strides, "VALID")


def interpolate(values: List[Any], weights: Dict[str, Any], *, strides: Shape3) -> Any:
    """Linear interpolation between the centres of voxels, of which each becomes so many along X,
    Y, Z; outside of the first and the last centre their values."""
    import tensorflow as tf

    (volume,) = values
    for axis in (3, 2, 1):  # Z first, while there is least
        if strides[axis - 1] == 1:
            continue
        sizes = tf.shape(volume)
        side = sizes[axis]
        centres = (tf.range(2 * side, dtype=tf.float32) + 0.5) / 2 - 0.5
        centres = tf.clip_by_value(centres, 0.0, tf.cast(side - 1, tf.float32))
        distances = tf.abs(centres[:, None] - tf.range(tf.cast(side, tf.float32)))
        matrix = tf.cast(tf.maximum(1 - distances, 0.0), volume.dtype)  # (2 side, side)
        behind = sizes[axis + 1 :]
        channels = volume.shape[4]
        if axis == 3:  # all channels at once: products of short rows take ten times as long
            both = (
                tf.transpose(matrix)[:, None, :, None]
                * tf.eye(channels, dtype=volume.dtype)[:, None]
            )
            both = tf.reshape(both, (side * channels, 2 * side * channels))
            made = tf.matmul(tf.reshape(volume, (-1, side * channels)), both)
        else:
            made = tf.matmul(matrix, tf.reshape(volume, (-1, side, tf.reduce_prod(behind))))
        volume = tf.reshape(made, tf.concat([sizes[:axis], [2 * side], behind], 0))
        volume = tf.ensure_shape(volume, (None, None, None, None, channels))
    return volume


PLAIN: Dict[str, PlainOperation] = {
    f"{compute.__name__} {strides_text((strides,))}": PlainOperation(
        lambda channels: {},
        functools.partial(compute, strides=strides),
        in_float32=False,
        held_maps=2.0,
    )
    for compute in (average, interpolate)
    for strides in STRIDES
}

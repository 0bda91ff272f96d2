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
    """Values of the maps, and weights by their names -> a map, on the grid of the first unless it
    averages or interpolates."""
    in_float32: bool = True  # else in the network's dtype; the maps that it reads must have no norm
    held_maps: float = 4.0
    """Bytes that it takes on the way, some of them outside of TensorFlow's allocator, over those of
    the maps that it reads and makes: a bound."""


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
        side = tf.shape(volume)[axis]
        first, most = tf.split(volume, [1, side - 1], axis)
        least, last = tf.split(volume, [side - 1, 1], axis)
        near = 0.75 * volume
        before = near + 0.25 * tf.concat([first, least], axis)
        after = near + 0.25 * tf.concat([most, last], axis)
        sizes = tf.concat([tf.shape(volume)[:axis], [2 * side], tf.shape(volume)[axis + 1 :]], 0)
        volume = tf.reshape(tf.stack([before, after], axis + 1), sizes)
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

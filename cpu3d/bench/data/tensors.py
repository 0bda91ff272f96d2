"""How the benchmark's workers come to tensors: TensorFlow set up as for training, and a store's arrays fed to it."""

from typing import Any, Callable

import numpy as np

from cpu3d.bench.data.measuring import touch
from cpu3d.host.apply import set_up


def tensorflow() -> Any:
    """TensorFlow with this host's threads, as `train` runs it."""
    return set_up()[2]


def to_float32(tf: Any, read: Callable[[int], np.ndarray], half: bool = False) -> Callable[[int], Any]:
    """A compiled function from a number to `read(number)` as float32, which TensorFlow takes without a copy if it can.

    float16 goes as its bits, as in the data sets of this project: `half` says so.
    """

    def bits(number) -> np.ndarray:
        array = read(int(number))
        return array.view(np.int16)

    @tf.function(input_signature=[tf.TensorSpec((), tf.int64)])
    def load(number):
        tensor = tf.numpy_function(bits, [number], tf.int16, stateful=False)
        return tf.cast(tf.bitcast(tensor, tf.float16) if half else tensor, tf.float32)

    return lambda number: load(tf.constant(number, tf.int64))


def touched(tensor: Any) -> float:
    """Read some of every page of a tensor that lies in this host's memory."""
    return touch(np.asarray(tensor))

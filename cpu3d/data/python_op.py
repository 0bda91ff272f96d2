"""NumPy code as an op of a tf.data pipeline: it lives as long as any pipeline that calls it, and not a second longer.

TensorFlow keeps a Python function that a pipeline calls either until the process ends, and with it the files and
threads of every dataset of a run, or as long as the Python object of the dataset, which a `tf.function`, `flat_map` or
a variant outlives. Here the function is held by a tensor that the pipeline captures, so by TensorFlow's own counting.
"""

import itertools
import os
import weakref
from typing import Any, Callable, Dict, Mapping, Tuple

import numpy as np
import tensorflow as tf

from cpu3d.data.failures import remembered
from cpu3d.data.files.arrays import aligned_empty
from cpu3d.errors import InputError

KEY_VALUES = 256
"""Length of the tensor that holds a function: what has 128 values or fewer, TensorFlow copies into its graphs."""

Shapes = Mapping[str, Tuple[str, Tuple]]


def python_op(function: Callable[[np.ndarray], Tuple], outputs: Shapes) -> Callable[[tf.Tensor], Dict[str, tf.Tensor]]:
    """`function` of one number, giving a tuple of arrays, as an op of `outputs`: name -> dtype and shape.

    Its InputError and OSError come out of `failures.own_errors` as they were. Stateless for TensorFlow, because a
    stateful op would make a deterministic pipeline serial.
    """
    key = _key_of(function)
    kinds = [dtype for dtype, _ in outputs.values()]

    def op(number: tf.Tensor) -> Dict[str, tf.Tensor]:
        arrays = tf.numpy_function(_call, [key, number], kinds, stateful=False)
        return {name: tf.ensure_shape(array, shape) for array, (name, (_, shape)) in zip(arrays, outputs.items())}

    return op


# --- Private helpers ---

_functions: Dict[int, Callable] = {}
"""By the number that is in their tensor. It begins anywhere, so that a pipeline of another process finds none here."""

_numbers = itertools.count(int.from_bytes(os.urandom(6), "little"))


def _key_of(function: Callable) -> tf.Tensor:
    """A tensor that holds `function`: when the last graph, dataset or iterator lets go of it, `function` goes."""
    number = next(_numbers)
    array = aligned_empty((KEY_VALUES,), np.dtype(np.int64))  # unaligned it would be copied, and held by nobody
    array[:] = number
    _functions[number] = function
    weakref.finalize(array, _functions.pop, number, None).atexit = False
    with tf.init_scope():  # a value of its own, also where a dataset is made while a graph is traced
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


@tf.autograph.experimental.do_not_convert
def _call(key: np.ndarray, *arguments: Any) -> Any:
    with remembered():
        function = _functions.get(int(key[0]))
        if function is None:
            raise InputError(
                "dataset of a store must be used in the process that made it, got one whose files are closed;"
                " keep a reference to the dataset, or make it again"
            )
        return function(*arguments)

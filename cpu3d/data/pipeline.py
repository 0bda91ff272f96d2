"""NumPy code as an op of a tf.data pipeline, and its errors as they were.

TensorFlow keeps a Python function that a pipeline calls either until the process ends, and with it its files and
threads, or as long as the Python object of the dataset, which a `tf.function`, `flat_map` or a variant outlives. Here
a tensor that the pipeline captures holds the function: it lives as long as any pipeline that calls it.
"""

import collections
import itertools
import os
import weakref
from typing import Any, Callable, Deque, Dict, Iterable, Mapping, Tuple

import numpy as np
import tensorflow as tf

from cpu3d.data.files.arrays import aligned_empty
from cpu3d.errors import InputError

FAILURES = 64
"""Failures remembered: those of the elements that a pipeline prepares ahead, of every pipeline of the process."""

KEY_VALUES = 256
"""Length of the tensor that holds a function: what has 128 values or fewer, TensorFlow copies into its graphs."""

_functions: Dict[int, Callable] = {}
"""By the number that is in their tensor. It begins anywhere, so that a pipeline of another process finds none here."""

_numbers = itertools.count(int.from_bytes(os.urandom(6), "little"))
_failures: Deque[Tuple[str, BaseException]] = collections.deque(maxlen=FAILURES)


def python_op(
    function: Callable[[np.ndarray], Tuple], outputs: Mapping[str, Tuple[str, Tuple]]
) -> Callable[[tf.Tensor], Dict[str, tf.Tensor]]:
    """`function` of one number, giving a tuple of arrays, as an op of `outputs`: name -> dtype and shape.

    Its InputError and OSError come out of `Batches` as they were. Stateless for TensorFlow, because a stateful op
    would make a deterministic pipeline serial.
    """
    number = next(_numbers)
    array = aligned_empty((KEY_VALUES,), np.int64)  # unaligned it would be copied, and held by nobody
    array[:] = number
    _functions[number] = function
    # When the last graph, dataset or iterator lets go of the tensor, the function goes.
    weakref.finalize(array, _functions.pop, number, None).atexit = False
    with tf.init_scope():  # a value of its own, also where a dataset is made while a graph is traced
        key = tf.experimental.dlpack.from_dlpack(array.__dlpack__())

    def op(number: tf.Tensor) -> Dict[str, tf.Tensor]:
        arrays = tf.numpy_function(_call, [key, number], [dtype for dtype, _ in outputs.values()], stateful=False)
        return {name: tf.ensure_shape(array, shape) for array, (name, (_, shape)) in zip(arrays, outputs.items())}

    return op


class Batches:
    """An iterator over a dataset that raises its loader's InputError and OSError as they were. It keeps no batch."""

    def __init__(self, dataset: Iterable[Any]):
        self._elements = iter(dataset)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Any:
        try:
            return next(self._elements)
        except tf.errors.OpError as error:
            own = next((failure for mark, failure in list(_failures) if mark in str(error.message)), None)
            if own is None:
                raise
            raise own.with_traceback(None) from None


@tf.autograph.experimental.do_not_convert
def _call(key: np.ndarray, number: np.ndarray) -> Any:
    try:
        function = _functions.get(int(key[0]))
        if function is None:
            rule = "dataset of a store must be used in the process that made it, got one whose files are closed"
            raise InputError(f"{rule}; keep a reference to the dataset, or make it again")
        return function(number)
    except (InputError, OSError) as error:
        mark = f"loader failure {next(_numbers)}:"
        _failures.append((mark, error))
        raise RuntimeError(f"{mark} {error}") from None

"""What a loader raises inside a tf.data pipeline comes out as what it is, not as TensorFlow's account of it."""

import contextlib
import itertools
import weakref
from collections import OrderedDict
from typing import Any, Callable, Iterable, Iterator

import tensorflow as tf

from cpu3d.errors import InputError

KEPT = 64
"""Failures remembered: those of the elements that a pipeline prepares ahead, of every pipeline of the process."""


@tf.autograph.experimental.do_not_convert
def told(function: Callable) -> Callable:
    """`function` for a `tf.numpy_function`: its InputError or OSError is remembered for `own_errors`.

    It is held weakly, so the dataset must hold it: TensorFlow keeps what it is given here until the process ends, and
    with each dataset of a run its files and threads would stay.
    """
    held = weakref.ref(function)

    def call(*args: Any) -> Any:
        try:
            return held()(*args)
        except (InputError, OSError) as error:
            mark = f"loader failure {next(_numbers)}:"
            _failures[mark] = error
            while len(_failures) > KEPT:
                _failures.popitem(last=False)
            raise RuntimeError(f"{mark} {error}") from None

    return call


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Take elements of a dataset in here: InputError and OSError of its loader are raised as they were."""
    try:
        yield
    except tf.errors.OpError as error:
        own = next((failure for mark, failure in list(_failures.items()) if mark in str(error.message)), None)
        if own is None:
            raise
        raise own.with_traceback(None) from None


class Batches:
    """An iterator over a dataset whose loader's errors are told as they were. It keeps no batch."""

    def __init__(self, dataset: Iterable[Any]):
        self._elements = iter(dataset)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Any:
        with own_errors():
            return next(self._elements)


# --- Private helpers ---

_numbers = itertools.count(1)
_failures: "OrderedDict[str, BaseException]" = OrderedDict()

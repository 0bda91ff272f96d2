"""What a loader raises inside a tf.data pipeline comes out as what it is, not as TensorFlow's account of it."""

import contextlib
import itertools
from collections import OrderedDict
from typing import Any, Iterable, Iterator

import tensorflow as tf

from cpu3d.errors import InputError

KEPT = 64
"""Failures remembered: those of the elements that a pipeline prepares ahead, of every pipeline of the process."""


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Run code that a pipeline calls in here: its InputError or OSError is remembered for `own_errors`."""
    try:
        yield
    except (InputError, OSError) as error:
        mark = f"loader failure {next(_numbers)}:"
        _failures[mark] = error
        while len(_failures) > KEPT:
            _failures.popitem(last=False)
        raise RuntimeError(f"{mark} {error}") from None


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

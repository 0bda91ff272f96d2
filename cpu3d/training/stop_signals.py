"""SIGINT and SIGTERM as a note to read between two steps, so that the step in flight ends first."""

import contextlib
import signal
from typing import Iterator, List


@contextlib.contextmanager
def noted_signals() -> Iterator[List[int]]:
    """A list that is given the number of every signal that arrives.

    A second SIGINT raises. Another SIGTERM does not: of a parent with threads that is killed several arrive.
    """
    noted: List[int] = []

    def note(number, frame):
        if noted and number == signal.SIGINT:
            raise KeyboardInterrupt
        noted.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""The kernel's pages of files: asked for before they are needed, given back after use.

All of it is advice, and what it comes to is the kernel's choice. Without posix_fadvise (macOS) it does nothing.
"""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Callable

PIECE_BYTES = 1 << 20
"""Asked for at once. Linux reads no more of one request than the device's largest transfer, and forgets the rest."""

AHEAD = 2
"""Samples to bring in before they come."""


def bring_in(handle: int, start: int, length: int) -> None:
    """Ask for a part of an open file. Returns at once, unless the disk's queue is full."""
    with contextlib.suppress(AttributeError, OSError):  # what fails for good fails when it is read
        for begin in range(start, start + length, PIECE_BYTES):
            os.posix_fadvise(handle, begin, min(PIECE_BYTES, start + length - begin), os.POSIX_FADV_WILLNEED)


def give_back(handle: int) -> None:
    """Let go of an open file's pages; those that a map is using stay."""
    with contextlib.suppress(AttributeError, OSError):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


class LookAhead:
    """Advice around the sample that is being read: what comes soon is brought in, what was used is given back.

    The kernel alone would drop what was used longest ago, which in a run of epochs is what comes next. `bring_in` is
    called with a sample, `release` with a sample that was used and with those that still are, or come soon. A thread of
    this object calls them, and what they raise is ignored. `in_flight` samples of `samples` may be in use at once.
    """

    def __init__(
        self,
        bring_in: Callable[[int], None],
        release: Callable[[int, range], None],
        *,
        samples: range,
        in_flight: int,
    ):
        self._bring_in, self._release, self._samples, self._in_flight = bring_in, release, samples, in_flight
        self._thread = ThreadPoolExecutor(1, "cpu3d look-ahead")  # begins at the first `at`, ends with this object

    def at(self, sample: int) -> None:
        """Note that `sample` is about to be read. Never waits."""
        first, last = self._samples.start, self._samples.stop
        used, end = sample - self._in_flight, min(sample + AHEAD + 1, last)
        if used >= first:
            self._thread.submit(self._release, used, range(used + 1, end))
        for coming in range(sample if sample == first else sample + AHEAD, end):
            self._thread.submit(self._bring_in, coming)

    def close(self) -> None:
        """End the thread, after the advice for the samples so far."""
        self._thread.shutdown()

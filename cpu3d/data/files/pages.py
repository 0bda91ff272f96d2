"""The kernel's pages of files: mapping them, asking for them ahead, and giving them back.

All but the maps is advice, and what it comes to is the kernel's choice. Without posix_fadvise (macOS) it does nothing.
"""

import contextlib
import ctypes
import functools
import mmap
import os
import queue
import sys
import threading
import weakref
from pathlib import Path
from typing import Callable, Optional, Sequence

import numpy as np

from memory_estimator.files import open_regular

PIECE_BYTES = 1 << 20
"""Asked for at once. Linux reads no more of one request than the device's largest transfer, and forgets the rest."""

MAP_POPULATE = getattr(mmap, "MAP_POPULATE", 0x8000 if sys.platform == "linux" else 0)
"""Read the whole file as it is mapped; Python names it from 3.10 on."""

AHEAD = 2
"""Samples to bring in before they come."""

LINGER = 8
"""Samples after which a file is given back a second time: pages that a map was still using stayed the first time."""


def map_file(handle: int, size_bytes: int, *, populate: bool = False) -> np.ndarray:
    """The first `size_bytes` of an open file, a positive number, as a read-only uint8 array. `handle` may be closed.

    The map goes with the last of the array's views. With `populate` it is read from front to back first. Raises
    OSError. Python's own `mmap` would keep a copy of the handle: 500 cases meet the usual limit of 1,024 open files.
    """
    flags = mmap.MAP_SHARED | (MAP_POPULATE if populate else 0)
    address = _libc().mmap(None, size_bytes, mmap.PROT_READ, flags, handle, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return np.asarray(_Map(address, size_bytes, _libc().munmap))


def resident(content: np.ndarray) -> np.ndarray:
    """For each page of a map (or of a part that begins on a page) whether it is in memory: reading it needs no disk.

    The kernel tells only the file's owner and root (Linux 5.2 on); to others all pages are there. Raises OSError.
    """
    pages = np.empty(-(-content.nbytes // mmap.PAGESIZE), np.uint8)
    if _libc().mincore(content.ctypes.data, content.nbytes, pages.ctypes.data):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return (pages & 1).astype(bool)


def bring_in(handle: int, start: int, length: int) -> None:
    """Ask for a part of an open file. Returns at once, unless the disk's queue is full. Raises OSError."""
    if hasattr(os, "posix_fadvise"):
        for begin in range(start, start + length, PIECE_BYTES):
            os.posix_fadvise(handle, begin, min(PIECE_BYTES, start + length - begin), os.POSIX_FADV_WILLNEED)


def give_back(handle: int) -> None:
    """Let go of an open file's pages; those that a map is using stay. Raises OSError."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


class LookAhead:
    """Advice around the sample that is being read: bring in what comes next, give back what was used.

    The kernel drops what was used longest ago, which in a run of epochs is what comes next. So a file is given back
    after its use unless it is among those that stay.

    bring_in: called with a sample that comes soon. files_at: sample -> the files to give back after it, () if they
    stay; equal for samples of one case. Both are called from a thread of this object, and what they raise is ignored.
    in_flight: samples that may be in use at once. Begins at the first `at`, ends when it is collected or closed.
    """

    def __init__(
        self,
        bring_in: Callable[[int], None],
        files_at: Callable[[int], Sequence[Path]],
        *,
        start: int = 0,
        stop: int,
        in_flight: int = 2,
    ):
        self._samples: queue.SimpleQueue[Optional[int]] = queue.SimpleQueue()
        # The thread must not know this object, or it would keep it, and itself, alive.
        arguments = (self._samples, bring_in, files_at, start, stop, in_flight)
        self._thread = threading.Thread(target=_advise, args=arguments, name="cpu3d look-ahead", daemon=True)
        self._begun = threading.Lock()
        weakref.finalize(self, self._samples.put, None).atexit = False

    def at(self, sample: int) -> None:
        """Note that `sample` is about to be read. Never waits and never raises."""
        if self._begun.acquire(blocking=False):  # once, and never released
            self._thread.start()
        self._samples.put(sample)

    def close(self) -> None:
        """End the thread, after the advice for what it was told so far."""
        self._samples.put(None)
        if self._thread.is_alive():
            self._thread.join()


# --- Private helpers ---


def _advise(samples, bring_in, files_at, start: int, stop: int, in_flight: int) -> None:
    newest = None
    for sample in iter(samples.get, None):
        if sample == start or newest is None:  # a new pass
            newest, first = sample, sample
            coming = range(sample, min(sample + AHEAD + 1, stop))
        elif sample > newest:
            coming = range(newest + AHEAD + 1, min(sample + AHEAD + 1, stop))
            newest = sample
        else:
            continue  # of a thread that came late
        for one in coming:
            with contextlib.suppress(Exception):
                bring_in(one)
        for used in (newest - in_flight, newest - in_flight - LINGER):
            if used >= first:
                with contextlib.suppress(Exception):
                    _give_back(used, range(max(newest - in_flight + 1, first), min(newest + AHEAD + 1, stop)), files_at)


def _give_back(used: int, in_use: Sequence[int], files_at: Callable[[int], Sequence[Path]]) -> None:
    files = files_at(used)
    if files and not any(files == files_at(sample) for sample in in_use):
        for path in files:
            with contextlib.suppress(OSError), os.fdopen(open_regular(path), "rb", buffering=0) as file:
                give_back(file.fileno())


@functools.lru_cache(None)
def _libc() -> ctypes.CDLL:
    """The C library, with the calls on pages that Python has no names for."""
    library = ctypes.CDLL(None, use_errno=True)
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    library.mmap.argtypes, library.mmap.restype = (pointer, size, *[ctypes.c_int] * 3, ctypes.c_long), pointer
    library.munmap.argtypes = (pointer, size)
    library.mincore.argtypes = (pointer, size, pointer)
    return library


class _Map:
    """What an array's memory belongs to. Keeps `munmap` itself: at the end of Python a module's names may be gone."""

    def __init__(self, address: int, size_bytes: int, munmap):
        self._address, self._size_bytes, self._munmap = address, size_bytes, munmap
        self.__array_interface__ = {"version": 3, "shape": (size_bytes,), "typestr": "|u1", "data": (address, True)}

    def __del__(self):
        self._munmap(self._address, self._size_bytes)

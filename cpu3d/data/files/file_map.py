"""A file mapped into memory as an array of bytes, without keeping the file open.

Python's own `mmap` keeps a copy of the file's descriptor for as long as the map lives, so a data set of 500 cases, each
an image and a label, would run into the usual limit of 1,024 open files.
"""

import ctypes
import functools
import mmap
import os
import sys

import numpy as np

MAP_POPULATE = getattr(mmap, "MAP_POPULATE", 0x8000 if sys.platform == "linux" else 0)
"""Read the whole file as it is mapped; Python names it from 3.10 on."""


def map_file(handle: int, size_bytes: int, *, populate: bool = False) -> np.ndarray:
    """The first `size_bytes` of an open file, a positive number, as a read-only uint8 array. `handle` may be closed.

    The array and its views keep the map; it goes with the last of them. With `populate` it is read from front to back
    before this returns, errors of the disk left aside. Raises OSError where it cannot be mapped.
    """
    flags = mmap.MAP_SHARED | (MAP_POPULATE if populate else 0)
    address = libc().mmap(None, size_bytes, mmap.PROT_READ, flags, handle, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return np.asarray(_Map(address, size_bytes, libc().munmap))


@functools.lru_cache(None)
def libc() -> ctypes.CDLL:
    """The C library, with the calls on pages that Python has no names for."""
    library = ctypes.CDLL(None, use_errno=True)
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    library.mmap.argtypes, library.mmap.restype = (pointer, size, *[ctypes.c_int] * 3, ctypes.c_long), pointer
    library.munmap.argtypes = (pointer, size)
    library.mincore.argtypes = (pointer, size, pointer)
    return library


# --- Private helpers ---


class _Map:
    """What an array's memory belongs to. Keeps `munmap` itself: at the end of Python a module's names may be gone."""

    def __init__(self, address: int, size_bytes: int, munmap):
        self._address, self._size_bytes, self._munmap = address, size_bytes, munmap
        self.__array_interface__ = {"version": 3, "shape": (size_bytes,), "typestr": "|u1", "data": (address, True)}

    def __del__(self):
        self._munmap(self._address, self._size_bytes)

"""The kernel's copies of a file's pages: which are there, asking for more before they are read, and giving them back.

All of it is advice, and what the advice comes to is the kernel's choice. Without posix_fadvise (macOS) it does nothing.
"""

import ctypes
import mmap
import os

import numpy as np

from cpu3d.data.files.file_map import libc

PIECE_BYTES = 1 << 20
"""Asked for at once. Linux reads no more of one request than the device's largest transfer, and forgets the rest."""


def resident(content: np.ndarray) -> np.ndarray:
    """For each page of a map (or of a part that begins on a page) whether it is in memory: reading it needs no disk.

    Only if `tells`: else all are said to be. Raises OSError.
    """
    pages = np.empty(-(-content.nbytes // mmap.PAGESIZE), np.uint8)
    if libc().mincore(content.ctypes.data, content.nbytes, pages.ctypes.data):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return (pages & 1).astype(bool)


def tells(handle: int) -> bool:
    """Whether the kernel tells this user which pages of an open file are there: to its owner it does (Linux 5.2 on)."""
    return os.geteuid() in (0, os.fstat(handle).st_uid)


def bring_in(handle: int, start: int, length: int) -> None:
    """Ask for a part of an open file. Returns at once, unless the disk's queue is full. Raises OSError."""
    if hasattr(os, "posix_fadvise"):
        for begin in range(start, start + length, PIECE_BYTES):
            os.posix_fadvise(handle, begin, min(PIECE_BYTES, start + length - begin), os.POSIX_FADV_WILLNEED)


def give_back(handle: int) -> None:
    """Let go of an open file's pages; those that a map is using stay. Raises OSError."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)

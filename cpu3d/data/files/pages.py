"""The kernel's pages of files: asked for before they are needed, given back after use.

Both are advice, and what it comes to is the kernel's choice. Without posix_fadvise (macOS) it does nothing.
"""

import contextlib
import os

PIECE_BYTES = 1 << 20
"""Asked for at once. Linux reads no more of one request than the device's largest transfer, and forgets the rest."""


def bring_in(handle: int, start: int, length: int) -> None:
    """Ask for a part of an open file. Returns at once, unless the disk's queue is full."""
    with contextlib.suppress(AttributeError, OSError):  # what fails for good fails when it is read
        for begin in range(start, start + length, PIECE_BYTES):
            os.posix_fadvise(handle, begin, min(PIECE_BYTES, start + length - begin), os.POSIX_FADV_WILLNEED)


def give_back(handle: int) -> None:
    """Let go of an open file's pages; those that a map is using stay."""
    with contextlib.suppress(AttributeError, OSError):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)

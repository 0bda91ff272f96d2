"""One process at a time in a folder."""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Iterator

from cpu3d.errors import InputError


@contextlib.contextmanager
def locked(folder: Path, kind: str) -> Iterator[None]:
    """Hold `folder`, which must exist, until the block or the process ends, however it ends.

    `kind` is the folder's name in the message, such as "run". Raises InputError if another process
    holds the folder, and OSError if it cannot be opened. On a file system without locks, as some
    networks have, nothing is held."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not _try_to_lock(handle):
            rule = f"{kind} {folder} must be written by one process at a time"
            todo = "wait for the first, or end it if it is left over from a killed command"
            raise InputError(f"{rule}, got a second one; {todo}")
        yield
    finally:
        os.close(handle)


def _try_to_lock(handle: int) -> bool:
    """Lock an open folder, unless its file system has no locks; False if another process has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks
        pass
    return True

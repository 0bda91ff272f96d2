"""One process at a time in a folder."""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Iterator

from cpu3d.errors import InputError


@contextlib.contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Hold `folder`, which must exist, until the block ends or the process does, by whatever end it takes.

    `what` is what the folder is to a reader, such as "run". Raises InputError while another process holds the folder,
    and OSError where it cannot be opened. On a file system without locks, as some networks have, nothing is held.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            todo = "wait for the other, which may be left over from a command that was killed"
            raise InputError(f"{what} {folder} must be written by one process at a time; {todo}") from None
        except OSError:
            pass
        yield
    finally:
        os.close(handle)

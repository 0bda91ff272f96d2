"""One process at a time in a folder."""

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Iterator

from cpu3d.errors import InputError


@contextlib.contextmanager
def locked(folder: Path, what: str, wait_s: float = 0.0) -> Iterator[None]:
    """Hold `folder`, which must exist, until the block ends or the process does, by whatever end it takes.

    `what` is what the folder is to a reader, such as "run". Raises InputError where another process holds the folder
    for longer than `wait_s`, and OSError where it cannot be opened. On a file system without locks, as some networks
    have, nothing is held.
    """
    handle, end, held = os.open(folder, os.O_RDONLY), time.monotonic() + wait_s, False
    try:
        while not held:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                if time.monotonic() >= end:
                    todo = "wait for the other, which may be left over from a command that was killed"
                    raise InputError(f"{what} {folder} must be written by one process at a time; {todo}") from None
                time.sleep(0.1)
            except OSError:
                break
        yield
    finally:
        os.close(handle)

"""One process at a time in a folder."""

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Iterator

from cpu3d.errors import InputError


@contextlib.contextmanager
def locked(folder: Path, kind: str, wait_s: float = 0.0) -> Iterator[None]:
    """Hold `folder`, which must exist, until the block or the process ends, however it ends.

    `kind` is the folder's name in the message, such as "run". Raises InputError if another process
    holds the folder for longer than `wait_s`, and OSError if it cannot be opened. On a file system
    without locks, as some networks have, nothing is held."""
    handle, end, held = os.open(folder, os.O_RDONLY), time.monotonic() + wait_s, False
    try:
        while not held:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                if time.monotonic() >= end:
                    rule = f"{kind} {folder} must be written by one process at a time, got a second one"
                    todo = "wait for the first, or end it if it is left over from a killed command"
                    raise InputError(f"{rule}; {todo}") from None
                time.sleep(0.1)
            except OSError:
                break
        yield
    finally:
        os.close(handle)

"""Files that are there whole or not at all. The estimator stands alone, so this is its own small `cpu3d.atomic`."""

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write beside `path` and then rename. Raises OSError, as for a full disk, and leaves the file that was there."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise

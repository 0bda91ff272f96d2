"""Write a file so that a reader sees either the old one or the whole new one, whatever happens in between."""

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import IO, Any, Iterator, Union


@contextlib.contextmanager
def atomic_write(path: Union[str, Path], mode: str = "wb") -> Iterator[IO[Any]]:
    """Yield a temporary file beside `path`; on success flush it to the disk and rename it onto `path`.

    On any error, Ctrl-C and a full disk among them, the temporary file is removed and `path` is as it was.
    The temporary name starts with a dot and ends in `.partial`; a killed process can leave one behind.
    """
    path = Path(path)
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(handle, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o666 & ~_umask())
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a failed write knows only its handle; its reader wants the name
        raise
    _sync_folder(path.parent)


def write_json(path: Union[str, Path], content: Any) -> None:
    """Write `content` as indented JSON, atomically. NaN and infinity are refused: they are not JSON."""
    with atomic_write(path, "w") as file:
        json.dump(content, file, indent=1, allow_nan=False)
        file.write("\n")


# --- Private helpers ---


def _umask() -> int:
    """The process's umask: mkstemp makes 0600 files, and a store is meant to be shared."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable; file systems that cannot open a folder are left to their own devices."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

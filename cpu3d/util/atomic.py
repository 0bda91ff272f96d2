"""Write a file so that a reader sees either the old one or the whole new one, whatever happens in between."""

import contextlib
import functools
import json
import os
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any, Iterator, Union

from cpu3d.errors import InputError

PARTIAL = ".cpu3d.partial"
"""End of the name of every file and folder that is not finished; a dot begins it. Only such names are ever swept."""


@contextlib.contextmanager
def atomic_write(path: Union[str, Path], mode: str = "wb") -> Iterator[IO[Any]]:
    """Yield a temporary file beside `path`; on success flush it to the disk and rename it onto `path`.

    On any error, Ctrl-C and a full disk among them, the temporary file is removed and `path` is as it was.
    The temporary name is `.NAME.*` and ends in PARTIAL; a killed process can leave one behind.
    """
    path = Path(path)
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", suffix=PARTIAL, dir=path.parent)
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
    sync_folder(path.parent)


def write_json(path: Union[str, Path], content: Any) -> None:
    """Write `content` as indented JSON, atomically. NaN and infinity are refused: they are not JSON."""
    with atomic_write(path, "w") as file:
        json.dump(content, file, indent=1, allow_nan=False)
        file.write("\n")


def remove_partials(*folders: Path) -> None:
    """Remove what killed processes have left of `atomic_write`. Only where nobody else writes in these folders."""
    for folder in folders:
        for partial in Path(folder).glob(f".*{PARTIAL}"):
            if partial.is_file():  # a folder is another command's
                partial.unlink(missing_ok=True)


def is_untouched(folder: Path, claim: str) -> bool:
    """Whether a folder holds nothing, but for what a process left that was killed while it wrote the file `claim`."""
    return all(fnmatch(name, f".{claim}.*{PARTIAL}") for name in os.listdir(folder))


def sync(path: Union[str, Path]) -> None:
    """Return when all that was written to `path` is on the disk. Raises OSError where it cannot be."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Union[str, Path]) -> None:
    """`sync` of a folder's entries: names made, moved or gone. Where a file system cannot, nothing is done."""
    with contextlib.suppress(OSError):
        sync(folder)


def writable_folder(path: Union[str, Path], what: str) -> Path:
    """Make the folder `path` where there is none and return it. Raises InputError unless a file can be made in it.

    For the start of long work, whose result would have no place at its end.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        reason = "a file" if path.is_file() else error.strerror
        raise InputError(
            f"{what} {path} must be a folder to write to, got {reason}; choose another or mend its permissions"
        ) from None


# --- Private helpers ---


def _umask() -> int:
    """The process's umask: mkstemp makes 0600 files, and a store is meant to be shared."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="utf-8", errors="replace") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return _umask_by_setting()


@functools.cache
def _umask_by_setting() -> int:
    """Once and to the strictest mask, because other threads may make files in this instant."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask

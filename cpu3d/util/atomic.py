"""Files and folders that a reader sees either as they were or complete, whatever happens while they
are written."""

import contextlib
import json
import os
import secrets
import shutil
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any, Iterator, Sequence, Union

from cpu3d.errors import FULL, InputError, NoRoomError

# The end of the name of every unfinished file and folder; a dot begins it. Only such names are ever
# removed.
PARTIAL = ".cpu3d.partial"
# Folders of `replace_files`.
NEW = f".new{PARTIAL}"
OLD = f".old{PARTIAL}"


@contextlib.contextmanager
def atomic_write(
    path: Union[str, Path],
    mode: str = "wb",
    flush: bool = True,
    token: str = "",
) -> Iterator[IO[Any]]:
    """Yield a temporary file, `.NAME.*` and PARTIAL, beside `path`; on success `flush` it to the
    disk and rename it onto `path`. On any error, Ctrl-C and a full disk too, it is removed; a
    killed process can leave it behind. Its name has random digits; with a `token`, for a `path` of
    one writer, it is always the same, so that the next write replaces what a killed process left.

    Raises NoRoomError for a full disk."""
    path = Path(path)
    if not token:
        token = secrets.token_hex(4)
        mode = mode.replace("w", "x")  # a file of this name would be another writer's
    partial = path.with_name(f".{path.name}.{token}{PARTIAL}")
    encoding = None if "b" in mode else "utf-8"
    try:
        with partial.open(mode, encoding=encoding) as file:
            yield file
            file.flush()
            if flush:
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        # A failed write knows only its handle; its reader wants the name.
        if isinstance(error, OSError) and error.filename in (None, str(partial)):
            error.filename = str(path)
            if error.errno in FULL:
                raise NoRoomError(error.errno, error.strerror, str(path)) from error
        raise
    if flush:
        sync_folder(path.parent)


def write_bytes(path: Union[str, Path], content: bytes) -> None:
    """Write `content`, atomically."""
    with atomic_write(path) as file:
        file.write(content)


def write_json(path: Union[str, Path], content: Any) -> None:
    """Write `content` as indented JSON, atomically. NaN and infinity are refused: they are not
    JSON."""
    write_bytes(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


@contextlib.contextmanager
def replace_files(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    """Yield an empty folder; on success `names` in it replace those in `folder` together, else
    those stay.

    `names` are files and folders, all of which must be there at the end. The last of them leaves
    first and arrives last: whenever it is there, the files beside it belong to it. After a killed
    process the next call restores the old."""
    new = folder / NEW
    old = folder / OLD
    shutil.rmtree(new, ignore_errors=True)
    _bring_back(old, folder, names)
    new.mkdir(parents=True)
    try:
        yield new
        old.mkdir()
        for name in reversed(names):
            if (folder / name).exists():
                (folder / name).rename(old / name)
        for name in names:
            (new / name).rename(folder / name)
    finally:
        _bring_back(old, folder, names)
        shutil.rmtree(new, ignore_errors=True)


def remove_partials(*folders: Path) -> None:
    """Remove what killed processes have left of `atomic_write`. Only where no other process writes
    in these folders."""
    for folder in folders:
        for partial in Path(folder).glob(f".*{PARTIAL}"):
            if partial.is_file():  # a folder is another command's
                partial.unlink(missing_ok=True)


def is_untouched(folder: Path, claim: str) -> bool:
    """Whether a folder is empty, but for the partial file of a process that was killed while it
    wrote `claim`."""
    return all(fnmatch(name, f".{claim}.*{PARTIAL}") for name in os.listdir(folder))


def sync(path: Union[str, Path]) -> None:
    """Return when all that was written to `path` is on the disk. Raises OSError if it cannot be."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Union[str, Path]) -> None:
    """`sync` of a folder's entries: names made, moved or gone. If the file system cannot, nothing
    is done."""
    with contextlib.suppress(OSError):
        sync(folder)


def writable_folder(path: Union[str, Path], kind: str) -> Path:
    """Make the folder `path` if there is none and return it. Raises as `check_folder`."""
    check_folder(path, kind)
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def check_folder(path: Union[str, Path], kind: str) -> None:
    """Raise InputError, before long work whose result could not be written, unless `path` is a
    folder that a file can be made in, or could be made; nothing is. `kind` is the folder's name in
    the message. Raises NoRoomError if its disk is full."""
    path = Path(path)
    above = (path, *path.absolute().parents)
    try:
        with tempfile.TemporaryFile(dir=next(folder for folder in above if folder.exists())):
            pass
    except OSError as error:
        if error.errno in FULL:
            raise NoRoomError(error.errno, error.strerror, str(path)) from None
        got = "a file" if path.is_file() else error.strerror
        rule = f"{kind} {path} must be a folder to write to"
        todo = "choose another, or change its permissions"
        raise InputError(f"{rule}, got {got}; {todo}") from None


# --- Private helpers ---


def _bring_back(old: Path, folder: Path, names: Sequence[str]) -> None:
    """Undo a replacement that was cut off, recognised by the last name's absence; then remove
    `old`."""
    if not (folder / names[-1]).exists():
        for name in names:
            if (old / name).exists():
                shutil.rmtree(folder / name, ignore_errors=True)
                (old / name).rename(folder / name)
    shutil.rmtree(old, ignore_errors=True)

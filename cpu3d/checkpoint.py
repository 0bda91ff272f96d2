"""A checkpoint is one uncompressed .npz: every variable as an array, and the run's state as JSON. No pickle."""

import contextlib
import errno
import io
import json
import os
import zipfile
from pathlib import Path
from typing import IO, Any, Dict, Iterator, Tuple

import numpy as np

from cpu3d.atomic import atomic_write
from cpu3d.errors import InputError

SCHEMA = 1

_STATE = "state.json"


class DamagedCheckpointError(InputError):
    """A file that is not what was once written."""


def save_checkpoint(path: Path, arrays: Dict[str, np.ndarray], state: Dict[str, Any]) -> int:
    """Write `arrays` and `state` to `path`; the file there before stays whole until the new one is on the disk.

    Returns the size in bytes. Raises OSError when the disk is full, with the old file untouched.
    """
    content = {"schema": SCHEMA, "names": sorted(arrays), **state}
    text = np.frombuffer(json.dumps(content, allow_nan=False).encode(), np.uint8)
    with atomic_write(path) as file:
        _write_zip(file, {_STATE: text, **arrays})
    return Path(path).stat().st_size


def load_checkpoint(path: Path) -> Tuple[Dict[str, np.ndarray], Dict[str, Any]]:
    """The arrays and the state of `save_checkpoint`. Every byte is checked against its CRC.

    Raises InputError when the file is missing or of another version, DamagedCheckpointError when its content shows that
    it is damaged, and OSError or MemoryError when it could not be read, which says nothing of its content.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"checkpoint {path} must exist, found none; train first, or name another run")
    with _Reader(io.FileIO(str(path))) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        try:
            arrays = _read_zip(file, size_bytes)
            state = json.loads(arrays.pop(_STATE).tobytes())
            schema, names = state.pop("schema"), state.pop("names")
            if sorted(arrays) != names:
                raise ValueError(f"{len(arrays)} arrays where {len(names)} were written")
        except _NotReadError as error:
            error.reason.filename = str(path)
            raise error.reason from None
        except MemoryError:
            raise
        except Exception as error:  # a damaged zip surfaces as whatever its reader trips over
            raise DamagedCheckpointError(
                f"checkpoint {path} must be whole, got {error!r}; restore it, or delete it"
            ) from None
    if schema != SCHEMA:
        raise InputError(f"checkpoint {path} must have schema {SCHEMA}, got {schema}; use the version that made it")
    return arrays, state


# --- Private helpers ---


class _NotReadError(Exception):
    """An I/O error. No OSError itself, as `zipfile` takes some of those for a file that is no zip."""

    def __init__(self, reason: OSError):
        self.reason = reason


class _Reader(io.BufferedReader):
    """A file that tells its I/O errors apart from what is wrong with its content."""

    def read(self, *size: int) -> bytes:
        with _told_apart():
            return super().read(*size)

    def seek(self, *where: int) -> int:
        with _told_apart():
            return super().seek(*where)


@contextlib.contextmanager
def _told_apart() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.EINVAL:  # a place before the file's start, which only a damaged directory names
            raise
        raise _NotReadError(error) from None


def _read_zip(file: IO[bytes], size_bytes: int) -> Dict[str, np.ndarray]:
    """The arrays of a file of that size, one at a time in memory beside those that are read."""
    arrays = {}
    with zipfile.ZipFile(file) as content:
        members = content.infolist()
        if any(one.compress_type for one in members) or sum(one.compress_size for one in members) > size_bytes:
            raise ValueError("a directory of another file")
        for one in members:
            member = io.BytesIO(content.read(one))  # to its end before it is parsed: only then is its CRC compared
            arrays[one.filename[: -len(".npy")]] = np.lib.format.read_array(member, allow_pickle=False)
    return arrays


def _write_zip(file: IO[bytes], arrays: Dict[str, np.ndarray]) -> None:
    """What `np.savez` writes. That, where the disk is full, leaves a zip behind which is ended when it is collected."""
    content = zipfile.ZipFile(file, "w")
    try:
        for name, array in arrays.items():
            with content.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
        content.close()
    except BaseException:
        content.fp = None  # else its end would be written to a file that is closed by then
        raise

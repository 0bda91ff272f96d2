"""A checkpoint is one uncompressed .npz: every variable as an array, and the run's state as JSON. No pickle.

It is written and read one array at a time, so that neither takes more memory than its largest array.
"""

import contextlib
import errno
import io
import json
import math
import os
import zipfile
from pathlib import Path
from typing import IO, Any, Dict, Iterator, Mapping, Tuple

import numpy as np

from cpu3d.errors import InputError
from cpu3d.util.atomic import atomic_write

SCHEMA = 1

_STATE = "state.json"


class DamagedCheckpointError(InputError):
    """A file that is not what was once written."""


class SavedArrays(Mapping[str, np.ndarray]):
    """The arrays of a checkpoint by name, each read when it is asked for and not kept.

    All of the file has been checked by then. It stays open, so whoever removes or replaces it does no harm.
    """

    def __init__(self, path: Path):
        """Raises what a damaged zip's reader trips over, and `_NotReadError`."""
        self._path = path
        content = _Reader(io.FileIO(str(path)))
        size_bytes = os.fstat(content.fileno()).st_size
        self._file = file = zipfile.ZipFile(content)
        members = file.infolist()
        if any(one.compress_type for one in members) or sum(one.compress_size for one in members) > size_bytes:
            raise ValueError("a directory of another file")
        bad = file.testzip()  # every byte against its CRC, a piece at a time
        if bad:
            raise ValueError(f"{bad} has another CRC than was written")
        self.shapes = {name[: -len(".npy")]: self._shape_of(name) for name in file.namelist()}
        """Name -> shape."""

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.shapes:
            raise KeyError(name)
        with _damage(self._path), self._file.open(f"{name}.npy") as member:
            return np.lib.format.read_array(member, allow_pickle=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def _shape_of(self, name: str) -> Tuple[int, ...]:
        """What a member's header says, which must be as long as the member is: memory is taken by it."""
        with self._file.open(name) as member:
            version = np.lib.format.read_magic(member)
            shape, _, dtype = np.lib.format.read_array_header_1_0(member)
            size_bytes = member.tell() + math.prod(shape) * dtype.itemsize
        if version != (1, 0) or dtype.hasobject or size_bytes != self._file.getinfo(name).file_size:
            raise ValueError(f"{name} is no array of {shape} {dtype}")
        return shape


def save_checkpoint(path: Path, arrays: Mapping[str, Any], state: Dict[str, Any]) -> int:
    """Write `arrays` and `state` to `path`; the file there before stays whole until the new one is on the disk.

    What of `arrays` is no array yet, as a tensor, becomes one when its turn comes. Returns the size in bytes. Raises
    OSError when the disk is full, with the old file untouched.
    """
    content = {"schema": SCHEMA, "names": sorted(arrays), **state}
    text = np.frombuffer(json.dumps(content, allow_nan=False).encode(), np.uint8)
    with atomic_write(path) as file:
        _write_zip(file, {_STATE: text, **arrays})
    return Path(path).stat().st_size


def load_checkpoint(path: Path) -> Tuple[SavedArrays, Dict[str, Any]]:
    """The arrays and the state of `save_checkpoint`. Every byte is checked against its CRC before this returns.

    Raises InputError when the file is missing or of another version, DamagedCheckpointError when its content shows that
    it is damaged, and OSError or MemoryError when it could not be read, which says nothing of its content.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"checkpoint {path} must exist, found none; train first, or name another run")
    with _damage(path):
        arrays = SavedArrays(path)
        state = json.loads(arrays[_STATE].tobytes())
        del arrays.shapes[_STATE]
        schema, names = state.pop("schema"), state.pop("names")
        if sorted(arrays) != names:
            raise ValueError(f"{len(arrays)} arrays where {len(names)} were written")
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

    def __del__(self):
        self.close()  # with the arrays that read from it, which nobody closes


@contextlib.contextmanager
def _told_apart() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.EINVAL:  # a place before the file's start, which only a damaged directory names
            raise
        raise _NotReadError(error) from None


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Turn what a damaged file's reader trips over, which may be anything, into DamagedCheckpointError.

    A disk that fails and memory that runs out prove nothing of what the file holds.
    """
    try:
        yield
    except _NotReadError as error:
        error.reason.filename = str(path)
        raise error.reason from None
    except MemoryError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise DamagedCheckpointError(
            f"checkpoint {path} must be whole, got {error!r}; restore it, or delete it"
        ) from None


def _write_zip(file: IO[bytes], arrays: Mapping[str, Any]) -> None:
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

"""A checkpoint is one uncompressed .npz: every variable as an array, and the run's state as JSON. No pickle."""

import io
import json
import zipfile
from pathlib import Path
from typing import IO, Any, Dict, Tuple

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

    Raises InputError when the file is missing or of another version, and DamagedCheckpointError when it is damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"checkpoint {path} must exist, found none; train first, or name another run")
    try:
        with zipfile.ZipFile(path) as content:
            # Each member is read to its end before it is parsed: only then is its CRC compared.
            members = {name[: -len(".npy")]: io.BytesIO(content.read(name)) for name in content.namelist()}
        arrays = {name: np.lib.format.read_array(file, allow_pickle=False) for name, file in members.items()}
        state = json.loads(arrays.pop(_STATE).tobytes())
        schema, names = state.pop("schema"), state.pop("names")
        if sorted(arrays) != names:
            raise ValueError(f"{len(arrays)} arrays where {len(names)} were written")
    except Exception as error:  # a damaged zip surfaces as whatever its reader trips over
        raise DamagedCheckpointError(
            f"checkpoint {path} must be whole, got {error!r}; restore it, or delete it"
        ) from None
    if schema != SCHEMA:
        raise InputError(f"checkpoint {path} must have schema {SCHEMA}, got {schema}; use the version that made it")
    return arrays, state


# --- Private helpers ---


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

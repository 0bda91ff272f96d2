"""The checkpoints of a run: its last few, each a whole file named by its step, and the best
weights.

    write_next(run, 120, arrays, state)   run/checkpoints/step-00000120.npz; those older than the
                                          last KEPT go
    checkpoint = newest(run)              the newest whole one, with the damaged ones after it
    path = weights_file(run, "last")      for prediction: "best", or the newest whole one

A checkpoint is one uncompressed .npz: every variable as an array, and the run's state as JSON. No
pickle. It is written atomically, and read, one array at a time, so that neither takes more memory
than the largest array. Instead of a damaged one the one before is taken."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import weakref
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

import numpy as np

from cpu3d.data.region import Array
from cpu3d.errors import InputError, fault_of
from cpu3d.run.log import FINISHED, flush_log, last_end
from cpu3d.util.atomic import atomic_write
from memory_estimator.common.files import open_regular, typed

SCHEMA = 1
KEPT = 3  # checkpoints, besides the best weights
BEST = "best.npz"
POSTPROCESSING = "postprocessing.json"  # in the run's folder: what the best weights decide
PIECE_BYTES = 2**20  # of a file, read at a time
_STATE = "state.json"


class DamagedCheckpointError(InputError):
    """A checkpoint file whose content is not the one that was written."""


class SavedArrays(Mapping[str, Array]):
    """The arrays of a checkpoint by name, each read when it is asked for and not kept.

    The constructor checks all of the file and keeps it open, so that it may be removed or replaced
    meanwhile."""

    def __init__(self, path: Path):
        """Raises as `load_checkpoint`."""
        self._path = path
        opened = open(path, "rb")  # noqa: SIM115
        weakref.finalize(self, opened.close)
        digest = hashlib.sha256()
        # All of it is read once: `zipfile` would call an error of the disk a damaged file.
        while piece := opened.read(PIECE_BYTES):
            digest.update(piece)
        self.sha256 = digest.hexdigest()
        size_bytes = opened.tell()
        with self._damage():
            self._file = zipfile.ZipFile(opened)
            members = self._file.infolist()
            are_packed = any(member.compress_type for member in members)
            content_bytes = sum(member.compress_size for member in members)
            if are_packed or content_bytes > size_bytes:
                raise ValueError("a directory of another file")
            bad = self._file.testzip()  # every byte against its CRC, a piece at a time
            if bad:
                raise ValueError(f"{bad} has another CRC than was written")
            self.shapes = {
                name[: -len(".npy")]: self._shape_of(name) for name in self._file.namelist()
            }
            self.state = json.loads(self[_STATE].tobytes())
            schema = self.state.pop("schema")
            names = self.state.pop("names")
            del self.shapes[_STATE]
            if sorted(self) != names:
                raise ValueError(
                    f"{len(self)} arrays instead of the {len(names)} that were written"
                )
        if schema != SCHEMA:
            raise InputError(
                f"checkpoint {path} must have schema {SCHEMA}, got {schema}; use the version that "
                "made it"
            )

    def __getitem__(self, name: str) -> Array:
        if name not in self.shapes:
            raise KeyError(name)
        with self._damage(), self._file.open(f"{name}.npy") as member:
            return np.lib.format.read_array(member, allow_pickle=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def _shape_of(self, name: str) -> Tuple[int, ...]:
        """The shape in a member's header, which must suit the member's size."""
        with self._file.open(name) as member:
            version = np.lib.format.read_magic(member)
            shape, _, dtype = np.lib.format.read_array_header_1_0(member)
            size_bytes = member.tell() + math.prod(shape) * dtype.itemsize
        if version != (1, 0) or dtype.hasobject or size_bytes != self._file.getinfo(name).file_size:
            raise ValueError(f"{name} is no array of {shape} {dtype}")
        return shape

    @contextlib.contextmanager
    def _damage(self) -> Iterator[None]:
        """Raise DamagedCheckpointError for any error of reading, but for one of the disk or of
        memory: those do not show what the file holds."""
        try:
            yield
        except Exception as error:
            # A directory with wrong positions ends in EINVAL.
            is_of_disk = isinstance(error, OSError) and error.errno != errno.EINVAL
            if is_of_disk or isinstance(error, MemoryError):
                raise
            raise DamagedCheckpointError(
                f"checkpoint {self._path} must be whole, got {error!r}; {how_to_go_on(self._path)}"
            ) from None


def save_checkpoint(path: Path, arrays: Mapping[str, Any], state: Dict[str, Any]) -> int:
    """Write `arrays` and `state` to `path`, atomically, and return the size in bytes. A tensor
    becomes an array when its turn comes."""
    content = {"schema": SCHEMA, "names": sorted(arrays), **state}
    text = np.frombuffer(json.dumps(content, allow_nan=False).encode(), np.uint8)
    with atomic_write(path) as file:
        archive = zipfile.ZipFile(file, "w")
        try:
            for name, array in {_STATE: text, **arrays}.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
            archive.close()
        except BaseException:
            archive.fp = None  # else its destructor writes to the closed file
            raise
    return Path(path).stat().st_size


def load_checkpoint(path: Path) -> Tuple[SavedArrays, Dict[str, Any]]:
    """The arrays and the state of `save_checkpoint`, every byte checked against its CRC.

    Raises InputError when the file is missing or of another version, DamagedCheckpointError when it
    is damaged, and OSError or MemoryError when it could not be read, which does not show what it
    holds."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"checkpoint {path} must exist, found none; {how_to_go_on(path)}")
    arrays = SavedArrays(path)
    return arrays, arrays.state


# --- A run's checkpoints ---


@dataclass
class Progress:
    """How far a run has got: what changes while it trains, and a checkpoint keeps."""

    step: int = 0  # steps that are done
    best: Optional[float] = None  # the highest mean Dice of a validation so far
    best_is_coarse: bool = False  # then the first one at full resolution replaces it at any Dice
    owes_validation: bool = False
    """Whether the run was stopped before it could validate the step it has reached."""
    trained_s: float = 0.0
    """Wall time of all attempts, up to the last checkpoint."""
    validated_s: float = 0.0
    """Of it, in validations, those that were broken off included."""

    def is_over(self, steps: int) -> bool:
        """Whether the last of a run's steps is done, and validated."""
        return self.step >= steps and not self.owes_validation


def progress_of(state: Mapping[str, Any]) -> Progress:
    """The progress in a checkpoint's state, which has more. Raises ValueError if a part is of
    another type."""
    names = {field.name for field in dataclasses.fields(Progress)}
    return typed({name: state[name] for name in state if name in names}, Progress, "state")


@dataclass(frozen=True)
class Checkpoint:
    """The newest checkpoint that is whole."""

    path: Path
    arrays: SavedArrays
    state: Dict[str, Any]
    damaged: Dict[Path, str]  # newer file -> its problem


def write_next(run: Path, step: int, arrays: Mapping[str, Any], state: Dict[str, Any]) -> int:
    """Add the checkpoint of `step`, and remove all but the last KEPT; returns its size in
    bytes. The log is on the disk before it: after a power cut no checkpoint is there whose steps
    the log does not have."""
    flush_log(run)
    size = save_checkpoint(_folder(run) / f"step-{step:08d}.npz", arrays, state)
    for old in checkpoints(run)[KEPT:]:
        with contextlib.suppress(OSError):  # one too many does no harm
            old.unlink()
    return size


def write_best(run: Path, weights: Mapping[str, Any], state: Dict[str, Any]) -> None:
    """Keep the network's weights alone as the best so far."""
    save_checkpoint(_folder(run) / BEST, weights, state)


def read_state(path: Path) -> Dict[str, Any]:
    """The state in a checkpoint alone, quickly; {} without a file and for one whose state is
    damaged."""
    with contextlib.suppress(Exception):  # a damaged file may raise anything
        with os.fdopen(open_regular(path), "rb") as file:
            content = json.loads(np.load(file)[_STATE].tobytes())
        return content if isinstance(content, dict) else {}
    return {}


def best_score(run: Path) -> Optional[float]:
    """The mean Dice of a run's best weights, by their file's state alone; None without a file, for
    a damaged file, and for a run without validation."""
    best = read_state(_folder(run) / BEST).get("best")
    return best if isinstance(best, float) and math.isfinite(best) else None


def lost_best(run: Path) -> str:
    """Why the best weights of a run cannot be read; "" if they can. Raises OSError if that does not
    show what the file holds."""
    try:
        load_checkpoint(_folder(run) / BEST)
    except InputError as error:
        return str(error)
    return ""


def how_to_go_on(path: Path) -> str:
    """What to do if a file of a run's checkpoints is missing or cannot be taken."""
    if path.name != BEST:
        return "restore it, or delete it"
    return "repeat the run's `train`, which keeps it again, or take --weights last"


def checkpoints(run: Path) -> List[Path]:
    """The files of a run's checkpoints, the newest first, not opened; [] without a folder of
    them."""
    try:
        names = os.listdir(_folder(run))
    except FileNotFoundError:
        return []
    paths = [_folder(run) / name for name in names if re.fullmatch(r"step-\d{8,}\.npz", name)]
    return sorted(paths, key=step_of, reverse=True)


@contextlib.contextmanager
def writing(run: Path, problem: str) -> Iterator[None]:
    """Raise an OSError again with the problem and the checkpoint that the run can continue from."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{problem}: {fault_of(error)}; {last_saved(run)}; free disk space, then repeat the "
            "command"
        ) from error


def last_saved(run: Path) -> str:
    """A sentence that names the checkpoint that a run can continue from."""
    saved = [path.name for path in checkpoints(run)[:1]]
    return f"the last checkpoint is {saved[0]}" if saved else "there is no checkpoint yet"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.stem.partition("-")[2])


def newest(run: Path) -> Optional[Checkpoint]:
    """The newest checkpoint that is whole; None if there is none at all.

    Raises InputError if there are some and none is whole, or one is of another version, and as
    `load_checkpoint` if one could not be read: an older one is not taken for that."""
    damaged: Dict[Path, str] = {}
    for path in checkpoints(run):
        try:
            arrays, state = load_checkpoint(path)
            return Checkpoint(path, arrays, state, damaged)
        except DamagedCheckpointError as error:
            damaged[path] = str(error)
        except (InputError, FileNotFoundError):
            if path.is_file():
                raise
    if damaged:
        raise InputError(*damaged.values())
    return None


def is_over(run: Path) -> bool:
    """Whether a run has finished and its checkpoint from then is whole: `train` would go on from an
    earlier one."""
    end = last_end(run)
    if end.get("reason") != FINISHED:
        return False
    try:
        last = newest(run)
    except InputError:
        return False
    return last is not None and step_of(last.path) >= end["step"]


def is_trained(run: Path, steps: int) -> bool:
    """Whether a run has taken `steps` steps, and has its last and its best weights: `train`
    replaces those that are lost."""
    if not (run / "checkpoints" / BEST).is_file() or not is_over(run):
        return False
    return 0 < steps <= last_end(run)["step"]


def set_aside(checkpoint: Checkpoint) -> List[str]:
    """Rename the damaged checkpoints that are newer than a whole one, in place of earlier ones;
    returns a line for each to print."""
    lines = []
    for path, problem in checkpoint.damaged.items():
        path.replace(path.with_suffix(".damaged"))
        lines.append(
            f"warning: {problem}; renamed to .damaged, continuing from {checkpoint.path.name}"
        )
    return lines


def weights_file(run: Path, weights: str) -> Path:
    """The file of the "best" weights of a run, or of the "last": its newest whole checkpoint.
    Raises InputError if there is none."""
    path = _folder(run) / BEST
    if weights == "last":
        last = newest(run)
        if last is not None:
            return last.path
    elif path.is_file():
        return path
    raise InputError(
        f"run {run} must hold its {weights} weights, found none; repeat its `train`, or take "
        "others with --weights"
    )


# --- Private helpers ---


def _folder(run: Path) -> Path:
    return Path(run) / "checkpoints"

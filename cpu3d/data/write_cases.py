"""Write cases into a store, many at a time, each whole or not at all."""

import contextlib
import dataclasses
import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, Iterator, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from cpu3d.data.case import load_case
from cpu3d.data.files import page_cache
from cpu3d.data.files.arrays import FORMATS, Bytes, content_sha256, decode_b2nd, encode, file_sha256
from cpu3d.data.layouts import CaseFiles
from cpu3d.data.records import CaseRecord, array_path, record_path, to_json
from cpu3d.data.region import crop, whole
from cpu3d.errors import InputError
from cpu3d.util.atomic import atomic_write, write_json
from cpu3d.util.child import KILLED, run_jobs

FORMAT_CHOICES = {
    "npy": {"format": "npy", "scores": False},
    "float16": {"format": "npy", "scores": True},
    "b2nd": {"format": "b2nd", "scores": False},
}
"""What --format takes -> the two fields of `Settings` that it stands for."""


@dataclass(frozen=True)
class Settings:
    """How cases become arrays. They are part of what a store is: it is never continued with others."""

    format: str = "npy"
    """Of the files, "npy" or "b2nd"."""
    crop: bool = False
    """Store each brain's box and not the whole grid."""
    zero_nan: bool = False
    """NaN and infinite voxels become background; without it they are an error."""
    label_map: Mapping[int, int] = field(default_factory=dict)
    """Label codes to change while reading, old -> new."""
    scores: bool = False
    """Every image is float16 z-scores, also where int16 would be exact. Packing does not change it back."""

    def __post_init__(self):
        if self.format not in FORMATS:
            raise InputError(f"format of a store's files must be one of {', '.join(FORMATS)}, got {self.format!r}")


USUAL = Settings()


@dataclass(frozen=True)
class Job:
    """A case to convert, with all that a process needs to know for it."""

    files: CaseFiles
    channels: Tuple[str, ...]
    labels: Dict[int, str]
    dataset_folder: Path
    store: Path
    settings: Settings = USUAL


Outcome = Union[CaseRecord, Tuple[str, ...]]
"""The record of a case that was stored, or what is wrong with one that was not."""


def convert(job: Job) -> Outcome:
    """Write one case's arrays and then its record. Raises OSError when the store cannot be written."""
    case_id, settings = job.files.case_id, job.settings
    try:
        case = load_case(
            job.files,
            channels=job.channels,
            labels=job.labels,
            dataset_folder=job.dataset_folder,
            scores=settings.scores,
            zero_nan=settings.zero_nan,
            label_map=settings.label_map,
        )
    except InputError as error:
        return error.problems
    except MemoryError:
        return (f"case {case_id} must fit into memory, got too little; run again with fewer --workers",)
    except Exception as error:  # whatever is odd about one case, the others are still told
        return (f"case {case_id} must be readable, got {type(error).__name__}: {error}; mend it or leave it out",)
    record = write_arrays(
        job.store, case.record, case.image, case.label, format_=settings.format, cropped=settings.crop
    )
    write_json(record_path(job.store, case_id), to_json(record))
    return record


def write_arrays(
    store: Path, record: CaseRecord, image: np.ndarray, label: Optional[np.ndarray], *, format_: str, cropped: bool
) -> CaseRecord:
    """Write a case's arrays, given on its whole grid, and return its record as it stands in this store.

    `cropped` keeps only the brain's box; nothing is lost, as all outside is 0. Files are read back and compared. Raises
    OSError when the disk is full, fails, or may not be written.
    """
    stored = record.box if cropped else whole(record.shape)
    record = dataclasses.replace(record, format=format_, stored=stored)
    changes = {}
    for part, name, array in (("x", "image", image), ("y", "label", label)):
        if array is not None:
            array, path = np.ascontiguousarray(crop(array, stored)), array_path(store, record, part)
            pieces = encode(array, format_)
            if format_ == "b2nd" and not np.array_equal(decode_b2nd(pieces[0]), array):
                raise OSError(errno.EIO, "blosc2 does not unpack what it has packed; try another version", str(path))
            size_bytes, sha256 = content_sha256(pieces)
            _write_file(path, pieces, size_bytes, sha256)
            changes.update({f"{name}_bytes": size_bytes, f"{name}_sha256": sha256})
    return dataclasses.replace(record, **changes)


def outcomes(jobs: Sequence[Job], workers: int) -> Iterator[Tuple[Job, Outcome]]:
    """Convert the jobs in `workers` processes and yield each with its outcome as it ends. Closing it stops them."""
    with contextlib.closing(run_jobs(convert, jobs, workers)) as results:
        for job, outcome in results:
            if outcome is KILLED:
                reason = "its process was killed, most likely out of memory; free some and run again"
                outcome = (f"case {job.files.case_id} must fit into memory, but {reason}",)
            yield job, outcome


# --- Private helpers ---


def _write_file(path: Path, pieces: Sequence[Bytes], size_bytes: int, sha256: str) -> None:
    """Write a file whose space is claimed first, so that a full disk shows before the work; then read it back.

    From the disk, where the kernel lets go of its copies: those are right whatever the disk has made of them.
    """
    with atomic_write(path) as file:
        _claim_space(file.fileno(), size_bytes)
        for piece in pieces:
            file.write(piece)
    with open(path, "rb") as file:
        page_cache.give_back(file.fileno())
    if file_sha256(path) != sha256:
        path.unlink()
        raise OSError(errno.EIO, "what was read back is not what was written, the disk may be failing", str(path))


def _claim_space(handle: int, size_bytes: int) -> None:
    """Reserve the space of a file. Where the file system cannot, writing will find out."""
    try:
        os.posix_fallocate(handle, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise

"""Write cases into a store, many at a time, each whole or not at all."""

import contextlib
import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterator, Sequence, Tuple, Union

import numpy as np

from cpu3d.atomic import atomic_write, write_json
from cpu3d.data.case import file_sha256, load_case, npy_parts
from cpu3d.data.layouts import CaseFiles
from cpu3d.data.store import CaseRecord, image_path, label_path, record_path, to_json
from cpu3d.errors import InputError
from cpu3d.workers import KILLED, run_jobs


@dataclass(frozen=True)
class Job:
    """A case to convert, with all that a process needs to know for it."""

    files: CaseFiles
    channels: Tuple[str, ...]
    labels: Dict[int, str]
    dataset_folder: Path
    store: Path


Outcome = Union[CaseRecord, Tuple[str, ...]]
"""The record of a case that was stored, or what is wrong with one that was not."""


def convert(job: Job) -> Outcome:
    """Write one case's arrays and then its record. Raises OSError when the store cannot be written."""
    case_id = job.files.case_id
    try:
        case = load_case(job.files, channels=job.channels, labels=job.labels, dataset_folder=job.dataset_folder)
    except InputError as error:
        return error.problems
    except MemoryError:
        return (f"case {case_id} must fit into memory, got too little; run again with fewer --workers",)
    except Exception as error:  # whatever is odd about one case, the others are still told
        return (f"case {case_id} must be readable, got {type(error).__name__}: {error}; mend it or leave it out",)
    _write_array(image_path(job.store, case_id), case.image, case.record.image_sha256)
    if case.label is not None:
        _write_array(label_path(job.store, case_id), case.label, case.record.label_sha256)
    write_json(record_path(job.store, case_id), to_json(case.record))
    return case.record


def outcomes(jobs: Sequence[Job], workers: int) -> Iterator[Tuple[Job, Outcome]]:
    """Convert the jobs in `workers` processes and yield each with its outcome as it ends. Closing it stops them."""
    with contextlib.closing(run_jobs(convert, jobs, workers)) as results:
        for job, outcome in results:
            if outcome is KILLED:
                reason = "its process was killed, most likely out of memory; free some and run again"
                outcome = (f"case {job.files.case_id} must fit into memory, but {reason}",)
            yield job, outcome


# --- Private helpers ---


def _write_array(path: Path, array: np.ndarray, sha256: str) -> None:
    """Write a .npy file whose space is claimed first, so that a full disk shows before the work; then read it back."""
    header, voxels = npy_parts(array)
    with atomic_write(path) as file:
        _claim_space(file.fileno(), len(header) + voxels.nbytes)
        file.write(header)
        file.write(voxels)
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

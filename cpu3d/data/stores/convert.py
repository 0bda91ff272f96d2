"""Cases of a data set into the arrays and records of a store, several at a time.

A case is written whole or not at all: its record is written after its arrays.
"""

import contextlib
import errno
import functools
import hashlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple, Union, cast

import numpy as np

from cpu3d.data import nifti
from cpu3d.data.cases.case import channel_indices, load_case
from cpu3d.data.datasets.dataset import CaseFiles, Dataset, Problems
from cpu3d.data.files.arrays import encode, file_sha256, give_back
from cpu3d.data.files.reader import Reader
from cpu3d.data.manifest import (
    ArrayFile,
    CaseRecord,
    Format,
    Geometry,
    SourceFile,
    StoreSettings,
    array_path,
    case_from_json,
    record_bytes,
    record_path,
)
from cpu3d.data.normalise import Kind, Normalisation
from cpu3d.data.region import Array, bounding_box, crop, whole
from cpu3d.errors import FULL, InputError, fault_of
from cpu3d.util.atomic import atomic_write, remove_partials, write_bytes
from cpu3d.util.child import run_jobs
from cpu3d.util.progress import bar
from cpu3d.util.records import count
from memory_estimator.common.files import read_regular


def convert(
    dataset: Dataset, store_dir: Path, settings: StoreSettings, files: CaseFiles
) -> Union[CaseRecord, Tuple[str, ...]]:
    """Write a case's arrays, then its record. A case whose arrays are there and good stays as it
    is.

    Returns the record, or the problems of the case; with problems nothing is written. Raises
    OSError.
    """
    record = _kept(store_dir, files, dataset.normalisation)
    if record is not None:
        record = replace(record, patient_id=files.patient_id)
    else:
        try:
            case = load_case(
                files,
                channels=dataset.channels,
                labels=dataset.labels,
                ignore=dataset.ignore,
                dataset_folder=dataset.folder,
                zero_nan=settings.zero_nan,
                target_spacing_mm=settings.target_spacing_mm,
                normalisation=dataset.normalisation,
            )
        except InputError as error:
            return error.problems
        # Any failure of one case, too little memory too, leaves the others to be converted.
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
            todo = "repair it, leave it out, or use fewer --workers"
            return (f"case {files.case_id} must be readable in memory, got {got}; {todo}",)
        record = write_arrays(
            store_dir,
            case.record,
            case.image,
            case.label,
            source_label=case.source_label,
            format_=settings.format,
            cropped=settings.crop,
        )
    write_bytes(record_path(store_dir, record.case_id), record_bytes(record))
    return record


def header_problems(files: CaseFiles, channels: Sequence[str]) -> List[str]:
    """What the headers of a case's files show to be wrong, so that it need not be read: other
    channels than these, or grids that differ."""
    wanted: List[Tuple[str, ...]] = [(channel,) for channel in channels]
    if len(files.images) == 1:
        wanted = [tuple(channels)]
    problems: List[str] = []
    first: Optional[Geometry] = None
    for path, names in itertools.zip_longest(files.paths, wanted[: len(files.images)]):
        try:
            grid, volumes = nifti.read_grid(path)
            if names:
                channel_indices(path, volumes, names, files.names)
            elif volumes > 1:
                got = f"got {volumes} volumes; give one label map"
                problems.append(f"label {path} must be 3D, {got}")
            first = first or grid
            nifti.on_grid(np.broadcast_to(0, grid.shape), path, grid, files.images[0], first)
        except InputError as error:
            problems += error.problems
    return problems


def _kept(
    store_dir: Path, files: CaseFiles, normalisation: Sequence[Normalisation]
) -> Optional[CaseRecord]:
    """The record of a case whose arrays are as they were written, from the sources that it has now;
    else None."""
    try:
        record = case_from_json(read_regular(record_path(store_dir, files.case_id)))
    except (FileNotFoundError, ValueError):
        return None
    # Until the window of a CT is known, its whole grid is its box, and stored. A case of another
    # kind was made before it was known, or by another window.
    is_open = [each.low is None for each in normalisation if each.kind is Kind.CT]
    is_whole = record.box == record.stored == whole(record.shape)
    if not same_files(files.paths, record.sources) or (is_open and is_open[0] != is_whole):
        return None
    if Reader(store_dir, "pread").problems(record, contents=True):
        return None
    return record


def same_files(paths: Sequence[Path], sources: Sequence[SourceFile]) -> bool:
    """Whether files are those of earlier records, by size and date, or by hash if the date is
    another."""
    if len(paths) != len(sources):
        return False
    for path, source in zip(paths, sources):
        status = path.stat()
        if status.st_size != source.size_bytes:
            return False
        if status.st_mtime_ns != source.mtime_ns and file_sha256(path) != source.sha256:
            return False
    return True


def write_arrays(
    store: Path,
    record: CaseRecord,
    image: Array,
    label: Optional[Array],
    *,
    source_label: Optional[Array] = None,
    format_: str,
    cropped: bool,
) -> CaseRecord:
    """Write a case's arrays, which are on its whole grid, and return its record with the facts of
    the files.

    `cropped` keeps only the content box and all that the label has; outside it is
    background. `source_label` is that of a case that was resampled, on its source's grid, and is
    kept whole. Files are read back and compared. Raises OSError."""
    stored = whole(record.shape)
    if cropped:
        stored = record.box
        if label is not None and label.any():  # what is ignored may be around the box
            stored = stored.union(bounding_box(label))
    record = replace(record, format=cast(Format, format_), stored=stored)
    arrays: Dict[str, Array] = {"x": crop(image, stored)}
    if label is not None:
        arrays["y"] = crop(label, stored)
    if source_label is not None:
        arrays["t"] = source_label
    files = {}
    for kind, array in arrays.items():
        files[kind] = _write_array(array_path(store, record, kind), array, format_)
    return replace(record, files=files)


def _write_array(path: Path, array: Array, format_: str) -> ArrayFile:
    """Write an array's file, and read it back."""
    pieces = encode(np.ascontiguousarray(array), format_)
    digest = hashlib.sha256()
    with atomic_write(path) as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
    with open(path, "rb") as written:
        give_back(written.fileno())  # so that the disk is read and not the kernel's copy
    if file_sha256(path) != digest.hexdigest():
        path.unlink()
        problem = "what was read back is not what was written, the disk may be failing"
        raise OSError(errno.EIO, problem, str(path))
    return ArrayFile(sum(map(len, pieces)), digest.hexdigest())


def convert_all(
    dataset: Dataset, store_dir: Path, settings: StoreSettings, workers: int
) -> Tuple[Dict[str, CaseRecord], Problems]:
    """The records of all good cases and the problems of the bad ones, by case id.

    Raises OSError, as on a full disk, and KeyboardInterrupt, both with the number of cases that are
    kept, and MemoryError as `run_jobs`."""
    records: Dict[str, CaseRecord] = {}
    problems: Problems = {}
    cases = dataset.cases
    bare = replace(dataset, cases=(), problems={}, patient_rules={})
    results = run_jobs(functools.partial(convert, bare, store_dir, settings), cases, workers)
    try:
        with contextlib.closing(results), bar("prepare", total=len(cases)) as advance:
            for files, outcome in results:
                if isinstance(outcome, CaseRecord):
                    records[files.case_id] = outcome
                else:
                    problems[files.case_id] = list(outcome)
                advance()
    except (OSError, KeyboardInterrupt) as error:
        finished = list((store_dir / "cases").glob("*.json"))
        kept = f"{count(finished, 'finished case')} kept in {store_dir}"
        todo = "run the same command again to continue"
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(f"{kept}; {todo}") from None
        if error.errno in FULL:
            todo = f"free disk space, then {todo}"
        raise OSError(f"writing stopped, {fault_of(error)}; {kept}; {todo}") from error
    finally:
        remove_partials(store_dir, store_dir / "cases")
    return records, problems

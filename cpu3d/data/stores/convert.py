"""Cases of a data set into the arrays and records of a store, several at a time.

A case is written whole or not at all: its record is written after its arrays.
"""

import contextlib
import errno
import functools
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Iterator, NamedTuple, Optional, Sequence, Tuple, Union, cast

import numpy as np

from cpu3d.data.cases.case import load_case
from cpu3d.data.datasets.dataset import CaseFiles, Dataset, Problems
from cpu3d.data.files.arrays import FORMATS, encode, file_sha256, give_back
from cpu3d.data.files.reader import Reader
from cpu3d.data.manifest import (
    CaseList,
    CaseRecord,
    Format,
    SourceFile,
    array_path,
    case_from_json,
    case_list,
    record_path,
    to_json,
)
from cpu3d.data.normalise import Kind, Normalisation
from cpu3d.data.region import Array, bounding_box, crop, whole
from cpu3d.errors import FULL, InputError, fault_of
from cpu3d.util.atomic import atomic_write, remove_partials, write_json
from cpu3d.util.child import KILLED, run_jobs
from cpu3d.util.progress import bar
from cpu3d.util.records import count
from memory_estimator.common.files import read_regular
from memory_estimator.common.schema import check, option
from models.strides import Spacing3


@dataclass(frozen=True)
class StoreSettings:
    """The settings by which cases become arrays. A store is continued with the same settings
    only."""

    format: str = option(
        "npy",
        "npy: int16, exact or in steps, read without unpacking; b2nd: the same"
        " packed to a tenth, for slow disks and networks",
        choices=FORMATS,
    )
    crop: bool = option(
        False,
        "store each case's content box only, outside of which nothing is there; whole grids of the"
        " CT of a new store, whose boxes are known last",
    )
    zero_nan: bool = option(False, "make NaN and infinite voxels background, and count them")
    target_spacing_mm: Optional[Spacing3] = None  # that cases are resampled to; None: as they are
    normalise: Tuple[str, ...] = option(
        (),
        "how channels are normalised, such as CT=zscore: "
        + ", ".join(kind.value for kind in Kind)
        + " (default: by name and voxels, docs/data.md)",
        metavar="CHANNEL=KIND",
    )

    def __post_init__(self) -> None:
        check(self)


USUAL = StoreSettings()


class Job(NamedTuple):
    """A case to convert."""

    files: CaseFiles
    before: Optional[CaseRecord] = None
    """Its record in a finished store, whose arrays are made again as they were; None for a case
    that is new."""


def convert(
    dataset: Dataset, store_dir: Path, settings: StoreSettings, job: Job
) -> Union[CaseRecord, Tuple[str, ...]]:
    """Write a case's arrays, then its record. A new case whose arrays are there and good stays as
    it is.

    Returns the record, or the problems of the case; with problems nothing is written. Raises
    OSError.
    """
    files, before = job
    if before is None:
        finished = _finished(store_dir, files, dataset.normalisation)
        if finished:
            return finished
    if before and not same_sources(files, before):
        return (other_files(store_dir, files),)
    rule = f"case {files.case_id} must"
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
        return (f"{rule} be readable in memory, got {got}; {todo}",)
    if before and _voxels(case.record) != _voxels(before):
        got = "got others from the same files; use the versions in manifest.json"
        return (f"{rule} get back the voxels that it had in store {store_dir}, {got}",)
    # A case may have been stored before its box was known.
    was_whole = before is not None and before.stored == whole(before.shape)
    record = write_arrays(
        store_dir,
        before or case.record,
        case.image,
        case.label,
        source_label=case.source_label,
        format_=settings.format,
        cropped=settings.crop and not was_whole,
    )
    write_json(record_path(store_dir, record.case_id), to_json(record))
    return record


def _voxels(record: CaseRecord) -> Tuple[str, ...]:
    source = record.resampled_from
    of_source = source.label_voxels_sha256 if source else ""
    return record.image_voxels_sha256, record.label_voxels_sha256, of_source


def _finished(
    store_dir: Path, files: CaseFiles, normalisation: Sequence[Normalisation]
) -> Optional[CaseRecord]:
    """The record of a case whose arrays are as they were written, from the sources that it has now;
    else None."""
    try:
        record = case_from_json(read_regular(record_path(store_dir, files.case_id)))
    except (FileNotFoundError, ValueError):
        return None
    if record.patient_id != files.patient_id or not same_sources(files, record):
        return None
    # Until the window of a CT is known, its box is not, and the record has peaks. One with a box
    # has it by the window of an earlier call, whose training cases may have been others; one with
    # peaks was left out of the store before its window was known.
    is_open = any(each.kind is Kind.CT and each.low is None for each in normalisation)
    if bool(record.peaks) != is_open:
        return None
    if Reader(store_dir, "pread").problems(record, contents=True):
        return None
    return record


def same_sources(files: CaseFiles, record: CaseRecord) -> bool:
    """Whether a case has the files that it was made from, by size and date, or by hash if the date
    is another."""
    return same_files(files.paths, record.sources)


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


def other_files(store_dir: Path, files: CaseFiles) -> str:
    """The line for a case whose id has other files than the case of the store was made from."""
    rule = f"case {files.case_id} must be the one of store {store_dir}"
    names = ", ".join(path.name for path in files.paths)
    todo = "bring back those it was made from, give it another id, or prepare a new store"
    return f"{rule}, got other files, {names}; {todo}"


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

    `cropped` keeps only the content box, if it is known, and all that the label has; outside it is
    background. `source_label` is that of a case that was resampled, on its source's grid, and is
    kept whole. Files are read back and compared. Raises OSError."""
    stored = whole(record.shape)
    if cropped and not record.peaks:
        stored = record.box
        if label is not None and label.any():  # what is ignored may be around the box
            stored = stored.union(bounding_box(label))
    record = replace(record, format=cast(Format, format_), stored=stored)
    size_bytes, sha256 = _write_array(array_path(store, record, "x"), crop(image, stored), format_)
    record = replace(record, image_bytes=size_bytes, image_sha256=sha256)
    if label is None:
        return record
    size_bytes, sha256 = _write_array(array_path(store, record, "y"), crop(label, stored), format_)
    record = replace(record, label_bytes=size_bytes, label_sha256=sha256)
    if source_label is None or record.resampled_from is None:
        return record
    size_bytes, sha256 = _write_array(array_path(store, record, "t"), source_label, format_)
    source = replace(record.resampled_from, label_bytes=size_bytes, label_sha256=sha256)
    return replace(record, resampled_from=source)


def _write_array(path: Path, array: Array, format_: str) -> Tuple[int, str]:
    """Write an array's file, read it back, and return its length in bytes and its SHA-256."""
    pieces = encode(np.ascontiguousarray(array), format_)
    digest = hashlib.sha256()
    with atomic_write(path, size_bytes=sum(map(len, pieces))) as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
    with open(path, "rb") as written:
        give_back(written.fileno())  # so that the disk is read and not the kernel's copy
    if file_sha256(path) != digest.hexdigest():
        path.unlink()
        problem = "what was read back is not what was written, the disk may be failing"
        raise OSError(errno.EIO, problem, str(path))
    return sum(map(len, pieces)), digest.hexdigest()


def convert_all(
    jobs: Sequence[Job], dataset: Dataset, store_dir: Path, settings: StoreSettings, workers: int
) -> Tuple[CaseList, Problems]:
    """The records of all good cases, finished ones included, and the problems of the bad ones, by
    case id.

    Raises OSError, as on a full disk, and KeyboardInterrupt, both with the number of cases that are
    kept."""
    if not jobs:
        return case_list(()), {}
    problems: Problems = {}
    bare = replace(dataset, cases=(), problems={}, patient_rules={})
    results = run_jobs(functools.partial(convert, bare, store_dir, settings), jobs, workers)

    def good() -> Iterator[CaseRecord]:
        for job, outcome in results:
            case_id = job.files.case_id
            if isinstance(outcome, CaseRecord):
                yield outcome
            elif outcome is KILLED:
                rule = f"case {case_id} must fit into memory, got a killed process"
                problems[case_id] = [f"{rule}; use fewer --workers"]
            else:
                problems[case_id] = list(outcome)
            advance()

    try:
        with contextlib.closing(results), bar("prepare", total=len(jobs)) as advance:
            records = CaseList.collected(good(), store_dir)
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


def refuse_bad_cases(problems: Problems, kept: str) -> None:
    """Raise InputError with all problems of a data set's cases, if any; `kept` are words for the
    cases that stay."""
    if not problems:
        return
    lines = [problem for case_id in sorted(problems) for problem in problems[case_id]]
    rule = f"the data set must be without bad cases, got {count(problems, 'bad case')}"
    todo = "repair the bad cases and run again, or leave them out with --skip-bad"
    raise InputError(*lines, f"{rule}; {kept}: {todo}")

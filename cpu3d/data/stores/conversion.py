"""One case into a store, whole or not at all; and what an unfinished store is, has and needs.

source.json says whose store it is and how its arrays are made; a case's record is written after its arrays and marks
them as good; quarantine.jsonl lists the cases that were left out.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Container, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from cpu3d.data.files import pages
from cpu3d.data.files.arrays import FORMATS, decode_b2nd, encode, file_sha256
from cpu3d.data.records import SCHEMA, CaseRecord, Manifest, array_path, case_from_json, record_path, to_json
from cpu3d.data.region import crop, whole
from cpu3d.data.stores.case import load_case, source_name
from cpu3d.data.stores.layouts import CaseFiles, Dataset, Problem, labels_in_use
from cpu3d.errors import InputError, refuse
from cpu3d.util.atomic import atomic_write, is_untouched, remove_partials, write_json
from cpu3d.util.child import KILLED, run_jobs
from cpu3d.util.progress import bar
from cpu3d.util.records import count
from memory_estimator.files import parse_json, read_json, typed

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
    label_map: Dict[int, int] = field(default_factory=dict)
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
    dataset: Dataset
    """Without its cases."""
    store: Path
    settings: Settings = USUAL

    @property
    def case_id(self) -> str:
        return self.files.case_id


def jobs_of(
    cases: Sequence[CaseFiles], dataset: Dataset, store: Path, settings: Settings, finished: Container[str]
) -> List[Job]:
    """Those of the cases that are not finished."""
    bare = dataclasses.replace(dataset, cases=(), problems=(), patient_rules={})
    return [Job(files, bare, store, settings) for files in cases if files.case_id not in finished]


Outcome = Union[CaseRecord, Tuple[str, ...]]
"""The record of a case that was stored, or what is wrong with one that was not."""

# --- Writing ---


def convert(job: Job) -> Outcome:
    """Write one case's arrays and then its record. Raises OSError when the store cannot be written."""
    settings, rule = job.settings, f"case {job.case_id} must"
    try:
        case = load_case(
            job.files,
            channels=job.dataset.channels,
            labels=job.dataset.labels,
            dataset_folder=job.dataset.folder,
            scores=settings.scores,
            zero_nan=settings.zero_nan,
            label_map=settings.label_map,
        )
    except InputError as error:
        return error.problems
    except MemoryError:
        return (f"{rule} fit into memory, got too little; run again with fewer --workers",)
    except Exception as error:  # whatever is wrong with one case, the others are still converted
        return (f"{rule} be readable, got {type(error).__name__}: {error}; mend it or leave it out",)
    how = {"format_": settings.format, "cropped": settings.crop}
    record = write_arrays(job.store, case.record, case.image, case.label, **how)
    write_json(record_path(job.store, job.case_id), to_json(record))
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
        if array is None:
            continue
        array, path = np.ascontiguousarray(crop(array, stored)), array_path(store, record, part)
        pieces = encode(array, format_)
        if format_ == "b2nd" and not np.array_equal(decode_b2nd(pieces[0]), array):
            raise OSError(errno.EIO, "blosc2 does not unpack what it has packed; try another version", str(path))
        digest, size_bytes = hashlib.sha256(), sum(map(len, pieces))
        with atomic_write(path) as file:
            _claim_space(file.fileno(), size_bytes)  # so that a full disk shows before the work
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
        with open(path, "rb") as file:
            pages.give_back(file.fileno())  # the kernel's copies are right whatever the disk has made of them
        if file_sha256(path) != digest.hexdigest():
            path.unlink()
            raise OSError(errno.EIO, "what was read back is not what was written, the disk may be failing", str(path))
        changes.update({f"{name}_bytes": size_bytes, f"{name}_sha256": digest.hexdigest()})
    return dataclasses.replace(record, **changes)


def convert_all(
    function: Callable[[Any], Outcome],
    jobs: Sequence[Any],
    workers: int,
    finished: Mapping[str, CaseRecord],
    store_dir: Path,
    what: str,
) -> Tuple[Dict[str, CaseRecord], List[Problem]]:
    """Records of all good cases by job's `case_id`, `finished` ones too, and the problems of the bad ones.

    In `workers` processes; `what` is shown on the bar. Raises OSError, as on a full disk, and KeyboardInterrupt with
    how many cases are kept; the same command continues then.
    """
    records, problems = dict(finished), []
    results = run_jobs(function, jobs, workers)
    try:
        with contextlib.closing(results), bar(what, total=len(jobs) + len(finished)) as advance:
            advance(len(finished))
            for job, outcome in results:
                if outcome is KILLED:
                    outcome = (f"case {job.case_id} must fit into memory, but its process was killed; free some",)
                if isinstance(outcome, CaseRecord):
                    records[job.case_id] = outcome
                else:
                    problems += [Problem(job.case_id, reason) for reason in outcome]
                advance()
    except (OSError, KeyboardInterrupt) as error:
        kept = f"{count(records, 'finished case')} kept in {store_dir}; run the same command again to continue"
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(kept) from None
        raise OSError(error.errno, f"writing stopped, {error.strerror}; {kept}", str(store_dir)) from error
    finally:
        sweep(store_dir)
    return records, problems


def refuse_bad_cases(folder: Path, problems: Sequence[Problem], kept: str) -> None:
    """Raise InputError with all the problems of a data set's cases, where there are any, and what was kept."""
    bad = count({problem.case_id for problem in problems}, "bad case")
    advice = "mend the bad and run again, or leave them out with --skip-bad"
    rule = f"data set {folder} must be without bad cases, got {bad}; {kept}: {advice}"
    refuse([*(problem.reason for problem in problems), rule] if problems else ())


def claim(folder: Path, name: str, content: Dict[str, Any], what: str, **defaults: Any) -> None:
    """Take an empty folder by writing `content` into its file `name`, or go on with one that has it already.

    `defaults` are fields that the file may lack. Raises InputError where the folder holds something else.
    """
    path = folder / name
    found: Any = "other files"
    if path.is_file():
        with contextlib.suppress(ValueError):
            found = read_json(path)
        found = {**defaults, **found} if isinstance(found, dict) else found
    if found != content and (path.is_file() or not is_untouched(folder, name)):
        raise InputError(f"{what} {folder} must be empty or this very one, {content}, got {found}; choose another")
    if not path.is_file():
        write_json(path, content)


def sweep(store_dir: Path) -> None:
    """Remove what killed processes left half written in a store."""
    remove_partials(store_dir, store_dir / "cases")


# --- What is done already ---


def finished_cases(
    store_dir: Path, cases: Sequence[CaseFiles], dataset_folder: Path, verify: bool
) -> Dict[str, CaseRecord]:
    """The records of the cases that need not be done again, by case id.

    A case is finished when it is of the recorded patient, its arrays have their recorded lengths and its sources
    their recorded sizes and dates; another date is settled by hash. `verify` compares the hashes of all of them.
    """
    finished = {}
    for files in cases:
        record = own_record(store_dir, files.case_id)
        if record is None or record.patient_id != files.patient_id:
            continue
        arrays = (("x", record.image_bytes, record.image_sha256), ("y", record.label_bytes, record.label_sha256))
        found = [(array_path(store_dir, record, part), *as_made) for part, *as_made in arrays[: 1 + record.has_label]]
        good = all(
            path.is_file() and path.stat().st_size == size_bytes and (not verify or file_sha256(path) == sha256)
            for path, size_bytes, sha256 in found
        )
        if good and same_sources(files, record, dataset_folder, verify):
            finished[files.case_id] = record
    return finished


def own_record(store_dir: Path, name: str) -> Optional[CaseRecord]:
    """The record that was written after the arrays called `name`; None where it is not there, or no whole record."""
    try:
        return case_from_json(read_json(record_path(store_dir, name)))
    except (FileNotFoundError, ValueError):
        return None


def same_sources(files: CaseFiles, record: CaseRecord, dataset_folder: Path, verify: bool) -> bool:
    """Whether a case still has the sources that it was made from."""
    if [source_name(path, dataset_folder) for path in files.paths] != [source.path for source in record.sources]:
        return False
    for path, source in zip(files.paths, record.sources):
        status = path.stat()
        if status.st_size != source.size_bytes:
            return False
        if (verify or status.st_mtime_ns != source.mtime_ns) and file_sha256(path) != source.sha256:
            return False
    return True


# --- Files beside the manifest ---


def identity(content: Union[Dataset, Manifest], settings: Settings) -> Dict[str, Any]:
    """What source.json says: whose store it is and how its arrays are made."""
    return {**identity_of_data(content), **identity_of_settings(settings)}


def identity_of_settings(settings: Settings) -> Dict[str, Any]:
    """The settings as JSON content."""
    label_map = {str(old): new for old, new in sorted(settings.label_map.items())}
    return {**dataclasses.asdict(settings), "label_map": label_map}


def identity_of_data(content: Union[Dataset, Manifest]) -> Dict[str, Any]:
    """What makes two data sets the same as far as a store is concerned, as JSON content."""
    labels = labels_in_use(content.layout, content.labels, ())
    return {
        "schema": SCHEMA,
        "name": content.name,
        "layout": content.layout,
        "channels": list(content.channels),
        "labels": {str(code): name for code, name in labels.items()},
    }


def owner_of(store_dir: Path) -> Dict[str, Any]:
    """What source.json says, nothing where there is none. Raises InputError where it is damaged."""
    path = store_dir / "source.json"
    if not path.is_file():
        return {}
    with contextlib.suppress(ValueError):
        content = read_json(path)
        if isinstance(content, dict):
            return content
    raise InputError(f"{path} must be as `prepare` wrote it, got no JSON object; choose a new store")


def settings_of(store_dir: Path) -> Settings:
    """The settings that a store was begun with, by its source.json; the usual ones where it has none.

    Raises InputError where that is damaged.
    """
    names = {one.name for one in dataclasses.fields(Settings)}
    content = {name: value for name, value in owner_of(store_dir).items() if name in names}
    try:
        return typed(content, Settings, "its content")
    except (ValueError, InputError) as error:
        raise InputError(f"{store_dir / 'source.json'} must be as `prepare` wrote it, got: {error}") from None


def left_out(store_dir: Path) -> List[Problem]:
    """The cases that were left out of the store, each reason by itself. Raises InputError where the list is damaged."""
    path, problems = store_dir / "quarantine.jsonl", []
    if not path.is_file():
        return []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found = typed(parse_json(line), _LeftOut)
        except ValueError as error:
            rule = f"{path} must be JSON with a case_id and its reasons in line {number}"
            raise InputError(f"{rule}, got {error}; restore or delete the file") from None
        problems += [Problem(found.case_id, reason) for reason in found.reasons]
    return problems


def write_quarantine(store_dir: Path, problems: Sequence[Problem]) -> None:
    """One JSON object a bad case; no file where there is none."""
    path = store_dir / "quarantine.jsonl"
    reasons: Dict[str, List[str]] = {}
    for problem in sorted(problems, key=lambda problem: problem.case_id):
        reasons.setdefault(problem.case_id, []).append(problem.reason)
    if not reasons:
        path.unlink(missing_ok=True)
        return
    with atomic_write(path, "w") as file:
        for case_id, those in reasons.items():
            file.write(json.dumps({"case_id": case_id, "reasons": those}) + "\n")


# --- Private helpers ---


@dataclass(frozen=True)
class _LeftOut:
    """A line of quarantine.jsonl."""

    case_id: str
    reasons: Tuple[str, ...]


def _claim_space(handle: int, size_bytes: int) -> None:
    """Reserve the space of a file. Where the file system cannot, writing will find out."""
    try:
        os.posix_fallocate(handle, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise

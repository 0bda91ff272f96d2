"""Is a store what its records say? Every file, every voxel and every fact that follows from them, read once."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Set, Tuple, Union

import numpy as np

from cpu3d.data.case import facts_of
from cpu3d.data.files.arrays import file_sha256, voxels_sha256
from cpu3d.data.files.reader import Reader
from cpu3d.data.records import CaseRecord, array_path, case_from_json, largest, record_path
from cpu3d.data.region import Shape3
from cpu3d.data.store import Store, on_grid, open_store, read_manifest
from cpu3d.errors import InputError
from cpu3d.util.child import KILLED, run_jobs, worker_count
from cpu3d.util.progress import bar
from memory_estimator.files import read_json

OF_ENTRY = ("case_id", "patient_id", "geometry", "spacing_mm", "sources", "zeroed_voxels")
"""Fields of a record that say something of the entry; all others say something of its arrays."""

CLOSE = 1e-9
"""Relative difference of a mean or deviation that another NumPy may make, by adding up in another order."""

ADVICE = "restore it, or make the case anew with `prepare --verify`"


@dataclass(frozen=True)
class Findings:
    """What a look at a whole store found."""

    problems: Tuple[str, ...]
    """All that is damaged or contradicts itself; none for a good store."""
    strays: Tuple[str, ...]
    """Files that belong to no case, relative to the store. They do no harm."""
    cases: int
    arrays: int
    """Cases whose arrays are their own; the others share them."""
    bytes_read: int
    """Of all files, each once."""


@dataclass(frozen=True)
class Job:
    """The arrays of one case to be looked at."""

    folder: Path
    record: CaseRecord


def verify(store_dir: Union[str, Path], *, workers: Optional[int] = None) -> Findings:
    """Compare a store with its records, case by case in processes, and return all that is wrong.

    Of each file: length and SHA-256. Of the voxels, unpacked and on their whole grid: SHA-256, statistics, box, label
    counts and centres. Of the records: their file's SHA-256, the split, that entries with the same arrays say the same
    of them, and that the manifest says what follows from them. Raises InputError where there is no store to look at:
    no manifest, an edited one, another version.
    """
    workers, store = worker_count(workers), open_store(store_dir)
    problems = _record_problems(store)
    records: Dict[str, CaseRecord] = {}
    found = _Found()
    for place in range(len(store.manifest.cases)):
        try:
            record = store.manifest.cases[place]
        except InputError as error:
            problems += error.problems
            continue
        found.add(record)
        problems += _entry_problems(store, record, records.setdefault(record.stem, record))
    problems += _manifest_problems(store, found)
    jobs = [Job(store.folder, record) for record in records.values()]
    with bar("verify", total=len(jobs)) as advance:
        for job, found in run_jobs(array_problems, jobs, workers):
            if found is KILLED:
                found = (f"case {job.record.case_id} must fit into memory, but its process was killed; free some",)
            problems += found
            advance()
    return Findings(
        problems=tuple(dict.fromkeys(problems)),
        strays=tuple(_strays(store, records)),
        cases=len(store.manifest.cases),
        arrays=len(records),
        bytes_read=sum(record.image_bytes + record.label_bytes for record in records.values()),
    )


def array_problems(job: Job) -> Tuple[str, ...]:
    """All that is wrong with one case's arrays, its own record's file among it."""
    record, problems = job.record, _own_record_problems(job)
    reader = Reader(job.folder, "pread")
    lengths = reader.problems(record)
    if lengths:
        return (*problems, *lengths)
    voxels: Dict[str, np.ndarray] = {}
    for part, file_sha, voxels_sha in (
        ("x", record.image_sha256, record.image_voxels_sha256),
        ("y", record.label_sha256, record.label_voxels_sha256),
    )[: 1 + record.has_label]:
        path = array_path(job.folder, record, part)
        try:
            if file_sha256(path) != file_sha:
                problems.append(f"store file {path} must be as it was written, got other content; {ADVICE}")
                continue
            voxels[part] = on_grid(reader.array(record, part), record)
        except InputError as error:
            problems += error.problems
            continue
        except (OSError, ValueError, OverflowError, MemoryError) as error:  # the latter of impossible sizes
            problems.append(f"store file {path} must be readable: {error}")
            continue
        if voxels_sha256(voxels[part]) != voxels_sha:
            problems.append(f"voxels in {path} must be those of case {record.case_id}, got others; {ADVICE}")
    if not problems:
        problems += _fact_problems(record, voxels["x"], voxels.get("y"))
    return tuple(problems)


# --- Private helpers ---


def _record_problems(store: Store) -> List[str]:
    """What is wrong with the records' file and the split."""
    content = read_manifest(store.folder)["records"]
    path = store.folder / content["file"]
    problems = []
    if file_sha256(path) != content["sha256"]:
        problems.append(f"store file {path} must be as it was written, got other content; run `prepare` again")
    try:
        store.check_split()
    except InputError as error:
        problems += error.problems
    return problems


def _entry_problems(store: Store, record: CaseRecord, first: CaseRecord) -> List[str]:
    """What contradicts itself in one record, beside the first one with the same arrays, without reading them."""
    manifest = store.manifest
    rule, problems = f"record of case {record.case_id}", []
    if record.channels != len(manifest.channels):
        problems.append(f"{rule} must have {len(manifest.channels)} channels, got {record.channels}; {ADVICE}")
    unknown = sorted(set(record.label_voxels) - set(manifest.labels))
    if unknown:
        told = ", ".join(map(str, unknown))
        problems.append(f"{rule} must have label codes of the store, got {told}; {ADVICE}")
    if record is not first:
        other = [name for name in _array_fields() if getattr(record, name) != getattr(first, name)]
        if other:
            problems.append(
                f"{rule} must say of its arrays what case {first.case_id} says of the same, got another"
                f" {', '.join(other)}; {ADVICE}"
            )
    return problems


class _Found:
    """What the manifest must say, gathered from the records."""

    def __init__(self):
        self.cases = 0
        self.unlabelled: List[str] = []
        self.shapes: Set[Shape3] = set()
        self.boxes: Set[Shape3] = set()

    def add(self, record: CaseRecord) -> None:
        self.cases += 1
        self.shapes.add(record.shape)
        self.boxes.add(record.box.size)
        if not record.has_label:
            self.unlabelled.append(record.case_id)


def _manifest_problems(store: Store, found: _Found) -> List[str]:
    """Where the manifest differs from what follows from its records, and in itself."""
    manifest, problems = store.manifest, []
    rule = f"manifest of store {store.folder}"
    for region, codes in manifest.regions.items():
        unknown = sorted(set(codes) - set(manifest.labels))
        if unknown:
            problems.append(
                f"region {region} in the {rule} must be of the store's labels, got {', '.join(map(str, unknown))};"
                " restore it"
            )
    if not found.cases or found.cases < len(manifest.cases):
        return problems  # what follows from damaged records is not known
    follows = {
        "largest_shape": largest(found.shapes),
        "largest_box": largest(found.boxes),
        "unlabelled": tuple(found.unlabelled),
    }
    return problems + [
        f"{name} in the {rule} must follow from its records, {_short(value)}, got"
        f" {_short(getattr(manifest, name))}; restore it"
        for name, value in follows.items()
        if value != getattr(manifest, name)
    ]


def _own_record_problems(job: Job) -> List[str]:
    """A case's own file of its record: what an unfinished store would go on from."""
    path = record_path(job.folder, job.record.case_id)
    try:
        own = case_from_json(read_json(path))
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"store file {path} must be readable: {error}"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"store file {path} must hold the case's record, got {error!r}; delete it"]
    return [] if own == job.record else [f"store file {path} must say what the store says, got another; delete it"]


def _fact_problems(record: CaseRecord, image: np.ndarray, label: Optional[np.ndarray]) -> List[str]:
    """Where a record differs from what follows from its voxels."""
    if not image.any(axis=(0, 1, 2)).all():
        return [f"image of case {record.case_id} must have voxels in every channel, got an empty one; {ADVICE}"]
    return [
        f"{name} in the record of case {record.case_id} must follow from its voxels, {_short(value)}, got"
        f" {_short(getattr(record, name))}; {ADVICE}"
        for name, value in facts_of(image, label).items()
        if not _same(name, value, getattr(record, name))
    ]


def _same(name: str, value: Any, recorded: Any) -> bool:
    if name in ("channel_mean", "channel_std"):
        return len(value) == len(recorded) and bool(np.allclose(value, recorded, rtol=CLOSE, atol=CLOSE))
    return value == recorded


def _short(value: Any) -> str:
    told = str(value)
    return told if len(told) <= 100 else f"{told[:97]}..."


def _array_fields() -> List[str]:
    return [field.name for field in dataclasses.fields(CaseRecord) if field.name not in OF_ENTRY]


def _strays(store: Store, records: Dict[str, CaseRecord]) -> List[str]:
    """Files in the store's folder that nothing in it names."""
    records_file = read_manifest(store.folder)["records"]["file"]
    known = {"manifest.json", "source.json", "conversion.json", "quarantine.jsonl", records_file}
    for record in records.values():
        known |= {array_path("", record, part).as_posix() for part in "xy"[: 1 + record.has_label]}
        known.add(record_path("", record.stem).as_posix())
    known |= {record_path("", case_id).as_posix() for ids in store.manifest.split.values() for case_id in ids}
    return sorted(set(_files(store.folder)) - known)


def _files(folder: Path) -> List[str]:
    return [
        (Path(where) / name).relative_to(folder).as_posix() for where, _, names in os.walk(folder) for name in names
    ]

"""The same cases in another store, in another format: what was exact stays exact, and runs go on with either."""

import contextlib
import dataclasses
import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np

from cpu3d.data.case import facts_of, float16_image
from cpu3d.data.files.arrays import voxels_sha256
from cpu3d.data.files.reader import Reader
from cpu3d.data.prepare import write_quarantine
from cpu3d.data.records import (
    SCHEMA,
    CaseRecord,
    Manifest,
    array_path,
    record_path,
    remake,
    to_json,
)
from cpu3d.data.resume import identity, kept, left_out, own_record, settings_of, sweep
from cpu3d.data.store import Store, on_grid, open_store, write_store
from cpu3d.data.upkeep.verify import ADVICE, OF_ENTRY
from cpu3d.data.words import count
from cpu3d.data.write_cases import FORMAT_CHOICES, Settings, write_arrays
from cpu3d.errors import InputError
from cpu3d.util.atomic import is_untouched, writable_folder, write_json
from cpu3d.util.child import KILLED, run_jobs, worker_count
from cpu3d.util.lock import locked
from cpu3d.util.progress import bar
from cpu3d.util.records import versions
from memory_estimator.files import read_json


@dataclass(frozen=True)
class Job:
    """One case's arrays to be written in another format."""

    old: Path
    new: Path
    record: CaseRecord
    channels: Tuple[str, ...]
    settings: Settings


def change_format(
    store_dir: Union[str, Path],
    new_dir: Union[str, Path],
    *,
    format_: Optional[str] = None,
    crop: Optional[bool] = None,
    workers: Optional[int] = None,
) -> Manifest:
    """Write a store's cases into `new_dir` in another format, cropped or not, and return the new store's manifest.

    `format_` is one of `FORMAT_CHOICES`; None leaves a setting as it is, and packing leaves float16 float16. Every case
    is written whole or not at all, read back and compared voxel by voxel; a conversion that was cut is continued by the
    same call. The split stays, and so does its hash, unless int16 images become float16: those are other voxels,
    rounded by up to the recorded error.

    Raises InputError for a way back from float16, for damaged cases of the old store (the good ones are kept), and
    where `new_dir` holds anything but this conversion. OSError and KeyboardInterrupt as `prepare`.
    """
    workers, store, new_dir = worker_count(workers), open_store(store_dir), Path(new_dir)
    settings, out = _settings(store, format_, crop), left_out(store.folder)
    store.check_split()
    writable_folder(new_dir, "new store")
    with locked(new_dir, "store"):
        _claim(new_dir, store, settings)
        if (new_dir / "manifest.json").exists():
            print(f"Nothing to do: store {new_dir} is finished.")
            return open_store(new_dir).manifest
        records = {record.stem: record for record in store.manifest.cases}
        done = _finished(new_dir, records.values())
        left = [
            Job(store.folder, new_dir, record, store.manifest.channels, settings)
            for stem, record in records.items()
            if stem not in done
        ]
        done = _convert_all(left, workers, done, new_dir)
        manifest = _manifest(store, done)
        write_quarantine(new_dir, out)
        write_json(new_dir / "source.json", identity(manifest, settings))
        write_store(new_dir, manifest)
    return manifest


def convert_case(job: Job) -> Union[CaseRecord, Tuple[str, ...]]:
    """Write one case's arrays and then its record, or tell what is wrong with the old ones.

    Raises OSError where the new store cannot be written, or gives back other voxels than were written.
    """
    reader, record = Reader(job.old, "pread"), job.record
    try:
        image = on_grid(reader.array(record, "x"), record)
        label = on_grid(reader.array(record, "y"), record) if record.has_label else None
    except InputError as error:
        return error.problems
    except OSError as error:
        return (f"case {record.case_id} of store {job.old} must be readable, got {error}; {ADVICE}",)
    found = voxels_sha256(image), voxels_sha256(label) if label is not None else ""
    if found != (record.image_voxels_sha256, record.label_voxels_sha256):
        return (f"voxels of case {record.case_id} of store {job.old} must be as recorded, got others; {ADVICE}",)
    if job.settings.scores and record.image_dtype == "int16":
        names = [f"channel {name} of {record.case_id}" for name in job.channels]
        try:
            image, error = float16_image([image[..., channel] for channel in range(image.shape[3])], names)
        except InputError as problem:
            return problem.problems
        record = dataclasses.replace(record, max_abs_error=error, **facts_of(image, label))
    new = write_arrays(job.new, record, image, label, format_=job.settings.format, cropped=job.settings.crop)
    again = Reader(job.new, "pread")
    for part, array in (("x", image), ("y", label)):
        if array is not None and not np.array_equal(on_grid(again.array(new, part), new), array):
            path = array_path(job.new, new, part)
            path.unlink()
            raise OSError(errno.EIO, "what was read back is not what was written", str(path))
    write_json(record_path(job.new, new.stem), to_json(new))
    return new


# --- Private helpers ---


def _settings(store: Store, format_: Optional[str], crop: Optional[bool]) -> Settings:
    """Those of the new store. Raises InputError for an unknown format and where int16 is asked of what was rounded."""
    if format_ not in (None, *FORMAT_CHOICES):
        raise InputError(f"--format must be one of {', '.join(FORMAT_CHOICES)}, got {format_!r}")
    old = settings_of(store.folder)
    if old.scores and format_ == "npy":
        raise InputError(
            f"--format npy must be asked of a store that was never rounded, but {store.folder} holds float16 scores:"
            " the source's values are gone; unpack them with --format float16, or run `prepare` on the data set"
        )
    changes: Dict[str, Any] = {} if crop is None else {"crop": crop}
    if format_ is not None:
        changes.update(FORMAT_CHOICES[format_])
        changes["scores"] |= old.scores
    return dataclasses.replace(old, **changes)


def _claim(new_dir: Path, store: Store, settings: Settings) -> None:
    """Take an empty folder for this conversion, or go on with it. Raises InputError where it holds something else."""
    path = new_dir / "conversion.json"
    made_of = {
        "schema": SCHEMA,
        "name": store.manifest.name,
        "split_hash": store.manifest.split_hash,
        "format": settings.format,
        "scores": settings.scores,
        "crop": settings.crop,
    }
    if path.is_file():
        try:
            found = read_json(path)
        except ValueError:
            found = None
        if found != made_of:
            raise InputError(
                f"new store {new_dir} must be empty or this very conversion, {made_of}, got {found}; choose another"
            )
    elif not is_untouched(new_dir, path.name):
        raise InputError(
            f"new store {new_dir} must be empty or a conversion cut short, got other files; choose another"
        )
    sweep(new_dir)
    write_json(path, made_of)
    (new_dir / "cases").mkdir(exist_ok=True)


def _finished(new_dir: Path, records: Sequence[CaseRecord]) -> Dict[str, CaseRecord]:
    """What an earlier conversion has finished: records by stem whose files are there, of the recorded lengths."""
    reader, done = Reader(new_dir, "pread"), {}
    for old in records:
        record = own_record(new_dir, old.stem)
        if record is None:
            continue
        same = record.image_dtype != old.image_dtype or record.image_voxels_sha256 == old.image_voxels_sha256
        if same and record.label_voxels_sha256 == old.label_voxels_sha256 and not reader.problems(record):
            done[old.stem] = record
    return done


def _convert_all(
    jobs: Sequence[Job], workers: int, done: Dict[str, CaseRecord], new_dir: Path
) -> Dict[str, CaseRecord]:
    """Records of the new store by stem. Raises InputError, when all are through, where old ones were damaged."""
    records, problems = dict(done), []
    total = len(jobs) + len(done)
    results = run_jobs(convert_case, jobs, workers)
    with kept(records, "converted case", new_dir), contextlib.closing(results), bar("convert", total=total) as advance:
        advance(len(done))
        for job, outcome in results:
            if isinstance(outcome, CaseRecord):
                records[outcome.stem] = outcome
            elif outcome is KILLED:
                told = "must fit into memory, but its process was killed; free some and run again"
                problems.append(f"case {job.record.case_id} {told}")
            else:
                problems += outcome
            advance()
    if problems:
        told = f"{count(records, 'converted case')} kept in {new_dir}"
        raise InputError(*problems, f"{told}: mend the old store and run the same command again")
    return records


def _manifest(store: Store, done: Dict[str, CaseRecord]) -> Manifest:
    """The old entries with what is new about their arrays."""
    of_arrays = [field.name for field in dataclasses.fields(CaseRecord) if field.name not in OF_ENTRY]
    cases: List[CaseRecord] = []
    for entry in store.manifest.cases:
        new = done[entry.stem]
        cases.append(dataclasses.replace(entry, **{name: getattr(new, name) for name in of_arrays}))
    return remake(store.manifest, cases=cases, versions=versions())

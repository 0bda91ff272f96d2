"""Converting cases into a store, each whole or not at all, and the files of a store that is not finished.

source.json names the data set and the settings; a case's record is written after its arrays and marks them as good;
quarantine.jsonl lists the cases that were left out.
"""

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import msgspec
import numpy as np

from cpu3d.data.files.arrays import FORMATS, decode_b2nd, encode, file_sha256, give_back
from cpu3d.data.files.reader import Reader, parts_of
from cpu3d.data.records import SCHEMA, CaseRecord, array_path, case_from_json, record_path, to_json
from cpu3d.data.region import crop, whole
from cpu3d.data.stores.case import load_case, source_name
from cpu3d.data.stores.layouts import CaseFiles, Dataset, Problems, labels_in_use
from cpu3d.errors import InputError, refuse
from cpu3d.util.atomic import atomic_write, is_untouched, remove_partials, writable_folder, write_json
from cpu3d.util.child import KILLED, run_jobs
from cpu3d.util.lock import locked
from cpu3d.util.progress import bar
from cpu3d.util.records import count
from memory_estimator.common.files import read_json, read_regular, typed


@dataclass(frozen=True)
class Settings:
    """How cases become arrays. A store is continued with the same settings only."""

    format: str = "npy"
    """Of the files, "npy" or "b2nd"."""
    crop: bool = False
    """Store each brain's box and not the whole grid."""
    zero_nan: bool = False
    """NaN and infinite voxels become background; without it they are an error."""
    label_map: Dict[int, int] = field(default_factory=dict)
    """Label codes to change while reading, old -> new."""

    def __post_init__(self):
        if self.format not in FORMATS:
            raise InputError(f"format of a store's files must be one of {', '.join(FORMATS)}, got {self.format!r}")


USUAL = Settings()


def convert(
    dataset: Dataset, store_dir: Path, settings: Settings, files: CaseFiles
) -> Union[CaseRecord, Tuple[str, ...]]:
    """Write a case's arrays, then its record, and return that, or what is wrong with the case. Raises OSError."""
    rule = f"case {files.case_id} must"
    try:
        case = load_case(
            files,
            channels=dataset.channels,
            labels=dataset.labels,
            dataset_folder=dataset.folder,
            zero_nan=settings.zero_nan,
            label_map=settings.label_map,
        )
    except InputError as error:
        return error.problems
    except MemoryError:
        return (f"{rule} fit into memory, got too little; run again with fewer --workers",)
    except Exception as error:  # any failure of one case leaves the others to be converted
        return (f"{rule} be readable, got {type(error).__name__}: {error}; repair it or leave it out",)
    record = write_arrays(
        store_dir, case.record, case.image, case.label, format_=settings.format, cropped=settings.crop
    )
    write_json(record_path(store_dir, record.case_id), to_json(record))
    return record


def write_arrays(
    store: Path, record: CaseRecord, image: np.ndarray, label: Optional[np.ndarray], *, format_: str, cropped: bool
) -> CaseRecord:
    """Write a case's arrays, given on its whole grid, and return its record with what follows from the files.

    `cropped` keeps only the brain's box; outside it the voxels are 0. Files are read back and compared. Raises OSError.
    """
    stored = record.box if cropped else whole(record.shape)
    record, changes = dataclasses.replace(record, format=format_, stored=stored), {}
    for part, name, full in (("x", "image", image), ("y", "label", label)):
        if full is None:
            continue
        array, path = np.ascontiguousarray(crop(full, stored)), array_path(store, record, part)
        pieces = encode(array, format_)
        if format_ == "b2nd" and not np.array_equal(decode_b2nd(pieces[0]), array):
            raise OSError(errno.EIO, "blosc2 does not unpack what it has packed; try another version", str(path))
        digest = hashlib.sha256()
        with atomic_write(path) as file:
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
        with open(path, "rb") as file:
            give_back(file.fileno())  # so that the disk is read and not the kernel's copy
        if file_sha256(path) != digest.hexdigest():
            path.unlink()
            raise OSError(errno.EIO, "what was read back is not what was written, the disk may be failing", str(path))
        changes.update({f"{name}_bytes": sum(map(len, pieces)), f"{name}_sha256": digest.hexdigest()})
    return dataclasses.replace(record, **changes)


def convert_all(
    cases: Sequence[CaseFiles],
    dataset: Dataset,
    store_dir: Path,
    settings: Settings,
    workers: int,
    finished: Mapping[str, CaseRecord],
) -> Tuple[Dict[str, CaseRecord], Problems]:
    """The records of all good cases, `finished` ones included, and the problems of the bad ones, by case id.

    Raises OSError, as on a full disk, and KeyboardInterrupt, both with the number of cases that are kept.
    """
    records, problems = dict(finished), {}
    bare = dataclasses.replace(dataset, cases=(), problems={}, patient_rules={})
    waiting = [files for files in cases if files.case_id not in finished]
    results = run_jobs(functools.partial(convert, bare, store_dir, settings), waiting, workers)
    try:
        with contextlib.closing(results), bar("prepare", total=len(cases)) as advance:
            advance(len(finished))
            for files, outcome in results:
                if isinstance(outcome, CaseRecord):
                    records[files.case_id] = outcome
                else:
                    killed = (
                        f"case {files.case_id} must fit into memory, but its process was killed; use fewer --workers"
                    )
                    problems[files.case_id] = [killed] if outcome is KILLED else list(outcome)
                advance()
    except (OSError, KeyboardInterrupt) as error:
        kept = f"{count(records, 'finished case')} kept in {store_dir}; run the same command again to continue"
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(kept) from None
        raise OSError(error.errno, f"writing stopped, {error.strerror}; {kept}", str(store_dir)) from error
    finally:
        remove_partials(store_dir, store_dir / "cases")
    return records, problems


def refuse_bad_cases(problems: Problems, kept: str) -> None:
    """Raise InputError with all problems of a data set's cases, if any; `kept` says what was kept."""
    advice = "repair the bad cases and run again, or leave them out with --skip-bad"
    rule = f"the data set must be without bad cases, got {count(problems, 'bad case')}; {kept}: {advice}"
    refuse([*(reason for case_id in sorted(problems) for reason in problems[case_id]), rule] if problems else ())


@contextlib.contextmanager
def claimed(
    folder: Path, what: str, name: str, content: Mapping[str, Any], parts: Sequence[str] = ("cases",)
) -> Iterator[None]:
    """Lock a folder, made if absent, for the work that `content` describes; remove what killed processes left.

    An empty folder gets `content` as its file `name`; a folder that has the same content is continued. `parts` are
    folders in it. Raises InputError, and changes nothing, where the folder holds other files, cannot be written, or is
    in use.
    """
    path = folder / name
    if not (folder / "manifest.json").exists():  # a finished store may be read-only
        writable_folder(folder, what)
    with locked(folder, what):
        if path.is_file():
            begun = _read_object(path)
            differences = [
                f"{field} of {what} {folder} must be {begun.get(field)!r}, as it was begun, got {value!r}"
                for field, value in content.items()
                if begun.get(field) != value
            ]
            refuse([*differences, f"choose another {what}; nothing was touched"] if differences else ())
        elif not is_untouched(folder, name):
            raise InputError(f"{what} {folder} must be empty or begun by this command, got other files; choose another")
        else:
            write_json(path, content)
        for part in parts:
            (folder / part).mkdir(exist_ok=True)
        remove_partials(folder, *(folder / part for part in parts))
        yield


def finished_cases(
    store_dir: Path, cases: Sequence[CaseFiles], dataset_folder: Path, verify: bool
) -> Dict[str, CaseRecord]:
    """The records of the cases that need not be converted again, by case id.

    Their patient is the recorded one, their arrays have the recorded lengths and their sources are `same_sources`.
    `verify` compares the hashes of all files.
    """
    finished, reader = {}, Reader(store_dir, "pread")
    for files in cases:
        try:
            record = case_from_json(read_regular(record_path(store_dir, files.case_id)))
        except (FileNotFoundError, ValueError):
            continue
        same = record.patient_id == files.patient_id and same_sources(files, record, dataset_folder, verify)
        hashes = {"x": record.image_sha256, "y": record.label_sha256}
        for part in parts_of(record) if verify and same and not reader.problems(record) else ():
            same &= file_sha256(array_path(store_dir, record, part)) == hashes[part]
        if same and not reader.problems(record):
            finished[files.case_id] = record
    return finished


def same_sources(files: CaseFiles, record: CaseRecord, dataset_folder: Path, verify: bool) -> bool:
    """Whether a case has the sources that it was made from, by size and date; by hash where the date is another, or
    with `verify`."""
    same = [source_name(path, dataset_folder) for path in files.paths] == [source.path for source in record.sources]
    for path, source in zip(files.paths, record.sources) if same else ():
        status = path.stat()
        undecided = verify or status.st_mtime_ns != source.mtime_ns
        same &= status.st_size == source.size_bytes and not (undecided and file_sha256(path) != source.sha256)
    return same


def identity(content: Dataset, settings: Settings) -> Dict[str, Any]:
    """The content of source.json: the data set and the settings of a store."""
    labels = labels_in_use(content.layout, content.labels, ())
    return {
        "schema": SCHEMA,
        "name": content.name,
        "layout": content.layout,
        "channels": list(content.channels),
        "labels": {str(code): name for code, name in labels.items()},
        **dataclasses.asdict(settings),
        "label_map": {str(old): new for old, new in sorted(settings.label_map.items())},
    }


def settings_of(store_dir: Path) -> Settings:
    """The settings in a store's source.json, USUAL where it has none. Raises InputError where that is damaged."""
    path = store_dir / "source.json"
    content = _read_object(path) if path.is_file() else {}
    try:
        return typed({name: content[name] for name in vars(USUAL) if name in content}, Settings, "its content")
    except (ValueError, InputError) as error:
        raise InputError(f"{path} must be as `prepare` wrote it, got: {error}") from None


class _BadCase(msgspec.Struct):
    """A line of quarantine.jsonl."""

    case_id: str
    reasons: List[str]


def read_quarantine(store_dir: Path) -> Problems:
    """The cases that were left out of the store, with the reasons. Raises InputError where the list is damaged."""
    path = store_dir / "quarantine.jsonl"
    try:
        bad = msgspec.json.Decoder(_BadCase).decode_lines(path.read_bytes() if path.is_file() else b"")
    except (msgspec.MsgspecError, RecursionError) as error:
        rule = f"{path} must be JSON lines of a case_id and its reasons, got {error}"
        raise InputError(f"{rule}; restore or delete the file") from None
    return {case.case_id: case.reasons for case in bad}


def write_quarantine(store_dir: Path, problems: Problems) -> None:
    """Write a JSON line for each bad case; no file without bad cases."""
    path = store_dir / "quarantine.jsonl"
    if not problems:
        path.unlink(missing_ok=True)
        return
    with atomic_write(path, "w") as file:
        file.writelines(json.dumps({"case_id": one, "reasons": problems[one]}) + "\n" for one in sorted(problems))


def _read_object(path: Path) -> Dict[str, Any]:
    with contextlib.suppress(ValueError):
        content = read_json(path)
        if isinstance(content, dict):
            return content
    raise InputError(f"{path} must be as it was written, got no JSON object; choose another folder")

"""One case into a store, whole or not at all; and what an unfinished store is, has and needs.

source.json says whose store it is and how its arrays are made; a case's record is written after its arrays and marks
them as good; quarantine.jsonl lists the cases that were left out.
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
from cpu3d.data.records import SCHEMA, CaseRecord, Manifest, array_path, case_from_json, record_path, to_json
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
    """How cases become arrays. They are part of what a store is: it is never continued with others."""

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
    how = {name: getattr(settings, name) for name in ("zero_nan", "label_map")}
    try:
        case = load_case(files, channels=dataset.channels, labels=dataset.labels, dataset_folder=dataset.folder, **how)
    except InputError as error:
        return error.problems
    except MemoryError:
        return (f"{rule} fit into memory, got too little; run again with fewer --workers",)
    except Exception as error:  # whatever is wrong with one case, the others are still converted
        return (f"{rule} be readable, got {type(error).__name__}: {error}; mend it or leave it out",)
    how = {"format_": settings.format, "cropped": settings.crop}
    record = write_arrays(store_dir, case.record, case.image, case.label, **how)
    write_json(record_path(store_dir, record.case_id), to_json(record))
    return record


def write_arrays(
    store: Path, record: CaseRecord, image: np.ndarray, label: Optional[np.ndarray], *, format_: str, cropped: bool
) -> CaseRecord:
    """Write a case's arrays, given on its whole grid, and return its record as it stands in this store.

    `cropped` keeps only the brain's box; all outside is 0. Files are read back and compared. Raises OSError.
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
            give_back(file.fileno())  # the kernel's copies are right whatever the disk has made of them
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
    """Records of all good cases by case id, those of `finished` ones too, and the problems of the bad ones.

    Raises OSError, as on a full disk, and KeyboardInterrupt with how many cases are kept; the same command continues.
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
                    killed = f"case {files.case_id} must fit into memory, but its process was killed; free some"
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
    """Raise InputError with all the problems of a data set's cases, where there are any, and what was kept."""
    advice = "mend the bad and run again, or leave them out with --skip-bad"
    rule = f"the data set must be without bad cases, got {count(problems, 'bad case')}; {kept}: {advice}"
    refuse([*(reason for case_id in sorted(problems) for reason in problems[case_id]), rule] if problems else ())


@contextlib.contextmanager
def claimed(
    folder: Path, what: str, name: str, content: Mapping[str, Any], parts: Sequence[str] = ("cases",)
) -> Iterator[None]:
    """Hold a folder, made if absent, for the work that `content` describes; what killed processes left is removed.

    An empty one is taken by writing `content` into its file `name`; one that has it already is gone on with. `parts`
    are folders in it. Raises InputError, and touches nothing, where the
    folder holds something else, cannot be written, or is in use.
    """
    path = folder / name
    if not (folder / "manifest.json").exists():  # a finished store may lie where nobody writes any more
        writable_folder(folder, what)
    with locked(folder, what):
        if path.is_file():
            found = _read_object(path)
            differences = [
                f"{field} of {what} {folder} must be {found.get(field)!r}, as it was begun, got {value!r}"
                for field, value in content.items()
                if found.get(field) != value
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
    """The records of the cases that need not be done again, by case id.

    They are of the recorded patient, their arrays have the recorded lengths, their sources the recorded sizes and
    dates; another date is settled by hash. `verify` compares the hashes of all of them.
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
    """Whether a case still has the sources that it was made from."""
    same = [source_name(path, dataset_folder) for path in files.paths] == [source.path for source in record.sources]
    for path, source in zip(files.paths, record.sources) if same else ():
        status = path.stat()
        undecided = verify or status.st_mtime_ns != source.mtime_ns
        same &= status.st_size == source.size_bytes and not (undecided and file_sha256(path) != source.sha256)
    return same


def identity(content: Union[Dataset, Manifest], settings: Settings) -> Dict[str, Any]:
    """What source.json says: whose store it is and how its arrays are made."""
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
    """Those that a store was begun with, by its source.json, or USUAL. Raises InputError where that is damaged."""
    path = store_dir / "source.json"
    content = _read_object(path) if path.is_file() else {}
    try:
        return typed({name: content[name] for name in vars(USUAL) if name in content}, Settings, "its content")
    except (ValueError, InputError) as error:
        raise InputError(f"{path} must be as `prepare` wrote it, got: {error}") from None


class _LeftOut(msgspec.Struct):
    """A line of quarantine.jsonl."""

    case_id: str
    reasons: List[str]


def left_out(store_dir: Path) -> Problems:
    """The cases that were left out of the store, with the reasons. Raises InputError where the list is damaged."""
    path, problems = store_dir / "quarantine.jsonl", {}
    for number, line in enumerate(path.read_bytes().splitlines() if path.is_file() else (), 1):
        try:
            found = msgspec.json.decode(line, type=_LeftOut)
        except (msgspec.MsgspecError, RecursionError) as error:
            rule = f"{path} must be JSON with a case_id and its reasons in line {number}, got {error}"
            raise InputError(f"{rule}; restore or delete the file") from None
        problems.setdefault(found.case_id, []).extend(found.reasons)
    return problems


def write_quarantine(store_dir: Path, problems: Problems) -> None:
    """One JSON object a bad case; no file where there is none."""
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

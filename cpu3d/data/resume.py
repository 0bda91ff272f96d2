"""A store as `prepare` finds it: empty, cut short, finished or another's; what is done, what must stay untouched."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Sized, Union

from cpu3d.data.case import source_name
from cpu3d.data.files.arrays import FORMATS, file_sha256
from cpu3d.data.layouts import CaseFiles, Dataset, Problem, labels_in_use
from cpu3d.data.records import SCHEMA, CaseRecord, Manifest, array_path, case_from_json, record_path, straddling
from cpu3d.data.store import open_store
from cpu3d.data.words import count
from cpu3d.data.write_cases import FORMAT_CHOICES, Settings
from cpu3d.errors import InputError
from cpu3d.util.atomic import is_untouched, remove_partials, writable_folder, write_json
from cpu3d.util.lock import locked
from memory_estimator.files import parse_json, read_json


@contextlib.contextmanager
def claimed(store_dir: Path, dataset: Dataset, settings: Settings) -> Iterator[None]:
    """Make the store's folder, write into source.json whose it is, and keep a second `prepare` out meanwhile.

    Raises InputError where the folder cannot be written, is in use, holds other files or the store of another data set,
    or one begun with other settings.
    """
    if store_dir.resolve() == dataset.folder.resolve():
        raise InputError(f"store {store_dir} must be another folder than the data set; choose one")
    if not (store_dir / "manifest.json").exists():  # a finished store may lie where nobody writes any more
        writable_folder(store_dir, "store")
    with locked(store_dir, "store"):
        _refuse_other_owner(store_dir, dataset, settings)
        sweep(store_dir)
        yield


def identity(content: Union[Dataset, Manifest], settings: Settings) -> Dict[str, Any]:
    """What source.json says: whose store it is and how its arrays are made."""
    return {**_identity_of_data(content), **_identity_of_settings(settings)}


def settings_of(store_dir: Path) -> Settings:
    """The settings that a store was begun with, so that what is added to it is made alike.

    Those of its source.json; the usual ones where it has none. Raises InputError where that is damaged.
    """
    path = store_dir / "source.json"
    content = {**_identity_of_settings(Settings()), **_owner(path)}
    problems = [
        f"{name} in {path} must be {rule}, as `prepare` wrote it, got {content[name]!r}; restore it"
        for name, (rule, is_good) in _RULES.items()
        if not is_good(content[name])
    ]
    if problems:
        raise InputError(*problems)
    label_map = {int(old): new for old, new in content["label_map"].items()}
    return Settings(**{**{name: content[name] for name in _RULES}, "label_map": label_map})


def old_manifest(store_dir: Path) -> Optional[Manifest]:
    """The manifest of a finished store, None for one that is not. Raises InputError for another version or damage."""
    path = store_dir / "manifest.json"
    if not path.exists():
        return None
    try:
        return open_store(store_dir).manifest
    except InputError as error:
        advice = f"{path} is left as it is; choose another store, or delete that file"
        raise InputError(*error.problems, advice) from None


def content_differences(store_dir: Path, old: Manifest, dataset: Dataset, verify: bool) -> List[str]:
    """In what the data set differs from what a finished store was made of: cases new, gone or changed.

    And which patients are in two of its splits, by what is known of them now.
    """
    found = {files.case_id: files for files in dataset.cases}
    recorded = {case.case_id: case for case in old.cases}
    new = sorted(set(found) - set(recorded) - set(quarantined(store_dir)))
    gone = sorted(set(recorded) - set(found))
    changed = [
        case_id
        for case_id, record in recorded.items()
        if case_id in found and not _same_sources(found[case_id], record, dataset.folder, verify)
    ]
    recorded_as: Dict[str, Set[str]] = {}
    for files in dataset.cases:
        if files.case_id in recorded:
            recorded_as.setdefault(files.patient_id, set()).add(recorded[files.case_id].patient_id)
    return (
        [f"case {case_id} is new in {dataset.folder}" for case_id in new]
        + [f"case {case_id} is no longer whole in {dataset.folder}" for case_id in gone]
        + [f"the source of case {case_id} has changed" for case_id in changed]
        + [
            f"patient {patient} is in {' and '.join(places)}, so that scores on it would be too good"
            for patient, places in straddling(old.split, {one.case_id: one.patient_id for one in dataset.cases})
        ]
        + [
            f"patient {patient} counts as {len(those)} patients, {', '.join(sorted(those))}, which folds may part"
            for patient, those in recorded_as.items()
            if len(those) > 1
        ]
    )


def finished_cases(
    store_dir: Path, cases: Sequence[CaseFiles], dataset_folder: Path, verify: bool
) -> Dict[str, CaseRecord]:
    """The records of the cases that need not be done again, by case id.

    A case is finished when it is of the recorded patient, its arrays have their recorded lengths and its sources
    their recorded sizes and dates; another date, or none in the record, is settled by hash. `verify` compares the
    hashes of all of them.
    """
    finished = {}
    for files in cases:
        record = own_record(store_dir, files.case_id)
        if record is None or record.patient_id != files.patient_id:
            continue
        arrays = [(array_path(store_dir, record, "x"), record.image_bytes, record.image_sha256)]
        if record.has_label:
            arrays.append((array_path(store_dir, record, "y"), record.label_bytes, record.label_sha256))
        whole = all(_is_whole(path, size_bytes, sha256, verify) for path, size_bytes, sha256 in arrays)
        if whole and _same_sources(files, record, dataset_folder, verify):
            finished[files.case_id] = record
    return finished


def own_record(store_dir: Path, name: str) -> Optional[CaseRecord]:
    """The record that was written after the arrays called `name`; None where it is not there, or no whole record."""
    try:
        return case_from_json(read_json(record_path(store_dir, name)))
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None


def left_out(store_dir: Path) -> List[Problem]:
    """The cases that were left out of the store, each reason by itself. Raises InputError where the list is damaged."""
    path, problems = store_dir / "quarantine.jsonl", []
    if not path.is_file():
        return []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            content = parse_json(line)
            case_id, reasons = content["case_id"], content["reasons"]
            if not isinstance(reasons, list) or not all(isinstance(one, str) for one in (case_id, *reasons)):
                raise TypeError("no case_id with a list of reasons")
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path} must be JSON with a case_id and its reasons in line {number}, got {error!r}; restore it, or"
                " delete the file, which only tells what was left out"
            ) from None
        problems += [Problem(case_id, reason) for reason in reasons]
    return problems


def quarantined(store_dir: Path) -> List[str]:
    """The ids of the cases that were left out of the store, each once."""
    return list(dict.fromkeys(problem.case_id for problem in left_out(store_dir)))


@contextlib.contextmanager
def kept(records: Sized, what: str, store_dir: Path) -> Iterator[None]:
    """Write cases in here: where that is cut, the error tells how many of `records` are kept, and how it goes on.

    What is half written then is removed. `what` is what one of the records is, such as "finished case".
    """
    try:
        yield
    except OSError as error:
        told = f"writing stopped, {error.strerror}; {count(records, what)} kept"
        advice = "make room or mend access and run the same command again"
        raise OSError(error.errno, f"{told}, {advice}", str(store_dir)) from error
    except KeyboardInterrupt:
        told = f"{count(records, what)} kept in {store_dir}"
        raise KeyboardInterrupt(f"{told}; run the same command again to continue") from None
    finally:
        sweep(store_dir)


def sweep(store_dir: Path) -> None:
    """Remove what killed processes left half written in a store."""
    remove_partials(store_dir, store_dir / "cases")


# --- Private helpers ---


def _identity_of_data(content: Union[Dataset, Manifest]) -> Dict[str, Any]:
    """What makes two data sets the same as far as a store is concerned, as JSON content."""
    return {
        "schema": SCHEMA,
        "name": content.name,
        "layout": content.layout,
        "channels": list(content.channels),
        "labels": {str(code): name for code, name in labels_in_use(content.layout, content.labels, ()).items()},
    }


def _identity_of_settings(settings: Settings) -> Dict[str, Any]:
    """The settings as JSON content."""
    content = dataclasses.asdict(settings)
    content["label_map"] = {str(old): new for old, new in sorted(settings.label_map.items())}
    return content


def _refuse_other_owner(store_dir: Path, dataset: Dataset, settings: Settings) -> None:
    """Take an empty folder; raise unless another one holds a store of the same data set, version and settings."""
    path = store_dir / "source.json"
    old = old_manifest(store_dir)
    owner = _owner(path)
    if old is not None:
        owner.update(_identity_of_data(old))
    elif not owner and not is_untouched(store_dir, path.name):
        raise InputError(f"store {store_dir} must be empty or begun by `prepare`, got other files; choose another")
    problems = [
        f"store {store_dir} must belong to this data set and version: {key} {value!r}, got {owner.get(key)!r}"
        for key, value in _identity_of_data(dataset).items()
        if owner and owner.get(key) != value
    ]
    if path.is_file():
        begun = _flags(settings_of(store_dir))
        problems += [
            f"{flag} must be as store {store_dir} was begun: {begun[flag]}, got {told}"
            for flag, told in _flags(settings).items()
            if told != begun[flag]
        ]
    if problems:
        raise InputError(*problems, "choose another --store; nothing was touched")
    if not path.is_file():
        write_json(path, identity(dataset, settings))
    (store_dir / "cases").mkdir(exist_ok=True)


def _owner(path: Path) -> Dict[str, Any]:
    """What source.json says, nothing where there is none."""
    if not path.is_file():
        return {}
    try:
        content = read_json(path)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise InputError(f"{path} must be as `prepare` wrote it, got no JSON object; choose a new store")
    return content


def _flags(settings: Settings) -> Dict[str, str]:
    """The settings as they are typed."""
    meaning = {"format": settings.format, "scores": settings.scores}
    choices = [choice for choice, fields in FORMAT_CHOICES.items() if fields == meaning]
    pairs = (f"{old}={new}" for old, new in sorted(settings.label_map.items()))
    return {
        "--format": choices[0] if choices else f"{settings.format} of float16",
        "--crop": "given" if settings.crop else "left out",
        "--zero-nan": "given" if settings.zero_nan else "left out",
        "--label-map": " ".join(pairs) or "none",
    }


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_label_map(value: Any) -> bool:
    return isinstance(value, dict) and all(
        old.isdecimal() and isinstance(new, int) and not _is_bool(new) for old, new in value.items()
    )


_RULES = {
    "format": (" or ".join(FORMATS), lambda value: value in FORMATS),
    "crop": ("true or false", _is_bool),
    "zero_nan": ("true or false", _is_bool),
    "label_map": ("code to code", _is_label_map),
    "scores": ("true or false", _is_bool),
}
"""Each setting in source.json -> what it must be, in words, and whether a value is that."""


def _is_whole(path: Path, size_bytes: int, sha256: str, verify: bool) -> bool:
    return path.is_file() and path.stat().st_size == size_bytes and (not verify or file_sha256(path) == sha256)


def _same_sources(files: CaseFiles, record: CaseRecord, dataset_folder: Path, verify: bool) -> bool:
    """Whether a case still has the sources that it was made from."""
    paths = [*files.images, *([files.label] if files.label else [])]
    if [source_name(path, dataset_folder) for path in paths] != [source.path for source in record.sources]:
        return False
    for path, source in zip(paths, record.sources):
        status = path.stat()
        if status.st_size != source.size_bytes:
            return False
        if (verify or status.st_mtime_ns != source.mtime_ns) and file_sha256(path) != source.sha256:
            return False
    return True

"""What lies in a store's folder beside its cases: source.json, by which work on it continues, and
quarantine.jsonl, the cases that were left out.

with claimed(folder, "store", SOURCE, content):    # locked; a folder of other content is refused
    ...
"""

import contextlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import msgspec

from cpu3d.data.cases.normalisation import chosen_kinds
from cpu3d.data.datasets.dataset import Dataset, Problems
from cpu3d.data.datasets.layouts import labels_in_use
from cpu3d.data.manifest import SCHEMA, Manifest, case_list
from cpu3d.data.normalise import Kind, Normalisation, if_any_differs
from cpu3d.data.region import whole
from cpu3d.data.store import open_store, with_names_of_now
from cpu3d.data.stores.convert import USUAL, StoreSettings
from cpu3d.errors import InputError, raise_if_any
from cpu3d.util.atomic import (
    atomic_write,
    is_untouched,
    remove_partials,
    writable_folder,
    write_json,
)
from cpu3d.util.lock import locked
from memory_estimator.common.files import read_json, read_record, read_text, typed

SOURCE = "source.json"
QUARANTINE = "quarantine.jsonl"
NORMALISATION = "normalisation"  # field of source.json: the decided kinds
GROWN = "grown"  # field of source.json that is true once cases were appended
IGNORE = "ignore"  # and the one of the label that is to be ignored, absent without one


@contextlib.contextmanager
def claimed(
    folder: Path,
    kind: str,
    name: str,
    content: Mapping[str, Any],
    subfolders: Sequence[str] = ("cases",),
) -> Iterator[None]:
    """Lock a folder, made if absent, for the work that `content` describes; remove what killed
    processes left.

    An empty folder gets `content` as its file `name`; a folder with the same content is continued.
    `subfolders` are made in it. A field of None is not written. Raises InputError, and changes
    nothing, if it holds other files, cannot be written, or is in use."""
    path = folder / name
    if not (folder / "manifest.json").exists():  # a finished store may be read-only
        writable_folder(folder, kind)
    with locked(folder, kind):
        if path.is_file():
            begun = _read_object(path)
            differences = []
            for field in dict.fromkeys((*content, IGNORE)):
                value = content.get(field)
                if begun.get(field) != value:
                    rule = f"{field} of {kind} {folder} must be {begun.get(field)!r}"
                    differences.append(f"{rule}, as it was begun, got {value!r}")
            if differences:
                raise InputError(*differences, f"choose another {kind}; nothing was touched")
        elif not is_untouched(folder, name):
            names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:3])
            rule = f"{kind} {folder} must be empty or hold {name}"
            raise InputError(f"{rule}, got {names}; choose another")
        else:
            write_json(path, _written(content))
        inner = [folder / subfolder for subfolder in subfolders]
        for path in inner:
            path.mkdir(exist_ok=True)
        remove_partials(folder, *inner)
        yield


def identity(dataset: Dataset, settings: StoreSettings) -> Dict[str, Any]:
    """The content of source.json: the data set and the settings of a store."""
    labels = labels_in_use(dataset.layout, dataset.labels, ())
    of_settings = asdict(settings)
    # Not written if nothing is chosen, as before there was a choice.
    of_settings["normalise"] = list(settings.normalise) if settings.normalise else None
    target_mm = settings.target_spacing_mm
    of_settings["target_spacing_mm"] = list(target_mm) if target_mm else None
    content = {
        "schema": SCHEMA,
        "name": dataset.name,
        "layout": dataset.layout,
        "channels": list(dataset.channels),
        "labels": {str(code): name for code, name in labels.items()},
        **of_settings,
    }
    if dataset.ignore is not None:
        content[IGNORE] = dataset.ignore
    return content


def has_grown(store_dir: Path) -> bool:
    """Whether `store append` has added cases to a store, as its source.json says."""
    path = store_dir / SOURCE
    return path.is_file() and _read_object(path).get(GROWN, False) is True


def note_growth(store_dir: Path) -> None:
    """Write into source.json that the store has cases of several data sets."""
    path = store_dir / SOURCE
    content = _read_object(path)
    if content.get(GROWN) is not True:
        write_json(path, {**content, GROWN: True})


def note_no_growth(store_dir: Path) -> None:
    """The way back, for a store that is made of its first data set again."""
    path = store_dir / SOURCE
    content = _read_object(path)
    write_json(path, {field: value for field, value in content.items() if field != GROWN})


def normalisation_begun(store_dir: Path) -> Optional[Tuple[Normalisation, ...]]:
    """The kinds by which the cases of an unfinished store were converted; None if there are none
    yet. Nothing is noted of a store whose channels are all over the foreground."""
    path = store_dir / SOURCE
    noted = _read_object(path).get(NORMALISATION)
    if noted is None:
        is_begun = any((store_dir / "cases").glob("*.json"))
        return () if is_begun else None
    try:
        return typed(noted, Tuple[Normalisation, ...], NORMALISATION)
    except ValueError as error:
        raise InputError(f"{path} must be as it was written, got {error}; restore it") from None


def note_normalisation(store_dir: Path, normalisation: Sequence[Normalisation]) -> None:
    """Write the kinds of a store that is begun into source.json, unless all channels are over the
    foreground."""
    kinds = [each.to_json() for each in if_any_differs(normalisation)]
    if kinds:
        path = store_dir / SOURCE
        write_json(path, {**_read_object(path), NORMALISATION: kinds})


def restore_source(store_dir: Path, content: Dict[str, Any], dataset: Dataset) -> None:
    """Write the lost or damaged source.json of a finished store again. Raises InputError if it
    would not be the store's own."""
    manifest = open_store(store_dir).manifest
    labels = labels_in_use(manifest.layout, manifest.labels, ())
    own: Dict[str, Any] = {
        "name": manifest.name,
        "layout": manifest.layout,
        "channels": list(manifest.channels),
        "labels": {str(code): name for code, name in labels.items()},
        IGNORE: manifest.ignore,
    }
    target_mm = manifest.target_spacing_mm
    own["target_spacing_mm"] = list(target_mm) if target_mm else None
    for record in manifest.cases:
        own["format"] = record.format
        if record.stored != whole(record.shape):
            own["crop"] = True
        elif record.box != record.stored and not manifest.normalisation:
            own["crop"] = False  # else the box may not have been known
        if record.zeroed_voxels:
            own["zero_nan"] = True
    lost = f"store {store_dir}, whose source.json is lost or damaged,"
    problems = []
    for name, value in own.items():
        if content.get(name) != value:
            problems.append(f"{name} of {lost} must be {value!r}, got {content.get(name)!r}")
    asked = content.get("normalise") or []
    if not _are_chosen(asked, manifest):
        named = zip(manifest.channels, manifest.normalisations)
        words = [f"{name}={each.kind}" for name, each in named if each.is_chosen]
        problems.append(f"normalise of {lost} must be {words}, got {asked}")
    raise_if_any(f"{problem}; give that" for problem in problems)
    kinds = []
    for each in manifest.normalisation:
        begun = replace(each, low=None, high=None, mean=None, std=None)  # no window was known
        kinds.append(begun.to_json())
    if kinds:
        content = {**content, NORMALISATION: kinds}
    own_cases = {files.case_id for files in dataset.cases} | set(dataset.problems)
    grown = any(case.case_id not in own_cases for case in case_list(manifest.cases).known)
    if grown:
        content = {**content, GROWN: True}
    write_json(store_dir / SOURCE, _written(content))


def _are_chosen(words: Sequence[str], manifest: Manifest) -> bool:
    """Whether these words of --normalise are what was chosen for a store. One whose channels are
    all over the foreground does not tell."""
    asked = {}
    for name, each in chosen_kinds(manifest.channels, words).items():
        asked[name] = each.kind
    if not manifest.normalisation:
        return set(asked.values()) <= {Kind.FOREGROUND}
    named = zip(manifest.channels, manifest.normalisation)
    return asked == {name: each.kind for name, each in named if each.is_chosen}


def settings_of(store_dir: Path) -> StoreSettings:
    """The settings in a store's source.json. Raises InputError if there is none, or one that is
    damaged."""

    def made(content: Dict[str, Any]) -> StoreSettings:
        content = with_names_of_now(content)
        later = {
            "normalise": content.get("normalise", []),
            "target_spacing_mm": content.get("target_spacing_mm"),
        }
        chosen = {name: content[name] for name in vars(USUAL) if name not in later}
        chosen.update(later)
        return typed(chosen, StoreSettings, "source")

    first = "`prepare` of its first data set with the same settings"
    todo = f"restore it, or run {first}, which writes it again"
    try:
        return read_record(store_dir / SOURCE, SCHEMA, made, todo, InputError)
    except (FileNotFoundError, NotADirectoryError):
        rule = f"store {store_dir} must hold source.json with its settings"
        raise InputError(f"{rule}, found none; {todo}") from None


def has_settings(store_dir: Path) -> bool:
    """Whether a store's source.json is there and whole."""
    with contextlib.suppress(InputError):
        settings_of(store_dir)
        return True
    return False


class _BadCase(msgspec.Struct):
    """A line of quarantine.jsonl."""

    case_id: str
    reasons: List[str]


def read_quarantine(store_dir: Path) -> Problems:
    """The cases that were left out of the store, with the reasons. Raises InputError if the list is
    damaged."""
    path = store_dir / QUARANTINE
    if not path.is_file():
        return {}
    try:
        bad = msgspec.json.Decoder(_BadCase).decode_lines(read_text(path))
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        rule = f"{path} must be JSON lines of a case_id and its reasons, got {error}"
        raise InputError(f"{rule}; restore or delete the file") from None
    return {case.case_id: case.reasons for case in bad}


def write_quarantine(store_dir: Path, problems: Problems) -> None:
    """Write a JSON line for each bad case; without bad cases, remove the file."""
    path = store_dir / QUARANTINE
    if not problems:
        path.unlink(missing_ok=True)
        return
    with atomic_write(path, "w") as file:
        for case_id in sorted(problems):
            line = json.dumps({"case_id": case_id, "reasons": problems[case_id]})
            file.write(f"{line}\n")


def _written(content: Mapping[str, Any]) -> Dict[str, Any]:
    return {field: value for field, value in content.items() if value is not None}


def _read_object(path: Path) -> Dict[str, Any]:
    with contextlib.suppress(ValueError):
        content = read_json(path)
        if isinstance(content, dict):
            return with_names_of_now(content)
    raise InputError(f"{path} must be as it was written, got no JSON object; choose another folder")

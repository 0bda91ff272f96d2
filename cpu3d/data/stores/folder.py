"""What lies in a store's folder beside its cases: source.json, by which work on it continues, and
quarantine.jsonl, the cases that were left out.

with claimed(folder, "store", SOURCE, content):    # locked; a folder of other content is refused
    ...
"""

import contextlib
import json
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import msgspec

from cpu3d.data.datasets.dataset import Dataset, Problems
from cpu3d.data.datasets.layouts import labels_in_use
from cpu3d.data.manifest import SCHEMA, USUAL, Manifest, StoreSettings
from cpu3d.data.normalise import Normalisation
from cpu3d.data.store import read_manifest
from cpu3d.errors import InputError
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
NORMALISATION = "normalisation"  # field of source.json: the kinds, once they are decided


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
    `subfolders` are made in it. Raises InputError, and changes nothing, if it holds other files,
    cannot be written, or is in use."""
    path = folder / name
    writable_folder(folder, kind)
    with locked(folder, kind):
        if path.is_file():
            check_same(folder, kind, _begun(path), content)
        elif not is_untouched(folder, name):
            names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:3])
            rule = f"{kind} {folder} must be empty or hold {name}"
            raise InputError(f"{rule}, got {names}; choose another")
        else:
            write_json(path, content)
        inner = [folder / subfolder for subfolder in subfolders]
        for path in inner:
            path.mkdir(exist_ok=True)
        remove_partials(folder, *inner)
        yield


def check_same(
    folder: Path, kind: str, begun: Mapping[str, Any], content: Mapping[str, Any]
) -> None:
    """Raise InputError for each field of `content` that is another than a folder was begun with."""
    problems = []
    for field, value in content.items():
        if begun.get(field) != value:
            rule = f"{field} of {kind} {folder} must be {begun.get(field)!r}"
            problems.append(f"{rule}, as it was begun, got {value!r}")
    if problems:
        raise InputError(*problems, f"choose another {kind}; nothing was touched")


def identity(about: Union[Dataset, Manifest], settings: StoreSettings) -> Dict[str, Any]:
    """The content of source.json: the data set, or that of a finished store, and the settings."""
    labels = labels_in_use(about.layout, about.labels, ())
    content = {
        "schema": SCHEMA,
        "name": about.name,
        "layout": about.layout,
        "channels": about.channels,
        "labels": labels,
        "ignore": about.ignore,
        **msgspec.to_builtins(settings),
    }
    read: Dict[str, Any] = json.loads(json.dumps(content))  # as source.json gives it back
    return read


def settings_of(store_dir: Path) -> Optional[StoreSettings]:
    """The settings of a store, finished or not; None of one that is not begun."""

    def made(content: Dict[str, Any]) -> StoreSettings:
        return typed({name: content[name] for name in vars(USUAL)}, StoreSettings, "source")

    if (store_dir / "manifest.json").exists():
        return read_manifest(store_dir)[0].settings
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return read_record(store_dir / SOURCE, SCHEMA, made, "choose another store", InputError)
    return None


def begun_normalisation(store_dir: Path) -> Optional[Tuple[Normalisation, ...]]:
    """The kinds by which the cases of an unfinished store are converted; None if they are not
    decided yet."""

    def made(content: Dict[str, Any]) -> Optional[Tuple[Normalisation, ...]]:
        return typed(content.get(NORMALISATION), Optional[Tuple[Normalisation, ...]], "source")

    return read_record(store_dir / SOURCE, SCHEMA, made, "choose another store", InputError)


def note_normalisation(store_dir: Path, normalisation: Sequence[Normalisation]) -> None:
    """Write the kinds of a store that is begun into source.json."""
    path = store_dir / SOURCE
    write_json(path, {**_begun(path), NORMALISATION: [each.to_json() for each in normalisation]})


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


def _begun(path: Path) -> Dict[str, Any]:
    with contextlib.suppress(ValueError):
        content = read_json(path)
        if isinstance(content, dict):
            return content
    raise InputError(f"{path} must be as it was written, got no JSON object; choose another folder")

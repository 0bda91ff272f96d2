"""The store: arrays beside their records.

store/manifest.json         what the store is: its split, and the SHA-256 of each case's record;
                            with one of its own content. Written last
store/source.json           the data set and the settings with which the store was begun
store/cases/<id>.json       the case's record; written after its arrays, so they are whole if it is
                            there
store/cases/<id>.x.npy      image (X, Y, Z, C), int16, C order, little endian,
                            axes R A S (or .x.b2nd)
store/cases/<id>.y.npy      label (X, Y, Z), uint8, in the data set's own codes (or .y.b2nd)
store/cases/<id>.t.npy      label (X, Y, Z), uint8, on the source's grid turned to axes R A S, which
                            answers are scored on: of a case that was resampled (or .t.b2nd)
store/quarantine.jsonl      cases left out, each with its reasons
"""

import copy
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Sequence, Tuple, Union

import msgspec

from cpu3d.data.files.reader import Reader
from cpu3d.data.manifest import (
    RESTORE,
    SCHEMA,
    BareName,
    CaseRecord,
    Manifest,
    case_from_json,
    record_bytes,
    record_path,
)
from cpu3d.data.region import Array, Multiple, Region, Shape3, centred, paste, round_up, whole, xyz
from cpu3d.data.split import SPLITS, split_hash
from cpu3d.errors import InputError, raise_if_any
from cpu3d.util.atomic import write_bytes, write_json
from memory_estimator.common.files import read_record, read_regular, reason, typed


class Store:
    """A store open for reading. Arrays are read on demand."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder = folder
        self.manifest = manifest
        self._reader = Reader(self.folder)
        self._cases = {case.case_id: case for case in manifest.cases}

    def case(self, case_id: str) -> CaseRecord:
        """The record of `case_id`; KeyError if the store has no such case."""
        return self._cases[case_id]

    def cases(self, split: str) -> List[CaseRecord]:
        """The records of "train", "val" or "test", sorted by case id."""
        return [self._cases[case_id] for case_id in self.manifest.split[split]]

    def image(self, case_id: str) -> Array:
        """The image `(X, Y, Z, C)` on the whole grid, read-only: a map if a .npy file holds the
        whole grid, else a copy in memory. Raises InputError for a damaged file."""
        return self._on_grid(case_id, "x")

    def label(self, case_id: str) -> Array:
        """The label `(X, Y, Z)` uint8, as `image`. Raises InputError for a case without one."""
        return self._on_grid(case_id, "y")

    def truth(self, case_id: str) -> Array:
        """The label as its file has it, on the source's grid in axes R A S: what answers are scored
        on. That of a case that was not resampled is `label`."""
        record = self.case(case_id)
        if record.resampled_from is None:
            return self.label(case_id)
        array = self._reader.array(record, "t")
        array.flags.writeable = False
        return array

    def check(self, records: Iterable[CaseRecord]) -> None:
        """Check the arrays' files of `records` without reading voxels. Raises InputError naming all
        damaged files."""
        raise_if_any(problem for record in records for problem in self._reader.problems(record))

    def with_split(self, split: Dict[str, Tuple[str, ...]]) -> "Store":
        """A view of the store with another split of its cases."""
        view = copy.copy(self)
        view.manifest = dataclasses.replace(self.manifest, split=split)
        return view

    def _on_grid(self, case_id: str, kind: str) -> Array:
        record = self.case(case_id)
        array = self._reader.array(record, kind)
        if record.stored != whole(record.shape):
            around = record.around if kind == "x" else ()
            array = paste(array, record.stored, record.shape, around)
        array.flags.writeable = False
        return array


def open_store(folder: Union[str, Path]) -> Store:
    """Open the store in `folder` for reading. Raises InputError if there is no manifest, if it or a
    record is not as it was written, or if the schema is another."""
    folder = Path(folder)
    manifest, sums = read_manifest(folder)
    records = []
    problems = []
    for case_id, sha256 in sorted(sums.items()):
        path = record_path(folder, case_id)
        try:
            content = read_regular(path)
            if hashlib.sha256(content).hexdigest() != sha256:
                raise ValueError("other bytes than were written")
            records.append(case_from_json(content))
        except (OSError, ValueError) as error:
            rule = f"store file {path} must be the record of a case"
            problems.append(f"{rule}, got {reason(error)}; {RESTORE}")
    raise_if_any(problems)
    manifest = dataclasses.replace(manifest, cases=tuple(records))
    got = split_hash(manifest.split, manifest.cases, manifest.folds, manifest.normalisation)
    if got != manifest.split_hash:
        rule = f"split of store {folder} must have hash {manifest.split_hash}"
        raise InputError(f"{rule}, got {got}; {RESTORE}")
    return Store(folder, manifest)


def read_manifest(folder: Path) -> Tuple[Manifest, Dict[str, str]]:
    """A store's manifest without its cases, and the SHA-256 of the record of each, by case id.
    Raises InputError as `open_store`."""

    def checked(content: Dict[str, Any]) -> Tuple[Manifest, Dict[str, str]]:
        if content != sealed(content):
            raise ValueError("an edited manifest")
        fields = {name: value for name, value in content.items() if name != "sha256"}
        sums = typed(fields.pop("cases"), Dict[BareName, str], "cases")
        manifest: Manifest = typed({**fields, "cases": []}, Manifest, "manifest")
        if sorted(sums) != sorted(id_ for name in SPLITS for id_ in manifest.split[name]):
            raise ValueError("a split of other cases")
        return manifest, sums

    try:
        return read_record(folder / "manifest.json", SCHEMA, checked, RESTORE, InputError)
    except (FileNotFoundError, NotADirectoryError):
        rule = f"store {folder} must hold a finished manifest.json"
        todo = "run `prepare`, again if it was interrupted"
        if not folder.is_dir():
            todo = "there is no such folder: check the path"
        elif (folder / "dataset.json").is_file():  # of the Decathlon, nnU-Net or MONAI
            todo = f"it is a data set: make a store by `prepare --dataset {folder} --store STORE`"
        elif (folder / "config.json").is_file():
            todo = "it is a run: name the store that it was trained on"
        raise InputError(f"{rule}, found none; {todo}") from None


def sealed(content: Mapping[str, Any]) -> Dict[str, Any]:
    """The content of a manifest.json with the SHA-256 of its other fields, in their order, but for
    "schema"."""
    covered = {name: content[name] for name in content if name not in ("schema", "sha256")}
    text = json.dumps(covered, separators=(",", ":"))
    return {**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def write_store(folder: Path, manifest: Manifest) -> None:
    """Write the records of the cases, where they are others than those that are there, then the
    manifest, so that a reader sees the old store or the whole new one.

    The arrays must have been written."""
    (folder / "cases").mkdir(exist_ok=True)
    sums = {}
    for record in manifest.cases:
        content = record_bytes(record)
        path = record_path(folder, record.case_id)
        if not path.is_file() or path.read_bytes() != content:
            write_bytes(path, content)
        sums[record.case_id] = hashlib.sha256(content).hexdigest()
    fields = msgspec.to_builtins(dataclasses.replace(manifest, cases=()))
    write_json(folder / "manifest.json", sealed({**fields, "cases": sums}))


def check_names(kind: str, wanted: Sequence[str], names: Sequence[str]) -> None:
    """Raise InputError unless `wanted` has some of `names`, each once."""
    if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= set(names):
        rule = f"{kind} must be among {', '.join(names)}, each once"
        raise InputError(f"{rule}, got {', '.join(wanted) or 'none'}; choose from these")


def grid_size(store: Store, *, extent: str, multiple: Multiple) -> Shape3:
    """The least size (X, Y, Z) that holds every case: the largest box, or grid, of the store along
    each axis, rounded up."""
    extents = [case_box(record, extent).size for record in store.manifest.cases]
    return round_up(xyz(map(max, zip(*extents))), multiple)


def case_box(record: CaseRecord, extent: str) -> Region:
    """A case's content box, or its whole grid."""
    return record.box if extent == "brain" else whole(record.shape)


def case_region(record: CaseRecord, size: Shape3, extent: str) -> Region:
    """The region of `size` around a case's content box, or around its whole grid."""
    return centred(case_box(record, extent), size, record.shape)

"""The store: arrays beside their records.

store/manifest.json         what the store is, with a SHA-256 of its own content; written last
store/cases-<hash>.jsonl    the records of its cases, one a line
store/cases/<id>.x.npy      image (X, Y, Z, C), int16 or float16, C order, little endian, axes R A S (or .x.b2nd)
store/cases/<id>.y.npy      label (X, Y, Z), uint8, in the data set's own codes (or .y.b2nd)
store/cases/<id>.json       the case's record; written after its arrays, so it marks them as good
store/quarantine.jsonl      cases left out, each with its reasons
"""

import copy
import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any, Dict, Iterable, Mapping, Sequence, Tuple, Union

import numpy as np

from cpu3d.data.files.reader import Reader
from cpu3d.data.records import SCHEMA, SPLITS, CaseRecord, Manifest, case_from_json, split_hash, split_problems, to_json
from cpu3d.data.region import EXTENTS, Region, Shape3, centred, is_integer, paste, require, round_up, whole
from cpu3d.errors import InputError, refuse
from cpu3d.util.atomic import PARTIAL, atomic_write, write_json
from memory_estimator.common.files import NotRegularError, read_json, read_regular, typed

ADVICE = "restore it, or delete manifest.json and run `prepare` again"

_RECORDS = re.compile(r"cases-[0-9a-f]+\.jsonl")


class CaseRecords(Sequence[CaseRecord]):
    """The records of a store's cases, each parsed when it is asked for: parsed, 50,000 of them fill half a GiB.

    `lines` are case id -> its line of the file `path`. Raises InputError for a line that is no record of its case.
    """

    def __init__(self, path: Path, lines: Mapping[str, bytes]):
        self._path, self._lines, self._ids = path, lines, tuple(lines)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, place: int) -> CaseRecord:
        return self.of(self._ids[place])

    def of(self, case_id: str) -> CaseRecord:
        """The record of a case; KeyError where there is none."""
        try:
            record = case_from_json(self._lines[case_id])
            if record.case_id == case_id:
                return record
            got = f"case {record.case_id}"
        except ValueError as error:
            got = str(error)
        raise InputError(f"store file {self._path} must hold the record of case {case_id}, got {got}; {ADVICE}")

    def select(self, case_ids: Iterable[str]) -> "CaseRecords":
        """The records of some of the cases."""
        return CaseRecords(self._path, {case_id: self._lines[case_id] for case_id in case_ids})

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None


class Store:
    """A store open for reading. Records are parsed and arrays are read on demand."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder = Path(folder)
        self.manifest = self._made = manifest
        self._reader = Reader(self.folder)

    def case(self, case_id: str) -> CaseRecord:
        """The record of `case_id`; KeyError if the store has no such case."""
        return self.manifest.cases.of(case_id)

    def cases(self, split: str) -> Sequence[CaseRecord]:
        """The records of "train", "val" or "test", sorted by case id."""
        return self.manifest.cases.select(self.manifest.split[split])

    def image(self, case_id: str) -> np.ndarray:
        """The image `(X, Y, Z, C)` on the whole grid, read-only: a map where a .npy file holds the whole grid, else a
        copy in memory. Raises InputError for a damaged file."""
        return self._on_grid(case_id, "x")

    def label(self, case_id: str) -> np.ndarray:
        """The label `(X, Y, Z)` uint8, as `image`. Raises InputError for a case without one."""
        return self._on_grid(case_id, "y")

    def check(self, records: Iterable[CaseRecord]) -> None:
        """Check the arrays' files of `records` without reading voxels. Raises InputError naming all damaged files."""
        refuse(problem for record in records for problem in self._reader.problems(record))

    def with_split(self, split: Dict[str, Tuple[str, ...]]) -> "Store":
        """A view of the store with another split of its cases; `check_split` of a view checks the store's own."""
        view = copy.copy(self)
        view.manifest = dataclasses.replace(self.manifest, split=split)
        return view

    def check_split(self) -> None:
        """Raise InputError where a patient or image is in two splits, or the split's hash is another."""
        manifest = self._made
        refuse(split_problems(manifest.split, manifest.cases))
        got = split_hash(manifest.split, manifest.cases)
        if got != manifest.split_hash:
            raise InputError(f"split of store {self.folder} must have hash {manifest.split_hash}, got {got}; {ADVICE}")

    def _on_grid(self, case_id: str, part: str) -> np.ndarray:
        record = self.case(case_id)
        array = on_grid(self._reader.array(record, part), record)
        array.flags.writeable = False
        return array


def on_grid(array: np.ndarray, record: CaseRecord) -> np.ndarray:
    """A stored array on its case's whole grid: itself, or a copy where only a box is stored."""
    return array if record.stored == whole(record.shape) else paste(array, record.stored, record.shape)


def open_store(folder: Union[str, Path]) -> Store:
    """Open the store in `folder` for reading. Raises InputError when there is no manifest, when manifest or records
    are not as they were written, when the schema is another, or when a case is in two splits."""
    folder = Path(folder)
    content = _read_manifest(folder)
    try:
        return _opened(folder, content)
    except InputError:
        newer = _read_manifest(folder)
        if newer == content:
            raise
        return _opened(folder, newer)  # `append` has replaced both files between the two reads


def _read_manifest(folder: Path) -> Dict[str, Any]:
    path = folder / "manifest.json"
    if not path.is_file():
        raise InputError(f"store {folder} must hold a finished manifest.json, found none; run `prepare` (again)")
    try:
        content = read_json(path)
        if content["schema"] != SCHEMA:
            raise InputError(f"store {folder} must have schema {SCHEMA}, got {content['schema']}; `prepare` another")
        # A records file of another name could lie outside of the store.
        if content != sealed(content) or not _RECORDS.fullmatch(content["records"]["file"]):
            raise InputError(f"store manifest {path} must be as it was written, got an edited one; {ADVICE}")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"store manifest {path} must be complete JSON, got {error!r}; {ADVICE}") from None
    return content


def sealed(content: Mapping[str, Any]) -> Dict[str, Any]:
    """The content of a manifest.json with the SHA-256 of its other fields, in their order."""
    bare = {name: value for name, value in content.items() if name != "sha256"}
    text = json.dumps(bare, separators=(",", ":"))
    return {**bare, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def write_store(folder: Union[str, Path], manifest: Manifest) -> None:
    """Write the manifest and its records, so that a reader sees the old store or the whole new one.

    The arrays must have been written. The records of an earlier manifest are removed.
    """
    folder = Path(folder)
    digest, size_bytes = hashlib.sha256(), 0
    unnamed = folder / f".cases{PARTIAL}"  # its name follows from its content
    with atomic_write(unnamed) as file:
        for case in manifest.cases:
            line = json.dumps(to_json(case), separators=(",", ":"), allow_nan=False).encode() + b"\n"
            file.write(line)
            digest.update(line)
            size_bytes += len(line)
    name = f"cases-{digest.hexdigest()[:12]}.jsonl"
    unnamed.replace(folder / name)
    records = {"file": name, "bytes": size_bytes, "sha256": digest.hexdigest()}
    write_json(folder / "manifest.json", sealed({**to_json(manifest), "records": records}))
    for path in folder.glob("cases-*.jsonl"):
        if path.name != name and _RECORDS.fullmatch(path.name):
            path.unlink()


def check_names(what: str, wanted: Sequence[str], there: Sequence[str]) -> None:
    """Raise InputError unless `wanted` names some of `there`, each once."""
    if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= set(there):
        raise InputError(f"{what} must be among {', '.join(there)}, each once, got {', '.join(wanted) or 'none'}")


def _opened(folder: Path, content: Mapping[str, Any]) -> Store:
    fields = {name: value for name, value in content.items() if name not in ("records", "sha256")}
    try:
        ids = sorted(case_id for name in SPLITS for case_id in fields["split"][name])
        twice = dict.fromkeys(case_id for case_id, following in zip(ids, ids[1:]) if case_id == following)
        refuse(f"case {case_id} of store {folder} must be in one split, got two; restore it" for case_id in twice)
        cases = _read_records(folder / content["records"]["file"], content["records"]["sha256"], ids)
        manifest = typed({**fields, "cases": []}, Manifest, "manifest")
        return Store(folder, dataclasses.replace(manifest, cases=cases))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"store manifest {folder}/manifest.json must be complete, got {error!r}; {ADVICE}") from None


def _read_records(path: Path, sha256: str, case_ids: Sequence[str]) -> CaseRecords:
    try:
        content = read_regular(path)
    except (FileNotFoundError, NotRegularError) as error:
        got = "none" if isinstance(error, FileNotFoundError) else error.strerror
        raise InputError(f"store file {path} must exist, got {got}; {ADVICE}") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise InputError(f"store file {path} must be as it was written, got other bytes; {ADVICE}")
    lines = content.splitlines()
    if len(lines) != len(case_ids):
        raise InputError(f"store file {path} must hold {len(case_ids)} cases, got {len(lines)}; {ADVICE}")
    return CaseRecords(path, dict(zip(case_ids, lines)))


def grid_size(store: Store, *, extent: str, multiple: int) -> Shape3:
    """The size (X, Y, Z) that `volume_dataset` gives every case: the largest box, or grid, of the store, rounded up.

    Raises InputError for an unknown extent and for a multiple below 1.
    """
    require(
        ("extent", f"one of {', '.join(EXTENTS)}", extent, extent in EXTENTS),
        ("multiple", "an integer of at least 1", multiple, is_integer(multiple, 1)),
    )
    return round_up(store.manifest.largest_box if extent == "brain" else store.manifest.largest_shape, multiple)


def case_region(record: CaseRecord, size: Shape3, extent: str) -> Region:
    """Where a region of `size` lies in a case: around the brain, or around the whole grid."""
    return centred(record.box if extent == "brain" else whole(record.shape), size, record.shape)

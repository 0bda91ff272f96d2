"""The store: arrays that are read as they lie, beside records that say everything else.

store/manifest.json         what the store is, with a SHA-256 of its own content; written last
store/cases-<hash>.jsonl    the records of its cases, one a line
store/cases/<id>.x.npy      image (X, Y, Z, C), int16 or float16, C order, little endian, axes R A S (or .x.b2nd)
store/cases/<id>.y.npy      label (X, Y, Z), uint8, in the data set's own codes (or .y.b2nd)
store/cases/<id>.json       the case's record; written after its arrays, so it marks them as good
store/quarantine.jsonl      cases left out, each with its reasons
"""

import contextlib
import copy
import dataclasses
import hashlib
import json
import os
import re
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, Mapping, Sequence, Tuple, Type, TypeVar, Union

import msgspec
import numpy as np

from cpu3d.data.files.reader import Reader
from cpu3d.data.records import (
    SCHEMA,
    SPLITS,
    CaseRecord,
    Manifest,
    RecordHead,
    case_from_json,
    split_hash,
    split_problems,
    to_json,
)
from cpu3d.data.region import EXTENTS, Region, Shape3, centred, is_integer, paste, require, round_up, whole
from cpu3d.errors import InputError, refuse
from cpu3d.util.atomic import PARTIAL, atomic_write, write_json
from memory_estimator.common.files import NotRegularError, open_regular, read_json, typed

T = TypeVar("T")

TRIES = 5
"""Manifests that may follow each other while a store is opened."""

ADVICE = "restore it, or delete manifest.json and run `prepare` again"

KEPT = 2048
"""Parsed records that stay in memory: all of most data sets, some 20 MB at most."""

_RECORDS = re.compile(r"cases-[0-9a-f]+\.jsonl")


class CaseIndex(Sequence[CaseRecord]):
    """The records in a file of JSON lines, in the order of `case_ids`, parsed when they are asked for.

    Half a million records would fill the memory that volumes need; their places in the file fill four megabytes.
    Raises InputError where the file is not `size_bytes` long or holds other cases.
    """

    def __init__(self, path: Path, case_ids: Sequence[str], size_bytes: int):
        self._path, self._ids, self._places = path, tuple(case_ids), range(len(case_ids))
        try:
            self._handle = open_regular(path)
            weakref.finalize(self, os.close, self._handle)
            found = os.fstat(self._handle).st_size
        except (FileNotFoundError, NotRegularError) as error:
            found = "none" if isinstance(error, FileNotFoundError) else error.strerror
        if found != size_bytes:
            raise InputError(f"store file {path} must be {size_bytes} bytes long, got {found}; {ADVICE}")
        ends, start = [np.zeros(1, np.int64)], 0
        with open(self._handle, "rb", closefd=False) as file:
            for piece in iter(lambda: file.read(1 << 20), b""):
                ends.append(np.flatnonzero(np.frombuffer(piece, np.uint8) == ord("\n")) + start + 1)
                start += len(piece)
        self._ends = np.concatenate(ends)
        """In bytes from the start: 0, then of each line one past its newline."""
        found = len(self._ends) - 1
        if found != len(case_ids):
            raise InputError(f"store file {path} must hold {len(case_ids)} cases, got {found}; {ADVICE}")
        self._kept: OrderedDict[int, CaseRecord] = OrderedDict()

    def select(self, places: Sequence[int]) -> "CaseIndex":
        """Some of the records, by place, without making them."""
        selected = copy.copy(self)
        selected._whole = self  # whose end closes the file
        selected._places = [self._places[place] for place in places]
        return selected

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: Union[int, slice]):
        if isinstance(place, slice):
            return self.select(range(len(self))[place])
        line = self._places[place]
        record = self._kept.get(line) or self._parsed(line)
        self._kept[line] = record  # threads may race for the same one: each stores an equal record
        if len(self._kept) > KEPT:
            with contextlib.suppress(KeyError):
                self._kept.popitem(last=False)
        return record

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(a == b for a, b in zip(self, other))

    __hash__ = None

    def _parsed(self, place: int, kind: Type[T] = CaseRecord) -> T:
        """The record in a line as `kind`. Raises InputError where it is none, or that of another case."""
        start, end = map(int, self._ends[place : place + 2])
        line = os.pread(self._handle, end - start, start)
        try:
            record = case_from_json(line) if kind is CaseRecord else msgspec.json.decode(line, type=kind)
            if record.case_id == self._ids[place]:
                return record
            reason = f"case {record.case_id}"
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            reason = str(error)[:300]
        rule = f"store file {self._path} must hold case {self._ids[place]} in line {place + 1}"
        raise InputError(f"{rule}, got {reason}; {ADVICE}")


def heads(cases: Sequence[CaseRecord]) -> Iterator[RecordHead]:
    """That of every case, in a tenth of the time that whole records take where they lie in a file."""
    if isinstance(cases, CaseIndex):
        return (cases._parsed(place, RecordHead) for place in cases._places)
    return (RecordHead(*(getattr(case, name) for name in RecordHead.__struct_fields__)) for case in cases)


def distinct(cases: Sequence[CaseRecord]) -> Iterator[CaseRecord]:
    """The first record of every stem; those that share its arrays are not made."""
    first: Dict[str, int] = {}
    for place, head in enumerate(heads(cases)):
        if first.setdefault(head.stem, place) == place:
            yield cases[place]


class Store:
    """A store open for reading. Opens in the time it takes to find its records' lines; the rest is read on demand."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder = Path(folder)
        self.manifest = self._made = manifest
        ids = sorted(case_id for name in SPLITS for case_id in manifest.split[name])
        self._places = {case_id: place for place, case_id in enumerate(ids)}
        self._reader = Reader(self.folder)

    def case(self, case_id: str) -> CaseRecord:
        """The record of `case_id`; KeyError if the store has no such case."""
        return self.manifest.cases[self._places[case_id]]

    def cases(self, split: str) -> Sequence[CaseRecord]:
        """The records of "train", "val" or "test", sorted by case id."""
        return self.manifest.cases.select([self._places[case_id] for case_id in self.manifest.split[split]])

    def image(self, case_id: str) -> np.ndarray:
        """The image `(X, Y, Z, C)` on the whole grid, read-only.

        A map, where a .npy file holds the whole grid; else a copy in memory. Raises InputError when the file is not as
        long as its record says, so a short file is never mapped.
        """
        return self._on_grid(case_id, "x")

    def label(self, case_id: str) -> np.ndarray:
        """The label `(X, Y, Z)` uint8, as `image`. Raises InputError for a case without one."""
        return self._on_grid(case_id, "y")

    def check(self, records: Iterable[CaseRecord]) -> None:
        """Look at every array's file of `records` once, at no voxel. Raises InputError naming all that are damaged."""
        refuse(dict.fromkeys(problem for record in records for problem in self._reader.problems(record)))

    def with_split(self, split: Dict[str, Tuple[str, ...]]) -> "Store":
        """A view of the store with another split of its cases; what `check_split` checks is the one that was made."""
        view = copy.copy(self)
        view.manifest = dataclasses.replace(self.manifest, split=split)
        return view

    def check_split(self) -> None:
        """Read every record. Raises InputError where a patient or image is in two splits, or the split is another."""
        manifest, entries = self._made, list(heads(self._made.cases))
        refuse(split_problems(manifest.split, entries))
        found = split_hash(manifest.split, entries)
        if found != manifest.split_hash:
            raise InputError(
                f"split of store {self.folder} must have hash {manifest.split_hash}, got {found}; {ADVICE}"
            )

    def _on_grid(self, case_id: str, part: str) -> np.ndarray:
        record = self.case(case_id)
        array = on_grid(self._reader.array(record, part), record)
        array.flags.writeable = False
        return array


def on_grid(array: np.ndarray, record: CaseRecord) -> np.ndarray:
    """A stored array on its case's whole grid: itself, or a copy where only a box is stored."""
    return array if record.stored == whole(record.shape) else paste(array, record.stored, record.shape)


def open_store(folder: Union[str, Path]) -> Store:
    """Open the store in `folder` for reading, also while another process puts a new manifest in its place.

    Raises InputError when there is no manifest, when it was edited or the records beside it are damaged, when it is of
    another schema, or when a case is in two splits.
    """
    folder, before = Path(folder), None
    for tried in range(TRIES + 1):
        content = read_manifest(folder)
        try:
            return _opened(folder, content)
        except InputError:
            if content == before or tried == TRIES:
                raise
            before = content


def read_manifest(folder: Path) -> Dict[str, Any]:
    """What manifest.json holds, as it was written, with its `records`: file, bytes and sha256. Raises InputError."""
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
    """The content of a manifest.json with the SHA-256 of all else in it, in the order in which it stands there."""
    bare = {name: value for name, value in content.items() if name != "sha256"}
    text = json.dumps(bare, separators=(",", ":"))
    return {**bare, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def write_store(folder: Union[str, Path], manifest: Manifest) -> None:
    """Write the manifest and its records, so that a reader sees the old store or the whole new one.

    The arrays must be there already. Records of an earlier manifest are removed; who has them open keeps them.
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
        cases = CaseIndex(folder / content["records"]["file"], ids, content["records"]["bytes"])
        manifest = typed({**fields, "cases": []}, Manifest, "manifest")
        return Store(folder, dataclasses.replace(manifest, cases=cases))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"store manifest {folder}/manifest.json must be complete, got {error!r}; {ADVICE}") from None


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

"""The store: arrays that are read as they lie, beside records that say everything else.

store/manifest.json         what this file describes; written last
store/cases-<hash>.jsonl    the records of its cases, one a line
store/cases/<id>.x.npy      image (X, Y, Z, C), int16 or float16, C order, little endian, axes R A S (or .x.b2nd)
store/cases/<id>.y.npy      label (X, Y, Z), uint8, in the data set's own codes (or .y.b2nd)
store/cases/<id>.json       the case's record; written after its arrays, so it marks them as good
store/quarantine.jsonl      cases left out, each with its reasons
"""

import hashlib
import json
from pathlib import Path
from typing import List, Sequence, Union

import numpy as np

from cpu3d.atomic import atomic_write, write_json
from cpu3d.data.case_index import CaseIndex, Selection, line_of, split_entries
from cpu3d.data.files.reader import Reader
from cpu3d.data.records import (
    SCHEMA,
    SPLITS,
    CaseRecord,
    Manifest,
    manifest_from_json,
    split_hash,
    split_problems,
    to_json,
)
from cpu3d.data.region import paste, whole
from cpu3d.errors import InputError


class Store:
    """A store open for reading. Opens in the time it takes to find its records' lines; the rest is read on demand."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder = Path(folder)
        self.manifest = manifest
        ids = sorted(case_id for name in SPLITS for case_id in manifest.split[name])
        self._places = {case_id: place for place, case_id in enumerate(ids)}
        self._reader = Reader(self.folder)

    def case(self, case_id: str) -> CaseRecord:
        """The record of `case_id`; KeyError if the store has no such case."""
        return self.manifest.cases[self._places[case_id]]

    def cases(self, split: str) -> Sequence[CaseRecord]:
        """The records of "train", "val" or "test", sorted by case id."""
        return Selection(self.manifest.cases, [self._places[case_id] for case_id in self.manifest.split[split]])

    def image(self, case_id: str) -> np.ndarray:
        """The image `(X, Y, Z, C)` on the whole grid, read-only.

        A map of which no voxel is read before it is touched, where a .npy file holds the whole grid; else a copy in
        memory. Raises InputError when the file is not as long as its record says, so a short file is never mapped.
        """
        return self._whole(self.case(case_id), "x")

    def label(self, case_id: str) -> np.ndarray:
        """The label `(X, Y, Z)` uint8, as `image`. Raises InputError for a case without one."""
        record = self.case(case_id)
        if not record.has_label:
            raise InputError(f"case {case_id} must have a label, the store has none; choose a labelled case")
        return self._whole(record, "y")

    def check(self, records: Sequence[CaseRecord]) -> None:
        """Look at every array's file of `records` once, at no voxel. Raises InputError naming all that are damaged."""
        problems: List[str] = []
        seen = set()
        for record in records:
            if record.stem not in seen:
                seen.add(record.stem)
                problems += self._reader.problems(record)
        if problems:
            raise InputError(*problems)

    def check_split(self) -> None:
        """Read every record. Raises InputError where a patient is in two splits, or the split is not the one made."""
        manifest = self.manifest
        entries = split_entries(manifest.cases)
        problems = split_problems(manifest.split, entries)
        if not problems and split_hash(manifest.split, entries) != manifest.split_hash:
            problems = [
                f"split of store {self.folder} must have hash {manifest.split_hash}, as it was made, got another;"
                " restore its manifest.json, or run `prepare` again"
            ]
        if problems:
            raise InputError(*problems)

    def _whole(self, record: CaseRecord, part: str) -> np.ndarray:
        array = self._reader.array(record, part)
        if record.stored != whole(record.shape):
            array = paste(array, record.stored, record.shape)
        array.flags.writeable = False
        return array


def open_store(folder: Union[str, Path]) -> Store:
    """Open the store in `folder` for reading.

    Raises InputError when there is no manifest, when it or the records beside it are damaged, when it is of another
    schema, or when a case is in two splits.
    """
    folder = Path(folder)
    path = folder / "manifest.json"
    if not path.is_file():
        raise InputError(f"store {folder} must hold a finished manifest.json, found none; run `prepare` (again)")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        schema = content["schema"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"store manifest {path} must be JSON with a schema, got {error!r}; run `prepare` again"
        ) from None
    if schema != SCHEMA:
        raise InputError(
            f"store {folder} must have schema {SCHEMA}, got {schema}; run `prepare` again with this version"
        )
    try:
        records = content.pop("records")
        ids = sorted(case_id for name in SPLITS for case_id in content["split"][name])
        twice = sorted({case_id for case_id, following in zip(ids, ids[1:]) if case_id == following})
        if twice:
            raise InputError(
                *(
                    f"case {case_id} of store {folder} must be in one split, got two; restore {path}"
                    for case_id in twice
                )
            )
        file = folder / Path(records["file"]).name  # never a path outside the store
        return Store(folder, manifest_from_json(content, CaseIndex(file, ids, records["bytes"])))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"store manifest {path} must be complete, got {error!r}; run `prepare` again") from None


def write_store(folder: Union[str, Path], manifest: Manifest) -> None:
    """Write the manifest and its records, so that a reader sees the old store or the whole new one.

    The arrays must be there already. Records of an earlier manifest are removed; who has them open keeps them.
    """
    folder = Path(folder)
    digest, size_bytes = hashlib.sha256(), 0
    unnamed = folder / ".cases.partial"  # its name follows from its content
    with atomic_write(unnamed) as file:
        for case in manifest.cases:
            line = line_of(case)
            file.write(line)
            digest.update(line)
            size_bytes += len(line)
    name = f"cases-{digest.hexdigest()[:12]}.jsonl"
    unnamed.replace(folder / name)
    records = {"file": name, "bytes": size_bytes, "sha256": digest.hexdigest()}
    write_json(folder / "manifest.json", {**to_json(manifest), "records": records})
    for path in folder.glob("cases-*.jsonl"):
        if path.name != name:
            path.unlink()


def check_names(what: str, wanted: Sequence[str], there: Sequence[str]) -> None:
    """Raise InputError unless `wanted` names some of `there`, each once."""
    if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= set(there):
        raise InputError(f"{what} must be among {', '.join(there)}, each once, got {', '.join(wanted) or 'none'}")

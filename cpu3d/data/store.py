"""The store: arrays beside their records.

store/manifest.json         what the store is, with a SHA-256 of its own content; written last
store/cases-<hash>.jsonl    the records of its cases, one a line
store/cases/<id>.x.npy      image (X, Y, Z, C), int16, C order, little endian,
                            axes R A S (or .x.b2nd)
store/cases/<id>.y.npy      label (X, Y, Z), uint8, in the data set's own codes (or .y.b2nd)
store/cases/<id>.t.npy      label (X, Y, Z), uint8, on the source's grid turned to axes R A S, which
                            answers are scored on: of a case that was resampled (or .t.b2nd)
store/cases/<id>.json       the case's record; written after its arrays, so they are whole if it is
                            there
store/quarantine.jsonl      cases left out, each with its reasons
"""

import copy
import dataclasses
import hashlib
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Sequence, Tuple, Union

from cpu3d.data.datasets.names import check_printable
from cpu3d.data.files.reader import Reader
from cpu3d.data.manifest import (
    SCHEMA,
    CaseList,
    CaseRecord,
    Manifest,
    RecordLines,
    case_from_json,
    case_list,
    record_path,
    to_json,
)
from cpu3d.data.region import Array, Multiple, Region, Shape3, centred, paste, round_up, whole
from cpu3d.data.split import SPLITS, split_hash, split_problems
from cpu3d.errors import InputError, raise_if_any
from cpu3d.util.atomic import PARTIAL, atomic_write, write_json
from memory_estimator.common.files import (
    NotRegularError,
    open_regular,
    read_record,
    read_regular,
    reason,
    typed,
)

ADVICE = (
    "restore it, or delete manifest.json and run `prepare` again, then each `store append` in its"
    " order"
)
MADE_AGAIN = "run `prepare` again, or `store append`: it comes back from the records in cases/"

_RECORDS = re.compile(r"cases-[0-9a-f]+\.jsonl")


class RecordsLostError(InputError):
    """The file of a store's records is lost or damaged; those in cases/ may still be there."""


class Store:
    """A store open for reading. Arrays are read on demand."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder = Path(folder)
        self.manifest = manifest
        self._reader = Reader(self.folder)
        self._cases = case_list(manifest.cases)

    def case(self, case_id: str) -> CaseRecord:
        """The record of `case_id`; KeyError if the store has no such case."""
        return self._cases.chosen([case_id])[0]

    def cases(self, split: str) -> CaseList:
        """The records of "train", "val" or "test", sorted by case id."""
        return self._cases.chosen(self.manifest.split[split])

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
    """Open the store in `folder` for reading. Raises InputError if there is no manifest, if
    manifest or records are not as they were written, if the schema is another, or if a case is in
    two splits."""
    folder = Path(folder)
    content = _read_manifest(folder)
    try:
        return _opened(folder, content)
    except InputError:
        if _read_manifest(folder) == content:
            raise
    return open_store(folder)  # `append` has replaced both files between the two reads


def restore_records(folder: Path) -> Store:
    """Write the lost or damaged file of a store's records again, from the records in cases/.

    The caller holds the store's lock. Raises InputError if the manifest is damaged too, and if the
    records are not those of its split.
    """
    content = _read_manifest(folder)
    lost: List[str] = []

    def own() -> Iterator[CaseRecord]:
        for case_id in _case_ids(folder, content):
            try:
                yield case_from_json(read_regular(record_path(folder, case_id)))
            except (FileNotFoundError, ValueError) as error:
                rule = f"store file {record_path(folder, case_id)} must be the record of a case"
                lost.append(f"{rule}, got {reason(error)}; {ADVICE}")

    cases = CaseList.collected(own(), folder)
    raise_if_any(lost)
    manifest = _checked(folder, content, cases)
    write_store(folder, manifest)
    return Store(folder, manifest)


def _read_manifest(folder: Path) -> Dict[str, Any]:
    def checked(content: Dict[str, Any]) -> Dict[str, Any]:
        # A records file of another name could be outside of the store.
        if content != sealed(content) or not _RECORDS.fullmatch(content["records"]["file"]):
            raise ValueError("an edited manifest")
        return content

    try:
        return read_record(folder / "manifest.json", SCHEMA, checked, ADVICE, InputError)
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
    fields = {name: value for name, value in content.items() if name != "sha256"}
    covered = {name: value for name, value in fields.items() if name != "schema"}
    text = json.dumps(covered, separators=(",", ":"))
    fields["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    return fields


def write_store(folder: Union[str, Path], manifest: Manifest) -> None:
    """Write the manifest and its records, so that a reader sees the old store or the whole new one.

    The arrays must have been written. The records of an earlier manifest are removed.
    """
    folder = Path(folder)
    digest = hashlib.sha256()
    size_bytes = 0
    unnamed = folder / f".cases{PARTIAL}"  # its name follows from its content
    with atomic_write(unnamed) as file:
        for line in case_list(manifest.cases).lines:
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


def with_names_of_now(content: Mapping[str, Any]) -> Dict[str, Any]:
    """The fields of a manifest.json or a source.json: earlier stores have the target spacing under
    the name that a case's own spacing has."""
    names = {"spacing_mm": "target_spacing_mm"}
    return {names.get(name, name): value for name, value in content.items()}


def check_names(kind: str, wanted: Sequence[str], names: Sequence[str]) -> None:
    """Raise InputError unless `wanted` has some of `names`, each once."""
    if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= set(names):
        rule = f"{kind} must be among {', '.join(names)}, each once"
        raise InputError(f"{rule}, got {', '.join(wanted) or 'none'}; choose from these")


def _opened(folder: Path, content: Mapping[str, Any]) -> Store:
    records = content["records"]
    ids = _case_ids(folder, content)
    cases = _read_records(folder / records["file"], str(records.get("sha256")), ids)
    return Store(folder, _checked(folder, content, cases))


def _case_ids(folder: Path, content: Mapping[str, Any]) -> List[str]:
    """The cases of a manifest's split, sorted. Raises InputError for a manifest without a split."""
    try:
        return sorted(case_id for name in SPLITS for case_id in content["split"][name])
    except (KeyError, TypeError) as error:
        rule = f"{folder / 'manifest.json'} must be complete"
        raise InputError(f"{rule}, got {reason(error)}; {ADVICE}") from None


def _checked(folder: Path, content: Mapping[str, Any], cases: CaseList) -> Manifest:
    """The manifest with its cases. Raises InputError unless they are those of its split."""
    fields = {name: value for name, value in content.items() if name not in ("records", "sha256")}
    try:
        fields = with_names_of_now(fields)
        bare: Manifest = typed({**fields, "cases": []}, Manifest, "manifest")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        rule = f"{folder / 'manifest.json'} must be complete"
        raise InputError(f"{rule}, got {reason(error)}; {ADVICE}") from None
    names = (bare.name, *bare.channels, *bare.labels.values(), *bare.regions)
    of_cases = (name for case in cases.known for name in (case.case_id, case.patient_id))
    check_printable(folder / "manifest.json", (*names, *of_cases))
    manifest = dataclasses.replace(bare, cases=cases)
    raise_if_any(split_problems(manifest.split, cases.known))
    got = split_hash(manifest.split, cases.known, manifest.folds, manifest.normalisation)
    if got != manifest.split_hash:
        rule = f"split of store {folder} must have hash {manifest.split_hash}"
        raise InputError(f"{rule}, got {got}; {ADVICE}")
    return manifest


def _read_records(path: Path, sha256: str, case_ids: Sequence[str]) -> CaseList:
    """The records in a file, each of which is checked here and forgotten again."""
    try:
        handle = open_regular(path)
    except FileNotFoundError:
        raise RecordsLostError(f"store file {path} must exist, got none; {MADE_AGAIN}") from None
    except NotRegularError as error:
        rule = f"store file {path} must be a file"
        raise RecordsLostError(f"{rule}, got {error.strerror}; {MADE_AGAIN}") from None
    lines = RecordLines(handle, path)
    digest = hashlib.sha256()
    problem = ""
    with os.fdopen(os.dup(handle), "rb") as file:
        for number, line in enumerate(file, 1):
            digest.update(line)
            try:
                lines.add(line, case_from_json(line))
            except ValueError as error:
                problem = problem or f"{path}:{number} must be the record of a case, got {error}"
    if digest.hexdigest() != sha256:
        rule = f"store file {path} must be as it was written"
        raise RecordsLostError(f"{rule}, got other bytes; {MADE_AGAIN}")
    if problem:
        raise InputError(f"{problem}; {ADVICE}")
    for case, wanted in itertools.zip_longest(lines.known, case_ids):
        got = case.case_id if case else "none"
        if got != wanted:
            rule = f"store file {path} must hold the {len(case_ids)} cases of the split"
            raise InputError(f"{rule}, got {got} in place of {wanted or 'none'}; {ADVICE}")
    return CaseList(lines, range(len(lines.known)))


def grid_size(store: Store, *, extent: str, multiple: Multiple) -> Shape3:
    """The size (X, Y, Z) that `volume_dataset` gives every case: the largest box, or grid, of the
    store, rounded up."""
    if extent == "brain":
        return round_up(store.manifest.largest_box, multiple)
    return round_up(store.manifest.largest_shape, multiple)


def case_region(record: CaseRecord, size: Shape3, extent: str) -> Region:
    """The region of `size` around a case's content box, or around its whole grid."""
    inner = record.box if extent == "brain" else whole(record.shape)
    return centred(inner, size, record.shape)

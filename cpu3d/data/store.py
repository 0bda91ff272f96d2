"""The store: one memory-mappable array per case beside a manifest that says everything else.

store/manifest.json         what this file describes; written last
store/cases/<id>.x.npy      image (X, Y, Z, C), int16 or float16, C order, little endian, axes R A S
store/cases/<id>.y.npy      label (X, Y, Z), uint8, in the data set's own codes
store/cases/<id>.json       the case's record; written after its arrays, so it marks them as good
store/quarantine.jsonl      cases left out, each with its reasons
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Sequence, Tuple, Union

import numpy as np

from cpu3d.data.region import Region
from cpu3d.errors import InputError

SCHEMA = 1
"""Version of the layout and of the manifest. A store of another version is refused, never guessed at."""

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Geometry:
    """The grid a case came in: what it takes to write a prediction that lies on top of its source."""

    shape: Tuple[int, int, int]
    """Voxels along the source's own axes."""
    affine: Tuple[Tuple[float, ...], ...]
    """4x4, source voxel to world in mm (RAS+), float64."""
    axes: str
    """Where the source's axes point, such as "LPS"."""
    sform_code: int
    qform_code: int


@dataclass(frozen=True)
class SourceFile:
    """A file that a case was made from."""

    path: str
    """Relative to the data set's folder."""
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class CaseRecord:
    """One case of the store. Everything spatial is in the store's grid: axes R A S, voxels X, Y, Z."""

    case_id: str
    patient_id: str
    """Cases of one patient never straddle a split."""
    shape: Tuple[int, int, int]
    spacing_mm: Tuple[float, float, float]
    box: Region
    """Smallest box around every voxel that is non-zero in any channel or labelled."""
    image_dtype: str
    """"int16": the source's values, exact. "float16": (value - mean) / std of the source, rounded."""
    max_abs_error: float
    """Largest rounding error of the stored image, in standard deviations; 0 when lossless."""
    channel_mean: Tuple[float, ...]
    """Per channel, over its non-zero voxels, of the stored values."""
    channel_std: Tuple[float, ...]
    channel_min: Tuple[float, ...]
    channel_max: Tuple[float, ...]
    channel_voxels: Tuple[int, ...]
    """Non-zero voxels per channel."""
    label_voxels: Dict[int, int]
    """Voxels of each label code that occurs, 0 included; empty for a case without a label."""
    geometry: Geometry
    sources: Tuple[SourceFile, ...]
    image_bytes: int
    image_sha256: str
    label_bytes: int
    """0 for a case without a label."""
    label_sha256: str

    @property
    def has_label(self) -> bool:
        return self.label_bytes > 0


@dataclass(frozen=True)
class Manifest:
    """What a store holds. Frozen: a store is made once and read ever after."""

    name: str
    layout: str
    """The data set layout it was read from, such as "decathlon"."""
    channels: Tuple[str, ...]
    """Names of the image channels in order, such as ("FLAIR", "T1w", "T1gd", "T2w")."""
    labels: Dict[int, str]
    """Label code -> name, 0 is background."""
    regions: Dict[str, Tuple[int, ...]]
    """Region name -> label codes it is made of, such as {"WT": (1, 2, 3)}; the order is the order of outputs."""
    split: Dict[str, Tuple[str, ...]]
    """"train", "val", "test" -> case ids. Fixed when the store is made."""
    split_seed: int
    cases: Tuple[CaseRecord, ...]
    versions: Dict[str, str]
    """Of this project and the libraries that made the store."""
    schema: int = SCHEMA

    @property
    def split_hash(self) -> str:
        """Twelve hex digits that change whenever a case moves between, into or out of the splits, or is another."""
        content = {case.case_id: (case.image_sha256, case.label_sha256) for case in self.cases}
        split = {name: [(case_id, content.get(case_id)) for case_id in sorted(self.split[name])] for name in SPLITS}
        return hashlib.sha256(json.dumps(split).encode()).hexdigest()[:12]


class Store:
    """A store open for reading. Opens in the time it takes to read the manifest; arrays are mapped on demand."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder = folder
        self.manifest = manifest
        self._by_id = {case.case_id: case for case in manifest.cases}

    def case(self, case_id: str) -> CaseRecord:
        """The record of `case_id`; KeyError if the store has no such case."""
        return self._by_id[case_id]

    def cases(self, split: str) -> Tuple[CaseRecord, ...]:
        """The records of "train", "val" or "test", in the manifest's order."""
        return tuple(self._by_id[case_id] for case_id in self.manifest.split[split])

    def image(self, case_id: str) -> np.ndarray:
        """The image `(X, Y, Z, C)` as a read-only map: no voxel is read before it is touched.

        Raises InputError when the file is not as long as the manifest says, so a short file is never mapped.
        """
        record = self.case(case_id)
        return _map(image_path(self.folder, case_id), record.image_bytes)

    def check(self, records: Sequence[CaseRecord]) -> None:
        """Map every array of `records` once, reading only headers. Raises InputError naming all that are damaged."""
        problems = []
        for record in records:
            for read in (self.image, *([self.label] if record.has_label else [])):
                try:
                    read(record.case_id)
                except InputError as error:
                    problems.extend(error.problems)
        if problems:
            raise InputError(*problems)

    def label(self, case_id: str) -> np.ndarray:
        """The label `(X, Y, Z)` uint8 as a read-only map. Raises InputError for a case without one."""
        record = self.case(case_id)
        if not record.has_label:
            raise InputError(f"case {case_id} must have a label, the store has none; choose a labelled case")
        return _map(label_path(self.folder, case_id), record.label_bytes)


def open_store(folder: Union[str, Path]) -> Store:
    """Open the store in `folder` for reading.

    Raises InputError when there is no manifest, when it is damaged, or when it is of another schema.
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
        return Store(folder, manifest_from_json(content))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"store manifest {path} must be complete, got {error!r}; run `prepare` again") from None


def check_names(what: str, wanted: Sequence[str], there: Sequence[str]) -> None:
    """Raise InputError unless `wanted` names some of `there`, each once."""
    if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= set(there):
        raise InputError(f"{what} must be among {', '.join(there)}, each once, got {', '.join(wanted) or 'none'}")


def image_path(folder: Path, case_id: str) -> Path:
    return Path(folder) / "cases" / f"{case_id}.x.npy"


def label_path(folder: Path, case_id: str) -> Path:
    return Path(folder) / "cases" / f"{case_id}.y.npy"


def record_path(folder: Path, case_id: str) -> Path:
    return Path(folder) / "cases" / f"{case_id}.json"


def to_json(record: Union[Manifest, CaseRecord]) -> dict:
    """A manifest or record as plain JSON content; `manifest_from_json` and `case_from_json` are the way back."""
    return dataclasses.asdict(record)


def manifest_from_json(content: dict) -> Manifest:
    fields = dict(content)
    fields["channels"] = tuple(fields["channels"])
    fields["labels"] = {int(code): name for code, name in fields["labels"].items()}
    fields["regions"] = {name: tuple(codes) for name, codes in fields["regions"].items()}
    fields["split"] = {name: tuple(ids) for name, ids in fields["split"].items()}
    fields["cases"] = tuple(case_from_json(case) for case in fields["cases"])
    return Manifest(**fields)


def case_from_json(content: dict) -> CaseRecord:
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
    fields["box"] = Region(tuple(content["box"]["start"]), tuple(content["box"]["size"]))
    geometry = dict(content["geometry"])
    geometry["shape"] = tuple(geometry["shape"])
    geometry["affine"] = tuple(tuple(row) for row in geometry["affine"])
    fields["geometry"] = Geometry(**geometry)
    fields["sources"] = tuple(SourceFile(**source) for source in content["sources"])
    fields["label_voxels"] = {int(code): count for code, count in content["label_voxels"].items()}
    return CaseRecord(**fields)


# --- Private helpers ---


def _map(path: Path, size_bytes: int) -> np.ndarray:
    """Map a .npy file read-only, after checking its length: reading past the end of a map kills the process."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise InputError(f"store file {path} must exist, found none; run `prepare` again") from None
    if found != size_bytes:
        raise InputError(
            f"store file {path} must be {size_bytes} bytes long, got {found}; delete it and run `prepare` again"
        )
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise InputError(f"store file {path} must be a .npy array, got {error}; run `prepare --verify`") from None

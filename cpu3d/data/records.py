"""The records of a store and its cases, and their JSON."""

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Dict, Iterable, List, Literal, Mapping, Sequence, Tuple, Union

import msgspec
from msgspec import Meta

from cpu3d.data.region import Region, Shape3
from cpu3d.errors import refuse

SCHEMA = 1  # version of the store's layout and records; a store of another version is refused
SPLITS = ("train", "val", "test")

Count = Annotated[int, Meta(ge=0)]
Code = Annotated[int, Meta(ge=0, le=255)]
Positive = Annotated[float, Meta(gt=0)]
BareName = Annotated[str, Meta(pattern=r"\A(?!\.{0,2}\Z)[^/\0]*\Z")]  # of a file, without a folder
AffineRow = Tuple[float, float, float, float]


@dataclass(frozen=True)
class Geometry:
    """The grid of a case's source, along its own axes; predictions are written on it."""

    shape: Shape3
    affine: Tuple[AffineRow, AffineRow, AffineRow, AffineRow]
    """Source voxel to world in mm (RAS+), float64, whatever the unit of the file's own numbers."""
    axes: Annotated[str, Meta(min_length=3, max_length=3)]
    """Directions of the source's axes, such as "LPS"."""
    sform_code: Count
    qform_code: Count
    forms: Tuple[float, ...] = ()
    """pixdim[0:4], quatern_b to _d, qoffset_x to _z and srow_x to _z of the NIfTI header, in its
    own unit. Empty if they follow from `affine`."""
    unit: Literal["unknown", "meter", "mm", "micron"] = "mm"  # of lengths in the source's header


@dataclass(frozen=True)
class SourceFile:
    """A file that a case was made from; `path` is relative to the data set's folder."""

    path: str
    size_bytes: Count
    sha256: str
    mtime_ns: int


@dataclass(frozen=True)
class CaseRecord:
    """One case of the store. Everything spatial is in the store's grid: axes R A S, voxels X, Y, Z."""

    case_id: BareName
    patient_id: str
    shape: Shape3  # voxels of the whole grid, also if only a box of it is stored
    spacing_mm: Tuple[Positive, Positive, Positive]
    box: Region  # smallest box around every voxel that is non-zero in any channel or labelled
    image_dtype: Literal["int16", "float16"]
    """"int16": the source's values, exact. "float16": (value - mean) / std of the source, rounded."""
    max_abs_error: Annotated[float, Meta(ge=0)]
    """Largest rounding error, in standard deviations; 0 if lossless."""
    channel_mean: Tuple[float, ...]  # per channel, over its non-zero voxels, of the stored values
    channel_std: Tuple[Positive, ...]
    channel_min: Tuple[float, ...]
    channel_max: Tuple[float, ...]
    channel_voxels: Tuple[Count, ...]
    zeroed_voxels: Count  # NaN or infinite voxels that were set to 0, all channels together
    label_voxels: Dict[Code, Annotated[int, Meta(gt=0)]]
    """Voxels of each label code that occurs, 0 included; empty for a case without a label."""
    centres: Dict[Code, Tuple[Shape3, ...]]
    """Up to `stores.case.CENTRES` voxels of each label code but 0, evenly over it, around which patches are drawn."""
    geometry: Geometry
    sources: Tuple[SourceFile, ...]
    stem: BareName  # name of the arrays' files up to the first dot
    format: Literal["", "npy", "b2nd"]  # of the arrays' files; "" for a case that is in no store
    stored: Region  # the part of the grid that the arrays hold. Outside it, image and label are 0
    image_bytes: Count
    image_sha256: str
    image_voxels_sha256: str  # of dtype, shape and voxels of the whole grid: the same in every format, cropped or not
    label_bytes: Count
    label_sha256: str
    label_voxels_sha256: str
    background: Tuple[float, ...] = ()
    """Per channel, what most of the border of its source's grid is, 0 where it varies. Empty if it
    is 0 in all channels."""

    @property
    def has_label(self) -> bool:
        return bool(self.label_voxels)

    @property
    def channels(self) -> int:
        return len(self.channel_mean)


@dataclass(frozen=True)
class Manifest:
    """The content of a store. A store changes only by getting new cases."""

    name: str
    layout: str  # the data set layout it was read from, such as "decathlon"
    channels: Tuple[str, ...]
    labels: Dict[int, str]  # label code -> name, 0 is background
    regions: Dict[str, Tuple[int, ...]]
    """Region -> its label codes, such as {"WT": (1, 2, 3)}; the order is the order of outputs."""
    split: Dict[str, Tuple[str, ...]]
    """"train", "val", "test" -> case ids, sorted. Every case is in one of them, and stays there."""
    split_seed: int
    split_hash: str  # from the function `split_hash`
    largest_shape: Shape3  # of the cases' grids, axis by axis
    largest_box: Shape3
    unlabelled: Tuple[str, ...]
    cases: Sequence[CaseRecord]  # sorted by case id
    versions: Dict[str, str]
    patient_rules: Dict[str, int] = field(default_factory=dict)  # rule that tells a case's patient -> number of cases
    schema: int = SCHEMA


def make_manifest(*, split: Mapping[str, Sequence[str]], cases: Sequence[CaseRecord], **fields: Any) -> Manifest:
    """The manifest of `cases`, at least one, and `split`. Raises InputError for the lines of `split_problems`."""
    cases = tuple(sorted(cases, key=lambda case: case.case_id))
    refuse(split_problems(split, cases))
    return Manifest(
        split={name: tuple(sorted(split[name])) for name in SPLITS},
        split_hash=split_hash(split, cases),
        largest_shape=tuple(map(max, *(case.shape for case in cases), (0, 0, 0))),
        largest_box=tuple(map(max, *(case.box.size for case in cases), (0, 0, 0))),
        unlabelled=tuple(case.case_id for case in cases if not case.has_label),
        cases=cases,
        **fields,
    )


def remake(manifest: Manifest, **changes: Any) -> Manifest:
    """The manifest with other cases or another split, and the fields that follow from them."""
    follows = ("split_hash", "largest_shape", "largest_box", "unlabelled", "schema")
    kept = {name: value for name, value in vars(manifest).items() if name not in follows}
    return make_manifest(**{**kept, **changes})


def split_hash(split: Mapping[str, Sequence[str]], cases: Iterable[CaseRecord]) -> str:
    """A hash, in twelve hex digits, of the case ids of each split and of their voxels."""
    content = {case.case_id: (case.image_voxels_sha256, case.label_voxels_sha256) for case in cases}
    listed = {name: [(case_id, content.get(case_id)) for case_id in sorted(split[name])] for name in SPLITS}
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:12]


def split_problems(split: Mapping[str, Sequence[str]], cases: Iterable[CaseRecord]) -> List[str]:
    """A line for each patient and each image in more than one split, which would be trained on and scored."""
    split_of = {case_id: name for name in SPLITS for case_id in split[name]}
    patients, images = defaultdict(dict), defaultdict(dict)
    for case in cases:
        if case.case_id in split_of:
            entry, name = (case.case_id, case.patient_id), split_of[case.case_id]
            patients[case.patient_id][name] = images[case.image_voxels_sha256][name] = entry
    problems = [
        f"patient {patient} must be in one split, got {' and '.join(places)}; keep its cases together"
        for patient, places in sorted(patients.items())
        if len(places) > 1
    ]
    for _, places in sorted(images.items()):
        if len({patient_id for _, patient_id in places.values()}) > 1:
            names = " and ".join(f"{case_id} ({name})" for name, (case_id, _) in places.items())
            advice = "leave all but one out, or `prepare` with --patients FILE that gives them one patient"
            problems.append(f"image of cases {names} must be in one split, got identical voxels; {advice}")
    return problems


def array_path(folder: Path, record: CaseRecord, part: str) -> Path:
    """The file of a case's image, `part` "x", or label, "y"."""
    return Path(folder) / "cases" / f"{record.stem}.{part}.{record.format}"


def record_path(folder: Path, case_id: str) -> Path:
    """The file of a case's own record, with which an unfinished store is continued."""
    return Path(folder) / "cases" / f"{case_id}.json"


def to_json(record: Union[Manifest, CaseRecord]) -> Dict[str, Any]:
    """A record, or a manifest without its cases, as JSON content."""
    if isinstance(record, CaseRecord):
        return msgspec.to_builtins(record)
    return {name: value for name, value in vars(record).items() if name != "cases"}


def case_from_json(content: bytes) -> CaseRecord:
    """The record in JSON. Raises ValueError for other content and for a record that contradicts itself."""
    try:
        record = msgspec.json.decode(content, type=CaseRecord)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)[:300]) from None
    shape, box, stored = record.shape, record.box, record.stored
    statistics = (record.channel_mean, record.channel_std, record.channel_min, record.channel_max)
    corners = zip(stored.start, box.start, box.stop, stored.stop, shape)
    centres = [voxel for voxels in record.centres.values() for voxel in voxels]
    has_files = record.image_bytes > 0 and bool(record.label_bytes) == record.has_label
    rules = {
        "box must be in stored, and stored in shape": all(0 <= a <= b < c <= d <= n for a, b, c, d, n in corners),
        "statistics must be as many for each channel": {*map(len, statistics)} == {len(record.channel_voxels)} != {0},
        "image_bytes and label_bytes must fit image and label": record.format == "" or has_files,
        "centres must be voxels of shape": all(0 <= a < n for voxel in centres for a, n in zip(voxel, shape)),
        "geometry must be of shape, turned": sorted(record.geometry.shape) == sorted(shape),
        "forms must be none or 22 numbers": len(record.geometry.forms) in (0, 22),
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise ValueError("; ".join(broken))
    return record

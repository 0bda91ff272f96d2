"""The records of a store and its cases, and their JSON."""

import errno
import functools
import json
import os
import tempfile
import weakref
import zlib
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Container,
    Dict,
    Iterable,
    Iterator,
    List,
    Literal,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Union,
    overload,
)

import msgspec
from msgspec import Meta

from cpu3d.data.normalise import Normalisation, Statistics, of_all
from cpu3d.data.region import Region, Shape3, xyz
from cpu3d.data.split import FOLD_SPLITS, SPLITS, split_hash, split_problems
from cpu3d.errors import InputError, raise_if_any
from memory_estimator.common.files import read_regular

SCHEMA = 1  # version of the store's layout and records; a store of another version is refused

Count = Annotated[int, Meta(ge=0)]
Code = Annotated[int, Meta(ge=0, le=255)]
Positive = Annotated[float, Meta(gt=0)]
LEFT_OUT = (
    "folds", "paint", "normalisation", "around", "units", "foreground", "peaks",
    "target_spacing_mm", "resampled_from", "far_voxels",
)  # fmt: skip
"""Fields that are left out of the JSON where they are empty: it is then as it was before them."""

BareName = Annotated[str, Meta(pattern=r"\A(?!\.{0,2}\Z)[^/\0]*\Z")]  # of a file, without a folder
AffineRow = Tuple[float, float, float, float]
Format = Literal["npy", "b2nd"]  # as arrays.FORMATS
Unit = Literal["unknown", "meter", "mm", "micron"]
Voxel = Tuple[Count, Count, Count]


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
    unit: Unit = "mm"  # of lengths in the source's header


@dataclass(frozen=True)
class SourceFile:
    """A file that a case was made from; `path` is relative to the data set's folder."""

    path: str
    size_bytes: Count
    sha256: str
    mtime_ns: int


@dataclass(frozen=True)
class SourceGrid:
    """The grid that a case was resampled from, in axes R A S, and the source's label on it."""

    shape: Shape3
    label_voxels: Dict[Code, Annotated[int, Meta(gt=0)]]  # as those of the case
    label_voxels_sha256: str
    label_bytes: Count = 0  # of its file; 0 as for a case that is in no store
    label_sha256: str = ""


@dataclass(frozen=True)
class CaseRecord:
    """One case of the store. Everything spatial is in the store's grid: axes R A S, voxels X, Y,
    Z."""

    case_id: BareName
    patient_id: str
    shape: Shape3  # voxels of the whole grid, also if only a box of it is stored
    spacing_mm: Tuple[Positive, Positive, Positive]
    box: Region
    """The content box: the smallest around every voxel that is labelled, or in any channel not what
    surrounds the volume: of a CT all up to the lower end of its window."""
    image_dtype: Literal["int16"]  # the source's values, exact, or as `units` say
    max_abs_error: Annotated[float, Meta(ge=0)]
    """Largest rounding error, in standard deviations; 0 if lossless."""
    channel_mean: Tuple[float, ...]
    """Per channel, of the stored values, as those below: over its non-zero voxels if it is
    normalised over the foreground, else over all."""
    channel_std: Tuple[Positive, ...]
    channel_min: Tuple[float, ...]
    channel_max: Tuple[float, ...]
    channel_voxels: Tuple[Count, ...]
    zeroed_voxels: Count  # NaN or infinite ones that were filled, all channels together
    label_voxels: Dict[Code, Annotated[int, Meta(gt=0)]]
    """Voxels of each label code that occurs, 0 included; empty for a case without a label."""
    centres: Dict[Code, Tuple[Voxel, ...]]
    """Up to `cases.case.CENTRES` voxels of each label code but 0, evenly over it, around which
    patches are drawn."""
    geometry: Geometry
    sources: Tuple[SourceFile, ...]
    stem: BareName  # name of the arrays' files up to the first dot
    format: Union[Literal[""], Format]  # of the arrays' files; "" for a case that is in no store
    stored: Region
    """The box of the grid that the arrays hold. Outside it, label and image are 0, or the image is
    what is `around`."""
    image_bytes: Count
    image_sha256: str
    # of dtype, shape and voxels of the whole grid: the same in every format, cropped or not
    image_voxels_sha256: str
    label_bytes: Count
    label_sha256: str
    label_voxels_sha256: str
    background: Tuple[float, ...] = ()
    """Per channel, what most of the border of its source's grid is, 0 where it varies. Empty if it
    is 0 in all channels."""
    resampled_from: Optional[SourceGrid] = None  # None if the case is on its source's grid
    far_voxels: Count = 0  # far from all others, and brought nearer; all channels together
    # --- Empty if all channels are normalised over the foreground, and then not in the JSON ---
    around: Tuple[float, ...] = ()
    """Per channel, the stored value that stands for what surrounds the volume: the median of its
    border, of a CT its least value. 0 for a channel whose background is 0."""
    units: Tuple[Tuple[Positive, float], ...] = ()
    """Per channel (step, offset): the source's value is step * stored + offset, to half a step.
    Empty if the source's values are stored."""
    foreground: Tuple[Tuple[float, ...], ...] = ()
    """Per channel of a CT, values of the source at even ranks of the labelled voxels; none of
    other channels, and of a case without labelled voxels."""
    peaks: Tuple[Tuple[Tuple[float, ...], ...], ...] = ()
    """Per channel of a CT whose window is not known yet, the largest stored value of each plane of
    X, of Y and of Z: with the window they tell the box. Empty in a finished store."""

    @property
    def statistics(self) -> Tuple[Statistics, ...]:
        """What the normalisation of each channel needs."""
        rows = zip(self.channel_mean, self.channel_std, self.channel_min, self.channel_max)
        around = self.around or (0.0,) * self.channels
        units = self.units or ((1.0, 0.0),) * self.channels
        return tuple(
            Statistics(*row, beside, *unit) for row, beside, unit in zip(rows, around, units)
        )

    @property
    def has_label(self) -> bool:
        return bool(self.label_voxels)

    @property
    def scored_shape(self) -> Shape3:
        """Voxels X, Y, Z of the grid that answers are scored on: the source's."""
        return self.resampled_from.shape if self.resampled_from else self.shape

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
    split_hash: str  # as `split.split_hash` gives it
    largest_shape: Shape3  # of the cases' grids, axis by axis
    largest_box: Shape3
    unlabelled: Tuple[str, ...]
    cases: Sequence[CaseRecord]
    """Sorted by case id: a `CaseList`, whose records are read one at a time."""
    versions: Dict[str, str]
    patient_rules: Dict[str, int] = field(default_factory=dict)
    """Rule that tells a case's patient -> number of cases."""
    folds: Tuple[Dict[str, Tuple[str, ...]], ...] = ()
    """Folds that were given and not drawn: "train" and "val" -> case ids, sorted. No fold has test
    cases."""
    target_spacing_mm: Optional[Tuple[Positive, Positive, Positive]] = None
    """Along R, A, S: what all cases are resampled to. None if they are stored as they are."""
    paint: Tuple[Tuple[str, Code], ...] = ()
    """Regions and the codes that they are painted with, in the order of painting, as of
    `labels.PaintedRegions`; empty if that follows from `regions`."""
    ignore: Optional[Code] = None
    """Label code of voxels that are not annotated: neither learnt nor scored, and in no region."""
    normalisation: Tuple[Normalisation, ...] = ()
    """Per channel; empty if all channels are normalised over the foreground."""
    schema: int = SCHEMA

    @property
    def normalisations(self) -> Tuple[Normalisation, ...]:
        """The normalisation of each channel."""
        return of_all(self.normalisation, len(self.channels))


# --- Many records, on disk ---


class Known(msgspec.Struct, frozen=True, gc=False):
    """The facts of a case that are kept in memory: those by which stores and splits are checked."""

    case_id: str
    patient_id: str
    image_voxels_sha256: str
    label_voxels_sha256: str
    shape: Shape3
    box_size: Shape3
    has_label: bool


class CaseList(Sequence[CaseRecord]):
    """Records of cases, of which each is read from a file when it is asked for.

    A record in memory takes 20 KB; its `Known` facts and its place in the file take 0.8 KB. A slice
    is a list of the same kind. The file stays open: `store append` may replace it meanwhile.
    """

    def __init__(self, lines: "RecordLines", rows: Sequence[int]):
        """The records of `lines` at `rows`, in that order."""
        self._lines = lines
        self._rows = rows

    @classmethod
    def collected(cls, records: Iterable[CaseRecord], folder: Optional[Path] = None) -> "CaseList":
        """Records that come in any order, sorted by case id, in a temporary file in `folder` that
        has no name."""
        with tempfile.TemporaryFile(dir=folder) as file:
            lines = RecordLines(os.dup(file.fileno()), "a temporary file")
            for record in records:
                line = record_line(record)
                file.write(line)
                lines.add(line, record)
        rows = sorted(range(len(lines.known)), key=lambda row: lines.known[row].case_id)
        return cls(lines, array("q", rows))

    @overload
    def __getitem__(self, index: int) -> CaseRecord: ...

    @overload
    def __getitem__(self, index: slice) -> "CaseList": ...

    def __getitem__(self, index: Union[int, slice]) -> Union[CaseRecord, "CaseList"]:
        if isinstance(index, slice):
            return CaseList(self._lines, self._rows[index])
        return self._lines.record(self._rows[index])

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(own == record for own, record in zip(self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"CaseList({len(self)} cases)"

    def __reduce__(self) -> Tuple[Any, ...]:
        return CaseList.collected, (tuple(self),)

    @property
    def known(self) -> Iterator[Known]:
        """The facts of the cases that are in memory, in the order of the records."""
        return (self._lines.known[row] for row in self._rows)

    @property
    def lines(self) -> Iterator[bytes]:
        """The records as lines of JSON."""
        return map(self._lines.line, self._rows)

    def chosen(self, case_ids: Iterable[str]) -> "CaseList":
        """The cases of these ids, in this order; KeyError for one that is not in the list."""
        return CaseList(self._lines, array("q", [self._row_of[case_id] for case_id in case_ids]))

    def without(self, case_ids: Container[str]) -> "CaseList":
        """The cases of other ids than these."""
        return self.chosen(case.case_id for case in self.known if case.case_id not in case_ids)

    @functools.cached_property
    def _row_of(self) -> Dict[str, int]:
        return {self._lines.known[row].case_id: row for row in self._rows}


class RecordLines:
    """Records as lines of an open file, by the number of the line."""

    def __init__(self, handle: int, path: Union[str, Path]):
        """`handle` is closed with this object; `path` is the file's name in messages."""
        self.known: List[Known] = []
        self._handle = handle
        self._path = path
        self._starts = array("q", [0])
        self._sums = array("L")
        weakref.finalize(self, os.close, handle)

    def add(self, line: bytes, record: CaseRecord) -> None:
        """Note the next line of the file."""
        self.known.append(_known(record))
        self._starts.append(self._starts[-1] + len(line))
        self._sums.append(zlib.crc32(line))

    def line(self, row: int) -> bytes:
        """The bytes of a line. Raises InputError unless they are those that were noted; OSError if
        the disk fails."""
        start = self._starts[row]
        try:
            line = os.pread(self._handle, self._starts[row + 1] - start, start)
        except OSError as error:
            error.filename = str(self._path)
            raise
        if zlib.crc32(line) != self._sums[row]:
            rule = f"store file {self._path} must stay as it was when it was opened"
            case_id = self.known[row].case_id
            raise InputError(f"{rule}, got other bytes for case {case_id}; restore it")
        return line

    def record(self, row: int) -> CaseRecord:
        """The record in a line, which was checked when it was noted."""
        try:
            return msgspec.json.decode(self.line(row), type=CaseRecord)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        # Another host has appended to a store on a network: the case's own file has the record too.
        path = record_path(Path(self._path).parent, self.known[row].case_id)
        record = case_from_json(read_regular(path))
        if _known(record) != self.known[row]:
            rule = f"store file {path} must have the record that the store had when it was opened"
            raise InputError(f"{rule}, got another; open the store again")
        return record


def _known(record: CaseRecord) -> Known:
    return Known(
        record.case_id,
        record.patient_id,
        record.image_voxels_sha256,
        record.label_voxels_sha256,
        record.shape,
        record.box.size,
        record.has_label,
    )


def case_list(cases: Iterable[CaseRecord]) -> CaseList:
    """The cases as a list whose records are on disk."""
    return cases if isinstance(cases, CaseList) else CaseList.collected(cases)


def record_line(record: CaseRecord) -> bytes:
    """The record as a line of the store's file of records."""
    return json.dumps(to_json(record), separators=(",", ":"), allow_nan=False).encode() + b"\n"


# --- What follows from the cases ---


def make_manifest(
    *,
    split: Mapping[str, Sequence[str]],
    cases: Iterable[CaseRecord],
    folds: Sequence[Mapping[str, Sequence[str]]] = (),
    normalisation: Sequence[Normalisation] = (),
    **fields: Any,
) -> Manifest:
    """The manifest of `cases`, at least one, `split` and `folds`. Raises InputError for the lines
    of `split_problems`, of the split and of each fold."""
    cases = case_list(cases)
    cases = cases.chosen(sorted(case.case_id for case in cases.known))
    known = list(cases.known)
    problems = split_problems(split, known)
    for number, fold in enumerate(folds, 1):
        problems += [f"fold {number}: {problem}" for problem in split_problems(fold, known)]
    raise_if_any(problems)
    return Manifest(
        split={name: tuple(sorted(split[name])) for name in SPLITS},
        split_hash=split_hash(split, known, folds, normalisation),
        folds=tuple({name: tuple(sorted(fold[name])) for name in FOLD_SPLITS} for fold in folds),
        largest_shape=xyz(map(max, *(case.shape for case in known), (0, 0, 0))),
        largest_box=xyz(map(max, *(case.box_size for case in known), (0, 0, 0))),
        unlabelled=tuple(case.case_id for case in known if not case.has_label),
        cases=cases,
        normalisation=tuple(normalisation),
        **fields,
    )


def remake(manifest: Manifest, **changes: Any) -> Manifest:
    """The manifest with other cases or another split, and the fields that follow from them."""
    follows = ("split_hash", "largest_shape", "largest_box", "unlabelled", "schema")
    kept = {name: value for name, value in vars(manifest).items() if name not in follows}
    return make_manifest(**{**kept, **changes})


def array_path(folder: Path, record: CaseRecord, kind: str) -> Path:
    """The file of a case's image, `kind` "x", its label, "y", or its source's label, "t"."""
    return Path(folder) / "cases" / f"{record.stem}.{kind}.{record.format}"


def record_path(folder: Path, case_id: str) -> Path:
    """The file of a case's own record, with which an unfinished store is continued."""
    return Path(folder) / "cases" / f"{case_id}.json"


def to_json(record: Union[Manifest, CaseRecord]) -> Dict[str, Any]:
    """A record, or a manifest without its cases, as JSON content."""
    left_out = {name for name in LEFT_OUT if not getattr(record, name, ())}
    if isinstance(record, CaseRecord):
        content: Dict[str, Any] = msgspec.to_builtins(record)
    else:
        content = dict(vars(record))
        content["normalisation"] = [each.to_json() for each in record.normalisation]
        left_out.add("cases")
        if record.ignore is None:
            left_out.add("ignore")
    return {name: value for name, value in content.items() if name not in left_out}


def case_from_json(content: bytes) -> CaseRecord:
    """The record in JSON. Raises ValueError for other content and for a record that contradicts
    itself."""
    try:
        record = msgspec.json.decode(content, type=CaseRecord)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)[:300]) from None
    shape = record.shape
    box = record.box
    stored = record.stored
    geometry = record.geometry
    corners = zip(stored.start, box.start, box.stop, stored.stop, shape)
    are_nested = all(0 <= a <= b < c <= d <= n for a, b, c, d, n in corners)
    statistics = (
        record.channel_mean,
        record.channel_std,
        record.channel_min,
        record.channel_max,
        record.channel_voxels,
    )
    counts = {len(numbers) for numbers in statistics}
    later = (record.around, record.units, record.foreground, record.peaks)
    are_of_channels = all(len(numbers) in (0, record.channels) for numbers in later)
    has_files = record.image_bytes > 0 and bool(record.label_bytes) == record.has_label
    if record.resampled_from:
        has_files &= bool(record.resampled_from.label_bytes) == record.has_label
    is_turned = sorted(geometry.shape) == sorted(record.scored_shape)
    rules = (
        ("box must be in stored, and stored in shape", are_nested),
        ("statistics must be as many for each channel", len(counts) == 1 and counts != {0}),
        ("around, units, foreground and peaks must be none or of each channel", are_of_channels),
        ("image_bytes and label_bytes must fit image and label", not record.format or has_files),
        ("centres must be voxels of shape", _within(record.centres, shape)),
        ("geometry must be of shape, turned, or of resampled_from's", is_turned),
        ("forms must be none or 22 numbers", len(geometry.forms) in (0, 22)),
    )
    broken = [rule for rule, holds in rules if not holds]
    if broken:
        raise ValueError("; ".join(broken))
    return record


def _within(centres: Mapping[int, Sequence[Voxel]], shape: Shape3) -> bool:
    """Whether all voxels are of a volume of `shape`."""
    for voxels in centres.values():
        for places, size in zip(zip(*voxels), shape):
            if max(places) >= size:
                return False
    return True

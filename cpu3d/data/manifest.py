"""The records of a store and its cases, and their JSON."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Dict,
    Iterable,
    Literal,
    Mapping,
    Optional,
    Sequence,
    Tuple,
)

import msgspec
from msgspec import Meta

from cpu3d.data.datasets.names import CONTROL
from cpu3d.data.files.arrays import FORMATS
from cpu3d.data.normalise import Kind, Normalisation, Statistics, of_all
from cpu3d.data.region import Region, Shape3, xyz
from cpu3d.data.split import FOLD_SPLITS, SPLITS, division_problems, split_hash
from cpu3d.errors import raise_if_any
from memory_estimator.common.schema import check, option
from models.strides import Spacing3

RESTORE = (
    "restore it, or delete manifest.json, then repeat `prepare`, and each `store append` in its"
    " order"
)  # what to do about a damaged store
SCHEMA = 3  # version of the store's layout and records; a store of another version is refused

Count = Annotated[int, Meta(ge=0)]
Code = Annotated[int, Meta(ge=0, le=255)]
Positive = Annotated[float, Meta(gt=0)]
Name = Annotated[str, Meta(pattern=rf"\A[^{CONTROL}]*\Z")]
BareName = Annotated[str, Meta(pattern=rf"\A(?!\.{{0,2}}\Z)[^/{CONTROL}]*\Z")]  # of a file
AffineRow = Tuple[float, float, float, float]
Format = Literal["npy", "b2nd"]  # as arrays.FORMATS
Unit = Literal["unknown", "meter", "mm", "micron"]
Voxel = Tuple[Count, Count, Count]


@dataclass(frozen=True)
class StoreSettings:
    """The settings by which cases become arrays. A store is continued with the same settings
    only."""

    format: str = option(
        "npy",
        "npy: int16, exact or in steps, read without unpacking; b2nd: the same"
        " packed to a tenth, for slow disks and networks",
        choices=FORMATS,
    )
    crop: bool = option(
        False,
        "store each case's content box only, outside of which nothing is there; whole grids of the"
        " CT of a new store, whose boxes are known last",
    )
    zero_nan: bool = option(False, "make NaN and infinite voxels background, and count them")
    target_spacing_mm: Optional[Spacing3] = None  # along R, A, S; None: as they are
    normalise: Tuple[str, ...] = option(
        (),
        "how channels are normalised, such as CT=zscore: "
        + ", ".join(kind.value for kind in Kind)
        + " (default: by name and voxels, docs/data.md)",
        metavar="CHANNEL=KIND",
    )

    def __post_init__(self) -> None:
        check(self)


USUAL = StoreSettings()


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


@dataclass(frozen=True)
class ArrayFile:
    """The file of an array, as it was written."""

    size_bytes: Annotated[int, Meta(gt=0)]
    sha256: str


@dataclass(frozen=True)
class CaseRecord:
    """One case of the store. Everything spatial is in the store's grid: axes R A S, voxels X, Y,
    Z."""

    case_id: BareName
    patient_id: Name
    shape: Shape3  # voxels of the whole grid, also if only a box of it is stored
    spacing_mm: Tuple[Positive, Positive, Positive]
    box: Region
    """The content box: the smallest around every voxel that is labelled, or in any channel not what
    surrounds the volume: of a CT all up to the lower end of its window."""
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
    stored: Region
    """The box of the grid that the arrays hold. Outside it, label and image are 0, or the image is
    what is `around`."""
    # of dtype, shape and voxels of the whole grid: the same in every format, cropped or not
    image_voxels_sha256: str
    label_voxels_sha256: str
    format: Format = "npy"  # of the arrays' files
    files: Dict[str, ArrayFile] = field(default_factory=dict)  # none of a case in no store
    label_box: Optional[Region] = None
    """The box around the labelled voxels that are not ignored, the whole grid if there are none;
    None for a case without a label."""
    background: Tuple[float, ...] = ()
    """Per channel, what most of the border of its source's grid is, 0 where it varies. Empty if it
    is 0 in all channels."""
    resampled_from: Optional[SourceGrid] = None  # None if the case is on its source's grid
    far_voxels: Count = 0  # far from all others, and brought nearer; all channels together
    contradictions: Tuple[str, ...] = ()  # notes on files whose sform and qform differ
    # --- Empty if all channels are normalised over the foreground ---
    around: Tuple[float, ...] = ()
    """Per channel, the stored value that stands for what surrounds the volume: the median of its
    border, of a CT its least value. 0 for a channel whose background is 0."""
    units: Tuple[Tuple[Positive, float], ...] = ()
    """Per channel (step, offset): the source's value is step * stored + offset, to half a step.
    Empty if the source's values are stored."""
    foreground: Tuple[Tuple[float, ...], ...] = ()
    """Per channel of a CT, values of the source at even ranks of the labelled voxels; none of
    other channels, and of a case without labelled voxels."""

    @property
    def kinds(self) -> Tuple[str, ...]:
        """The arrays that the case has: its image, "x", its label, "y", and of a case that was
        resampled the source's label, "t"."""
        if not self.has_label:
            return ("x",)
        return ("x", "y", "t") if self.resampled_from else ("x", "y")

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
    cases: Tuple[CaseRecord, ...]  # sorted by case id
    versions: Dict[str, str]
    patient_rules: Dict[str, int] = field(default_factory=dict)
    """Rule that tells a case's patient -> number of cases."""
    folds: Tuple[Dict[str, Tuple[str, ...]], ...] = ()
    """Folds that were given and not drawn: "train" and "val" -> case ids, sorted. No fold has test
    cases."""
    shares: Tuple[float, ...] = ()  # by which the split was drawn; none of one that was given
    settings: StoreSettings = USUAL
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

    @property
    def target_spacing_mm(self) -> Optional[Spacing3]:
        """What all cases are resampled to; None if they are stored as they are."""
        return self.settings.target_spacing_mm

    @property
    def largest_shape(self) -> Shape3:
        """The largest of the cases' grids, axis by axis."""
        return xyz(map(max, *(case.shape for case in self.cases), (0, 0, 0)))

    @property
    def unlabelled(self) -> Tuple[str, ...]:
        """The cases without a label."""
        return tuple(case.case_id for case in self.cases if not case.has_label)


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
    of `division_problems`."""
    records = tuple(sorted(cases, key=lambda case: case.case_id))
    raise_if_any(division_problems(split, folds, records))
    return Manifest(
        split={name: tuple(sorted(split[name])) for name in SPLITS},
        split_hash=split_hash(split, records, folds, normalisation),
        folds=tuple({name: tuple(sorted(fold[name])) for name in FOLD_SPLITS} for fold in folds),
        cases=records,
        normalisation=tuple(normalisation),
        **fields,
    )


def remake(manifest: Manifest, **changes: Any) -> Manifest:
    """The manifest with other cases or another split, and the hash that follows from them."""
    kept = {name: value for name, value in vars(manifest).items() if name != "split_hash"}
    return make_manifest(**{**kept, **changes})


def array_path(folder: Path, record: CaseRecord, kind: str) -> Path:
    """The file of a case's image, `kind` "x", its label, "y", or its source's label, "t"."""
    return folder / "cases" / f"{record.case_id}.{kind}.{record.format}"


def record_path(folder: Path, case_id: str) -> Path:
    """The file of a case's record."""
    return folder / "cases" / f"{case_id}.json"


def record_bytes(record: CaseRecord) -> bytes:
    """The content of a case's own file."""
    text = json.dumps(msgspec.to_builtins(record), separators=(",", ":"), allow_nan=False)
    return f"{text}\n".encode()


def case_from_json(content: bytes) -> CaseRecord:
    """The record in JSON. Raises ValueError for other content and for a record that contradicts
    itself."""
    try:
        record = msgspec.json.decode(content, type=CaseRecord)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)[:300]) from None
    corners = zip(
        record.stored.start,
        record.box.start,
        record.box.stop,
        record.stored.stop,
        record.shape,
    )
    is_nested = all(0 <= a <= b < c <= d <= n for a, b, c, d, n in corners)
    if not is_nested or set(record.files) not in (set(), {*record.kinds}):
        raise ValueError("box must be in stored, stored in shape, and files of image and labels")
    return record

"""dataset.json: the channels, label codes and regions of a data set, as the Decathlon, nnU-Net 1
and nnU-Net 2 write them, and MONAI in its lists of the same form.

about = describing(Path("Task01/imagesTs/a.nii.gz"))    # of Task01/dataset.json, or None
about.channels, about.labels
"""

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import msgspec

from cpu3d.data.datasets.names import check_printable, same_channels
from cpu3d.errors import InputError, raise_if_any
from memory_estimator.common.files import read_json, reason, typed

NAME = "dataset.json"
LABELS_RULE = (
    "must be distinct names of codes 0..255, or of lists of codes 1..255, at least one besides the"
    " background"
)
IGNORE = "ignore"  # nnU-Net's name of the label that is not to be learnt
Regions = Mapping[str, Tuple[int, ...]]  # region -> its label codes


Text = Annotated[str, msgspec.Meta(min_length=1)]
Files = Annotated[List[Text], msgspec.Meta(min_length=1)]
Numbered = Dict[int, Text]  # number of a channel -> its name


class Entry(msgspec.Struct):
    """A training case."""

    image: Union[Text, Files]
    """A 4D file, or in MONAI's lists also a 3D file for each channel."""
    label: Optional[str] = None
    fold: Optional[int] = None  # in MONAI's lists, the fold that holds the case out

    @property
    def images(self) -> List[str]:
        return [self.image] if isinstance(self.image, str) else self.image


class ListedCase(msgspec.Struct):
    """A case that a dataset.json of nnU-Net 2 lists under its id."""

    images: Files  # of a channel each
    label: Optional[str] = None


class _Content(msgspec.Struct):
    """The fields of a dataset.json that are read."""

    modality: Union[Numbered, str, None] = None  # MONAI's "MRI" names none
    channel_names: Optional[Numbered] = None  # of nnU-Net 2
    labels: Optional[Dict[str, Any]] = None  # code -> name, or in nnU-Net 2 name -> code or codes
    name: Optional[str] = None
    regions_class_order: Optional[List[int]] = None  # of nnU-Net 2, as the next
    file_ending: str = ".nii.gz"
    dataset: Optional[Dict[str, ListedCase]] = None
    training: List[Entry] = []
    validation: List[Any] = []  # of MONAI's lists
    training_cases: Optional[int] = msgspec.field(default=None, name="numTraining")


@dataclass(frozen=True)
class Description:
    """What a data set says about its images."""

    path: Path
    channels: Tuple[str, ...]
    """In the order of a 4D file's volumes, and of nnU-Net's numbers."""
    labels: Dict[int, str]  # code -> name; empty if there are none
    is_nnunet2: bool
    name: str
    file_ending: str  # of nnU-Net 2
    training_cases: Optional[int]  # their number, as it is told
    entries: Sequence[Entry]
    listing: Mapping[str, ListedCase]  # the cases of nnU-Net 2 by id; it may have none
    unread: int  # cases that are listed under "validation"
    regions: Optional[Dict[str, Tuple[int, ...]]] = None
    """Region -> its label codes, in the order of the list; None if it names labels alone."""
    class_order: Tuple[int, ...] = ()  # the code to paint for each of `regions`; () if not told
    ignore: Optional[int] = None  # label code of voxels that are not to be learnt


def describe(path: Path) -> Description:
    """Read a dataset.json. Raises InputError if it is damaged, if a channel's number is missing, if
    two names mean one channel, or if labels are no names of codes or of regions."""
    content = _read(path)
    numbered = content.channel_names or {}
    # With a list of its cases, also if channels are named in both ways.
    has_modality = isinstance(content.modality, dict)
    if not numbered and isinstance(content.modality, dict):
        numbered = content.modality
    channels = tuple(name for _, name in sorted(numbered.items()))
    if not channels:
        rule = f'{path} must name channels, as "modality" (Decathlon, nnU-Net 1, MONAI)'
        raise InputError(f'{rule} or "channel_names" (nnU-Net 2), got none; add them')
    problems = []
    if sorted(numbered) != list(range(len(channels))):
        rule = f"channels of {path} must be numbered 0, 1, ... without gaps"
        problems.append(f"{rule}, got {sorted(numbered)}; correct it")
    for alike in same_channels(channels):
        rule = f"channels of {path} must have different names"
        problems.append(f"{rule}, got {', '.join(alike)}, which mean the same; correct them")
    about = Description(
        path=path,
        channels=channels,
        labels={},
        is_nnunet2=content.channel_names is not None and not has_modality,
        name=content.name or "",
        file_ending=content.file_ending,
        training_cases=content.training_cases,
        entries=content.training,
        listing=content.dataset or {},
        unread=len(content.validation),
    )
    labels = content.labels or {}
    try:
        about = _with_labels(about, labels, content.regions_class_order)
    except InputError as error:
        problems += error.problems
    except ValueError:
        problems.append(f"labels of {path} {LABELS_RULE}, got {labels}; correct it")
    raise_if_any(problems)
    return about


def describing(image: Path) -> Optional[Description]:
    """The description of the data set that an image is of; None if there is none.

    It is in the dataset.json above the image's folder imagesTr, imagesTs or of another such name,
    or beside the image. It is read once, until the file changes. Raises InputError as `describe`.
    """
    folder = image.absolute().parent
    for images in (folder, folder.parent):
        above = images.parent / NAME
        if images.name.lower().startswith("images") and above.exists():
            return _described(above, above.stat().st_mtime_ns)
    beside = folder / NAME
    return _described(beside, beside.stat().st_mtime_ns) if beside.is_file() else None


# --- Private helpers ---


@functools.lru_cache(maxsize=16)
def _described(path: Path, mtime_ns: int) -> Description:
    return describe(path)


def _with_labels(about: Description, labels: Dict[str, Any], class_order: Any) -> Description:
    """The description with its labels in either direction, regions of several codes, and the label
    to be ignored. Raises ValueError for other content, InputError for what contradicts itself."""
    codes_of: Dict[str, Tuple[int, ...]] = {}
    for name, value in labels.items():
        if isinstance(value, str):  # the Decathlon's way: code -> name
            name, value = value, int(name)
        codes = value if isinstance(value, list) else [value]
        are_codes = all(type(code) is int and 0 <= code <= 255 for code in codes)
        if not name or name in codes_of or not codes or not are_codes:
            raise ValueError("a code out of range, or a name twice")
        codes_of[name] = tuple(sorted(set(codes)))
    ignored = codes_of.pop(IGNORE, ())
    regions = {name: codes for name, codes in codes_of.items() if codes != (0,)}
    background = [name for name in codes_of if name not in regions]
    held = [code for codes in regions.values() for code in codes]
    has_regions = len(held) > len(regions)
    is_double = not has_regions and len(set(held)) < len(held)
    if len(ignored) > 1 or {*ignored} & {0, *held} or is_double:
        raise ValueError("a code of two names")
    if labels and (not regions or len(background) > 1 or 0 in held or "background" in regions):
        raise ValueError("no label, or a background of two names or within a region")
    names = _names_of_codes(regions)
    for name in background:
        names[0] = name
    for code in ignored:
        names[code] = IGNORE
        about = replace(about, ignore=code)
    about = replace(about, labels=dict(sorted(names.items())) if labels else {})
    if not has_regions:
        return about
    if class_order and len(class_order) != len(regions):
        rule = f"regions_class_order of {about.path} must have a code of each region, in the order"
        raise InputError(f"{rule} of {', '.join(regions)}, got {class_order}; correct it")
    return replace(about, regions=regions, class_order=tuple(class_order or ()))


def _names_of_codes(regions: Regions) -> Dict[int, str]:
    """Code -> name: that of the region with no other code, or else that it is a code of the
    smallest region."""
    names = {0: "background"}
    smallest_first = sorted(regions, key=lambda name: len(regions[name]))
    for name in smallest_first:
        for code in regions[name]:
            words = name if len(regions[name]) == 1 else f"code {code} of {name}"
            names.setdefault(code, words)
    return names


def _read(path: Path) -> _Content:
    """The fields of a dataset.json. Raises InputError for a file that is no such JSON, and for
    control characters in these fields."""
    rule = f"{path} must be JSON, as the Decathlon, nnU-Net and MONAI write it"
    try:
        read = read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{rule}, got {reason(error)}; correct it") from None
    if isinstance(read, dict):  # before anything of it is printed
        fields = _Content.__struct_encode_fields__
        check_printable(path, _texts([read.get(name) for name in fields]))
    try:
        return typed(read, _Content, str(path))
    except ValueError as error:
        raise InputError(f"{error}; correct it") from None


def _texts(value: Any) -> Iterator[str]:
    """All texts within a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for each in value.items() if isinstance(value, dict) else value:
            yield from _texts(each)

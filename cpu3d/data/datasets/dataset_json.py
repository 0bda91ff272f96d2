"""dataset.json: the channels, label codes and regions of a data set, as the Decathlon, nnU-Net 1
and nnU-Net 2 write them, and MONAI in its lists of the same form.

about = describing(Path("Task01/imagesTs/a.nii.gz"))    # of Task01/dataset.json, or None
about.channels, about.labels
"""

import contextlib
import functools
import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Tuple,
    Union,
)

import msgspec

from cpu3d.data.datasets.names import check_printable, numbered_twins, read_names, same_channels
from cpu3d.errors import InputError, raise_if_any
from cpu3d.util.records import listed
from memory_estimator.common.files import read_json, read_text

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


class Field(NamedTuple):
    """What a field, or an element of one, must be."""

    kind: Any  # its type
    rule: str  # the same in words


CHANNELS = 'an object of number -> channel, such as {"0": "FLAIR", "1": "T1w"}'
FIELDS = {
    "modality": Field(Union[Numbered, str, None], CHANNELS),  # MONAI's "MRI" names none
    "channel_names": Field(Optional[Numbered], CHANNELS),  # of nnU-Net 2
    "labels": Field(
        Optional[Dict[str, Any]], "an object of code -> name, or in nnU-Net 2 of name -> code"
    ),
    "name": Field(Optional[str], "text"),
    "training": Field(
        Annotated[List[Any], msgspec.Meta(min_length=1)],
        'a list of cases, such as {"image": "imagesTr/a.nii.gz", "label": "labelsTr/a.nii.gz"}',
    ),
    "dataset": Field(Optional[Dict[str, Any]], "an object of case -> its images and its label"),
}
"""The fields that must be of a type; the others of nnU-Net 2 are checked where they are used."""

ENTRY = Field(
    Entry, 'an object of "image", a file or a list of files, "label", a file, and any "fold" number'
)
LISTED_CASE = Field(ListedCase, 'an object of "images", a list of files, and "label", a file')
MOST_SHOWN = 120  # characters of a value in an error


@dataclass(frozen=True)
class Description:
    """What a data set says about its images."""

    path: Path
    channels: Tuple[str, ...]
    """In the order of a 4D file's volumes, and of nnU-Net's numbers. Those of one name are
    `numbered_twins`."""
    labels: Dict[int, str]  # code -> name; empty if there are none
    is_nnunet2: bool
    name: str = ""
    regions: Optional[Dict[str, Tuple[int, ...]]] = None
    """Region -> its label codes, in the order of the list; None if it names labels alone."""
    class_order: Tuple[int, ...] = ()  # the code to paint for each of `regions`; () if not told
    ignore: Optional[int] = None  # label code of voxels that are not to be learnt
    file_ending: Any = None  # of nnU-Net 2, as the next
    training_cases: Any = None

    @property
    def channels_field(self) -> str:
        """The field of dataset.json that names the channels."""
        return "channel_names" if self.is_nnunet2 else "modality"


def describe(path: Path) -> Description:
    """Read a dataset.json, entries aside. Raises InputError if it is damaged, if a channel's number
    is missing, if two names mean one channel, or if labels are no names of codes or of regions."""
    content = _fields(path)
    modality = _field(path, content, "modality")
    channel_names = _field(path, content, "channel_names")
    labels = _field(path, content, "labels")
    name = _field(path, content, "name")
    # With a list of its cases, also if channels are named in both ways.
    has_modality = isinstance(modality, dict)
    numbered = channel_names
    if not numbered and has_modality:
        numbered = modality
    problems = _doubled(path)
    # Other values are in use, as "3d" or a list, and nothing else is read of it.
    if content.get("tensorImageSize") == "2D":
        rule = f'tensorImageSize of {path} must be "4D" or "3D", as 2D images are not read'
        problems.append(f'{rule}, got "2D"; convert them')
    if not numbered:
        channels = _named_by_files(path)
    else:
        channels = numbered_twins([name for _, name in sorted(numbered.items())])
        if sorted(numbered) != list(range(len(numbered))):
            rule = f"channels of {path} must be numbered 0, 1, ... without gaps"
            problems.append(f"{rule}, got {sorted(numbered)}; correct it")
    if not channels:
        rule = f'{path} must name channels, as "modality" (Decathlon, nnU-Net 1, MONAI)'
        raise InputError(f'{rule} or "channel_names" (nnU-Net 2), got none; add them')
    for alike in same_channels(channels):
        rule = f"channels of {path} must have different names"
        problems.append(f"{rule}, got {', '.join(alike)}, which mean the same; correct them")
    about = Description(
        path=path,
        channels=channels,
        labels={},
        is_nnunet2=channel_names is not None and not has_modality,
        name=name or "",
        file_ending=content.get("file_ending"),
        training_cases=content.get("numTraining"),
    )
    try:
        about = _with_labels(about, labels or {}, content.get("regions_class_order"))
    except InputError as error:
        problems += error.problems
    except ValueError:
        problems.append(f"labels of {path} {LABELS_RULE}, got {_shown(labels)}; correct it")
    raise_if_any(problems)
    return about


def entries_of(path: Path) -> List[Entry]:
    """The training cases that a dataset.json lists. Raises InputError if it lists none."""
    content = _fields(path)
    entries = []
    for number, entry in enumerate(_field(path, content, "training")):
        entries.append(_converted(path, f"training[{number}]", entry, ENTRY))
    return entries


def listing_of(path: Path) -> Dict[str, ListedCase]:
    """The cases that a dataset.json of nnU-Net 2 lists, by id; it may have none."""
    content = _fields(path)
    cases = {}
    for case_id, case in (_field(path, content, "dataset") or {}).items():
        cases[case_id] = _converted(path, f'dataset["{case_id}"]', case, LISTED_CASE)
    return cases


def describing(image: Path) -> Optional[Description]:
    """The description of the data set that an image is of; None if there is none.

    It is in the dataset.json above the image's folder imagesTr, imagesTs or of another such name,
    or beside the image; there it may be anybody's, and one that names no channels is passed over.
    It is read once, until the file changes. Raises InputError as `describe`.
    """
    folder = image.absolute().parent
    for place in (folder, folder.parent):
        if place.name.lower().startswith("images") and (place.parent / NAME).exists():
            return _kept(place.parent / NAME)
    beside = folder / NAME
    return _kept(beside, may_be_other=True) if beside.is_file() else None


def names_of_codes(regions: Regions) -> Dict[int, str]:
    """Code -> name, of codes that have names by their regions alone: that of the region with no
    other code, or else that it is a code of the smallest region."""
    names = {0: "background"}
    smallest_first = sorted(regions, key=lambda name: len(regions[name]))
    for name in smallest_first:
        for code in regions[name]:
            words = name if len(regions[name]) == 1 else f"code {code} of {name}"
            names.setdefault(code, words)
    return dict(sorted(names.items()))


# --- Private helpers ---


def _kept(path: Path, may_be_other: bool = False) -> Optional[Description]:
    """`describe`, with the results of the last files kept."""
    status = path.stat()
    return _described(path, may_be_other, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=16)
def _described(path: Path, may_be_other: bool, mtime_ns: int, size: int) -> Optional[Description]:
    if may_be_other:
        content = _decoded(path)
        if not isinstance(content, dict) or not {"modality", "channel_names"} & set(content):
            return None
    return describe(path)


def _named_by_files(path: Path) -> Tuple[str, ...]:
    """The channels that the files of a list's cases are named after, in their order; () if that is
    not the same for all of them, or not told."""
    orders = set()
    with contextlib.suppress(InputError):
        for entry in entries_of(path):
            names = read_names([Path(name) for name in entry.images])
            orders.add(tuple(name.channel or "" for name in names.values()))
    order = orders.pop() if len(orders) == 1 else ()
    return order if all(order) else ()


def _doubled(path: Path) -> List[str]:
    """A problem for each object of channels, labels or cases with a name twice, of which a reader
    of JSON silently keeps the last."""

    def noted(pairs: List[Tuple[str, Any]]) -> Any:
        times = Counter(name for name, _ in pairs)
        twice = [name for name, n in times.items() if n > 1]
        return (twice, dict(pairs))

    problems = []
    with contextlib.suppress(ValueError, RecursionError):  # of fields that nobody reads
        _, content = json.loads(read_text(path), object_pairs_hook=noted)
        for name in ("modality", "channel_names", "labels", "dataset"):
            value = content.get(name)
            if isinstance(value, tuple) and value[0]:
                rule = f"names in {name} of {path} must be there once"
                problems.append(f"{rule}, got {listed(value[0])} twice; correct it")
    return problems


def _with_labels(about: Description, labels: Dict[str, Any], class_order: Any) -> Description:
    """The description with its labels in either direction, regions of several codes, and the label
    to be ignored. Raises ValueError for other content, InputError for what contradicts itself."""
    if not labels:
        return about
    if not any(isinstance(value, (int, list)) for value in labels.values()):
        return replace(about, labels=_names_by_code(labels))
    codes_of = {name: _region_codes(value) for name, value in labels.items()}
    ignore = None
    if IGNORE in codes_of:
        ignore = _highest(about.path, labels[IGNORE], codes_of)
        del codes_of[IGNORE]
    regions = {name: codes for name, codes in codes_of.items() if codes != (0,)}
    background = [name for name in codes_of if name not in regions]
    if not regions or len(background) > 1 or any(0 in codes for codes in regions.values()):
        raise ValueError("no label, or a background of two names or within a region")
    has_regions = any(len(codes) > 1 for codes in regions.values())
    if not has_regions and len(set(regions.values())) < len(regions):
        raise ValueError("a code of two names")
    names = names_of_codes(regions)
    if background:
        names[0] = background[0]
    if ignore is not None:
        names[ignore] = IGNORE
    by_code = _names_by_code({str(code): name for code, name in names.items()})
    about = replace(about, labels=by_code, ignore=ignore)
    if not has_regions:
        return about
    order = _checked_order(about.path, class_order, regions)
    return replace(about, regions=regions, class_order=order)


def _names_by_code(labels: Dict[str, Any]) -> Dict[int, str]:
    """Code -> name. Raises ValueError for other content."""
    try:
        named = msgspec.convert(labels, Dict[int, str], str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    codes = {0: "background", **dict(sorted(named.items()))}
    is_in_range = min(codes) >= 0 and max(codes) <= 255
    is_named = all(codes.values())
    if len(set(codes.values())) < len(codes) or not is_in_range or not is_named or len(codes) < 2:
        raise ValueError("labels")
    return codes


def _region_codes(value: Any) -> Tuple[int, ...]:
    """The codes of a label, a number, or of a region, a list of numbers, ascending. Raises
    ValueError for others."""
    codes = value if isinstance(value, list) else [value]
    are_numbers = all(type(code) is int and 0 <= code <= 255 for code in codes)
    if not codes or not are_numbers or len(set(codes)) < len(codes):
        raise ValueError("codes")
    return tuple(sorted(codes))


def _highest(path: Path, ignore: Any, codes_of: Regions) -> int:
    """The code of the label to be ignored. Raises InputError if it is not one, above all others."""
    others = [code for name, codes in codes_of.items() if name != IGNORE for code in codes]
    highest = max(others, default=0)
    if type(ignore) is not int or ignore <= highest:
        rule = (
            f"label {IGNORE} of {path} must be one code above all others, the highest of which is"
        )
        raise InputError(f"{rule} {highest}, got {ignore}; change it here and in the label files")
    return ignore


def _checked_order(path: Path, order: Any, regions: Regions) -> Tuple[int, ...]:
    """The codes to paint for regions, in their order; () if the list does not tell. Raises
    InputError if they are not one code of each region."""
    if order is None:
        return ()
    words = ", ".join(f"{name} {list(codes)}" for name, codes in regions.items())
    are_codes = isinstance(order, list) and all(type(code) is int for code in order)
    is_whole = are_codes and len(order) == len(regions)
    if not is_whole or any(code not in codes for code, codes in zip(order, regions.values())):
        rule = f"regions_class_order of {path} must have a code of each region, in the order of"
        raise InputError(f"{rule} {words}, got {order}; correct it")
    return tuple(order)


def _decoded(path: Path) -> Any:
    """The content of a dataset.json. Raises InputError for a file that is no JSON."""
    try:
        return read_json(path)
    except OSError as error:
        raise InputError(f"{path} must be readable, got {error.strerror}; check the file") from None
    except ValueError as error:
        rule = f"{path} must be JSON, as the Decathlon, nnU-Net and MONAI write it"
        raise InputError(f"{rule}, got {error}; correct it") from None


def _fields(path: Path) -> Dict[str, Any]:
    """Name -> value of a dataset.json's fields. Raises InputError for content that is no object."""
    content = _decoded(path)
    if not isinstance(content, dict):
        rule = f"{path} must be an object of JSON, as the Decathlon, nnU-Net and MONAI write it"
        raise InputError(f"{rule}, got {_shown(content)}; correct it")
    return content


def _field(path: Path, content: Mapping[str, Any], name: str) -> Any:
    """A field of a dataset.json. Raises InputError if it is not as FIELDS has it, and as
    `check_printable`."""
    check_printable(path, _texts(content.get(name)))
    return _converted(path, name, content.get(name), FIELDS[name])


def _texts(value: Any) -> Iterator[str]:
    """All texts within a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for each in value.items() if isinstance(value, dict) else value:
            yield from _texts(each)


def _converted(path: Path, name: str, value: Any, field: Field) -> Any:
    try:
        return msgspec.convert(value, field.kind, str_keys=True)
    except msgspec.ValidationError:
        rule = f"{name} of {path} must be {field.rule}"
        raise InputError(f"{rule}, got {_shown(value)}; correct it") from None


def _shown(value: Any) -> str:
    """A value of a dataset.json for an error, cut where it is long."""
    if value is None:
        return "none"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} ..."

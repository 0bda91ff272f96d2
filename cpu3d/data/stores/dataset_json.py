"""dataset.json: the channels and label codes of a data set, as the Decathlon, nnU-Net 1 and nnU-Net
2 write them.

about = describing(Path("Task01/imagesTs/a.nii.gz"))    # of Task01/dataset.json, or None
about.channels, about.labels
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Dict, List, Optional, Tuple

import msgspec

from cpu3d.data.stores.names import same_channels
from cpu3d.errors import InputError, raise_if_any
from memory_estimator.common.files import read_text

NAME = "dataset.json"
LABELS_RULE = "must be distinct names of codes 0..255, at least one besides the background"


class Entry(msgspec.Struct):
    """A training case."""

    image: str
    label: Optional[str] = None


class _Names(msgspec.Struct):
    """What `describe` needs. Entries, of which there may be thousands, are passed over."""

    modality: Optional[Dict[int, str]] = None
    channel_names: Optional[Dict[int, str]] = None  # of nnU-Net 2
    labels: Optional[Dict[str, Any]] = None  # code -> name; of nnU-Net 2 name -> code or codes
    name: Optional[str] = None


class _Entries(msgspec.Struct):
    training: Annotated[List[Entry], msgspec.Meta(min_length=1)]


@dataclass(frozen=True)
class Description:
    """What a data set says about its images."""

    path: Path
    channels: Tuple[str, ...]  # in the order of a 4D file's volumes, and of nnU-Net's numbers
    labels: Dict[int, str]  # code -> name; empty if there are none, or regions in their place
    is_nnunet2: bool
    name: str = ""


def describe(path: Path) -> Description:
    """Read a dataset.json, entries aside. Raises InputError if it is damaged, if a channel's number
    is missing, if two channels have one name, or if labels are no names of codes."""
    content = _decoded(path, _Names)
    numbered = content.channel_names or content.modality
    if not numbered:
        rule = f'{path} must name channels, as "modality" or "channel_names"'
        raise InputError(f"{rule}, got none; add them")
    is_nnunet2 = content.modality is None
    channels = tuple(name for _, name in sorted(numbered.items()))
    problems = []
    if sorted(numbered) != list(range(len(numbered))):
        rule = f"channels of {path} must be numbered 0, 1, ... without gaps"
        problems.append(f"{rule}, got {sorted(numbered)}; correct it")
    for names in same_channels(channels):
        rule = f"channels of {path} must have different names"
        problems.append(f"{rule}, got {', '.join(names)}, which mean the same; correct them")
    try:
        labels = _codes(content.labels or {})
    except ValueError:
        problems.append(f"labels of {path} {LABELS_RULE}, got {content.labels}; correct it")
    raise_if_any(problems)
    return Description(path, channels, labels, is_nnunet2, content.name or "")


def entries_of(path: Path) -> List[Entry]:
    """The training cases that a dataset.json lists. Raises InputError if it lists none."""
    return _decoded(path, _Entries).training


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


# --- Private helpers ---


def _kept(path: Path, may_be_other: bool = False) -> Optional[Description]:
    """`describe`, with the results of the last files kept."""
    status = path.stat()
    return _described(path, may_be_other, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=16)
def _described(path: Path, may_be_other: bool, mtime_ns: int, size: int) -> Optional[Description]:
    if may_be_other:
        content = _decoded(path, Any)
        if not isinstance(content, dict) or not {"modality", "channel_names"} & set(content):
            return None
    return describe(path)


def _codes(labels: Dict[str, Any]) -> Dict[int, str]:
    """Code -> name, of labels in either direction; empty for regions of several codes, which have
    no names. Raises ValueError for other content."""
    if any(isinstance(code, list) for code in labels.values()):
        return {}
    if all(isinstance(code, int) for code in labels.values()):
        labels = {str(code): name for name, code in labels.items()}
    if not labels:
        return {}
    try:
        named = msgspec.convert(labels, Dict[int, str], str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    codes = {0: "background", **dict(sorted(named.items()))}
    is_in_range = min(codes) >= 0 and max(codes) <= 255
    if len(set(codes.values())) < len(codes) or not is_in_range or len(codes) < 2:
        raise ValueError("labels")
    return codes


def _decoded(path: Path, kind: Any) -> Any:
    """A dataset.json as `kind`."""
    try:
        return msgspec.json.decode(read_text(path), type=kind)
    except OSError as error:
        raise InputError(f"{path} must be readable, got {error.strerror}; check the file") from None
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        rule = f'{path} must be JSON with "modality", "labels" and "training" with image and label'
        raise InputError(f"{rule}, got {error}; correct it") from None

"""What names tell: the channel that is meant, in a data set's list or at the end of a file's name;
the case; the number that nnU-Net gives a channel; that a label is not to be learnt.

read_name(Path("p7_T1ce.NII.GZ"))     # FileName(case="p7", channel="T1gd", number=None)
read_name(Path("p7_0002.nii.gz"))     # FileName(case="p7", channel=None, number=2)
"""

import re
import unicodedata
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, List, Optional, Sequence, Tuple

from cpu3d.errors import InputError, raise_if_any

# Name of a channel in files and data sets, in lower case -> its name in stores, or "seg".
CHANNEL_NAMES = {
    "flair": "FLAIR",
    "t2f": "FLAIR",
    "t2flair": "FLAIR",
    "t1": "T1w",
    "t1n": "T1w",
    "t1w": "T1w",
    "t1ce": "T1gd",
    "t1c": "T1gd",
    "t1gd": "T1gd",
    "t2": "T2w",
    "t2w": "T2w",
    "seg": "seg",
}
# Characters that no name may have: they clear a terminal, or turn what is printed around.
CONTROL = r"\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069"
VOLUME_END = re.compile(r"\.nii(\.gz)?$", re.IGNORECASE)
# Before T1 at the end of a name: that contrast was given, as in BIDS (sub-1_ce-gd_T1w), or a word.
_CONTRAST = re.compile(r"(^|[\s_.-])(ce-[^\W_]+(?=_|$)|(ce|gd|gad|contrast)$)", re.IGNORECASE)
_NUMBERED = re.compile(r"(.+)_(\d{4})")  # as nnU-Net names a file: case, channel
# A name that says "do not learn this": some of the first words, and else only such as the second.
_IGNORED = (
    r"(ignor\w*|exclud\w*|void|unlabel+ed|unannotated|unknown|undefined|unspecified"
    r"|do ?n[o']?t (care|use)|(not|non) (annotated|label+ed|used)|no (annotation|label))"
)
_FILLING = r"(background|label|region|area|class|voxels?|pixels?|value|index|mask|\d+|to|be|or|the)"
_IGNORE_NAME = re.compile(rf"({_FILLING} )*{_IGNORED}( ({_IGNORED}|{_FILLING}))*")


@dataclass(frozen=True)
class FileName:
    """What the name of a volume tells."""

    case: str  # the name without its ending and without the channel; may be empty
    channel: Optional[str] = None  # as `channel_key` gives it, or "seg"
    number: Optional[int] = None
    """Of the channel, if nnU-Net has named the file; else it may be of the case."""


def is_volume(path: Path) -> bool:
    """Whether a name ends in .nii or .nii.gz, in letters of any case."""
    return VOLUME_END.search(path.name) is not None


def check_printable(where: Any, names: Iterable[str]) -> None:
    """Raise InputError for names that `where` gives with characters of CONTROL."""
    rule = f"names in {where} must be without control characters"
    odd = [name for name in names if re.search(f"[{CONTROL}]", name)]
    raise_if_any(f"{rule}, got {name!a}; rename it" for name in odd)


def volumes_in(folder: Path) -> List[Path]:
    """NIfTI files in `folder`, without the "._" companions that macOS leaves in archives."""
    named = (path for path in sorted(folder.iterdir()) if is_volume(path))
    return [path for path in named if not path.name.startswith(".") and path.is_file()]


def folders_with_volumes(folder: Path, out: Optional[Path] = None) -> List[Path]:
    """The folders in `folder` that hold volumes, or that are in a folder that holds none; hidden
    ones and `out`, which predictions go to, aside."""

    def within(parent: Path) -> List[Path]:
        paths = [path for path in sorted(parent.iterdir()) if path.is_dir()]
        return [path for path in paths if not (path.name.startswith(".") or path == out)]

    found: List[Path] = []
    for path in within(folder):
        candidates = [path] if volumes_in(path) else within(path)
        found += [candidate for candidate in candidates if volumes_in(candidate)]
    return found


def composed(name: str) -> str:
    """A name in the Unicode form that names are compared in: macOS writes an accent as a character
    of its own, most others as one with its letter."""
    return unicodedata.normalize("NFC", name)


def file_named(folder: Path, name: str) -> Path:
    """The file of a relative path in `folder`, where it may be in the other Unicode form."""
    other = folder / unicodedata.normalize("NFD", name)
    return other if other.exists() else folder / name


def name_of(folder: Path) -> str:
    """A folder's name, also of "." and of a link, `composed`."""
    return composed(folder.resolve().name)


def stem_of(path: Path) -> str:
    """A volume's name without its ending, `composed`."""
    return composed(VOLUME_END.sub("", path.name))


def ids_of_cases(names: Sequence[str], images: Sequence[Path]) -> List[str]:
    """The ids of cases by the names of their files, given with an image of each; where more cases
    differ in the name of a folder, as of files that have the same name in each patient's, that of
    the nearest such."""
    folders = [Path(composed(str(image.absolute()))).parent.parts[::-1] for image in images]
    ids = max((names, *zip(*folders)), key=lambda level: len({*level} - {""}), default=())
    return [name or nearest[0] for name, nearest in zip(ids, folders)]


def channel_key(name: str) -> str:
    """A channel's name as names are compared: its name in stores if that is known, else without
    case, blanks, - and _.

    Both "T1ce" and "t1-Gd" are "T1gd".
    """
    plain = re.sub(r"[\s_-]+", "", unicodedata.normalize("NFKC", name).casefold())
    return CHANNEL_NAMES.get(plain, plain)


def same_channels(names: Sequence[str]) -> List[Tuple[str, ...]]:
    """The names among `names` that mean one channel, each group once."""
    groups = defaultdict(list)
    for name in names:
        groups[channel_key(name)].append(name)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def indices_of(wanted: Sequence[str], present: Sequence[str], where: str) -> Tuple[int, ...]:
    """The index of each wanted channel among those that `where` names. Raises InputError if it
    lacks one."""
    keys = [channel_key(name) for name in present]
    missing = [name for name in wanted if channel_key(name) not in keys]
    if missing:
        rule = f"channels of {where} must have {', '.join(wanted)}"
        todo = "correct its names, or take images of these channels"
        raise InputError(f"{rule}, got {', '.join(present)}; {todo}")
    return tuple(keys.index(channel_key(name)) for name in wanted)


def is_ignored(name: str) -> bool:
    """Whether a label's name says that its voxels are not to be learnt, such as "ignore" or "don't
    care"."""
    plain = re.sub(r"[^a-z0-9']+", " ", name.lower().replace("\u2019", "'")).strip()
    return _IGNORE_NAME.fullmatch(plain) is not None


def read_name(path: Path, channels: Sequence[str] = ()) -> FileName:
    """What a volume's name tells. Its end is a channel, if it is one of CHANNEL_NAMES or of
    `channels`, or a number of four digits; else all of it is the case's."""
    stem = stem_of(path)
    worded = [name for name in channels if re.search(r"[^\W\d_]", name)]  # a number tells nothing
    keys = {*CHANNEL_NAMES.values(), *map(channel_key, worded)}
    for start in (0, *(mark.end() for mark in re.finditer(r"[\s_.-]", stem))):
        key = channel_key(stem[start:])
        before = stem[:start].rstrip(" _.-")
        if key == CHANNEL_NAMES["t1"] and _CONTRAST.search(before):
            return FileName(_CONTRAST.sub("", before), CHANNEL_NAMES["t1gd"])
        if key in keys:
            return FileName(before, key)
    match = _NUMBERED.fullmatch(stem)
    if match:
        return FileName(match[1], number=int(match[2]))
    return FileName(stem)

"""Data sets that are recognised and refused, as what they need is not supported yet: CT, and labels
to be ignored."""

import re
from typing import Iterator, Sequence

import numpy as np

from cpu3d.data.nifti import read_volume
from cpu3d.data.region import Array
from cpu3d.data.stores.dataset import CaseFiles, Dataset
from cpu3d.errors import InputError, raise_if_any

CT_NAMES = {
    *("ct", "cta", "ctp", "cbct", "cect", "ncct", "nect", "ldct", "hrct", "mdct", "msct"),
    *("dect", "ctac", "petct", "ctscan", "hu", "hounsfield", "кт"),
}
CT_WORDS = re.compile(r"comput\w*[\s_-]*((assisted|axial)[\s_-]*)?tomogra|tomodensitom")
AIR_HU = (-1100, -900)  # air, with noise, and the -1024 that scanners put around their field
AIR_SHARE = 0.05  # of the voxels, from which on a volume looks like CT
_RULE = "must not be CT, with large parts at -1000 or -1024 as air in Hounsfield units"
_NO_CT = "normalisation of CT is not supported yet"

# A name that says "do not learn this": some of the first words, and else only such as the second.
_IGNORED = r"ignor\w*|exclud\w*|void|unlabel+ed|unannotated|unknown|undefined|unspecified"
_IGNORED += r"|do ?n[o']?t (care|use)|(not|non) (annotated|label+ed|used)|no (annotation|label)"
_FILLING = r"background|label|region|area|class|voxels?|pixels?|value|index|mask|\d+"
_FILLING += r"|to|be|or|and|the"
IGNORE_NAME = re.compile(rf"(({_FILLING}) )*({_IGNORED})( ({_IGNORED}|{_FILLING}))*")


def refuse_unsupported(dataset: Dataset) -> None:
    """Raise InputError for a data set whose names show CT, or labels that are to be ignored."""
    rule = f"channels of data set {dataset.folder} must not be CT"
    raise_if_any(f"{rule}, got {name}; {_NO_CT}" for name in dataset.channels if is_ct(name))
    rule = f"labels of data set {dataset.folder} must all be learnt"
    todo = "an ignore label is not supported yet: annotate its voxels, or leave its cases out"
    ignored = {code: name for code, name in dataset.labels.items() if code and is_ignored(name)}
    raise_if_any(f"{rule}, got {code} {name}; {todo}" for code, name in ignored.items())


def refuse_hounsfield(cases: Sequence[CaseFiles]) -> None:
    """Raise InputError, one for all, if the first, the middle and the last of some cases look like
    CT."""
    places = sorted({0, len(cases) // 2, len(cases) - 1}) if cases else []
    picked = [cases[place] for place in places]
    if picked and all(any(map(looks_like_ct, _volumes(files))) for files in picked):
        names = ", ".join(files.images[0].name for files in picked)
        raise InputError(f"images {_RULE}, got {names}; {_NO_CT}")


def is_ct(name: str) -> bool:
    """Whether a channel's name says CT, in words, in capitals or in one of its kinds."""
    words = re.findall(r"[^\W_]+", name)
    for word in list(words):
        if word.isalpha():
            words += re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", word)
    has_name = any(word.lower() in CT_NAMES for word in words)
    return has_name or CT_WORDS.search(name.lower()) is not None


def looks_like_ct(volume: Array) -> bool:
    """Whether a volume has a large part at the value of air in Hounsfield units."""
    low, high = AIR_HU
    with np.errstate(invalid="ignore"):
        air = np.count_nonzero((volume > low) & (volume < high))
    return air >= AIR_SHARE * volume.size


def ct_problem(name: str) -> str:
    """The problem of a channel that looks like CT."""
    return f"{name} {_RULE}, got at least {AIR_SHARE:.0%} of its voxels there; {_NO_CT}"


def is_ignored(name: str) -> bool:
    """Whether a label's name says that its voxels are not to be learnt, such as "ignore" or "don't
    care"."""
    plain = re.sub(r"[^a-z0-9']+", " ", name.lower().replace("\u2019", "'")).strip()
    return IGNORE_NAME.fullmatch(plain) is not None


def _volumes(files: CaseFiles) -> Iterator[Array]:
    """The channels of a case, but for files that cannot be read, which are named elsewhere."""
    for path in files.images:
        try:
            array = read_volume(path)[0]
        except InputError:
            continue
        array = array if array.ndim == 4 else array[..., None]
        yield from np.moveaxis(array, 3, 0)

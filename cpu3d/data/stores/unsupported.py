"""Data sets that are recognised and refused, as what they need is not supported yet: CT."""

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


def refuse_unsupported(dataset: Dataset) -> None:
    """Raise InputError for a data set whose names show CT."""
    rule = f"channels of data set {dataset.folder} must not be CT"
    raise_if_any(f"{rule}, got {name}; {_NO_CT}" for name in dataset.channels if is_ct(name))


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


def _volumes(files: CaseFiles) -> Iterator[Array]:
    """The channels of a case, but for files that cannot be read, which are named elsewhere."""
    for path in files.images:
        try:
            array = read_volume(path)[0]
        except InputError:
            continue
        array = array if array.ndim == 4 else array[..., None]
        yield from np.moveaxis(array, 3, 0)

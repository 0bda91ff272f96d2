"""Data sets that are recognised and refused, as what they need is not supported yet: CT, and labels to be ignored."""

import re
from typing import Iterator, Sequence

import numpy as np

from cpu3d.data.nifti import read_volume
from cpu3d.data.stores.layouts import CaseFiles, Dataset
from cpu3d.errors import InputError, refuse

CT_NAMES = {
    *("ct", "cta", "ctp", "cbct", "cect", "ncct", "nect", "ldct", "hrct", "mdct", "msct", "petct", "ctscan", "кт"),
    *("hu", "hounsfield"),
}
CT_WORDS = re.compile(r"comput\w*[\s_-]*(assisted[\s_-]*|axial[\s_-]*)?tomogra|tomodensitom|компьютерн\w* томограф")
AIR_HU = (-1100, -900)  # Hounsfield units of air, with noise, and of the -1024 that scanners put around their field
AIR_SHARE = 0.05  # of the voxels, from which on a volume looks like CT
_NO_CT = "normalisation of CT is not supported yet"

# A name that says "do not learn this": some of the first words, and else only such as the second.
_IGNORED = r"to be ignored|ignor\w*|void|unlabel+ed|unannotated|unknown|undefined|unspecified|do ?n[o']?t care"
_IGNORED += r"|(not|non) (annotated|label+ed)|no (annotation|label)"
_FILLING = r"label|region|area|class|voxels?|pixels?|value|index|mask|to|or|and|the|\d+"
IGNORE_NAME = re.compile(rf"(({_FILLING}) )*({_IGNORED})( ({_IGNORED}|{_FILLING}))*")


def refuse_unsupported(dataset: Dataset) -> None:
    """Raise InputError for a data set whose names show CT, or labels that are to be ignored."""
    rule = f"channels of data set {dataset.folder} must not be CT"
    refuse(f"{rule}, got {name}; {_NO_CT}" for name in dataset.channels if is_ct(name))
    rule = f"labels of data set {dataset.folder} must all be learnt"
    refuse(
        f"{rule}, got {code} {name}; an ignore label is not supported yet, so annotate these voxels or leave cases out"
        for code, name in dataset.labels.items()
        if code and is_ignored(name)
    )


def refuse_hounsfield(cases: Sequence[CaseFiles]) -> None:
    """Raise InputError, one for all, if the first, the middle and the last of some cases look like CT."""
    picked = [cases[place] for place in sorted({0, len(cases) // 2, len(cases) - 1})] if cases else []
    if picked and all(any(map(looks_like_ct, _volumes(files))) for files in picked):
        names = ", ".join(files.images[0].name for files in picked)
        rule = "images must not be CT, with large parts at -1000 or -1024 as air in Hounsfield units"
        raise InputError(f"{rule}, got {names}; {_NO_CT}")


def is_ct(name: str) -> bool:
    """Whether a channel's name says CT, in words, in capitals or in one of its kinds."""
    words = re.findall(r"[^\W_]+", name)
    parts = [part for word in words if word.isalpha() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", word)]
    return any(word.lower() in CT_NAMES for word in (*words, *parts)) or bool(CT_WORDS.search(name.lower()))


def looks_like_ct(volume: np.ndarray) -> bool:
    """Whether a volume has a large part at the value of air in Hounsfield units."""
    low, high = AIR_HU
    with np.errstate(invalid="ignore"):
        air = np.count_nonzero((volume > low) & (volume < high))
    return air >= AIR_SHARE * volume.size


def ct_problem(name: str) -> str:
    """The problem of a channel that looks like CT."""
    rule = f"{name} must not be CT, with large parts at -1000 or -1024 as air in Hounsfield units"
    return f"{rule}, got at least {AIR_SHARE:.0%} of its voxels there; {_NO_CT}"


def is_ignored(name: str) -> bool:
    """Whether a label's name says that its voxels are not to be learnt, such as "ignore" or "don't care"."""
    plain = re.sub(r"[^a-z0-9']+", " ", name.lower().replace("\u2019", "'")).strip()
    return IGNORE_NAME.fullmatch(plain) is not None


def _volumes(files: CaseFiles) -> Iterator[np.ndarray]:
    """The channels of a case, but for files that cannot be read, which are named elsewhere."""
    for path in files.images:
        try:
            array = read_volume(path)[0]
        except InputError:
            continue
        array = array if array.ndim == 4 else array[..., None]
        yield from np.moveaxis(array, 3, 0)

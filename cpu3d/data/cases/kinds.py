"""Decides how the channels of a new store are normalised, once, when a data set is prepared: by the
user, by a channel's name as in nnU-Net, or by what its voxels are.

    kinds = decide(dataset, train_ids, ["CT=zscore"], workers)  # before cases are converted
    normalisation = with_windows(kinds, channels, records)      # windows of CT, by their records
"""

import contextlib
import re
from dataclasses import replace
from typing import Collection, Dict, Iterable, List, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.background import background_share, without_residue
from cpu3d.data.cases.channels import content_box, rounding_in_windows
from cpu3d.data.datasets.dataset import CaseFiles, Dataset
from cpu3d.data.datasets.names import channel_key
from cpu3d.data.manifest import CaseRecord
from cpu3d.data.nifti import read_volume
from cpu3d.data.normalise import (
    CHOSEN,
    Kind,
    Normalisation,
    ct_of,
)
from cpu3d.data.region import Array
from cpu3d.errors import InputError, raise_if_any
from cpu3d.util.child import run_jobs
from cpu3d.util.progress import bar

CT_NAMES = {
    *("ct", "cta", "ctp", "cbct", "cect", "ncct", "nect", "ldct", "hrct", "mdct", "msct"),
    *("dect", "ctac", "petct", "ctscan", "hu", "hounsfield"),
}
CT_WORDS = re.compile(r"comput\w*[\s_-]*((assisted|axial)[\s_-]*)?tomogra")
AIR_HU = (-1100, -900)  # air, with noise, and the -1024 that scanners put around their field
AIR_SHARE = 0.05  # of the voxels, from which on a volume looks like CT
BACKGROUND_SHARE = 0.25
"""Of the voxels, from which on 0 is background. nnU-Net asks whether the box around the others
leaves out a quarter; a head that fills its grid has a background in its corners, too."""
FROM_SHARE = f"from {BACKGROUND_SHARE:.0%} on"  # that rule in the reason for a kind
EXAMINED = 16  # training cases whose voxels are looked at
# nnU-Net's names for a normalisation in the place of a channel's, as `channel_key` has them.
NAMED = {"nonorm": Kind.NONE, "none": Kind.NONE, "rescaleto01": Kind.RESCALE}


def is_ct(name: str) -> bool:
    """Tell whether a channel's name says CT, in words, in capitals or in one of its kinds."""
    words = re.findall(r"[^\W_]+", name)
    for word in list(words):
        if word.isalpha():
            words += re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", word)
    has_name = any(word.lower() in CT_NAMES for word in words)
    return has_name or CT_WORDS.search(name.lower()) is not None


def looks_like_ct(volume: Array) -> bool:
    """Tell whether a large part of a volume has the value of air in Hounsfield units."""
    return _air_share(volume) >= AIR_SHARE


def refuses_ct(name: str, each: Normalisation) -> bool:
    """Tell whether a channel that looks like CT is refused: if its values become scores by a
    case's own mean and deviation, and neither its name nor a user wants that."""
    is_wanted = each.kind is Kind.ZSCORE and each.is_chosen
    is_of_case = each.kind in (Kind.FOREGROUND, Kind.ZSCORE)
    return is_of_case and not is_wanted and not is_ct(name)


# --- The decision ---


def decide(
    dataset: Dataset,
    train_ids: Collection[str],
    chosen: Sequence[str],
    workers: int,
) -> Tuple[Normalisation, ...]:
    """Decide the normalisation of each channel, without the windows of CT.

    `chosen` are the user's, such as "CT=zscore". Of channels that they and names leave open, up to
    EXAMINED of the training cases are read. Raises InputError for other channels and kinds.
    """
    decided = chosen_kinds(dataset.channels, chosen)
    for name in dataset.channels:
        kind = NAMED.get(channel_key(name))
        if is_ct(name):
            kind = Kind.CT
        if kind and name not in decided:
            decided[name] = Normalisation(kind, why="by its name")
    training = [files for files in dataset.cases if files.case_id in train_ids]
    if not training:
        training = list(dataset.cases)
    left = [name for name in dataset.channels if name not in decided]
    if left:
        decided.update(_examined(left, training, dataset.channels, workers))
    return tuple(decided[name] for name in dataset.channels)


def with_windows(
    normalisation: Sequence[Normalisation],
    channels: Sequence[str],
    records: Iterable[CaseRecord],
) -> Tuple[Normalisation, ...]:
    """Fill in the window of each CT, from the labelled voxels in the records of the training
    cases. Raises InputError if there are none, or of one value."""
    samples: List[List[Tuple[float, ...]]] = [[] for _ in channels]
    for record in records:
        for sample, values in zip(samples, record.foreground):
            sample.append(values)
    windowed = []
    problems = []
    for each, name, sample in zip(normalisation, channels, samples):
        if each.kind is not Kind.CT:
            windowed.append(each)
            continue
        try:
            windowed.append(ct_of([values for values in sample if values], each.why))
        except ValueError as error:
            rule = f"labelled voxels of the training cases must give the window of {name}"
            problems.append(f"{rule}, got {error}; prepare with --normalise {name}=zscore")
    raise_if_any(problems)
    return tuple(windowed)


def in_window(
    record: CaseRecord,
    image: Array,
    label: Optional[Array],
    normalisation: Sequence[Normalisation],
    ignore: Optional[int] = None,
) -> CaseRecord:
    """Return the record with the content box and the rounding error that follow from the windows
    of its CT, by its stored arrays on the whole grid."""
    box = content_box(image, label, normalisation, record.units, record.around, ignore)
    error = max(record.max_abs_error, rounding_in_windows(record.units, normalisation))
    return replace(record, box=box, max_abs_error=error)


def chosen_kinds(channels: Sequence[str], chosen: Sequence[str]) -> Dict[str, Normalisation]:
    """Parse what a user chose, in words as of `decide`: channel -> normalisation. Raises
    InputError for other channels and kinds."""
    kinds = {kind.value: kind for kind in Kind}
    by_key = {channel_key(name): name for name in channels}
    decided: Dict[str, Normalisation] = {}
    problems = []
    for word in chosen:
        name, _, kind = word.rpartition("=")
        channel = by_key.get(channel_key(name))
        if channel is None or channel in decided:
            rule = f"--normalise must name channels among {', '.join(channels)}, each once"
            problems.append(f"{rule}, got {word}; give CHANNEL=KIND")
        elif kind not in kinds:
            rule = f"--normalise must have a kind among {', '.join(kinds)}"
            problems.append(f"{rule}, got {word}; pick one")
        else:
            decided[channel] = Normalisation(kinds[kind], why=CHOSEN, is_chosen=True)
    raise_if_any(problems)
    return decided


def _examined(
    left: Sequence[str],
    cases: Sequence[CaseFiles],
    channels: Sequence[str],
    workers: int,
) -> Dict[str, Normalisation]:
    """Decide channels by the voxels of some cases: by the median of their shares."""
    count = min(EXAMINED, len(cases))
    jobs = [(cases[number * len(cases) // count], tuple(channels)) for number in range(count)]
    shares: Dict[str, List[Tuple[float, float]]] = {name: [] for name in left}
    with bar("examine", total=count) as advance:
        for _, outcome in run_jobs(_shares_of, jobs, workers):
            for name in left:
                if name in outcome:
                    shares[name].append(outcome[name])
            advance()
    return {name: _by_shares(shares[name]) for name in left}


def _shares_of(job: Tuple[CaseFiles, Sequence[str]]) -> Dict[str, Tuple[float, float]]:
    """Return the shares of background and of air in each channel of a case. What cannot be read is
    left out: it is named when the case is loaded."""
    files, channels = job
    shares = {}
    for path, name in zip(files.images, channels):
        names: Sequence[str] = (name,)
        if len(files.images) == 1:
            names = files.names or channels
        with contextlib.suppress(InputError):
            array = read_volume(path)[0]
            volumes = array[None] if array.ndim == 3 else np.moveaxis(array, 3, 0)
            for name, volume in zip(names, volumes):
                if np.isfinite(volume).all():
                    shares[name] = (background_share(without_residue(volume)), _air_share(volume))
    return shares


def _by_shares(shares: Sequence[Tuple[float, float]]) -> Normalisation:
    """Decide a channel that no name tells. It is over the foreground if no case could be read: what
    is wrong with them is named later."""
    if not shares:
        return Normalisation()
    background, air = np.median(shares, axis=0)
    if air >= AIR_SHARE:
        found = f"{air:.0%} of the voxels are about -1000, as air"
        return Normalisation(Kind.CT, why=f"{found}: CT from {AIR_SHARE:.0%} on")
    why = f"0 around {background:.0%} of the voxels, background {FROM_SHARE}"
    kind = Kind.FOREGROUND if background >= BACKGROUND_SHARE else Kind.ZSCORE
    return Normalisation(kind, why=why)


def _air_share(volume: Array) -> float:
    low, high = AIR_HU
    with np.errstate(invalid="ignore"):
        return float(np.count_nonzero((volume > low) & (volume < high))) / volume.size

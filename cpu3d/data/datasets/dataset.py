"""A data set as it was found on disk: its cases and their files, channels, labels, regions and
folds."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple

from cpu3d.data.datasets.names import indices_of
from cpu3d.data.normalise import Normalisation
from cpu3d.data.split import Split
from cpu3d.errors import raise_if_any

Problems = Dict[str, List[str]]  # case that cannot be used -> the reasons why


@dataclass(frozen=True)
class CaseFiles:
    """The files of one case."""

    case_id: str
    patient_id: str
    images: Tuple[Path, ...]
    """One 4D file with the channels last, or one 3D file per channel in the order of the
    channels."""
    label: Optional[Path]
    names: Tuple[str, ...] = ()
    """The channels that a 4D file holds, in its order, if they are not the ones that are wanted."""

    @property
    def paths(self) -> Tuple[Path, ...]:
        """The images, then the label if there is one."""
        if self.label is None:
            return self.images
        return (*self.images, self.label)


@dataclass(frozen=True)
class Dataset:
    """A data set as found on disk; no volume has been opened yet."""

    folder: Path
    name: str
    layout: str  # one of those at the top of layouts.py
    channels: Tuple[str, ...]
    labels: Dict[int, str]  # label code -> name; 0 is background
    cases: Tuple[CaseFiles, ...]  # the complete cases, by case id
    problems: Problems  # of the cases with a file missing or double, which are not in `cases`
    patient_rules: Dict[str, str]
    """Case id -> the rule that tells its patient, from `patient_of`, or TABLE."""
    regions: Optional[Dict[str, Tuple[int, ...]]] = None
    """Region -> its label codes, as the data set or a user names them; None for those that
    `regions_of` finds."""
    class_order: Tuple[int, ...] = ()
    """The code that is painted for each of `regions`, in their order; () for `labels.own_codes`."""
    ignore: Optional[int] = None  # label code of voxels that are not to be learnt; in no region
    folds: Tuple[Split, ...] = ()  # that its list gives
    warnings: Tuple[str, ...] = ()  # what of its list may be wrong, each a line to print
    normalisation: Tuple[Normalisation, ...] = ()
    """Of each channel, as decided for its store; none is over the foreground in all of them."""

    @property
    def named_codes(self) -> Set[int]:
        """The codes of the regions that it or a user names, which a store has even if they occur in
        none of its cases."""
        if self.regions is None:
            return set()
        return {code for codes in self.regions.values() for code in codes}

    def with_channels(self, wanted: Sequence[str]) -> "Dataset":
        """The same cases with these channels, by name. Raises InputError if one is missing."""
        places = indices_of(wanted, self.channels, f"data set {self.folder}")
        if places == tuple(range(len(self.channels))):
            return replace(self, channels=tuple(wanted))

        def picked(case: CaseFiles) -> CaseFiles:
            if len(case.images) == 1:
                return replace(case, names=self.channels)
            return replace(case, images=tuple(case.images[place] for place in places))

        return replace(self, channels=tuple(wanted), cases=tuple(map(picked, self.cases)))

    def with_regions(self, regions: Dict[str, Tuple[int, ...]]) -> "Dataset":
        """The same cases with the regions that a user names. Raises InputError for a code that is
        no label's."""
        known = {code: name for code, name in self.labels.items() if code not in (0, self.ignore)}
        words = ", ".join(f"{code} {name}" for code, name in sorted(known.items()))
        problems = []
        for name, codes in regions.items():
            other = [str(code) for code in codes if code not in known]
            if other:
                rule = (
                    f"region {name} of --regions must be of label codes of {self.folder}, {words}"
                )
                problems.append(f"{rule}, got {', '.join(other)}; correct it")
        raise_if_any(problems)
        return replace(self, regions=regions, class_order=())


def regions_in_words(regions: Mapping[str, Sequence[int]]) -> str:
    """Regions as --regions takes them, such as "WT=1,2,3 TC=2,3"."""
    return " ".join(f"{name}={','.join(map(str, codes))}" for name, codes in regions.items())


def parse_regions(texts: Sequence[str]) -> Dict[str, Tuple[int, ...]]:
    """Region -> its label codes, of texts such as "WT=1,2,3". Raises InputError for other texts,
    codes that are not 1 to 255 or are there twice, and names that are there twice."""
    regions: Dict[str, Tuple[int, ...]] = {}
    problems = []
    for text in texts:
        name, _, listed = text.rpartition("=")
        digits = listed.split(",")
        codes = [int(word) for word in digits if word.isascii() and word.isdigit()]
        is_whole = len(set(codes)) == len(digits) and all(1 <= code <= 255 for code in codes)
        if not name.strip() or not is_whole:
            rule = "--regions must be NAME=CODE or NAME=CODE,CODE, of different codes 1 to 255"
            problems.append(f"{rule}, got {text}; correct it")
        elif name.casefold() in map(str.casefold, regions):
            problems.append(
                f"regions of --regions must have different names, got {text}; rename it"
            )
        regions[name] = tuple(sorted(codes))
    raise_if_any(problems)
    return regions

"""Regions and label codes: a network predicts regions (WT, TC, ET), a label file holds a data set's
codes.

A region is a set of codes, and regions may be nested (ET within TC within WT). From regions to
codes:

- A region's *own codes* are the codes that no smaller region contains: 1 (oedema) for WT = {1, 2,
  3} when TC = {2, 3}.
- Regions are painted from the largest set of codes to the smallest, each with its smallest own
  code, so that a smaller region overrides. A region without a code of its own paints nothing.
- Regions of equal size (one per organ, say) compete: the highest probability wins, the first named
  region in a tie.
- A code may be of voxels that are not annotated, to be ignored: it is in no region and never
  painted, and what is answered there counts nowhere.
- Several own codes cannot be distinguished. A network that only knows WT writes 1 for "1, 2 or 3";
  `code_meanings` gives the words for that.
- A data set may name the code of each region and the order of painting itself, as nnU-Net's
  regions_class_order does: `PaintedRegions`. No regions compete then, a later one overrides.
"""

import math
import re
from collections import defaultdict
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.region import Array
from cpu3d.errors import raise_if_any
from cpu3d.util.records import listed

THRESHOLD = 0.5  # a voxel belongs to a region from this probability on
SLAB_VOXELS = 2**22  # that are painted at a time

SIDES = (("left", "right"), ("l", "r"), ("lt", "rt"), ("lft", "rgt"), ("lh", "rh"))
"""English words for left and right in the names of labels; for others --no-flip is there."""


class PaintedRegions(Dict[str, Tuple[int, ...]]):
    """Region -> its label codes, of a data set that names how regions become codes."""

    def __init__(self, codes: Mapping[str, Tuple[int, ...]], paint: Iterable[Tuple[str, int]] = ()):
        """`paint` are pairs of a region and its code, in the order of painting; regions that are
        not among `codes` are left out. Without any: painted as of any other dict."""
        super().__init__(codes)
        self.paint = {name: code for name, code in paint if name in self}


def painted_codes(regions: Mapping[str, Sequence[int]]) -> Dict[str, int]:
    """Region -> the code that it is painted with; a region that paints nothing is left out."""
    if isinstance(regions, PaintedRegions) and regions.paint:
        return regions.paint
    return {name: own[0] for name, own in own_codes(regions).items() if own}


def check_painting(
    regions: Mapping[str, Sequence[int]], labels: Mapping[int, str], where: str
) -> None:
    """Raise InputError for each code that a perfect answer paints as a code of other regions.
    `labels` are code -> name."""
    problems = []
    for code in sorted({code for codes in regions.values() for code in codes}):
        maps = np.array([code in codes for codes in regions.values()])
        painted = int(label_from_regions(maps.reshape(1, 1, 1, -1), regions)[0, 0, 0])
        held = [name for name, codes in regions.items() if code in codes]
        back = [name for name, codes in regions.items() if painted in codes]
        if held != back:
            name = f"code {code}, {labels[code]}," if code in labels else f"code {code}"
            rule = f"a perfect answer for {name} of {where} must be painted as {listed(held)}"
            got = f"{painted}, which is {listed(back or ['in no region'])}"
            todo = "correct the regions, or their regions_class_order"
            problems.append(f"{rule}, got {got}; {todo}")
    raise_if_any(problems)


def region_mask(label: Array, codes: Sequence[int]) -> Array:
    """The voxels of `label` that hold one of `codes`: a boolean array of the same shape."""
    table = np.zeros(256, bool)
    table[list(codes)] = True
    # A table look-up is several times faster than np.isin on a whole volume; uint8 labels index it
    # as they are.
    return table[label if label.dtype == np.uint8 else label.astype(np.int64)]


def ignored_voxels(truth: Array, ignore: Optional[int]) -> Optional[Array]:
    """Where a true label (X, Y, Z) is not annotated, which holds `ignore` there: a boolean array;
    None if it is annotated everywhere."""
    if ignore is None:
        return None
    mask = truth == ignore
    return mask if mask.any() else None


def own_codes(regions: Mapping[str, Sequence[int]]) -> Dict[str, Tuple[int, ...]]:
    """Region -> the codes that no smaller region contains, ascending; it may have none."""
    own = {}
    for name, codes in regions.items():
        others = map(set, regions.values())
        smaller = [members for members in others if len(members) < len(set(codes))]
        own[name] = tuple(sorted(set(codes).difference(*smaller)))
    return own


def label_from_regions(answers: Any, regions: Mapping[str, Sequence[int]]) -> Array:
    """Paint regions `(X, Y, Z, R)`, probabilities or masks, into one label `(X, Y, Z)` uint8; 0 is
    background. No more than a slab along X of `answers` is read at a time.

    The last axis is in the order of `regions` (name -> codes). The rules are at the top of this
    file. A NaN is in no region."""
    label = np.empty(answers.shape[:-1], np.uint8)
    rows = max(SLAB_VOXELS // math.prod(label.shape[1:]), 1)
    for first in range(0, len(label), rows):
        slab = slice(first, first + rows)
        label[slab] = _painted(answers[slab], regions)
    return label


def _painted(answers: Array, regions: Mapping[str, Sequence[int]]) -> Array:
    label = np.zeros(answers.shape[:-1], np.uint8)
    for rivals in paint_order(regions):
        best = None  # the highest probability so far, if regions compete
        if len(rivals) > 1:
            best = np.full(label.shape, -np.inf, np.float32)
        for position, code in rivals:
            answer = answers[..., position]
            mask = answer if answer.dtype == bool else answer >= THRESHOLD
            if best is not None:
                mask = mask & (answer > best)
                best[mask] = answer[mask]
            label[mask] = code
    return label


def paint_order(regions: Mapping[str, Sequence[int]]) -> List[List[Tuple[int, int]]]:
    """(position of a region, its code) in the groups that compete, in the order that
    `label_from_regions` paints."""
    positions = {name: position for position, name in enumerate(regions)}
    painted = painted_codes(regions)
    if isinstance(regions, PaintedRegions) and regions.paint:
        return [[(positions[name], code)] for name, code in painted.items()]
    groups = defaultdict(list)
    for name, code in painted.items():
        groups[len(set(regions[name]))].append((positions[name], code))
    return [groups[size] for size in sorted(groups, reverse=True)]


def code_meanings(
    regions: Mapping[str, Sequence[int]], labels: Mapping[int, str]
) -> Dict[int, str]:
    """The meaning of each code that `label_from_regions` can write, such as {0: "background", 1:
    "edema"}.

    `labels` are the data set's code -> name. A code for several reads like "WT (edema, enhancing
    tumour)"."""
    meanings = {0: labels.get(0, "background")}
    own = own_codes(regions)
    for name, painted in painted_codes(regions).items():
        codes = own[name] if own[name] else regions[name]
        names = [labels.get(code, f"label {code}") for code in codes]
        if own[name] == (painted,):
            meanings[painted] = names[0]
        else:
            meanings[painted] = f"{name} ({', '.join(names)})"
    return dict(sorted(meanings.items()))


def mirror_pair(names: Iterable[str]) -> Optional[Tuple[str, str]]:
    """Two names that differ in left and right alone, such as ("left kidney", "right kidney") or
    ("Hip-L", "Hip-R"); None if there are none.

    A side is one of `SIDES`: a word between blanks, marks, digits and changes of case; or within a
    word, if it is long; or the first or the last letter of a name.
    """
    names = sorted(names)
    for left_word, right_word in SIDES:
        on_the_left = {_without_side(name, left_word): name for name in names}
        for right in names:
            rest = _without_side(right, right_word)
            if rest is not None and on_the_left.get(rest, right) != right:
                return on_the_left[rest], right
    return None


_BETWEEN_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=\D)(?=\d)|[\W_]+")


def _without_side(name: str, side: str) -> Optional[str]:
    """Return the words of a name without `side`, in lower case and sorted; None if it is not
    there."""
    text = " ".join(_BETWEEN_WORDS.sub(" ", name).lower().split())
    patterns = [rf"\b{side}\b"]
    if len(side) > 3:
        patterns.append(side)
    if len(side) == 1 and len(text) > 3:
        patterns += [f"^{side}", f"{side}$"]
    for pattern in patterns:
        rest, found = re.subn(pattern, " ", text)
        if found:
            return " ".join(sorted(rest.split()))
    return None

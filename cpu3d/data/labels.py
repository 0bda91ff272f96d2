"""Regions and label codes: a network predicts regions (WT, TC, ET), a label file holds a data set's codes.

A region is a set of codes, and regions may be nested (ET within TC within WT). From regions to codes:

- A region's *own codes* are the codes that no smaller region contains: 1 (oedema) for WT = {1, 2, 3} when TC = {2, 3}.
- Regions are painted from the largest set of codes to the smallest, each with its smallest own code, so that a smaller
  region overrides. A region without a code of its own paints nothing.
- Regions of equal size (one per organ, say) compete: the highest probability wins, the first named region in a tie.
- Several own codes cannot be distinguished. A network that only knows WT writes 1 for "1, 2 or 3"; `code_meanings`
  gives the words for that.
"""

from collections import defaultdict
from typing import Dict, List, Mapping, Sequence, Tuple

import numpy as np

THRESHOLD = 0.5  # a voxel belongs to a region from this probability on


def region_mask(label: np.ndarray, codes: Sequence[int]) -> np.ndarray:
    """The voxels of `label` that hold one of `codes`: a boolean array of the same shape."""
    table = np.zeros(256, bool)
    table[list(codes)] = True
    # A table look-up is several times faster than np.isin on a whole volume; uint8 labels index it as they are.
    return table[label if label.dtype == np.uint8 else label.astype(np.int64)]


def own_codes(regions: Mapping[str, Sequence[int]]) -> Dict[str, Tuple[int, ...]]:
    """Region -> the codes that no smaller region contains, ascending; it may have none."""
    own = {}
    for name, codes in regions.items():
        smaller = [set(members) for members in regions.values() if len(set(members)) < len(set(codes))]
        own[name] = tuple(sorted(set(codes).difference(*smaller)))
    return own


def label_from_regions(answers: np.ndarray, regions: Mapping[str, Sequence[int]]) -> np.ndarray:
    """Paint regions `(X, Y, Z, R)`, probabilities or masks, into one label `(X, Y, Z)` uint8; 0 is background.

    The last axis is in the order of `regions` (name -> codes). The rules are at the top of this file. A NaN is in no
    region.
    """
    label = np.zeros(answers.shape[:-1], np.uint8)
    for rivals in paint_order(regions):
        best = np.full(label.shape, -np.inf, np.float32) if len(rivals) > 1 else None
        for position, code in rivals:
            answer = answers[..., position]
            mask = answer if answer.dtype == bool else answer >= THRESHOLD
            if best is not None:
                mask = mask & (answer > best)
                best[mask] = answer[mask]
            label[mask] = code
    return label


def paint_order(regions: Mapping[str, Sequence[int]]) -> List[List[Tuple[int, int]]]:
    """(position of a region, its code) in the groups that compete, in the order that `label_from_regions` paints."""
    groups = defaultdict(list)
    for position, (name, own) in enumerate(own_codes(regions).items()):
        if own:
            groups[len(set(regions[name]))].append((position, own[0]))
    return [groups[size] for size in sorted(groups, reverse=True)]


def code_meanings(regions: Mapping[str, Sequence[int]], labels: Mapping[int, str]) -> Dict[int, str]:
    """The meaning of each code that `label_from_regions` can write, such as {0: "background", 1: "edema"}.

    `labels` are the data set's code -> name. A code for several reads like "WT (edema, enhancing tumour)".
    """
    meanings = {0: labels.get(0, "background")}
    for name, codes in own_codes(regions).items():
        names = [labels.get(code, f"label {code}") for code in codes]
        if codes:
            meanings[codes[0]] = names[0] if len(names) == 1 else f"{name} ({', '.join(names)})"
    return dict(sorted(meanings.items()))

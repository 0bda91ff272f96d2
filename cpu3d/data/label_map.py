"""Label codes that are changed while labels are read, such as 4=3 where BraTS changed its mind between releases."""

import dataclasses
import re
from typing import Dict, Mapping, Sequence

from cpu3d.data.layouts import Dataset, regions_of
from cpu3d.errors import InputError


def parse_label_map(pairs: Sequence[str]) -> Dict[int, int]:
    """{4: 3} for "4=3". Raises InputError for what is no pair of codes 0..255, or gives one code two meanings."""
    problems, label_map = [], {}
    for pair in pairs:
        match = re.fullmatch(r"(\d{1,3})=(\d{1,3})", pair)
        old, new = map(int, match.groups()) if match else (0, 0)
        if not match or max(old, new) > 255 or old == 0:
            problems.append(f"--label-map must be pairs OLD=NEW of codes 1..255 and 0..255, got {pair!r}; mend it")
        elif label_map.setdefault(old, new) != new:
            problems.append(f"--label-map must give code {old} one meaning, got {label_map[old]} and {new}; keep one")
    if problems:
        raise InputError(*problems)
    return label_map


def with_label_map(dataset: Dataset, label_map: Mapping[int, int]) -> Dataset:
    """The data set with the codes, names and regions that its labels have once `label_map` is applied to them.

    All codes change at once, so 1=2 with 2=1 swaps them. A code that has a name keeps it under a new code that has
    none: the labels of BraTS 2021 with 4=3 are those of BraTS 2023. A code onto which nothing falls any more is gone.
    Raises InputError where a new code would have no name.
    """
    before = dataset.labels
    kept = {code for code in before if code not in label_map}
    labels = {code: name for code, name in before.items() if code in kept or code in label_map.values()}
    problems = []
    for old, new in sorted(label_map.items()):
        name = labels.get(new, before.get(old))
        if name is None:
            known = ", ".join(f"{code} {name}" for code, name in sorted(before.items()))
            problems.append(f"--label-map {old}={new} must lead to a code with a name ({known}), got {new}; mend it")
        labels[new] = name
    if not problems and len(labels) < 2:
        problems = ["--label-map must leave a label beside the background, got none; map fewer codes"]
    if problems:
        raise InputError(*problems)
    labels = dict(sorted(labels.items()))
    return dataclasses.replace(dataset, labels=labels, regions=regions_of(labels))

"""Which case is for training, validation or testing: a pure function of patients, fractions and a seed."""

import hashlib
import math
from collections import defaultdict
from typing import Dict, List, Mapping, Sequence, Tuple

from cpu3d.data.records import SPLITS
from cpu3d.errors import InputError


def split_cases(
    patients: Mapping[str, str], *, fractions: Tuple[float, float, float], seed: int
) -> Dict[str, Tuple[str, ...]]:
    """Share the cases out to "train", "val" and "test" in the ratio of `fractions`, whole patients.

    `patients` maps case id -> patient id. Patients are put in the order of SHA-256 of "seed:patient", which no
    library's random numbers can change, and dealt out by largest remainder; every split with a fraction above 0 gets at
    least one. Case ids come back sorted. Raises InputError for shares that are none, for too few patients.
    """
    fractions = tuple(float(fraction) for fraction in fractions)
    total = sum(fractions)
    if len(fractions) != 3 or min(fractions) < 0 or not 0 < total < math.inf:
        raise InputError(
            f"--split must be three shares, none negative, one positive, got {fractions}; try --split 8 1 1"
        )
    cases_of = defaultdict(list)
    for case_id, patient in patients.items():
        cases_of[patient].append(case_id)
    order = sorted(cases_of, key=lambda patient: hashlib.sha256(f"{seed}:{patient}".encode()).hexdigest())
    needed = sum(fraction > 0 for fraction in fractions)
    if len(order) < needed:
        raise InputError(
            f"--split {' '.join(f'{fraction:g}' for fraction in fractions)} must have at least {needed} patients, got"
            f" {len(order)}; add cases, say who is whose with --patients, or train on all of them with --split 1 0 0"
        )
    split, start = {}, 0
    for name, count in zip(SPLITS, _shares(len(order), [share / total for share in fractions])):
        chosen = order[start : start + count]
        split[name] = tuple(sorted(case_id for patient in chosen for case_id in cases_of[patient]))
        start += count
    return split


# --- Private helpers ---


def _shares(total: int, fractions: Sequence[float]) -> List[int]:
    """`total` in whole parts near `fractions`: one to each that is above 0, then always to the one furthest behind."""
    shares = [int(fraction > 0) for fraction in fractions]
    while sum(shares) < total:
        behind = max(range(len(shares)), key=lambda i: (fractions[i] > 0, fractions[i] * total - shares[i]))
        shares[behind] += 1
    return shares

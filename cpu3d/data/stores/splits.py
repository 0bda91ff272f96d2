"""The patients of cases, and the split of their cases into training, validation and testing.

A patient's cases stay in one split, and in one part of a fold. Patients are dealt out in the order of the SHA-256 of
"seed:patient", which is the same in every version of every library.
"""

import csv
import hashlib
import math
import re
from collections import Counter
from pathlib import Path
from typing import Collection, Dict, Iterable, List, Mapping, Sequence, Tuple

from cpu3d.data.records import SPLITS, case_list, split_problems
from cpu3d.data.store import Store
from cpu3d.errors import InputError, refuse
from cpu3d.util.records import count
from memory_estimator.common.files import read_text

Split = Dict[str, Tuple[str, ...]]

TABLE = "table"  # the rule for a patient that a table names


def read_patients(path: Path, case_ids: Collection[str]) -> Dict[str, str]:
    """Case id -> patient from all lines of a table of two columns, separated by commas, semicolons or tabs.

    Raises InputError for a file that cannot be read, lines that are no pair, a case with two patients, and ids of
    `case_ids` without a patient.
    """
    name = f"--patients {path}"
    try:
        lines = read_text(path).splitlines()
        delimiter = next((mark for mark in "\t;" if any(mark in line for line in lines)), ",")
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=delimiter)]
    except (OSError, ValueError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{name} must be a table in UTF-8 that can be read, got {reason}; correct it") from None
    patients: Dict[str, str] = {}
    problems = []
    for number, row in enumerate(rows, 1):
        if any(row) and (len(row) != 2 or not all(row)):
            problems.append(f"{name}:{number} must be a case and its patient, got {row}; correct the line")
        elif any(row) and patients.setdefault(*row) != row[1]:
            problems.append(f"{name}:{number} must give case {row[0]} one patient, got {row[1]} too; keep one")
    lacking = sorted(set(case_ids) - set(patients)) if not problems else ()
    refuse([*problems, *(f"{name} must give case {case_id} a patient, got none; add a line" for case_id in lacking)])
    return patients


def describe_patients(rules: Mapping[str, int]) -> List[str]:
    """Lines such as "3 cases: table". `rules`: rule that tells a case's patient -> number of cases."""
    return [f"{count(number, 'case')}: {rule}" for rule, number in rules.items()]


def split_cases(patients: Mapping[str, str], *, fractions: Tuple[float, float, float], seed: int) -> Split:
    """Deal the patients' cases to "train", "val" and "test" in the ratio of `fractions`; ids come back sorted.

    `patients` maps case id -> patient id. Every split with a fraction above 0 gets a patient, then always the split
    furthest behind its share. Raises InputError for bad shares or too few patients.
    """
    total = sum(fractions)
    if min(fractions) < 0 or not 0 < total < math.inf:
        raise InputError(f"--split must be three shares of at least 0, not all 0, got {fractions}; try --split 8 1 1")
    order = _dealing_order(patients.values(), seed)
    sizes = [int(fraction > 0) for fraction in fractions]
    if len(order) < sum(sizes):
        rule = f"--split {' '.join(f'{share:g}' for share in fractions)} must have at least {sum(sizes)} patients"
        raise InputError(f"{rule}, got {len(order)}; add cases, name --patients, or train on all with --split 1 0 0")
    while sum(sizes) < len(order):
        wanted = [(share > 0, share / total * len(order) - size) for share, size in zip(fractions, sizes)]
        sizes[wanted.index(max(wanted))] += 1
    place = dict(zip(order, (name for name, size in zip(SPLITS, sizes) for _ in range(size))))
    return {name: tuple(sorted(case for case in patients if place[patients[case]] == name)) for name in SPLITS}


def deal_cases(
    split: Mapping[str, Sequence[str]], patients: Mapping[str, str], new: Mapping[str, str], *, seed: int
) -> Split:
    """The split with the new cases in it. `patients` and `new` map case id -> patient id.

    A case of a known patient goes to that patient's split. The others are dealt so that each split keeps its share of
    the patients; a split without patients gets none.
    """
    place = {patients[case_id]: name for name in SPLITS for case_id in split[name]}
    have = Counter(place.values())
    fresh = _dealing_order(set(new.values()) - set(place), seed)
    counts, total = dict(have), len(place) + len(fresh)
    for _ in fresh:
        behind = max(have, key=lambda name: (have[name] * total / len(place) - counts[name], -SPLITS.index(name)))
        counts[behind] += 1
    place.update(zip(fresh, (name for name in SPLITS for _ in range(counts.get(name, 0) - have[name]))))
    return {
        name: tuple(sorted([*split[name], *(case_id for case_id, patient in new.items() if place[patient] == name)]))
        for name in SPLITS
    }


def parse_fold(fold: str) -> Tuple[int, int]:
    """ "2/5" as (2, 5): the second of five parts. Raises InputError for other text."""
    match = re.fullmatch(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,8})", fold)
    part, parts = map(int, match.groups()) if match else (0, 0)
    if not 1 <= part <= parts or parts < 2:
        raise InputError(f"fold must be I/K with 1 <= I <= K and K >= 2, got {fold}; 1/5 holds out the first of five")
    return part, parts


def with_fold(store: Store, fold: str) -> Store:
    """The view of the store for a run of `fold`; "" is the store itself. Raises InputError as `with_folds`."""
    return with_folds(store, [fold]) if fold else store


def with_folds(store: Store, folds: Sequence[str]) -> Store:
    """A view of the store with the parts of `folds` of its training and validation cases in "val", the rest in "train".
    Cases without a label, which can be neither trained nor scored on, are in neither.

    Test cases and split hash stay. Raises InputError for text that is no fold, for more parts than patients, and if
    identical images would be in two splits.
    """
    manifest = store.manifest
    own = {*manifest.split["train"], *manifest.split["val"]} - set(manifest.unlabelled)
    known = list(case_list(manifest.cases).known)
    patients = {case.case_id: case.patient_id for case in known if case.case_id in own}
    held_out = {case_id for fold in folds for case_id in deal(patients, fold, seed=manifest.split_seed)}
    split = {"train": tuple(sorted(own - held_out)), "val": tuple(sorted(held_out)), "test": manifest.split["test"]}
    refuse(split_problems(split, known))
    return store.with_split(split)


def deal(patients: Mapping[str, str], fold: str, *, seed: int) -> Tuple[str, ...]:
    """The cases that `fold` holds out, sorted; parts differ by at most one patient."""
    part, parts = parse_fold(fold)
    order = _dealing_order(patients.values(), seed)
    if parts > len(order):
        rule = f"fold must have at most as many parts as there are patients to train and validate on, {len(order)}"
        raise InputError(f"{rule}, got {fold}; use fewer parts")
    chosen = set(order[part - 1 :: parts])
    return tuple(sorted(case_id for case_id, patient in patients.items() if patient in chosen))


def _dealing_order(patients: Iterable[str], seed: int) -> List[str]:
    return sorted(set(patients), key=lambda patient: hashlib.sha256(f"{seed}:{patient}".encode()).hexdigest())

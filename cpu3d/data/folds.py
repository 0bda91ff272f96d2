"""Cross-validation: a store seen with its training and validation cases dealt anew, one of K parts held out.

    store = with_fold(open_store("store"), "2/5")

The K views have one test split, the store's, which no fold touches, and their validation cases are between them all
other cases, each once.
"""

import dataclasses
import hashlib
import re
from typing import Dict, Mapping, Sequence, Tuple

from cpu3d.data.case_index import split_entries
from cpu3d.data.records import Manifest, split_problems
from cpu3d.data.store import Store
from cpu3d.errors import InputError


def parse_fold(fold: str) -> Tuple[int, int]:
    """ "2/5" as (2, 5): the second of five parts. Raises InputError for what is no fold."""
    found = re.fullmatch(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,8})", fold)
    part, parts = map(int, found.groups()) if found else (0, 0)
    if not 1 <= part <= parts or parts < 2:
        raise InputError(
            f"fold must be I/K with 1 <= I <= K and K >= 2, got {fold}; 1/5 holds out the first of five parts"
        )
    return part, parts


def with_fold(store: Store, fold: str) -> Store:
    """The store as a run of `fold` sees it: "val" is that part of its training and validation cases, "train" the rest.

    Only the view's `split` differs. Its split hash is the store's own, for that tells which cases are the test cases;
    a view of a view is one of the store. "" is the store itself. Reads every record once. Raises InputError for what is
    no fold, for more parts than there are patients to deal out, and where identical images come apart.
    """
    return with_folds(store, [fold]) if fold else store


def with_folds(store: Store, folds: Sequence[str]) -> Store:
    """As `with_fold`, with the parts of several folds in "val"."""
    manifest = store.manifest
    own = {*manifest.split["train"], *manifest.split["val"]}
    entries = split_entries(manifest.cases)
    patients = {entry.case_id: entry.patient_id for entry in entries if entry.case_id in own}
    held_out = {case_id for fold in folds for case_id in deal(patients, fold, seed=manifest.split_seed)["val"]}
    split = {"train": tuple(sorted(own - held_out)), "val": tuple(sorted(held_out)), "test": manifest.split["test"]}
    problems = split_problems(split, entries)
    if problems:
        raise InputError(*problems)
    return _View(store, dataclasses.replace(manifest, split=split))


def deal(patients: Mapping[str, str], fold: str, *, seed: int) -> Dict[str, Tuple[str, ...]]:
    """The cases of "train" and "val", sorted. `patients` maps case id -> patient id, and a patient is in one part.

    Patients are dealt out in the order of SHA-256 of "seed:patient", one to each part in turn, so that the parts differ
    by one patient at most. Raises InputError as `with_fold`.
    """
    part, parts = parse_fold(fold)
    order = sorted(set(patients.values()), key=lambda patient: hashlib.sha256(f"{seed}:{patient}".encode()).hexdigest())
    if parts > len(order):
        raise InputError(
            f"fold must have at most as many parts as there are patients to train and validate on, {len(order)}, "
            f"got {fold}; use fewer parts"
        )
    chosen = set(order[part - 1 :: parts])
    held_out = tuple(sorted(case_id for case_id, patient in patients.items() if patient in chosen))
    return {"train": tuple(sorted(set(patients) - set(held_out))), "val": held_out}


# --- Private helpers ---


class _View(Store):
    """A store with another split. What was made is the store's, and so that is what is checked."""

    def __init__(self, store: Store, manifest: Manifest):
        super().__init__(store.folder, manifest)
        self._store = store._store if isinstance(store, _View) else store

    def check_split(self) -> None:
        self._store.check_split()

"""A fold of a store: the cases that it holds out, and the store as a run of it sees it."""

import re
from typing import Mapping, Sequence, Tuple

from cpu3d.data.split import Split, dealing_order, division_problems
from cpu3d.data.store import Store
from cpu3d.errors import InputError, raise_if_any


def parse_fold(fold: str) -> Tuple[int, int]:
    """ "2/5" as (2, 5): the second of five folds. Raises InputError for other text."""
    match = re.fullmatch(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,8})", fold)
    if match:
        number = int(match[1])
        folds = int(match[2])
        if number <= folds and folds >= 2:
            return number, folds
    rule = "fold must be I/K with 1 <= I <= K and K >= 2"
    raise InputError(f"{rule}, got {fold}; 1/5 holds out the first of five")


def with_fold(store: Store, fold: str) -> Store:
    """The view of the store for a run of `fold`; "" is the store itself. Raises InputError as
    `with_folds`."""
    return with_folds(store, [fold]) if fold else store


def with_folds(store: Store, folds: Sequence[str]) -> Store:
    """A view of the store with the training and validation cases that `folds` hold out in "val",
    the rest in "train". Cases without a label, which can be neither trained nor scored on, are in
    neither.

    Of a store with given folds "train" are the cases that all of `folds` train on. Test cases and
    split hash stay. Raises InputError for text that is no fold, for more folds than patients or
    others than were given, and if identical images would be in two splits.
    """
    manifest = store.manifest
    if manifest.folds:
        return store.with_split(_given(store, folds))
    own = {*manifest.split["train"], *manifest.split["val"]} - set(manifest.unlabelled)
    patients = {case.case_id: case.patient_id for case in manifest.cases if case.case_id in own}
    seed = manifest.split_seed
    held_out = {case_id for fold in folds for case_id in deal(patients, fold, seed=seed)}
    split = {
        "train": tuple(sorted(own - held_out)),
        "val": tuple(sorted(held_out)),
        "test": manifest.split["test"],
    }
    raise_if_any(division_problems(split, (), manifest.cases))
    return store.with_split(split)


def _given(store: Store, folds: Sequence[str]) -> Split:
    """The split of a view of given folds, which were checked when the store was made."""
    kept = store.manifest.folds
    chosen = []
    for fold in folds:
        number, count_of_folds = parse_fold(fold)
        if count_of_folds != len(kept):
            rule = f"fold must be one of the {len(kept)} that store {store.folder} was given"
            raise InputError(f"{rule}, got {fold}; choose I/{len(kept)}")
        chosen.append(kept[number - 1])
    train = set.intersection(*(set(fold["train"]) for fold in chosen))
    held_out = {case_id for fold in chosen for case_id in fold["val"]}
    view = {"train": train, "val": held_out, "test": store.manifest.split["test"]}
    return {name: tuple(sorted(ids)) for name, ids in view.items()}


def deal(patients: Mapping[str, str], fold: str, *, seed: int) -> Tuple[str, ...]:
    """The cases that `fold` holds out, sorted; folds differ by at most one patient."""
    number, folds = parse_fold(fold)
    order = dealing_order(patients.values(), seed)
    if folds > len(order):
        rule = "folds must be at most as many as there are patients to train and validate on"
        raise InputError(f"{rule}, {len(order)}, got {fold}; use fewer folds")
    chosen = set(order[number - 1 :: folds])
    return tuple(sorted(case_id for case_id, patient in patients.items() if patient in chosen))

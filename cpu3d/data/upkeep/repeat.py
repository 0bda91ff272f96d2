"""A store of many more entries over the same arrays: the size of a large data set without its disk.

    repeat_entries("store", times=101)  # 484 cases: 48,884 entries

To measure and test what grows with the number of cases. Such a store trains, but it holds no more than it did.
"""

import dataclasses
from pathlib import Path
from typing import Union

from cpu3d.data.records import Manifest, remake
from cpu3d.data.store import open_store, write_store
from cpu3d.errors import InputError
from cpu3d.util.lock import locked


def repeat_entries(store_dir: Union[str, Path], times: int) -> Manifest:
    """Turn every case `id` of a finished store into the entries `id-000`, `id-001`, ... and return the manifest.

    The entries of a case share its arrays, its patient and its split. Written in place of the store's manifest, whole
    or not at all; the arrays are left as they are. Raises InputError for fewer than one entry a case, and while another
    process writes the store.
    """
    if times < 1:
        raise InputError(f"times must be at least 1, got {times}; give the entries to make of each case")
    store_dir = open_store(store_dir).folder  # finished, or told here
    with locked(store_dir, "store"):
        old = open_store(store_dir).manifest
        cases = [dataclasses.replace(case, case_id=name) for case in old.cases for name in _names(case.case_id, times)]
        split = {name: [new for one in ids for new in _names(one, times)] for name, ids in old.split.items()}
        rules = {rule: times * number for rule, number in old.patient_rules.items()}
        manifest = remake(old, cases=cases, split=split, patient_rules=rules)
        write_store(store_dir, manifest)
    return manifest


# --- Private helpers ---


def _names(case_id: str, times: int):
    return [f"{case_id}-{number:03d}" for number in range(times)]

"""New cases for a finished store: made as the old ones were, and none of the old ones moves."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Mapping, Optional, Sequence, Tuple, Union

from cpu3d.data.files.arrays import file_sha256
from cpu3d.data.label_map import with_label_map
from cpu3d.data.layouts import CaseFiles, Dataset, Problem, labels_in_use, read_dataset, regions_of
from cpu3d.data.patients import TABLE, patient_of, read_patients
from cpu3d.data.prepare import convert_all, write_quarantine
from cpu3d.data.records import SPLITS, CaseRecord, Manifest, SourceFile, remake
from cpu3d.data.resume import finished_cases, left_out, settings_of, sweep
from cpu3d.data.store import Store, open_store, write_store
from cpu3d.data.words import count
from cpu3d.data.write_cases import Job
from cpu3d.errors import InputError
from cpu3d.util.atomic import writable_folder
from cpu3d.util.child import worker_count
from cpu3d.util.lock import locked
from cpu3d.util.progress import bar
from cpu3d.util.records import versions

Split = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Appended:
    """What became of a data set's cases."""

    manifest: Manifest
    """Of the store as it is now."""
    new: Tuple[str, ...]
    """Case ids that the store did not have."""
    known: Tuple[str, ...]
    """Case ids that it had, from the same files."""
    bad: Tuple[str, ...]
    """Case ids that were left out."""


def append(
    store_dir: Union[str, Path],
    dataset_dir: Union[str, Path],
    *,
    workers: Optional[int] = None,
    skip_bad: bool = False,
    patients: Optional[Path] = None,
) -> Appended:
    """Add the cases of a data set that a finished store does not have, and say what became of each.

    They are made with the store's own settings: format, crop, NaN and label codes. The split of the old cases stays,
    new ones are dealt by `deal_cases`. The manifest is replaced at the end, so the store can be used meanwhile, and the
    same call continues where one was cut.

    Raises InputError, and leaves the store as it was, when channels or labels differ, when a case of the same id was
    made from other files, when a new id is the name of arrays that the store has under other ids, when a patient or
    identical images would be in two splits, where the store's patients come from a table and there is none for the new
    cases, and for bad cases unless `skip_bad`. OSError and KeyboardInterrupt as `prepare`.
    """
    workers, store_dir = worker_count(workers), Path(store_dir)
    settings, old = settings_of(store_dir), open_store(store_dir).manifest  # finished and whole, or told here
    dataset = with_label_map(read_dataset(dataset_dir, patients), settings.label_map)
    _refuse_other_kind(store_dir, old, dataset)
    writable_folder(store_dir, "store")
    with locked(store_dir, "store"):
        sweep(store_dir)
        store = open_store(store_dir)
        store.check_split()
        old = store.manifest
        there = {case_id for ids in old.split.values() for case_id in ids}
        known = [files for files in dataset.cases if files.case_id in there]
        new = [files for files in dataset.cases if files.case_id not in there]
        _refuse_changed(store, known)
        _refuse_stems(store, new)
        if new and TABLE in old.patient_rules and patients is None:
            raise InputError(
                f"--patients must name a table, as store {store_dir} knows its patients from one, got none; give one"
                " that says which of them the new cases are of"
            )
        if patients is not None:
            _refuse_other_patients(store_dir, old, read_patients(patients, ()))
        out = left_out(store_dir)
        finished = finished_cases(store_dir, new, dataset.folder, verify=True)
        left = [files for files in new if files.case_id not in finished]
        jobs = [Job(files, dataset.channels, dataset.labels, dataset.folder, store_dir, settings) for files in left]
        records, problems = convert_all(jobs, workers, finished, store_dir)
        problems += [problem for problem in dataset.problems if problem.case_id not in there]
        for case_id in sorted(records):
            other = set(records[case_id].label_voxels) - set(old.labels)
            if other:
                told = ", ".join(f"{code} {dataset.labels[code]}" for code in sorted(other))
                rule = f"label of case {case_id} must hold codes of store {store_dir} alone, got {told}"
                problems.append(Problem(case_id, f"{rule}; prepare a store of its own, which will have that region"))
                del records[case_id]
        bad = tuple(sorted({problem.case_id for problem in problems}))
        if bad and not skip_bad:
            raise InputError(
                *(problem.reason for problem in problems),
                f"data set {dataset.folder} must be without bad cases, got {count(bad, 'bad case')}; nothing was"
                " appended: mend the bad and run again, or leave them out with --skip-bad",
            )
        manifest = old
        if records:
            split = deal_cases(
                old.split,
                {case.case_id: _patient_of(case, old.layout) for case in old.cases},
                {case_id: record.patient_id for case_id, record in records.items()},
                seed=old.split_seed,
            )
            rules = Counter(old.patient_rules)
            rules.update(dataset.patient_rules[case_id] for case_id in records)
            manifest = remake(
                old, cases=[*old.cases, *records.values()], split=split, versions=versions(), patient_rules=dict(rules)
            )
            write_store(store_dir, manifest)
        still_out = [problem for problem in out if problem.case_id not in {*there, *records, *bad}]
        write_quarantine(store_dir, sorted([*still_out, *problems], key=lambda problem: problem.case_id))
    return Appended(manifest, tuple(sorted(records)), tuple(sorted(files.case_id for files in known)), bad)


def deal_cases(
    split: Split, patients: Mapping[str, str], new: Mapping[str, str], *, seed: int
) -> Dict[str, Tuple[str, ...]]:
    """The split with the new cases in it. `patients` and `new` map case id -> patient id.

    Nothing moves. A case of a known patient goes where that patient is. The other patients are dealt as `split_cases`
    deals: in the order of SHA-256 of "seed:patient", as many to each split as brings it nearest to the share of the
    patients that it had; a split that had none gets none.
    """
    place = {patients[case_id]: name for name in SPLITS for case_id in split[name]}
    have = Counter(place.values())
    fresh = sorted(set(new.values()) - set(place), key=lambda one: hashlib.sha256(f"{seed}:{one}".encode()).hexdigest())
    counts, total = dict(have), len(place) + len(fresh)
    for _ in fresh:
        behind = max(have, key=lambda name: (have[name] * total / len(place) - counts[name], -SPLITS.index(name)))
        counts[behind] += 1
    dealt = (name for name in SPLITS for _ in range(counts.get(name, 0) - have[name]))
    place.update(zip(fresh, dealt))
    return {
        name: tuple(sorted([*split[name], *(case_id for case_id, patient in new.items() if place[patient] == name)]))
        for name in SPLITS
    }


# --- Private helpers ---


def _patient_of(case: CaseRecord, layout: str) -> str:
    """As recorded, or by its name where the record is from before names were read in every layout."""
    return case.patient_id if case.patient_id != case.case_id else patient_of(case.case_id, layout)[0]


def _refuse_other_patients(store_dir: Path, manifest: Manifest, table: Mapping[str, str]) -> None:
    """Raise, naming every one, where a table gives a case of the store another patient: its split is by the old one."""
    problems = [
        f"case {case.case_id} must be of the patient that store {store_dir} has, {_patient_of(case, manifest.layout)},"
        f" got {table[case.case_id]}; prepare a new store with this table"
        for case in manifest.cases
        if table.get(case.case_id, case.patient_id) not in (case.patient_id, _patient_of(case, manifest.layout))
    ]
    if problems:
        raise InputError(*problems)


def _refuse_other_kind(store_dir: Path, manifest: Manifest, dataset: Dataset) -> None:
    """Raise, naming every difference, unless the data set's channels and labels mean what the store's do."""
    labels = labels_in_use(dataset.layout, dataset.labels, manifest.labels)
    found = {"channels": dataset.channels, "labels": labels, "regions": regions_of(labels)}
    problems = [
        f"data set {dataset.folder} must have the {what} of store {store_dir}, {getattr(manifest, what)}, got"
        f" {value}; prepare a store of its own"
        for what, value in found.items()
        if getattr(manifest, what) != value
    ]
    if problems:
        raise InputError(*problems)


def _refuse_changed(store: Store, known: Sequence[CaseFiles]) -> None:
    """Raise, naming every one, where a case that the store has was made from other files."""
    problems = []
    with bar("compare", total=len(known)) as advance:
        for files in known:
            paths = [*files.images, *([files.label] if files.label else [])]
            sources = store.case(files.case_id).sources
            if len(paths) != len(sources) or not all(map(_is_same, paths, sources)):
                problems.append(
                    f"case {files.case_id} must be the one that store {store.folder} has, got other files under the"
                    " same id; give it another id, or prepare a new store"
                )
            advance()
    if problems:
        raise InputError(*problems)


def _refuse_stems(store: Store, new: Sequence[CaseFiles]) -> None:
    """Raise, naming every one, where a new case's files would replace arrays that entries of other ids share."""
    entry_of = {record.stem: record.case_id for record in store.manifest.cases} if new else {}
    problems = [
        f"case {files.case_id} must have an id that names no arrays of store {store.folder}, got that of the arrays of"
        f" case {entry_of[files.case_id]}; give it another id, or prepare a new store"
        for files in new
        if files.case_id in entry_of
    ]
    if problems:
        raise InputError(*problems)


def _is_same(path: Path, source: SourceFile) -> bool:
    """By content: the data set may be another folder than the one the store was made from."""
    return path.stat().st_size == source.size_bytes and file_sha256(path) == source.sha256

"""Makes a store of a data set, and adds the new cases of another one to it.

A case that is whole, and of the files that it was made from, is kept; any other is made. Then the
manifest is written, in which known cases stay in their parts of the split.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from cpu3d.data.cases.case import check_annotated
from cpu3d.data.cases.kinds import decide, in_window, with_windows
from cpu3d.data.cases.notes import mixed_orientation
from cpu3d.data.datasets.dataset import Dataset, Problems
from cpu3d.data.datasets.layouts import ignoring, labels_in_use, regions_in
from cpu3d.data.datasets.patients import TABLE, read_patients
from cpu3d.data.files.reader import Reader
from cpu3d.data.manifest import CaseRecord, Manifest, StoreSettings, make_manifest, remake
from cpu3d.data.normalise import if_any_differs
from cpu3d.data.split import SplitCase
from cpu3d.data.store import Store, write_store
from cpu3d.data.stores.convert import convert_all, header_problems, same_files
from cpu3d.data.stores.folder import (
    begun_normalisation,
    note_normalisation,
    read_quarantine,
    write_quarantine,
)
from cpu3d.data.stores.splits import Splitting, deal_cases
from cpu3d.errors import InputError, raise_if_any
from cpu3d.util.records import count, versions


class Grown(NamedTuple):
    """A store after `grow`: its manifest, and ids of cases of the data set."""

    manifest: Manifest
    new: Tuple[str, ...]
    known: Tuple[str, ...]  # in the store already
    bad: Tuple[str, ...]  # left out


def make_store(
    store_dir: Path,
    dataset: Dataset,
    settings: StoreSettings,
    splitting: Splitting,
    *,
    workers: int,
    skip_bad: bool,
) -> Manifest:
    """Convert what an unfinished store lacks of the data set, and write its manifest. The caller
    holds the store's lock.

    Raises InputError for bad cases unless `skip_bad`, and if a patient or an image would be in two
    parts of the split; OSError and KeyboardInterrupt as `convert_all`. The same call continues."""
    kinds = begun_normalisation(store_dir)
    if kinds is None:
        train = splitting.split(_patients_of(dataset.cases))["train"]
        kinds = decide(dataset, train, settings.normalise, workers)
        note_normalisation(store_dir, kinds)
    dataset = replace(dataset, normalisation=kinds)
    records, bad = _converted(store_dir, dataset, settings, workers, [])
    bad.update(dataset.problems)
    if not skip_bad:
        refuse_bad_cases(bad, f"{count(records, 'good case')} kept in {store_dir}")
    manifest = _first_manifest(store_dir, dataset, settings, splitting, records)
    write_quarantine(store_dir, bad)
    write_store(store_dir, manifest)
    return manifest


def grow(
    store: Store,
    dataset: Dataset,
    *,
    workers: int,
    skip_bad: bool,
    patients: Optional[Path] = None,
) -> Grown:
    """Add the cases of a data set that a finished store lacks, and write its manifest. `patients`
    is the table that the data set's patients are from. The caller holds the store's lock.

    Raises InputError, and adds nothing, as `check_known`, for given folds, a missing table and bad
    cases unless `skip_bad`; OSError and KeyboardInterrupt as `convert_all`. The same call
    continues."""
    old = store.manifest
    folder = store.folder
    dataset = _fitting(dataset, old, folder)
    check_known(store, dataset, patients)
    own = _patients_of(old.cases)
    known = tuple(files.case_id for files in dataset.cases if files.case_id in own)
    new = tuple(files for files in dataset.cases if files.case_id not in own)
    problems = {name: lines for name, lines in dataset.problems.items() if name not in own}
    if new and old.folds:
        rule = f"store {folder} must have a drawn split to take new cases"
        todo = "prepare a new store with --splits that name all cases"
        raise InputError(f"{rule}, got {len(old.folds)} given folds; {todo}")
    if new and patients is None and TABLE in old.patient_rules:
        rule = f"--patients must be given, as store {folder} has its patients from a table"
        raise InputError(f"{rule}, got none; name one")
    dataset = with_checked_headers(replace(dataset, cases=new, problems=problems), skip_bad)
    added, bad = _converted(folder, dataset, old.settings, workers, old.cases)
    bad.update(dataset.problems)
    if not skip_bad:
        refuse_bad_cases(bad, f"{count(added, 'good case')} kept in {folder}")
    left_out = {**read_quarantine(folder), **bad}
    write_quarantine(folder, {name: left_out[name] for name in left_out if name not in added})
    manifest = old
    if added:
        rules = Counter(dataset.patient_rules[case_id] for case_id in added)
        manifest = remake(
            old,
            cases=[*old.cases, *added.values()],
            split=deal_cases(old.split, own, _patients_of(added.values()), seed=old.split_seed),
            versions=versions(),
            patient_rules=dict(Counter(old.patient_rules) + rules),
        )
        write_store(folder, manifest)
    return Grown(manifest, tuple(sorted(added)), known, tuple(sorted(bad)))


def check_known(store: Store, dataset: Dataset, patients: Optional[Path]) -> None:
    """Raise InputError for files of the store that are lost or damaged, for cases of the data set
    that have other files than those of the store, and for other patients in the table."""
    store.check(store.manifest.cases)
    name = f"store {store.folder}"
    problems = []
    sources = {record.case_id: record.sources for record in store.manifest.cases}
    for files in dataset.cases:
        if files.case_id in sources and not same_files(files.paths, sources[files.case_id]):
            rule = f"case {files.case_id} must be the one of {name}"
            names = ", ".join(path.name for path in files.paths)
            todo = "bring back those it was made from, or prepare a new store"
            problems.append(f"{rule}, got other files, {names}; {todo}")
    table = {} if patients is None else read_patients(patients, ())
    for record in store.manifest.cases:
        patient = table.get(record.case_id, record.patient_id)
        if patient != record.patient_id:
            rule = f"case {record.case_id} must be of the patient that {name} has"
            got = f"{record.patient_id}, got {patient}"
            problems.append(f"{rule}, {got}; prepare a new store with this table")
    raise_if_any(problems)


def with_checked_headers(dataset: Dataset, skip_bad: bool) -> Dataset:
    """The data set without the cases whose headers show that they cannot be used. Raises InputError
    for them, and for cases without a file, unless `skip_bad`: it is found before hours of
    conversion."""
    problems = dict(dataset.problems)
    for files in dataset.cases:
        wrong = header_problems(files, dataset.channels)
        if wrong:
            problems[files.case_id] = wrong
    if not skip_bad:
        refuse_bad_cases(problems, "nothing was converted")
    cases = tuple(files for files in dataset.cases if files.case_id not in problems)
    return replace(dataset, cases=cases, problems=problems)


def refuse_bad_cases(problems: Problems, kept: str) -> None:
    """Raise InputError with all problems of a data set's cases, if any; `kept` are words for the
    cases that stay."""
    if not problems:
        return
    lines = [problem for case_id in sorted(problems) for problem in problems[case_id]]
    rule = f"the data set must be without bad cases, got {count(problems, 'bad case')}"
    todo = "repair the bad cases and run again, or leave them out with --skip-bad"
    raise InputError(*lines, f"{rule}; {kept}: {todo}")


# --- Private helpers ---


def _patients_of(cases: Iterable[SplitCase]) -> Dict[str, str]:
    return {case.case_id: case.patient_id for case in cases}


def _fitting(dataset: Dataset, manifest: Manifest, store_dir: Path) -> Dataset:
    """The data set with the channels, by name, the labels and the normalisation that the store has,
    of which the same is ignored, and which has the store's regions whatever its list says. Raises
    InputError for other channels and labels."""
    dataset = dataset.with_channels(manifest.channels)
    dataset = replace(dataset, regions=manifest.regions, class_order=())
    labels = labels_in_use(dataset.layout, dataset.labels, manifest.labels)
    if manifest.ignore is not None and manifest.ignore in labels:
        dataset = ignoring(dataset, manifest.ignore)
    for name, value in (("labels", labels), ("ignore", dataset.ignore)):
        expected = getattr(manifest, name)
        if value != expected:
            rule = f"data set {dataset.folder} must have the {name} of store {store_dir}"
            raise InputError(f"{rule}, {expected}, got {value}; prepare a separate store")
    return replace(dataset, labels=labels, normalisation=manifest.normalisation)


def _converted(
    store_dir: Path,
    dataset: Dataset,
    settings: StoreSettings,
    workers: int,
    others: Sequence[CaseRecord],
) -> Tuple[Dict[str, CaseRecord], Problems]:
    """The records of the data set's cases that are good beside `others`, and the problems of the
    bad ones."""
    made, bad = convert_all(dataset, store_dir, settings, workers)
    mixed = mixed_orientation(made.values(), others)
    good = {case_id: made[case_id] for case_id in made if case_id not in mixed}
    return good, {**bad, **mixed}


def _first_manifest(
    store_dir: Path,
    dataset: Dataset,
    settings: StoreSettings,
    splitting: Splitting,
    records: Dict[str, CaseRecord],
) -> Manifest:
    """The manifest of a new store, with the windows of its CT and the boxes that follow from them.
    Raises InputError for cases with nothing annotated in these."""
    patients = _patients_of(records.values())
    split = splitting.split(patients)
    training = [records[name] for name in split["train"] or records]
    windows = with_windows(dataset.normalisation, dataset.channels, training)
    cases = _in_windows(replace(dataset, normalisation=windows), records, store_dir)
    codes = set(dataset.named_codes)
    for record in cases:
        codes.update(record.label_voxels)
        if record.resampled_from:  # also those that are too small for its voxels
            codes.update(record.resampled_from.label_voxels)
    if dataset.ignore is not None:
        codes.add(dataset.ignore)  # it keeps its name, also if no label holds it
    labels = labels_in_use(dataset.layout, dataset.labels, codes)
    regions = regions_in(dataset, labels)
    return make_manifest(
        name=dataset.name,
        layout=dataset.layout,
        channels=dataset.channels,
        labels=labels,
        regions=regions,
        paint=tuple(zip(regions, dataset.class_order)),
        ignore=dataset.ignore,
        split=split,
        split_seed=splitting.seed,
        shares=splitting.shares,
        folds=splitting.folds_of(patients),
        cases=cases,
        versions=versions(),
        patient_rules=dict(Counter(dataset.patient_rules[case_id] for case_id in records)),
        settings=settings,
        normalisation=if_any_differs(windows),
    )


def _in_windows(
    dataset: Dataset, records: Dict[str, CaseRecord], store_dir: Path
) -> List[CaseRecord]:
    """The records with the boxes that follow from the windows of CT. Raises InputError for cases
    with nothing annotated in theirs."""
    if all(each.low is None for each in dataset.normalisation):
        return list(records.values())
    label_of = {files.case_id: files.label for files in dataset.cases}
    reader = Reader(store_dir, "pread")
    cases = []
    problems: List[str] = []
    for case_id, record in records.items():
        image = reader.array(record, "x")
        label = reader.array(record, "y") if record.has_label else None
        record = in_window(record, image, label, dataset.normalisation, dataset.ignore)
        cases.append(record)
        if label is None or dataset.ignore is None:
            continue
        try:
            in_box = label[record.box.slices(record.shape)]
            name = f"label {label_of[case_id]}"
            check_annotated(in_box, dataset.ignore, name)
        except InputError as error:
            problems += error.problems
    raise_if_any(problems)
    return cases

"""Print the content of a store, check it, add cases to it, make lost files again.

Examples: ./run.sh store info --store store
          ./run.sh store verify --store store
          ./run.sh store append --store store --dataset new_cases

The cases of the store keep their split. `append` also makes those cases of the data set again whose
files the store has lost. It can be interrupted: the same command continues.
"""

import functools
import itertools
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Container, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from cpu3d.data.cases.notes import case_notes, mixed_orientation, note_lines, unit_notes
from cpu3d.data.datasets.dataset import CaseFiles, Dataset, Problems, regions_in_words
from cpu3d.data.datasets.layouts import read_dataset
from cpu3d.data.datasets.patients import TABLE, read_patients
from cpu3d.data.files.reader import Reader
from cpu3d.data.labels import paint_by_order, painting_in_words
from cpu3d.data.manifest import CaseList, Manifest, case_list, remake
from cpu3d.data.split import SPLITS
from cpu3d.data.store import Store, open_store, write_store
from cpu3d.data.stores.convert import Job, convert_all, other_files, refuse_bad_cases, same_sources
from cpu3d.data.stores.finished import still_lost
from cpu3d.data.stores.folder import note_growth, read_quarantine, settings_of, write_quarantine
from cpu3d.data.stores.prepare import (
    PATIENTS_HELP,
    SKIP_BAD_HELP,
    WORKERS_HELP,
    print_summary,
)
from cpu3d.data.stores.repair import Repaired, fitting, open_mended, repair
from cpu3d.data.stores.splits import add_to_folds, deal_cases, split_sizes
from cpu3d.data.stores.store_decisions import decisions_of
from cpu3d.errors import InputError, raise_if_any
from cpu3d.util.atomic import remove_partials, writable_folder
from cpu3d.util.child import KILLED, run_jobs, worker_count
from cpu3d.util.lock import locked
from cpu3d.util.progress import bar, say
from cpu3d.util.records import count, versions
from memory_estimator.common.schema import option


@dataclass(frozen=True)
class Info:
    """Print the content of a store, and how this host would read it."""

    store: Path = option(help="store that `prepare` has written", metavar="DIR")
    json: bool = option(False, help="print what was decided for the data set as JSON")


@dataclass(frozen=True)
class Verify:
    """Compare every byte of every file with the records."""

    store: Path = option(help="store that `prepare` has written", metavar="DIR")
    workers: Optional[int] = option(None, WORKERS_HELP, at_least=1)


@dataclass(frozen=True)
class Append:
    """Add a data set's new cases, with the settings, the regions and the ignored code of the store,
    and make lost files again."""

    store: Path = option(help="finished store", metavar="DIR")
    dataset: Path = option(help="folder as for `prepare`", metavar="DIR")
    skip_bad: bool = option(False, SKIP_BAD_HELP)
    patients: Optional[Path] = option(None, PATIENTS_HELP, metavar="FILE")
    workers: Optional[int] = option(None, WORKERS_HELP, at_least=1)


def run_info(options: Info) -> int:
    if not options.json:
        print_summary(options.store)
        return 0
    store = open_store(options.store)
    content = {
        "store": str(store.folder),
        "name": store.manifest.name,
        "decided": [row._asdict() for row in decisions_of(store)],
    }
    print(json.dumps(content, indent=1))
    return 0


def run_verify(options: Verify) -> int:
    raise_if_any(verify(options.store, workers=options.workers))
    cases = count(open_store(options.store).manifest.cases, "case")
    say(f"Store {options.store} is whole: {cases}", stderr=False)
    return 0


def run_append(options: Append) -> int:
    folder = options.store
    done = append(
        folder,
        options.dataset,
        workers=options.workers,
        skip_bad=options.skip_bad,
        patients=options.patients,
    )
    before = done.before
    after = done.manifest
    known = count(done.known, "case")
    lines = [f"Store {folder}: {count(done.new, 'new case')}, {known} it had already, skipped"]
    if done.repaired:
        names = ", ".join(done.repaired)
        repaired = count(done.repaired, "case")
        lines.append(f"  made again {repaired} whose files were lost or damaged: {names}")
    if done.bad:
        lines.append(f"  left out {count(done.bad, 'bad case')}, see {folder / 'quarantine.jsonl'}")
    if done.new:
        sizes = f"{split_sizes(before)} before, {split_sizes(after)} now"
        hashes = f"{before.split_hash} before, {after.split_hash} now"
        lines.append(f"  split    {sizes}; no old case has moved")
        lines.append(f"  hash     {hashes}: older runs refuse the store")
        if after.folds:
            way = "train on cases of new patients, and none holds them out"
            lines.append(f"  folds    all {len(after.folds)} {way}")
    added = case_list(after.cases).chosen(done.new)
    notes = {}
    of_unit = unit_notes(after.cases, after.channels)
    for record in added:
        notes[record.case_id] = [
            *case_notes(record, after.channels, after.ignore),
            *of_unit.get(record.case_id, ()),
        ]
    say(*lines, *note_lines(notes), stderr=False)
    say(*still_lost(folder, options.dataset, done.elsewhere))
    return 0


ACTIONS = {"info": (Info, run_info), "verify": (Verify, run_verify), "append": (Append, run_append)}


def actions() -> Dict[str, str]:
    """Action -> its line of help."""
    return {name: str(options.__doc__) for name, (options, _) in ACTIONS.items()}


def action(name: str) -> SimpleNamespace:
    """An action as a command."""
    options, run = ACTIONS[name]
    return SimpleNamespace(OPTIONS=(options,), run=run, __doc__=options.__doc__)


def verify(store_dir: Union[str, Path], *, workers: Optional[int] = None) -> Tuple[str, ...]:
    """All problems of a store's arrays, whose length, header and SHA-256 are compared with their
    records. Raises InputError as `open_store`."""
    store = open_store(store_dir)
    problems: List[str] = []
    check = functools.partial(Reader(store.folder, "pread").problems, contents=True)
    with bar("verify", total=len(store.manifest.cases)) as advance:
        for record, damage in run_jobs(check, store.manifest.cases, worker_count(workers)):
            if damage is KILLED:
                rule = f"case {record.case_id} must fit into memory"
                problems.append(f"{rule}, got a killed process; use fewer --workers")
            else:
                problems += damage
            advance()
    return tuple(problems)


class Appended(NamedTuple):
    """The result of `append`: the store's manifest before and after, and ids of the data set."""

    before: Manifest
    manifest: Manifest
    new: Tuple[str, ...]
    known: Tuple[str, ...]  # in the store already, and whole
    repaired: Tuple[str, ...]  # in the store already, with files that were lost and are there again
    bad: Tuple[str, ...]  # left out
    elsewhere: Tuple[str, ...]  # in the store, with files that are lost, and not in the data set


def append(
    store_dir: Union[str, Path],
    dataset_dir: Union[str, Path],
    *,
    workers: Optional[int] = None,
    skip_bad: bool = False,
    patients: Optional[Path] = None,
) -> Appended:
    """Add the cases of a data set that a finished store does not have, and make those again whose
    files it has lost.

    They are made with the store's own settings, regions and code to be ignored. The split of the
    old cases stays, new ones are dealt by `deal_cases`, or in a store with given folds by
    `add_to_folds`. The manifest is replaced at the end; the same call continues an interrupted one.
    Raises InputError, and adds nothing, if channels or labels differ, a known id has other files, a
    lost case cannot be made again, a patient or identical images would be in two splits, and for
    bad cases unless `skip_bad`; OSError and KeyboardInterrupt as `prepare`.
    """
    workers = worker_count(workers)
    store_dir = Path(store_dir)
    settings = settings_of(store_dir)
    writable_folder(store_dir, "store")
    with locked(store_dir, "store"):
        remove_partials(store_dir, store_dir / "cases")
        store = open_mended(store_dir)
        found = read_dataset(dataset_dir, patients, labels=store.manifest.labels)
        say(*found.warnings)
        say(*_note_on_regions(found, store))
        dataset = fitting(found, store)
        mended = repair(store, dataset, settings, workers)
        store = mended.store
        in_store = {case_id for name in SPLITS for case_id in store.manifest.split[name]}
        known = [files for files in dataset.cases if files.case_id in in_store]
        new = [files for files in dataset.cases if files.case_id not in in_store]
        _refuse_clashes(mended, known, new, patients)
        jobs = [Job(files) for files in new]
        records, bad = convert_all(jobs, dataset, store_dir, settings, workers)
        bad.update(item for item in dataset.problems.items() if item[0] not in in_store)
        mixed = mixed_orientation(records, store.manifest.cases)
        records = records.without(mixed)
        bad.update(mixed)
        if not skip_bad:
            refuse_bad_cases(bad, "nothing was appended")
        added = tuple(case.case_id for case in records.known)
        manifest = store.manifest
        if added:
            note_growth(store_dir)
            manifest = _grown(store, records, dataset)
            write_store(store_dir, manifest)
        _note_bad(store_dir, bad, known={*in_store, *added})
    whole = [files.case_id for files in known if files.case_id not in mended.case_ids]
    return Appended(
        before=store.manifest,
        manifest=manifest,
        new=added,
        known=tuple(sorted(whole)),
        repaired=mended.case_ids,
        bad=tuple(sorted(bad)),
        elsewhere=mended.elsewhere,
    )


def _refuse_clashes(
    mended: Repaired,
    known: Sequence[CaseFiles],
    new: Sequence[CaseFiles],
    patients: Optional[Path],
) -> None:
    """Raise InputError for lost cases that could not be made again, for known ones with other files
    than the store was made from, and for new ones whose table has other patients."""
    problems = mended.lines()
    problems += _clashes(mended.store, known, but=mended.problems)
    if new:
        problems += _patient_clashes(mended.store, patients)
    if problems:
        again = count(mended.case_ids, "lost case")
        raise InputError(*problems, f"nothing was appended; {again} made again")


def _note_bad(store_dir: Path, bad: Problems, known: Container[str]) -> None:
    """Note the cases that are left out, those of earlier calls too, but for the `known` ones, which
    are in the store by now."""
    before = read_quarantine(store_dir)
    still_out = {name: reasons for name, reasons in before.items() if name not in known}
    write_quarantine(store_dir, {**still_out, **bad})


def _note_on_regions(dataset: Dataset, store: Store) -> List[str]:
    """A note if the list of a data set names other regions than the store has, or paints them in
    another order; else none."""
    regions = store.manifest.regions
    paint = store.manifest.paint
    if dataset.regions is None:
        return []
    if dataset.regions != regions:
        own = regions_in_words(dataset.regions)
        rule = f"regions are those of store {store.folder}, {regions_in_words(regions)}"
        return [f"note: {rule}, and not those of {dataset.folder}, {own}"]
    own_paint = paint_by_order(dataset.regions, dataset.class_order)
    if own_paint == paint:
        return []
    own = painting_in_words(dataset.regions, own_paint)
    rule = f"regions are painted as in store {store.folder}, {painting_in_words(regions, paint)}"
    return [f"note: {rule}, and not as in {dataset.folder}, {own}"]


def _grown(store: Store, records: CaseList, dataset: Dataset) -> Manifest:
    """The manifest with new cases dealt into its split."""
    old = store.manifest
    own = {case.case_id: case.patient_id for case in case_list(old.cases).known}
    added = {case.case_id: case.patient_id for case in records.known}
    rules = Counter(dataset.patient_rules[case_id] for case_id in added)
    if old.folds:
        split, folds = add_to_folds(old.split, old.folds, own, added)
    else:
        split = deal_cases(old.split, own, added, seed=old.split_seed)
        folds = ()
    return remake(
        old,
        cases=CaseList.collected(itertools.chain(old.cases, records), store.folder),
        split=split,
        folds=folds,
        versions=versions(),
        patient_rules=dict(Counter(old.patient_rules) + rules),
    )


def _clashes(store: Store, known: Sequence[CaseFiles], but: Container[str]) -> List[str]:
    """A line for each known case that has other files than those it was made from; but for those of
    `but`."""
    return [
        other_files(store.folder, files)
        for files in known
        if files.case_id not in but and not same_sources(files, store.case(files.case_id))
    ]


def _patient_clashes(store: Store, patients: Optional[Path]) -> List[str]:
    """A line for each case whose patient in the table `patients` is another, or for a table that is
    missing."""
    old = store.manifest
    if patients is None:
        if TABLE not in old.patient_rules:
            return []
        rule = f"--patients must be given, as store {store.folder} has its patients from a table"
        return [f"{rule}, got none; name one"]
    table = read_patients(patients, ())
    problems = []
    for case in case_list(old.cases).known:
        patient = table.get(case.case_id, case.patient_id)
        if patient != case.patient_id:
            rule = f"case {case.case_id} must be of the patient that store {store.folder} has"
            todo = "prepare a new store with this table"
            problems.append(f"{rule}, {case.patient_id}, got {patient}; {todo}")
    return problems

"""Print the content of a store, check it, add cases to it.

Examples: ./run.sh store info store
          ./run.sh store verify store
          ./run.sh store append store --dataset new_cases

The cases of the store keep their split. `append` can be interrupted: the same command continues.
"""

import functools
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from cpu3d.data.files.reader import Reader
from cpu3d.data.records import CaseRecord, Manifest, remake
from cpu3d.data.store import Store, open_store, write_store
from cpu3d.data.stores import prepare
from cpu3d.data.stores.case import case_notes, mixed_orientation, note_lines
from cpu3d.data.stores.layouts import CaseFiles, Dataset, labels_in_use, read_dataset, regions_of
from cpu3d.data.stores.prepare import PATIENTS_HELP, SKIP_BAD_HELP, WORKERS_HELP, split_sizes
from cpu3d.data.stores.splits import TABLE, deal_cases, read_patients
from cpu3d.errors import InputError, refuse
from cpu3d.util.atomic import remove_partials, writable_folder
from cpu3d.util.child import KILLED, run_jobs, worker_count
from cpu3d.util.lock import locked
from cpu3d.util.progress import bar, say
from cpu3d.util.records import count, versions
from memory_estimator.common.schema import option


@dataclass(frozen=True)
class Info:
    """Print the content of a store, and how this host would read it."""

    store: Path = option(help="folder made by `prepare`", positional=True)


@dataclass(frozen=True)
class Verify:
    """Compare every byte of every file with the records."""

    store: Path = option(help="folder made by `prepare`", positional=True)
    workers: Optional[int] = option(None, WORKERS_HELP, at_least=1)


@dataclass(frozen=True)
class Append:
    """Add a data set's new cases, prepared as the store's own cases."""

    store: Path = option(help="finished store", positional=True)
    dataset: Path = option(help="folder as for `prepare`")
    skip_bad: bool = option(False, SKIP_BAD_HELP)
    patients: Optional[Path] = option(None, PATIENTS_HELP, metavar="FILE")
    workers: Optional[int] = option(None, WORKERS_HELP, at_least=1)


def run_info(options: Info) -> int:
    prepare.print_summary(options.store)
    return 0


def run_verify(options: Verify) -> int:
    refuse(verify(options.store, workers=options.workers))
    say(f"Store {options.store} is whole: {count(open_store(options.store).manifest.cases, 'case')}", stderr=False)
    return 0


def run_append(options: Append) -> int:
    folder, before = options.store, open_store(options.store).manifest
    done = append(
        folder, options.dataset, workers=options.workers, skip_bad=options.skip_bad, patients=options.patients
    )
    lines = [f"Store {folder}: {count(done.new, 'new case')}, {count(done.known, 'case')} it had already, skipped"]
    if done.bad:
        lines.append(f"  left out {count(done.bad, 'bad case')}, see {folder / 'quarantine.jsonl'}")
    if done.new:
        lines += [
            f"  split    {split_sizes(before)} before, {split_sizes(done.manifest)} now; no old case has moved",
            f"  hash     {before.split_hash} before, {done.manifest.split_hash} now: older runs refuse the store",
        ]
    new = set(done.new)
    added = [record for record in done.manifest.cases if record.case_id in new]
    notes = {record.case_id: case_notes(record, done.manifest.channels) for record in added}
    say(*lines, *note_lines(notes), stderr=False)
    return 0


ACTIONS = {"info": (Info, run_info), "verify": (Verify, run_verify), "append": (Append, run_append)}


def actions() -> Dict[str, str]:
    """Action -> its line of help."""
    return {name: options.__doc__ for name, (options, _) in ACTIONS.items()}


def action(name: str) -> SimpleNamespace:
    """An action as a command."""
    options, run = ACTIONS[name]
    return SimpleNamespace(OPTIONS=(options,), run=run, __doc__=options.__doc__)


def verify(store_dir: Union[str, Path], *, workers: Optional[int] = None) -> Tuple[str, ...]:
    """All problems of a store's arrays, whose length, header and SHA-256 are compared with their records. Raises
    InputError as `open_store`."""
    store, problems = open_store(store_dir), []
    check = functools.partial(Reader(store.folder, "pread").problems, contents=True)
    with bar("verify", total=len(store.manifest.cases)) as advance:
        for record, damage in run_jobs(check, store.manifest.cases, worker_count(workers)):
            killed = f"case {record.case_id} must fit into memory, got a killed process; use fewer --workers"
            problems += [killed] if damage is KILLED else damage
            advance()
    return tuple(problems)


class Appended(NamedTuple):
    """The result of `append`: the store's manifest, and the ids that were new, already in the store, and left out."""

    manifest: Manifest
    new: Tuple[str, ...]
    known: Tuple[str, ...]
    bad: Tuple[str, ...]


def append(
    store_dir: Union[str, Path],
    dataset_dir: Union[str, Path],
    *,
    workers: Optional[int] = None,
    skip_bad: bool = False,
    patients: Optional[Path] = None,
) -> Appended:
    """Add the cases of a data set that a finished store does not have.

    They are made with the store's own settings. The split of the old cases stays, new ones are dealt by `deal_cases`.
    The manifest is replaced at the end; the same call continues an interrupted one. Raises InputError, and leaves the
    store as it was, if channels or labels differ, a known id has other files, a patient or identical images would be in
    two splits, and for bad cases unless `skip_bad`; OSError and KeyboardInterrupt as `prepare`.
    """
    workers, store_dir = worker_count(workers), Path(store_dir)
    old, settings = open_store(store_dir).manifest, prepare.settings_of(store_dir)
    dataset = read_dataset(dataset_dir, patients)
    labels = labels_in_use(dataset.layout, dataset.labels, old.labels)
    for name, value in (("channels", dataset.channels), ("labels", labels), ("regions", regions_of(labels))):
        if getattr(old, name) != value:
            rule = f"data set {dataset.folder} must have the {name} of store {store_dir}, {getattr(old, name)}"
            raise InputError(f"{rule}, got {value}; prepare a separate store")
    writable_folder(store_dir, "store")
    with locked(store_dir, "store"):
        remove_partials(store_dir, store_dir / "cases")
        store = open_store(store_dir)
        in_store = {case.case_id for case in store.manifest.cases}
        known = [files for files in dataset.cases if files.case_id in in_store]
        new = [files for files in dataset.cases if files.case_id not in in_store]
        refuse([*_clashes(store, known), *(_patient_clashes(store, patients) if new else ())])
        records, problems = prepare.convert_all(new, replace(dataset, labels=labels), store_dir, settings, workers)
        problems.update(item for item in dataset.problems.items() if item[0] not in in_store)
        mixed = mixed_orientation(records.values(), store.manifest.cases)
        records = {case_id: record for case_id, record in records.items() if case_id not in mixed}
        problems.update(mixed)
        if not skip_bad:
            prepare.refuse_bad_cases(problems, "nothing was appended")
        manifest = _grown(store.manifest, records, dataset) if records else store.manifest
        if records:
            write_store(store_dir, manifest)
        before = prepare.read_quarantine(store_dir)
        still_out = {case_id: reasons for case_id, reasons in before.items() if case_id not in {*in_store, *records}}
        prepare.write_quarantine(store_dir, {**still_out, **problems})
    known_ids = [files.case_id for files in known]
    return Appended(manifest, *(tuple(sorted(ids)) for ids in (records, known_ids, problems)))


def _grown(old: Manifest, records: Dict[str, CaseRecord], dataset: Dataset) -> Manifest:
    """The manifest with new cases dealt into its split."""
    own = {case.case_id: case.patient_id for case in old.cases}
    added = {case_id: record.patient_id for case_id, record in records.items()}
    return remake(
        old,
        cases=[*old.cases, *records.values()],
        split=deal_cases(old.split, own, added, seed=old.split_seed),
        versions=versions(),
        patient_rules=dict(Counter(old.patient_rules) + Counter(dataset.patient_rules[case_id] for case_id in records)),
    )


def _clashes(store: Store, known: Sequence[CaseFiles]) -> List[str]:
    """A line for each known case that has other files than those it was made from."""
    rule, todo = f"must be the one of store {store.folder}", "give it another id, or prepare a new store"
    return [
        f"case {files.case_id} {rule}, got other files, {', '.join(path.name for path in files.paths)}; {todo}"
        for files in known
        if not prepare.same_sources(files, store.case(files.case_id))
    ]


def _patient_clashes(store: Store, patients: Optional[Path]) -> List[str]:
    """A line for each case whose patient in the table `patients` is another, or for a table that is missing."""
    old = store.manifest
    if TABLE in old.patient_rules and patients is None:
        return [f"--patients must be given, as store {store.folder} has its patients from a table, got none; name one"]
    problems, table = [], read_patients(patients, ()) if patients is not None else {}
    for case in old.cases if table else ():
        if table.get(case.case_id, case.patient_id) != case.patient_id:
            rule = f"case {case.case_id} must be of the patient that store {store.folder} has, {case.patient_id}"
            problems.append(f"{rule}, got {table[case.case_id]}; prepare a new store with this table")
    return problems

"""Print the content of a store, check it, add cases to it, make lost files again.

Examples: ./run.sh store info --store store
          ./run.sh store verify --store store
          ./run.sh store append --store store --dataset new_cases

The cases of the store keep their split. `append` also makes those cases of the data set again whose
files the store has lost. It can be interrupted: the same command continues.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Dict, List, Optional, Tuple, Union

from cpu3d.data.cases.notes import case_notes, note_lines, unit_notes
from cpu3d.data.datasets.dataset import Dataset, regions_in_words
from cpu3d.data.datasets.layouts import read_dataset
from cpu3d.data.files.reader import Reader
from cpu3d.data.manifest import Manifest
from cpu3d.data.store import open_store, read_manifest
from cpu3d.data.stores.prepare import (
    PATIENTS_HELP,
    SKIP_BAD_HELP,
    WORKERS_HELP,
    print_summary,
)
from cpu3d.data.stores.splits import split_sizes
from cpu3d.data.stores.store_decisions import decisions_of
from cpu3d.data.stores.update import (
    Update,
    Updated,
    fitting,
    still_lost,
    update,
    with_checked_headers,
)
from cpu3d.errors import raise_if_any
from cpu3d.util.atomic import remove_partials, writable_folder
from cpu3d.util.child import KILLED, run_jobs, worker_count
from cpu3d.util.lock import locked
from cpu3d.util.progress import bar, say
from cpu3d.util.records import count
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
    before = done.before or done.manifest
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
    notes = {}
    of_unit = unit_notes(after.cases, after.channels)
    for record in after.cases:
        if record.case_id in done.new:
            own = case_notes(record, after.channels, after.ignore)
            notes[record.case_id] = [*own, *of_unit.get(record.case_id, ())]
    say(*lines, *note_lines(notes), stderr=False)
    say(*still_lost(done, folder, options.dataset))
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


def append(
    store_dir: Union[str, Path],
    dataset_dir: Union[str, Path],
    *,
    workers: Optional[int] = None,
    skip_bad: bool = False,
    patients: Optional[Path] = None,
) -> Updated:
    """Add the cases of a data set that a finished store does not have, and make those again whose
    files it has lost.

    They are made with the store's own settings, regions and code to be ignored. The split of the
    old cases stays, new ones are dealt by `deal_cases`, or in a store with given folds by
    `add_to_folds`. Raises InputError, and adds nothing, if channels or labels differ, and as
    `update`.
    """
    store_dir = Path(store_dir)
    workers = worker_count(workers)
    manifest, sums = read_manifest(store_dir)
    writable_folder(store_dir, "store")
    with locked(store_dir, "store"):
        remove_partials(store_dir, store_dir / "cases")
        dataset = read_dataset(dataset_dir, patients, labels=manifest.labels)
        say(*dataset.warnings, *_note_on_regions(dataset, manifest, store_dir))
        dataset = fitting(dataset, manifest, store_dir)
        return update(
            Update(
                store_dir=store_dir,
                dataset=with_checked_headers(dataset, skip_bad=skip_bad, but=sums),
                settings=manifest.settings,
                workers=workers,
                skip_bad=skip_bad,
                patients=patients,
            )
        )


def _note_on_regions(dataset: Dataset, manifest: Manifest, store_dir: Path) -> List[str]:
    """A note if the list of a data set names other regions than the store has; else none."""
    if dataset.regions is None or dataset.regions == manifest.regions:
        return []
    own = regions_in_words(dataset.regions)
    rule = f"regions are those of store {store_dir}, {regions_in_words(manifest.regions)}"
    return [f"note: {rule}, and not those of {dataset.folder}, {own}"]

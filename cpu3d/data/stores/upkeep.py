"""Print the content of a store, check it, add cases to it.

Examples: ./run.sh store info --store store
          ./run.sh store verify --store store
          ./run.sh store append --store store --dataset new_cases

The cases of the store keep their split. `append` can be interrupted: the same command continues.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Dict, List, Optional, Tuple

from cpu3d.data.cases.notes import note_lines, notes_of_store
from cpu3d.data.datasets.dataset import regions_in_words
from cpu3d.data.datasets.layouts import read_dataset
from cpu3d.data.files.reader import Reader
from cpu3d.data.store import open_store
from cpu3d.data.stores.folder import QUARANTINE
from cpu3d.data.stores.prepare import (
    PATIENTS_HELP,
    SKIP_BAD_HELP,
    WORKERS_HELP,
    print_summary,
)
from cpu3d.data.stores.splits import split_sizes
from cpu3d.data.stores.store_decisions import decisions_of
from cpu3d.data.stores.update import Grown, grow
from cpu3d.errors import raise_if_any
from cpu3d.util.atomic import remove_partials, writable_folder
from cpu3d.util.child import run_jobs, worker_count
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
    """Add a data set's new cases, with the settings, the regions and the ignored code of the
    store."""

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
    after = done.manifest
    known = count(done.known, "case")
    lines = [f"Store {folder}: {count(done.new, 'new case')}, {known} it had already, skipped"]
    if done.bad:
        lines.append(f"  left out {count(done.bad, 'bad case')}, see {folder / QUARANTINE}")
    if done.new:
        lines.append(f"  split    {split_sizes(after)}; no old case has moved")
        lines.append(f"  hash     {after.split_hash}: older runs refuse the store")
    notes = {name: own for name, own in notes_of_store(after).items() if name in done.new}
    say(*lines, *note_lines(notes), stderr=False)
    return 0


ACTIONS = {"info": (Info, run_info), "verify": (Verify, run_verify), "append": (Append, run_append)}


def actions() -> Dict[str, str]:
    """Action -> its line of help."""
    return {name: str(options.__doc__) for name, (options, _) in ACTIONS.items()}


def action(name: str) -> SimpleNamespace:
    """An action as a command."""
    options, run = ACTIONS[name]
    return SimpleNamespace(OPTIONS=(options,), run=run, __doc__=options.__doc__)


def verify(store_dir: Path, *, workers: Optional[int] = None) -> Tuple[str, ...]:
    """All problems of a store's arrays, whose length, header and SHA-256 are compared with their
    records. Raises InputError as `open_store`."""
    store = open_store(store_dir)
    cases = store.manifest.cases
    problems: List[str] = []
    check = functools.partial(Reader(store.folder, "pread").problems, contents=True)
    with bar("verify", total=len(cases)) as advance:
        for _, damage in run_jobs(check, cases, worker_count(workers)):
            problems += damage
            advance()
    return tuple(problems)


def append(
    store_dir: Path,
    dataset_dir: Path,
    *,
    workers: Optional[int] = None,
    skip_bad: bool = False,
    patients: Optional[Path] = None,
) -> Grown:
    """Add the cases of a data set that a finished store does not have.

    They are made with the store's own settings, regions and code to be ignored. The split of the
    old cases stays, new ones are dealt by `deal_cases`. Raises InputError, and adds nothing, if
    channels or labels differ, and as `grow`.
    """
    store = open_store(store_dir)
    folder = store.folder
    manifest = store.manifest
    workers = worker_count(workers)
    writable_folder(folder, "store")
    with locked(folder, "store"):
        remove_partials(folder, folder / "cases")
        dataset = read_dataset(dataset_dir, patients)
        say(*dataset.warnings)
        if dataset.regions is not None and dataset.regions != manifest.regions:
            rule = f"regions are those of store {folder}, {regions_in_words(manifest.regions)}"
            own = regions_in_words(dataset.regions)
            say(f"note: {rule}, and not those of {dataset.folder}, {own}")
        return grow(store, dataset, workers=workers, skip_bad=skip_bad, patients=patients)

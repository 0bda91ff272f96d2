"""Look into a store, check it, change its format, add cases to it.

Examples: python -m cpu3d store info store
          python -m cpu3d store verify store
          python -m cpu3d store convert store packed --format b2nd --crop
          python -m cpu3d store append store --dataset new_cases

What can be long can be interrupted: `convert` and `append` continue with the same command.
"""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Dict, Optional

from cpu3d.data.store import open_store
from cpu3d.data.stores.conversion import FORMAT_CHOICES
from cpu3d.data.stores.prepare import PATIENTS_HELP, SKIP_BAD_HELP, WORKERS_HELP, split_sizes, summarise
from cpu3d.data.stores.upkeep import append, change_format
from cpu3d.data.stores.verify import verify
from cpu3d.errors import refuse
from cpu3d.util.records import count
from memory_estimator.schema import option


@dataclass(frozen=True)
class Info:
    """What it holds, and how it would be read here."""

    store: Path = option(help="folder made by `prepare`", positional=True)


@dataclass(frozen=True)
class Verify:
    """Compare every file and every voxel with the records."""

    store: Path = option(help="folder made by `prepare`", positional=True)
    workers: Optional[int] = option(None, WORKERS_HELP, at_least=1)


@dataclass(frozen=True)
class Convert:
    """Write the same cases as another store, in another format."""

    store: Path = option(help="folder made by `prepare`; left as it is", positional=True)
    new: Path = option(help="folder to write; made if absent, continued if unfinished", positional=True)
    format: Optional[str] = option(
        None, "of the new store (default: as it is); what is float16 stays so", choices=FORMAT_CHOICES
    )
    crop: Optional[bool] = option(None, "store only each brain's box, or whole grids")
    workers: Optional[int] = option(None, WORKERS_HELP, at_least=1)


@dataclass(frozen=True)
class Append:
    """Add a data set's new cases, made as the store's own were."""

    store: Path = option(help="finished store", positional=True)
    dataset: Path = option(help="folder as for `prepare`")
    skip_bad: bool = option(False, SKIP_BAD_HELP)
    patients: Optional[Path] = option(None, PATIENTS_HELP, metavar="FILE")
    workers: Optional[int] = option(None, WORKERS_HELP, at_least=1)


def info(options: Info) -> int:
    summarise(options.store)
    return 0


def whole(options: Verify) -> int:
    store = open_store(options.store)
    refuse(verify(store.folder, workers=options.workers))
    print(f"Store {store.folder} is whole: {count(store.manifest.cases, 'case')}")
    return 0


def convert(options: Convert) -> int:
    before, settings = open_store(options.store).manifest, dict(vars(options))
    folder, new = settings.pop("store"), settings.pop("new")
    same = change_format(folder, new, **settings).split_hash == before.split_hash
    summarise(new)
    runs = f"runs trained on {folder}"
    print(f"  voxels   {f'same, so {runs} can go on' if same else f'rounded: {runs} refuse it'}")
    return 0


def add_cases(options: Append) -> int:
    before, settings = open_store(options.store).manifest, dict(vars(options))
    folder = settings.pop("store")
    done = append(folder, settings.pop("dataset"), **settings)
    print(f"Store {folder}: {count(done.new, 'new case')}, {count(done.known, 'case')} it had already, skipped")
    if done.bad:
        print(f"  left out {count(done.bad, 'bad case')}, see {folder / 'quarantine.jsonl'}")
    if done.new:
        print(f"  split    {split_sizes(before)} before, {split_sizes(done.manifest)} now; no old case has moved")
        print(f"  hash     {before.split_hash} before, {done.manifest.split_hash} now: runs trained before refuse it.")
        print("           Train anew, or keep a copy of the store they know.")
    return 0


ACTIONS = {
    "info": (Info, info),
    "verify": (Verify, whole),
    "convert": (Convert, convert),
    "append": (Append, add_cases),
}


def actions() -> Dict[str, str]:
    """Action -> its line of help."""
    return {name: options.__doc__ for name, (options, _) in ACTIONS.items()}


def action(name: str) -> SimpleNamespace:
    """An action as a command."""
    options, run = ACTIONS[name]
    return SimpleNamespace(OPTIONS=(options,), run=run, __doc__=options.__doc__)

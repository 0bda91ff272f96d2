"""Look into a store, check it, add cases to it.

Examples: python -m cpu3d store info store
          python -m cpu3d store verify store
          python -m cpu3d store append store --dataset new_cases

`append` can be interrupted: the same command continues.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from cpu3d.data.store import open_store
from cpu3d.data.stores.prepare import PATIENTS_HELP, SKIP_BAD_HELP, WORKERS_HELP, split_sizes, summarise
from cpu3d.data.stores.upkeep import append
from cpu3d.data.stores.verify import verify
from cpu3d.errors import InputError, refuse
from cpu3d.util.records import count
from memory_estimator.schema import add_options, from_args, option


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
class Append:
    """Add a data set's new cases, made as the store's own were."""

    store: Path = option(help="finished store", positional=True)
    dataset: Path = option(help="folder as for `prepare`")
    skip_bad: bool = option(False, SKIP_BAD_HELP)
    patients: Optional[Path] = option(None, PATIENTS_HELP, metavar="FILE")
    workers: Optional[int] = option(None, WORKERS_HELP, at_least=1)


ACTIONS = {"info": Info, "verify": Verify, "append": Append}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, options in ACTIONS.items():
        add_options(actions.add_parser(name, help=options.__doc__), options)


def run(args: argparse.Namespace) -> int:
    options = from_args(ACTIONS[args.action], args, InputError)
    before, settings = open_store(options.store).manifest, dict(vars(options))
    folder = settings.pop("store")
    if args.action == "info":
        summarise(folder)
    elif args.action == "verify":
        refuse(verify(folder, workers=options.workers))
        print(f"Store {folder} is whole: {count(before.cases, 'case')}")
    else:
        done = append(folder, settings.pop("dataset"), **settings)
        print(f"Store {folder}: {count(done.new, 'new case')}, {count(done.known, 'case')} it had already, skipped")
        if done.bad:
            print(f"  left out {count(done.bad, 'bad case')}, see {folder / 'quarantine.jsonl'}")
        if done.new:
            print(f"  split    {split_sizes(before)} before, {split_sizes(done.manifest)} now; no old case has moved")
            print(
                f"  hash     {before.split_hash} before, {done.manifest.split_hash} now: runs trained before refuse it."
            )
            print("           Train anew, or keep a copy of the store they know.")
    return 0

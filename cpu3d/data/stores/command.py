"""Look into a store, check it, change its format, add cases to it.

Examples: python -m cpu3d store info store
          python -m cpu3d store verify store
          python -m cpu3d store convert store packed --format b2nd --crop
          python -m cpu3d store append store --dataset new_cases

What can be long can be interrupted: `convert` and `append` continue with the same command.
"""

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from rich.console import Console

from cpu3d.data.store import open_store
from cpu3d.data.stores.conversion import FORMAT_CHOICES
from cpu3d.data.stores.prepare import PATIENTS_HELP, SKIP_BAD_HELP, WORKERS_HELP, split_sizes, summarise
from cpu3d.data.stores.upkeep import append, change_format
from cpu3d.data.stores.verify import label_table, lines_of, store_info, verify
from cpu3d.errors import InputError, refuse
from cpu3d.util.records import count
from memory_estimator.host import read_host
from memory_estimator.schema import add_options, from_args, option


@dataclass(frozen=True)
class Info:
    """What it holds, and how it would be read here."""

    store: Path = option(help="folder made by `prepare`", positional=True)
    json: bool = option(False, "print JSON")


@dataclass(frozen=True)
class Verify:
    """Compare every file and every voxel with the records."""

    store: Path = option(help="folder made by `prepare`", positional=True)
    json: bool = option(False, "print JSON")
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, (options, _) in _ACTIONS.items():
        add_options(actions.add_parser(name, help=options.__doc__), options)


def run(args: argparse.Namespace) -> int:
    cls, action = _ACTIONS[args.action]
    return action(from_args(cls, args, InputError)) or 0


# --- Private helpers ---


def _info(options: Info) -> None:
    info = store_info(open_store(options.store), free_bytes=read_host().free_bytes)
    if options.json:
        print(json.dumps(info, indent=1))
        return
    print("\n".join(lines_of(info)))
    Console().print(label_table(info).rich())


def _verify(options: Verify) -> Optional[int]:
    found = verify(options.store, workers=options.workers)
    if options.json:
        content = {"store": str(options.store), "good": not found.problems, **dataclasses.asdict(found)}
        print(json.dumps(content, indent=1))
        return InputError.exit_code if found.problems else 0
    for name in found.strays:
        print(f"note: {options.store / name} belongs to no case of the store; it does no harm", file=sys.stderr)
    refuse(found.problems)
    read = f"{found.arrays} with arrays of their own, {found.bytes_read / 1e6:,.1f} MB read"
    print(f"Store {options.store} is whole: {count(found.cases, 'case')}, {read}")
    return None


def _convert(options: Convert) -> None:
    how = {"format_": options.format, "crop": options.crop, "workers": options.workers}
    manifest = change_format(options.store, options.new, **how)
    summarise(options.new)
    if manifest.split_hash == open_store(options.store).manifest.split_hash:
        print(f"  voxels   the same, so runs trained on {options.store} can go on with {options.new}")
    else:
        print(f"  voxels   rounded, hash {manifest.split_hash}: runs trained on {options.store} refuse {options.new}")


def _append(options: Append) -> None:
    before, settings = open_store(options.store).manifest, dict(vars(options))
    done = append(settings.pop("store"), settings.pop("dataset"), **settings)
    print(f"Store {options.store}: {count(done.new, 'new case')}, {count(done.known, 'case')} it had already, skipped")
    if done.bad:
        print(f"  left out {count(done.bad, 'bad case')}, see {options.store / 'quarantine.jsonl'}")
    if done.new:
        print(f"  split    {split_sizes(before)} before, {split_sizes(done.manifest)} now; no old case has moved")
        print(f"  hash     {before.split_hash} before, {done.manifest.split_hash} now: runs trained before refuse it.")
        print("           Train anew, or keep a copy of the store they know.")


_ACTIONS = {
    "info": (Info, _info),
    "verify": (Verify, _verify),
    "convert": (Convert, _convert),
    "append": (Append, _append),
}

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
from typing import Any, Dict, Optional

from rich.console import Console

from cpu3d.data.records import Manifest, to_json
from cpu3d.data.store import Store, open_store
from cpu3d.data.stores.conversion import FORMAT_CHOICES
from cpu3d.data.stores.prepare import PATIENTS_HELP, SKIP_BAD_HELP, WORKERS_HELP, split_sizes, summarise
from cpu3d.data.stores.upkeep import append, change_format
from cpu3d.data.stores.verify import lines_of, store_info, verify
from cpu3d.errors import InputError, refuse
from cpu3d.util.records import count
from memory_estimator.host import read_host
from memory_estimator.schema import add_options, from_args, option
from memory_estimator.table import Table


@dataclass(frozen=True)
class Info:
    """What it holds, and how it would be read here."""

    store: Path = option(help="folder made by `prepare`", positional=True)
    case: Optional[str] = option(None, "one case's record", metavar="ID")
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
    for options, _ in _ACTIONS.values():
        add_options(actions.add_parser(options.__name__.lower(), help=options.__doc__), options)


def run(args: argparse.Namespace) -> int:
    cls, action = _ACTIONS[args.action]
    options = from_args(cls, args, InputError)
    return action(options)


# --- Private helpers ---


def _info(options: Info) -> int:
    store = open_store(options.store)
    if options.case is not None:
        return _case(store, options.case, options.json)
    info = store_info(store, free_bytes=read_host().free_bytes)
    if options.json:
        print(json.dumps(info, indent=1))
        return 0
    print("\n".join(lines_of(info)))
    Console().print(_label_table(info).rich())
    return 0


def _case(store: Store, case_id: str, as_json: bool) -> int:
    split = next((name for name, ids in store.manifest.split.items() if case_id in ids), None)
    if split is None:
        rule = f"--case must name a case of store {store.folder}"
        raise InputError(f"{rule}, got {case_id}; see its manifest.json")
    content = to_json(store.case(case_id))
    if as_json:
        print(json.dumps(content, indent=1))
        return 0
    content["centres"] = {code: count(places, "voxel") for code, places in content["centres"].items()}
    for name, value in {"split": split, **content}.items():
        print(f"  {name:<19} {value}")
    return 0


def _label_table(info: Dict[str, Any]) -> Table:
    voxels, rows = info["label_voxels"], []
    total, foreground = sum(voxels.values()), sum(n for code, n in voxels.items() if code != "0")
    for code, name in sorted(info["labels"].items(), key=lambda item: int(item[0])):
        regions = [region for region, codes in info["regions"].items() if int(code) in codes]
        own = voxels.get(code, 0)
        of_all = f"{own / total:.3%}" if total else "-"
        of_foreground = f"{own / foreground:.1%}" if foreground and code != "0" else "-"
        cases = info["label_cases"].get(code, 0)
        rows.append((f"{code} {name}", ", ".join(regions) or "-", str(cases), f"{own:,}", of_all, of_foreground))
    return Table(("label", "in regions", "cases", "voxels", "of all", "foreground"), rows, names=2)


def _verify(options: Verify) -> int:
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
    return 0


def _convert(options: Convert) -> int:
    old = open_store(options.store).manifest
    manifest = change_format(
        options.store, options.new, format_=options.format, crop=options.crop, workers=options.workers
    )
    summarise(options.new)
    before, after = _size_bytes(old), _size_bytes(manifest)
    print(f"  before   {before / 1e6:,.1f} MB, now {after / 1e6:,.1f} MB: {after / before:.0%}")
    if manifest.split_hash == old.split_hash:
        print(f"  voxels   the same, so runs trained on {options.store} can go on with {options.new}")
    else:
        print(f"  voxels   rounded, hash {manifest.split_hash}: runs trained on {options.store} refuse {options.new}")
    return 0


def _append(options: Append) -> int:
    before = open_store(options.store).manifest
    done = append(
        options.store, options.dataset, workers=options.workers, skip_bad=options.skip_bad, patients=options.patients
    )
    print(f"Store {options.store}: {count(done.new, 'new case')}, {count(done.known, 'case')} it had already, skipped")
    if done.bad:
        print(f"  left out {count(done.bad, 'bad case')}, see {options.store / 'quarantine.jsonl'}")
    if done.new:
        print(f"  split    {split_sizes(before)} before, {split_sizes(done.manifest)} now; no old case has moved")
        print(f"  hash     {before.split_hash} before, {done.manifest.split_hash} now: runs trained before refuse it.")
        print("           Train anew, or keep a copy of the store they know.")
    return 0


def _size_bytes(manifest: Manifest) -> int:
    return sum({case.stem: case.image_bytes + case.label_bytes for case in manifest.cases}.values())


_ACTIONS = {
    one.__name__.lower(): (one, do)
    for one, do in ((Info, _info), (Verify, _verify), (Convert, _convert), (Append, _append))
}

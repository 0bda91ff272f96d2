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
from pathlib import Path
from typing import Any, Dict

from rich.console import Console
from rich.table import Table

from cpu3d.data.prepare import add_patients_argument
from cpu3d.data.records import to_json
from cpu3d.data.store import Store, open_store
from cpu3d.data.summary import split_sizes, summarise
from cpu3d.data.upkeep.append import append
from cpu3d.data.upkeep.change_format import change_format
from cpu3d.data.upkeep.info import lines_of, store_info
from cpu3d.data.upkeep.verify import verify
from cpu3d.data.words import count
from cpu3d.data.write_cases import FORMAT_CHOICES
from cpu3d.errors import InputError
from memory_estimator.host import read_host


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    info = actions.add_parser("info", help="what it holds, and how it would be read here")
    info.add_argument("store", type=Path, help="folder made by `prepare`")
    info.add_argument("--case", metavar="ID", help="one case's record")
    check = actions.add_parser("verify", help="compare every file and every voxel with the records")
    check.add_argument("store", type=Path, help="folder made by `prepare`")
    convert = actions.add_parser("convert", help="write the same cases as another store, in another format")
    convert.add_argument("store", type=Path, help="folder made by `prepare`; left as it is")
    convert.add_argument("new", type=Path, help="folder to write; made if absent, continued if unfinished")
    convert.add_argument(
        "--format", choices=FORMAT_CHOICES, help="of the new store (default: as it is); what is float16 stays so"
    )
    crop = convert.add_mutually_exclusive_group()
    crop.add_argument("--crop", action="store_const", const=True, help="store only each brain's box")
    crop.add_argument("--no-crop", action="store_const", const=False, dest="crop", help="store whole grids")
    more = actions.add_parser("append", help="add a data set's new cases, made as the store's own were")
    more.add_argument("store", type=Path, help="finished store")
    more.add_argument("--dataset", type=Path, required=True, help="folder as for `prepare`")
    more.add_argument("--skip-bad", action="store_true", help="leave bad cases out and list them in quarantine.jsonl")
    add_patients_argument(more)
    for action in (info, check):
        action.add_argument("--json", action="store_true", help="print JSON")
    for action in (check, convert, more):
        action.add_argument(
            "--workers", type=int, help="processes; each holds about two volumes (default: one per usable core)"
        )


def run(args: argparse.Namespace) -> int:
    return {"info": _info, "verify": _verify, "convert": _convert, "append": _append}[args.action](args)


# --- Private helpers ---


def _info(args: argparse.Namespace) -> int:
    store = open_store(args.store)
    if args.case is not None:
        return _case(store, args.case, args.json)
    info = store_info(store, free_bytes=read_host().free_bytes)
    if args.json:
        print(json.dumps(info, indent=1))
        return 0
    print("\n".join(lines_of(info)))
    Console().print(_label_table(info))
    return 0


def _case(store: Store, case_id: str, as_json: bool) -> int:
    try:
        content = to_json(store.case(case_id))
    except KeyError:
        raise InputError(
            f"--case must name a case of store {store.folder}, got {case_id}; see its manifest.json"
        ) from None
    if as_json:
        print(json.dumps(content, indent=1))
        return 0
    split = next(name for name, ids in store.manifest.split.items() if case_id in ids)
    content["centres"] = {code: count(places, "voxel") for code, places in content["centres"].items()}
    for name, value in {"split": split, **content}.items():
        print(f"  {name:<19} {value}")
    return 0


def _label_table(info: Dict[str, Any]) -> Table:
    table = Table("label", "in regions", "cases", "voxels", "of all", "foreground")
    for column in table.columns[2:]:
        column.justify = "right"
    voxels = info["label_voxels"]
    total, foreground = sum(voxels.values()), sum(n for code, n in voxels.items() if code != "0")
    for code, name in sorted(info["labels"].items(), key=lambda item: int(item[0])):
        regions = [region for region, codes in info["regions"].items() if int(code) in codes]
        own = voxels.get(code, 0)
        table.add_row(
            f"{code} {name}",
            ", ".join(regions) or "-",
            str(info["label_cases"].get(code, 0)),
            f"{own:,}",
            f"{own / total:.3%}" if total else "-",
            f"{own / foreground:.1%}" if foreground and code != "0" else "-",
        )
    return table


def _verify(args: argparse.Namespace) -> int:
    found = verify(args.store, workers=args.workers)
    if args.json:
        print(json.dumps({"store": str(args.store), "good": not found.problems, **dataclasses.asdict(found)}, indent=1))
        return InputError.exit_code if found.problems else 0
    for name in found.strays:
        print(f"note: {args.store / name} belongs to no case of the store; it does no harm", file=sys.stderr)
    if found.problems:
        raise InputError(*found.problems)
    print(
        f"Store {args.store} is whole: {count(found.cases, 'case')}, {found.arrays} with arrays of their own,"
        f" {found.bytes_read / 1e6:,.1f} MB read"
    )
    return 0


def _convert(args: argparse.Namespace) -> int:
    old = open_store(args.store)
    manifest = change_format(args.store, args.new, format_=args.format, crop=args.crop, workers=args.workers)
    summarise(manifest, args.new)
    before, after = _size_bytes(old.manifest), _size_bytes(manifest)
    print(f"  before   {before / 1e6:,.1f} MB, now {after / 1e6:,.1f} MB: {after / before:.0%}")
    if manifest.split_hash == old.manifest.split_hash:
        print(f"  voxels   the same, so runs trained on {args.store} can go on with {args.new}")
    else:
        print(
            f"  voxels   rounded, so runs trained on {args.store} refuse {args.new}: its hash is {manifest.split_hash}"
        )
    return 0


def _append(args: argparse.Namespace) -> int:
    before = open_store(args.store).manifest
    done = append(args.store, args.dataset, workers=args.workers, skip_bad=args.skip_bad, patients=args.patients)
    print(f"Store {args.store}: {count(done.new, 'new case')}, {count(done.known, 'case')} it had already, skipped")
    if done.bad:
        print(f"  left out {count(done.bad, 'bad case')}, see {args.store / 'quarantine.jsonl'}")
    if not done.new:
        return 0
    print(f"  split    {split_sizes(before)} before, {split_sizes(done.manifest)} now; no old case has moved")
    print(
        f"  hash     {before.split_hash} before, {done.manifest.split_hash} now: runs trained before the change refuse"
        " this store.\n           They have not seen its new training cases, and scores over other validation and test"
        " cases\n           cannot be compared with theirs. Train anew, or keep a copy of the store they know."
    )
    return 0


def _size_bytes(manifest) -> int:
    return sum({case.stem: case.image_bytes + case.label_bytes for case in manifest.cases}.values())

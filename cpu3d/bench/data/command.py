"""Measure the data path: loading against nibabel, MONAI and the sources' own ways, waits, memory, augmentation.

    ./run.sh bench data --workdir bench-data --record records/data.jsonl --picture docs/pictures/data.png
    ./run.sh bench data --workdir bench-data --case BraTS-GLI-00000-000 --rows s4 s0
    ./run.sh bench data --workdir bench-data --monai monai-env/bin/python --rows monai
    ./run.sh bench data --workdir bench-data --clean

Rows: s4 (a case), s0 (a patch), spleen (training on patches), ladder (S1's), volumes (training on whole volumes), many
(48,884 entries), augment (its cost), monai (with --monai). All files are made up and lie in the work folder, 20 GB with
the CTs; a later run finds them there. Every way to do a thing takes its turn in every round; a line is the median over
the rounds. "Cold" means that the files' pages were dropped from memory before.
"""

import argparse
import importlib
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

from rich.console import Console

from cpu3d.bench.data.files import Files
from cpu3d.bench.data.options import Options
from cpu3d.bench.data.results import Outcome
from cpu3d.bench.data.scale import FULL, TINY, Scale
from cpu3d.bench.data.tables import outcome_table, targets_table
from cpu3d.bench.harness import ProcessFailedError
from cpu3d.data.files.read_mode import file_system
from cpu3d.errors import InputError
from cpu3d.util.atomic import atomic_write
from cpu3d.util.records import append_record, read_records
from cpu3d.util.versions import versions
from memory_estimator.host import read_host

ROWS = {
    "s4": "one_case",
    "s0": "one_patch",
    "spleen": "patch_training",
    "ladder": "ladder",
    "volumes": "whole_volumes",
    "many": "many_cases",
    "augment": "augment_cost",
    "monai": "peers",
}
"""Row -> its module."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdir", type=Path, required=True, help="folder for the files that are read; kept")
    parser.add_argument("--case", type=Path, help="a labelled BraTS case for s4 and augment (default: a phantom)")
    parser.add_argument("--rows", nargs="+", choices=ROWS, help="default: all; monai where --monai is given")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how often each thing is done (default: 5)")
    parser.add_argument("--cap-mb-s", type=int, default=200, metavar="MB/S", help="of the slow disk (default: 200)")
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="steps memory is watched (default: 1000)")
    parser.add_argument("--volumes", type=int, metavar="N", help=f"CTs of S0's training set (default: {FULL.cts})")
    parser.add_argument("--monai", type=Path, metavar="PYTHON", help="a Python with MONAI, for the row monai")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append the rows to a .jsonl file")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write the rows as PNG")
    parser.add_argument("--smoke", action="store_true", help="tiny files and few steps: a trial of the benchmark")
    parser.add_argument("--clean", action="store_true", help="remove what earlier runs made in --workdir, and end")


def run(args: argparse.Namespace) -> int:
    _check(args)
    scale = TINY if args.smoke else FULL
    if args.volumes:
        scale = replace(scale, cts=args.volumes)
    files = Files(args.workdir, scale, args.case)
    if args.clean:
        files.clean()
        return 0
    options = Options(rounds=args.rounds, cap_mb_s=args.cap_mb_s, steps=args.steps, monai=args.monai)
    rows = args.rows or [name for name in ROWS if name != "monai" or args.monai]
    outcomes, failures = _measure(rows, files, options, args)
    if any(outcome.targets for outcome in outcomes):
        Console().print(targets_table(outcomes))
    if args.picture and outcomes:
        _draw(outcomes, args, scale)
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


# --- Private helpers ---


def _check(args: argparse.Namespace) -> None:
    problems = [
        f"{name} must be at least 1, got {value}; give a positive number"
        for name, value in (
            ("--rounds", args.rounds),
            ("--cap-mb-s", args.cap_mb_s),
            ("--steps", args.steps),
            ("--volumes", 1 if args.volumes is None else args.volumes),
        )
        if value < 1
    ]
    if args.rows and "monai" in args.rows and not args.monai:
        problems.append("--rows monai must come with --monai, got none; name a Python that has MONAI")
    if args.monai and not args.monai.is_file():
        problems.append(f"--monai must name a Python, found none at {args.monai}; check the path")
    if args.case and not args.case.is_dir():
        problems.append(f"--case must name the folder of a BraTS case, found none at {args.case}; check the path")
    if problems:
        raise InputError(*problems)


def _draw(outcomes: Sequence[Outcome], args: argparse.Namespace, scale: Scale) -> None:
    """Write the picture of these rows, and of those that the record has of the same sizes on the same host."""
    from cpu3d.bench.data.picture import draw

    host = read_host().summary()
    known: Dict[str, Dict[str, Any]] = {}
    if args.record:
        sizes = json.loads(json.dumps(asdict(scale)))
        for record in read_records(args.record, "data"):
            if (record["host"], record["scale"]) == (host, sizes):
                known[record["row"]] = record  # the last one of a row counts
    known.update({outcome.row: outcome.to_json() for outcome in outcomes})
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(args.picture) as file:
        file.write(draw([known[row] for row in ROWS if row in known], host))


def _measure(
    rows: List[str], files: Files, options: Options, args: argparse.Namespace
) -> Tuple[List[Outcome], List[str]]:
    """Row after row, each printed and recorded as soon as it is there: a later one that fails takes nothing along."""
    of_the_host: Dict[str, Any] = {
        "host": read_host().summary(),
        "versions": versions(),
        "file_system": file_system(files.folder),
        "scale": asdict(files.scale),
        "rounds": options.rounds,
        "case": "phantom" if args.case is None else args.case.name,
    }
    outcomes: List[Outcome] = []
    failures: List[str] = []
    for row in rows:
        try:
            outcome = importlib.import_module(f"cpu3d.bench.data.{ROWS[row]}").measure(files, options)
        except ProcessFailedError as error:
            failures.append(f"row {row}: {error}")
            continue
        Console().print(outcome_table(outcome))
        outcomes.append(outcome)
        if args.record:
            append_record(args.record, "data", {**outcome.to_json(), **of_the_host})
    return outcomes, failures

"""Measure training step, data and inference: time, memory, on every engine (the paper's Fig. 2); the estimator by it.

    ./run.sh bench step --shape 240 240 160 --channels 4 --filters 16 --batch 1 --dtype bfloat16
    ./run.sh bench step --shape 128 128 128 --rounds 3 --peer "python other_trainer.py --shape 128 128 128"
    ./run.sh bench memory --shape 128 128 128 --dtype bfloat16
    ./run.sh bench memory --policies --shape 128 128 128 --record records/policies.jsonl --picture policies.png
    ./run.sh bench engines --shape 128 128 128 --record records/engines.jsonl --picture engines.png
    ./run.sh bench validate --record other-host.jsonl
    ./run.sh bench tables --records records --out docs/results.md
    ./run.sh bench data --workdir bench-data --record records/data.jsonl --picture data.png
    ./run.sh bench scaling --shape 240 240 160 --workers 1 2 --record records/scaling.jsonl
    ./run.sh bench windows --run runs/first --window 64 64 64 --record records/windows.jsonl
    ./run.sh bench faults --kills 50 --workdir faults --record records/faults.jsonl

A measurement wants a quiet machine. Every one runs in a fresh process. (`calibrate`, which fits the estimator's
constants to this host, is a command of its own: every user wants it, these few do.)
"""

import argparse
import inspect

from cpu3d.bench import data, faults, memory, scaling, step, tables, windows

KINDS = {
    "step": (step, step.add_arguments, step.run),
    "memory": (memory, memory.add_arguments, memory.run),
    "engines": (step.run_engines, step.add_engine_arguments, step.run_engines),
    "validate": (memory.run_validate, memory.add_validate_arguments, memory.run_validate),
    "tables": (tables, tables.add_arguments, tables.run),
    "data": (data, data.add_arguments, data.run),
    "windows": (windows, windows.add_arguments, windows.run),
    "scaling": (scaling, scaling.add_arguments, scaling.run),
    "faults": (faults, faults.add_arguments, faults.run),
}
"""Kind -> what its help is the docstring of, how its options are added, how it is run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", metavar="KIND", required=True)
    for name, (documented, add, run_kind) in KINDS.items():
        words, style = inspect.getdoc(documented), argparse.RawDescriptionHelpFormatter
        sub = kinds.add_parser(name, help=words.splitlines()[0], description=words, formatter_class=style)
        add(sub)
        sub.set_defaults(bench_run=run_kind)


def run(args: argparse.Namespace) -> int:
    return args.bench_run(args)

"""Measure training step, data and inference: time, memory, on every engine (the paper's Fig. 2); the estimator by it.

    ./run.sh bench step --shape 240 240 160 --channels 4 --filters 16 --batch 1 --dtype bfloat16
    ./run.sh bench memory --policies --help

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

"""Measure time and memory of the project's parts, each measurement in a fresh process; use a quiet
machine.

    ./run.sh bench step --shape 240 240 160 --channels 4 --filters 16 --batch 1 --dtype bfloat16
    ./run.sh bench tables --records records

`bench KIND --help` has the options and examples of a kind.
"""

import importlib
from types import ModuleType
from typing import Dict


def actions() -> Dict[str, str]:
    """The kinds of measurement as subcommands, each with its line of help; a module each."""
    return {
        "kernels": "time own operations (convolutions) beside the engine's",
        "learning": "measure how fast settings learn: Dice of untouched cases over training cost",
        "step": "measure time and memory of the training step, under one policy or all, beside "
        "the prediction",
        "tables": "make the pages of results from benchmark records",
        "validate": "measure the configurations by which the estimator is judged, on this host",
    }


def action(kind: str) -> ModuleType:
    """The module of a kind."""
    return importlib.import_module(f"cpu3d.bench.{kind}")

"""Measure time and memory of the project's parts, each measurement in a fresh process on a quiet machine.

./run.sh bench step --shape 240 240 160 --channels 4 --filters 16 --batch 1 --dtype bfloat16
./run.sh bench step --policies --help
"""

import importlib
from types import ModuleType
from typing import Dict


def actions() -> Dict[str, str]:
    """The kinds, a module each, as subcommands with their lines of help."""
    return {
        "kernels": "time our own convolutions and the engine's, operation by operation",
        "learning": "measure the Dice of untouched cases over steps, voxels and seconds of training",
        "step": "measure time and memory of the training step, under one policy or all, and the prediction",
        "tables": "make the pages of results from benchmark records",
        "validate": "measure the configurations that the estimator is judged by on this host",
    }


def action(kind: str) -> ModuleType:
    """The module of a kind."""
    return importlib.import_module(f"cpu3d.bench.{kind}")

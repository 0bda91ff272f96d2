"""Measure time and memory of the project's parts, each measurement in a fresh process on a quiet machine.

./run.sh bench step --shape 240 240 160 --channels 4 --filters 16 --batch 1 --dtype bfloat16
./run.sh bench memory --policies --help
"""

import importlib
from types import ModuleType
from typing import Dict

KINDS = {
    "kernels": "time the own convolutions beside the engine's, operation by operation",
    "learning": "measure the Dice of untouched cases over steps, voxels and seconds of training",
    "memory": "measure time and memory of the training step, under one policy or all, beside the prediction",
    "step": "the same as memory",
    "tables": "make the pages of results from benchmark records",
    "validate": "measure the configurations that the estimator is judged by on this host",
}
"""Kind and its line of help."""


def actions() -> Dict[str, str]:
    """The kinds, as subcommands."""
    return KINDS


def action(kind: str) -> ModuleType:
    """The module of a kind."""
    return importlib.import_module(f"cpu3d.bench.{'step' if kind == 'memory' else kind}")

"""Measure time and memory of what the project computes, each measurement in a fresh process; use a
quiet machine.

    ./run.sh bench step --shape 240 240 160 --channels 4 --filters 16 --batch 1 --dtype bfloat16
    ./run.sh bench tables --records records

`bench KIND --help` has the options and examples of a kind.
"""

import importlib
from types import ModuleType
from typing import Dict

KINDS = {
    "kernels": ("kernels", "time own operations (convolutions) beside the engine's"),
    "step": (
        "step_costs",
        "measure time and memory of the training step, under one policy or all, beside the "
        "prediction",
    ),
    "tables": ("tables", "make the pages of results from benchmark records"),
    "validate": (
        "estimator_errors",
        "measure the configurations by which the estimator is judged, on this host",
    ),
}
"""Subcommand of `bench` -> its module and a line of help."""


def actions() -> Dict[str, str]:
    """The kinds of measurement as subcommands, each with its line of help."""
    return {kind: help_line for kind, (_, help_line) in KINDS.items()}


def action(kind: str) -> ModuleType:
    """The module of a kind."""
    module, _ = KINDS[kind]
    return importlib.import_module(f"cpu3d.bench.{module}")

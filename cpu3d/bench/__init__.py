"""Measure time and memory of what the project computes, in a fresh process; use a quiet machine.

    ./run.sh bench step --shape 240 240 160 --channels 4 --filters 16 --batch 1 --dtype bfloat16

`bench step --help` has the options and examples.
"""

from types import ModuleType
from typing import Dict


def actions() -> Dict[str, str]:
    """The kinds of measurement as subcommands, each with its line of help."""
    return {"step": "measure the training step, beside its prediction"}


def action(kind: str) -> ModuleType:
    """The module of a kind."""
    from cpu3d.bench import step_costs

    return step_costs

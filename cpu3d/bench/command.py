"""Measure time and memory of the project's parts, each measurement in a fresh process on a quiet machine.

    ./run.sh bench step --shape 240 240 160 --channels 4 --filters 16 --batch 1 --dtype bfloat16
    ./run.sh bench memory --policies --help

A kind is a command that is a module of this folder and has a line `HELP = "..."`.
"""

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Dict


def actions() -> Dict[str, str]:
    """Kind -> its line of help, read from the modules' text: importing them all would take seconds."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))}
    found = {name: re.search(r'^HELP = "(.*)"$', text, re.MULTILINE) for name, text in texts.items()}
    return {name: match[1] for name, match in found.items() if match}


def action(kind: str) -> ModuleType:
    """The module of a kind."""
    return importlib.import_module(f"cpu3d.bench.{kind}")

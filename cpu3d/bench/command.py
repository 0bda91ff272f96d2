"""Measure time and memory of the project's parts, each measurement in a fresh process on a quiet machine.

    ./run.sh bench step --shape 240 240 160 --channels 4 --filters 16 --batch 1 --dtype bfloat16
    ./run.sh bench memory --policies --help

A kind is a command that is a module of this folder and has a line `HELP = "..."`.
"""

import argparse
import importlib
import re
from pathlib import Path
from typing import Any, Dict

from cpu3d.errors import InputError
from memory_estimator.schema import add_options, arguments


def kinds() -> Dict[str, str]:
    """Kind -> its line of help, read from the modules' text: importing them all would take seconds."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))}
    found = {name: re.search(r'^HELP = "(.*)"$', text, re.MULTILINE) for name, text in texts.items()}
    return {name: match[1] for name, match in found.items() if match}


class KindParser(argparse.ArgumentParser):
    """Takes the options and the description of its kind from the module once it is the one chosen."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        module = importlib.import_module(f"cpu3d.bench.{self.prog.split()[-1]}")
        self.description = module.__doc__
        add_options(self, *module.OPTIONS)
        return super().parse_known_args(args, namespace)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_subparsers(dest="bench", metavar="KIND", required=True, parser_class=KindParser)
    for name, words in kinds().items():
        group.add_parser(name, help=words, formatter_class=argparse.RawDescriptionHelpFormatter)


def run(args: argparse.Namespace) -> int:
    module = importlib.import_module(f"cpu3d.bench.{args.bench}")
    return module.run(*arguments(module.OPTIONS, args, InputError))

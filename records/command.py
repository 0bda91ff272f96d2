"""The command line of the scripts in this folder, as `python -m records.kernels`."""

import argparse
import importlib
import sys

from cpu3d.errors import InputError
from memory_estimator.common.schema import add_options, arguments


def main(name: str) -> None:
    """Run a module of this folder, by its OPTIONS, and end the process with its exit code."""
    module = importlib.import_module(name)
    parser = argparse.ArgumentParser(
        description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, *module.OPTIONS)
    try:
        sys.exit(module.run(*arguments(module.OPTIONS, parser.parse_args(), InputError)))
    except InputError as error:
        sys.exit(f"error: {error}")

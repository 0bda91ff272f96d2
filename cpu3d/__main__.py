"""python -m cpu3d SUBCOMMAND ...: one module a subcommand, imported when it is asked for."""

import argparse
import contextlib
import faulthandler
import importlib
import os
import sys
from types import ModuleType
from typing import List, Optional, Tuple

from cpu3d.errors import InputError, Interrupted
from memory_estimator.files import NotRegularError
from memory_estimator.schema import OptionError, add_options, arguments

COMMANDS = {
    "demo": ("cpu3d.demo", "make phantoms, train on them, score, predict, report: everything once, in minutes"),
    "phantom": ("cpu3d.data.stores.phantom", "write a data set of made-up brains with tumours"),
    "prepare": ("cpu3d.data.stores.prepare", "read a BraTS or Decathlon data set into a store"),
    "store": ("cpu3d.data.stores.upkeep", "look into a store, check it, change its format, add cases"),
    "train": ("cpu3d.training.train", "train a 3D U-Net on whole volumes or on patches, or continue"),
    "launch": ("cpu3d.distributed.launch", "train with several workers: one a socket, or on several hosts"),
    "status": ("cpu3d.report.status", "tell how a run is doing: phase, progress, memory, and what to do next"),
    "evaluate": ("cpu3d.inference.evaluate", "score untouched cases on their full grids, or cross-validate folds"),
    "predict": ("cpu3d.inference.predict", "segment new cases, in their own grids, with one run or several"),
    "export": ("cpu3d.inference.export.command", "write a trained network for other programs: SavedModel or ONNX"),
    "report": ("cpu3d.report.report", "write one report.html of a run"),
    "compare": (
        "cpu3d.compare.command",
        "train whole-volume and patch runs, or any variants, under one budget and compare them",
    ),
    "bench": (
        "cpu3d.bench.command",
        "measure time and memory of training, loading and inference; compare engines and policies",
    ),
    "calibrate": ("cpu3d.bench.calibrate", "measure this host's constants for the estimator, within a minute"),
    "doctor": (
        "cpu3d.host.doctor",
        "look at this host: what it has, what would be set, whether the engine does what it should",
    ),
}
"""Subcommand -> its module and a line of help."""


def main(argv: Optional[List[str]] = None) -> int:
    """Run a subcommand; returns what the process ends with:

    0 done; 1 failed, as on a full disk; 2 bad input; 3 does not fit the memory; 4 diverged: loss or weights are not
    finite; 5 memory was running out: stopped and saved; 6 a worker was lost or hangs; 130 SIGINT and 143 SIGTERM:
    stopped and saved. After 1, 5, 6, 130 and 143 the same command continues.
    """
    with contextlib.suppress(OSError, AttributeError):  # of a caller whose stderr is no file
        faulthandler.enable()  # a file that is cut while it is mapped ends the process: this says where
    try:
        module, args = parse(sys.argv[1:] if argv is None else argv)
        options = getattr(module, "OPTIONS", None)
        return module.run(args) if options is None else module.run(*arguments(options, args, InputError))
    except InputError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return error.exit_code
    except OptionError as error:
        print(f"error: {error}", file=sys.stderr)
        return InputError.exit_code
    except KeyboardInterrupt as error:
        print(f"interrupted: {str(error) or 'the same command continues where it can'}", file=sys.stderr)
        return error.exit_code if isinstance(error, Interrupted) else 130
    except BrokenPipeError:
        # The reader of our output went away, as `head` does; nothing is left to say and nowhere to say it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return InputError.exit_code if isinstance(error, NotRegularError) else 1
    except MemoryError as error:
        got = str(error) or "too little"
        print(f"error: memory must hold what the command needs, got {got}; free some", file=sys.stderr)
        return 1


def parse(argv: List[str]) -> Tuple[ModuleType, argparse.Namespace]:
    """Read a command line: the module of its subcommand, the only one imported, and the options."""
    parser = argparse.ArgumentParser(prog="python -m cpu3d", description="Train 3D U-Nets on whole volumes or patches.")
    subparsers = parser.add_subparsers(dest="command", metavar="SUBCOMMAND", required=True)
    for command, (module_name, help_line) in COMMANDS.items():
        sub = subparsers.add_parser(command, help=help_line, formatter_class=argparse.RawDescriptionHelpFormatter)
        if argv[:1] == [command]:
            module = importlib.import_module(module_name)
            sub.description = module.__doc__
            # The actions of `store` and the kinds of `bench` are commands themselves.
            getattr(module, "add_arguments", add_options)(sub, *getattr(module, "OPTIONS", ()))
    args = parser.parse_args(argv)
    return module, args


if __name__ == "__main__":
    sys.exit(main())

"""./run.sh SUBCOMMAND ...: a module for each subcommand, imported when it is asked for."""

import argparse
import contextlib
import faulthandler
import importlib
import sys
from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple

from cpu3d.errors import ENDINGS, InputError, NoRoomError, exit_code_of, fault_of
from memory_estimator.common.schema import add_options, arguments
from memory_estimator.common.terminal import printing
from memory_estimator.installed import as_typed, how_to_install
from models.native.library import InstructionSetError

COMMANDS = {
    "demo": (
        "cpu3d.demo",
        "make phantoms, train on them, score, predict, report: everything once, in minutes",
    ),
    "phantom": ("cpu3d.data.phantoms.command", "write a data set of made-up brains with tumours"),
    "prepare": ("cpu3d.data.stores.prepare", "read a data set into a store"),
    "store": ("cpu3d.data.stores.upkeep", "print the content of a store, check it, add cases"),
    "train": (
        "cpu3d.experiments.train",
        "train a 3D U-Net on whole volumes or on patches, or continue",
    ),
    "launch": (
        "cpu3d.distributed.launch",
        "train with several workers: one per socket, or on several hosts",
    ),
    "status": (
        "cpu3d.report.status",
        "print the state of a run: phase, progress, memory, and what to do next",
    ),
    "evaluate": (
        "cpu3d.inference.evaluate",
        "score untouched cases on their full grids",
    ),
    "predict": (
        "cpu3d.inference.predict",
        "segment new cases on their own grids, with one run or several",
    ),
    "view": (
        "cpu3d.report.view",
        "write a page to scroll through the slices of a case in a browser",
    ),
    "export": (
        "cpu3d.inference.export.command",
        "write a trained network for other programs: SavedModel or ONNX",
    ),
    "report": ("cpu3d.report.report", "write one report.html of a run"),
    "compare": (
        "cpu3d.experiments.compare",
        "train whole-volume and patch runs under one budget and compare them",
    ),
    "bench": (
        "cpu3d.bench",
        "measure time and memory of a training step",
    ),
    "calibrate": (
        "cpu3d.bench.calibrate",
        "measure this host's speed for the estimator, in about a minute",
    ),
    "doctor": (
        "cpu3d.host.doctor",
        "check this host: cores, memory, settings of a training, a test of the engine",
    ),
}
"""Subcommand -> its module and a line of help."""


def main(argv: Optional[List[str]] = None) -> int:
    """Run a subcommand; returns the exit code, one of `cpu3d.errors.ENDINGS`."""
    with contextlib.suppress(OSError, AttributeError):  # of a caller whose stderr is no file
        # a file that is cut while it is mapped ends the process: this prints where
        faulthandler.enable()
    if argv is None:
        argv = sys.argv[1:]
    return printing(lambda: _run(argv))


def parse(argv: Sequence[str]) -> Tuple[Any, argparse.Namespace]:
    """Read a command line: the command that it names, with `OPTIONS` and `run`, and its options as
    they were typed."""
    endings = (f"  {code:<3}  {ending.words}" for code, ending in ENDINGS.items() if code >= 0)
    parser = argparse.ArgumentParser(
        prog=as_typed("./run.sh"),
        description="Train 3D U-Nets on whole volumes or patches.",
        epilog="\n".join(["exit codes:", *endings]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    lines = {name: line for name, (_, line) in COMMANDS.items()}
    command = _choose(parser, lines, lambda name: importlib.import_module(COMMANDS[name][0]), argv)
    return command, parser.parse_args(argv)


# --- Private helpers ---


def _run(argv: Sequence[str]) -> int:
    try:
        command, args = parse(argv)
        options = arguments(command.OPTIONS, args, InputError)
        return command.run(*options)
    except BrokenPipeError:
        raise
    except (
        InputError,
        InstructionSetError,
        ModuleNotFoundError,
        KeyboardInterrupt,
        OSError,
        MemoryError,
    ) as error:
        print(*_explained(error), sep="\n", file=sys.stderr)
        return exit_code_of(error)


def _explained(error: BaseException) -> List[str]:
    """The lines to print of an exception. Raises it again if it is a bug of ours: a missing module
    of this project."""
    if isinstance(error, KeyboardInterrupt):
        return [f"interrupted: {str(error) or 'the same command continues if it can'}"]
    problems = [str(error)]
    if isinstance(error, InputError):
        problems = list(error.problems)
    elif isinstance(error, OSError) and not isinstance(error, NoRoomError):
        problems = [fault_of(error)]
    if isinstance(error, MemoryError):
        got = str(error) or "too little"
        problems = [
            f"memory must suffice for the command, got {got}; end other programs, or use a host "
            "with more"
        ]
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        if package in ("", "cpu3d", "memory_estimator", "models"):
            raise error
        extras = {"tensorflow": "", "tf_keras": "", "onnx": "onnx", "onnxruntime": "onnx"}
        todo = how_to_install(extras.get(package, "full"))
        problems = [f"{package} must be installed for this command, got none; {todo}"]
    return [f"error: {problem}" for problem in problems]


def _choose(
    parser: argparse.ArgumentParser,
    lines: Mapping[str, str],
    load: Callable[[str], Any],
    words: Sequence[str],
) -> Any:
    """Offer the commands of `lines`, and load the command that `words` begin with, or one of its
    `actions()`, alone."""
    offered = parser.add_subparsers(metavar="COMMAND", required=True)
    chosen = None
    for name, line in lines.items():
        sub = offered.add_parser(
            name, help=line, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if words and words[0] == name:
            chosen = load(name)
            sub.description = as_typed(chosen.__doc__)
            if hasattr(chosen, "actions"):
                chosen = _choose(sub, chosen.actions(), chosen.action, words[1:])
            else:
                add_options(sub, *chosen.OPTIONS)
    return chosen


if __name__ == "__main__":
    sys.exit(main())

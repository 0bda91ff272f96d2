"""Importing a command does nothing and needs no TensorFlow; rooms import only from those before
them."""

import ast
import functools
import graphlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cpu3d.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[1]


def sources(*folders, pattern="*.py"):
    """Python files in these folders of the root."""
    return [path for folder in folders for path in sorted((ROOT / folder).rglob(pattern))]


def run_python(script, *arguments):
    """The end of a script in a process of its own, with what it printed."""
    command = [sys.executable, "-c", script, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


PROBE = """
import importlib, os, sys, threading
before = dict(os.environ)
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert "tensorflow" not in sys.modules, name
assert dict(os.environ) == before, {k: v for k, v in os.environ.items() if before.get(k) != v}
assert threading.active_count() == 1, threading.enumerate()
"""


def test_commands_and_the_estimator_need_no_tensorflow_and_importing_them_does_nothing():
    """A laptop plans, prepares, scores and reports without it, and a command sets up the host
    before it is there."""
    names = [name for name in MODULES if re.fullmatch(r"memory_estimator.*\.[a-z]\w+", name)]
    names += [module for module, _ in COMMANDS.values()]
    # which `train` takes too
    names += ["cpu3d.experiments.folds", "cpu3d.inference.postprocessing.run_rules"]
    done = run_python(PROBE, *names)
    assert done.returncode == 0, done.stderr


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None  # as if it were not installed
from cpu3d.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("command", "exit_code", "words"),
    [("--help", 0, "exit codes"), ("train --help", 2, "numpy must be installed")],
)
def test_a_python_without_the_packages_is_told_what_to_install(command, exit_code, words):
    done = run_python(WITHOUT_NUMPY, *command.split())
    assert words in done.stdout + done.stderr
    assert done.returncode == exit_code


EXPORTS = """
import sys
import cpu3d
assert not {"numpy", "tensorflow"} & set(sys.modules)
from cpu3d import open_store
assert "tensorflow" not in sys.modules
from cpu3d import patch_dataset, volume_dataset
from cpu3d.data import source
same = [source.open_store, source.patch_dataset, source.volume_dataset]
assert [open_store, patch_dataset, volume_dataset] == same
assert {"open_store", "patch_dataset", "volume_dataset"} <= set(dir(cpu3d))
assert not hasattr(cpu3d, "no_such_name")
"""


def test_the_package_has_the_source_and_imports_it_when_it_is_asked_for():
    done = run_python(EXPORTS)
    assert done.returncode == 0, done.stderr


# --- The order of rooms ---

ORDER = (
    "models memory_estimator errors util data pages host store_facts settings run decisions "
    "plan plan_text distributed training inference report experiments bench __main__/demo"
)
"""Rooms with a / between them are beside each other."""

RANK = {room: rank for rank, rooms in enumerate(ORDER.split()) for room in rooms.split("/")}


def room_of(dotted):
    """The room of a dotted name, such as "cpu3d.data.store"; None outside the project. A command
    line, of whatever package, stands above all rooms."""
    if dotted in MODULES and dotted.endswith(".__main__"):
        return "__main__"
    package, _, rest = dotted.partition(".")
    if package != "cpu3d":
        return package if package in RANK else None
    return rest.partition(".")[0] or "errors"


@functools.cache
def imported(path):
    """Dotted names of what a module imports, at its top or within a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):  # of a module, or of a module's names
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sources("models", "memory_estimator", "cpu3d")
}


@pytest.fixture(scope="module")
def imports():
    """Dotted name of each module -> what it imports."""
    return {module: imported(path) for module, path in MODULES.items()}


def test_rooms_import_only_from_those_before_them(imports):
    wrong = []
    for module, names in imports.items():
        rank = RANK.get(room_of(module), 0)
        wrong += [(module, name) for name in names if RANK.get(room_of(name), 0) > rank]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle(imports):
    graphlib.TopologicalSorter(
        {module: names & set(imports) for module, names in imports.items()}
    ).prepare()

"""The direction of imports, and that importing does nothing."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

MAY_IMPORT = {
    "models": {"models"},
    "memory_estimator": {"memory_estimator", "models"},
    "cpu3d": {"cpu3d", "memory_estimator", "models"},
}
"""models <- memory_estimator <- cpu3d: a package on the left never asks one further right."""

NEED_TENSORFLOW = {
    "cpu3d.data.failures",
    "cpu3d.data.finish",
    "cpu3d.data.python_op",
    "cpu3d.data.source",
    "cpu3d.inference.export.network",
    "cpu3d.training.feeds",
    "cpu3d.training.fit",
    "cpu3d.inference.predictor",
    "cpu3d.training.learner",
    "cpu3d.training.losses",
    "cpu3d.training.validation",
    "models.blocks",
    "models.filter_gradient",
    "models.layers",
    "models.lean",
    "models.norm",
    "models.ordered",
    "models.unet3d",
}
"""The modules that import TensorFlow at the top. Every other one must not: a laptop without TensorFlow plans, prepares,
scores and reports with them, and a subcommand sets up the host before TensorFlow is there."""


def sources(*places):
    """Python files in these folders of the root."""
    for place in places:
        yield from sorted((ROOT / place).rglob("*.py"))


def imported(path):
    """(line, name) of every absolute import in a file, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_in_one_direction(package):
    against = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(package)
        for line, name in imported(path)
        if name.split(".")[0] in set(MAY_IMPORT) - MAY_IMPORT[package]
    ]
    assert not against, "\n".join(against)


def test_keras_is_reached_through_tensorflow_alone():
    """`import keras` is Keras 3 beside TensorFlow 2.16 and later; tf.keras is Keras 2 on both engines."""
    against = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(*MAY_IMPORT, "tests")
        for line, name in imported(path)
        if name.split(".")[0] in ("keras", "tf_keras")
    ]
    assert not against, "\n".join(against)


PROBE = """
import importlib, os, sys, threading
before = dict(os.environ)
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert "tensorflow" not in sys.modules, name + " imports TensorFlow and is not in NEED_TENSORFLOW"
assert dict(os.environ) == before, {k: v for k, v in os.environ.items() if before.get(k) != v}
assert threading.active_count() == 1, threading.enumerate()
"""


WITHOUT_TENSORFLOW = """
import importlib, sys
sys.modules["tensorflow"] = None  # importing it fails, and at once
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    print(name)
"""


def run(script, modules):
    """Run a script on modules in a fresh process; what it printed and its exit status."""
    return subprocess.run(
        [sys.executable, "-c", script, *modules],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_other_modules_need_no_tensorflow_and_importing_them_does_nothing():
    names = [module_name(path) for path in sources(*MAY_IMPORT) if path.name != "__main__.py"]
    done = run(PROBE, [name for name in names if name not in NEED_TENSORFLOW])
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_no_module_is_excused_that_needs_no_excuse():
    done = run(WITHOUT_TENSORFLOW, sorted(NEED_TENSORFLOW))
    assert (done.stdout, done.returncode) == ("", 0)


def test_the_probe_sees_tensorflow():
    assert "imports TensorFlow" in run(PROBE, ["tensorflow"]).stderr

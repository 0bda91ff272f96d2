"""Importing does nothing and most of it needs no TensorFlow; tests/test_import_order.py has the order."""

import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PACKAGES = ("models", "memory_estimator", "cpu3d")

NEED_TENSORFLOW = {
    "cpu3d.data.pipeline",
    "cpu3d.data.finish",
    "cpu3d.data.source",
    "cpu3d.inference.export.network",
    "cpu3d.training.feeds",
    "cpu3d.training.fit",
    "cpu3d.inference.predictor",
    "cpu3d.training.learner",
    "cpu3d.training.losses",
    "cpu3d.training.muon",
    "cpu3d.training.validation",
    "models.blocks",
    "models.finest_level",
    "models.recomputed",
    "models.slabs",
    "models.norm",
    "models.ordered",
    "models.passes",
    "models.supervision",
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


def test_keras_is_reached_through_tensorflow_alone():
    """`import keras` is Keras 3 beside TensorFlow 2.16 and later; tf.keras is Keras 2 on both engines."""
    against = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(*PACKAGES, "tests")
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


def test_other_modules_need_no_tensorflow_and_importing_them_does_nothing():
    names = [module_name(path) for path in sources(*PACKAGES) if path.name != "__main__.py"]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *(name for name in names if name not in NEED_TENSORFLOW)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)

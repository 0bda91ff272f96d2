"""The test suite itself: a test that ends its process ends the suite."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULE = """
import os, pytest

@pytest.mark.parametrize("number", range(4))
def test_one(number):
    if number == 2 and "{name}" == "b":
        os.abort()
"""


def test_a_test_that_aborts_ends_the_suite_and_is_named(tmp_path):
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(MODULE.format(name=name))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-c", ROOT / "pyproject.toml"]
    done = subprocess.run([*command, tmp_path], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "test_b.py::test_one[2]" in done.stdout.splitlines()[-2]

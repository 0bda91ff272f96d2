"""The notebook runs from its first cell to its last, as its outputs show."""

import json
import os
import subprocess
import sys

import pytest

from cpu3d.util.child import ROOT


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    notebook = json.loads((ROOT / "examples/first_hour.ipynb").read_text("utf-8"))
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    lines = [line for line in "\n".join(code).splitlines() if not line.startswith("%")]
    folder = str(tmp_path)
    environment = {**os.environ, "FOLDER": folder, "MPLBACKEND": "Agg", "XDG_DATA_HOME": folder}
    command = [sys.executable, "-c", "\n".join(lines)]
    printed = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
    assert "the saved model predicts the same" in printed

"""The notebook runs from its first cell to its last, as its outputs show."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    notebook = json.loads((ROOT / "examples/first_hour.ipynb").read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    lines = [line for line in "\n".join(code).splitlines() if not line.startswith("%")]
    folder = str(tmp_path)
    environment = {**os.environ, "FOLDER": folder, "MPLBACKEND": "Agg", "XDG_DATA_HOME": folder}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0
    assert "the saved model predicts the same" in done.stdout
    before, after = (
        float(part.split()[-1])
        for part in done.stdout.split("loss ")[-1].splitlines()[0].split("->")
    )
    assert after < before

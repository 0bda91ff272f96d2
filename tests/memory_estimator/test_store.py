"""`estimate --store`: what it needs."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import sys
for name in ("scipy", "tensorflow", "blosc2", "matplotlib"):
    sys.modules[name] = None
from memory_estimator.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_store_needs_no_package_but_those_that_it_names(phantom_store):
    words = ["--store", str(phantom_store.folder), "--host-memory", "64GiB"]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)

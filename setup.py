"""Beside pyproject.toml: native operations are built into the wheel, for its platform, if there is
a C compiler."""

import contextlib
import subprocess
import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).resolve().parent))

from models.native import build

build.main()
with contextlib.suppress(OSError, subprocess.CalledProcessError):  # without it NumPy makes samples
    build.build_library(Path(__file__).resolve().parent / "cpu3d/data/native", "samples")
options = {}
if build.existing():
    options["bdist_wheel"] = {"plat_name": "linux_x86_64"}
setup(options=options)

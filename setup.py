"""Beside pyproject.toml: what is in C is built into the wheel, for its platform, if there is a C
compiler."""

import contextlib
import subprocess
import sys
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from models.native import build

if {"bdist_wheel", "editable_wheel"} & {*sys.argv}:  # not where only metadata or an sdist is made
    build.main()
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # NumPy makes samples then
        build.build_library(HERE / "cpu3d/data/native", "samples")
options = {}
if build.existing():
    options["bdist_wheel"] = {"plat_name": "linux_x86_64"}
setup(options=options)

"""Beside pyproject.toml: where there is a C compiler, the wheel holds the own kernels, built here, and its platform."""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).resolve().parent))

from models.native import build

build.main()
setup(options={"bdist_wheel": {"plat_name": "linux_x86_64"}} if build.door_library() else {})

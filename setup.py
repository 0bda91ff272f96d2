"""Beside pyproject.toml: own operations are built into the wheel, for its platform, if there is a C compiler."""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).resolve().parent))

from models.native import build

build.main()
setup(options={"bdist_wheel": {"plat_name": "linux_x86_64"}} if build.door_library() else {})

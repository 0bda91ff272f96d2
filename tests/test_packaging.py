"""The wheel: its content, and its requirements beside those of the requirements files."""

import configparser
import email
import fnmatch
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cpu3d.util.records import VERSION
from memory_estimator.installed import as_typed, how_to_install, installed_engine
from tests.test_imports import ROOT, sources

PACKAGES = ("cpu3d", "memory_estimator", "models")


def portable(names):
    """Those of the packages' files, but for libraries, which are for one platform."""
    return {name for name in names if not re.search(r"/built/|__pycache__|\.dist-info/", name)}


def portable_files():
    return portable(str(path.relative_to(ROOT)) for path in sources(*PACKAGES, pattern="*.*"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy without libraries: setuptools writes beside its sources."""
    if not all(map(importlib.util.find_spec, ("setuptools", "wheel"))):
        pytest.skip("needs setuptools and wheel, which these requirements do not bring")
    folder = tmp_path_factory.mktemp("wheel")
    for name in (*portable_files(), "pyproject.toml", "setup.py", "README.md"):
        (folder / "sources" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "sources" / name)
    environment = dict(os.environ)
    if shutil.which("cc"):  # one that knows AVX2 alone and does not optimise: a third of the time
        refuse = 'case "$*" in *-mavx512* | *-DBFLOAT16_ROWS*) exit 1 ;; esac'
        compile_ = f'exec {shutil.which("cc")} "$@" -O0'
        (folder / "cc").write_text(f"#!/bin/sh\n{refuse}\n{compile_}\n")
        (folder / "cc").chmod(0o755)
        environment["CC"] = str(folder / "cc")
    flags = ("-q", "--no-deps", "--no-build-isolation", "--no-index")
    command = [sys.executable, "-m", "pip", "wheel", *flags, "./sources"]
    subprocess.run(command, cwd=folder, check=True, env=environment)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as file:
        yield file


def about(wheel, name):
    """Text of a file of the wheel's metadata."""
    (member,) = fnmatch.filter(wheel.namelist(), f"*.dist-info/{name}")
    return wheel.read(member).decode()


def metadata(wheel):
    return email.message_from_string(about(wheel, "METADATA"))


def test_the_wheel_holds_every_file_of_the_packages_the_version_and_both_commands(wheel):
    assert portable(wheel.namelist()) == portable_files()
    assert metadata(wheel)["Version"] == VERSION
    scripts = configparser.ConfigParser()
    scripts.read_string(about(wheel, "entry_points.txt"))
    assert set(scripts["console_scripts"]) == {"cpu3d", "memory-estimator"}


@pytest.fixture(scope="module")
def run_installed(wheel, tmp_path_factory):
    """A function that runs Python where the wheel is installed, with no program on the PATH; what
    it prints."""
    folder = tmp_path_factory.mktemp("installed")
    wheel.extractall(folder)

    def run(*words):
        # before the folder that these tests import from
        environment = {**os.environ, "PATH": "", "PYTHONPATH": str(folder)}
        command = [sys.executable, *words]
        return subprocess.check_output(command, cwd=folder, env=environment, text=True)

    return run


ON_ANOTHER_HOST = """
import platform
platform.libc_ver = lambda *_: ("glibc", "2.28")
from cpu3d.data.native import samples
from models.native import operations
print(operations.available(), samples.function_in_c() is not None)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or not shutil.which("cc"),
    reason="needs a C compiler of Linux x86-64",
)
def test_the_wheel_carries_the_built_operations(wheel, run_installed):
    assert wheel.filename.endswith("-py3-none-linux_x86_64.whl")
    usable = "avx2" in Path("/proc/cpuinfo").read_text().split()
    assert run_installed("-c", ON_ANOTHER_HOST) == f"{usable} {usable}\n"


@pytest.mark.parametrize(
    ("module", "usage"), [("memory_estimator", "memory-estimator"), ("cpu3d", "cpu3d")]
)
def test_what_pip_installs_calls_itself_as_its_user_types_it(run_installed, module, usage):
    printed = run_installed("-m", module, "--help")
    assert printed.startswith(f"usage: {usage} ")
    assert "run.sh" not in printed


@pytest.mark.parametrize(
    ("extras", "file"),
    [
        (("", "itex", "full", "onnx", "test"), "requirements.txt"),
        (("", "tensorflow", "full", "onnx", "test"), "requirements-latest.txt"),
        (("mlflow",), "requirements-mlflow.txt"),
    ],
)
def test_the_requirements_files_pin_what_the_wheel_asks_for(wheel, extras, file):
    lines = re.findall(r"^[A-Za-z].*?(?=\s+#|$)", (ROOT / file).read_text(), re.MULTILINE)
    pins = {canonicalize_name(pin.name): str(pin.specifier)[2:] for pin in map(Requirement, lines)}
    for need in map(Requirement, metadata(wheel).get_all("Requires-Dist")):
        is_asked = "" in extras
        if need.marker:
            is_asked = any(need.marker.evaluate({"extra": extra}) for extra in extras)
        if is_asked and need.name != "cpu3d":
            assert need.specifier.contains(pins[canonicalize_name(need.name)]), need


def test_a_checkout_calls_itself_as_its_user_types_it(monkeypatch):
    assert as_typed("./run.sh estimate, ./run.sh train") == "./run.sh estimate, ./run.sh train"
    assert how_to_install() == "run `./run.sh setup`"
    assert how_to_install("gpu") == "run `./run.sh setup --gpu`"
    for name in ("in_checkout", "itex_is_installed", "has_tensorflow"):
        monkeypatch.setattr(f"memory_estimator.installed.{name}", bool)  # False
    assert installed_engine() == "itex"  # on a laptop that plans
    assert how_to_install("full") == "run `pip install 'cpu3d[full]'`"
    assert how_to_install("mlflow") == how_to_install().replace("]", ",mlflow]")

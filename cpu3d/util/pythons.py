"""The Pythons of this host, and which of them has the fastest engine.

With the standard library alone, as no package is installed yet.
"""

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from typing import List, NamedTuple, Optional, Sequence, Tuple


class Engine(Enum):
    """What is installed."""

    FASTEST = "the fastest that there is for this host"
    LATEST = "TensorFlow 2.21"
    GPU = "TensorFlow 2.21 with CUDA"


STANDARD_FILE = "requirements.txt"  # TensorFlow 2.15 with ITEX
LATEST_FILE = "requirements-latest.txt"
GPU_FILE = "requirements-gpu.txt"  # includes LATEST_FILE
ENGINE_OF = {STANDARD_FILE: Engine.FASTEST, LATEST_FILE: Engine.LATEST, GPU_FILE: Engine.GPU}

STANDARD_VERSIONS = ("3.11", "3.10", "3.9")  # of Python, that have a wheel of ITEX
LATEST_VERSIONS = ("3.12", "3.13", "3.11", "3.10")  # TensorFlow 2.21 has no wheel for 3.9


class SetUpError(Exception):
    """What went wrong and what to do, a line each."""

    @property
    def lines(self) -> Tuple[str, ...]:
        return self.args


PROBE = """
import platform, struct, sys, sysconfig
try:
    import ensurepip, venv
    tools = "venv"
except ImportError:
    tools = "bare"
try:
    flags = open("/proc/cpuinfo").read().split()
except OSError:
    flags = ["avx2"]  # cannot tell
usable = platform.python_implementation() == "CPython" and struct.calcsize("P") == 8
version = "%d.%d" % sys.version_info[:2] if usable else "0.0"
cpu = "avx2" if "avx2" in flags else "avx" if "avx" in flags else "none"
print(version, tools, sysconfig.get_platform(), cpu)
"""
"""Prints the fields of `Python` but its command."""


class Python(NamedTuple):
    """A Python of this host."""

    command: str
    version: str  # such as "3.11"; "0.0" for one that will not do
    tools: str  # "venv", or "bare" for one that cannot make environments
    platform: str
    cpu: str  # the largest instruction set that matters here: "avx2", "avx" or "none"

    @property
    def has_fastest_engine(self) -> bool:
        """Whether there is a wheel of ITEX for it, but for its version."""
        return self.platform == "linux-x86_64" and self.cpu == "avx2"


@dataclass(frozen=True)
class Choice:
    """A Python, and the requirements file that suits it."""

    python: Python
    requirements: str
    without_venv: Tuple[str, ...]  # better versions that cannot make environments

    @property
    def names(self) -> Tuple[str, str]:
        return self.requirements, self.python.version


def choose(engine: Engine, kept_version: str = "") -> Choice:
    """The Python and the requirements for an engine; a version that was chosen before goes first.
    Raises SetUpError if there is none."""
    kept = [kept_version] if kept_version else []
    if engine is Engine.FASTEST:
        python, bare = _find([*kept, *STANDARD_VERSIONS, "3.12", "3.13"])
    else:
        python, bare = _find([*kept, *LATEST_VERSIONS])
    is_pc = python.platform == "linux-x86_64"
    if is_pc and python.cpu == "none":
        rule = "the CPU must have AVX, for which TensorFlow is built, got one without"
        raise SetUpError(f"{rule}; use another host")
    if engine is Engine.GPU:
        if not is_pc:
            rule = "setup --gpu must run on Linux x86-64, for which TensorFlow with CUDA is built"
            raise SetUpError(f"{rule}, got {python.platform}; use setup --latest")
        return Choice(python, GPU_FILE, bare)
    is_standard = python.has_fastest_engine and python.version in STANDARD_VERSIONS
    if engine is Engine.FASTEST and is_standard:
        return Choice(python, STANDARD_FILE, bare)
    if python.version not in LATEST_VERSIONS:
        python, bare = _find(LATEST_VERSIONS)
    return Choice(python, LATEST_FILE, bare)


def _find(versions: Sequence[str]) -> Tuple[Python, Tuple[str, ...]]:
    """The Python of the first of these versions that can make an environment, and the versions
    before it that cannot. Raises SetUpError if there is none."""
    bare: List[str] = []
    for wanted in versions:
        names = [f"python{wanted}", "python3", "python"]
        if os.environ.get("PYTHON"):
            names = [os.environ["PYTHON"]]
        for name in names:
            python = _probed(name)
            if python is None or python.version != wanted:
                continue
            if python.tools == "venv":
                return python, tuple(bare)
            if wanted not in bare:
                bare.append(wanted)
    raise _no_python("3.9" if "3.9" in versions else "3.10", bare)


def _probed(name: str) -> Optional[Python]:
    """The Python of a command; None if it does not run."""
    with contextlib.suppress(OSError):
        command = [name, "-c", PROBE]
        done = subprocess.run(command, capture_output=True, text=True)
        answer = done.stdout.split()
        if done.returncode == 0 and len(answer) == 4:
            return Python(name, *answer)
    return None


def _no_python(oldest: str, bare: Sequence[str]) -> SetUpError:
    """What to install."""
    if bare:
        rule = f"Python must come with venv and ensurepip, got Python {bare[0]} without"
        package = f"  Debian, Ubuntu: sudo apt install python{bare[0]}-venv"
        return SetUpError(f"{rule}; install them, then run this again:", package)
    kind = f"64-bit CPython {oldest} to 3.13"
    if os.environ.get("PYTHON"):
        got = os.environ["PYTHON"]
        return SetUpError(f"PYTHON must be a {kind} that runs, got {got}; unset it or name another")
    return SetUpError(
        f"a {kind} must be installed, got none; install one (3.11 gives the fastest engine), then "
        "run this again:",
        "  Debian, Ubuntu: sudo apt install python3 python3-venv",
        "  Fedora, RHEL:   sudo dnf install python3.11",
        "  anywhere:       https://www.python.org/downloads or https://docs.conda.io",
    )


def light_python() -> Optional[str]:
    """The first Python with what `estimate` needs; None if none has."""
    needs = "import sys, rich, msgspec; assert sys.version_info >= (3, 9)"
    if sys.platform != "linux":
        needs += "; import psutil"
    for python in (os.environ.get("PYTHON", "python3"), "python3", "python"):
        with contextlib.suppress(OSError):
            done = subprocess.run([python, "-c", needs], capture_output=True)
            if done.returncode == 0:
                return python
    return None

"""The installed project, or its checkout, and engines. Imports none of them."""

import contextlib
import functools
import importlib.util
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Dict, Iterable, Mapping

ENGINES = ("itex", "stock")


@functools.cache
def in_checkout() -> bool:
    """Whether this is the project's own folder, and not its installation by pip."""
    return (Path(__file__).resolve().parents[1] / "run.sh").is_file()


def as_typed(text: str) -> str:
    """`text`, which writes commands as `./run.sh train` and `./run.sh estimate`, with the commands
    that a user types here: these in a checkout, `cpu3d train` and `memory-estimator` if pip has
    installed them."""
    if in_checkout():
        return text
    return text.replace("./run.sh estimate", "memory-estimator").replace("./run.sh", "cpu3d")


def how_to_install(extra: str = "") -> str:
    """The command that installs an extra of pyproject.toml, by default this host's engine; run.sh's
    in a checkout."""
    if in_checkout() and extra == "mlflow":
        return f"run `{sys.executable} -m pip install -r requirements-mlflow.txt`"
    if in_checkout():
        return f"run `./run.sh setup{' --gpu' if extra == 'gpu' else ''}`"
    is_linux = sys.platform == "linux" and platform.machine() == "x86_64"
    engine = "itex" if is_linux and sys.version_info < (3, 12) else "tensorflow"
    # MLflow together with the engine: alone it would bring a protobuf that ITEX cannot take.
    extras = {"": engine, "mlflow": f"{engine},mlflow"}.get(extra, extra)
    return f"run `pip install 'cpu3d[{extras}]'`"


def itex_is_installed() -> bool:
    """Whether TensorFlow would load Intel's extension. Imports neither."""
    return importlib.util.find_spec("intel_extension_for_tensorflow") is not None


def has_tensorflow() -> bool:
    """Whether TensorFlow is installed here. Does not import it."""
    return importlib.util.find_spec("tensorflow") is not None


def installed_engine() -> str:
    """ "itex" unless TensorFlow is installed here without it: a laptop without either plans for the
    fast engine."""
    return "stock" if has_tensorflow() and not itex_is_installed() else "itex"


def engine_version(engine: str, versions: Mapping[str, str]) -> str:
    """An engine by its packages' versions, such as "TensorFlow 2.15.1, ITEX 2.15.0.0"; "" if one is
    missing."""
    packages = {"TensorFlow": "tensorflow"}
    if engine == "itex":
        packages["ITEX"] = "intel-extension-for-tensorflow"
    if not all(package in versions for package in packages.values()):
        return ""
    return ", ".join(f"{name} {versions[package]}" for name, package in packages.items())


def installed_versions() -> Dict[str, str]:
    """Engine -> `engine_version`, of the engines that are installed here."""
    packages = versions_of(("tensorflow", "intel-extension-for-tensorflow"))
    named = {engine: engine_version(engine, packages) for engine in ENGINES}
    return {engine: version for engine, version in named.items() if version}


def versions_of(packages: Iterable[str]) -> Dict[str, str]:
    """Package -> version, of the packages that are installed."""
    versions = {}
    for package in packages:
        # TensorFlow without CUDA is a package of its own, tensorflow-cpu.
        for name in (f"{package}-cpu", package):
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[package] = metadata.version(name)
    return versions

"""Which versions of what made a result."""

import platform
from importlib import metadata
from typing import Dict

VERSION = "0.1.0"
"""Of this project."""

LIBRARIES = ("tensorflow", "intel-extension-for-tensorflow", "tf_keras", "numpy", "nibabel", "blosc2", "scipy")


def versions() -> Dict[str, str]:
    """Name -> version of this project, Python and the libraries that are installed. Imports none of them."""
    found = {"cpu3d": VERSION, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found

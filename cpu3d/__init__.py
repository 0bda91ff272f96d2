"""Train 3D U-Nets on whole brain volumes or on patches: a store of volumes, training, scores,
prediction, reports.

    from cpu3d import open_store, volume_dataset

Importing `cpu3d` does nothing. TensorFlow is imported with the first name that needs it."""

import importlib
from typing import Any, List

__all__ = ["open_store", "patch_dataset", "volume_dataset"]

_MODULES = {
    "open_store": "cpu3d.data.store",
    "patch_dataset": "cpu3d.data.source",
    "volume_dataset": "cpu3d.data.source",
}
"""Exported name -> the module that has it."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> List[str]:
    return sorted([*globals(), *__all__])

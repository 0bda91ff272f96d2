"""How far predictions have been off from measured steps, and the margin that the upper bound takes from it."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Mapping, Union

SCHEMA = 1

SHIPPED = Path(__file__).with_name("accuracy.json")


@dataclass(frozen=True)
class Bound:
    """Errors as shares of what was measured, without their signs."""

    median: float
    worst: float

    def __str__(self) -> str:
        return f"± {self.median:.1%}, worst {self.worst:.1%}"


@dataclass(frozen=True)
class Accuracy:
    """What held over the measured configurations."""

    record: str
    """The file that the errors were computed from."""
    configurations: int
    """How many measured steps are in it that no constant was fitted to."""
    allocator_peak: Bound
    process_peak: Bound
    step_s: Bound
    margin_share: float
    """Of the process's peak: with `margin_bytes` what the upper bound lies above it."""
    margin_bytes: int

    def upper_bound(self, process_peak_bytes: int) -> int:
        """What no measured process of this predicted peak has exceeded."""
        return math.ceil(process_peak_bytes * (1 + self.margin_share)) + self.margin_bytes

    @property
    def basis(self) -> str:
        """What the errors rest on, for printing."""
        return f"{self.record}, {self.configurations} configurations"


def load_accuracy(path: Union[str, Path] = SHIPPED) -> Accuracy:
    """Read the shipped digest of the validation record. Raises ValueError for a damaged file or another schema."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        schema = content["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"accuracy {path} must be JSON with a schema, got {error!r}; restore it") from None
    if schema != SCHEMA:
        raise ValueError(f"accuracy {path} must have schema {SCHEMA}, got {schema}; write it anew from the record")
    try:
        return _accuracy(content)
    except (KeyError, TypeError) as error:
        raise ValueError(f"accuracy {path} must be complete, got {error!r}; restore it") from None


# --- Private helpers ---


def _accuracy(content: Mapping[str, Any]) -> Accuracy:
    bounds: Dict[str, Bound] = {name: Bound(**content[name]) for name in ("allocator_peak", "process_peak", "step_s")}
    return Accuracy(
        record=content["record"],
        configurations=content["configurations"],
        margin_share=content["margin"]["share"],
        margin_bytes=content["margin"]["bytes"],
        **bounds,
    )

"""How far predictions have been off from measured steps, and the margin that the upper bound takes from it."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Union

from memory_estimator.files import read_json
from memory_estimator.units import format_bytes

SCHEMA = 1

SHIPPED = Path(__file__).with_name("accuracy.json")

UNMEASURED = "error not measured"
"""Said instead of an error where no configuration was measured."""


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
    """How many measured steps are in it that no constant was fitted to; 0 where nothing was measured, and the figures
    below are then nobody's errors."""
    allocator_peak: Bound
    process_peak: Bound
    step_s: Bound
    margin_share: float
    """Of the process's peak: with `margin_bytes` what the upper bound lies above it."""
    margin_bytes: int
    exceeded: Optional[int] = None
    """How many of the configurations took more than their upper bound; None where nobody counted."""
    mean_slack: Optional[float] = None
    """How far the upper bounds lay above the measured peaks on average, as a share of these."""

    @property
    def is_measured(self) -> bool:
        return self.configurations > 0

    def upper_bound(self, process_peak_bytes: int) -> int:
        """What has to be free for a predicted peak: the peak and the margin."""
        return math.ceil(process_peak_bytes * (1 + self.margin_share)) + self.margin_bytes

    def error(self, name: str) -> str:
        """A figure's error for printing, such as "± 0.4%, worst 2.1%"; `name` is that of a field."""
        return str(getattr(self, name)) if self.is_measured else UNMEASURED

    @property
    def basis(self) -> str:
        """What the errors rest on, for printing."""
        if not self.is_measured:
            return "not measured"
        return f"{self.record}, {self.configurations} configurations larger than any that constants were fitted to"

    @property
    def margin(self) -> str:
        """What the upper bound is and how it has held, for printing."""
        rule = f"{self.margin_share:.1%} and {format_bytes(self.margin_bytes)} above the process peak"
        if not self.is_measured:
            return f"{rule}; chosen, not measured"
        if self.exceeded is None:
            return rule
        return f"{rule}; exceeded by {self.exceeded or 'none'} of {self.configurations}"


def load_accuracy(path: Union[str, Path] = SHIPPED) -> Accuracy:
    """Read the shipped digest of the validation record. Raises ValueError for a damaged file or another schema."""
    try:
        content = read_json(path)
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
        exceeded=content.get("exceeded"),
        mean_slack=content.get("mean_slack"),
        **bounds,
    )

"""What to do next about a run in some state."""

import re
from pathlib import Path
from typing import Sequence

WORKERS_DIFFER = "weights must be the same on all workers"
"""So begins WorkersDifferError: a host computes wrong, which no settings mend."""

DIVERGED = ("loss ", "weights must be finite")
"""So begins a DivergedError of steps that were too large."""


def advice(run: Path, state: str, again: str, rank: int, reasons: Sequence[str]) -> str:
    """What to do next, a line; "" where nothing is.

    `again` is what the same command would do. `reasons` are those of the workers in that state, `rank` the first of
    them.
    """
    if state in ("running", "starting", "stopping"):
        return ""
    if state == "finished":
        return (
            f"`evaluate --run {run}` scores it, `report --run {run}` tells of it; a larger --epochs or --steps goes on"
        )
    log = run / "logs" / f"worker-{rank}.log"
    look = f"; its last words are in {log}" if log.is_file() else ""
    if state in ("stalled", "suspended", "silent"):
        return f"when its process has ended, {again}{look}"
    if any(reason.startswith(WORKERS_DIFFER) for reason in reasons):
        return f"take the host that is named out of the run; then {again}{look}"
    if state == "diverged" and any(reason.startswith(DIVERGED) for reason in reasons):
        return f"train into another folder with a lower --learning-rate{look}"
    return f"{again}{look}"


def without_advice(detail: str) -> str:
    """Without "the same command continues" at its end, which the advice says, and from where."""
    return re.sub(r"[;:,.] *(and )?the same command (continues|goes on)[^;:]*$", "", detail, flags=re.IGNORECASE)

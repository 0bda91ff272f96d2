"""What a heartbeat, read now and here, says of its worker."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from cpu3d.training.heartbeat import BEAT_S, Heartbeat, beat_age_s, life_of, this_place
from memory_estimator.units import format_seconds

FINE = ("running", "starting", "stopping", "finished")
"""States that need nobody."""

BY_EXIT_CODE = {
    0: "finished",
    3: "too large",
    4: "diverged",
    5: "out of memory",
    6: "broken off",
    130: "interrupted",
    143: "interrupted",
}
"""What has become of a worker that noted its end; "failed" for other codes."""


@dataclass(frozen=True)
class WorkerState:
    """One worker in a word, and in a sentence where the word does not do."""

    state: str
    """One of FINE and of the values of BY_EXIT_CODE, or "failed", "stalled", "suspended", "silent", "dead",
    "unknown"."""
    detail: str = ""
    """What is known besides, and what to look at."""

    @property
    def is_fine(self) -> bool:
        return self.state in FINE


def state_of(run: Path, heartbeat: Heartbeat, now: Optional[float] = None) -> WorkerState:
    """Judge a worker by its heartbeat: with its process where that is of this place, else by the age of its beat."""
    now = time.time() if now is None else now
    if heartbeat.exit_code is not None:
        return WorkerState(BY_EXIT_CODE.get(heartbeat.exit_code, "failed"), heartbeat.reason)
    who, here = f"process {heartbeat.pid} on {heartbeat.host_name}", heartbeat.place == this_place()
    life = life_of(run, heartbeat, now)
    if life == "dead":
        return WorkerState(
            "dead",
            f"{who} is gone without a word, as after kill -9, a crash, or for want of memory (`dmesg` tells the last)",
        )
    if life == "suspended":
        return WorkerState("suspended", f"{who} was stopped by a signal; `kill -CONT {heartbeat.pid}` lets it go on")
    if heartbeat.stalled:
        return WorkerState("stalled", heartbeat.stalled)
    if life == "silent":
        age = beat_age_s(run, heartbeat, now)
        look = f"look at {who}" if here else f"look on {heartbeat.host_name} whether process {heartbeat.pid} lives"
        return WorkerState("silent", f"no beat for {format_seconds(age)}, where one comes every {BEAT_S:g} s; {look}")
    if heartbeat.stop:
        return WorkerState("stopping", heartbeat.stop)
    return WorkerState("starting" if heartbeat.phase == "starting" else "running")

"""Sums over the events of a run's log: pace, costs, how the last attempt ended.

    costs = costs_of(read_events(run), coarse_steps=14)
    left_s = Pace(events).seconds_left(step, steps)

Events are as `cpu3d.run.log.read_events` gives them: a value may be missing, but is of its type.
"""

import collections
import math
import statistics
from dataclasses import dataclass
from typing import Any, Deque, Dict, Iterable, List, Mapping, Optional, Sequence

Events = Sequence[Mapping[str, Any]]

RECENT = 50  # steps that a run's present loss and pace are of
LONGEST_S = 1e9  # a longer time to go, 30 years, counts as not known


def of_kind(events: Events, *kinds: str) -> List[Mapping[str, Any]]:
    """The events of these kinds, in order."""
    return [event for event in events if event["event"] in kinds]


def numbers(events: Events, key: str) -> List[float]:
    """The values under a key, of the events that have one."""
    return [event[key] for event in events if event.get(key) is not None]


def median(values: Sequence[float]) -> Optional[float]:
    """The median; None for no values."""
    return float(statistics.median(values)) if values else None


def last_end(events: Events) -> Mapping[str, Any]:
    """The event that ended the last attempt; empty if it has not ended, or was killed."""
    last = (of_kind(events, "start", "step", "end") or [{}])[-1]
    return last if last.get("event") == "end" else {}


@dataclass(frozen=True)
class Costs:
    """The costs of a run in all its attempts. None is not known."""

    steps: int
    voxels: int  # that the network has seen in them
    step_s: Optional[float]  # median of the full steps, waiting for data included
    coarse_step_s: Optional[float]  # of the coarse ones
    steps_s: float  # of all steps, the compilation in the first ones included
    wait_s: float  # of it, waiting for data
    validation_s: float
    checkpoint_s: float
    train_s: Optional[float]  # wall time of all attempts; None if the last one has not ended
    peak_rss_bytes: Optional[float]
    allocator_peak_bytes: Optional[float]


def costs_of(events: Events, coarse_steps: int = 0) -> Costs:
    """The costs of a run whose first `coarse_steps` steps were at half its resolution."""
    steps, ends = of_kind(events, "step"), of_kind(events, "end")
    coarse = [event for event in steps if event["step"] <= coarse_steps]
    full = [event for event in steps if event["step"] > coarse_steps]
    return Costs(
        steps=max((event["step"] for event in steps), default=0),
        voxels=sum(numbers(steps, "voxels")),
        step_s=median(numbers(full, "step_s")),
        coarse_step_s=median(numbers(coarse, "step_s")),
        steps_s=math.fsum(numbers(steps, "step_s")),
        wait_s=math.fsum(numbers(steps, "wait_s")),
        validation_s=math.fsum(numbers(of_kind(events, "validation"), "seconds")),
        checkpoint_s=math.fsum(numbers(of_kind(events, "checkpoint"), "seconds")),
        train_s=last_end(events).get("seconds"),
        peak_rss_bytes=max([*numbers(ends, "peak_rss_bytes"), *numbers(steps, "rss_bytes")], default=None),
        allocator_peak_bytes=max(numbers(ends, "allocator_peak_bytes"), default=None),
    )


class Pace:
    """The pace of a run's last attempt: coarse steps and full ones apart."""

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()):
        self._begin = self._step = self._coarse_steps = 0
        self._beside_s = 0.0
        self._predicted_s: Dict[bool, Optional[float]] = {}
        self._steps_s: Dict[bool, Deque[float]] = {coarse: collections.deque(maxlen=RECENT) for coarse in (True, False)}
        for event in events:
            self.note(event)

    def note(self, event: Mapping[str, Any]) -> None:
        """Count an event."""
        kind, step = event["event"], event["step"]
        if kind == "start":
            self.__init__()
            self._begin = self._step = step
            self._coarse_steps = event.get("coarse_steps", 0)
            full = event.get("predicted", {})
            self._predicted_s = {False: full.get("step_s"), True: full.get("coarse", {}).get("step_s")}
        elif kind == "step" and "step_s" in event:
            if step - 1 not in (self._begin, self._coarse_steps):  # these compile
                self._steps_s[step <= self._coarse_steps].append(event["step_s"])
            self._step = step
        elif kind in ("validation", "checkpoint"):
            self._beside_s += event.get("seconds", 0.0)

    def seconds_left(self, step: int, steps: Optional[int]) -> Optional[float]:
        """Seconds from `step` to the end: each step left at the median of the recent ones of its kind, plus its share
        of the seconds of validations and saves. A kind without recent steps takes what was predicted, times by how much
        the prediction of the other kind was off. None if neither is known, and above LONGEST_S."""
        if not steps or step > steps:
            return None
        seen = {coarse: statistics.median(each) for coarse, each in self._steps_s.items() if each}
        off = [seen[coarse] / self._predicted_s[coarse] for coarse in seen if self._predicted_s.get(coarse)]
        left, left_s = {True: max(min(self._coarse_steps, steps) - step, 0)}, 0.0
        left[False] = steps - step - left[True]
        for coarse, count in left.items():
            predicted_s = self._predicted_s.get(coarse)
            step_s = seen.get(coarse, predicted_s and predicted_s * (off[0] if off else 1.0))
            if count and step_s is None:
                return None
            left_s += count * (step_s or 0.0)
        done = self._step - self._begin
        left_s += (steps - step) * (self._beside_s / done if done > 0 else 0.0)
        return left_s if left_s <= LONGEST_S else None

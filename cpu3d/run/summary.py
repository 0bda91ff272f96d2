"""Sums over the events of a run's log: costs, pace, how the last attempt ended.

    history = History(read_events(run))
    costs = history.costs(coarse_steps=14)
    left_s = history.pace.seconds_left(step, steps)

Events are as `cpu3d.run.log.read_events` gives them: a value may be missing, but is of its type.
"""

import collections
import math
import statistics
from dataclasses import dataclass
from typing import Any, Deque, Dict, Iterable, List, Mapping, Optional, Sequence

import numpy as np

from cpu3d.data.region import Array

Event = Mapping[str, Any]
Events = Sequence[Event]

# The kinds of event of which the last one shows whether a run has ended.
PROGRESS_KINDS = ("start", "step", "end")
RECENT = 50  # steps that a run's present loss and pace are of
ENOUGH_STEPS = 3  # at a resolution, from which on their mean is taken for those that are left
LONGEST_S = 1e9  # a longer time to go, 30 years, counts as not known


def numbers(events: Events, key: str) -> List[float]:
    """The values under a key, of the events that have one."""
    return [event[key] for event in events if event.get(key) is not None]


def median(values: Sequence[Any]) -> Optional[float]:
    """The median; None for no values."""
    return float(np.median(values)) if values else None


class Columns:
    """Numbers of events, a row an event: `columns["loss"]`, and `columns.dice["WT"]` of regions. A
    number that an event does not have is NaN."""

    def __init__(self, events: Sequence[Event]):
        self.events = events

    def __getitem__(self, name: str) -> Array:
        return np.array([event.get(name, math.nan) for event in self.events], float)

    @property
    def dice(self) -> Dict[str, Array]:
        """Region -> its Dice, in the order in which the regions came."""
        each = [event.get("dice", {}) for event in self.events]
        regions = dict.fromkeys(region for dice in each for region in dice)
        return {
            region: np.array([dice.get(region, math.nan) for dice in each], float)
            for region in regions
        }


def finite(values: Array) -> Array:
    """The numbers of a column without NaN."""
    return values[~np.isnan(values)]


@dataclass(frozen=True)
class Costs:
    """The costs of a run in all its attempts. None is not known."""

    steps: int
    voxels: int  # that the network has seen in them
    # mean of the full steps, waiting for data included, but for those that compile
    step_s: Optional[float]
    steps_s: float  # of all steps, the compilation in the first ones included
    wait_s: float  # of it, waiting for data
    validation_s: float
    checkpoint_s: float
    train_s: Optional[float]  # wall time of all attempts; None if the last one has not ended
    peak_rss_bytes: Optional[float]
    allocator_peak_bytes: Optional[float]


class Pace:
    """The pace of a run's last attempt, coarse steps and full ones apart; takes in its events one
    by one."""

    def __init__(self, events: Iterable[Event] = ()):
        self._begin_attempt({"step": 0})
        for event in events:
            self.note(event)

    def _begin_attempt(self, start: Event) -> None:
        self.start = start
        self._begin: int = start["step"]
        self._step = self._begin
        self._coarse_steps: int = start.get("coarse_steps", 0)
        self._other_s = 0.0  # of validations and saves
        # Whether coarse -> seconds of steps.
        self._recent_s: Dict[bool, Deque[float]] = {
            coarse: collections.deque(maxlen=RECENT) for coarse in (True, False)
        }

    def note(self, event: Event) -> None:
        """Count an event."""
        kind = event["event"]
        step = event["step"]
        if kind == "start":
            self._begin_attempt(event)
        elif kind == "step" and "step_s" in event:
            if not self.compiles(step):
                self._recent_s[step <= self._coarse_steps].append(event["step_s"])
            self._step = step
        elif kind in ("validation", "checkpoint"):
            self._other_s += event.get("seconds", 0.0)

    def compiles(self, step: int) -> bool:
        """Whether a step is the attempt's first on its grid: its seconds are not those of a
        step."""
        return step - 1 in (self._begin, self._coarse_steps)

    def step_s(self, step: int) -> Optional[float]:
        """The mean seconds of the recent steps at the resolution of a step; None if there are
        none."""
        recent_s = self._recent_s[step <= self._coarse_steps]
        return statistics.fmean(recent_s) if recent_s else None

    def seconds_left(
        self, step: int, steps: Optional[int], predicted: Optional[Event] = None
    ) -> Optional[float]:
        """Seconds from `step` to the last of `steps`: each that is left at the mean of the recent
        ones at its resolution, before there are ENOUGH_STEPS at what was predicted, plus its share
        of the seconds of validations and saves so far. `predicted` is by default that of the
        attempt's first event. None if a resolution has neither, and above LONGEST_S."""
        if not steps or step > steps:
            return None
        if predicted is None:
            predicted = self.start.get("predicted", {})
        coarse_left = max(min(self._coarse_steps, steps) - step, 0)
        left_s = 0.0
        for coarse, count in ((True, coarse_left), (False, steps - step - coarse_left)):
            if not count:
                continue
            recent_s = self._recent_s[coarse]
            expected = predicted.get("coarse", {}) if coarse else predicted
            step_s = expected.get("step_s")
            if len(recent_s) >= ENOUGH_STEPS or (recent_s and step_s is None):
                step_s = statistics.fmean(recent_s)
            if step_s is None:
                return None
            left_s += count * step_s
        done = self._step - self._begin
        if done > 0:
            left_s += (steps - step) * (self._other_s / done)
        return left_s if left_s <= LONGEST_S else None


class History:
    """What a log adds up to."""

    def __init__(self, events: Iterable[Event]):
        self.pace = Pace()
        self.last: Event = {}  # of all events
        self.end: Event = {}
        """The event that ended the last attempt; {} if it has not ended, or was killed."""
        self._events: Dict[str, List[Event]] = collections.defaultdict(list)  # by kind
        for event in events:
            kind = event["event"]
            self.last = event
            self.pace.note(event)
            if kind in PROGRESS_KINDS:
                self.end = event if kind == "end" else {}
            if kind == "step":
                event = {**event, "compiles": self.pace.compiles(event["step"])}
            self._events[kind].append(event)
        self.starts = self._events["start"]  # one an attempt
        self.steps = Columns(self._events["step"])
        self.validations = Columns(self._events["validation"])

    @property
    def last_step(self) -> int:
        """The steps that are done by the log."""
        return max((event["step"] for event in self.steps.events), default=0)

    def costs(self, coarse_steps: int = 0) -> Costs:
        """The costs of a run whose first `coarse_steps` steps were at half its resolution."""
        steps = self.steps
        ends = self._events["end"]
        rss_bytes = [*numbers(steps.events, "rss_bytes"), *numbers(ends, "peak_rss_bytes")]
        return Costs(
            steps=self.last_step,
            voxels=int(finite(steps["voxels"]).sum()),
            step_s=self.mean_step_s(coarse_steps),
            steps_s=math.fsum(finite(steps["step_s"])),
            wait_s=math.fsum(finite(steps["wait_s"])),
            validation_s=math.fsum(finite(self.validations["seconds"])),
            checkpoint_s=math.fsum(numbers(self._events["checkpoint"], "seconds")),
            train_s=self.end.get("seconds"),
            peak_rss_bytes=max(rss_bytes, default=None),
            allocator_peak_bytes=max(numbers(ends, "allocator_peak_bytes"), default=None),
        )

    def mean_step_s(
        self, coarse_steps: int, *, coarse: bool = False, waiting: bool = True
    ) -> Optional[float]:
        """The mean seconds of the full steps, or of the coarse ones, that do not compile; without
        `waiting` less those of waiting for data. None if there are none."""
        is_coarse = self.steps["step"] <= coarse_steps
        seconds = self.steps["step_s"]
        if not waiting:
            seconds = seconds - np.nan_to_num(self.steps["wait_s"])
        counted = finite(seconds[(is_coarse == coarse) & (self.steps["compiles"] == 0)])
        return float(np.mean(counted)) if len(counted) else None

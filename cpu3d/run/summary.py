"""Sums over the events of a run's log: pace, costs, how the last attempt ended.

    history = History(iter_events(run))
    costs = history.costs(coarse_steps=14)
    left_s = Pace(recent_events(run)).seconds_left(step, steps)

Events are as `cpu3d.run.log.iter_events` gives them: a value may be missing, but is of its type.
"""

import collections
import math
import statistics
from array import array
from dataclasses import dataclass
from typing import Any, Deque, Dict, Iterable, List, Mapping, Optional, Sequence

import numpy as np

Event = Mapping[str, Any]
Events = Sequence[Event]

COURSE = (
    "start",
    "step",
    "end",
)  # the kinds of event of which the last one shows whether a run has ended
RECENT = 50  # steps that a run's present loss and pace are of
LONGEST_S = 1e9  # a longer time to go, 30 years, counts as not known


def of_kind(events: Events, *kinds: str) -> List[Event]:
    """The events of these kinds, in order."""
    return [event for event in events if event["event"] in kinds]


def numbers(events: Events, key: str) -> List[float]:
    """The values under a key, of the events that have one."""
    return [event[key] for event in events if event.get(key) is not None]


def median(values: Sequence[float]) -> Optional[float]:
    """The median; None for no values."""
    return float(np.median(values)) if len(values) else None


class Columns:
    """Numbers of events, a row an event: `columns["loss"]`, and `columns.dice["WT"]` of regions.

    A number takes eight bytes: a million steps are 80 MB, where their events would be 1.6 GB.
    """

    def __init__(self, *names: str):
        self._numbers = {name: array("d") for name in names}
        self._dice: Dict[str, array] = {}
        self._rows = 0

    def add(self, event: Event) -> None:
        """Add a row; a number that the event does not have is NaN."""
        for name, column in self._numbers.items():
            column.append(event.get(name, math.nan))
        dice = event.get("dice", {})
        for region in dice:
            if region not in self._dice:
                self._dice[region] = array("d", [math.nan]) * self._rows
        for region, column in self._dice.items():
            column.append(dice.get(region, math.nan))
        self._rows += 1

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self._numbers[name])

    @property
    def dice(self) -> Dict[str, np.ndarray]:
        """Region -> its Dice, in the order in which the regions came."""
        return {region: np.asarray(column) for region, column in self._dice.items()}


def known(values: np.ndarray) -> np.ndarray:
    """The numbers of a column that were logged."""
    return values[~np.isnan(values)]


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


class History:
    """What a log adds up to, taken in event by event. Of steps and validations it keeps numbers
    alone, so it holds a run of any length."""

    def __init__(self, events: Iterable[Event]):
        self.starts: List[Event] = []  # one an attempt
        self.steps = Columns(
            *("step", "loss", "learning_rate", "voxels", "step_s", "wait_s", "rss_bytes")
        )
        self.validations = Columns(*("step", "loss", "mean_dice", "seconds"))
        self.last: Event = {}  # of all events
        self.last_validation: Event = {}
        self.pace = Pace()
        self._last_of_course: Event = {}
        self._checkpoint_s = 0.0
        self._peaks: Dict[str, float] = {}  # by field of "end"
        for event in events:
            self._note(event)

    @property
    def last_step(self) -> int:
        """The steps that are done by the log."""
        return int(self.steps["step"].max()) if len(self.steps) else 0

    @property
    def end(self) -> Event:
        """The event that ended the last attempt; {} if it has not ended, or was killed."""
        return self._last_of_course if self._last_of_course.get("event") == "end" else {}

    def costs(self, coarse_steps: int = 0) -> Costs:
        """The costs of a run whose first `coarse_steps` steps were at half its resolution."""
        steps = self.steps
        return Costs(
            steps=self.last_step,
            voxels=int(known(steps["voxels"]).sum()),
            step_s=self.median_step_s(coarse_steps),
            coarse_step_s=self.median_step_s(coarse_steps, coarse=True),
            steps_s=math.fsum(known(steps["step_s"])),
            wait_s=math.fsum(known(steps["wait_s"])),
            validation_s=math.fsum(known(self.validations["seconds"])),
            checkpoint_s=self._checkpoint_s,
            train_s=self.end.get("seconds"),
            peak_rss_bytes=self._peaks.get("peak_rss_bytes"),
            allocator_peak_bytes=self._peaks.get("allocator_peak_bytes"),
        )

    def median_step_s(
        self, coarse_steps: int, *, coarse: bool = False, waiting: bool = True
    ) -> Optional[float]:
        """The median seconds of the full steps, or of the coarse ones; without `waiting` less those
        of waiting for data."""
        is_coarse = self.steps["step"] <= coarse_steps
        seconds = self.steps["step_s"]
        if not waiting:
            seconds = seconds - np.nan_to_num(self.steps["wait_s"])
        return median(known(seconds[is_coarse == coarse]))

    def _note(self, event: Event) -> None:
        kind = event["event"]
        self.last = event
        self.pace.note(event)
        if kind in COURSE:
            self._last_of_course = event
        if kind == "start":
            self.starts.append(event)
        elif kind == "step":
            self.steps.add(event)
        elif kind == "validation":
            self.last_validation = event
            self.validations.add(event)
        elif kind == "checkpoint":
            self._checkpoint_s += event.get("seconds", 0.0)
        if kind in ("step", "end"):
            self._note_peak("peak_rss_bytes", event.get("rss_bytes"))
            for name in ("peak_rss_bytes", "allocator_peak_bytes"):
                self._note_peak(name, event.get(name))

    def _note_peak(self, name: str, size_bytes: Optional[float]) -> None:
        if size_bytes is not None:
            self._peaks[name] = max(size_bytes, self._peaks.get(name, 0))


class Pace:
    """The pace of a run's last attempt: coarse steps and full ones apart."""

    def __init__(self, events: Iterable[Event] = ()):
        self._begin = self._step = self._coarse_steps = 0
        self._beside_s = 0.0
        self._predicted_s: Dict[bool, Optional[float]] = {}
        self._steps_s: Dict[bool, Deque[float]] = {
            coarse: collections.deque(maxlen=RECENT) for coarse in (True, False)
        }
        for event in events:
            self.note(event)

    def note(self, event: Event) -> None:
        """Count an event."""
        kind, step = event["event"], event["step"]
        if kind == "start":
            self.__init__()
            self._begin = self._step = step
            self._coarse_steps = event.get("coarse_steps", 0)
            full = event.get("predicted", {})
            self._predicted_s = {
                False: full.get("step_s"),
                True: full.get("coarse", {}).get("step_s"),
            }
        elif kind == "step" and "step_s" in event:
            if step - 1 not in (self._begin, self._coarse_steps):  # these compile
                self._steps_s[step <= self._coarse_steps].append(event["step_s"])
            self._step = step
        elif kind in ("validation", "checkpoint"):
            self._beside_s += event.get("seconds", 0.0)

    def seconds_left(self, step: int, steps: Optional[int]) -> Optional[float]:
        """Seconds from `step` to the end: each step left at the median of the recent ones of its
        kind, plus its share of the seconds of validations and saves. A kind without recent steps
        takes what was predicted, times by how much the prediction of the other kind was off. None
        if neither is known, and above LONGEST_S."""
        if not steps or step > steps:
            return None
        seen = {coarse: statistics.median(each) for coarse, each in self._steps_s.items() if each}
        off = [
            seen[coarse] / self._predicted_s[coarse]
            for coarse in seen
            if self._predicted_s.get(coarse)
        ]
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

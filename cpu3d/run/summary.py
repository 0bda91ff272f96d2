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
from typing import Any, Deque, Dict, Iterable, List, Mapping, Optional, Sequence, Union

import numpy as np

from cpu3d.data.region import Array
from memory_estimator.training import OwnSteps

Event = Mapping[str, Any]
Events = Sequence[Event]

# The kinds of event of which the last one shows whether a run has ended.
COURSE = ("start", "step", "end")
# What the seconds of a step depend on beside the host, and of the host, as the first event of an
# attempt has it.
WAY = ("workers", "device", "precision", "policy", "micro_batch", "grid")
HOST = ("cpu", "cores", "instructions")
RECENT = 50  # steps that a run's present loss and pace are of
ENOUGH_STEPS = 3  # of a run's own on a grid, from which on their seconds are taken for those left
LONGEST_S = 1e9  # a longer time to go, 30 years, counts as not known


def of_kind(events: Events, *kinds: str) -> List[Event]:
    """The events of these kinds, in order."""
    return [event for event in events if event["event"] in kinds]


def numbers(events: Events, key: str) -> List[float]:
    """The values under a key, of the events that have one."""
    return [event[key] for event in events if event.get(key) is not None]


def median(values: Union[Sequence[float], Deque[float], Array]) -> Optional[float]:
    """The median; None for no values."""
    if not len(values):
        return None
    return float(np.median(values))


class Columns:
    """Numbers of events, a row an event: `columns["loss"]`, and `columns.dice["WT"]` of regions.

    A number takes eight bytes: a million steps are 80 MB, where their events would be 1.6 GB.
    """

    def __init__(self, *names: str):
        self._numbers = {name: array("d") for name in names}
        self._dice: Dict[str, array[float]] = {}
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

    def __getitem__(self, name: str) -> Array:
        return np.asarray(self._numbers[name])

    @property
    def dice(self) -> Dict[str, Array]:
        """Region -> its Dice, in the order in which the regions came."""
        return {region: np.asarray(column) for region, column in self._dice.items()}


def known(values: Array) -> Array:
    """The numbers of a column that were logged."""
    return values[~np.isnan(values)]


@dataclass(frozen=True)
class Costs:
    """The costs of a run in all its attempts. None is not known."""

    steps: int
    voxels: int  # that the network has seen in them
    # median of the full steps, waiting for data included, but for those that compile
    step_s: Optional[float]
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
            "step", "loss", "learning_rate", "voxels", "step_s", "wait_s", "rss_bytes", "compiles"
        )
        self.validations = Columns("step", "loss", "mean_dice", "seconds")
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
        if not len(self.steps):
            return 0
        return int(self.steps["step"].max())

    @property
    def end(self) -> Event:
        """The event that ended the last attempt; {} if it has not ended, or was killed."""
        if self._last_of_course.get("event") != "end":
            return {}
        return self._last_of_course

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
        """The median seconds of the full steps, or of the coarse ones, that do not compile; without
        `waiting` less those of waiting for data."""
        is_coarse = self.steps["step"] <= coarse_steps
        seconds = self.steps["step_s"]
        if not waiting:
            seconds = seconds - np.nan_to_num(self.steps["wait_s"])
        return median(known(seconds[(is_coarse == coarse) & self.is_warm]))

    @property
    def is_warm(self) -> Array:
        """Of each of the steps whether its seconds are those of a step: it does not compile."""
        return self.steps["compiles"] == 0

    def _note(self, event: Event) -> None:
        kind = event["event"]
        self.last = event
        self.pace.note(event)
        if kind in COURSE:
            self._last_of_course = event
        if kind == "start":
            self.starts.append(event)
        elif kind == "step":
            self.steps.add({**event, "compiles": self.pace.compiles(event["step"])})
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


def take_as_long(before: Event, now: Event) -> bool:
    """Whether steps of two attempts take the same time, by their first events: both are computed in
    the same way, on a host of the same kind. Not so if something of it was not logged."""
    for first, second, names in (
        (before, now, WAY),
        (before.get("host", {}), now.get("host", {}), HOST),
    ):
        for name in names:
            if first.get(name) is None or first[name] != second.get(name):
                return False
    return True


class _Steps:
    """The steps of a run at one resolution."""

    def __init__(self) -> None:
        self.predicted_s: Optional[float] = None  # of a step
        self.recent_s: Deque[float] = collections.deque(maxlen=RECENT)
        # Of a worker on a held-out case in a validation; the attempt's first one compiles.
        self.case_s: Deque[float] = collections.deque(maxlen=RECENT)
        self.first_case_s: Optional[float] = None

    def note_validation(self, case_s: float) -> None:
        """Count a validation of so many seconds a case."""
        if self.first_case_s is None:
            self.first_case_s = case_s
        else:
            self.case_s.append(case_s)

    def error(self) -> Optional[float]:
        """By how much the recent steps took longer than was predicted, as a factor; None if either
        is not known."""
        if not self.recent_s or not self.predicted_s:
            return None
        return statistics.median(self.recent_s) / self.predicted_s

    def step_s(self, other: "_Steps") -> Optional[float]:
        """The seconds of a step: the median of the recent ones, else what was predicted, times the
        `error` of the steps at the other resolution; None if neither is known."""
        if self.recent_s:
            return statistics.median(self.recent_s)
        error = other.error()
        if self.predicted_s is None or error is None:
            return self.predicted_s
        return self.predicted_s * error


class Pace:
    """The pace of a run's last attempt, and of those before it whose steps took as long: coarse
    steps and full ones apart."""

    def __init__(self, events: Iterable[Event] = ()):
        self.start: Event = {}  # the first event of the last attempt
        self._begin_attempt({"step": 0})
        for event in events:
            self.note(event)

    def _begin_attempt(self, start: Event) -> None:
        """Forget the attempt before, unless its steps took as long; `start` is the first event of
        the new one."""
        if not take_as_long(self.start, start):
            self._since: int = start["step"]  # of the steps that count
            self._beside_s = 0.0  # of validations and saves
            self._full = _Steps()
            self._coarse = _Steps()
        for kind in (self._full, self._coarse):
            kind.first_case_s = None
        predicted = start.get("predicted", {})
        self.start = start
        self._begin: int = start["step"]
        self._step = start["step"]
        self._coarse_steps: int = start.get("coarse_steps", 0)
        self._full.predicted_s = predicted.get("step_s")
        self._coarse.predicted_s = predicted.get("coarse", {}).get("step_s")

    def note(self, event: Event) -> None:
        """Count an event."""
        kind = event["event"]
        step = event["step"]
        if kind == "start":
            self._begin_attempt(event)
        elif kind == "step" and "step_s" in event:
            if not self.compiles(step):
                self._kind(step).recent_s.append(event["step_s"])
            self._step = step
        elif kind in ("validation", "checkpoint"):
            self._beside_s += event.get("seconds", 0.0)
        if kind == "validation" and event.get("cases") and "seconds" in event:
            cases = math.ceil(event["cases"] / self.start.get("workers", 1))  # of a worker
            self._kind(step).note_validation(event["seconds"] / cases)

    def compiles(self, step: int) -> bool:
        """Whether a step is the attempt's first on its grid: its seconds are not those of a
        step."""
        return step - 1 in (self._begin, self._coarse_steps)

    def step_s(self, step: int) -> Optional[float]:
        """The median seconds of the recent steps on the grid of a step; None if there are none."""
        return median(self._kind(step).recent_s)

    def own_steps(self, *, coarse: bool) -> Optional[OwnSteps]:
        """The recent steps in full, or the coarse ones, with their validations; None for too
        few."""
        kind = self._coarse if coarse else self._full
        if len(kind.recent_s) < ENOUGH_STEPS:
            return None
        step_s = statistics.median(kind.recent_s)
        case_s = median(kind.case_s) if kind.case_s else kind.first_case_s
        return OwnSteps(len(kind.recent_s), step_s, case_s)

    def _kind(self, step: int) -> _Steps:
        return self._coarse if step <= self._coarse_steps else self._full

    def seconds_left(self, step: int, steps: Optional[int]) -> Optional[float]:
        """Seconds from `step` to the end: each step left at the median of the recent ones of its
        kind, plus its share of the seconds of validations and saves. A kind without recent steps
        takes what was predicted, times by how much the prediction of the other kind was off. None
        if neither is known, and above LONGEST_S."""
        if not steps or step > steps:
            return None
        coarse_left = max(min(self._coarse_steps, steps) - step, 0)
        full_left = steps - step - coarse_left
        left_s = 0.0
        for count, kind, other in (
            (coarse_left, self._coarse, self._full),
            (full_left, self._full, self._coarse),
        ):
            step_s = kind.step_s(other)
            if count and step_s is None:
                return None
            left_s += count * (step_s or 0.0)
        done = self._step - self._since
        if done > 0:
            left_s += (steps - step) * (self._beside_s / done)
        return left_s if left_s <= LONGEST_S else None

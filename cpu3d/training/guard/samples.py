"""A process's memory and what is left to it, moment by moment, and how such samples of days stay few."""

import time
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence

from cpu3d.host.memory import resident
from cpu3d.training.guard.free_memory import Room, free_memory, throttled_at

KEPT_SPANS = 4
"""Changes are looked for over so many times a span, the time of a step."""

_RECENT_S = 3.0
"""Samples of so long are kept as they are; older ones are merged."""


@dataclass(frozen=True)
class Sample:
    """A process's memory, and what is left to it, at one moment."""

    time_s: float
    """Of a clock that never goes back."""
    own_bytes: int
    """The process's own data, in memory or swapped out: nobody can take it back."""
    file_bytes: int
    """Pages of files that it has mapped: the libraries' code, a store."""
    swapped_bytes: int
    rooms: Dict[str, Room]
    """What each limit leaves, see `free_memory`."""
    throttle: Optional[Room] = None
    """What is left to where this container or job is slowed down, see `throttled_at`."""

    def ours_bytes(self, limit: str) -> int:
        """What a limit leaves to this process altogether, filled already or not: only others change it."""
        return self.rooms[limit].free_bytes + self.own_bytes


def take_sample() -> Sample:
    """This process's memory and what is left to it, now. Zeros for the process where there is no /proc."""
    process = resident()
    return Sample(
        time_s=time.monotonic(),
        own_bytes=process.anonymous_bytes + process.swapped_bytes if process else 0,
        file_bytes=process.file_bytes if process else 0,
        swapped_bytes=process.swapped_bytes if process else 0,
        rooms=free_memory(process),
        throttle=throttled_at(),
    )


def thinned(samples: Sequence[Sample], span_s: float) -> List[Sample]:
    """At most some hundred samples that are judged alike: the first, then those of the last KEPT_SPANS spans.

    Older ones are merged so that the merged one has the most that the process held and the least that was left to it.
    """
    if len(samples) < 3:
        return list(samples)
    now = samples[-1].time_s
    kept, width = [samples[0]], max(span_s / 25, 1e-9)
    for sample in samples[1:]:
        age = now - sample.time_s
        if age > KEPT_SPANS * span_s + width:
            continue
        same = len(kept) > 1 and age > _RECENT_S and int(sample.time_s / width) == int(kept[-1].time_s / width)
        if same:
            kept[-1] = _merged(kept[-1], sample)
        else:
            kept.append(sample)
    return kept


# --- Private helpers ---


def _merged(one: Sample, other: Sample) -> Sample:
    own = max(one.own_bytes, other.own_bytes)
    rooms = {}
    for name in {**one.rooms, **other.rooms}:
        both = [sample for sample in (one, other) if name in sample.rooms]
        least = min(sample.ours_bytes(name) for sample in both)
        rooms[name] = Room(least - own, both[-1].rooms[name].total_bytes)
    return Sample(other.time_s, own, other.file_bytes, other.swapped_bytes, rooms, other.throttle)

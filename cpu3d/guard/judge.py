"""Whether a run's memory is as planned, will last over the next step, or is about to run out: decided from samples.

A run's memory goes up and down within a step, so the slope of a moment says nothing. What counts is the highest that
the process has held within the time of a step, and how that, and what others leave to it, have changed since the time
of a step before: that much may go again before the loop can stop. Growth up to the plan's bound is no news.
"""

from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

from cpu3d.guard.free_memory import ADDRESSES, Room
from memory_estimator.units import format_bytes, format_seconds

FLOOR_BYTES = 64 * 2**20
"""Of the smallest host, what is kept free beside what a save needs. Larger ones keep more, see `floor_bytes`."""

SHORTEST_SPAN_S = 5.0
"""Changes are looked for over the time of a step, and at least over this."""

LOOK_S, SHORTEST_LOOK_S = 0.5, 0.02
"""Time between two samples: as a rule, and when memory is about to run out."""

_RECENT_S = 3.0
"""Samples of so long are kept as they are; older ones are merged."""

_FEW = 20
"""Samples that span a fifth of a second at any rate."""

_REACTION_S = 0.25
"""What falls within this cannot be waited for."""


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


@dataclass(frozen=True)
class Limits:
    """What samples are held against."""

    bound_bytes: Optional[int] = None
    """The plan's upper bound of the process; None without a plan."""
    save_bytes: int = 0
    """What saving a checkpoint takes for a moment."""
    step_s: Optional[float] = None
    """The longest step so far; None before the first is done: then the run still grows into its memory, and only what
    is left counts."""
    save_s: float = 0.0
    """The longest save so far."""


@dataclass(frozen=True)
class Verdict:
    """What to do."""

    action: str = ""
    """"" is to go on, "stop" to save after this step and end, "end" to end at once, before the kernel does it."""
    why: str = ""
    """The sentence for it."""
    warnings: Tuple[Tuple[str, str], ...] = ()
    """(kind, line): things to say, each kind once in a run."""


def judge(samples: Sequence[Sample], limits: Limits) -> Verdict:
    """Judge the last of `samples`, which are in order, the first of the run's beginning. Empty is to go on."""
    if not samples:
        return Verdict()
    warnings = tuple(_warnings(samples, limits))
    for name in samples[-1].rooms:
        why = _must_end(samples, limits, name)
        if why:
            return Verdict("end", why, warnings)
    for name in samples[-1].rooms:
        why = _must_stop(samples, limits, name)
        if why:
            return Verdict("stop", why, warnings)
    return Verdict(warnings=warnings)


def floor_bytes(total_bytes: int) -> int:
    """What is kept free of a limit beside what a save needs: on a large host other programs vary by more."""
    return max(FLOOR_BYTES, total_bytes // 500)


def next_look_s(samples: Sequence[Sample]) -> float:
    """Time until the next sample: soon when what is left may be gone soon."""
    waits = [LOOK_S]
    for name, room in samples[-1].rooms.items() if samples else ():
        fall, _ = _fall_per_s(samples, name)
        if fall > 0:
            waits.append((room.free_bytes - floor_bytes(room.total_bytes) / 2) / fall / 4)
    return max(min(waits), SHORTEST_LOOK_S)


def thinned(samples: Sequence[Sample], span_s: float) -> List[Sample]:
    """At most some hundred samples that are judged alike: the first, then those of the last two spans.

    Older ones are merged so that the merged one has the most that the process held and the least that was left to it.
    """
    if len(samples) < 3:
        return list(samples)
    now = samples[-1].time_s
    kept, width = [samples[0]], max(span_s / 50, 1e-9)
    for sample in samples[1:]:
        age = now - sample.time_s
        if age > 2 * span_s + width:
            continue
        same = len(kept) > 1 and age > _RECENT_S and int(sample.time_s / width) == int(kept[-1].time_s / width)
        if same:
            kept[-1] = _merged(kept[-1], sample)
        else:
            kept.append(sample)
    return kept


def span_s(limits: Limits) -> float:
    """The time over which changes are looked for."""
    return max(limits.step_s or 0.0, SHORTEST_SPAN_S)


# --- Private helpers ---


def _left(sample: Sample, name: str) -> int:
    """What a limit leaves to this process altogether; only others change it."""
    return sample.rooms[name].free_bytes + sample.own_bytes


def _as_planned(samples: Sequence[Sample], limits: Limits) -> int:
    """What the process's own data may come to by the plan, whose bound counts the libraries' pages too; 0 without."""
    return max(0, limits.bound_bytes - samples[0].file_bytes) if limits.bound_bytes else 0


def _fall_per_s(samples: Sequence[Sample], name: str) -> Tuple[float, float]:
    """Bytes a second: how fast what is left has fallen lately, and how much of that this process has taken.

    Zeros where nothing fell, and before the second sample.
    """
    last = samples[-1]
    before = [one for one in samples[-_FEW:-1] if name in one.rooms and one.time_s < last.time_s]
    if not before:
        return 0.0, 0.0
    # Two samples 20 ms apart say little: of the last fifth of a second where there are some.
    one = next((one for one in reversed(before) if last.time_s - one.time_s >= 0.2), before[0])
    passed = last.time_s - one.time_s
    fall = max(0, one.rooms[name].free_bytes - last.rooms[name].free_bytes) / passed
    return fall, min(fall, max(0, last.own_bytes - one.own_bytes) / passed)


def _must_end(samples: Sequence[Sample], limits: Limits, name: str) -> str:
    """Why the process must end at once; "" where it need not.

    Never for the limit of addresses: the kernel does not kill for it, it refuses memory, and TensorFlow says so.
    """
    last, (fall, own) = samples[-1], _fall_per_s(samples, name)
    room = last.rooms[name]
    hard = floor_bytes(room.total_bytes) // 2
    if name == ADDRESSES or fall <= 0:
        return ""
    # Its own growth up to the plan, or to what it has held before, will stop there.
    known = (_as_planned(samples, limits), max((one.own_bytes for one in samples[:-1]), default=0))
    expected = own if any(0 <= high - last.own_bytes <= room.free_bytes - hard for high in known) else 0.0
    if room.free_bytes - (fall - expected) * _REACTION_S >= hard:
        return ""
    return (
        f"memory must last to the end of a step, got {format_bytes(room.free_bytes)} free of {name}, falling by "
        f"{format_bytes(round(fall))} a second: {_cause(samples, limits, name)}"
    )


def _must_stop(samples: Sequence[Sample], limits: Limits, name: str) -> str:
    """Why the run must stop after this step; "" where it need not."""
    last = samples[-1]
    room = last.rooms[name]
    reserve, foreseen = limits.save_bytes + floor_bytes(room.total_bytes), room.free_bytes
    within = ""
    if limits.step_s is not None:
        span, ahead = span_s(limits), limits.step_s + limits.save_s + 1.0
        known = [one for one in samples if name in one.rooms]
        recent = [one for one in known if last.time_s - one.time_s <= span]
        before = [one for one in known if span < last.time_s - one.time_s <= 2 * span]
        high = max(one.own_bytes for one in recent)
        foreseen = _left(last, name) - high
        if before:
            share = ahead / span
            grown = max(0, high - max(one.own_bytes for one in before)) * share
            still_to_come = _as_planned(samples, limits) - high
            grown = min(grown, still_to_come) if still_to_come >= 0 and limits.bound_bytes else grown
            taken = max(0, min(_left(one, name) for one in before) - min(_left(one, name) for one in recent)) * share
            foreseen -= round(grown + taken)
            within = f", {format_bytes(max(0, foreseen))} foreseen within {format_seconds(ahead)}"
    if foreseen >= reserve:
        return ""
    return (
        f"memory must keep {format_bytes(reserve)} free for a save, got {format_bytes(room.free_bytes)} free of "
        f"{name}{within}: {_cause(samples, limits, name)}"
    )


def _cause(samples: Sequence[Sample], limits: Limits, name: str) -> str:
    """Who has taken the memory since the beginning, and what to do about it."""
    first, last = samples[0], samples[-1]
    taken = _left(first, name) - _left(last, name) if name in first.rooms else 0
    beyond = last.own_bytes - _as_planned(samples, limits) if limits.bound_bytes else 0
    holds = f"this process holds {format_bytes(last.own_bytes)}"
    if name == ADDRESSES:
        return f"{holds}, and maps more; raise `ulimit -v`, beyond which TensorFlow is refused memory and fails"
    if beyond > max(taken, 0):
        return f"{holds}, {format_bytes(beyond)} above the plan; go on with --policy lean or with more memory"
    if taken > max(last.own_bytes - first.own_bytes, 0):
        return (
            f"{holds}, others have taken {format_bytes(taken)} since it began; end them, or go on where there is more"
        )
    return f"{holds}, {format_bytes(first.own_bytes)} when it began; go on with --policy lean or with more memory"


def _warnings(samples: Sequence[Sample], limits: Limits):
    """(kind, line) of all that is to be said of the last sample."""
    first, last = samples[0], samples[-1]
    bound = limits.bound_bytes
    if bound:
        # The plan counts the libraries' pages, mapped before the first sample, but no mapped store.
        own = last.own_bytes + min(last.file_bytes, first.file_bytes)
        if own > bound:
            yield (
                "anonymous",
                f"warning: memory must stay below the plan's upper bound of {format_bytes(bound)}, got "
                f"{format_bytes(own - bound)} more, of the process's own data (anonymous pages); the run goes on "
                "while there is memory",
            )
        elif own + last.file_bytes - min(last.file_bytes, first.file_bytes) > bound:
            over = last.own_bytes + last.file_bytes - bound
            yield (
                "mapped",
                f"note: {format_bytes(over)} above the plan's upper bound of {format_bytes(bound)} lie in memory, all "
                f"of it mapped files ({format_bytes(last.file_bytes)}), which the kernel takes back when it needs to",
            )
    if last.swapped_bytes > max(FLOOR_BYTES, last.own_bytes // 20):
        yield (
            "swapped",
            f"warning: {format_bytes(last.swapped_bytes)} of this process are swapped out, so steps take many times as "
            "long; end other programs, or go on with --policy lean or with more memory",
        )
    if ADDRESSES in first.rooms and bound and bound > first.rooms[ADDRESSES].total_bytes:
        yield (
            "addresses",
            f"warning: `ulimit -v` must leave the plan's {format_bytes(bound)}, got "
            f"{format_bytes(first.rooms[ADDRESSES].total_bytes)}; raise it, for TensorFlow fails where it is refused "
            "memory",
        )


def _merged(one: Sample, other: Sample) -> Sample:
    own = max(one.own_bytes, other.own_bytes)
    rooms = {}
    for name in {**one.rooms, **other.rooms}:
        both = [sample for sample in (one, other) if name in sample.rooms]
        left = min(_left(sample, name) for sample in both)
        rooms[name] = Room(left - own, both[-1].rooms[name].total_bytes)
    return Sample(other.time_s, own, other.file_bytes, other.swapped_bytes, rooms)

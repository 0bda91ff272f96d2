"""Whether a run's memory is as planned, will last over the next step, or is about to run out: decided from samples.

A run's memory goes up and down within a step, so the slope of a moment says nothing. What counts is the highest that
the process has held within the time of a step, and how that, and what others leave to it, have changed from one such
span to the next: what has gone on for several will go on until the loop can stop. What is taken once, as by another
worker's first validation, is not counted again, and growth up to the plan's bound is no news.
"""

from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple

from cpu3d.training.guard.free_memory import ADDRESSES
from cpu3d.training.guard.samples import KEPT_SPANS, Sample
from memory_estimator.units import format_bytes, format_seconds

FLOOR_BYTES, HIGHEST_FLOOR_BYTES = 64 * 2**20, 2**30
"""Of the smallest and of the largest host, what is kept free beside what a save needs, see `floor_bytes`."""

SHORTEST_SPAN_S = 5.0
"""Changes are looked for over the time of a step, and at least over this."""

SAMPLE_EVERY_S, SAMPLE_SOONEST_S = 0.5, 0.02
"""Time between two samples: as a rule, and when memory is about to run out."""

MISSED_SHARE = 0.05
"""Of what the workers of a host have still to take at the first sample, what may be missing or taken by others while
their plans still fit: some workers are further than others then, and the plans' own margin is larger."""

_FEW = 20
"""Samples that span a fifth of a second at any rate."""

_REACTION_S = 0.25
"""What falls within this cannot be waited for."""


@dataclass(frozen=True)
class Limits:
    """What samples are held against."""

    bound_bytes: Optional[int] = None
    """The plan's upper bound of the process; None without a plan."""
    save_bytes: int = 0
    """What saving a checkpoint takes for a moment."""
    here: int = 1
    """Workers of the run on this host, each with that plan."""
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
    return min(max(FLOOR_BYTES, total_bytes // 500), HIGHEST_FLOOR_BYTES)


def next_look_s(samples: Sequence[Sample]) -> float:
    """Time until the next sample: soon when what is left may be gone soon."""
    waits = [SAMPLE_EVERY_S]
    for name, room in samples[-1].rooms.items() if samples else ():
        fall, _ = _fall_per_s(samples, name)
        if fall > 0:
            waits.append((room.free_bytes - floor_bytes(room.total_bytes) / 2) / fall / 4)
    return max(min(waits), SAMPLE_SOONEST_S)


def span_s(limits: Limits) -> float:
    """The time over which changes are looked for."""
    return max(limits.step_s or 0.0, SHORTEST_SPAN_S)


# --- Private helpers ---


def _planned_bytes(samples: Sequence[Sample], limits: Limits) -> int:
    """What the process's own data may come to by the plan, whose bound counts the libraries' pages too; 0 without."""
    return max(0, limits.bound_bytes - samples[0].file_bytes) if limits.bound_bytes else 0


def _spare_bytes(samples: Sequence[Sample], limits: Limits, name: str) -> Optional[int]:
    """What the plans of this host's workers leave free of a limit, by the first sample; None without a plan.

    They begin together, so the others lack then what this one lacks. Below 0 for a run that was forced.
    """
    first = samples[0]
    if not limits.bound_bytes or name not in first.rooms:
        return None
    return first.rooms[name].free_bytes - _workers(limits, name) * _lacked_bytes(samples, limits)


def _lacked_bytes(samples: Sequence[Sample], limits: Limits) -> int:
    """What the process had still to take by its plan at the first sample."""
    return max(0, _planned_bytes(samples, limits) - samples[0].own_bytes)


def _workers(limits: Limits, name: str) -> int:
    """Those that share a limit: each process has addresses of its own."""
    return 1 if name == ADDRESSES else limits.here


def _at_most_spare(kept_bytes: int, samples: Sequence[Sample], limits: Limits, name: str) -> int:
    """`kept_bytes` to keep free, and of a run with a plan no more than half of what the plan leaves free.

    A run is let in while its upper bound fits what is free, to the byte. One that is within its plan, where others have
    taken no more than the other half, thus is never stopped. To stop it would save nothing: it saves every few minutes
    in any case, with as little left, and the same command would be let in again and stopped again. FLOOR_BYTES are kept
    of any host: with less the kernel kills, whatever was planned.
    """
    spare = _spare_bytes(samples, limits, name)
    return kept_bytes if spare is None else min(kept_bytes, max(FLOOR_BYTES, spare // 2))


def _all_is_planned(samples: Sequence[Sample], limits: Limits, name: str) -> bool:
    """Whether all that was taken since the first sample, by this process and by others, is what the plans foresaw.

    However fast it falls then, it will stop with about half of `_spare_bytes` left. The other workers of this host
    count with all that they lacked: their growth, in a first step or a first validation, cannot be told from that of
    another program.
    """
    spare, lacked = _spare_bytes(samples, limits, name), _lacked_bytes(samples, limits)
    workers, first, last = _workers(limits, name), samples[0], samples[-1]
    missed = MISSED_SHARE * workers * lacked
    if spare is None or spare < -missed:
        return False
    taken = first.ours_bytes(name) - last.ours_bytes(name)
    within = last.own_bytes <= max(_planned_bytes(samples, limits), first.own_bytes)
    return within and taken <= (workers - 1) * lacked + max(missed, spare // 2)


def _fall_per_s(samples: Sequence[Sample], name: str) -> Tuple[float, float]:
    """Bytes a second: how fast what is free has fallen lately, and how much of that this process has taken.

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
    last, (fall, own_fall) = samples[-1], _fall_per_s(samples, name)
    room = last.rooms[name]
    least = _at_most_spare(floor_bytes(room.total_bytes), samples, limits, name) // 2
    if name == ADDRESSES or fall <= 0:
        return ""
    # Its own growth up to the plan, or to what it has held before, will stop there.
    tops = (_planned_bytes(samples, limits), max((one.own_bytes for one in samples[:-1]), default=0))
    expected = own_fall if any(0 <= top - last.own_bytes <= room.free_bytes - least for top in tops) else 0.0
    if _all_is_planned(samples, limits, name):
        expected = fall
    if room.free_bytes - (fall - expected) * _REACTION_S >= least:
        return ""
    return (
        f"memory must last to the end of a step, got {format_bytes(room.free_bytes)} free of {name}, falling by "
        f"{format_bytes(round(fall))} a second: {_cause(samples, limits, name)}"
    )


def _must_stop(samples: Sequence[Sample], limits: Limits, name: str) -> str:
    """Why the run must stop after this step; "" where it need not."""
    room = samples[-1].rooms[name]
    reserve = _at_most_spare(limits.save_bytes + floor_bytes(room.total_bytes), samples, limits, name)
    foreseen, within = room.free_bytes, ""
    if limits.step_s is not None:
        ahead_s = limits.step_s + limits.save_s + 1.0
        foreseen = _foreseen_bytes(samples, limits, name, ahead_s)
        if foreseen != room.free_bytes:
            within = f", {format_bytes(max(0, foreseen))} foreseen within {format_seconds(ahead_s)}"
    if foreseen >= reserve:
        return ""
    return (
        f"memory must keep {format_bytes(reserve)} free for a save, got {format_bytes(room.free_bytes)} free of "
        f"{name}{within}: {_cause(samples, limits, name)}"
    )


def _foreseen_bytes(samples: Sequence[Sample], limits: Limits, name: str, ahead_s: float) -> int:
    """What will be free at the top of the next step, `ahead_s` from now; below 0 where that cannot be."""
    spans = _by_span([one for one in samples if name in one.rooms], span_s(limits))
    tops = [max((one.own_bytes for one in span), default=None) for span in spans]
    ours = [min((one.ours_bytes(name) for one in span), default=None) for span in spans]
    planned = _planned_bytes(samples, limits)
    grown = _goes_on([-top if top is not None else None for top in tops])
    if limits.bound_bytes and tops[0] > planned:
        grown = max(0, tops[0] - tops[1]) if tops[1] is not None else 0  # a leak: nothing will end it
    elif limits.bound_bytes:
        grown = min(grown, planned - tops[0])
    change = round((grown + _goes_on(ours)) * ahead_s / span_s(limits))
    return samples[-1].ours_bytes(name) - tops[0] - change


def _by_span(samples: Sequence[Sample], span: float) -> List[List[Sample]]:
    """KEPT_SPANS lists, the latest span first; those of before the first sample are empty."""
    spans: List[List[Sample]] = [[] for _ in range(KEPT_SPANS)]
    now = samples[-1].time_s
    for sample in samples:
        # Up to a span ago is the latest, its end included.
        number = max(0, -int(-(now - sample.time_s) // span) - 1)
        if number < KEPT_SPANS:
            spans[number].append(sample)
    return spans


def _goes_on(values: Sequence[Optional[int]]) -> int:
    """By how much values, the latest first, have fallen from each span to the next, at least; 0 unless from each.

    A fall within a span's time touches two of them at most, so what was taken once is none.
    """
    if any(value is None for value in values):
        return 0
    return max(0, min(before - after for after, before in zip(values, values[1:])))


def _cause(samples: Sequence[Sample], limits: Limits, name: str) -> str:
    """Who has taken the memory since the beginning, and what to do about it."""
    first, last = samples[0], samples[-1]
    taken = first.ours_bytes(name) - last.ours_bytes(name) if name in first.rooms else 0
    beyond = last.own_bytes - _planned_bytes(samples, limits) if limits.bound_bytes else 0
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
    if last.throttle is not None and last.throttle.free_bytes <= last.throttle.total_bytes // 50:
        yield (
            "throttled",
            f"warning: memory must stay below {format_bytes(last.throttle.total_bytes)}, the memory.high of this "
            f"container or job, got {format_bytes(last.throttle.free_bytes)} left: beyond it the kernel slows the run "
            "to a crawl; raise it, or go on with --policy lean",
        )
    if ADDRESSES in first.rooms and bound and bound > first.rooms[ADDRESSES].total_bytes:
        yield (
            "addresses",
            f"warning: `ulimit -v` must leave the plan's {format_bytes(bound)}, got "
            f"{format_bytes(first.rooms[ADDRESSES].total_bytes)}; raise it, for TensorFlow fails where it is refused "
            "memory",
        )

"""docs/validation.md: every measured configuration beside what is predicted of it now, misses included."""

import math
from typing import List, Optional, Sequence

from cpu3d.bench.campaign import describe
from memory_estimator.accuracy import Accuracy
from memory_estimator.digest import RESERVE_SHARE
from memory_estimator.units import format_bytes
from memory_estimator.validation import (
    DISTURBED_SPREAD,
    MEAN_SLACK,
    PROCESS_FLOOR_BYTES,
    WORST_ALLOCATOR,
    WORST_PROCESS,
    WORST_STEP,
    Measured,
    Row,
    Spread,
    Target,
    spreads,
    targets,
)

GIB = 2**30

INTRODUCTION = """\
# The estimator against measured steps

Made by `./run.sh bench tables`: what was measured comes from records/memory.jsonl (`./run.sh bench validate`), what is
predicted from the code as it stands, so a change of the estimator shows here. Each configuration ran in a fresh
process; the peaks are TensorFlow's and the kernel's own counts, the time is the median of the steps from the third on.
Errors are signed, as shares of what was measured: +2 % is predicted too high.
"""

RULES = """\
## What is held out, and what is not

The constants of the host (what the runtime holds, what a unit of work costs) are fitted by `calibrate` to volumes of at
most 96^3 voxels; errors are told of larger ones. The rules of the estimator are not held out: what each operation
keeps, which tensors share memory, how much scratch a kernel takes and how TensorFlow's allocator grows were found with
runs of up to 128^3 voxels in view, and a first round of the measurements below, of larger volumes too, showed some of
them to be wrong, which was mended before this one. For other configurations, expect errors nearer to the worst.
"""

MARGIN = """\
An upper bound is the predicted peak, {share} more, and {fixed}. The share is what the configurations of at most 96^3
voxels ask for, {asked}, and a reserve of {reserve}. The larger ones had no say in it and judge it: {over} of their
{count} peaks are above the bound (demanded: 0), which lies {mean} above them on average (demanded: at most {slack}).
"""

DISTURBED = """\
## Disturbed measurements

Where the timed steps of a configuration lie further apart than {limit} of their median, as (longest - shortest) /
median, something else was at work. The rule stood before any was measured again for it, and does not look at errors.
`bench validate --again-disturbed` measures those again; the newest measurement counts, in all its figures, and the
record keeps every one. Measured again: {again}. Disturbed as they stand: {still}.
"""

READING = """\
A configuration reads: shape, f(ilters), d(epth), b(atch), c(hannels), k outputs, dtype, engine, norm, optimizer, and
any variant. A miss is more than {allocator} of the allocator's peak, {process} of the process's or {step} of the time,
or an upper bound below the measured peak.
"""


def page(measured: Sequence[Measured], rows: Sequence[Row], accuracy: Accuracy) -> List[str]:
    """The lines of the page. `rows` are what `compare` makes of `measured`; failures are in `measured` alone.

    `accuracy` is what the rows' upper bounds were made with.
    """
    held_out = [row for row in rows if row.measured.held_out]
    fitted = [row for row in rows if not row.measured.held_out]
    return [
        *INTRODUCTION.splitlines(),
        "",
        *_origin(measured),
        f"## Errors of the {len(held_out)} larger configurations",
        "",
        *summary_table(held_out),
        "",
        "Median size and worst error; the upper bound is how far it lies above the process's measured peak.",
        "",
        "## Demanded and found",
        "",
        *target_table(targets(held_out)),
        "",
        f"A process's peak that is off by less than {format_bytes(PROCESS_FLOOR_BYTES)} does not count as its worst. "
        f"Configurations with a miss: {sum(bool(row.misses) for row in held_out)} of {len(held_out)}; the tables say "
        "of what.",
        "",
        *RULES.splitlines(),
        "",
        *_margin(held_out, accuracy),
        "",
        *_disturbances(measured),
        "",
        "## More than 96^3 voxels",
        "",
        *READING.format(
            allocator=_percent(WORST_ALLOCATOR), process=_percent(WORST_PROCESS), step=_percent(WORST_STEP)
        ).splitlines(),
        "",
        *detail_table(held_out),
        "",
        "## 96^3 voxels and less",
        "",
        *detail_table(fitted),
        *_failures(measured),
    ]


def summary_table(rows: Sequence[Row]) -> List[str]:
    """Median (of the absolute errors) and worst error of every figure, for all rows and by engine and dtype."""
    lines = [
        "| engine, dtype | runs | allocator peak | process peak | upper bound, mean (least) | seconds a step |",
        "|---|---|---|---|---|---|",
    ]
    groups = sorted({(row.measured.job.engine, row.measured.job.unet.dtype) for row in rows})
    for group in (None, *groups):
        some = [row for row in rows if group in (None, (row.measured.job.engine, row.measured.job.unet.dtype))]
        found = spreads(some)
        least = min((row.slack for row in some), default=math.nan)
        lines.append(
            f"| {'all' if group is None else ', '.join(group)} | {len(some)} | {_spread(found['allocator peak'])} | "
            f"{_spread(found['process peak'])} | {_signed(found['upper bound'].mean)} ({_signed(least)}) | "
            f"{_spread(found['seconds a step'])} |"
        )
    return lines


def target_table(judged: Sequence[Target]) -> List[str]:
    """What is demanded, beside what was found."""
    lines = ["| figure | demanded, at most | found | |", "|---|---|---|---|"]
    for one in judged:
        demanded, found = (
            "-" if math.isnan(value) else _percent(value, 1) if one.is_share else f"{value:.0f}"
            for value in (one.demanded, one.found)
        )
        lines.append(f"| {one.name} | {demanded} | {found} | {'met' if one.met else '**not met**'} |")
    return lines


def detail_table(rows: Sequence[Row]) -> List[str]:
    """A line for every row: settings, then each figure as measured and the error of what is predicted."""
    lines = [
        "| configuration | allocator, GiB | error | process, GiB | error | bound above | s a step | spread | error | "
        "misses |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        one = row.measured
        spread = f"{_percent(one.step_spread)}{', disturbed' if one.disturbed else ''}"
        lines.append(
            f"| {describe(one.job)} | {_gib(one.allocator_peak_bytes)} | {_signed(row.allocator_error)} | "
            f"{_gib(one.process_peak_bytes)} | {_signed(row.process_error)} | {_signed(row.slack)} | "
            f"{one.step_s:.2f} | {spread} | {_signed(row.step_error)} | {', '.join(row.misses)} |"
        )
    return lines


# --- Private helpers ---


def _origin(measured: Sequence[Measured]) -> List[str]:
    hosts = sorted({f"{one.host}, {one.job.threads} threads" for one in measured})
    dates = sorted({one.date for one in measured})
    days = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else ""
    return [f"Measured on {'; '.join(hosts)}, {days}.", ""] if dates else []


def _margin(held_out: Sequence[Row], accuracy: Accuracy) -> List[str]:
    return MARGIN.format(
        share=_percent(accuracy.margin_share, 1),
        fixed=format_bytes(accuracy.margin_bytes),
        asked=_percent(accuracy.margin_share - RESERVE_SHARE, 1),
        reserve=_percent(RESERVE_SHARE, 1),
        over=sum(row.slack < 0 for row in held_out),
        count=len(held_out),
        mean=_signed(spreads(held_out)["upper bound"].mean),
        slack=_percent(MEAN_SLACK),
    ).splitlines()


def _disturbances(measured: Sequence[Measured]) -> List[str]:
    """By a rule that asks after no error: which measurements were disturbed, and which of them were made again."""
    again = [one for one in measured if one.earlier]
    still = sum(one.disturbed for one in measured)
    lines = DISTURBED.format(limit=_percent(DISTURBED_SPREAD), again=len(again), still=still).splitlines()
    if again:
        lines += ["", "| measured again | s a step (spread), in turn |", "|---|---|"]
        lines += [f"| {describe(one.job)} | {', then '.join(map(_timed, (*one.earlier, one)))} |" for one in again]
    return lines


def _timed(one: Measured) -> str:
    return "failed" if one.failure else f"{one.step_s:.2f} ({_percent(one.step_spread)})"


def _failures(measured: Sequence[Measured]) -> List[str]:
    failures = [f"- {describe(one.job)}: {one.failure}" for one in measured if one.failure]
    return ["", "## Not measured", "", *failures] if failures else []


def _gib(size_bytes: Optional[int]) -> str:
    return "-" if size_bytes is None else f"{size_bytes / GIB:.3f}"


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def _signed(share: Optional[float]) -> str:
    return "-" if share is None or math.isnan(share) else f"{100 * share:+.1f} %"


def _spread(spread: Spread) -> str:
    return "-" if not spread.count else f"{100 * spread.median:.1f} %, worst {_signed(spread.worst)}"

"""docs/validation.md: every measured configuration beside what is predicted of it now, misses included."""

import math
from typing import List, Optional, Sequence

from cpu3d.bench.campaign import describe
from memory_estimator.validation import (
    PROCESS_FLOOR_BYTES,
    WORST_ALLOCATOR,
    WORST_PROCESS,
    WORST_STEP,
    Measured,
    Row,
    Spread,
    spreads,
)

GIB = 2**30

INTRODUCTION = """\
# The estimator against measured steps

Made by `./run.sh bench tables`: what was measured comes from records/memory.jsonl (`./run.sh bench validate`), what is
predicted from the code as it stands, so a change of the estimator shows here. Each configuration ran in a fresh
process; the peaks are TensorFlow's and the kernel's own counts, the time is the median of the steps from the third on.
Errors are signed, as shares of what was measured; the upper bound is shown as how far it lies above the measured peak
of the process. Constants are fitted to volumes of at most 96^3 voxels, errors are told of larger ones. A configuration
reads: shape, f(ilters), d(epth), b(atch), c(hannels), k outputs, dtype, engine, norm, optimizer, and any variant.
"""


def page(measured: Sequence[Measured], rows: Sequence[Row]) -> List[str]:
    """The lines of the page. `rows` are what `compare` makes of `measured`; failures are in `measured` alone."""
    held_out = [row for row in rows if row.measured.held_out]
    fitted = [row for row in rows if not row.measured.held_out]
    failures = [one for one in measured if one.failure]
    hosts = sorted({f"{one.host}, {one.job.threads} threads" for one in measured})
    dates = sorted({one.date for one in measured})
    lines = [
        *INTRODUCTION.splitlines(),
        "",
        f"Measured on {'; '.join(hosts)}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}." if dates else "",
        "",
        f"## Errors of the {len(held_out)} larger configurations",
        "",
        *summary_table(held_out),
        "",
        f"A miss is more than {100 * WORST_ALLOCATOR:.0f} % of the allocator's peak, {100 * WORST_PROCESS:.0f} % (and "
        f"{PROCESS_FLOOR_BYTES / 2**20:.0f} MiB) of the process's or {100 * WORST_STEP:.0f} % of the time, or an upper "
        f"bound below the measured peak. Configurations with one: {sum(bool(row.misses) for row in held_out)} of "
        f"{len(held_out)}.",
        "",
        "## 128^3 voxels and more",
        "",
        *detail_table(held_out),
        "",
        "## 96^3 voxels and less",
        "",
        *detail_table(fitted),
    ]
    if failures:
        lines += ["", "## Not measured", "", *(f"- {describe(one.job)}: {one.failure}" for one in failures)]
    return lines


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


def detail_table(rows: Sequence[Row]) -> List[str]:
    """Every row: settings, measured, predicted, error. The settings are those of `cpu3d/bench/campaign.py`."""
    lines = [
        "| configuration | allocator GiB | predicted | | process GiB | predicted | | upper bound | s a step "
        "| predicted | | misses |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        one = row.measured
        lines.append(
            f"| {describe(one.job)} | {_gib(one.allocator_peak_bytes)} | {_gib(row.allocator_peak_bytes)} | "
            f"{_signed(row.allocator_error)} | {_gib(one.process_peak_bytes)} | {_gib(row.process_peak_bytes)} | "
            f"{_signed(row.process_error)} | {_signed(row.slack)} | {one.step_s:.2f} | {row.step_s:.2f} | "
            f"{_signed(row.step_error)} | {', '.join(row.misses)} |"
        )
    return lines


# --- Private helpers ---


def _gib(size_bytes: Optional[int]) -> str:
    return "-" if size_bytes is None else f"{size_bytes / GIB:.3f}"


def _signed(share: Optional[float]) -> str:
    return "-" if share is None else f"{100 * share:+.1f} %"


def _spread(spread: Spread) -> str:
    return "-" if not spread.count else f"{100 * spread.median:.1f} %, worst {_signed(spread.worst)}"

"""Work out `accuracy.json` from a record of measured steps: how far predictions are off, and the upper bound's margin.

    python -m memory_estimator.digest records/memory.jsonl --out memory_estimator/accuracy.json

To be run after `bench validate`, and whenever a rule or a constant of the estimator has changed.
"""

import argparse
import dataclasses
import functools
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from memory_estimator.accuracy import SCHEMA, Accuracy, Bound
from memory_estimator.calibration import shipped_constants
from memory_estimator.estimate import estimate
from memory_estimator.files import write_whole
from memory_estimator.validation import FITTED_VOXELS, Row, compare, read_measured, spread

MARGIN_BYTES = 64 * 2**20
"""The fixed part of the margin: what a runtime holds more or less from start to start."""

RESERVE_SHARE = 0.03
"""Added to what the fitted shapes ask for: half of the 6 % that upper bounds may lie above the peaks on average, the
fixed part being most of the other half. Chosen by that demand, not by any measured error."""

UNKNOWN = Accuracy("", 0, Bound(0.0, 0.0), Bound(0.0, 0.0), Bound(0.0, 0.0), 0.0, 0)
"""Stands in while the errors themselves are computed."""


def digest(rows: Sequence[Row], record: str) -> Accuracy:
    """Errors over the rows that no constant was fitted to, and a margin for upper bounds, made without these rows.

    The margin is the least, in steps of half a per cent, that leaves no peak of the fitted shapes above its bound, and
    RESERVE_SHARE. Whether it holds is for the held-out rows to say (`validation.targets`).
    Raises ValueError where the record lacks either.
    """
    held_out = [row for row in rows if row.measured.held_out]
    fitted = [row for row in rows if not row.measured.held_out]
    for some, what in ((held_out, "above"), (fitted, "of at most")):
        if not some:
            raise ValueError(
                f"record {record} must hold steps on volumes {what} {FITTED_VOXELS} voxels, got none; "
                "let `bench validate` measure its whole list"
            )

    def bound(errors: List[Optional[float]]) -> Bound:
        found = spread(errors)
        return Bound(round(found.median, 4), round(abs(found.worst), 4))

    excess = max((row.measured.process_peak_bytes - MARGIN_BYTES) / row.process_peak_bytes - 1 for row in fitted)
    found = Accuracy(
        record=record,
        configurations=len(held_out),
        allocator_peak=bound([row.allocator_error for row in held_out]),
        process_peak=bound([row.process_error for row in held_out]),
        step_s=bound([row.step_error for row in held_out]),
        margin_share=round(max(0, math.ceil(excess * 200)) / 200 + RESERVE_SHARE, 4),
        margin_bytes=MARGIN_BYTES,
    )
    peaks = [row.measured.process_peak_bytes for row in held_out]
    slack = [found.upper_bound(row.process_peak_bytes) / peak - 1 for row, peak in zip(held_out, peaks)]
    return dataclasses.replace(
        found, exceeded=sum(one < 0 for one in slack), mean_slack=round(statistics.fmean(slack), 4)
    )


def to_json(accuracy: Accuracy) -> Dict[str, Any]:
    """The content of accuracy.json."""
    content = dataclasses.asdict(accuracy)
    margin = {"share": content.pop("margin_share"), "bytes": content.pop("margin_bytes")}
    return {"schema": SCHEMA, **content, "margin": margin}


def main(argv: Optional[List[str]] = None) -> int:
    """Print the digest of a record, or write it. Exit codes: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m memory_estimator.digest",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("record", type=Path)
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: print)")
    args = parser.parse_args(argv)
    try:
        constants = functools.lru_cache(maxsize=None)(shipped_constants)
        rows = compare(read_measured(args.record), lambda one: estimate(one.job, constants(one.isa), UNKNOWN))
        text = json.dumps(to_json(digest(rows, args.record.as_posix())), indent=1) + "\n"
        if args.out:
            write_whole(args.out, text.encode("utf-8"))
        else:
            print(text, end="")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

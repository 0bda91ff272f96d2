"""Print the README's tables from benchmark records, as Markdown, and write what else is made from them.

    ./run.sh bench tables --records records
    ./run.sh bench tables --records records --page docs/validation.md --data-page docs/data.md
    ./run.sh bench tables --records records --compare-page docs/compare.md

The data page and the compare page keep their text and get their tables. The validation page holds every measured
configuration beside what the estimator says of it now. Its upper bounds follow from accuracy.json, which
`python -m memory_estimator.digest` makes of the same record; run that first.
"""

import argparse
import functools
import json
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

from cpu3d.bench.data import markdown
from cpu3d.bench.engines import ENGINE_NAMES
from cpu3d.bench.faults.markdown import faults_lines
from cpu3d.bench.faults.markdown import newest as newest_faults
from cpu3d.bench.policies import lines_of, unit_in_words
from cpu3d.bench.record import newest, read_records
from cpu3d.bench.scaling.table import scaling_lines
from cpu3d.bench.validation_page import page, summary_table
from cpu3d.bench.windows_markdown import newest as newest_windows
from cpu3d.bench.windows_markdown import windows_lines
from cpu3d.compare import markdown as compare_markdown
from cpu3d.compare.study.markdown import study_lines
from cpu3d.errors import InputError
from cpu3d.util.atomic import atomic_write
from memory_estimator.accuracy import load_accuracy
from memory_estimator.calibration import shipped_constants
from memory_estimator.estimate import estimate
from memory_estimator.scaling.costs import read_scaling
from memory_estimator.validation import Measured, Row, compare, has_known_engine, job_from, read_measured

GIB = 2**30

VALIDATION = "memory.jsonl"
"""In the folder of records: what `bench validate` measured."""

POLICIES = "policies.jsonl"
"""In the folder of records: what `bench memory --policies` measured."""

DATA = "data.jsonl"
"""In the folder of records: what `bench data` measured."""

WINDOWS = "windows.jsonl"
"""In the folder of records: what `bench windows` measured."""

RESOLUTIONS = "resolutions.jsonl"
"""In the folder of records: what `compare --resolutions` found."""

COMPARE = "compare.jsonl"
"""In the folder of records: what `compare` found."""

SCALING = "scaling.jsonl"
"""In the folder of records: what `bench scaling` measured."""

FAULTS = "faults.jsonl"
"""In the folder of records: what `bench faults` survived."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--records", type=Path, required=True, metavar="DIR", help="folder of .jsonl records")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the validation page")
    parser.add_argument("--data-picture", type=Path, metavar="FILE", help="draw the newest rows of `bench data`")
    parser.add_argument("--compare-page", type=Path, metavar="FILE", help="write the tables of the compare page anew")
    parser.add_argument("--data-page", type=Path, metavar="FILE", help="write the tables of the data page anew")


def run(args: argparse.Namespace) -> int:
    if args.page:
        with atomic_write(args.page, "w") as file:
            file.write("\n".join(page(*validation(args.records), load_accuracy())) + "\n")
    if args.data_page:
        _renew(args.data_page, markdown.MARK, data_page(args.records))
    if args.compare_page:
        _renew(args.compare_page, compare_markdown.MARK, compare_page(args.records))
    if args.data_picture:
        from cpu3d.bench.data.picture import draw

        rows = markdown.newest(read_records(args.records / DATA, "data"))
        with atomic_write(args.data_picture) as file:
            file.write(draw(rows, rows[-1]["host"]))
    print("\n".join(tables(args.records)))
    return 0


def tables(folder: Path) -> List[str]:
    """The lines of all tables: the newest record of each kind counts, and of every step under all policies."""
    step, engines = (read_records(folder / f"{kind}.jsonl", kind)[-1] for kind in ("step", "engines"))
    lines = [*step_table(step), "", *engine_table(engines)]
    if (folder / POLICIES).is_file():
        for record in _newest(read_records(folder / POLICIES, "policies")):
            lines += ["", *policies_table(record)]
    if (folder / VALIDATION).is_file():
        lines += ["", *summary_table([row for row in validation(folder)[1] if row.measured.held_out])]
    if (folder / DATA).is_file():
        lines += ["", *markdown.targets_lines(read_records(folder / DATA, "data"))]
    if (folder / COMPARE).is_file():
        lines += ["", *compare_markdown.summary_lines(read_records(folder / COMPARE, "compare"))]
    if (folder / SCALING).is_file():
        lines += ["", *scaling_lines(scaling_records(folder))]
    if (folder / FAULTS).is_file():
        for record in newest_faults(read_records(folder / FAULTS, "faults")):
            lines += ["", *faults_lines(record)]
    return lines


def data_page(folder: Path) -> List[str]:
    """The lines of all rows of `bench data`."""
    return markdown.page_lines(read_records(folder / DATA, "data"))


def compare_page(folder: Path) -> List[str]:
    """The lines of all comparisons, of the studies of resolution, and of one pass against a sliding window.

    What was not recorded has no part.
    """
    lines: List[str] = []
    if (folder / COMPARE).is_file():
        lines += ["## Whole volumes against patches", ""]
        lines += compare_markdown.page_lines(read_records(folder / COMPARE, "compare"))
    if (folder / RESOLUTIONS).is_file():
        lines += ["## Resolution, effective batch and learning rate", ""]
        for record in newest(read_records(folder / RESOLUTIONS, "resolutions"), compare_markdown.title_of):
            lines += [*study_lines(record), ""]
    if (folder / WINDOWS).is_file():
        lines += ["## One pass against a sliding window", ""]
        for record in newest_windows(read_records(folder / WINDOWS, "windows")):
            lines += [*windows_lines(record), ""]
    return lines


def scaling_records(folder: Path) -> Tuple[Mapping[str, Any], ...]:
    """The newest of each job, read as the estimator reads them."""
    try:
        return read_scaling(folder / SCALING)
    except ValueError as error:
        raise InputError(str(error)) from None


def validation(folder: Path) -> Tuple[Tuple[Measured, ...], List[Row]]:
    """The measured steps, and each beside what the estimator as it stands says of it."""
    # The shipped constants, whatever this host's own are: the page is the same wherever it is made.
    constants = functools.lru_cache(maxsize=None)(shipped_constants)
    try:
        measured = read_measured(folder / VALIDATION)
        return measured, compare(measured, lambda one: estimate(one.job, constants(one.isa)))
    except ValueError as error:
        raise InputError(str(error)) from None


def step_table(record: Dict[str, Any]) -> List[str]:
    """Our step beside its peers."""
    unet = record["unet"]
    lines = [
        f"{_shape(record)} x {unet['channels']}, {unet['filters']} filters, batch {record['batch']}, {unet['dtype']}, "
        f"{unet['norm']} norm, {record['host']['cores']} cores of {record['host']['cpu']}:",
        "",
        "| | s a step | process peak | against ours |",
        "|---|---|---|---|",
        f"| this project, {record['engine_name']} | {record['step_s']:.2f} | {_gib(record['process_peak_bytes'])} | |",
    ]
    for peer in record["peers"]:
        lines.append(
            f"| {peer['peer']}, {'compiled' if '--compile' in peer['options'] else 'eager'} | {peer['step_s']:.2f} | "
            f"{_gib(peer['process_peak_bytes'])} | {peer['ratio']:.2f} ({peer['ratio_min']:.2f} to "
            f"{peer['ratio_max']:.2f}) |"
        )
    lines += [
        "",
        f"Our step runs at {record['gflops']:.0f} GFLOP/s, {record['matmul_peak_share']:.0%} of the matrix product of "
        f"this host ({record['matmul_gflops']:.0f}).",
    ]
    return lines


def engine_table(record: Dict[str, Any]) -> List[str]:
    """The paper's Fig. 2: every engine and dtype against stock TensorFlow without oneDNN in float32."""
    lines = [
        f"{_shape(record)}, the same network, each in a fresh process:",
        "",
        "| engine | dtype | s a step | speed-up | process peak |",
        "|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        name, dtype = ENGINE_NAMES[row["engine"]], row["unet"]["dtype"]
        if row["step_s"] is None:
            lines.append(f"| {name} | {dtype} | cannot | - | - |")
        else:
            peak = _gib(row["process_peak_bytes"])
            lines.append(f"| {name} | {dtype} | {row['step_s']:.2f} | {row['speedup']:.1f} | {peak} |")
    return lines


def policies_table(record: Dict[str, Any]) -> List[str]:
    """The step under every memory policy with what the estimator says of it now, the plain Keras graph, peers."""
    unet, batch = record["unet"], f"batch {record['batch']}"
    if record["micro_batch"] < record["batch"]:
        batch += f" ({record['micro_batch']} at a time, plain Keras and peers all at once)"
    lines = [
        f"{_shape(record)} x {unet['channels']}, {unet['filters']} filters, {batch}, {unet['dtype']}, {unet['norm']} "
        f"norm, {record['engine_name']}, {record['host']['cores']} cores of {record['host']['cpu']}; a unit is "
        f"{unit_in_words(record)}:",
        "",
        "| | allocator peak, GiB | units | process peak, GiB | s a step | against `speed` |",
        "|---|---|---|---|---|---|",
    ]
    died = []
    for row in record["rows"]:
        predicted = _predicted(record, row["name"]) if row["kind"] == "policy" else None
        for cells in lines_of({**row, "predicted": predicted}, record["unit_bytes"]):
            lines.append("| " + " | ".join(cells) + " |")
        died += [f"{row['name']}: {row['error']}."] if row["error"] else []
    return lines + ([""] + died if died else [])


# --- Private helpers ---


def _renew(page: Path, mark: str, lines: List[str]) -> None:
    """Write a page's text up to the mark, which stays, and these lines after it."""
    text = page.read_text(encoding="utf-8").partition(mark)[0]
    with atomic_write(page, "w") as file:
        file.write("\n".join([text + mark, "", *lines]).rstrip() + "\n")


def _newest(records: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """The last of every step, engine and CPU."""
    names = ("shape", "batch", "micro_batch", "unet", "optimizer", "engine_name")
    own = lambda record: [*(record[name] for name in names), record["host"]["cpu"]]  # noqa: E731
    return newest(records, lambda record: json.dumps(own(record), sort_keys=True))


def _predicted(record: Dict[str, Any], policy: str) -> Optional[Dict[str, Any]]:
    """The estimator's figures as it stands; None for an engine that it does not know."""
    if not has_known_engine(record):
        return None
    job = job_from({**record, "unet": {**record["unet"], "policy": policy}})
    return vars(estimate(job, shipped_constants(tuple(record["host"]["isa"]))))


def _shape(record: Dict[str, Any]) -> str:
    return " x ".join(map(str, record["shape"]))


def _gib(size_bytes: Optional[int]) -> str:
    return "-" if size_bytes is None else f"{size_bytes / GIB:.1f} GiB"

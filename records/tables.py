"""Make the page of results from benchmark records: one section per kind, with the newest record of
each job.

    python -m records.tables --records records                         # prints the page
    python -m records.tables --records records --page validation.md \\
        --picture docs/pictures/policies.png
    python -m records.tables --records records --accuracy memory_estimator/hosts/accuracy.json

Predictions are made by the present estimator with its shipped constants. The upper bounds of the
validation page follow from the errors of the predictions in accuracy.json: write that file after a
new record, and after a change of the estimator."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np

from cpu3d.bench.harness import host_of
from cpu3d.bench.step_costs import step_table, title_of, with_predictions
from cpu3d.errors import InputError
from cpu3d.experiments.results import results_tables
from cpu3d.report.pictures import Line, chart
from cpu3d.util.atomic import write_bytes
from cpu3d.util.records import listed
from memory_estimator.accuracy import Accuracy
from memory_estimator.calibration import shipped_constants
from memory_estimator.common.schema import option
from memory_estimator.common.table import PALETTE, Table
from memory_estimator.common.units import GIB, by
from records.command import main
from records.files import newest, read_records
from records.kernels import draw_roofline, kernels_table
from records.measured import accuracy_json, digest, error_table, instructions_of, page
from records.validate import VALIDATION, validation

HEAD = [
    "# Results",
    "",
    "Made from `records/` by `python -m records.tables --records records`. The help of each script "
    "says how it measures.",
]


@dataclass(frozen=True)
class TableOptions:
    """The options of `records.tables`."""

    records: Path = option(help="folder of .jsonl records", metavar="DIR")
    out: Optional[Path] = option(
        None, "write the page of results to FILE instead of printing it", metavar="FILE"
    )
    page: Optional[Path] = option(None, "write the validation page", metavar="FILE")
    accuracy: Optional[Path] = option(
        None, "write the errors of the estimator, accuracy.json", metavar="FILE"
    )
    picture: Optional[Path] = option(
        None, "draw the newest comparison of policies as PNG", metavar="FILE"
    )
    roofline: Optional[Path] = option(
        None, "draw the newest record of `records.kernels` as PNG", metavar="FILE"
    )


OPTIONS = (TableOptions,)


def run(options: TableOptions) -> int:
    for name, make in OF_RECORDS.items():
        if getattr(options, name):
            write_bytes(getattr(options, name), make(options.records))
    page = "\n".join([*tables(options.records), ""])
    if options.out:
        write_bytes(options.out, page.encode())
    else:
        print(page, end="")
    return 0


def tables(folder: Path) -> List[str]:
    """The lines of the page of results of a folder of records. A kind without records has no
    section."""
    lines = list(HEAD)
    for name, (heading, section) in SECTIONS.items():
        if (folder / name).exists():
            lines += ["", f"## {heading}", "", *section(folder / name)]
            while not lines[-1]:
                lines.pop()
    return lines


# --- Sections of the page of results ---


def _newest(path: Path, names: Sequence[str]) -> List[Dict[str, Any]]:
    """The newest record of each job; jobs differ in these fields or the CPU."""

    def job_of(record: Dict[str, Any]) -> str:
        fields = [record.get(name) for name in names]
        return json.dumps([*fields, record["host"]["cpu"]], sort_keys=True)

    return newest(read_records(path, path.stem), job_of)


def _tables(
    path: Path, names: Sequence[str], table: Callable[[Dict[str, Any]], Table]
) -> List[str]:
    """A table for the newest record of each job."""
    lines = []
    for record in _newest(path, names):
        lines += [*table(record).markdown(), ""]
    return lines


def _estimator(path: Path) -> List[str]:
    rows = validation(path.parent)[1]
    return [
        *error_table(rows).markdown(),
        "",
        "Every configuration is in [validation.md](validation.md).",
    ]


def comparisons_markdown(records: Sequence[Dict[str, Any]]) -> List[str]:
    """Lines for the page of results: the tables of the newest record of each title."""
    lines: List[str] = []
    for record in newest(records, lambda record: record["title"]):
        host = record["host"]
        data = record["data"]
        split = ", ".join(f"{size} {name}" for name, size in data["split"].items())
        facts = [
            f"{record['date']}, {host['cores']} cores of {host['cpu']}",
            f"{data['name']}, {by(data['shape'], ' x ')}: {split}",
            record["budget"],
            f"seeds {listed(record['seeds'])}",
            f'scored on {record["cases"]} cases of "{record["evaluation"]["split"]}".',
        ]
        lines += [f"### {record['title']}", "", "; ".join(facts), ""]
        lines += [f"- `{name}`: `{options}`" for name, options in record["options"].items()]
        lines.append("")
        for table in results_tables(record):
            lines += [*table.markdown(), ""]
    return lines


def _learning(path: Path) -> List[str]:
    """A table of each setting: the Dice of untouched cases by the last weights of each run."""
    lines = []
    for record in read_records(path, "learning"):
        regions = record["curves"][0]["points"][-1]["dice"]
        rows = []
        for curve in record["curves"]:
            last = curve["points"][-1]
            run = f"seed {curve['seed']}, fold {curve.get('fold') or '-'}"
            dice = [f"{last['dice'][region]:.3f}" for region in regions]
            rows.append((run, f"{last['full_steps']:.1f}", f"{last['seconds']:.0f}", *dice))
        columns = ("run", "full steps", "seconds of steps", *regions)
        title = f"{record['task']}, {record['name']}, {record['host']['cpu']}"
        lines += [*Table(columns, rows, title=title, names=1).markdown(), ""]
    return lines


def draw_policies(records: Sequence[Dict[str, Any]]) -> bytes:
    """The memory of the process over one step under each policy, and the peaks of peers over
    theirs, as PNG.

    The policies are of the newest record with the bytes live over a step, drawn on top of all else
    that the process holds at its peak; peers are those of any record of that job and host. Raises
    InputError without such a record."""
    alive = [record for record in records if any(row.get("live_bytes") for row in record["rows"])]
    if not alive:
        rule = "records of policies must have live_bytes, got none"
        raise InputError(f"{rule}; measure with `python -m records.policies`")
    newest = alive[-1]
    lines = []
    step = title_of(newest)
    host = host_of(newest)
    shown = [row for row in newest["rows"] if row.get("live_bytes")]
    for record in records:
        if title_of(record) == step and host_of(record) == host:
            peers = [row for row in record["rows"] if row["kind"] == "peer"]
            shown += [row for row in peers if row["process_peak_bytes"]]
    for row, colour in zip(shown, itertools.cycle(PALETTE)):
        if row.get("live_bytes"):  # a step begins with what is live at its end
            beside = row["process_peak_bytes"] - row["allocator_peak_bytes"]
            held = [beside + size for size in (row["live_bytes"][-1], *row["live_bytes"])]
            marks = "-"
        else:
            held = [row["process_peak_bytes"], row["process_peak_bytes"]]
            marks = "--"
        name = f"{row['name'].partition(' --')[0]}, {max(held) / GIB:.2f} GiB"
        seconds = np.linspace(0, row["step_s"], len(held))
        lines.append(Line(name, seconds, np.array(held) / GIB, colour, marks=marks))
    axes = {"x_label": f"seconds\n{step}", "y_label": "GiB held by the process"}
    return chart(lines, title=f"Memory over a training step, {host}", y_range=(0, None), **axes)


def _predicted_table(record: Dict[str, Any]) -> Table:
    """By the constants that are shipped for its host."""
    return step_table(with_predictions(record, shipped_constants(instructions_of(record))))


STEP = ("shape", "batch", "micro_batch", "unet", "optimizer", "engine_name")
KERNELS = ("threads", "engine_name")

# File or folder of records -> heading and lines of its section.
SECTIONS = {
    "policies.jsonl": (
        "Memory policies",
        lambda path: _tables(path, STEP, _predicted_table),
    ),
    VALIDATION: ("The estimator against measured steps", _estimator),
    "compare.jsonl": (
        "Whole volumes against patches",
        lambda path: comparisons_markdown(read_records(path, "compare")),
    ),
    "kernels.jsonl": (
        "Native operations beside the engine's",
        lambda path: _tables(path, KERNELS, kernels_table),
    ),
}

for name in ("learning", "hippocampus", "paper-flair", "patches"):
    SECTIONS[f"{name}.jsonl"] = (f"Learning: {name}", _learning)

# Option -> the content of its file, of a folder of records.
OF_RECORDS: Dict[str, Callable[[Path], bytes]] = {
    "picture": lambda folder: draw_policies(read_records(folder / "policies.jsonl", "policies")),
    "roofline": lambda folder: draw_roofline(read_records(folder / "kernels.jsonl", "kernels")[-1]),
    # Made without margins, which follow from it.
    "accuracy": lambda folder: accuracy_json(digest(validation(folder, Accuracy(()))[1])),
    "page": lambda folder: "\n".join([*page(*validation(folder)), ""]).encode(),
}


if __name__ == "__main__":
    main("records.tables")

"""Make the page of results from benchmark records: one section per kind, with the newest record of
each job.

    ./run.sh bench tables --records records                         # prints the page
    ./run.sh bench tables --records records --page validation.md \\
        --picture docs/pictures/policies.png
    ./run.sh bench tables --studies study.jsonl --learning curves.png
    ./run.sh bench tables --records records --accuracy memory_estimator/hosts/accuracy.json

Records of `bench learning` may lie in several files of the folder, such as one for each data set;
--studies takes some of them, also from elsewhere, in their place.

Predictions are made by the present estimator with its shipped constants. The upper bounds of the
validation page follow from the errors of the predictions in accuracy.json: write that file after a
new record, and after a change of the estimator."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from cpu3d.bench.estimator_errors import VALIDATION, validation
from cpu3d.bench.exactness import exactness_table
from cpu3d.bench.kernels import draw_roofline, kernels_table
from cpu3d.bench.learning_results import (
    draw_learning,
    draw_pair,
    merged,
    pair_tables,
    pairs_of,
    study_tables,
)
from cpu3d.bench.step_costs import draw_policies, step_table, with_predictions
from cpu3d.compare.results import comparisons_markdown
from cpu3d.errors import InputError, raise_if_any
from cpu3d.util.atomic import write_bytes
from cpu3d.util.records import listed, newest, read_records
from memory_estimator.accuracy import Accuracy
from memory_estimator.common.schema import option
from memory_estimator.common.table import Table
from memory_estimator.measured import accuracy_json, digest, error_table, page

HEAD = [
    "# Results",
    "",
    "Made from `records/` by `./run.sh bench tables --records records`. The help of each command "
    "describes how it measures.",
]


@dataclass(frozen=True)
class TableOptions:
    """The options of `bench tables`."""

    records: Optional[Path] = option(None, "folder of .jsonl records", metavar="DIR")
    studies: Tuple[Path, ...] = option(
        (), "files of `bench learning` (default: all of DIR that have such records)", metavar="FILE"
    )
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
        None, "draw the newest record of `bench kernels` as PNG", metavar="FILE"
    )
    learning: Optional[Path] = option(
        None, "draw the curves of `bench learning` over full steps as PNG", metavar="FILE"
    )
    learning_seconds: Optional[Path] = option(None, "draw them over seconds as PNG", metavar="FILE")
    differences: Optional[Path] = option(
        None, "draw its last two settings on the same data, case by case, as PNG", metavar="FILE"
    )


OPTIONS = (TableOptions,)


def run(options: TableOptions) -> int:
    raise_if_any(_problems(options))
    for name, make in OF_RECORDS.items():
        if getattr(options, name):
            write_bytes(getattr(options, name), make(options.records))
    for name, draw in OF_STUDIES.items():
        if getattr(options, name):
            files = options.studies or study_files(options.records)
            write_bytes(getattr(options, name), draw(files))
    page = "\n".join([*tables(options.records, options.studies), ""])
    if options.out:
        write_bytes(options.out, page.encode())
    else:
        print(page, end="")
    return 0


def _problems(options: TableOptions) -> List[str]:
    """Options that lack the records which they show."""
    if options.records:
        return []
    if not options.studies:
        return ["--records must name a folder of records, or --studies files, got none; add one"]
    names = [name for name in OF_RECORDS if getattr(options, name)]
    return [f"--{name} must come with --records, got none; name the folder" for name in names]


def tables(folder: Optional[Path], studies: Sequence[Path] = ()) -> List[str]:
    """The lines of the page of results: of a folder of records, with `studies` in place of its
    files of `bench learning`, or of these alone. A kind without records has no section."""
    lines = list(HEAD)
    sections = []
    for name, (heading, section) in SECTIONS.items():
        if folder and (folder / name).exists():
            sections.append((heading, section(folder / name)))
    files = studies or study_files(folder)
    if files:
        sections.append(("Learning", _learning(files)))
    for heading, content in sections:
        lines += ["", f"## {heading}", "", *content]
        while not lines[-1]:
            lines.pop()
    return lines


def study_files(folder: Path) -> List[Path]:
    """The files of a folder of records that have records of `bench learning`."""
    files = [path for path in sorted(folder.glob("*.jsonl")) if path.name not in SECTIONS]
    return [path for path in files if read_records(path, "learning")]


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


def _studies(files: Sequence[Path]) -> List[List[Dict[str, Any]]]:
    """The records of `bench learning` of each file, one for each setting."""
    if not files:
        rule = "--records must have a file of `bench learning`"
        raise InputError(f"{rule}, got none; measure with its --record, or name --studies")
    return [merged(read_records(path, "learning")) for path in files]


def _learning(files: Sequence[Path]) -> List[str]:
    """The tables of `bench learning`, file by file, and the differences of settings on the same
    data."""
    lines = []
    for path, records in zip(files, _studies(files)):
        if len(files) > 1:
            lines += [f"### {path.stem}", ""]
        tables = study_tables(records)
        for pair in pairs_of(records):
            tables += pair_tables(pair.to_json())
        for table in tables:
            lines += [*table.markdown(), ""]
    return lines


def _curves(files: Sequence[Path], cost: str) -> bytes:
    """The picture of all settings' curves over a cost."""
    return draw_learning([record for records in _studies(files) for record in records], cost)


def _last_pair(files: Sequence[Path]) -> bytes:
    """The picture of the last two settings on the same data."""
    pairs = [pair for records in _studies(files) for pair in pairs_of(records)]
    if not pairs:
        rule = f"{listed(files)} must have two settings with a seed and cases in common"
        raise InputError(f"{rule}, got none; measure both with `bench learning --store`")
    return draw_pair(pairs[-1])


STEP = ("shape", "batch", "micro_batch", "unet", "optimizer", "engine_name")
KERNELS = ("threads", "engine_name")

# File or folder of records -> heading and lines of its section.
SECTIONS = {
    "policies.jsonl": (
        "Memory policies",
        lambda path: _tables(path, STEP, lambda record: step_table(with_predictions(record))),
    ),
    VALIDATION: ("The estimator against measured steps", _estimator),
    "compare.jsonl": (
        "Whole volumes against patches",
        lambda path: comparisons_markdown(read_records(path, "compare")),
    ),
    "kernels.jsonl": (
        "Own operations beside the engine's",
        lambda path: _tables(path, KERNELS, kernels_table),
    ),
    "exactness.jsonl": (
        "How exact own operations are",
        lambda path: _tables(path, ("grid", "channels"), exactness_table),
    ),
}

# Option -> the content of its file, of a folder of records.
OF_RECORDS: Dict[str, Callable[[Path], bytes]] = {
    "picture": lambda folder: draw_policies(read_records(folder / "policies.jsonl", "policies")),
    "roofline": lambda folder: draw_roofline(read_records(folder / "kernels.jsonl", "kernels")[-1]),
    # Made without margins, which follow from it.
    "accuracy": lambda folder: accuracy_json(digest(validation(folder, Accuracy(()))[1])),
    "page": lambda folder: "\n".join([*page(*validation(folder)), ""]).encode(),
}

# Option -> its picture, of files of `bench learning`.
OF_STUDIES: Dict[str, Callable[[Sequence[Path]], bytes]] = {
    "learning": lambda files: _curves(files, "full_steps"),
    "learning_seconds": lambda files: _curves(files, "seconds"),
    "differences": lambda files: _last_pair(files),
}

"""Measure the data path: loading against nibabel, MONAI and the sources' own ways, waits, memory, augmentation.

    ./run.sh bench data --workdir bench-data --record records/data.jsonl --picture docs/pictures/data.png
    ./run.sh bench data --workdir bench-data --case BraTS-GLI-00000-000 --rows s4 s0
    ./run.sh bench data --workdir bench-data --monai monai-env/bin/python --rows monai
    ./run.sh bench data --workdir bench-data --clean

Rows: s4 (a case), s0 (a patch), spleen (training on patches), ladder (S1's), volumes (training on whole volumes), many
(48,884 entries), augment (its cost), monai (with --monai). All files are made up and lie in the work folder, 20 GB with
the CTs; a later run finds them there. Every way to do a thing takes its turn in every round; a line is the median over
the rounds. "Cold" means that the files' pages were dropped from memory before.
"""

import argparse
import json
import sys
import textwrap
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from rich.console import Console

from cpu3d.bench.data.files import FULL, TINY, Files
from cpu3d.bench.data.loading import augment, monai, s0, s4
from cpu3d.bench.data.timing import Effort
from cpu3d.bench.data.training import ladder, many, spleen, volumes
from cpu3d.bench.harness import ProcessFailedError
from cpu3d.data.files.reader import file_system
from cpu3d.errors import InputError
from cpu3d.util.atomic import atomic_write
from cpu3d.util.records import append_record, read_records
from cpu3d.util.versions import versions
from memory_estimator.figure import PALETTE, new_figure, plain, png
from memory_estimator.host import read_host
from memory_estimator.schema import add_options, check, from_args, option
from memory_estimator.table import Table

ROWS = {row.__name__: row for row in (s4, s0, spleen, ladder, volumes, many, augment, monai)}
"""In the order they are measured."""

NAMES = {
    "s4": "a case",
    "s0": "a patch",
    "spleen": "training on patches",
    "ladder": "S1's ladder",
    "volumes": "training on whole volumes",
    "many": "a large store",
    "augment": "augmentation",
    "monai": "MONAI",
}
"""Row -> what it is about, in the order of the page."""

MARK = "<!-- from here on made by `bench tables` -->"
"""In docs/data.md: what follows is made from the records."""

PANELS = ("s4", "s0", "spleen", "ladder", "monai")
"""The rows that are drawn: those whose lines are seconds of loading."""

OURS, THEIRS, BOUND = (PALETTE[0], PALETTE[5]), ("#8f9aa6", "#cfd6dd"), PALETTE[1]
"""Colours of a line's first state and of its second, and of the mark that it has to reach."""


@dataclass(frozen=True)
class Options:
    """What `bench data` measures."""

    workdir: Path = option(help="folder for the files that are read; kept")
    case: Optional[Path] = option(None, help="a labelled BraTS case for s4 and augment (default: a phantom)")
    rows: Tuple[str, ...] = option((), help="default: all; monai where --monai is given", choices=tuple(ROWS))
    rounds: int = option(5, help="how often each thing is done", at_least=1, metavar="N")
    cap_mb_s: int = option(200, help="of the slow disk", at_least=1, metavar="MB/S")
    steps: int = option(1000, help="steps memory is watched", at_least=1, metavar="N")
    volumes: Optional[int] = option(
        None, help=f"CTs of S0's training set (default: {FULL.cts})", at_least=1, metavar="N"
    )
    monai: Optional[Path] = option(None, help="a Python with MONAI, for the row monai", metavar="PYTHON")
    record: Optional[Path] = option(None, help="append the rows to a .jsonl file", metavar="FILE")
    picture: Optional[Path] = option(None, help="write the rows as PNG", metavar="FILE")
    smoke: bool = option(False, help="tiny files and few steps: a trial of the benchmark")
    clean: bool = option(False, help="remove what earlier runs made in --workdir, and end")

    def __post_init__(self):
        check(self, InputError)
        if "monai" in self.rows and not self.monai:
            raise InputError("--rows monai must come with --monai, got none; name a Python that has MONAI")
        if self.monai and not self.monai.is_file():
            raise InputError(f"--monai must name a Python, found none at {self.monai}; check the path")
        if self.case and not self.case.is_dir():
            raise InputError(f"--case must name the folder of a BraTS case, found none at {self.case}; check the path")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, Options)


def run(args: argparse.Namespace) -> int:
    options = from_args(Options, args)
    scale = TINY if options.smoke else FULL
    files = Files(options.workdir, replace(scale, cts=options.volumes or scale.cts), options.case)
    if options.clean:
        files.clean()
        return 0
    shared = {
        "host": read_host().summary(),
        "versions": versions(),
        "file_system": file_system(files.folder),
        "scale": asdict(files.scale),
        "rounds": options.rounds,
        "case": "phantom" if options.case is None else options.case.name,
    }
    effort = Effort(options.rounds, options.cap_mb_s, options.steps, options.monai)
    found: Dict[str, Dict[str, Any]] = {}
    failures: List[str] = []
    for name in options.rows or [name for name in ROWS if name != "monai" or options.monai]:
        try:
            row = ROWS[name](files, effort).to_json()
        except ProcessFailedError as error:  # takes no other row along
            failures.append(f"row {name}: {error}")
            continue
        found[name] = {**row, **shared}
        title = f"{name}: {row['title']}"
        Console().print(Table(("", "pages", "median", "", ""), _cells(row), title, "\n".join(row["notes"]), 2).rich())
        if options.record:
            append_record(options.record, "data", found[name])
    if any(row["targets"] for row in found.values()):
        Console().print(targets_table(list(found.values())).rich())
    if options.picture and found:
        # With the rows that the record has of the same sizes on the same host.
        sizes = json.loads(json.dumps([shared["host"], shared["scale"]]))
        known = read_records(options.record, "data") if options.record else []
        same = {record["row"]: record for record in known if [record["host"], record["scale"]] == sizes}
        options.picture.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(options.picture) as file:
            file.write(draw(newest([*same.values(), *found.values()]), shared["host"]))
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


def newest(records: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """The last record of each row, in the order of `NAMES`."""
    last = {record["row"]: record for record in records}
    return [last[row] for row in NAMES if row in last]


def targets_table(rows: Sequence[Dict[str, Any]]) -> Table:
    """What was asked for and what was found, a line a target."""
    lines = []
    for row in rows:
        for target in row["targets"]:
            found, bound = (f"{value:.3g} {target['unit']}" for value in (target["value"], target["bound"]))
            rule = "at least" if target["rule"] == ">=" else "at most"
            missed = "" if target["met"] else " (**missed**)"
            lines.append((NAMES[row["row"]], target["name"], found + missed, f"{rule} {bound}"))
    return Table(("", "", "found", "asked for"), lines, names=2)


def targets_lines(records: Sequence[Dict[str, Any]]) -> List[str]:
    """The targets of the newest records as Markdown."""
    return targets_table(newest(records)).markdown()


def page_lines(records: Sequence[Dict[str, Any]]) -> List[str]:
    """Every line of every row as Markdown, losing ones too."""
    lines: List[str] = []
    for record in newest(records):
        host = record["host"]
        how = f"{record['date']}, {host['cores']} cores of {host['cpu']}, {record['file_system']}, median of "
        how += f"{record['rounds']} rounds in turn (least to most); case: {record['case']}."
        table = Table(("", "pages", "median", "", ""), _cells(record), how, names=2)
        lines += [f"### {record['title']}", "", *table.markdown(), "", *record["notes"]]
        lines += [""] if record["notes"] else []
    return lines


def draw(rows: Sequence[Dict[str, Any]], host: Dict[str, Any]) -> bytes:
    """Records' rows, as PNG: a panel a row, seconds as bars, and a mark where a bar has to end for its target."""
    rows = [row for row in rows if row["row"] in PANELS]
    heights = [0.95 + 0.22 * len(row["lines"]) for row in rows]
    high = sum(heights) + 0.45
    figure = new_figure(9.4, high)
    if rows:
        ratios = {"height_ratios": heights}
        panels = figure.subplots(len(rows), 1, squeeze=False, gridspec_kw=ratios)[:, 0]
        for axes, row in zip(panels, rows):
            _panel(axes, row)
    title = f"Loading on {host['cpu']}, {host['cores']} cores: the store in blue; warm or fast dark, cold or slow light"
    figure.suptitle(title, fontsize=10.5, fontweight="bold", x=0.01, y=1 - 0.06 / high, ha="left")
    figure.tight_layout(pad=0.6, h_pad=1.2, rect=(0, 0, 1, 1 - 0.22 / high))
    return png(figure)


def amount(value: float, unit: str) -> str:
    """For reading: seconds below one as ms, or as us below one of these."""
    if unit != "s":
        return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
    for size, name in ((1, "s"), (1e-3, "ms")):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value * 1e6:.0f} us"


# --- Private helpers ---


def _cells(row: Dict[str, Any]) -> List[Tuple[str, ...]]:
    cells = []
    for line in row["lines"]:
        median, least, most = (amount(line[name], line["unit"]) for name in ("median", "min", "max"))
        cells.append((line["name"], line["state"], median, f"{least} to {most}", line["note"]))
    return cells


def _panel(axes: Any, row: Dict[str, Any]) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    plain(axes, textwrap.fill(row["title"], 60))
    axes.grid(False, axis="y")
    marks = {tuple(target["mark"][:2]): target["mark"][2] for target in row["targets"] if target["mark"]}
    states = list(dict.fromkeys(line["state"] for line in row["lines"]))
    lines = sorted(row["lines"], key=lambda line: [one["name"] for one in row["lines"]].index(line["name"]))
    for place, line in enumerate(lines):
        is_ours = "store" in line["name"] or ".npy instead" in line["name"]
        colour = (OURS if is_ours else THEIRS)[states.index(line["state"])]
        spread = [[line["median"] - line["min"]], [line["max"] - line["median"]]]
        axes.barh(place, line["median"], 0.8, color=colour, xerr=spread, error_kw={"elinewidth": 0.9, "capsize": 1.6})
        axes.text(line["max"] * 1.08, place, amount(line["median"], line["unit"]), va="center", fontsize=7)
        mark = marks.get((line["name"], line["state"]))
        if mark:
            axes.plot([mark, mark], [place - 0.55, place + 0.55], color=BOUND, linewidth=1.8)
    axes.set_xscale("log")
    axes.set_xlim(
        min(line["median"] for line in lines) / 2.5, max([*(line["max"] for line in lines), *marks.values()]) * 6
    )
    axes.set_ylim(len(lines) - 0.5, -0.8)
    axes.set_yticks(range(len(lines)), [f"{line['name']}, {line['state']}" for line in lines], fontsize=7)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value, "s")))
    axes.xaxis.set_minor_formatter(NullFormatter())

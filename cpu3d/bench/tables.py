"""Make the page of results from benchmark records: one section per kind, with the newest record of each job.

    ./run.sh bench tables --records records                         # prints the page
    ./run.sh bench tables --records records --page validation.md --picture docs/pictures/policies.png
    ./run.sh bench tables --records records --accuracy memory_estimator/accuracy.json

Predictions are those of the present estimator with its shipped constants. The upper bounds of the validation page
follow from accuracy.json, the errors of the predictions: write that file after a new record, and after a change of the
estimator.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from cpu3d.bench.kernels import draw_roofline, kernels_table
from cpu3d.bench.learning import draw_learning, learning_table
from cpu3d.bench.step import draw_policies, step_table, with_predictions
from cpu3d.bench.validate import VALIDATION, accuracy_of, page, summary_table, validation
from cpu3d.compare.report import comparisons_markdown
from cpu3d.util.atomic import write_bytes
from cpu3d.util.records import newest, read_records
from memory_estimator.calibration import shipped_constants
from memory_estimator.common.schema import option
from memory_estimator.host import instruction_set

HEAD = """\
# Results

Made of `records/` by `./run.sh bench tables --records records`. The help of each command says how it measures.
"""


@dataclass(frozen=True)
class TableOptions:
    """Which records, and which pages are written."""

    records: Path = option(help="folder of .jsonl records", metavar="DIR")
    out: Optional[Path] = option(None, "write the page of results; else it is printed", metavar="FILE")
    page: Optional[Path] = option(None, "write the validation page", metavar="FILE")
    accuracy: Optional[Path] = option(None, "write the errors of the estimator, accuracy.json", metavar="FILE")
    picture: Optional[Path] = option(None, "draw the newest comparison of policies as PNG", metavar="FILE")
    roofline: Optional[Path] = option(None, "draw the newest record of `bench kernels` as PNG", metavar="FILE")
    learning: Optional[Path] = option(None, "draw the newest curves of `bench learning` as PNG", metavar="FILE")


OPTIONS = (TableOptions,)


def run(options: TableOptions) -> int:
    if options.picture:
        write_bytes(options.picture, draw_policies(read_records(options.records / "policies.jsonl", "policies")))
    if options.roofline:
        write_bytes(options.roofline, draw_roofline(read_records(options.records / "kernels.jsonl", "kernels")[-1]))
    if options.learning:
        write_bytes(options.learning, draw_learning(_newest(options.records / "learning.jsonl", LEARNING)))
    if options.accuracy:
        write_bytes(options.accuracy, accuracy_of(options.records))
    if options.page:
        write_bytes(options.page, ("\n".join(page(*validation(options.records))) + "\n").encode())
    text = "\n".join(tables(options.records)) + "\n"
    if options.out:
        write_bytes(options.out, text.encode())
    else:
        print(text, end="")
    return 0


def tables(folder: Path) -> List[str]:
    """The lines of the page of results. A kind without records has no section."""
    lines = HEAD.splitlines()
    for name, (heading, section) in SECTIONS.items():
        if (folder / name).exists():
            lines += ["", f"## {heading}", "", *section(folder / name)]
            while not lines[-1]:
                lines.pop()
    return lines


# --- Sections of the page of results ---


def _newest(path: Path, names: Sequence[str]) -> List[Dict[str, Any]]:
    """The newest record of each job, which these fields and the CPU tell apart."""

    def job(record: Dict[str, Any]) -> str:
        return json.dumps([*(record.get(name) for name in names), record["host"]["cpu"]], sort_keys=True)

    return newest(read_records(path, path.stem), job)


def _policies(path: Path) -> List[str]:
    lines: List[str] = []
    for record in _newest(path, STEP):
        constants = shipped_constants(instruction_set(record["host"]["isa"]))
        lines += [*step_table(with_predictions(record, constants)).markdown(), ""]
    return lines


def _estimator(path: Path) -> List[str]:
    rows = validation(path.parent)[1]
    return [*summary_table(rows).markdown(), "", "Every configuration is in [validation.md](validation.md)."]


def _kernels(path: Path) -> List[str]:
    lines: List[str] = []
    for record in _newest(path, ("threads", "engine_name")):
        lines += [*kernels_table(record).markdown(), ""]
    return lines


STEP = ("shape", "batch", "micro_batch", "unet", "optimizer", "engine_name")
LEARNING = ("task", "name", "shape", "steps")

# File or folder of records -> heading, and the lines of it.
SECTIONS = {
    "policies.jsonl": ("Memory policies", _policies),
    VALIDATION: ("The estimator against measured steps", _estimator),
    "compare.jsonl": (
        "Whole volumes against patches",
        lambda path: comparisons_markdown(read_records(path, "compare")),
    ),
    "kernels.jsonl": ("Own convolutions beside the engine's", _kernels),
    "learning.jsonl": ("Learning", lambda path: learning_table(_newest(path, LEARNING)).markdown()),
}

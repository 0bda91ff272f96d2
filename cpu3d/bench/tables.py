"""Make the page of results from benchmark records: a section a kind, the newest record of each job.

    ./run.sh bench tables --records records                         # prints it
    ./run.sh bench tables --records records --page validation.md --picture docs/pictures/policies.png
    ./run.sh bench tables --records records --accuracy memory_estimator/accuracy.json

What is predicted is what the estimator says now, with the constants that it ships. The validation page holds every
measured configuration beside that, a section a host; its upper bounds follow from accuracy.json, how far predictions
are off, which --accuracy writes anew first: after a record has come in, and after changes.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from cpu3d.bench.learning import draw_learning, learning_table
from cpu3d.bench.memory import draw_policies, policies_table
from cpu3d.bench.step import has_known_engine, job_of_record, step_table
from cpu3d.bench.validate import VALIDATION, accuracy_json, page, summary_table, validation
from cpu3d.compare.report import comparisons_markdown
from cpu3d.errors import InputError
from cpu3d.util.atomic import write_bytes
from cpu3d.util.records import newest, read_records
from memory_estimator.calibration import shipped_constants
from memory_estimator.common.schema import option
from memory_estimator.common.table import Table
from memory_estimator.estimate import estimate
from memory_estimator.step.onednn import Kernels, highest_isa
from models.config import POLICIES, UNetConfig

HEAD = """\
# Results

Made of `records/` by `./run.sh bench tables --records records`. Ranges are the least to the most of the rounds. How
each was measured stands in the help of its command.
"""


@dataclass(frozen=True)
class TableOptions:
    """Which records, and which pages are written."""

    records: Path = option(help="folder of .jsonl records", metavar="DIR")
    out: Optional[Path] = option(None, "write the page of results; else it is printed", metavar="FILE")
    page: Optional[Path] = option(None, "write the validation page", metavar="FILE")
    accuracy: Optional[Path] = option(None, "write what the estimator says of its errors", metavar="FILE")
    picture: Optional[Path] = option(None, "draw the newest comparison of policies as PNG", metavar="FILE")
    learning: Optional[Path] = option(None, "draw the newest curves of `bench learning` as PNG", metavar="FILE")


OPTIONS = (TableOptions,)


def run(options: TableOptions) -> int:
    if options.picture:
        write_bytes(options.picture, picture(options.records / "policies.jsonl"))
    if options.learning:
        write_bytes(options.learning, draw_learning(_newest(options.records / "learning.jsonl", *_LEARNING)))
    if options.accuracy:
        write_bytes(options.accuracy, accuracy_json(options.records))
    if options.page:
        write_bytes(options.page, ("\n".join(page(*validation(options.records))) + "\n").encode())
    text = "\n".join(tables(options.records)) + "\n"
    if options.out:
        write_bytes(options.out, text.encode())
    else:
        print(text, end="")
    return 0


def tables(folder: Path) -> List[str]:
    """The lines of the page of results. What was not recorded has no section."""
    lines = HEAD.splitlines()
    for kind, (heading, section) in SECTIONS.items():
        path = Path(folder) / (kind if kind == VALIDATION else f"{kind}.jsonl")
        if path.exists():
            lines += ["", f"## {heading}", "", *section(path)]
            while not lines[-1]:
                lines.pop()
    return lines


def picture(path: Path) -> bytes:
    """PNG of the newest comparison of policies that has the bytes live over a step, with the peaks of peers that any
    comparison at the same job had, on whatever host. Raises InputError where there is none."""

    def job(record: Dict[str, Any]) -> Tuple[Any, ...]:
        unet = UNetConfig(**{**record["unet"], "policy": POLICIES[0]})
        return unet, *(record[name] for name in ("shape", "batch", "micro_batch"))

    records = read_records(path, "policies")
    drawn = next((one for one in reversed(records) if any(row.get("live_bytes") for row in one["rows"])), None)
    if not drawn:
        raise InputError(f"records {path} must have live_bytes, got none; measure with `bench memory --policies`")
    return draw_policies(drawn, [one for one in records if job(one) == job(drawn)])


# --- Sections of the page of results ---


def _each(table: Callable[[Dict[str, Any]], Table], *names: str) -> Callable[[Path], List[str]]:
    """A section with a table of the newest record of each job, which the named fields and the CPU tell apart."""

    return lambda path: [line for one in _newest(path, *names) for line in (*table(one).markdown(), "")]


def _newest(path: Path, *names: str) -> List[Dict[str, Any]]:
    """The newest record of each job, which the named fields and the CPU tell apart."""

    def job(record: Dict[str, Any]) -> str:
        cpu = record.get("host", {}).get("cpu")
        return json.dumps([*(record.get(name) for name in names), cpu], sort_keys=True)

    return newest(read_records(path, path.stem), job)


def _policies(record: Dict[str, Any]) -> Table:
    """The table with what the estimator says now; nothing for an engine that it does not know."""

    def predicted(row: Dict[str, Any]) -> Optional[Mapping[str, Any]]:
        if row["kind"] != "policy" or not has_known_engine(record):
            return None
        job = job_of_record({**record, "unet": {**record["unet"], "policy": row["name"]}})
        return vars(estimate(job, shipped_constants(Kernels(highest_isa(record["host"]["isa"])))))

    return policies_table({**record, "rows": [{**row, "predicted": predicted(row)} for row in record["rows"]]})


def _estimator(path: Path) -> List[str]:
    rows = validation(path.parent)[1]
    return [*summary_table(rows).markdown(), "", "Every configuration stands in [validation.md](validation.md)."]


def _comparisons(path: Path) -> List[str]:
    return comparisons_markdown(read_records(path, "compare"))


_STEP = ("shape", "batch", "micro_batch", "unet", "optimizer", "engine_name")
_LEARNING = ("task", "name", "shape", "steps")
SECTIONS: Dict[str, Tuple[str, Callable[[Path], List[str]]]] = {
    "step": ("The training step beside others", _each(step_table, *_STEP)),
    "policies": ("Memory policies", _each(_policies, *_STEP)),
    "memory": ("The estimator against measured steps", _estimator),
    "compare": ("Whole volumes against patches", _comparisons),
    "resolutions": ("Resolution and effective batch", _comparisons),
    "learning": ("Learning", _each(learning_table, *_LEARNING)),
}
"""Kind of record, which is its file's name too -> heading and lines."""

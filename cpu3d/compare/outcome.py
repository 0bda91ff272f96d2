"""What a comparison leaves: results in compare.json, the page, a record, tables on the terminal."""

import argparse
import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

from rich.console import Console

from cpu3d.compare import tables
from cpu3d.compare.comparison import Comparison, to_json
from cpu3d.compare.page import cautions, reading, write_page
from cpu3d.compare.plan import Kept
from cpu3d.compare.planned import Evaluation
from cpu3d.data.store import Store
from cpu3d.util.records import append_record
from cpu3d.util.versions import versions
from memory_estimator.host import read_host


def report(
    args: argparse.Namespace,
    comparison: Comparison,
    kept: Kept,
    store: Optional[Store],
    evaluation: Evaluation,
    budget: str,
    out: Path,
) -> None:
    """Keep the results, write the page and the record, print the tables. `store` is None where it is not there now."""
    data = store.manifest.name if store else "data that is not there now"
    title = args.title or f"{' against '.join(comparison.variants)}: {data}"
    results, lines = to_json(comparison), reading(comparison)
    kept = dataclasses.replace(
        kept, results={**results, "reading": lines, "limits": cautions(comparison, evaluation.split)}
    )
    kept.save(out)
    page = write_page(out / "report.html", comparison, store, evaluation, title=title, budget=budget)
    if args.record and store:
        append_record(args.record, "compare", _record(comparison, kept, store, title, budget))
    console = Console()
    if args.json:
        json.dump(vars(kept), sys.stdout, indent=1)
        print()
    else:
        console.print(tables.scores_table(comparison))
        if comparison.differences:
            console.print(tables.differences_table(comparison))
        console.print(tables.costs_table(comparison))
        for line in lines:
            console.print(f"- {line}", highlight=False, markup=False)
    Console(stderr=True).print(f"written: {page}", highlight=False, markup=False, soft_wrap=True)


# --- Private helpers ---


def _record(comparison: Comparison, kept: Kept, store: Store, title: str, budget: str) -> Dict[str, Any]:
    """What a line of records/compare.jsonl holds: no paths, and nothing of one case."""
    host: Optional[Dict[str, Any]] = comparison.runs[comparison.baseline][0].host or None
    split: Dict[str, int] = {name: len(ids) for name, ids in store.manifest.split.items()}
    shape: Tuple[int, ...] = tuple(store.manifest.largest_shape)
    return {
        "title": title,
        "host": host or read_host().summary(),
        "versions": versions(),
        "data": {"name": store.manifest.name, "split": split, "shape": shape},
        "budget": budget,
        "seeds": kept.seeds,
        "evaluation": kept.asked["evaluation"],
        "options": {course["name"]: shlex.join(course["options"]) for course in kept.plan},
        **(kept.results or {}),
    }

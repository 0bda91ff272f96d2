"""What a comparison leaves: results in compare.json, report.html, a record, tables on the terminal and in the docs.

Every table is made of the results as compare.json and the records hold them, so that all places show the same rows.
"""

import dataclasses
import itertools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Iterator, List, Optional, Sequence, Tuple

import numpy as np
from rich.console import Console

from cpu3d.compare.plan import Course, Json, Kept
from cpu3d.compare.statistics import COSTS, Comparison, counts, millions
from cpu3d.data.store import Store
from cpu3d.inference.evaluate import UNTOUCHED, warning
from cpu3d.inference.scores import METRICS, metric_notes
from cpu3d.pages.page import flat, render_page
from cpu3d.pages.viewer import ViewedCase, viewer
from cpu3d.report.pictures import Figures, Line, chart, strips
from cpu3d.report.run_files import best_median_worst, viewed_case
from cpu3d.util.atomic import atomic_write
from cpu3d.util.progress import say
from cpu3d.util.records import append_record, by, count, duration, listed, newest, plus_minus, seconds, versions
from memory_estimator.common.table import PALETTE, Bold, Table
from memory_estimator.common.units import format_bytes
from memory_estimator.host import read_host

if TYPE_CHECKING:
    from cpu3d.compare.command import Options

DIFFERENCES = (
    "On the same case and seed: mean (95 % interval), and cases better / worse / equal. Intervals: bootstrap of the "
    "mean over seeds and cases, crossed. With few seeds they are too narrow: of 3 seeds 2.7 times narrower than "
    "Student's t makes them. So a difference counts, in bold, where its interval leaves out 0 and it is larger than "
    "seeds alone make it once in 20 times by Student's t; with one seed none counts."
)

COSTS_OF = (
    "Of one run: the median of the seeds for times, the largest for memory. A case trained: as many voxels as a whole "
    "case has. Memory is the largest resident set of the process, with what read mode ram keeps of the files; a "
    "card's is what TensorFlow's allocator held there."
)

NOT_SETTINGS = (
    *("seed", "unet.seed", "save_minutes"),
    *("store", "store_channels", "label_names", "region_codes"),
)
"""Of a run's configuration: what does not tell variants apart, or belongs to the store."""


# --- Tables ---


def plan_table(plan: Sequence[Course], seeds: Sequence[int], budget: str) -> Table:
    """What is about to happen, a line a variant."""
    rows, all_s = [], []
    for course in plan:
        steps, step_s = course["steps"], course["step_s"]
        all_s.append(step_s * steps * len(seeds) if steps and step_s else None)
        rows.append(
            (
                course["name"],
                by(course["grid"]) + (f" x {course['batch']}" if course["batch"] > 1 else ""),
                f"{steps:,}" if steps else "by time",
                millions(course["voxels"]) if course["voxels"] else "by time",
                course["policy"],
                seconds(step_s),
                duration(steps and step_s and steps * step_s),
                format_bytes(course["peak_bytes"]),
            )
        )
    return Table(
        ("variant", "sees", "steps", "voxels", "policy", "a step", "a run", "memory"),
        rows,
        title=f"{count(plan, 'variant')} x {count(seeds, 'seed')}, each for {budget}",
        caption="" if None in all_s else f"predicted: {duration(sum(all_s))} of steps, validation and scoring aside",
    )


def scores_table(record: Json) -> Table:
    """The mean over cases and seeds of every region and variant, and how the seeds differ."""
    first = next(iter(record["variants"].values()))["scores"][record["regions"][0]]
    metrics = [name for name in METRICS if name in first]
    return Table(
        ("region", "variant", *(METRICS[metric].label for metric in metrics)),
        [
            (
                *(region, variant),
                *(plus_minus(**one["scores"][region][name], digits=METRICS[name].digits) for name in metrics),
            )
            for region in record["regions"]
            for variant, one in record["variants"].items()
        ],
        title="Scores",
        caption=f"Mean over {count(record['cases'], 'case')}, full grids, and seeds \u00b1 standard deviation of the "
        f"seeds\u2019 means. {metric_notes(metrics, record['evaluation']['tolerance_mm'])}. Scored are the weights of "
        "the validation in full with the highest mean Dice.",
        names=2,
    )


def differences_table(record: Json) -> Table:
    """Every difference to the baseline; bold counts."""
    rows = []
    for variant, regions in record["differences"].items():
        for region, metric, one in ((region, *pair) for region, found in regions.items() for pair in found.items()):
            digits, bound = METRICS[metric].digits, one.get("seed_bound")
            text = f"{one['mean']:+.{digits}f}"
            if one["interval"]:
                text += " ({:+.{digits}f} to {:+.{digits}f})".format(*one["interval"], digits=digits)
            cases = f"{one['better']} / {one['worse']} / {one['equal']}"
            text, bound = Bold(text) if counts(one) else text, "-" if bound is None else f"{bound:.{digits}f}"
            rows.append((region, variant, METRICS[metric].label, text, bound, cases))
    columns = ("region", "variant", "score", "difference", "seeds alone", "cases")
    return Table(columns, rows, title=f"Differences to {record['baseline']}", caption=DIFFERENCES, names=3)


def costs_table(record: Json) -> Table:
    """The learning rates of each variant's runs, and what one took; what no run knows has no row."""

    def rates(variant: str) -> str:
        found = sorted({run["learning_rate"] for run in record["runs"] if run["variant"] == variant})
        return listed(f"{rate:g}" for rate in found)

    rows = []
    if "learning_rate" in record["runs"][0]:
        rows.append(("learning rate", *map(rates, record["variants"])))
    for name, cost in COSTS.items():
        values = [one["costs"].get(name) for one in record["variants"].values()]
        if any(value is not None for value in values):
            rows.append((cost.label, *("-" if value is None else cost.show(value) for value in values)))
    return Table(("", *record["variants"]), rows, title="Costs of a run", caption=COSTS_OF)


def settings_table(comparison: Comparison) -> Table:
    """The settings that differ, a column a variant."""
    of_variant = []
    for first, *_ in comparison.runs.values():
        one = dict(flat(dataclasses.asdict(first.config)))
        if not first.config.is_patch:  # these say nothing of whole volumes
            one.update(foreground="-", patches_per_case="-")
        of_variant.append(one)
    names = [name for name in sorted(set().union(*of_variant)) if not name.startswith(NOT_SETTINGS)]
    rows = [(name, *(one.get(name, "-") for one in of_variant)) for name in names]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    return Table(("setting", *comparison.runs), differing, title="Settings that differ")


def results_tables(record: Json) -> List[Table]:
    """Those of the terminal and the docs: of results with the "evaluation" that they are of."""
    tables = [scores_table(record)]
    tables += [differences_table(record)] if record["differences"] else []
    return [*tables, costs_table(record)]


# --- What is published ---


def publish(
    comparison: Comparison,
    kept: Kept,
    store: Optional[Store],
    out: Path,
    options: "Options",
    *,
    budget: str,
) -> None:
    """Keep the results, write the page and the record, print the tables. `store` is None where it is not there now.

    A record names no folder and holds nothing of one case; the page is self-contained, pictures and slices inside.
    """
    results = comparison.to_json()
    kept = dataclasses.replace(kept, results=results)
    kept.save(out)
    manifest = store and store.manifest
    data = {
        "name": manifest.name,
        "split": {name: len(ids) for name, ids in manifest.split.items()},
        "shape": manifest.largest_shape,
    } if manifest else {"name": "data that is not there now"}  # fmt: skip
    record = {
        "title": options.title or f"{' against '.join(comparison.runs)}: {data['name']}",
        "host": comparison.runs[comparison.baseline][0].host or read_host().summary(),
        "versions": versions(),
        "data": data,
        "budget": budget,
        "seeds": kept.seeds,
        "evaluation": kept.asked["evaluation"],
        "options": {course["name"]: shlex.join(course["options"]) for course in kept.plan},
        **results,
    }
    split = record["evaluation"]["split"]
    page = render_page(
        Path(__file__).with_name("report.html.j2"),
        title=record["title"],
        sections=page_sections(comparison, record, out),
        warning="" if split == UNTOUCHED else warning(split),
        viewer=viewer(shown_cases(comparison, store)) if store else None,
    )
    with atomic_write(out / "report.html", "w") as file:
        file.write(page)
    if options.record and store:
        append_record(options.record, "compare", record)
    for table in results_tables(record):
        Console().print(table.rich())
    say(f"written: {out / 'report.html'}", *results["failed"])


def page_sections(comparison: Comparison, record: Json, out: Path) -> List[Tuple[str, List[Table], Figures]]:
    """(heading, tables, figures) of what was compared, came out and cost. Folders in `out` are named from there."""
    config = comparison.runs[comparison.baseline][0].config
    runs = [run for of_variant in comparison.runs.values() for run in of_variant]
    facts = (
        ("data", record["data"]["name"]),
        ("scored", f'{count(comparison.cases, "case")} of "{record["evaluation"]["split"]}", full original grids'),
        ("budget", record["budget"]),
        ("split hash", config.split_hash + (f", fold {config.fold}" if config.fold else "")),
        *(("left out", line) for line in record["failed"]),
    )
    folders = [run.folder.resolve() for run in runs]
    beside = [path.relative_to(out.resolve()) if out.resolve() in path.parents else path for path in folders]
    rows = [(run.variant, f"{run.seed}", f"{run.config.peak_rate:g}", str(path)) for run, path in zip(runs, beside)]
    hosts = dict.fromkeys(tuple(flat(run.host)) for run in runs if run.host)  # each one once
    about = [*(pair for host in hosts for pair in host), *flat(record["versions"])]
    scores, *tables = results_tables(record)
    sections = [
        ("What was compared", [Table(("", ""), facts, names=2), settings_table(comparison)], []),
        ("Scores and differences", [scores, *tables[:-1]], case_strips(comparison)),
        ("Learning, a line a run", [], learning_curves(comparison)),
        ("Costs", tables[-1:], []),
        ("Runs", [Table(("variant", "seed", "learning rate", "folder"), rows, names=4)], []),
        ("Host and software", [Table(("", ""), about, names=2)], []),
    ]
    return [section for section in sections if any(section[1:])]


def shown_cases(comparison: Comparison, store: Store) -> Iterator[ViewedCase]:
    """The best, median and worst case by the mean over all variants, with the prediction of each one's first seed."""
    region = comparison.regions[-1]  # the mean over the regions, or the only one
    dice = {name: comparison.values(name, region, "dice").mean(0) for name in comparison.runs}
    of_cases = np.mean(list(dice.values()), axis=0)
    best_first = sorted(range(len(comparison.cases)), key=lambda case: -of_cases[case])
    first = {f"{name}, seed {of_variant[0].seed}": of_variant[0] for name, of_variant in comparison.runs.items()}
    config = comparison.runs[comparison.baseline][0].config
    regions = {name: config.region_codes[name] for name in config.regions}
    for case_id, note in best_median_worst([comparison.cases[case] for case in best_first]).items():
        values = ", ".join(f"{name} {of[comparison.cases.index(case_id)]:.3f}" for name, of in dice.items())
        folders = {name: run.predictions for name, run in first.items()}
        case = viewed_case(store, case_id, regions, folders, note=note, scores=f"mean Dice: {values}")
        if case:
            yield case


def case_strips(comparison: Comparison) -> Figures:
    """Dice of every case by variant, the mean over its seeds; a picture for each region."""
    found = []
    for region in comparison.regions:
        columns = {name: comparison.values(name, region, "dice").mean(0).tolist() for name in comparison.runs}
        title = f"Dice of every case, {region}"
        found.append((title, strips(columns, title=title, y_label="Dice", y_range=(-0.02, 1.02))))
    return found


def learning_curves(comparison: Comparison) -> Figures:
    """Validation Dice over voxels seen and over seconds, a line a run; none without validations."""
    colours, found = dict(zip(comparison.runs, itertools.cycle(PALETTE))), []
    runs = [run for of_variant in comparison.runs.values() for run in of_variant if run.curve]
    for label, unit, column in (("voxels seen, millions", 1e6, 0), ("seconds of steps", 1, 1)) if runs else ():
        lines = []
        for run in runs:
            name = run.variant if run is comparison.runs[run.variant][0] else ""
            x, dice = [point[column] / unit for point in run.curve], [point.mean_dice for point in run.curve]
            lines.append(Line(name, x, dice, colours[run.variant]))
        title = f"Validation Dice over {label}"
        found.append((title, chart(lines, title=title, y_label="mean Dice", x_label=label, y_range=(0, 1))))
    return found


# --- Markdown of records ---


def comparisons_markdown(records: Sequence[Json]) -> List[str]:
    """For the page of results: the tables of the newest record of each title."""
    lines: List[str] = []
    for record in newest(records, lambda record: record["title"]):
        host, data = record["host"], record["data"]
        split = ", ".join(f"{size} {name}" for name, size in data["split"].items())
        lines += [
            f"### {record['title']}",
            "",
            f"{record['date']}, {host['cores']} cores of {host['cpu']}; {data['name']}, {by(data['shape'], ' x ')}: "
            f"{split}; {record['budget']}; seeds {listed(record['seeds'])}; scored on {record['cases']} cases of "
            f'"{record["evaluation"]["split"]}".',
            "",
            *(f"- `{name}`: `{options}`" for name, options in record["options"].items()),
            "",
        ]
        for table in results_tables(record):
            lines += [*table.markdown(), ""]
    return lines

"""The results of a comparison: compare.json, report.html, a record, tables on the terminal and in
the docs.

Every table is made from the results in compare.json and the records, so all places show the same
rows."""

import dataclasses
import itertools
import shlex
from pathlib import Path
from typing import List, Sequence, Tuple

import numpy as np

from cpu3d.compare.experiment import Kept, Options
from cpu3d.compare.statistics import COSTS, Comparison, counts, millions
from cpu3d.compare.variants import Json
from cpu3d.data.store import Store
from cpu3d.inference.scores import METRICS, metric_notes
from cpu3d.inference.scores_file import UNTOUCHED, warning
from cpu3d.pages.page import flat
from cpu3d.pages.viewer import viewer
from cpu3d.report.pictures import Figures, Line, chart, strips
from cpu3d.report.sections import Section, shown_cases, write_page
from cpu3d.util.progress import say
from cpu3d.util.records import append_record, count, listed, newest, plus_minus, versions
from memory_estimator.common.table import PALETTE, Bold, Table, new_console
from memory_estimator.common.units import by, format_bytes, format_seconds
from memory_estimator.host import read_host

DIFFERENCES = (
    "The other setting less the baseline, on the same case and seed: the mean, in brackets the "
    "range that is meant to hold the true mean in 95 of 100 such experiments (bootstrap over seeds "
    "and cases, too narrow with few seeds), and the cases that are better / worse / equal. By "
    "chance: if both were equally good, the choice of the seeds would make a mean larger than this "
    "once in 20 times (Student's t). A difference counts, in bold, if its range does not contain 0 "
    "and it exceeds what chance may make; with one seed none counts."
)

COSTS_OF = (
    "Of one run: the median of the seeds for times, the largest for memory. A case trained: as "
    "many voxels as a whole case has. Memory is the largest resident set of the process; a card's "
    "is the peak of TensorFlow's allocator there."
)

# Settings that are not those of a variant, or belong to the store. By their first letters.
NOT_SETTINGS = (
    "seed",
    "unet.seed",
    "save_minutes",
    "store",
    "label_names",
    "region_codes",
    "paint",
)


# --- Tables ---


def plan_table(kept: Kept, budget: str) -> Table:
    """The planned runs, a row a variant."""
    rows = []
    all_run_s = []
    for course in kept.plan:
        steps = course["steps"]
        step_s = course["step_s"]
        run_s = steps * step_s if steps and step_s else None
        all_run_s.append(run_s)
        sees = by(course["grid"])
        if course["batch"] > 1:
            sees += f" x {course['batch']}"
        row = (
            course["name"],
            sees,
            f"{steps:,}" if steps else "by time",
            millions(course["voxels"]) if course["voxels"] else "by time",
            course["policy"],
            format_seconds(step_s),
            format_seconds(run_s),
            format_bytes(course["peak_bytes"]),
        )
        rows.append(row)
    total = "unknown"
    if None not in all_run_s:
        total = format_seconds(sum(all_run_s) * len(kept.seeds))
    return Table(
        ("variant", "sees", "steps", "voxels", "policy", "a step", "a run", "memory"),
        rows,
        title=f"{count(kept.plan, 'variant')} x {count(kept.seeds, 'seed')}, each for {budget}",
        caption=f"predicted: {total} of steps, without validation and scoring",
    )


def scores_table(record: Json) -> Table:
    """The mean over cases and seeds of every region and variant, and the deviation of the seeds."""
    rows = []
    for region, variant in itertools.product(record["regions"], record["variants"]):
        scores = record["variants"][variant]["scores"][region]
        cells = []
        for name, metric in METRICS.items():
            of_seeds = scores[name]
            cells.append(plus_minus(of_seeds["mean"], of_seeds["sd"], metric.digits))
        rows.append((region, variant, *cells))
    cases = count(record["cases"], "case")
    notes = metric_notes(METRICS, record["evaluation"]["tolerance_mm"])
    return Table(
        ("region", "variant", *(metric.label for metric in METRICS.values())),
        rows,
        title="Scores",
        caption=f"Mean over {cases}, full grids, and seeds \u00b1 standard deviation of the "
        f"seeds\u2019 means. {notes}. Scored are the weights of the validation at full resolution "
        "with the highest mean Dice.",
        names=2,
    )


def differences_table(record: Json, title: str = "") -> Table:
    """Every difference to the baseline; those that count are bold."""
    rows = []
    for variant, regions in record["differences"].items():
        for region, differences in regions.items():
            for name, difference in differences.items():
                metric = METRICS[name]
                cells = _difference_cells(difference, metric.digits)
                rows.append((region, variant, metric.labelled, *cells))
    columns = ("region", "variant", "score", "difference", "by chance", "cases")
    title = title or f"Differences to {record['baseline']}"
    return Table(columns, rows, title=title, caption=DIFFERENCES, names=3)


def _difference_cells(difference: Json, digits: int) -> Tuple[str, str, str]:
    text = f"{difference['mean']:+.{digits}f}"
    if difference["interval"]:
        low, high = difference["interval"]
        text += f" ({low:+.{digits}f} to {high:+.{digits}f})"
    if counts(difference):
        text = Bold(text)
    bound = difference["seed_bound"]
    by_chance = "-" if bound is None else f"{bound:.{digits}f}"
    cases = f"{difference['better']} / {difference['worse']} / {difference['equal']}"
    return text, by_chance, cases


def costs_table(record: Json) -> Table:
    """The learning rates of each variant's runs, and the costs of a run; a cost that no run knows
    has no row."""
    rates = {variant: {} for variant in record["variants"]}
    for run in record["runs"]:
        rates[run["variant"]][f"{run['learning_rate']:g}"] = None  # each once
    rows = [("learning rate", *map(", ".join, rates.values()))]
    for name, cost in COSTS.items():
        values = [of_variant["costs"].get(name) for of_variant in record["variants"].values()]
        if any(value is not None for value in values):
            cells = ["-" if value is None else cost.show(value) for value in values]
            rows.append((cost.label, *cells))
    return Table(("", *record["variants"]), rows, title="Costs of a run", caption=COSTS_OF)


def settings_table(comparison: Comparison) -> Table:
    """The settings that differ, a column a variant."""
    configs = [runs[0].config for runs in comparison.runs.values()]
    columns = [dict(flat(config.to_json())) for config in configs]
    for config, settings in zip(configs, columns):
        if not config.is_patch:  # these mean nothing for whole volumes
            settings.update(foreground="-", patches_per_case="-")
    names = [name for name in sorted(set().union(*columns)) if not name.startswith(NOT_SETTINGS)]
    rows = [(name, *(settings.get(name, "-") for settings in columns)) for name in names]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    return Table(("setting", *comparison.runs), differing, title="Settings that differ")


def results_tables(record: Json) -> List[Table]:
    """The tables of the terminal and the docs, the table of costs last."""
    tables = [scores_table(record)]
    if record["differences"]:
        tables.append(differences_table(record))
    return [*tables, costs_table(record)]


# --- What is published ---


def publish(
    comparison: Comparison, kept: Kept, store: Store, out: Path, options: Options, *, budget: str
) -> None:
    """Keep the results, write the page and the record, print the tables.

    A record names no folder and no case; the page is self-contained, with pictures and slices
    inside."""
    results = comparison.to_json()
    manifest = store.manifest
    dataclasses.replace(kept, results=results).save(out)
    split = {name: len(ids) for name, ids in manifest.split.items()}
    content = {
        "title": options.title or f"{' against '.join(comparison.runs)}: {manifest.name}",
        "host": comparison.runs[comparison.baseline][0].host or read_host().summary(),
        "versions": versions(),
        "data": {"name": manifest.name, "split": split, "shape": manifest.largest_shape},
        "budget": budget,
        "seeds": kept.seeds,
        "evaluation": options.evaluation._asdict(),
        "options": {course["name"]: shlex.join(course["options"]) for course in kept.plan},
        **results,
    }
    alert = warning(options.split) if options.split != UNTOUCHED else ""
    sections = page_sections(comparison, content, out, store)
    write_page(out / "report.html", content["title"], "./run.sh compare", sections, alert=alert)
    if options.record:
        append_record(options.record, "compare", content)
    for table in results_tables(content):
        new_console().print(table)
    say(f"written: {out / 'report.html'}", *results["failed"])


def page_sections(comparison: Comparison, record: Json, out: Path, store: Store) -> List[Section]:
    """The sections of the page, in order. Folders in `out` are named relative to it."""
    runs = [run for of_variant in comparison.runs.values() for run in of_variant]
    config = runs[0].config
    cases = f'{count(comparison.cases, "case")} of "{record["evaluation"]["split"]}"'
    trained_on = config.split_hash
    if config.fold:
        trained_on += f", fold {config.fold}"
    facts = [
        ("data", record["data"]["name"]),
        ("scored", f"{cases}, full original grids"),
        ("budget", record["budget"]),
        ("split hash", trained_on),
    ]
    facts += [("left out", line) for line in record["failed"]]
    rows = []
    for run in runs:
        folder = str(run.folder.resolve()).replace(f"{out.resolve()}/", "")
        rows.append((run.variant, f"{run.seed}", f"{run.config.peak_rate:g}", folder))
    about = []
    for host in dict.fromkeys(tuple(flat(run.host)) for run in runs if run.host):  # each one once
        about += host
    about += flat(record["versions"])
    *tables, costs = results_tables(record)
    return [
        ("What was compared", [Table(("", ""), facts, names=2), settings_table(comparison)]),
        ("Scores and differences", [*tables, case_strips(comparison)]),
        ("Cases", [_cases(comparison, store)]),
        ("Learning, a line a run", [learning_curves(comparison)]),
        ("Costs", [costs]),
        ("Runs", [Table(("variant", "seed", "learning rate", "folder"), rows, names=4)]),
        ("Host and software", [Table(("", ""), about, names=2)]),
    ]


def _cases(comparison: Comparison, store: Store) -> Json:
    """The best, median and worst case by the mean over all variants, with the prediction of each
    one's first seed."""
    region = comparison.regions[-1]  # the mean over the regions, or the only one
    dice = {name: comparison.values(name, region, "dice").mean(0) for name in comparison.runs}
    means = np.mean(list(dice.values()), axis=0)
    scores = {}
    for case in sorted(range(len(means)), key=lambda case: -means[case]):
        each = [f"{name} {values[case]:.3f}" for name, values in dice.items()]
        scores[comparison.cases[case]] = f"mean Dice: {', '.join(each)}"
    predictions = {
        f"{name}, seed {runs[0].seed}": runs[0].predictions
        for name, runs in comparison.runs.items()
    }
    config = comparison.runs[comparison.baseline][0].config
    return viewer(shown_cases(store, scores, config.codes_by_region, predictions))


def case_strips(comparison: Comparison) -> Figures:
    """Dice of every case by variant, the mean over its seeds; a picture for each region."""
    figures = []
    for region in comparison.regions:
        columns = {
            name: comparison.values(name, region, "dice").mean(0).tolist()
            for name in comparison.runs
        }
        title = f"Dice of every case, {region}"
        figures.append((title, strips(columns, title=title, y_label="Dice", y_range=(-0.02, 1.02))))
    return figures


def learning_curves(comparison: Comparison) -> Figures:
    """Validation Dice over voxels seen and over seconds, a line a run; none without validations."""
    figures: Figures = []
    for label, unit, column in (("voxels seen, millions", 1e6, 0), ("seconds of steps", 1, 1)):
        lines = []
        for (name, runs), colour in zip(comparison.runs.items(), itertools.cycle(PALETTE)):
            for run in (run for run in runs if run.curve):
                x = [point[column] / unit for point in run.curve]
                dice = [point.mean_dice for point in run.curve]
                lines.append(Line(name if run is runs[0] else "", x, dice, colour))
        if lines:
            title = f"Validation Dice over {label}"
            axes = {"y_label": "mean Dice", "x_label": label, "y_range": (0, 1)}
            figures.append((title, chart(lines, title=title, **axes)))
    return figures


# --- Markdown of records ---


def comparisons_markdown(records: Sequence[Json]) -> List[str]:
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

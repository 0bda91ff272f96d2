"""What a comparison leaves: results in compare.json, report.html, a record, tables on the terminal and in the docs.

Every table is made of the results as compare.json and the records hold them, so that all places show the same rows.
"""

import dataclasses
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, List, Mapping, Optional, Sequence, Tuple

from rich.console import Console

from cpu3d.compare import pictures
from cpu3d.compare.plan import Json, Kept
from cpu3d.compare.run import Evaluation, RunResult, step_voxels
from cpu3d.compare.statistics import Comparison, Difference, difference_from_json
from cpu3d.data.store import Store
from cpu3d.data.words import by, count
from cpu3d.inference.evaluate import UNTOUCHED, warning
from cpu3d.report.page import flat, gib, render_page
from cpu3d.util.atomic import atomic_write
from cpu3d.util.records import append_record, duration, listed, newest, number, plus_minus, seconds, versions
from memory_estimator.host import read_host
from memory_estimator.table import Bold, Table
from memory_estimator.units import GIB

if TYPE_CHECKING:
    from cpu3d.compare.command import Options

RECORD = "compare"
"""The kind of its records."""

MARK = "<!-- from here on made by `bench tables` -->"
"""In docs/compare.md: what follows is made from the records."""

DIGITS = {"dice": 3, "hd95_mm": 2, "surface_dice": 3}
"""Of a metric, after the point."""

RULE = (
    "Intervals: bootstrap of the mean over seeds and cases, crossed. With few seeds they are too narrow: of 3 seeds "
    "2.7 times narrower than Student's t makes them. So a difference counts, in bold, where its interval leaves out 0 "
    "and it is larger than seeds alone make it once in 20 times by Student's t; with one seed none counts."
)

DIFFERENCES = f"On the same case and seed: mean (95 % interval), and cases better / worse / equal. {RULE}"

COSTS = (
    "Of one run: the median of the seeds for times, the largest for memory. A case trained: as many voxels as a whole "
    "case has. Memory is the largest resident set of the process, with what read mode ram keeps of the files; a "
    "card's is what TensorFlow's allocator held there."
)

NOT_SETTINGS = ("seed", "unet.seed", "store", "store_channels", "label_names", "region_codes", "save_minutes")
"""Of a run's configuration: what does not tell variants apart, or belongs to the store."""


# --- Tables ---


def plan_table(plan: Sequence[Mapping[str, Any]], seeds: Sequence[int], budget: str) -> Table:
    """What is about to happen, a line a variant; `plan` is that of compare.json."""
    rows = [
        (
            course["name"],
            by(course["grid"]) + (f" x {course['batch']}" if course["batch"] > 1 else ""),
            f"{course['steps']:,}" if course["steps"] else "by time",
            _millions(course["voxels"]) if course["steps"] else "by time",
            course["policy"],
            f"{course['step_s']:.2f} s" if course["step_s"] else "?",
            duration(course["steps"] * course["step_s"]) if course["steps"] and course["step_s"] else "?",
            gib(course["peak_bytes"]) if course["peak_bytes"] else "?",
        )
        for course in plan
    ]
    known = [course["steps"] * course["step_s"] for course in plan if course["steps"] and course["step_s"]]
    whole = duration(sum(known) * len(seeds)) if len(known) == len(plan) else ""
    return Table(
        ("variant", "sees", "steps", "voxels", "policy", "a step", "a run", "memory"),
        rows,
        title=f"{count(plan, 'variant')} x {count(seeds, 'seed')}, each for {budget}",
        caption=f"predicted: {whole} for all steps, validation and scoring aside" if whole else "",
    )


def scores_table(results: Json, tolerance_mm: float) -> Table:
    """The mean over cases and seeds of every region and variant, and how the seeds differ."""
    return Table(
        ("region", "variant", *pictures.NAMES.values()),
        [
            (region, variant, *(_spread(one["scores"][region][metric], metric) for metric in pictures.NAMES))
            for region in results["regions"]
            for variant, one in results["variants"].items()
        ],
        title="Scores",
        caption=f"Mean over {count(results['cases'], 'case')}, full grids, and seeds \u00b1 standard deviation of the "
        f"seeds\u2019 means. HD95 in mm; surface Dice at {tolerance_mm:g} mm. Scored are the weights of the validation "
        "with the highest mean Dice.",
        names=2,
    )


def differences_table(results: Json) -> Table:
    """Every difference to the baseline; bold counts."""
    rows = []
    for variant, regions in results["differences"].items():
        for region, metrics in regions.items():
            for metric, name in pictures.NAMES.items():
                one = difference_from_json(metrics[metric])
                bound = "-" if one.seed_bound is None else f"{one.seed_bound:.{DIGITS[metric]}f}"
                rows.append(
                    (region, variant, name, _in_words(one, metric), bound, f"{one.better} / {one.worse} / {one.equal}")
                )
    return Table(
        ("region", "variant", "score", "difference", "seeds alone", "cases"),
        rows,
        title=f"Differences to {results['baseline']}",
        caption=DIFFERENCES,
        names=3,
    )


def costs_table(results: Json) -> Table:
    """What a run of each variant took; what no run knows has no row."""
    found = [one["costs"] for one in results["variants"].values()]
    rows = []
    for words, name, show in (
        ("steps", "steps", lambda value: f"{value:,.0f}"),
        ("voxels seen", "voxels", _millions),
        ("a step", "step_s", seconds),
        ("a case trained once", "case_train_s", seconds),
        ("all steps", "steps_s", seconds),
        ("validation", "validation_s", seconds),
        ("training in all", "train_s", seconds),
        ("core-hours", "core_hours", number),
        ("peak memory, training", "train_peak_bytes", gib),
        ("of it TensorFlow's allocator", "allocator_peak_bytes", gib),
        ("card's memory, training", "card_peak_bytes", gib),
        ("a case predicted", "case_predict_s", seconds),
        ("peak memory, prediction", "predict_peak_bytes", gib),
    ):
        values = [costs.get(name) for costs in found]
        if any(value is not None for value in values):
            rows.append((words, *("-" if value is None else show(value) for value in values)))
    return Table(("", *results["variants"]), rows, title="Costs of a run", caption=COSTS)


def settings_tables(comparison: Comparison) -> Tuple[Table, Table]:
    """(settings that differ, a column a variant; settings in common)."""
    of_variant = []
    for runs in comparison.runs.values():
        config, one = runs[0].config, dict(flat(dataclasses.asdict(runs[0].config)))
        one["foreground"] = f"{config.foreground:.3g}"
        if not config.is_patch:  # these say nothing of whole volumes
            one.update(foreground="-", patches_per_case="-")
        of_variant.append(one)
    names = [name for name in sorted(set().union(*of_variant)) if not name.startswith(NOT_SETTINGS)]
    rows = [(name, *(one.get(name, "-") for one in of_variant)) for name in names]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    common = [row[:2] for row in rows if len(set(row[1:])) == 1]
    return (
        Table(("setting", *comparison.variants), differing, title="Settings that differ"),
        Table(("setting", "value"), common, names=2),
    )


# --- The page ---


@dataclass(frozen=True)
class Section:
    """A part of a page."""

    heading: str
    tables: Sequence[Table] = ()
    figures: Sequence[Tuple[str, bytes]] = ()
    """(what it shows, PNG) each."""
    notes: Sequence[str] = ()
    key: Sequence[Tuple[str, str]] = ()
    """(name, colour) of what large figures show, each below its caption."""


def write_page(
    path: Path, title: str, sections: Sequence[Section], *, split: str, tiles: Sequence[Tuple[str, str, str]] = ()
) -> None:
    """Write a self-contained page, pictures inside, atomically. A tile is (name, value, what the value is).

    A `split` that was seen while training is warned of.
    """
    template, alarm = Path(__file__).with_name("report.html.j2"), "" if split == UNTOUCHED else warning(split)
    with atomic_write(path, "w") as file:
        file.write(render_page(template, title=title, sections=sections, tiles=tiles, warning=alarm))


def publish(
    comparison: Comparison,
    kept: Kept,
    store: Optional[Store],
    evaluation: Evaluation,
    out: Path,
    *,
    budget: str,
    options: "Options",
) -> None:
    """Keep the results, write the page and the record, print the tables. `store` is None where it is not there now."""
    data = store.manifest.name if store else "data that is not there now"
    title = options.title or f"{' against '.join(comparison.variants)}: {data}"
    kept = dataclasses.replace(kept, results=comparison.to_json())
    kept.save(out)
    write_page(
        out / "report.html",
        title,
        page_sections(comparison, store, evaluation, budget=budget, out=out),
        split=evaluation.split,
        tiles=[
            (name, _spread(one["scores"][comparison.headline]["dice"], "dice"), f"{comparison.headline} Dice")
            for name, one in kept.results["variants"].items()
        ],
    )
    if options.record and store:
        append_record(options.record, RECORD, {"title": title, **_record(comparison, kept, store, budget)})
    found = kept.results
    show_results(kept, _tables(found, evaluation.tolerance_mm), out, as_json=options.json)
    for line in found["failed"]:
        Console(stderr=True).print(line, highlight=False, markup=False)


def show_results(kept: Kept, tables: Sequence[Table], out: Path, *, as_json: bool) -> None:
    """Print compare.json or tables to stdout, and where the page is to stderr."""
    if as_json:
        json.dump(vars(kept), sys.stdout, indent=1)
        print()
    else:
        for table in tables:
            Console().print(table.rich())
    Console(stderr=True).print(f"written: {out / 'report.html'}", highlight=False, markup=False, soft_wrap=True)


def page_sections(
    comparison: Comparison, store: Optional[Store], evaluation: Evaluation, *, budget: str, out: Path
) -> List[Section]:
    """What was compared, what came out, what it cost, where it went wrong. Folders in `out` are named from there."""
    results, (differing, common) = comparison.to_json(), settings_tables(comparison)
    config = comparison.runs[comparison.baseline][0].config
    runs = [run for of_variant in comparison.runs.values() for run in of_variant]
    facts = (
        ("data", store.manifest.name if store else "not there now"),
        ("scored", f'{count(comparison.cases, "case")} of "{evaluation.split}", full original grids'),
        ("budget", budget),
        ("seeds", ", ".join(map(str, sorted({run.seed for run in runs})))),
        ("split hash", config.split_hash + (f", fold {config.fold}" if config.fold else "")),
        ("baseline", comparison.baseline),
    )
    scores = [
        (f"Dice of every case, {region}", pictures.case_strips(comparison, region)) for region in comparison.regions
    ]
    sections = [
        Section("What was compared", [Table(("", ""), facts, names=2), differing], notes=results["failed"]),
        Section("Scores", [scores_table(results, evaluation.tolerance_mm)], scores, ["Dots are cases."]),
    ]
    if comparison.differences:
        forests = [(f"Difference in {name}", pictures.forest(comparison, key)) for key, name in pictures.NAMES.items()]
        sections.append(Section("Differences", [differences_table(results)], forests))
    curves = pictures.learning_curves(comparison)
    if curves:
        sections.append(Section("Learning", figures=curves, notes=["Thin lines are single seeds."]))
    sections.append(Section("Costs", [costs_table(results)]))
    maps = pictures.error_maps(comparison, store)
    if maps:
        sections.append(Section("Cases that differ most", figures=maps, key=pictures.label_key(config)))
    hosts = [dict(pairs) for pairs in {tuple(flat(run.host)): 0 for run in runs if run.host}]
    about = [pair for one in (*hosts, versions()) for pair in flat(one)]
    more = [_runs_table(runs, out), common, Table(("host and software", ""), about, names=2)]
    return [*sections, Section("Runs, settings in common, host", more)]


# --- Markdown of records ---


def comparisons_markdown(records: Sequence[Json]) -> List[str]:
    """For docs/compare.md: the tables of the newest record of each title."""
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
        for table in _tables(record, record["evaluation"]["tolerance_mm"]):
            lines += [*table.markdown(), ""]
    return lines


def summary_markdown(records: Sequence[Json]) -> List[str]:
    """For the README: each region of each variant beside its baseline, then what each variant took."""
    scores, costs = [], []
    for record in newest(records, lambda record: record["title"]):
        title, base, variants = record["title"], record["baseline"], record["variants"]
        for variant, regions in record["differences"].items():
            for region, metrics in regions.items():
                own, other = (_spread(variants[name]["scores"][region]["dice"], "dice") for name in (variant, base))
                found = [_in_words(difference_from_json(metrics[name]), name) for name in ("dice", "hd95_mm")]
                scores.append([title, f"{variant}, {region}", f"{base} {other}", own, *found])
        costs += [(title, variant, one["costs"]) for variant, one in variants.items()]
    columns = [
        column
        for column in (
            ("s a case trained", "case_train_s", 1),
            ("s in all", "train_s", 1),
            ("GiB, training", "train_peak_bytes", GIB),
            ("GiB of the card", "card_peak_bytes", GIB),
            ("s a case predicted", "case_predict_s", 1),
            ("GiB, prediction", "predict_peak_bytes", GIB),
        )
        if any(one.get(column[1]) is not None for _, _, one in costs)
    ]
    header = ("", "", "against", "Dice", "difference (95 %)", "HD95, mm, difference")
    return [
        *Table(header, scores, names=len(header)).markdown(),
        "",
        "Bold: counts as a difference, with few seeds too.",
        "",
        *Table(
            ("", "", *(name for name, _, _ in columns)),
            [
                (title, variant, *(number(one.get(name), unit) for _, name, unit in columns))
                for title, variant, one in costs
            ],
            names=len(columns) + 2,
        ).markdown(),
    ]


# --- Private helpers ---


def _tables(results: Json, tolerance_mm: float) -> List[Table]:
    differences = [differences_table(results)] if results["differences"] else []
    return [scores_table(results, tolerance_mm), *differences, costs_table(results)]


def _record(comparison: Comparison, kept: Kept, store: Store, budget: str) -> Json:
    """What a line of records/compare.jsonl holds: no paths, and nothing of one case."""
    manifest = store.manifest
    split = {name: len(ids) for name, ids in manifest.split.items()}
    return {
        "host": comparison.runs[comparison.baseline][0].host or read_host().summary(),
        "versions": versions(),
        "data": {"name": manifest.name, "split": split, "shape": manifest.largest_shape},
        "budget": budget,
        "seeds": kept.seeds,
        "evaluation": kept.asked["evaluation"],
        "options": {course["name"]: shlex.join(course["options"]) for course in kept.plan},
        **(kept.results or {}),
    }


def _runs_table(runs: Sequence[RunResult], out: Path) -> Table:
    rows = []
    for run in runs:
        best, folder = max(run.curve, key=lambda point: point.mean_dice, default=None), run.folder.resolve()
        beside = out.resolve() in folder.parents
        rows.append(
            (
                run.variant,
                str(run.seed),
                f"{run.costs.steps:,}",
                f"{best.voxels // step_voxels(run.config):,}" if best else "-",
                str(len(run.curve)),
                seconds(run.costs.train_s),
                gib(run.costs.train_peak_bytes),
                str(folder.relative_to(out.resolve()) if beside else folder),
            )
        )
    return Table(("variant", "seed", "steps", "best at step", "validations", "in all", "memory", "folder"), rows)


def _millions(voxels: float) -> str:
    """ "12.3 M"."""
    return f"{voxels / 1e6:,.{0 if voxels >= 1e8 else 1}f} M"


def _spread(score: Mapping[str, Optional[float]], metric: str) -> str:
    """ "0.912 ± 0.004"."""
    return plus_minus(score["mean"], score["sd"], DIGITS[metric])


def _in_words(difference: Difference, metric: str) -> str:
    """ "-0.210 (-0.330 to -0.100)", bold where it counts."""
    digits = DIGITS[metric]
    text = f"{difference.mean:+.{digits}f}"
    if difference.interval is not None:
        text += " ({:+.{digits}f} to {:+.{digits}f})".format(*difference.interval, digits=digits)
    return Bold(text) if difference.is_clear else text

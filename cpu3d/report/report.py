"""Make one self-contained page of a run: scores, best and worst cases, curves, memory and time, host and settings.

    ./run.sh report --run runs/first

Writes run/report.html: no network, pictures and the slices of three cases inside, so it can be mailed or put beside a
paper. It works with what is there, also while a training is under way or before anything was evaluated, and says what
is missing.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Mapping, Optional, Sequence, Tuple, Union

from cpu3d.inference.evaluate import PREDICTIONS, ranked, scores_path, summary_table, warning
from cpu3d.inference.scores import METRICS
from cpu3d.pages.page import flat, page_file, percent, render_page
from cpu3d.pages.viewer import viewer
from cpu3d.report import pictures
from cpu3d.report.pictures import Figures, Line
from cpu3d.report.run_files import RunFiles, gather, shown_cases
from cpu3d.run.summary import Events, costs_of, last_end, median, numbers, of_kind
from cpu3d.util.atomic import atomic_write
from cpu3d.util.records import by, count, duration, listed, seconds
from memory_estimator.common.schema import option
from memory_estimator.common.table import PALETTE, Bold, Table
from memory_estimator.common.units import GIB, format_bytes


@dataclass(frozen=True)
class Options:
    """Command-line options of `report`."""

    run: Path = option(help="run folder written by train", metavar="DIR")
    out: Optional[Path] = option(None, help="page to write (default: report.html in the run folder)", metavar="FILE")


OPTIONS = (Options,)

OF_PATCHES, OF_WHOLE = ("patches_per_case", "foreground"), ("resolution",)
SETTINGS = ("split_hash", "fold", "mode", "grid", "coarse_steps", "coarse_grid", *OF_PATCHES, *OF_WHOLE)
STARTED_WITH = ("parameters", "precision", "policy", "micro_batch", "engine")
"""The facts of a run: settings, and those of its last attempt."""

SHOWN = ("lesion_dice", "false_positives", "dice")
"""The METRICS that post-processing is shown by."""


@dataclass(frozen=True)
class Folded:
    """A table that opens on a click on its title."""

    title: str
    table: Table


Part = Union[Table, Folded, Figures, str, Mapping[str, Any]]
"""Of a section: a table, pictures beside each other, a paragraph, or the cases of `viewer`. Empty ones are left out."""

Section = Tuple[str, Sequence[Part]]
"""Its heading and parts; left out where it has none."""


def run(options: Options) -> int:
    print(f"written: {write_report(options.run, options.out)}")
    return 0


def write_report(run_dir: Path, out: Optional[Path] = None) -> Path:
    """Write the page of the run in `run_dir` to `out`, by default run/report.html, atomically; returns its path.

    Raises InputError when `run_dir` holds no readable config.json, for a scores.json that is damaged or of another
    version, and when the page cannot be written there. What else is missing is named on the page.
    """
    run_dir = Path(run_dir).resolve()
    out = Path(out) if out else run_dir / "report.html"
    files = gather(run_dir)
    page_file(out)
    seen = files.scores and not files.scores["untouched"]
    alert = warning(files.scores["split"]) if seen else ""
    title, command = f"Report of {files.folder.name}", "./run.sh report"
    write_page(out, title, command, page_sections(files), notes=_missing(files), alert=alert)
    return out


def write_page(
    out: Path, title: str, command: str, sections: Sequence[Section], *, notes: Sequence[str] = (), alert: str = ""
) -> None:
    """Write a self-contained page of sections, atomically; `alert` and `notes` are above them."""
    filled = [(heading, [part for part in parts if _is_filled(part)]) for heading, parts in sections]
    content = {"sections": [section for section in filled if section[1]], "notes": notes, "alert": alert}
    page = render_page(Path(__file__).with_name("report.html.j2"), title=title, command=command, **content)
    with atomic_write(out, "w") as file:
        file.write(page)


def page_sections(files: RunFiles) -> List[Section]:
    """All that the page shows, in order. An element is added here."""
    scores, config, events = files.scores, files.config, files.events
    starts = of_kind(events, "start")
    scored = _scores_section(files) if scores else []
    decided = _decision_table(files) or f"Post-processing is {files.postprocessing.words}."
    hosts = [_host_table(start, f"Started at step {start['step']}, {start.get('time', '')}") for start in starts]
    split = files.store.manifest.split if files.store else {}
    ids = Table(("", ""), [(name, ", ".join(cases) or "none") for name, cases in split.items()], names=2)
    return [
        ("The run", [Table(("", ""), _facts(files, starts), names=2)]),
        ("Scores", scored),
        ("Post-processing", [decided]),
        ("Cases", [_cases(files)] if scores and files.store else []),
        ("Training", [_curves(events, config["coarse_steps"])]),
        ("Memory and time", [_costs(files), _predicted(starts, events, config["coarse_steps"])]),
        ("Host and software", hosts),
        ("Settings", [Folded("config.json", Table(("", ""), sorted(flat(config)), names=2)), Folded("split", ids)]),
    ]


# --- Private helpers: numbers and tables ---


def _is_filled(part: Part) -> bool:
    """Whether a part has anything to show."""
    table = part.table if isinstance(part, Folded) else part
    if isinstance(table, Table):
        return bool(table.rows)
    return bool(part["cases"] if isinstance(part, dict) else part)


def _facts(files: RunFiles, starts: Events) -> List[Tuple[str, str]]:
    """Name and value of what tells this run from others."""
    config, manifest = files.config, files.store.manifest if files.store else None
    end, last = last_end(files.events), starts[-1] if starts else {}
    hidden = OF_WHOLE if config["mode"] == "patch" else OF_PATCHES
    facts = [
        ("run", str(files.folder)),
        ("data", f"{manifest.name} ({manifest.layout}), {len(manifest.cases)} cases" if manifest else "-"),
        ("steps", f"{max(numbers(of_kind(files.events, 'step'), 'step'), default=0):,}"),
        ("ended", f"{end['reason']} after step {end['step']}" if end else "not yet"),
        *((name, value) for name, value in flat(config) if value and name in SETTINGS and name not in hidden),
        *((name, str(last.get(name, "-"))) for name in STARTED_WITH),
        ("device", last.get("device", config["device"])),
    ]
    if files.scores:
        facts.append(("inference", _inference(files.scores)))
        done = dict.fromkeys(case.get("postprocessing", "-") for case in files.scores["cases"])
        facts.append(("post-processing of the scores", "; ".join(done)))
    return facts


def _inference(scores: Mapping[str, Any]) -> str:
    """How the network was applied to the cases that were scored; "-" where scores.json does not have it."""
    runs = scores.get("runs") or [scores]
    ways = {}
    for how in (run.get("inference") or {} for run in runs):
        way = "in one pass" if how else "-"
        if how.get("window"):
            way = f"window of {by(how['window'], ' x ')}, {100 * how.get('overlap', 0):g} % overlap"
        ways[way + ", mean of 8 mirror images" * bool(how.get("flips"))] = None  # each once
    if len(runs) > 1:
        crossed = all("held_out" in run for run in runs)
        ways["each case by the fold that held it out" if crossed else f"mean of {len(runs)} runs"] = None
    return "; ".join(ways)


def _missing(files: RunFiles) -> List[str]:
    """What is missing and how to make it, one sentence each."""
    notes = []
    if files.scores is None:
        notes.append(f"No scores yet: run `evaluate --run {files.folder}` and then `report` again.")
    if not of_kind(files.events, "step"):
        notes.append("No training step is in log.jsonl yet, so there are no curves.")
    if files.store is None:
        notes.append(f"The store {files.config.get('store', '')} is not there now, so no cases are shown.")
    trained_with = files.config.get("split_hash")
    if files.scores and trained_with and files.scores["split_hash"] != trained_with:
        notes.append(f"The scores are of another split, {files.scores['split_hash']}: run `evaluate` again.")
    return notes


def _host_table(start: Mapping[str, Any], title: str) -> Table:
    rows = [pair for group in ("host", "versions", "threads") if start.get(group) for pair in flat(start[group], group)]
    return Table(("", ""), rows, title=title, names=2)


def _scores_section(files: RunFiles) -> List[Part]:
    scores = files.scores
    every = [f"{metric.label}: {metric.description}." for metric in METRICS.values()]
    empty = [
        f"{name} {values['empty']['truth']} / {values['empty']['prediction']} / {values['empty']['both']}"
        for name, values in scores["summary"].items()
    ]
    about = f"Weights \u201c{scores['weights']}\u201d, on the full original grid. Empty truth / prediction / both: "
    codes = "; ".join(f"{code} {name}" for code, name in scores["label_codes"].items())
    return [
        summary_table(scores),
        f"{about}{', '.join(empty)}. Label codes written: {codes}.",
        _score_pictures(scores),
        Folded("Every case", _cases_table(scores)),
        f"{' '.join(every)} Surfaces are voxels with a face neighbour outside. Empty masks score as in BraTS.",
    ]


def _cases(files: RunFiles) -> Mapping[str, Any]:
    """The best, median and worst case by mean Dice."""
    scores = {
        case["case_id"]: "Dice " + ", ".join(f"{name} {one['dice']:.3f}" for name, one in case["regions"].items())
        for case in reversed(ranked(files.scores["cases"]))
    }
    predictions = scores_path(files.folder, files.scores["split"]).parent / PREDICTIONS
    return viewer(shown_cases(files.store, scores, files.scores["regions"], {"prediction": predictions}))


def _cases_table(scores: Mapping[str, Any]) -> Table:
    """Every region of every case, the worst case first."""
    rows = []
    for case in ranked(scores["cases"]):
        case_id = case["case_id"]  # in its first row
        for region, one in case["regions"].items():
            values = [f"{one[name]:.{metric.digits}f}" for name, metric in METRICS.items()]
            ml = f"{one['truth_ml']:.1f} \u2192 {one['prediction_ml']:.1f}"
            rows.append((case_id, region + "*" * bool(one["empty"]), *values, ml))
            case_id = ""
    return Table(
        ("case", "region", *(metric.heading for metric in METRICS.values()), "ml"),
        rows,
        caption="Worst first. ml: volume of the truth \u2192 of the prediction. * truth, prediction or both are empty.",
        names=2,
    )


def _decision_table(files: RunFiles) -> Optional[Table]:
    """Region by region what is removed, and what that changes on the validation cases; None where nothing is."""
    decision = files.decision
    if files.postprocessing.off or decision is None:
        return None
    rows = []
    for name in decision.before:
        rules = decision.chosen.rules.get(name)
        pairs = [
            (METRICS[key], getattr(decision.before[name], key), getattr(decision.after[name], key)) for key in SHOWN
        ]
        values = [f"{was:.{metric.digits}f} \u2192 {is_:.{metric.digits}f}" for metric, was, is_ in pairs]
        rows.append((name, f"below {listed(rules)}" if rules else "-", *values))
    nested = "; each region is cut to the larger ones" if decision.chosen.nested else ""
    return Table(
        ("region", "parts removed", *(METRICS[key].label for key in SHOWN)),
        rows,
        caption=f"Means over {count(decision.cases, 'validation case')}, before \u2192 after{nested}.",
        names=2,
    )


def _costs(files: RunFiles) -> Table:
    """Memory and time: what, value, what value it is."""
    costs, device = costs_of(files.events, files.config["coarse_steps"]), files.config["device"]
    beside_s = costs.validation_s + costs.checkpoint_s
    all_s = costs.steps_s + beside_s
    held = (
        "with ITEX it holds oneDNN's scratch" if device == "cpu" else "with cuDNN's workspaces, without CUDA's context"
    )
    wait_share = costs.wait_s / costs.steps_s if costs.steps_s else None
    beside_share = beside_s / all_s if all_s else None
    rows = [
        ("peak memory of the process", format_bytes(costs.peak_rss_bytes), "largest resident set in the log"),
        (f"peak of TensorFlow's allocator on {device}", format_bytes(costs.allocator_peak_bytes), held),
        ("time per coarse step", seconds(costs.coarse_step_s), "median"),
        ("time per step", seconds(costs.step_s), "median"),
        ("waiting for data", percent(wait_share), "of the time of the steps"),
        ("validation and checkpoints", percent(beside_share), "of the whole time"),
        ("whole training", duration(costs.train_s or all_s), "wall clock, all attempts"),
    ]
    for name, key in (("prediction", "predict_s"), ("scoring", "score_s")) if files.scores else ():
        took = seconds(median(numbers(files.scores["cases"], key)))
        rows.append((name, took, "a volume on its full grid, median"))
    return Table(("", "", ""), [(name, Bold(value), how) for name, value, how in rows if value != "-"], names=3)


def _predicted(starts: Events, events: Events, coarse_steps: int) -> Table:
    """What was predicted of the last attempt beside what was measured; no rows where nothing was."""
    predicted = dict(starts[-1].get("predicted", {})) if starts else {}
    predicted["coarse_step_s"] = predicted.get("coarse", {}).get("step_s")
    begin = max((place for place, event in enumerate(events) if event["event"] == "start"), default=0)
    computing = [
        {**event, "step_s": event["step_s"] - event.get("wait_s", 0)} if "step_s" in event else event
        for event in events[begin:]
    ]
    costs, rows = costs_of(computing, coarse_steps), []
    for name, key, measured, show in (
        ("peak of TensorFlow's allocator", "allocator_peak_bytes", costs.allocator_peak_bytes, format_bytes),
        ("peak memory of the process", "process_peak_bytes", costs.peak_rss_bytes, format_bytes),
        ("upper bound of it", "upper_bound_bytes", costs.peak_rss_bytes, format_bytes),
        ("time per coarse step", "coarse_step_s", costs.coarse_step_s, seconds),
        ("time per step", "step_s", costs.step_s, seconds),
    ):
        value = predicted.get(key)
        if value:
            rows.append((name, show(value), show(measured), f"{value / measured - 1:+.1%}" if measured else "-"))
    caption = "Of the last attempt, without waiting for data. The process's peak includes mapped pages of the store."
    title = "Predicted before the start, and measured"
    return Table(("", "predicted", "measured", "predicted is off by"), rows, title=title, caption=caption)


# --- Private helpers: pictures ---


def _score_pictures(scores: Mapping[str, Any]) -> Figures:
    """Every case as a dot, a picture a metric."""
    figures = []
    for name, metric in METRICS.items():
        values = {region: [case["regions"][region][name] for case in scores["cases"]] for region in scores["summary"]}
        y_range = (-0.02, 1.02) if metric.larger_is_better else (0, None)
        title = metric.label if metric.larger_is_better else f"{metric.label} (less is better)"
        figures.append(
            (f"{title} of every case", pictures.strips(values, title=title, y_label=metric.unit, y_range=y_range))
        )
    return figures


def _curves(events: Events, coarse_steps: int) -> Figures:
    """A chart of every curve there is something to draw of, with a dashed line where full steps begin."""
    steps, validations = of_kind(events, "step"), of_kind(events, "validation")
    charts: Figures = []

    def add(title: str, lines: Sequence[Line], **axis: Any) -> None:
        lines = [line for line in lines if len(line.x)]
        if lines:
            charts.append((title, pictures.chart(lines, title=title, switch=coarse_steps, **axis)))

    loss = [_line("training", steps, "loss", PALETTE[0]), _line("validation", validations, "loss", PALETTE[1])]
    add("Loss", loss, y_label="loss")
    regions = dict.fromkeys(name for event in (*validations, *steps) for name in event.get("dice", {}))
    for kind, source in (("validation, whole volumes", validations), ("training steps", steps)):
        dice = [{**event, **event.get("dice", {})} for event in source]
        lines = [_line(name, dice, name, colour) for name, colour in zip(regions, PALETTE * len(regions))]
        add(f"Dice, {kind}", lines, y_label="Dice", y_range=(0, 1))
    from_zero = {"y_range": (0, None)}
    times = [_line("step", steps, "step_s", PALETTE[0]), _line("waiting for data", steps, "wait_s", PALETTE[1])]
    add("Time of a step", times, y_label="s", **from_zero)
    add("Learning rate", [_line("", steps, "learning_rate", PALETTE[2])], y_label="learning rate", **from_zero)
    add("Memory of the process", [_line("", steps, "rss_bytes", PALETTE[2], GIB)], y_label="GiB", **from_zero)
    return charts


def _line(name: str, events: Events, key: str, colour: str, unit: float = 1) -> Line:
    """What events hold under a key over their steps: with names those of steps are noisy, those of validations dots."""
    known = [event for event in events if numbers([event], key)]
    x, y = [event["step"] for event in known], [event[key] / unit for event in known]
    of_steps = bool(known) and known[0]["event"] == "step"
    return Line(name, x, y, colour, measured=not (of_steps and name), dots=not of_steps)

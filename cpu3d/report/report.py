"""Make one self-contained page of a run: scores, best and worst cases, curves, memory and time, host and settings.

    ./run.sh report --run runs/first

Writes run/report.html: no network, pictures and the slices of three cases inside, so it can be mailed or put beside a
paper. It works with what is there, also while a training is under way or before anything was evaluated, and says what
is missing.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, List, Mapping, Optional, Sequence, Tuple

from cpu3d.inference.evaluate import PREDICTIONS, ranked, scores_path, summary_table, warning
from cpu3d.inference.scores import METRICS, metrics_in
from cpu3d.pages.page import flat, gib, page_file, percent, render_page
from cpu3d.pages.viewer import ViewedCase, viewer
from cpu3d.report import pictures
from cpu3d.report.pictures import Figures, Line
from cpu3d.report.run_files import RunFiles, best_median_worst, gather, viewed_case
from cpu3d.run.summary import Events, last_end, median, numbers, of_kind
from cpu3d.util.atomic import atomic_write
from cpu3d.util.records import by, count, duration, listed, seconds
from memory_estimator.common.schema import option
from memory_estimator.common.table import PALETTE, Bold, Table
from memory_estimator.common.units import GIB


@dataclass(frozen=True)
class Options:
    """Command-line options of `report`."""

    run: Path = option(help="run folder written by train", metavar="DIR")
    out: Optional[Path] = option(None, help="page to write (default: report.html in the run folder)", metavar="FILE")


OPTIONS = (Options,)

SHOWN = ("lesion_dice", "false_positives", "dice")
"""The METRICS that post-processing is shown by."""


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
    page = render(files)
    with atomic_write(out, "w") as file:
        file.write(page)
    return out


def render(files: RunFiles) -> str:
    """The page as HTML."""
    scores, starts = files.scores, of_kind(files.events, "start")
    return render_page(
        Path(__file__).with_name("report.html.j2"),
        title=f"Report of {files.folder.name}",
        files=files,
        config=Table(("", ""), sorted(flat(files.config)), names=2),
        mode=files.config["mode"],
        hosts=[(start, _host_table(start)) for start in starts],
        facts=_facts(files, starts),
        missing=_missing(files),
        warning=warning(scores["split"]) if scores and not scores["untouched"] else "",
        scores=scores,
        metrics={name: METRICS[name] for name in metrics_in(scores)} if scores else {},
        score_tables=[summary_table(scores), _cases_table(scores)] if scores else [],
        postprocessing=files.postprocessing,
        decision=_decision_table(files),
        score_pictures=_score_pictures(scores) if scores else [],
        viewer=viewer(_shown_cases(files)) if scores and files.store else None,
        curves=_curves(files.events, files.config["coarse_steps"]),
        costs=_costs(files.events, files.config, scores),
        predicted=_predicted(starts, files.events, files.config["coarse_steps"]),
        split=files.store.manifest.split if files.store else {},
    )


# --- Private helpers: numbers and tables ---


def _facts(files: RunFiles, starts: Events) -> List[Tuple[str, str]]:
    """Name and value of what tells this run from others."""
    config, manifest = files.config, files.store.manifest if files.store else None
    end, steps = last_end(files.events), numbers(of_kind(files.events, "step"), "step")
    first, last = (starts[0], starts[-1]) if starts else ({}, {})
    facts = [
        ("run", str(files.folder)),
        ("data", f"{manifest.name} ({manifest.layout}), {len(manifest.cases)} cases" if manifest else "-"),
        ("store", str(config.get("store", "-"))),
        ("split hash", str(config.get("split_hash") or first.get("split_hash") or "-")),
        *([("fold", config["fold"])] if config["fold"] else []),
        ("started", str(first.get("time") or "-").replace("T", " ")[:19]),
        ("steps", f"{max(steps):,}" if steps else "0"),
        *_curriculum(config),
        ("ended", f"{end['reason']} after step {end['step']}" if end else "not yet"),
        ("channels", ", ".join(config.get("channels", [])) or "-"),
        *_seen(config, last.get("grid")),
        ("parameters", f"{last['parameters']:,}" if isinstance(last.get("parameters"), int) else "-"),
        *((name, str(last.get(name.replace("-", "_"), "-"))) for name in ("precision", "policy", "micro-batch")),
        ("engine", str(last.get("engine", "-"))),
        ("device", str(last.get("device") or config["device"])),
    ]
    if files.scores:
        facts.append(("inference", _inference(files.scores)))
        done = dict.fromkeys(case.get("postprocessing", "-") for case in files.scores["cases"])
        facts.append(("post-processing of the scores", "; ".join(done)))
    if len(starts) > 1:
        facts.append(("restarts", ", ".join(f"at step {event.get('step', '?')}" for event in starts[1:])))
    return facts


def _seen(config: Mapping[str, Any], grid: Any) -> List[Tuple[str, str]]:
    """What a step saw of a case."""
    if config["mode"] == "patch":
        count = f"{config['patches_per_case']} an epoch, {percent(config['foreground'])} around labels"
        return [("mode", "patches"), ("patch", _shape(grid)), ("patches of a case", count)]
    share = config["resolution"]
    at = [("resolution", f"{share:g} of the store's")] if share < 1 else []
    return [("mode", "whole volumes"), ("grid", _shape(grid)), *at]


def _curriculum(config: Mapping[str, Any]) -> List[Tuple[str, str]]:
    """The coarse steps of a run; none without a curriculum."""
    if not config["coarse_steps"]:
        return []
    return [("curriculum", f"{config['coarse_steps']:,} steps on {_shape(config['coarse_grid'])}, then in full")]


def _inference(scores: Mapping[str, Any]) -> str:
    """How the network was applied to the cases that were scored; "-" where the scores are too old to say."""
    runs = scores.get("runs") or [scores]
    ways = []
    for inference in (run.get("inference") or {} for run in runs):
        way = "in one pass" if inference else "-"
        if inference.get("window"):
            way = f"window of {_shape(inference['window'])}, {100 * inference.get('overlap', 0):g} % overlap"
        ways.append(f"{way}, mean of 8 mirror images" if inference.get("flips") else way)
    found = "; ".join(dict.fromkeys(ways))
    if len(runs) == 1:
        return found
    crossed = all("held_out" in run for run in runs)
    return f"{found}; {'each case by the fold that held it out' if crossed else f'mean of {len(runs)} runs'}"


def _missing(files: RunFiles) -> List[str]:
    """What is not there and how to make it, one sentence each."""
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


def _host_table(start: Mapping[str, Any]) -> Table:
    groups = ("engine", "precision", "host", "versions", "threads", "memory")
    rows = [pair for group in groups if start.get(group) for pair in flat(start[group], group)]
    return Table(("", ""), rows, names=2)


def _cases_table(scores: Mapping[str, Any]) -> Table:
    """Every region of every case, the worst case first."""
    metrics = {name: METRICS[name] for name in metrics_in(scores)}
    rows = []
    for case in ranked(scores["cases"]):
        case_id = case["case_id"]  # in its first row
        for region, one in case["regions"].items():
            values = [f"{one[name]:.{metric.digits}f}" for name, metric in metrics.items()]
            ml = f"{one['truth_ml']:.1f} \u2192 {one['prediction_ml']:.1f}"
            rows.append((case_id, region + "*" * bool(one["empty"]), *values, ml))
            case_id = ""
    return Table(
        ("case", "region", *(metric.heading for metric in metrics.values()), "ml"),
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


def _costs(events: Events, config: Mapping[str, Any], scores: Optional[Mapping[str, Any]]) -> Table:
    """Memory and time: what, value, what value it is."""
    steps, end = of_kind(events, "step"), last_end(events)
    step_s, wait_s = numbers(steps, "step_s"), numbers(steps, "wait_s")
    coarse, in_full = (
        [one for one in steps if (one["step"] <= config["coarse_steps"]) == half] for half in (True, False)
    )
    total_s, extra_s = sum(step_s), sum(numbers(of_kind(events, "validation", "checkpoint"), "seconds"))
    peak = max([0, *numbers(of_kind(events, "end"), "peak_rss_bytes"), *numbers(steps, "rss_bytes")])
    share = percent(extra_s / (extra_s + total_s)) if step_s else "-"
    rows = [
        ("peak memory of the process", gib(peak), "largest resident set in the log"),
        *_allocated(events, config),
        ("time per coarse step", seconds(median(numbers(coarse, "step_s"))), "median"),
        ("time per step", seconds(median(numbers(in_full, "step_s"))), "median"),
        ("waiting for data", percent(sum(wait_s) / total_s if total_s else None), "of the time of the steps"),
        ("validation and checkpoints", share, "of the whole time"),
        ("whole training", duration(end.get("seconds") or total_s + extra_s), "wall clock, all attempts"),
    ]
    if scores:
        for name, key in (("prediction", "predict_s"), ("scoring", "score_s")):
            rows.append((name, seconds(median(numbers(scores["cases"], key))), "a volume on its full grid, median"))
    return Table(("", "", ""), [(name, Bold(value), how) for name, value, how in rows if value != "-"], names=3)


def _allocated(events: Events, config: Mapping[str, Any]) -> List[Tuple[str, str, str]]:
    """The allocator's peak on every device that an attempt ended on: TensorFlow has one allocator for each.

    Starts in older logs do not name their device: they were on the CPU, as the settings are.
    """
    device, peaks = config["device"], {}
    for event in of_kind(events, "start", "end"):
        if event["event"] == "start":
            device = event.get("device") or config["device"]
        else:
            peaks[device] = max([peaks.get(device, 0), *numbers([event], "allocator_peak_bytes")])
    what = "peak of TensorFlow's allocator"
    of_card = "cuDNN's workspaces are in it, CUDA's context is not"
    return [
        (what, gib(peak), "with ITEX it holds oneDNN's scratch")
        if device == "cpu"
        else (f"{what} on {device}", gib(peak), of_card)
        for device, peak in peaks.items()
    ]


def _predicted(starts: Events, events: Events, coarse_steps: int) -> Table:
    """What was predicted of the last attempt beside what was measured; no rows where nothing was."""
    predicted = starts[-1].get("predicted") or {} if starts else {}
    attempt = events[max((i for i, event in enumerate(events) if event["event"] == "start"), default=0) :]
    steps = of_kind(attempt, "step")
    coarse_s, full_s = (
        [
            one["step_s"] - one["wait_s"]
            for one in steps
            if {"step_s", "wait_s"} <= set(one) and (one["step"] <= coarse_steps) == is_coarse
        ]
        for is_coarse in (True, False)
    )
    # The first step compiles; it is left out wherever another one tells the time.
    measured = {
        **last_end(events),
        "step_s": median(full_s[1:] or full_s),
        "coarse_s": median(coarse_s[1:] or coarse_s),
    }
    predicted = {**predicted, "coarse_s": (predicted.get("coarse") or {}).get("step_s")}
    rows = []
    for name, key, measured_key, show in (
        ("peak of TensorFlow's allocator", "allocator_peak_bytes", "allocator_peak_bytes", gib),
        ("peak memory of the process", "process_peak_bytes", "peak_rss_bytes", gib),
        ("upper bound of it", "upper_bound_bytes", "peak_rss_bytes", gib),
        ("time per coarse step, waiting for data aside", "coarse_s", "coarse_s", seconds),
        ("time per step, waiting for data aside", "step_s", "step_s", seconds),
    ):
        value, found = predicted.get(key), measured.get(measured_key)
        if value:
            rows.append((name, show(value), show(found), f"{value / found - 1:+.1%}" if found else "-"))
    caption = "Of the last attempt; the measured peak of the process includes mapped pages of the store."
    return Table(("", "predicted", "measured", "predicted is off by"), rows, caption=caption)


def _shape(shape: Any) -> str:
    return by(shape, " \u00d7 ") if shape else "-"


# --- Private helpers: pictures ---


def _score_pictures(scores: Mapping[str, Any]) -> Figures:
    """Every case as a dot, a picture a metric."""
    figures = []
    for name, metric in ((name, METRICS[name]) for name in metrics_in(scores)):
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
    regions = dict.fromkeys(name for event in (*validations, *steps) for name in event.get("dice") or {})
    for kind, source in (("validation, whole volumes", validations), ("training steps", steps)):
        dice = [{**event, **(event.get("dice") or {})} for event in source]
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


def _shown_cases(files: RunFiles) -> Iterator[ViewedCase]:
    """The best, median and worst case by mean Dice whose files are there."""
    scores = {case["case_id"]: case["regions"] for case in reversed(ranked(files.scores["cases"]))}
    predictions = scores_path(files.folder, files.scores["split"]).parent / PREDICTIONS
    for case_id, note in best_median_worst(list(scores)).items():
        dice = ", ".join(f"{name} {values['dice']:.3f}" for name, values in scores[case_id].items())
        about = {"note": note, "scores": f"Dice {dice}"}
        case = viewed_case(files.store, case_id, files.scores["regions"], {"prediction": predictions}, **about)
        if case:
            yield case

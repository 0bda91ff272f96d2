"""Make one self-contained page of a run: scores, best and worst cases, curves, memory and time,
host and settings.

    ./run.sh report --run runs/first
    ./run.sh report --run runs/folds

Writes run/report.html. The page needs no network and holds its pictures and the slices of three
cases, so it can be mailed or published with a paper. `report` works with the files that exist, also
during a training or before an evaluation, and names what is missing. Of the folder of `train
--folds` it makes one page of all folds."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from cpu3d.data.fold import with_fold
from cpu3d.data.store import Store, open_store
from cpu3d.errors import InputError
from cpu3d.inference.postprocessing.decision import Decision, postprocessing_of, read_decision
from cpu3d.inference.postprocessing.rules import PostProcessing
from cpu3d.inference.scores import METRICS
from cpu3d.inference.scores_file import (
    PREDICTIONS,
    UNTOUCHED,
    are_of_weights,
    read_scores,
    scores_path,
    scores_table,
    warning,
)
from cpu3d.pages.page import flat, page_file, percent
from cpu3d.report import pictures
from cpu3d.report.facts import described, host_rows
from cpu3d.report.folds import write_folds_report
from cpu3d.report.sections import (
    Element,
    Folded,
    Section,
    best_and_worst,
    cases_table,
    write_page,
)
from cpu3d.run.config_json import load_config
from cpu3d.run.folds import read_folds
from cpu3d.run.log import iter_events
from cpu3d.run.summary import Costs, Events, History, median, numbers
from cpu3d.run.transfer import freeze_words, init_rows, seen_words
from cpu3d.settings import InitRecord, RunConfig
from cpu3d.util.progress import say
from cpu3d.util.records import count, listed
from memory_estimator.common.schema import option
from memory_estimator.common.table import Bold, Table
from memory_estimator.common.units import by, format_bytes, format_seconds


@dataclass(frozen=True)
class Options:
    """Options of `report`."""

    run: Path = option(help="run folder written by train", metavar="DIR")
    out: Optional[Path] = option(
        None, help="page to write (default: report.html in the run folder)", metavar="FILE"
    )


OPTIONS = (Options,)

SHOWN = ("lesion_dice", "false_positives", "dice")  # METRICS that post-processing is shown with


@dataclass(frozen=True)
class RunFiles:
    """The content of a run folder."""

    folder: Path
    settings: RunConfig
    config: Dict[str, Any]  # the same, as JSON
    init: Optional[InitRecord]  # the weights that it has started from
    history: History  # of log.jsonl
    scores: Optional[Dict[str, Any]]
    """Of the present weights, on the test cases, else on "val", else on "train"."""
    other_scores: Optional[Path]  # scores of other weights, which are not shown
    store: Optional[Store]  # with the run's fold; None if it was moved or deleted
    postprocessing: PostProcessing  # of the answers of its best weights
    decision: Optional[Decision]  # the scores behind it; None if nothing was decided


def run(options: Options) -> int:
    say(f"written: {write_report(options.run, options.out)}", stderr=False)
    return 0


def write_report(run_dir: Path, out: Optional[Path] = None) -> Path:
    """Write the page of the run, or of the folder of folds, in `run_dir` to `out`, by default
    run/report.html, atomically; returns its path.

    Raises InputError as `gather`, and when the page cannot be written there. The page names what
    else is missing."""
    if read_folds(run_dir):
        return write_folds_report(run_dir, out)
    files = gather(run_dir.resolve())
    if out is None:
        out = run_dir / "report.html"
    page_file(out)
    alerts = []
    if files.scores and not files.scores["untouched"]:
        alerts.append(warning(files.scores["split"]))
    if files.init and files.init.seen:
        alerts.append(f"Held-out cases are NOT untouched: {seen_words(files.init)}.")
    title = f"Report of {files.folder.name}"
    command = "./run.sh report"
    alert = " ".join(alerts)
    write_page(out, title, command, page_sections(files), notes=_missing(files), alert=alert)
    return out


def gather(run_dir: Path) -> RunFiles:
    """Read a run folder.

    Raises InputError for a folder that is no run, and for a config.json, postprocessing.json or
    scores.json that is damaged or of another version."""
    config = load_config(run_dir)
    scores = None
    other = None
    for split in (UNTOUCHED, "val", "train"):
        path = scores_path(run_dir, split)
        if path.is_file() and scores is None:
            found = read_scores(path)
            if are_of_weights(found, [run_dir]):
                scores = found
            else:
                other = path
    store = None
    for folder in (scores["store"] if scores else None, config.store):
        if folder and store is None:
            with contextlib.suppress(InputError):  # moved or deleted since: the page says so
                store = with_fold(open_store(folder), config.fold)
    return RunFiles(
        folder=run_dir,
        settings=config,
        config=config.to_json(),
        init=config.init_record,
        history=History(iter_events(run_dir)),
        scores=scores,
        other_scores=other,
        store=store,
        postprocessing=postprocessing_of(run_dir, config),
        decision=read_decision(run_dir, config),
    )


def page_sections(files: RunFiles) -> List[Section]:
    """All that the page shows, in order. An element is added here."""
    scores = files.scores
    config = files.config
    starts = files.history.starts
    decided = _decision_table(files)
    if decided is None:
        decided = f"Post-processing is {files.postprocessing.words}."
    hosts: List[Element] = []
    for start in starts:
        title = f"Started at step {start['step']}, {start.get('time', '')}"
        hosts.append(Table(("", ""), host_rows(start), title=title, names=2))
        groups = [name for name in ("host", "versions", "threads") if start.get(name)]
        about = flat({name: start[name] for name in groups})
        hosts.append(Folded("Versions and switches", Table(("", ""), about, names=2)))
    split = files.store.manifest.split if files.store else {}
    ids = [(name, ", ".join(cases) or "none") for name, cases in split.items()]
    settings = [
        Folded(
            "All settings, as config.json has them", Table(("", ""), sorted(flat(config)), names=2)
        ),
        Folded("Cases of each split", Table(("", ""), ids, names=2)),
    ]
    return [
        ("The run", [Table(("", ""), _facts(files, starts), names=2)]),
        ("First weights", [_first_weights(files)] if files.init else []),
        ("Scores", _scores_section(files) if scores else []),
        ("Post-processing", [decided]),
        ("Cases", [_cases(files)] if scores and files.store else []),
        ("Training", [pictures.curves(files.history, config["coarse_steps"])]),
        ("Memory and time", [_costs(files, starts)]),
        ("Host and software", hosts),
        ("Settings", settings),
    ]


# --- Private helpers ---


def _facts(files: RunFiles, starts: Events) -> List[Tuple[str, str]]:
    """Name and value of the settings and facts that distinguish this run."""
    history = files.history
    last = starts[-1] if starts else {}
    data = "-"
    if files.store:
        manifest = files.store.manifest
        data = f"{manifest.name} ({manifest.layout}), {len(manifest.cases)} cases"
        if manifest.ignore is not None:
            name = manifest.labels[manifest.ignore]
            data += f"; voxels of label {manifest.ignore} {name} count nowhere"
    facts = [
        ("folder", str(files.folder)),
        ("data", data),
        ("steps done", f"{history.last_step:,}"),
        ("ended", _ended(history)),
    ]
    facts += described(files.settings, last)
    if files.settings.fold:
        facts.append(("fold", f"{files.settings.fold}, which it holds out"))
    if files.scores:
        facts.append(("inference", _inference(files.scores)))
        applied = dict.fromkeys(case["postprocessing"] for case in files.scores["cases"])
        facts.append(("post-processing of the scores", "; ".join(applied)))
    return facts


def _first_weights(files: RunFiles) -> Table:
    """What the run has taken from other weights, and what of it stays."""
    rows = init_rows(files.init)
    rows.append(("frozen", freeze_words(files.settings)))
    return Table(("", ""), rows, names=2)


def _ended(history: History) -> str:
    """How and when the last attempt ended."""
    if history.last.get("event") == "diverged":
        return f"diverged after step {history.last['step']}: {history.last['reason']}"
    if history.end:
        return f"{history.end['reason']} after step {history.end['step']}"
    return "not yet"


def _inference(scores: Mapping[str, Any]) -> str:
    """How the network was applied to the cases that were scored."""
    runs = scores.get("runs", [scores])
    ways = []
    for run in runs:
        how = run["inference"]
        way = "in one pass"
        if how["window"]:
            way = f"window of {by(how['window'], ' x ')}, {100 * how['overlap']:g} % overlap"
        if how["flips"]:
            way += ", mean of mirror images"
        if way not in ways:
            ways.append(way)
    if len(runs) > 1:
        if all("held_out" in run for run in runs):
            ways.append("each case by the fold that held it out")
        else:
            ways.append(f"mean of {len(runs)} runs")
    return "; ".join(ways)


def _missing(files: RunFiles) -> List[str]:
    """Notes on what is missing and how to make it, one sentence each."""
    notes = []
    if files.scores is None and files.other_scores:
        notes.append(
            f"The scores in {files.other_scores} are of other weights than the run's: "
            f"run `evaluate --run {files.folder}` and then `report` again."
        )
    elif files.scores is None:
        notes.append(f"No scores yet: run `evaluate --run {files.folder}` and then `report` again.")
    if not files.history.last_step:
        notes.append("No training step is in log.jsonl yet, so there are no curves.")
    if files.store is None:
        notes.append(f"The store {files.config['store']} cannot be read, so no cases are shown.")
    if files.scores and files.scores["split_hash"] != files.config["split_hash"]:
        notes.append(
            f"The scores are of another split, {files.scores['split_hash']}: run `evaluate` again."
        )
    return notes


def _scores_section(files: RunFiles) -> List[Element]:
    scores = files.scores
    sentences = [f"Weights \u201c{scores['weights']}\u201d, on the full original grid."]
    for metric in METRICS.values():
        sentences.append(" ".join(f"{metric.label}: {metric.of.__doc__}".split()))
    sentences.append("Empty masks score as in BraTS.")
    every_case = Folded("Every case", cases_table(scores))
    return [
        scores_table(scores),
        " ".join(sentences),
        pictures.score_pictures(scores),
        every_case,
    ]


def _cases(files: RunFiles) -> Mapping[str, Any]:
    """The best, median and worst case by mean Dice."""
    scores = files.scores
    folder = scores_path(files.folder, scores["split"]).parent / PREDICTIONS
    return best_and_worst(files.store, scores, "prediction", folder)


def _decision_table(files: RunFiles) -> Optional[Table]:
    """What is removed of each region, and the scores of validation cases before and after; None if
    nothing is."""
    decision = files.decision
    if files.postprocessing.off or decision is None:
        return None
    rows = []
    for name in decision.before:
        rules = decision.chosen.rules.get(name)
        values = []
        for key in SHOWN:
            before = getattr(decision.before[name], key)
            after = getattr(decision.after[name], key)
            digits = METRICS[key].digits
            values.append(f"{before:.{digits}f} \u2192 {after:.{digits}f}")
        if rules:
            removed = f"below {listed(rules)}"
        else:
            removed = decision.chosen.without.get(name, "none")
        rows.append((name, removed, *values, str(decision.cases_with[name])))
    caption = f"Means over {count(decision.cases, 'validation case')}, before \u2192 after"
    if decision.chosen.nested:
        caption += "; each region is cut to the larger regions"
    return Table(
        ("region", "parts removed", *(METRICS[key].label for key in SHOWN), "cases with it"),
        rows,
        caption=f"{caption}.",
        names=2,
    )


def _costs(files: RunFiles, starts: Events) -> Table:
    """Memory and time, measured and predicted."""
    coarse_steps = files.config["coarse_steps"]
    costs = files.history.costs(coarse_steps)
    rows = _predicted_rows(files, starts, costs)
    beside_s = costs.validation_s + costs.checkpoint_s
    all_s = costs.steps_s + beside_s
    wait_share = costs.wait_s / costs.steps_s if costs.steps_s else None
    beside_share = beside_s / all_s if all_s else None
    whole_s = costs.train_s or all_s or None
    measured = [
        ("waiting for data", percent(wait_share), "of the time of the steps"),
        ("validation and checkpoints", percent(beside_share), "of the whole time"),
        ("whole training", format_seconds(whole_s), "wall clock, all attempts"),
    ]
    if files.scores:
        cases = files.scores["cases"]
        measured.append(("prediction", *_predicted_volume(numbers(cases, "predict_s"))))
        scoring_s = format_seconds(median(numbers(cases, "score_s")))
        measured.append(("scoring", scoring_s, "a volume on its full grid, median"))
    rows += [(*row, "", "") for row in measured]
    cells = []
    for name, value, how, guess, off in rows:
        if value != "-" or guess:
            cells.append((name, Bold(value), how, guess, off))
    return Table(("", "measured", "", "predicted", "predicted is off by"), cells, names=3)


def _predicted_volume(seconds: Sequence[float]) -> Tuple[str, str]:
    """The seconds of a volume, and what they are, of those of cases in their order. The first one
    also starts what computes, so it does not count where there are others."""
    if len(seconds) == 1:
        return format_seconds(seconds[0]), "of the only volume, the start included"
    usual = format_seconds(median(seconds[1:]))
    return usual, "a volume on its full grid, median without the first"


def _predicted_rows(files: RunFiles, starts: Events, costs: Costs) -> List[Tuple[str, ...]]:
    """Name, measured value, what kind of value, the largest prediction of all attempts, by how much
    that is off. Time is predicted of a step alone, so waiting for data is not in it."""
    coarse_steps = files.config["coarse_steps"]
    device = files.config["device"]
    coarse_s = files.history.median_step_s(coarse_steps, coarse=True, waiting=False)
    full_s = files.history.median_step_s(coarse_steps, waiting=False)
    if device == "cpu":
        scratch = "without own operations' scratch"
    else:
        scratch = "with cuDNN's workspaces, without CUDA's context"
    of_step = "median, without waiting"
    predictions = []
    for start in starts:
        predicted = dict(start.get("predicted", {}))
        for name in ("allocator_peak_bytes", "process_peak_bytes"):
            # of an earlier version that of a step alone
            predicted.setdefault(f"run_{name}", predicted.get(name))
        if "coarse" in predicted:
            predicted["coarse_step_s"] = predicted["coarse"].get("step_s")
        predictions.append(predicted)
    peak = costs.peak_rss_bytes
    on_device = costs.allocator_peak_bytes
    rows = []
    for name, value, key, show, how in (
        (
            "peak memory of the process",
            peak,
            "run_process_peak_bytes",
            format_bytes,
            "with mapped files",
        ),
        (
            "upper bound of the plan",
            peak,
            "upper_bound_bytes",
            format_bytes,
            "of the process",
        ),
        (f"allocator on {device}", on_device, "run_allocator_peak_bytes", format_bytes, scratch),
        ("time per coarse step", coarse_s, "coarse_step_s", format_seconds, of_step),
        ("time per step", full_s, "step_s", format_seconds, of_step),
    ):
        guess = max(numbers(predictions, key), default=None)
        if guess:
            off = f"{guess / value - 1:+.1%}" if value else ""
            rows.append((name, show(value), how, show(guess), off))
        elif key != "upper_bound_bytes":
            rows.append((name, show(value), how, "", ""))
    return rows

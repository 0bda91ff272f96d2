"""Make one self-contained page of a run: scores, best and worst cases, curves, memory and time,
host and settings.

    ./run.sh report --run runs/first
    ./run.sh report --run runs/folds

Writes run/report.html. The page needs no network and holds its pictures and the slices of three
cases, so it can be mailed or published with a paper. `report` works with the files that exist, also
during a training or before an evaluation, and names what is missing. Of the folder of `train
--folds` it makes one page of all folds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Mapping, Optional, Tuple

from cpu3d.data.fold import with_fold
from cpu3d.inference.postprocessing.run_rules import postprocessing_of, read_rules
from cpu3d.inference.scores_file import UNTOUCHED, scores_table, warning
from cpu3d.plan import reasons_of
from cpu3d.report.folds import write_folds_report
from cpu3d.report.pictures import score_pictures
from cpu3d.report.runs import RunFiles, current_scores, open_first, read_run, write_page
from cpu3d.report.sections import (
    CHANGED_LABELS,
    Element,
    Folded,
    best_and_worst,
    cases_table,
    changed_by_rules,
)
from cpu3d.run.folds import read_folds
from cpu3d.run.summary import median, numbers
from cpu3d.run.transfer import seen_words
from cpu3d.util.progress import say
from cpu3d.util.records import count
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
    run = read_run(run_dir.resolve())
    scores, note = current_scores(run.folder, [run.folder], (UNTOUCHED, "val", "train"))
    if not (scores or note):
        note = f"No scores yet: run `evaluate --run {run.folder}` and then `report` again."
    notes = [note] if note else []
    if not run.history.last_step:
        notes.append("No training step is in log.jsonl yet, so there are no curves.")
    if scores and scores["split_hash"] != run.config.split_hash:
        notes.append(
            f"The scores are of another split, {scores['split_hash']}: run `evaluate` again."
        )
    places = [run.config.store]
    if scores:
        places.insert(0, scores["store"])
    store = open_first(places)
    if store:
        store = with_fold(store, run.config.fold)
    record = run.config.init_record
    alerts = []
    if scores and not scores["untouched"]:
        alerts.append(warning(scores["split"]))
    if record and record.seen:
        alerts.append(f"Held-out cases are NOT untouched: {seen_words(record)}.")
    split = store.manifest.split if store else {}
    ids = [(name, ", ".join(own) or "none") for name, own in split.items()]
    if out is None:
        out = run_dir / "report.html"
    write_page(
        out,
        title=f"Report of {run.folder.name}",
        command="./run.sh report",
        runs={"": run},
        store=store,
        about=_about(run, scores),
        sections={
            "Scores": _scores_section(scores) if scores else [],
            "Post-processing": [_postprocessing(run)],
            "Cases": [best_and_worst(store, scores, run.folder)] if scores else [],
            "Memory and time": [_costs(run, scores)],
            "Settings": [Folded("Cases of each split", Table(("", ""), ids, names=2))],
        },
        notes=notes,
        alert=" ".join(alerts),
    )
    return out


# --- Private helpers ---


def _about(run: RunFiles, scores: Optional[Mapping[str, Any]]) -> List[Tuple[str, str]]:
    """Name and value of what the run was, beside its settings."""
    rows = [("folder", str(run.folder)), ("training", run.state)]
    rows += [("plan", reason) for reason in reasons_of(run.folder)]
    if run.config.fold:
        rows.append(("fold", f"{run.config.fold}, which it holds out"))
    if scores:
        rows.append(("inference", _inference(scores)))
        applied = dict.fromkeys(case["postprocessing"] for case in scores["cases"])
        rows.append(("post-processing of the scores", "; ".join(applied)))
    return rows


def _inference(scores: Mapping[str, Any]) -> str:
    """How the network was applied to the cases that were scored."""
    how = scores["inference"]
    words = "in one pass"
    if how["window"]:
        words = f"window of {by(how['window'], ' x ')}, {100 * how['overlap']:g} % overlap"
    return f"{words}, mean of mirror images" if how["flips"] else words


def _scores_section(scores: Mapping[str, Any]) -> List[Element]:
    return [
        scores_table(scores),
        f"Weights \u201c{scores['weights']}\u201d, on the full original grid; empty masks score as "
        "in BraTS.",
        score_pictures(scores),
        Folded("Every case", cases_table(scores)),
    ]


def _postprocessing(run: RunFiles) -> Element:
    """What is removed of each region, and the scores of validation cases before and after; in words
    if nothing is."""
    chosen = postprocessing_of(run.folder, run.config)
    decision = read_rules(run.folder)
    if chosen.off or decision is None:
        return f"Post-processing is {chosen.words}."
    rows = []
    for name in decision.before:
        cells = changed_by_rules(chosen, name, [decision.before[name]], [decision.after[name]])
        rows.append((name, *cells, str(decision.cases_with[name])))
    caption = f"Means over {count(decision.cases, 'validation case')}, before \u2192 after"
    columns = ("region", "parts removed", *CHANGED_LABELS, "cases with it")
    return Table(columns, rows, caption=f"{caption}.", names=2)


def _costs(run: RunFiles, scores: Optional[Mapping[str, Any]]) -> Table:
    """Memory and time, measured and as the largest prediction of all attempts. Time is predicted of
    a step alone, so waiting for data is not in it."""
    coarse_steps = run.config.coarse_steps
    costs = run.history.costs(coarse_steps)
    device = run.config.device
    predictions = []
    for start in run.history.starts:
        predicted = start.get("predicted", {})
        coarse_step_s = predicted.get("coarse", {}).get("step_s")
        predictions.append({**predicted, "coarse_step_s": coarse_step_s})

    def most(name: str) -> Optional[float]:
        return max(numbers(predictions, name), default=None)

    peak = costs.peak_rss_bytes
    bound = most("upper_bound_bytes")
    scratch = "with cuDNN's workspaces, without CUDA's context"
    if device == "cpu":
        scratch = "without native operations' scratch"
    coarse_s = run.history.mean_step_s(coarse_steps, coarse=True, waiting=False)
    full_s = run.history.mean_step_s(coarse_steps, waiting=False)
    of_step = "mean, without waiting"
    overhead_s = costs.validation_s + costs.checkpoint_s
    all_s = costs.steps_s + overhead_s
    waiting = costs.wait_s / costs.steps_s if costs.steps_s else None
    overhead = overhead_s / all_s if all_s else None
    cases = scores["cases"] if scores else []
    predict_s = numbers(cases, "predict_s")
    predict_s = predict_s[1:] or predict_s  # the first one also starts what computes
    in_percent = "{:.1%}".format
    process = most("run_process_peak_bytes")
    allocator = most("run_allocator_peak_bytes")
    rows: Any = (  # name, value, how it is shown, what it is, prediction
        ("peak memory of the process", peak, format_bytes, "with mapped files", process),
        ("upper bound of the plan", peak if bound else None, format_bytes, "of the process", bound),
        (f"allocator on {device}", costs.allocator_peak_bytes, format_bytes, scratch, allocator),
        ("time per coarse step", coarse_s, format_seconds, of_step, most("coarse_step_s")),
        ("time per step", full_s, format_seconds, of_step, most("step_s")),
        ("waiting for data", waiting, in_percent, "of all steps", None),
        (
            "validation and checkpoints",
            overhead,
            in_percent,
            "of the whole time",
            None,
        ),
        (
            "whole training",
            costs.train_s or all_s or None,
            format_seconds,
            "wall clock, all attempts",
            None,
        ),
        (
            "prediction",
            median(predict_s),
            format_seconds,
            "a volume on its full grid, median",
            None,
        ),
        ("scoring", median(numbers(cases, "score_s")), format_seconds, "a volume, median", None),
    )
    cells = []
    for name, value, show, how, guess in rows:
        if value is not None or guess is not None:
            predicted = show(guess) if guess else ""
            off = f"{guess / value - 1:+.1%}" if guess and value else ""
            cells.append((name, Bold(show(value)), how, predicted, off))
    return Table(("", "measured", "", "predicted", "predicted is off by"), cells, names=3)

"""Make one self-contained page of a run: scores, best and worst cases, curves, memory and time,
host and settings.

    ./run.sh report --run runs/first
    ./run.sh report --run runs/folds

Writes run/report.html. The page needs no network and holds its pictures and the slices of three
cases, so it can be mailed or published with a paper. `report` works with the files that exist, also
during a training or before an evaluation, and names what is missing. Of the folder of `train
--folds` it makes one page of all folds."""

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

import numpy as np

from cpu3d.data.store import Store, open_store
from cpu3d.data.stores.splits import with_fold
from cpu3d.errors import InputError
from cpu3d.inference.evaluate import (
    PREDICTIONS,
    UNTOUCHED,
    ranked,
    read_scores,
    scores_path,
    scores_table,
    warning,
)
from cpu3d.inference.postprocessing.decision import Decision, postprocessing_of, read_decision
from cpu3d.inference.postprocessing.rules import PostProcessing
from cpu3d.inference.scores import METRICS
from cpu3d.pages.page import flat, page_file, percent
from cpu3d.pages.viewer import viewer
from cpu3d.report import pictures
from cpu3d.report.folds import write_folds_report
from cpu3d.report.sections import Folded, Part, Section, cases_table, shown_cases, write_page
from cpu3d.run.config_json import load_config
from cpu3d.run.folds import read_folds
from cpu3d.run.log import iter_events
from cpu3d.run.summary import Events, History, median, numbers
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

# The facts of a run: settings, and those of its last attempt. Then the METRICS that post-processing
# is shown with.
SETTINGS = ("split_hash", "fold", "mode", "grid", "resolution", "coarse_steps", "coarse_grid")
STARTED_WITH = ("parameters", "precision", "policy", "micro_batch", "engine")
SHOWN = ("lesion_dice", "false_positives", "dice")


@dataclass(frozen=True)
class RunFiles:
    """The content of a run folder."""

    folder: Path
    config: Dict[str, Any]
    history: History  # of log.jsonl
    scores: Optional[
        Dict[str, Any]
    ]  # scores.json of the test cases, else of "val", else of "train"
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
    files, out = gather(run_dir.resolve()), out or run_dir / "report.html"
    page_file(out)
    seen = files.scores and not files.scores["untouched"]
    alert = warning(files.scores["split"]) if seen else ""
    title, command = f"Report of {files.folder.name}", "./run.sh report"
    write_page(out, title, command, page_sections(files), notes=_missing(files), alert=alert)
    return out


def gather(run_dir: Path) -> RunFiles:
    """Read a run folder.

    Raises InputError for a folder that is no run, and for a config.json, postprocessing.json or
    scores.json that is damaged or of another version."""
    config = load_config(run_dir)
    paths = [scores_path(run_dir, split) for split in (UNTOUCHED, "val", "train")]
    scores = next((read_scores(path) for path in paths if path.is_file()), None)
    store = None
    for folder in (scores["store"] if scores else None, config.store):
        if folder and store is None:
            with contextlib.suppress(InputError):  # moved or deleted since: the page says so
                store = with_fold(open_store(folder), config.fold)
    history = History(iter_events(run_dir))
    decided = postprocessing_of(run_dir, config), read_decision(run_dir, config)
    return RunFiles(run_dir, dataclasses.asdict(config), history, scores, store, *decided)


def page_sections(files: RunFiles) -> List[Section]:
    """All that the page shows, in order. An element is added here."""
    scores, config, starts = files.scores, files.config, files.history.starts
    decided = _decision_table(files) or f"Post-processing is {files.postprocessing.words}."
    hosts = []
    for start in starts:
        about = flat(
            {group: start[group] for group in ("host", "versions", "threads") if start.get(group)}
        )
        title = f"Started at step {start['step']}, {start.get('time', '')}"
        hosts.append(Table(("", ""), about, title=title, names=2))
    split = files.store.manifest.split if files.store else {}
    ids = Table(
        ("", ""), [(name, ", ".join(cases) or "none") for name, cases in split.items()], names=2
    )
    return [
        ("The run", [Table(("", ""), _facts(files, starts), names=2)]),
        ("Scores", _scores_section(files) if scores else []),
        ("Post-processing", [decided]),
        ("Cases", [_cases(files)] if scores and files.store else []),
        ("Training", [pictures.curves(files.history, config["coarse_steps"])]),
        ("Memory and time", [_costs(files, starts)]),
        ("Host and software", hosts),
        (
            "Settings",
            [
                Folded("config.json", Table(("", ""), sorted(flat(config)), names=2)),
                Folded("split", ids),
            ],
        ),
    ]


# --- Private helpers ---


def _facts(files: RunFiles, starts: Events) -> List[Tuple[str, str]]:
    """Name and value of the settings and facts that distinguish this run."""
    config, manifest = files.config, files.store.manifest if files.store else None
    history, last = files.history, starts[-1] if starts else {}
    facts = [
        ("run", str(files.folder)),
        (
            "data",
            f"{manifest.name} ({manifest.layout}), {len(manifest.cases)} cases"
            if manifest
            else "-",
        ),
        ("steps", f"{history.last_step:,}"),
        ("ended", _ended(history)),
        *((name, value) for name, value in flat(config) if value and name in SETTINGS),
        *((name, str(last.get(name, "-"))) for name in STARTED_WITH),
        ("device", last.get("device", config["device"])),
    ]
    if files.scores:
        facts.append(("inference", _inference(files.scores)))
        applied = dict.fromkeys(case["postprocessing"] for case in files.scores["cases"])
        facts.append(("post-processing of the scores", "; ".join(applied)))
    return facts


def _ended(history: History) -> str:
    """How and when the last attempt ended."""
    if history.last.get("event") == "diverged":
        return f"diverged after step {history.last['step']}: {history.last['reason']}"
    return f"{history.end['reason']} after step {history.end['step']}" if history.end else "not yet"


def _inference(scores: Mapping[str, Any]) -> str:
    """How the network was applied to the cases that were scored."""
    runs, ways = scores.get("runs", [scores]), {}
    for how in (run["inference"] for run in runs):
        way = "in one pass"
        if how["window"]:
            way = f"window of {by(how['window'], ' x ')}, {100 * how['overlap']:g} % overlap"
        ways[way + ", mean of mirror images" * how["flips"]] = None  # each once
    if len(runs) > 1:
        crossed = all("held_out" in run for run in runs)
        ways[
            "each case by the fold that held it out" if crossed else f"mean of {len(runs)} runs"
        ] = None
    return "; ".join(ways)


def _missing(files: RunFiles) -> List[str]:
    """Notes on what is missing and how to make it, one sentence each."""
    notes = []
    if files.scores is None:
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


def _scores_section(files: RunFiles) -> List[Part]:
    scores = files.scores
    every = " ".join(
        " ".join(f"{metric.label}: {metric.of.__doc__}".split()) for metric in METRICS.values()
    )
    text = f"Weights \u201c{scores['weights']}\u201d, on the full original grid. {every} Empty masks score as in BraTS."
    every_case = Folded("Every case", cases_table(scores))
    return [scores_table(scores), text, pictures.score_pictures(scores), every_case]


def _cases(files: RunFiles) -> Mapping[str, Any]:
    """The best, median and worst case by mean Dice."""
    scores = {
        case["case_id"]: "Dice "
        + ", ".join(f"{name} {region['dice']:.3f}" for name, region in case["regions"].items())
        for case in reversed(ranked(files.scores["cases"]))
    }
    predictions = scores_path(files.folder, files.scores["split"]).parent / PREDICTIONS
    return viewer(
        shown_cases(files.store, scores, files.scores["regions"], {"prediction": predictions})
    )


def _decision_table(files: RunFiles) -> Optional[Table]:
    """Each region's removed parts, and the scores of validation cases before and after; None if
    nothing is removed."""
    decision = files.decision
    if files.postprocessing.off or decision is None:
        return None
    rows = []
    for name in decision.before:
        rules = decision.chosen.rules.get(name)
        values = []
        for key in SHOWN:
            before, after = (
                getattr(means[name], key) for means in (decision.before, decision.after)
            )
            digits = METRICS[key].digits
            values.append(f"{before:.{digits}f} \u2192 {after:.{digits}f}")
        removed = f"below {listed(rules)}" if rules else decision.chosen.without.get(name, "none")
        rows.append((name, removed, *values, str(decision.cases_with[name])))
    nested = "; each region is cut to the larger regions" if decision.chosen.nested else ""
    return Table(
        ("region", "parts removed", *(METRICS[key].label for key in SHOWN), "cases with it"),
        rows,
        caption=f"Means over {count(decision.cases, 'validation case')}, before \u2192 after{nested}.",
        names=2,
    )


def _costs(files: RunFiles, starts: Events) -> Table:
    """Memory and time, a row each: name, measured value, what kind of value, the largest prediction
    of all attempts, by how much that is off. Time is predicted of a step alone, so its waiting for
    data is a row of its own."""
    coarse_steps, device = files.config["coarse_steps"], files.config["device"]
    costs = files.history.costs(coarse_steps)
    coarse_s = files.history.median_step_s(coarse_steps, coarse=True, waiting=False)
    full_s = files.history.median_step_s(coarse_steps, waiting=False)
    beside_s = costs.validation_s + costs.checkpoint_s
    scratch = (
        "without own operations' scratch"
        if device == "cpu"
        else "with cuDNN's workspaces, without CUDA's context"
    )
    predicted = [start.get("predicted", {}) for start in starts]
    predicted += [
        {"coarse_step_s": each["coarse"].get("step_s")} for each in predicted if "coarse" in each
    ]
    rows = []
    for name, value, key, show, how in (
        (
            "peak memory of the process",
            costs.peak_rss_bytes,
            "process_peak_bytes",
            format_bytes,
            "with mapped files",
        ),
        ("upper bound of it", costs.peak_rss_bytes, "upper_bound_bytes", format_bytes, ""),
        (
            f"allocator on {device}",
            costs.allocator_peak_bytes,
            "allocator_peak_bytes",
            format_bytes,
            scratch,
        ),
        (
            "time per coarse step",
            coarse_s,
            "coarse_step_s",
            format_seconds,
            "median, without waiting",
        ),
        ("time per step", full_s, "step_s", format_seconds, "median, without waiting"),
    ):
        guess = max(numbers(predicted, key), default=None)
        off = f"{guess / value - 1:+.1%}" if guess and value else ""
        if key != "upper_bound_bytes" or guess:
            rows.append((name, show(value), how, show(guess) if guess else "", off))
    all_s, wait_share = costs.steps_s + beside_s, costs.wait_s / (costs.steps_s or np.nan)
    rows.append(("waiting for data", percent(wait_share), "of the time of the steps", "", ""))
    rows.append(
        (
            "validation and checkpoints",
            percent(beside_s / (all_s or np.nan)),
            "of the whole time",
            "",
            "",
        )
    )
    rows.append(
        (
            "whole training",
            format_seconds(costs.train_s or all_s or None),
            "wall clock, all attempts",
            "",
            "",
        )
    )
    for name, key in (("prediction", "predict_s"), ("scoring", "score_s")) if files.scores else ():
        took = format_seconds(median(numbers(files.scores["cases"], key)))
        rows.append((name, took, "a volume on its full grid, median", "", ""))
    cells = [(row[0], Bold(row[1]), *row[2:]) for row in rows if row[1] != "-" or row[3]]
    return Table(("", "measured", "", "predicted", "predicted is off by"), cells, names=3)

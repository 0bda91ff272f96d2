"""The page of a folder of folds: every case once, scored by the fold that had not seen it.

write_folds_report(folder)        # folder/report.html
for table in results_tables(gather_folds(folder)): ...
"""

import contextlib
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.store import Store, open_store
from cpu3d.errors import InputError
from cpu3d.inference.out_of_fold import SPLIT, OutOfFold, read_out_of_fold
from cpu3d.inference.postprocessing.decision import Decision, read_decision
from cpu3d.inference.postprocessing.joint import CaseScores, cross_fitted
from cpu3d.inference.scores import METRICS, has_region, metric_notes
from cpu3d.inference.scores_file import (
    PREDICTIONS,
    are_of_weights,
    read_scores,
    scores_path,
    scores_table,
)
from cpu3d.pages.page import flat, page_file
from cpu3d.report.facts import described
from cpu3d.report.pictures import Figures, Line, chart, score_pictures, strips
from cpu3d.report.sections import Element, Folded, Section, best_and_worst, cases_table, write_page
from cpu3d.run.checkpoint import checkpoints
from cpu3d.run.config_json import CHANGEABLE, FACTS, FOLLOWING, load_config, settings_by_name
from cpu3d.run.folds import FILE, fold_folder, read_folds
from cpu3d.run.log import iter_events
from cpu3d.run.summary import History
from cpu3d.run.transfer import start_words
from cpu3d.settings import RunConfig
from cpu3d.util.records import count, listed, plus_minus
from memory_estimator.common.table import PALETTE, Table
from memory_estimator.common.units import format_bytes, format_seconds

WEIGHTS_NOTE = (
    "The folds answer with their last weights: the best ones are chosen by "
    " the cases that are scored here. So no case has chosen what it is scored with."
)
DECISIVE = ("epochs", "steps", "learning_rate", "adam_rate", "patience")
"""Settings that may change when a run is continued, and that its scores hang on."""
POSTPROCESSED = ("lesion_dice", "false_positives", "dice")  # the METRICS that evidence gives


@dataclass(frozen=True)
class FoldsFiles:
    """The content of a folder of folds."""

    folder: Path
    names: List[str]  # of all folds
    configs: Dict[str, RunConfig]  # of the folds that have begun
    histories: Dict[str, History]
    store: Optional[Store]  # None if it was moved or deleted
    answers: Optional[OutOfFold]  # of the folds that are scored
    decision: Optional[Decision]  # the post-processing of all together
    test: Optional[Dict[str, Any]]  # the scores of the ensemble on the test cases
    without_test: str  # the reason why they are not here though there is a file; else empty

    @property
    def lacking(self) -> List[str]:
        """The folds without scores."""
        held_out = self.answers.held_out if self.answers else {}
        return [fold for fold in self.names if fold not in held_out]


def write_folds_report(folder: Path, out: Optional[Path] = None) -> Path:
    """Write the page of a folder of folds to `out`, by default folder/report.html, atomically;
    returns its path. Raises InputError as `gather_folds`, and when the page cannot be written
    there."""
    files = gather_folds(folder)
    if out is None:
        out = files.folder / "report.html"
    page_file(out)
    title = f"Report of {files.folder.name}: {len(files.names)} folds"
    write_page(out, title, "./run.sh report", _sections(files), notes=_missing(files))
    return out


def gather_folds(folder: Path) -> FoldsFiles:
    """Read a folder of folds. Raises InputError for one that is none, and for files that are
    damaged or of another version, but for scores, which can be made again."""
    folder = Path(folder).resolve()
    folds = read_folds(folder)
    if folds is None:
        raise InputError(
            f"folder {folder} must hold a {FILE}, found none; name one of `train --folds`",
        )
    runs = {fold: fold_folder(folder, fold) for fold in folds.names}
    begun = {fold: run for fold, run in runs.items() if (run / "config.json").is_file()}
    configs = {fold: load_config(run) for fold, run in begun.items()}
    store = None
    for place in (folds.store, *(config.store for config in configs.values())):
        if store is None:
            with contextlib.suppress(InputError):  # moved or deleted since: the page says so
                store = open_store(place)
    decision = None
    if configs:
        first = next(iter(configs))
        decision = read_decision(folder, configs[first])
    test, without_test = _test_scores(folder, list(runs.values()))
    return FoldsFiles(
        folder=folder,
        names=folds.names,
        configs=configs,
        histories={fold: History(iter_events(run)) for fold, run in begun.items()},
        store=store,
        answers=read_out_of_fold(folder),
        decision=decision,
        test=test,
        without_test=without_test,
    )


def results_tables(files: FoldsFiles) -> List[Table]:
    """The tables of the terminal."""
    if files.answers is None:
        return [folds_table(files)]
    tables = [folds_table(files), _scores_table(files)]
    decided = _postprocessing_table(files)
    if decided:
        tables.append(decided)
    return tables


def folds_table(files: FoldsFiles) -> Table:
    """A row for each fold: its cases, what its training took, and its scores."""
    dice = _dice(files.answers)
    held_out = files.answers.held_out if files.answers else {}
    rows = []
    for fold in files.names:
        history = files.histories.get(fold)
        if history is None:
            rows.append((fold, "waiting", *["-"] * 5))
            continue
        costs = history.costs()
        ids = held_out.get(fold, ())
        mean = f"{np.mean([dice[case_id] for case_id in ids]):.3f}" if ids else "-"
        train_s = costs.train_s or costs.steps_s + costs.validation_s + costs.checkpoint_s
        row = (
            fold,
            _state(history),
            str(len(ids) or "-"),
            f"{costs.steps:,}",
            format_seconds(train_s or None),
            format_bytes(costs.peak_rss_bytes),
            mean,
        )
        rows.append(row)
    return Table(
        ("fold", "training", "cases scored", "steps", "time", "peak memory", "mean Dice"),
        rows,
        title="Folds",
        caption="Time is of all attempts, with validations; scores are of the held-out cases.",
        names=2,
    )


# --- Private helpers ---


def _test_scores(folder: Path, runs: Sequence[Path]) -> Tuple[Optional[Dict[str, Any]], str]:
    """The scores of the folds together on the test cases, None if there are none of their present
    weights; and why not, if there is a file."""
    path = scores_path(folder)
    if not path.is_file():
        return None, ""
    try:
        scores = read_scores(path)
    except InputError:
        return None, "cannot be read"
    if not are_of_weights(scores, [run for run in runs if checkpoints(run)]):
        return None, "are of earlier weights"
    return scores, ""


def _sections(files: FoldsFiles) -> List[Section]:
    """All that the page shows, in order. An element is added here."""
    answers = files.answers
    scores: List[Element] = []
    cases: List[Element] = []
    postprocessing: List[Element] = []
    settings: List[Element] = []
    if answers:
        scores = [_scores_table(files), WEIGHTS_NOTE, *_score_pictures(answers)]
        cases = [_shown(files), Folded("Every case", cases_table(answers.scores))]
    decided = _postprocessing_table(files)
    if decided:
        postprocessing.append(decided)
    if files.decision:
        postprocessing.append(f"The folds together: {files.decision.chosen.words}.")
    test = [scores_table(files.test)] if files.test else []
    if files.configs:
        first = next(iter(files.configs))
        settings.append(
            Folded(
                "All settings, as config.json has them",
                Table(("", ""), _settings(files.configs[first]), names=2),
            )
        )
    if answers:
        settings.append(Folded("Cases that each fold held out", _held_out_table(answers)))
    return [
        ("The folds", [Table(("", ""), _facts(files), names=2), folds_table(files)]),
        ("Scores of each case by the fold that held it out", scores),
        ("Untouched cases, by the folds together", test),
        ("Post-processing", postprocessing),
        ("Cases", cases),
        ("Training, a line a fold", [_curves(files)]),
        ("Host and software", _hosts(files)),
        ("Settings", settings),
    ]


def _facts(files: FoldsFiles) -> List[Tuple[str, str]]:
    """Name and value of what all folds have in common."""
    facts = [("folder", str(files.folder))]
    if files.store:
        manifest = files.store.manifest
        cases = count(manifest.cases, "case")
        facts.append(("data", f"{manifest.name} ({manifest.layout}), {cases}"))
    if files.answers:
        cases = count(files.answers.scores["cases"], "case")
        facts.append(("scored", f"{cases}, each once, full original grids"))
    if files.configs:
        first = next(iter(files.configs))
        config = files.configs[first]
        facts += _described(files)
        if config.init:
            facts.append(("init", start_words(config)))
    costs = [history.costs() for history in files.histories.values()]
    known_s = [each.train_s for each in costs if each.train_s]
    peaks = [each.peak_rss_bytes or 0 for each in costs]
    if known_s:
        facts.append(("training of all folds", format_seconds(sum(known_s))))
        facts.append(("peak memory", format_bytes(max(peaks) or None)))
    return facts


def _described(files: FoldsFiles) -> List[Tuple[str, str]]:
    """Name and value of what distinguishes the runs; where folds differ, each value with those that
    have it. Folds may have been trained on several hosts."""
    folds_with: Dict[str, Dict[str, List[str]]] = {}  # name -> value -> folds
    for fold, config in files.configs.items():
        starts = files.histories[fold].starts
        last = starts[-1] if starts else {}
        for name, value in described(config, last):
            folds_with.setdefault(name, {}).setdefault(value, []).append(fold)
    rows = []
    for name, by_value in folds_with.items():
        words = next(iter(by_value))
        if len(by_value) > 1:
            words = "; ".join(f"{value} (fold {listed(by_value[value])})" for value in by_value)
        rows.append((name, words))
    return rows


def _missing(files: FoldsFiles) -> List[str]:
    """Notes on what is missing and why, one sentence each."""
    notes = []
    for fold in files.lacking:
        history = files.histories.get(fold)
        why = _state(history) if history else "it has not begun"
        notes.append(f"Fold {fold} is missing here ({why}): its cases are in no score.")
    if files.lacking:
        notes.append("Repeat the same `train --folds` to complete it.")
    notes += _differing(files)
    if files.without_test:
        why = f"The scores of the test cases {files.without_test}"
        notes.append(f"{why}: run `evaluate --run {files.folder}` and then `report` again.")
    if files.store is None:
        notes.append("The store cannot be read, so no cases are shown.")
    return notes


def _differing(files: FoldsFiles) -> List[str]:
    """The folds whose settings are not those of the first one, a sentence each."""
    if not files.configs:
        return []
    first = next(iter(files.configs))
    usual = settings_by_name(files.configs[first])
    ignored = {"fold", *FACTS, *FOLLOWING}
    if usual["budget_minutes"]:
        ignored.add("steps")  # as many as fitted the minutes
    if usual["steps"]:
        ignored.add("epochs")  # of no effect
    notes = []
    for fold, config in files.configs.items():
        own = settings_by_name(config)
        differing = [name for name in own if own[name] != usual[name] and name not in ignored]
        names = [name for name in differing if name in DECISIVE or name not in CHANGEABLE]
        values = [f"{name} {own[name]} for {usual[name]}" for name in names]
        if values:
            notes.append(f"Fold {fold} has other settings than fold {first}: {listed(values)}.")
    return notes


def _state(history: History) -> str:
    """How far a fold's training has come, in words."""
    last = history.last
    if last.get("event") == "diverged":
        return f"diverged after step {last['step']}: {last['reason']}"
    if history.end:
        return history.end["reason"]
    return f"not ended, step {history.last_step}"


def _dice(answers: Optional[OutOfFold]) -> Dict[str, float]:
    """Case id -> its mean Dice."""
    cases = answers.scores["cases"] if answers else []
    return {case["case_id"]: case["mean_dice"] for case in cases}


def _scores_table(files: FoldsFiles) -> Table:
    """Every metric of every region over all cases, and how the folds' means spread."""
    answers = files.answers
    of_case = {case["case_id"]: case["regions"] for case in answers.scores["cases"]}
    rows = []
    for region, summary in answers.scores["summary"].items():
        present = [of[region] for of in of_case.values() if has_region(of[region])]
        name = region
        if len(present) < len(of_case):
            name = f"{region}, in {len(present)} of {len(of_case)}"
        for key, metric in METRICS.items():
            digits = metric.digits
            values = summary[key]
            means = []
            for ids in answers.held_out.values():
                means.append(np.mean([of_case[case_id][region][key] for case_id in ids]))
            spread = f"{min(means):.{digits}f} to {max(means):.{digits}f}"
            deviation = f"{np.std(means, ddof=1):.{digits}f}" if len(means) > 1 else "-"
            mean = plus_minus(values["mean"], values["std"], digits)
            where_present = "-"
            if present:
                where_present = f"{np.mean([of[key] for of in present]):.{digits}f}"
            median = f"{values['median']:.{digits}f}"
            rows.append((name, metric.heading, mean, median, where_present, spread, deviation))
            name = ""  # in its first row
    notes = metric_notes(tuple(METRICS), answers.scores["tolerance_mm"])
    over_cases = ("mean \u00b1 sd", "median", "where present")
    return Table(
        ("region", "score", *over_cases, "means of folds", "sd of folds"),
        rows,
        title=f"{count(of_case, 'case')} of {answers.scores['name']}, without post-processing",
        caption=f"{notes}. mean \u00b1 sd and median: over the cases. Where present: the mean over "
        "the cases that have the region.",
        names=2,
    )


def _crossed(files: FoldsFiles) -> Optional[Tuple[CaseScores, CaseScores]]:
    """The scores of each case before and after rules of the other folds; None for a single fold."""
    if files.answers is None or len(files.answers.evidence) < 2:
        return None
    return cross_fitted(files.answers.evidence, files.answers.scores["regions"])


def _postprocessing_table(files: FoldsFiles) -> Optional[Table]:
    """What post-processing is worth on cases that have not decided it."""
    crossed = _crossed(files)
    if crossed is None:
        return None
    before, after = crossed
    decision = files.decision
    rows = []
    for region in next(iter(before.values())):
        removed = "-"
        if decision:
            rules = decision.chosen.rules.get(region)
            removed = decision.chosen.without.get(region, "none")
            if rules:
                removed = f"below {listed(rules)}"
        cells = []
        for key in POSTPROCESSED:
            digits = METRICS[key].digits
            means = []
            for scores in (before, after):
                values = [getattr(regions[region], key) for regions in scores.values()]
                means.append(np.mean(values))
            cells.append(f"{means[0]:.{digits}f} \u2192 {means[1]:.{digits}f}")
        rows.append((region, *cells, removed))
    labels = [METRICS[key].label for key in POSTPROCESSED]
    return Table(
        ("region", *labels, "parts removed by the folds together"),
        rows,
        title="Post-processing, each case by rules that the other folds decided",
        caption=f"Means over {count(before, 'case')}, before \u2192 after. "
        "The rules of the folds together, in the last column, are decided on all cases.",
        names=1,
    )


def _score_pictures(answers: OutOfFold) -> List[Figures]:
    """Every case as a dot, by region and by fold."""
    dice = _dice(answers)
    by_fold = {fold: [dice[case_id] for case_id in ids] for fold, ids in answers.held_out.items()}
    title = "Mean Dice of every case, by fold"
    picture = strips(by_fold, title=title, y_label="Dice", y_range=(-0.02, 1.02))
    return [[(title, picture), *score_pictures(answers.scores)]]


def _shown(files: FoldsFiles) -> Element:
    """The best, median and worst case by mean Dice, with the truth."""
    if files.store is None:
        return ""
    folder = scores_path(files.folder, SPLIT).parent / PREDICTIONS
    return best_and_worst(files.store, files.answers.scores, "prediction out of fold", folder)


def _curves(files: FoldsFiles) -> Figures:
    """Validation Dice and training loss over steps."""
    validations = []
    losses = []
    for (fold, history), colour in zip(files.histories.items(), itertools.cycle(PALETTE)):
        if len(history.validations):
            held_out = history.validations
            validations.append(Line(fold, held_out["step"], held_out["mean_dice"], colour))
        if len(history.steps):
            steps = history.steps
            losses.append(Line(fold, steps["step"], steps["loss"], colour, is_dense=True))
    figures: Figures = []
    for title, lines, label, y_range in (
        ("Mean Dice of the held-out cases", validations, "Dice", (0, 1)),
        ("Loss of the steps", losses, "loss", (0, None)),
    ):
        if lines:
            figures.append((title, chart(lines, title=title, y_label=label, y_range=y_range)))
    return figures


def _hosts(files: FoldsFiles) -> List[Element]:
    """The hosts and versions of the attempts, each once, with the folds that they trained."""
    seen: Dict[Tuple[Tuple[str, str], ...], Dict[str, None]] = {}
    for fold, history in files.histories.items():
        for start in history.starts:
            groups = ("host", "versions", "threads")
            about = {group: start[group] for group in groups if start.get(group)}
            seen.setdefault(tuple(flat(about)), {})[fold] = None
    tables: List[Element] = []
    for about, folds in seen.items():
        tables.append(Table(("", ""), list(about), title=f"Folds {listed(folds)}", names=2))
    return tables


def _settings(config: RunConfig) -> List[Tuple[str, str]]:
    """The settings of the first fold, but for which fold it is."""
    content: Mapping[str, Any] = config.to_json()
    return sorted(pair for pair in flat(content) if pair[0] != "fold")


def _held_out_table(answers: OutOfFold) -> Table:
    rows = [(fold, ", ".join(ids)) for fold, ids in answers.held_out.items()]
    return Table(("fold", "cases that it held out"), rows, names=2)

"""The page of a folder of folds: every case once, scored by the fold that had not seen it.

write_folds_report(folder)        # folder/report.html
for table in results_tables(gather_folds(folder)): ...
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Dict, List, Optional, Sequence

from cpu3d.data.store import Store
from cpu3d.inference.out_of_fold import OutOfFold, read_out_of_fold
from cpu3d.inference.postprocessing.rules import PostProcessing
from cpu3d.inference.postprocessing.run_rules import PostprocessingRules, cross_fitted, read_rules
from cpu3d.inference.scores_file import UNTOUCHED, scores_table
from cpu3d.report.pictures import score_pictures
from cpu3d.report.runs import (
    RunFiles,
    current_scores,
    open_first,
    read_run,
    runs_table,
    write_page,
)
from cpu3d.report.sections import (
    CHANGED_LABELS,
    Element,
    Folded,
    best_and_worst,
    cases_table,
    changed_by_rules,
)
from cpu3d.run.checkpoint import checkpoints
from cpu3d.run.folds import CONFIG, read_folds
from cpu3d.util.records import count
from memory_estimator.common.table import Table

WEIGHTS_NOTE = (
    "The folds answer with their last weights, as the best ones are chosen by the cases that are "
    "scored here. So no case has chosen what it is scored with."
)


@dataclass(frozen=True)
class FoldsFiles:
    """The content of a folder of folds."""

    folder: Path
    names: List[str]  # of all folds
    runs: Dict[str, RunFiles]  # of the folds that have begun
    store: Optional[Store]  # None if it was moved or deleted
    answers: Optional[OutOfFold]  # of the folds that are scored
    decision: Optional[PostprocessingRules]  # the post-processing of all together

    @property
    def held_out(self) -> Dict[str, List[str]]:
        """Fold -> the cases that it held out, of those that are scored."""
        return self.answers.held_out if self.answers else {}


def write_folds_report(folder: Path, out: Optional[Path] = None) -> Path:
    """Write the page of a folder of folds to `out`, by default folder/report.html, atomically;
    returns its path. Raises InputError as `gather_folds`, and when the page cannot be written
    there."""
    files = gather_folds(folder)
    if out is None:
        out = files.folder / "report.html"
    trained = [run.folder for run in files.runs.values() if checkpoints(run.folder)]
    test, note = current_scores(files.folder, trained, [UNTOUCHED])
    decided = _postprocessing_tables(files)
    words = [f"The folds together: {files.decision.chosen.words}."] if files.decision else []
    sections: Dict[str, Sequence[Element]] = {
        "What was trained": [folds_table(files)],
        "Untouched cases, by the folds together": [scores_table(test)] if test else [],
        "Post-processing": [*decided, *words],
    }
    answers = files.answers
    if answers:
        scores = answers.scores
        rows = [(fold, ", ".join(ids)) for fold, ids in answers.held_out.items()]
        held_out = Table(("fold", "cases that it held out"), rows, names=2)
        sections["Scores"] = [_scores_table(answers), WEIGHTS_NOTE, score_pictures(scores)]
        sections["Cases"] = [
            best_and_worst(files.store, scores, files.folder),
            Folded("Every case", cases_table(scores)),
        ]
        sections["Settings"] = [Folded("Cases that each fold held out", held_out)]
    write_page(
        out,
        title=f"Report of {files.folder.name}: {len(files.names)} folds",
        command="./run.sh report",
        runs=files.runs,
        store=files.store,
        about=[("folder", str(files.folder))],
        sections=sections,
        notes=[*_missing(files), *filter(None, [note])],
    )
    return out


def gather_folds(folder: Path) -> FoldsFiles:
    """Read a folder of folds. Raises InputError for one that is none, and for files that are
    damaged or of another version, but for scores, which can be made again."""
    folder = Path(folder).resolve()
    answers = read_out_of_fold(folder)
    folds = read_folds(folder)
    folders = folds.runs(folder).items()
    runs = {fold: read_run(run) for fold, run in folders if (run / CONFIG).is_file()}
    return FoldsFiles(
        folder=folder,
        names=folds.names,
        runs=runs,
        store=open_first([folds.store, *(run.config.store for run in runs.values())]),
        answers=answers,
        decision=read_rules(folder),
    )


def results_tables(files: FoldsFiles) -> List[Table]:
    """The tables of the terminal."""
    scores = [_scores_table(files.answers)] if files.answers else []
    return [folds_table(files), *scores, *_postprocessing_tables(files)]


def folds_table(files: FoldsFiles) -> Table:
    """A row for each fold: what its training took, and its scores."""
    dice: Dict[str, List[float]] = {}
    if files.answers:
        of_case = {case["case_id"]: case["mean_dice"] for case in files.answers.scores["cases"]}
        for fold, ids in files.held_out.items():
            dice[fold] = [of_case[case_id] for case_id in ids]
    return runs_table(files.names, files.runs, dice)


# --- Private helpers ---


def _missing(files: FoldsFiles) -> List[str]:
    """Notes on what is missing and why, one sentence each."""
    notes = []
    lacking = [fold for fold in files.names if fold not in files.held_out]
    for fold in lacking:
        why = files.runs[fold].state if fold in files.runs else "it has not begun"
        notes.append(f"Fold {fold} is missing here ({why}): its cases are in no score.")
    if lacking:
        notes.append("Repeat the same `train --folds` to complete it.")
    return notes


def _scores_table(answers: OutOfFold) -> Table:
    cases = count(answers.scores["cases"], "case")
    title = f"{cases} of {answers.scores['name']}, out of fold, without post-processing"
    return replace(scores_table(answers.scores), title=title)


def _postprocessing_tables(files: FoldsFiles) -> List[Table]:
    """What post-processing is worth on cases that have not decided it; none for a single fold."""
    if files.answers is None or len(files.answers.evidence) < 2:
        return []
    before, after = cross_fitted(files.answers.evidence, files.answers.scores["regions"])
    chosen = files.decision.chosen if files.decision else PostProcessing()
    rows = []
    for region in next(iter(before.values())):
        each = ([regions[region] for regions in scores.values()] for scores in (before, after))
        rows.append((region, *changed_by_rules(chosen, region, *each)))
    table = Table(
        ("region", "parts removed by the folds together", *CHANGED_LABELS),
        rows,
        title="Post-processing, each case by rules that the other folds decided",
        caption=f"Means over {count(before, 'case')}, before \u2192 after. "
        "The rules of the folds together, in the second column, are decided on all cases.",
        names=2,
    )
    return [table]

"""Score a trained network on cases it has never seen, on their full original grid.

    ./run.sh evaluate --run runs/first
    ./run.sh evaluate --run runs/first --split val --tolerance 2 --json
    ./run.sh evaluate --run runs/fold-1 runs/fold-2 runs/fold-3 --out runs/folds
    ./run.sh evaluate --run runs/folds

Writes run/evaluation/scores.json and run/evaluation/predictions/<case_id>.nii.gz; for the splits
"val" and "train", whose scores say less, the same below run/evaluation/val and
run/evaluation/train. Earlier scores are replaced only when all cases are scored, and in --out never
those of other runs. --out names another folder than the run's; several runs together need it, the
folder of `train --folds` only for "val", of which it has scores already.

Several runs predict together, as in `predict`, by the mean of their probabilities. On "val" folds
are cross-validated instead: each case is predicted by the one run that has not trained on it.

The written label map is scored, after the run's post-processing; --raw leaves that out. It is on
the original grid, with axes turned: where a case was resampled, the network's answer is brought
back, and compared with the file's own label. Voxels that are not annotated (`prepare --ignore`) are
predicted and written, and count in no score."""

import dataclasses
import datetime
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.cases.notes import case_notes, note_lines, unit_notes
from cpu3d.data.fold import with_fold, with_folds
from cpu3d.data.labels import code_meanings, ignored_voxels, region_mask
from cpu3d.data.manifest import CaseRecord
from cpu3d.data.nifti import ras_steps_mm, write_volume
from cpu3d.data.split import SPLITS
from cpu3d.data.store import Store
from cpu3d.errors import InputError, raise_if_any
from cpu3d.host.memory import peak_rss_bytes
from cpu3d.inference.ensemble import Ensemble, origin, trained_predictors
from cpu3d.inference.postprocessing.evidence import gather
from cpu3d.inference.postprocessing.rules import RAW, PostProcessing
from cpu3d.inference.postprocessing.run_rules import postprocessing_of, postprocessing_together
from cpu3d.inference.runs import (
    Inference,
    RunOptions,
    RunSet,
    open_runs,
    store_of_run,
    training_notes,
)
from cpu3d.inference.scores import TOLERANCE_MM, score_region
from cpu3d.inference.scores_file import (
    FILES,
    PREDICTIONS,
    SCHEMA,
    UNTOUCHED,
    of_cases,
    read_scores,
    scores_path,
    scores_table,
    warning,
)
from cpu3d.run.config_json import load_config
from cpu3d.run.folds import WEIGHTS as FOLD_WEIGHTS
from cpu3d.settings import RunConfig
from cpu3d.util.atomic import OLD, check_folder, replace_files, writable_folder, write_json
from cpu3d.util.lock import locked
from cpu3d.util.progress import bar, say
from cpu3d.util.records import listed
from memory_estimator.common.schema import option
from memory_estimator.common.table import new_console


@dataclass(frozen=True)
class Options:
    """Options of `evaluate`."""

    split: str = option(UNTOUCHED, help="cases to score", choices=SPLITS)
    store: Optional[Path] = option(None, help="store folder, if it was moved", metavar="DIR")
    out: Optional[Path] = option(
        None, "folder for evaluation/ (default: the run's, which `report` reads)", "DIR"
    )
    tolerance: float = option(TOLERANCE_MM, "tolerance of the surface Dice in mm", "MM", at_least=0)
    evidence: bool = option(False, help="also keep in scores.json what decides post-processing")
    json: bool = option(False, help="print scores.json instead of a table")


OPTIONS = (RunOptions, Options, Inference)

Answers = Tuple[Any, PostProcessing]  # a predictor, and what is made of its answers


def run(chosen: RunOptions, options: Options, inference: Inference) -> int:
    split = options.split
    named = tuple(folder.resolve() for folder in chosen.run)
    together = open_runs(dataclasses.replace(chosen, run=named))
    runs = together.runs
    configs = together.configs
    out = _folder_for_scores(options, together)
    store = store_of_run(configs[0], options.store)
    folds = [config.fold for config in configs]
    held_out = _held_out(store, folds, split)
    rules = _rules_for(together, split, bool(held_out), raw=chosen.raw)
    path = scores_path(out, split)
    check_folder(path.parent, "evaluation")
    _check_replaceable(path, out, together)
    predictors = trained_predictors(runs, together.weights, inference)
    folder = writable_folder(path.parent, "evaluation")
    about = origin(runs, configs, predictors)
    answers_of: Dict[str, Answers] = {}
    if held_out:
        store = with_folds(store, folds)
        predictor = predictors[0]
        for run_origin, fold, answers in zip(about["runs"], folds, zip(predictors, rules)):
            run_origin["held_out"] = held_out[fold]
            answers_of.update(dict.fromkeys(held_out[fold], answers))
    else:
        predictor = Ensemble(predictors)
    # The last weights of a fold are not chosen by the cases that it held out.
    is_unseen = together.weights == FOLD_WEIGHTS and split == "val" and all(folds)
    if split != UNTOUCHED and not is_unseen:
        say(f"warning: {warning(split)}")
    for words in dict.fromkeys(postprocessing.words for postprocessing in rules):
        say(f"post-processing: {words}")
    say(*note_lines(_notes(store, split, configs)))
    with locked(folder, "evaluation"):
        scores = evaluate_split(
            predictor,
            store,
            split,
            out,
            weights=together.weights,
            tolerance_mm=options.tolerance,
            about=about,
            postprocessing=rules[0],
            held_out=answers_of,
            evidence=options.evidence,
        )
    if options.json:
        print(json.dumps(scores, indent=1))
    else:
        _print_scores(scores, held_out)
    say(f"written: {path}")
    return 0


def _folder_for_scores(options: Options, together: RunSet) -> Path:
    """The folder that evaluation/ is in. Raises InputError if several runs need a name for it, and
    if it is where `train --folds` keeps its scores."""
    if options.out:
        out = options.out.resolve()
    elif together.folder:
        out = together.folder
    elif len(together.runs) == 1:
        out = together.runs[0]
    else:
        rule = f"--out must name a folder for the scores of {len(together.runs)} runs together"
        raise InputError(f"{rule}, got none; add it")
    if out == together.folder and options.split != UNTOUCHED:
        rule = f"--out must name another folder than that of folds for split {options.split}"
        raise InputError(f"{rule}, got {out}, where `train --folds` keeps its scores; choose one")
    return out


def evaluate_split(
    predictor: Any,
    store: Store,
    split: str,
    run_dir: Path,
    *,
    weights: str = "best",
    tolerance_mm: float = TOLERANCE_MM,
    about: Optional[Mapping[str, Any]] = None,
    postprocessing: PostProcessing = RAW,
    held_out: Optional[Mapping[str, Answers]] = None,
    evidence: bool = False,
) -> Dict[str, Any]:
    """Predict and score every case of `split`, one in memory at a time; returns the content of
    scores.json.

    `predictor` comes from `load_predictor`; a case of `held_out` has its own, and its own
    post-processing. For a run of a fold `store` is the fold's view. `about`, the `origin`, is by
    default that of the run in `run_dir`. Predictions and scores replace earlier ones only when all
    cases are done: an error or Ctrl-C leaves those whole.

    Raises InputError when the split has no cases or one without a label, when the store's channels
    or labels are not the run's, and when the network's answer is not finite."""
    records = _cases_to_score(predictor, store, split)
    if about is None:
        about = origin([run_dir], [load_config(run_dir)], [predictor])
    cases = []
    with replace_files(scores_path(run_dir, split).parent, FILES) as folder:
        (folder / PREDICTIONS).mkdir()
        with bar(f"evaluate {split}", total=len(records)) as advance:
            for record in records:
                answers = (predictor, postprocessing)
                if held_out:
                    answers = held_out[record.case_id]
                labels = folder / PREDICTIONS
                cases.append(_score(answers, store, record, tolerance_mm, labels, evidence))
                advance()
        regions = predictor.regions
        manifest = store.manifest
        meanings = code_meanings(regions, predictor.labels)
        content = {
            "schema": SCHEMA,
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "run": str(run_dir),
            **about,
            "weights": weights,
            "tolerance_mm": tolerance_mm,
            "store": str(store.folder),
            "name": manifest.name,
            "split": split,
            "untouched": split == UNTOUCHED,
            "split_hash": manifest.split_hash,
            "regions": {name: list(codes) for name, codes in regions.items()},
            "label_codes": {str(code): name for code, name in meanings.items()},
            "peak_rss_bytes": peak_rss_bytes(),
            **of_cases(cases),
        }
        write_json(folder / "scores.json", content)
    return content


def _score(
    predicting: Answers,
    store: Store,
    record: CaseRecord,
    tolerance_mm: float,
    predictions: Path,
    evidence: bool,
) -> Dict[str, Any]:
    """Write the label map of a case into `predictions`; returns its entry in scores.json."""
    begin = time.monotonic()
    predictor, postprocessing = predicting
    answers = predictor.probabilities(store.image(record.case_id), record)
    steps_mm = ras_steps_mm(record.geometry)
    label = postprocessing.paint(answers, predictor.regions, steps_mm)
    predicted = time.monotonic()
    truth = np.asarray(store.truth(record.case_id))
    ignored = ignored_voxels(truth, store.manifest.ignore)
    regions = {}
    for name, codes in predictor.regions.items():
        masks = region_mask(truth, codes), region_mask(label, codes)
        regions[name] = score_region(*masks, steps_mm, tolerance_mm, ignored)
    write_volume(predictions / f"{record.case_id}.nii.gz", label, record.geometry)
    more = {}
    if evidence:
        gathered = gather(answers, truth, predictor.regions, steps_mm, ignored)
        more["evidence"] = dataclasses.asdict(gathered)
    return {
        "case_id": record.case_id,
        "mean_dice": float(np.mean([scores["dice"] for scores in regions.values()])),
        "predict_s": round(predicted - begin, 3),
        "score_s": round(time.monotonic() - predicted, 3),
        "postprocessing": postprocessing.words,
        "regions": regions,
        **more,
    }


def _print_scores(scores: Mapping[str, Any], held_out: Mapping[str, Sequence[str]]) -> None:
    """The summary as a table, the worst cases, and the mean Dice of each fold on the cases that it
    has held out."""
    new_console().print(scores_table(scores))
    dice = {case["case_id"]: case["mean_dice"] for case in scores["cases"]}
    if len(dice) > 1:
        worst = ", ".join(f"{case['case_id']} {case['mean_dice']:.3f}" for case in scores["worst"])
        say(f"worst by mean Dice: {worst}", stderr=False)
    if held_out:
        means = []
        for fold, ids in held_out.items():
            mean = np.mean([dice[case_id] for case_id in ids])
            means.append(f"{fold} {mean:.3f}")
        text = "mean Dice of each fold on the cases it held out"
        say(f"{text}: {', '.join(means)}", stderr=False)


def _rules_for(
    together: RunSet, split: str, is_crossed: bool, *, raw: bool
) -> List[PostProcessing]:
    """The post-processing of each run, if folds are cross-validated, or of their joint answer."""
    runs = together.runs
    if raw:
        return [RAW] * len(runs)
    if together.folder and split != UNTOUCHED:
        return [PostProcessing(off="decided on these very cases")] * len(runs)
    if not is_crossed:
        return [postprocessing_together(together)]
    pairs = zip(runs, together.configs)
    return [postprocessing_of(run, config, together.weights) for run, config in pairs]


def _notes(store: Store, split: str, configs: Sequence[RunConfig]) -> Dict[str, List[str]]:
    """Case id -> what is unusual about it."""
    notes = {}
    manifest = store.manifest
    channels = manifest.channels
    units = unit_notes(manifest.cases, channels)
    for record in store.cases(split):
        notes[record.case_id] = [
            *case_notes(record, channels, manifest.ignore),
            *units.get(record.case_id, ()),
            *training_notes(record, configs),
        ]
    return notes


def _held_out(store: Store, folds: Sequence[str], split: str) -> Dict[str, Sequence[str]]:
    """Fold -> the case ids it held out, if folds are cross-validated. Raises InputError for their
    training cases."""
    if len(folds) == 1 or not any(folds) or split == UNTOUCHED:
        return {}
    if split == "train":
        rule = f"--split must be test or val for {len(folds)} folds"
        raise InputError(f"{rule}, got train, which differs by fold; choose one")
    return {fold: with_fold(store, fold).manifest.split["val"] for fold in folds}


def _check_replaceable(path: Path, out: Path, together: RunSet) -> None:
    """Raise InputError for files that no `evaluate` of these runs has written; in the folders of
    the runs themselves they are their own."""
    if out in (*together.runs, together.folder):
        return
    present = [path.with_name(name) for name in FILES if path.with_name(name).exists()]
    is_cut_off = path.with_name(OLD).is_dir()  # while it replaced its own
    try:
        scores = read_scores(path)
        theirs = sorted(str(origin.get("run")) for origin in scores.get("runs", [scores]))
    except InputError:
        theirs = []
    if present and not is_cut_off and theirs != sorted(map(str, together.runs)):
        rule = f"{present[0]} must be by `evaluate` of the runs that are named, to be replaced"
        got = f"scores of {listed(theirs)}" if theirs else "no scores of `evaluate`"
        raise InputError(f"{rule}, got {got}; choose another --out, or move it away")


def _cases_to_score(predictor: Any, store: Store, split: str) -> Tuple[CaseRecord, ...]:
    manifest = store.manifest
    records = store.cases(split)
    own = (tuple(predictor.channels), dict(predictor.labels))
    stored = (tuple(manifest.channels), dict(manifest.labels))
    if own != stored:
        rule = f"store {store.folder} must have the run's channels and labels {own}, got {stored}"
        raise InputError(f"{rule}; name the run's own store")
    if not records:
        filled = [name for name in SPLITS if manifest.split[name]]
        rule = f'split "{split}" of store {store.folder} must hold cases, got none'
        raise InputError(f"{rule}; choose --split {' or '.join(filled)}")
    where = f"store {store.folder}"
    raise_if_any(
        f"case {record.case_id} must have a label to be scored, got none in {where}; "
        "`predict` needs none"
        for record in records
        if not record.has_label
    )
    return records

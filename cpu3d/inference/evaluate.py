"""Score a trained network on cases it has never seen, on their full original grid.

    ./run.sh evaluate --run runs/first
    ./run.sh evaluate --run runs/first --split val --tolerance 2 --json
    ./run.sh evaluate --run runs/folds

Writes run/evaluation/scores.json and run/evaluation/predictions/<case_id>.nii.gz; for the splits
"val" and "train", whose scores say less, the same below run/evaluation/val and
run/evaluation/train. Earlier scores are replaced only when all cases are scored, and in --out never
those of other runs. --out names another folder than the run's; several runs together need it.

Several runs predict together, as in `predict`, by the mean of their probabilities; folds only on
"test". `train --folds` scores each other case by the fold that has not trained on it.

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

from cpu3d.data.cases.notes import note_lines, notes_of_store
from cpu3d.data.labels import code_meanings, ignored_voxels, region_mask
from cpu3d.data.manifest import CaseRecord
from cpu3d.data.nifti import ras_steps_mm, write_volume
from cpu3d.data.split import SPLITS
from cpu3d.data.store import Store
from cpu3d.errors import InputError, raise_if_any
from cpu3d.host.memory import peak_rss_bytes
from cpu3d.inference.answers import Answers
from cpu3d.inference.ensemble import Ensemble, origin, trained_predictors
from cpu3d.inference.forecast import SCORED_BYTES, Forecaster, forecaster_of
from cpu3d.inference.postprocessing.evidence import gather
from cpu3d.inference.postprocessing.rules import RAW, PostProcessing
from cpu3d.inference.postprocessing.run_rules import postprocessing_together
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
    ranked,
    read_scores,
    scores_path,
    scores_table,
    summary_fields,
    warning,
)
from cpu3d.run.config_json import load_config
from cpu3d.run.folds import WEIGHTS as FOLD_WEIGHTS
from cpu3d.settings import RunConfig
from cpu3d.util.atomic import check_folder, replace_files, writable_folder, write_json
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


WORST = 5  # cases that are named
OPTIONS = (RunOptions, Options, Inference)


def run(chosen: RunOptions, options: Options, inference: Inference) -> int:
    split = options.split
    together = open_runs(chosen)
    runs = together.runs
    configs = together.configs
    out = _folder_for_scores(options, together)
    store = store_of_run(configs[0], options.store)
    folds = [config.fold for config in configs]
    if split != UNTOUCHED and (together.folder or len(runs) > 1) and any(folds):
        raise InputError(
            f"--split must be {UNTOUCHED} for folds together, got {split}; `train --folds` scores "
            "each case by the fold that held it out"
        )
    rules = RAW if chosen.raw else postprocessing_together(together)
    path = scores_path(out, split)
    check_folder(path.parent, "evaluation")
    _check_replaceable(path, out, together)
    _check_filled(store, split)
    predictors = trained_predictors(runs, together.weights, inference)
    predictor = Ensemble(predictors)
    folder = writable_folder(path.parent, "evaluation")
    # The last weights of a fold are not chosen by the cases that it held out.
    is_unseen = together.weights == FOLD_WEIGHTS and split == "val" and all(folds)
    if split != UNTOUCHED and not is_unseen:
        say(f"warning: {warning(split)}")
    say(f"post-processing: {rules.words}", *note_lines(_notes(store, split, configs)))
    with locked(folder, "evaluation"):
        scores = evaluate_split(
            predictor,
            store,
            split,
            out,
            weights=together.weights,
            tolerance_mm=options.tolerance,
            about=origin(runs, configs, predictors),
            postprocessing=rules,
            evidence=options.evidence,
            forecaster=forecaster_of(predictors, inference, SCORED_BYTES),
        )
    if options.json:
        print(json.dumps(scores, indent=1))
    else:
        new_console().print(scores_table(scores))
        worst = ranked(scores["cases"])[:WORST]
        names = ", ".join(f"{case['case_id']} {case['mean_dice']:.3f}" for case in worst)
        say(f"worst by mean Dice: {names}", stderr=False)
    say(f"written: {path}")
    return 0


def _folder_for_scores(options: Options, together: RunSet) -> Path:
    """The folder that evaluation/ is in. Raises InputError if several runs need a name for it."""
    out = options.out or together.folder
    if out is None:
        out, *others = together.runs
        if others:
            raise InputError("--out must name a folder for the scores of several runs; add it")
    return out.resolve()


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
    evidence: bool = False,
    forecaster: Optional[Forecaster] = None,
) -> Dict[str, Any]:
    """Predict and score every case of `split`, one in memory at a time; returns the content of
    scores.json.

    `predictor` comes from `load_predictor`. For a run of a fold `store` is the fold's view.
    `about`, the `origin`, is by default that of the run in `run_dir`. Predictions and scores
    replace earlier ones only when all cases are done: an error or Ctrl-C leaves those whole.

    A `forecaster` prints what the largest case takes, and says which are answered in windows.

    Raises InputError when the split has no cases or one without a label, when the store's channels
    or labels are not the run's, and when the network's answer is not finite."""
    records = _cases_to_score(predictor, store, split)
    if about is None:
        about = origin([run_dir], [load_config(run_dir)], [predictor])
    regions = predictor.regions
    in_windows = set()
    if forecaster:
        forecasts = {record.case_id: forecaster.forecast(record) for record in records}
        in_windows = {case_id for case_id, made in forecasts.items() if made.in_windows}
        most = max(forecasts, key=lambda case_id: forecasts[case_id].peak_bytes)
        say(f"at most, {most}: {forecasts[most]}")
    cases = []
    with replace_files(scores_path(run_dir, split).parent, FILES) as folder:
        (folder / PREDICTIONS).mkdir()
        with bar(f"evaluate {split}", total=len(records)) as advance:
            for record in records:
                begin = time.monotonic()
                image = store.image(record.case_id)
                is_slid = record.case_id in in_windows
                answers = predictor.probabilities(image, record, in_windows=is_slid)
                label = postprocessing.paint(answers, regions, ras_steps_mm(record.geometry))
                write_volume(
                    folder / PREDICTIONS / f"{record.case_id}.nii.gz", label, record.geometry
                )
                predict_s = round(time.monotonic() - begin, 3)
                scores = _score(answers, label, regions, store, record, tolerance_mm, evidence)
                cases.append(
                    {"predict_s": predict_s, "postprocessing": postprocessing.words, **scores}
                )
                if is_slid:
                    cases[-1]["in_windows"] = True
                del answers  # else they are in memory while the next case is predicted
                advance()
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
            **summary_fields(cases),
        }
        write_json(folder / "scores.json", content)
    return content


def _score(
    answers: Answers,
    label: np.ndarray,
    regions: Mapping[str, Sequence[int]],
    store: Store,
    record: CaseRecord,
    tolerance_mm: float,
    evidence: bool,
) -> Dict[str, Any]:
    """Score the label painted from a case's probabilities; returns its entry in scores.json."""
    begin = time.monotonic()
    steps_mm = ras_steps_mm(record.geometry)
    truth = np.asarray(store.truth(record.case_id))
    ignored = ignored_voxels(truth, store.manifest.ignore)
    scores = {}
    for name, codes in regions.items():
        masks = region_mask(truth, codes), region_mask(label, codes)
        scores[name] = score_region(*masks, steps_mm, tolerance_mm, ignored)
    more = {}
    if evidence:
        gathered = gather(answers, truth, regions, steps_mm, ignored)
        more["evidence"] = dataclasses.asdict(gathered)
    return {
        "case_id": record.case_id,
        "mean_dice": float(np.mean([region["dice"] for region in scores.values()])),
        "score_s": round(time.monotonic() - begin, 3),
        "regions": scores,
        **more,
    }


def _notes(store: Store, split: str, configs: Sequence[RunConfig]) -> Dict[str, List[str]]:
    """Case id -> what is unusual about it."""
    notes = notes_of_store(store.manifest)
    return {
        record.case_id: [*notes[record.case_id], *training_notes(record, configs)]
        for record in store.cases(split)
    }


def _check_replaceable(path: Path, out: Path, together: RunSet) -> None:
    """Raise InputError for files that no `evaluate` of these runs has written; in the folders of
    the runs themselves they are their own."""
    if out in (*together.runs, together.folder):
        return
    present = [path.with_name(name) for name in FILES if path.with_name(name).exists()]
    try:
        scores = read_scores(path)
        theirs = sorted(str(origin.get("run")) for origin in scores.get("runs", [scores]))
    except InputError:
        theirs = []
    if present and theirs != sorted(map(str, together.runs)):
        got = f"scores of {listed(theirs)}" if theirs else "no scores of `evaluate`"
        raise InputError(
            f"{present[0]} must be by `evaluate` of the runs that are named, to be replaced, got "
            f"{got}; choose another --out, or move it away"
        )


def _check_filled(store: Store, split: str) -> None:
    """Raise InputError for a split without cases."""
    if not store.manifest.split[split]:
        filled = [name for name in SPLITS if store.manifest.split[name]]
        raise InputError(
            f'split "{split}" of store {store.folder} must hold cases, got none; choose --split '
            f"{' or '.join(filled)}"
        )


def _cases_to_score(predictor: Any, store: Store, split: str) -> Tuple[CaseRecord, ...]:
    manifest = store.manifest
    records = store.cases(split)
    own = (tuple(predictor.channels), dict(predictor.labels))
    stored = (tuple(manifest.channels), dict(manifest.labels))
    if own != stored:
        raise InputError(
            f"store {store.folder} must have the run's channels and labels {own}, got {stored}; "
            "name the run's own store"
        )
    _check_filled(store, split)
    raise_if_any(
        f"case {record.case_id} must have a label to be scored, got none in store {store.folder}; "
        "`predict` needs none"
        for record in records
        if not record.has_label
    )
    return records

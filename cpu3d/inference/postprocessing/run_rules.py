"""Chooses the post-processing of a run, or of a folder of folds, on cases that were not trained on,
and keeps it there.

rules = choose_rules(run)                       # writes run/postprocessing.json
chosen = postprocessing_of(run, config)         # as chosen, or off and why
label = chosen.paint(probabilities, regions, spacing_mm)
choose_rules_of_folds(folder, evidences)        # of folds, on the cases that they held out
"""

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.labels import ignored_voxels
from cpu3d.data.manifest import CaseRecord
from cpu3d.data.nifti import ras_steps_mm
from cpu3d.data.store import Store
from cpu3d.errors import InputError, fault_of
from cpu3d.inference.ensemble import trained_predictors
from cpu3d.inference.postprocessing.choice import Choice, best_rules
from cpu3d.inference.postprocessing.evidence import Evidence, Scores, gather
from cpu3d.inference.postprocessing.rules import PostProcessing, Regions, common_rules
from cpu3d.inference.runs import Inference, RunSet, store_of_run
from cpu3d.run.checkpoint import POSTPROCESSING, weights_file
from cpu3d.run.config_json import load_config
from cpu3d.run.folds import WEIGHTS, trained_folds
from cpu3d.run.heartbeat import DECIDING
from cpu3d.run.log import last_end
from cpu3d.run.rules import SCHEMA, has_rules, weights_hashes
from cpu3d.settings import LEAST_CASES, RunConfig
from cpu3d.training.heartbeat_writer import HeartbeatWriter
from cpu3d.util.atomic import write_json
from cpu3d.util.lock import locked
from cpu3d.util.progress import bar, say
from memory_estimator.common.files import read_record, typed
from memory_estimator.common.units import format_seconds

FILE = POSTPROCESSING
# Why a trained run has no rules of its weights.
OPEN = "its post-processing is not decided, though its steps are done"
LACKS_STORE = (
    "its post-processing is off: it is not decided, and the store that it was trained on is not "
    "there, or has another split"
)

CaseScores = Dict[str, Dict[str, Scores]]  # case id -> region, the largest first -> its scores


@dataclass(frozen=True)
class PostprocessingRules(Choice):
    """The content of postprocessing.json. Means are empty if cases were too few."""

    weights_sha256: Tuple[str, ...]  # of the run's best weights, or the last ones of each fold
    split_hash: str
    cases: int  # labelled cases that it is decided on


def read_rules(run: Path) -> Optional[PostprocessingRules]:
    """Read the rules of a run or of a folder of folds, of its present weights or earlier ones; None
    if it has none. Raises InputError for a postprocessing.json that is damaged or of another
    version."""
    path = Path(run) / FILE
    if not path.exists():
        return None

    def checked(content: Dict[str, Any]) -> PostprocessingRules:
        rules: PostprocessingRules = typed(content, PostprocessingRules)
        if set(rules.before) != set(rules.after) or not set(rules.before) <= set(rules.cases_with):
            raise ValueError("means before and after that are not of the same regions")
        return rules

    todo = "delete it and repeat the run's `train`, which decides again"
    return read_record(path, SCHEMA, checked, todo, InputError)


def postprocessing_of(run: Path, config: RunConfig, weights: str = "best") -> PostProcessing:
    """The post-processing of a run with its "best" or "last" weights. Raises InputError as
    `read_rules`."""
    return _applied(run, [run], config, weights, "best")


def postprocessing_together(together: RunSet) -> PostProcessing:
    """The post-processing of what runs answer together: the rules of a folder of folds, or those
    that other runs have in common. Raises InputError as `read_rules`."""
    weights = together.weights
    if together.folder:
        config = together.configs[0]
        return _applied(together.folder, together.runs, config, weights, WEIGHTS)
    pairs = zip(together.runs, together.configs)
    return common_rules([postprocessing_of(run, config, weights) for run, config in pairs])


def _applied(
    folder: Path, runs: Sequence[Path], config: RunConfig, weights: str, usual_weights: str
) -> PostProcessing:
    """The rules in a folder, of these runs with their `usual_weights`; or off, and why."""
    if weights != usual_weights:
        return PostProcessing(
            off=f"decided with the {usual_weights} weights, these are the {weights}"
        )
    rules = read_rules(folder)
    wanted = (config.split_hash, weights_hashes(runs, weights))
    if rules is None or (rules.split_hash, rules.weights_sha256) != wanted:
        return PostProcessing(
            off="not decided for these weights and this split; repeat the `train` that made them"
        )
    return rules.chosen


def why_without_rules(run: Path, config: RunConfig) -> str:
    """OPEN or LACKS_STORE for a trained run that has no rules of its present weights; "" for one
    that has."""
    if has_rules(run, config.split_hash):
        return ""
    try:
        store_of_run(config)
    except (InputError, OSError):
        return LACKS_STORE
    return OPEN


def choose_rules(run: Path, store_folder: Optional[Path] = None) -> PostprocessingRules:
    """Choose the post-processing of a trained run on its labelled validation cases, one in memory
    at a time, and write it into the run. Rules of the present weights are returned as they are.
    Raises InputError as `trained_predictors` and `store_of_run`, and if another process writes to
    the run."""
    with locked(Path(run), "run"):
        return _choose_rules(Path(run), store_folder)


def _choose_rules(run: Path, store_folder: Optional[Path]) -> PostprocessingRules:
    """As `choose_rules`, in a folder that this process has locked."""
    config = load_config(run)
    weights_file(run, "best")
    kept = read_rules(run) if has_rules(run, config.split_hash) else None
    if kept:
        return kept
    hashes = weights_hashes([run])
    store = store_of_run(config, store_folder)
    bare = set(store.manifest.unlabelled)
    ids = [case_id for case_id in store.manifest.split["val"] if case_id not in bare]
    records = [store.case(case_id) for case_id in ids]
    regions = config.codes_by_region
    cases_with = {
        name: sum(not record.label_voxels.keys().isdisjoint(codes) for record in records)
        for name, codes in regions.items()
    }
    if max(cases_with.values()) < LEAST_CASES:  # no network need be asked
        off = f"no region is in {LEAST_CASES} labelled validation cases"
        choice = Choice(PostProcessing(off=off), {}, {}, cases_with)
    else:
        (predictor,) = trained_predictors([run], "best", Inference(device=config.device))
        choice = best_rules(_gathered(predictor, store, records), regions, alone=True)
    return _write_rules(run, hashes, config, len(records), choice)


def _write_rules(
    folder: Path, hashes: Tuple[str, ...], config: RunConfig, cases: int, choice: Choice
) -> PostprocessingRules:
    rules = PostprocessingRules(*vars(choice).values(), hashes, config.split_hash, cases)
    write_json(folder / FILE, {"schema": SCHEMA, **dataclasses.asdict(rules)})
    return rules


def _gathered(predictor: Any, store: Store, records: Sequence[CaseRecord]) -> List[Evidence]:
    """The evidence of each of these cases, which are predicted one at a time."""
    evidences = []
    with bar("post-processing", total=len(records)) as advance:
        for record in records:
            answers = predictor.probabilities(store.image(record.case_id), record)
            truth = np.asarray(store.truth(record.case_id))
            steps_mm = ras_steps_mm(record.geometry)
            ignored = ignored_voxels(truth, store.manifest.ignore)
            evidences.append(gather(answers, truth, predictor.regions, steps_mm, ignored))
            del answers  # else they are in memory while the next case is predicted
            advance()
    return evidences


def choose_rules_after_training(run: Path, store_folder: Path, heartbeat: HeartbeatWriter) -> None:
    """Decide for a run whose last step is done, in the process that has locked its folder, and
    print the choice, or why there is none: the run is whole in any case. Raises KeyboardInterrupt
    with nothing decided."""
    begin = time.perf_counter()
    try:
        step = last_end(run).get("step", 0)
        heartbeat.phase(DECIDING, step=step, steps=step)
        line = _choose_rules(run, store_folder).chosen.words
    except Exception as error:  # also TensorFlow's own
        why = fault_of(error) if isinstance(error, OSError) else str(error)
        why = why or type(error).__name__
        heartbeat.note_end(f"post-processing could not be decided, {why}")
        line = f"off: it could not be decided, {why}; repeat the same command"
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "the run is complete, its post-processing is not decided; the same command decides it"
        ) from None
    say(f"post-processing, {format_seconds(time.perf_counter() - begin)}: {line}")


def choose_rules_of_folds(folder: Path, evidences: Sequence[Evidence]) -> PostprocessingRules:
    """Decide the post-processing of a folder's trained folds together on the evidence of at least
    one case, and write it into the folder."""
    runs = list(trained_folds(folder).values())
    config = load_config(runs[0])
    choice = best_rules(evidences, config.codes_by_region)
    return _write_rules(folder, weights_hashes(runs, WEIGHTS), config, len(evidences), choice)


def cross_fitted(
    evidences: Mapping[str, Mapping[str, Evidence]],
    regions: Regions,
) -> Tuple[CaseScores, CaseScores]:
    """Fold -> case id -> evidence, of at least two folds, as the scores of each case before and
    after the rules that the cases of the other folds decide."""
    before: CaseScores = {}
    after: CaseScores = {}
    for fold, cases in evidences.items():
        others = [
            evidence
            for other, held_out in evidences.items()
            if other != fold
            for evidence in held_out.values()
        ]
        chosen = best_rules(others, regions).chosen
        for case_id, evidence in cases.items():
            before[case_id] = evidence.scores(PostProcessing(), regions)
            after[case_id] = evidence.scores(chosen, regions)
    return before, after

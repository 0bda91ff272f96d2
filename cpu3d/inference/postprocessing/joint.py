"""The post-processing of folds together, decided on the cases that each of them held out.

decision = decide_jointly(folder, evidences)        # writes folder/postprocessing.json
chosen = postprocessing_together(answering(options))
before, after = cross_fitted(evidences, regions)    # on cases that did not decide them
"""

import dataclasses
import hashlib
from pathlib import Path
from typing import Dict, List, Mapping, Sequence, Tuple

from cpu3d.data.files.arrays import file_sha256
from cpu3d.errors import InputError
from cpu3d.inference.postprocessing.choice import decide_from
from cpu3d.inference.postprocessing.decision import (
    FILE,
    Decision,
    postprocessing_of,
    read_decision,
)
from cpu3d.inference.postprocessing.evidence import Evidence, Scores
from cpu3d.inference.postprocessing.rules import PostProcessing, Regions, gentlest
from cpu3d.inference.runs import Answering
from cpu3d.run.checkpoint import weights_file
from cpu3d.run.config_json import load_config
from cpu3d.run.decided import SCHEMA
from cpu3d.run.folds import WEIGHTS, trained_folds
from cpu3d.util.atomic import write_json

CaseScores = Dict[str, Dict[str, Scores]]  # case id -> region, the largest first -> its scores


def decide_jointly(folder: Path, evidences: Sequence[Evidence]) -> Decision:
    """Decide the post-processing of a folder's trained folds together on the evidence of at least
    one case, and write it into the folder."""
    runs = list(trained_folds(folder).values())
    config = load_config(runs[0])
    choice = decide_from(evidences, config.codes_by_region)
    decision = Decision(
        weights_sha256=_digest(runs, WEIGHTS),
        split_hash=config.split_hash,
        cases=len(evidences),
        chosen=choice.chosen,
        before=choice.before,
        after=choice.after,
        cases_with=choice.cases_with,
    )
    write_json(Path(folder) / FILE, {"schema": SCHEMA, **dataclasses.asdict(decision)})
    return decision


def postprocessing_together(answering: Answering) -> PostProcessing:
    """The post-processing of what runs answer together: for a folder of folds as their cases
    decided, for other runs what each of them decided. Raises InputError as `read_decision`."""
    runs = answering.runs
    folder = answering.folder
    if folder is None:
        pairs = zip(runs, answering.configs)
        weights = answering.weights
        return gentlest([postprocessing_of(run, config, weights) for run, config in pairs])
    again = "repeat its `train --folds`"
    decision = read_decision(folder, answering.configs[0])
    if decision is None:
        return PostProcessing(off=f"not decided; {again}")
    if answering.weights != WEIGHTS:
        return PostProcessing(
            off=f"decided with the {WEIGHTS} weights, these are the {answering.weights}",
        )
    try:
        digest = _digest(runs, WEIGHTS)
    except (InputError, OSError):
        digest = ""  # reported where the weights are read
    if (decision.weights_sha256, decision.split_hash) != (digest, answering.configs[0].split_hash):
        return PostProcessing(off=f"decided with other weights or another split; {again}")
    return decision.chosen


def cross_fitted(
    evidences: Mapping[str, Mapping[str, Evidence]],
    regions: Regions,
) -> Tuple[CaseScores, CaseScores]:
    """Fold -> case id -> evidence, of at least two folds, as the scores of each case before and
    after the rules that the cases of the other folds decide."""
    before: CaseScores = {}
    after: CaseScores = {}
    for fold, cases in evidences.items():
        others: List[Evidence] = []
        for other, of_other in evidences.items():
            if other != fold:
                others += of_other.values()
        chosen = decide_from(others, regions).chosen
        for case_id, evidence in cases.items():
            before[case_id] = evidence.scores(PostProcessing(), regions)
            after[case_id] = evidence.scores(chosen, regions)
    return before, after


def _digest(runs: Sequence[Path], weights: str) -> str:
    """One hash of the weights of all runs."""
    each = [file_sha256(weights_file(run, weights)) for run in runs]
    return hashlib.sha256(" ".join(each).encode()).hexdigest()

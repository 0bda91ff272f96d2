"""The post-processing of a run: decided on its validation cases, and kept with it.

decision = decide(run)                                  # writes run/postprocessing.json
chosen = postprocessing_of(run, config)                 # as decided, or off and why
label = chosen.paint(probabilities, regions, spacing_mm)
"""

import contextlib
import dataclasses
import enum
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from cpu3d.data.files.arrays import file_sha256
from cpu3d.data.labels import ignored_voxels
from cpu3d.data.manifest import CaseRecord
from cpu3d.data.nifti import ras_steps_mm
from cpu3d.data.store import Store
from cpu3d.errors import InputError, fault_of
from cpu3d.inference.ensemble import trained_predictors
from cpu3d.inference.postprocessing.choice import decide_from, too_few
from cpu3d.inference.postprocessing.evidence import Evidence, Means, gather
from cpu3d.inference.postprocessing.rules import PostProcessing, reasons
from cpu3d.inference.runs import Inference, store_of_run
from cpu3d.plan import read_plan
from cpu3d.run.checkpoint import POSTPROCESSING, weights_file
from cpu3d.run.config_json import load_config
from cpu3d.run.decided import SCHEMA, DecidedWith
from cpu3d.run.heartbeat import DECIDING
from cpu3d.run.log import last_end
from cpu3d.settings import LEAST_CASES, RunConfig
from cpu3d.training.pulse import Pulse
from cpu3d.util.atomic import write_json
from cpu3d.util.lock import locked
from cpu3d.util.progress import bar, say
from cpu3d.util.records import count
from memory_estimator.common.files import read_record, typed
from memory_estimator.common.units import format_seconds

FILE = POSTPROCESSING


@dataclass(frozen=True)
class Decision:
    """The content of postprocessing.json."""

    weights_sha256: str  # of the best weights, with which it was decided
    split_hash: str
    cases: int  # labelled validation cases
    chosen: PostProcessing
    before: Dict[str, Means]  # region -> means of the raw answers; empty if cases were too few
    after: Dict[str, Means]  # the same after `chosen`
    cases_with: Optional[Dict[str, int]] = None
    """Region -> validation cases that have it. None in a file of an earlier version, whose rules
    needed none."""
    weights_size_bytes: Optional[int] = None
    weights_mtime_ns: Optional[int] = None
    """Of the file of the best weights, as `DecidedWith` has them. None also for folds."""

    @property
    def decided_with(self) -> DecidedWith:
        return DecidedWith(
            self.weights_sha256, self.split_hash, self.weights_size_bytes, self.weights_mtime_ns
        )


class Standing(enum.Enum):
    """What a trained run's post-processing is, in words."""

    DECIDED = "decided with the present weights"
    EARLIER = "off, as an earlier version has decided it"  # whose rules are not applied
    OPEN = "not decided, though its steps are done"
    BEFORE = "off, as an earlier version has decided nothing"  # which did not do so at the end
    LACKS_STORE = (
        "off: it is not decided, and the store that it was trained on is not there, or has another "
        "split"
    )


def read_decision(run: Path, config: RunConfig) -> Optional[Decision]:
    """The run's decision, with its present weights or earlier ones; None if it has none. Raises
    InputError for a postprocessing.json that is damaged, of another version or of other regions."""
    path = Path(run) / FILE
    if not path.exists():
        return None

    def checked(content: Dict[str, Any]) -> Decision:
        decision = typed(content, Decision)
        chosen = decision.chosen
        before = set(decision.before)
        named = {*before, *chosen.rules, *chosen.without, *(decision.cases_with or {})}
        is_whole = before == set(decision.after) and all(chosen.rules.values())
        if not is_whole or not named <= set(config.regions):
            raise ValueError(f"means or rules of other regions than {', '.join(config.regions)}")
        return decision

    return read_record(
        path,
        SCHEMA,
        checked,
        "delete it and repeat the run's `train`, which decides again",
        InputError,
    )


def postprocessing_of(run: Path, config: RunConfig, weights: str = "best") -> PostProcessing:
    """The post-processing of a run with its "best" or "last" weights. Raises InputError as
    `read_decision`."""
    decision = read_decision(run, config)
    if decision is None:
        return PostProcessing(off="not decided; repeat the run's `train`")
    if weights != "best":
        return PostProcessing(off=f"decided with the best weights, these are the {weights}")
    is_present = False
    with contextlib.suppress(InputError, OSError):  # reported where the weights are read
        is_present = decision.decided_with.is_of(run, config.split_hash)
    if not is_present:
        return PostProcessing(
            off="decided with other weights or another split; repeat the run's `train`"
        )
    if decision.cases_with is None:
        rule = "decided by an earlier version, whose rules needed no case that has the region"
        return PostProcessing(off=f"{rule}; repeat the run's `train`, which decides again")
    return decision.chosen


def standing_of(run: Path, config: RunConfig) -> Standing:
    """What is decided of a trained run. The weights are read only if their file is another than
    the decision has noted."""
    try:
        decision = read_decision(run, config)
        if decision is not None and decision.decided_with.is_of(run, config.split_hash):
            return Standing.EARLIER if decision.cases_with is None else Standing.DECIDED
    except (InputError, OSError):
        pass  # damaged, or without weights: the run's `train` makes both again
    try:
        store_of_run(config)
    except (InputError, OSError):
        return Standing.LACKS_STORE
    # Only a version that decides plans on how many cases.
    course = read_plan(run).get("course")
    decides = isinstance(course, dict) and "decided" in course
    if decides or (Path(run) / FILE).exists():
        return Standing.OPEN
    return Standing.BEFORE


def decide(run: Path, store_folder: Optional[Path] = None) -> Decision:
    """Decide the post-processing of a trained run on its labelled validation cases, one in memory
    at a time, and write it into the run. A decision of this version with the present weights is
    returned as it is. Raises InputError as `trained_predictors` and `store_of_run`, and if another
    process writes to the run."""
    run = Path(run)
    with locked(run, "run"):
        return _decide(run, store_folder)


def _decide(run: Path, store_folder: Optional[Path]) -> Decision:
    """As `decide`, in a folder that this process has locked."""
    config = load_config(run)
    weights = weights_file(run, "best")
    status = weights.stat()
    kept = _kept(run, config, status)
    if kept is not None:
        return kept
    digest = file_sha256(weights)
    store = store_of_run(config, store_folder)
    bare = set(store.manifest.unlabelled)
    ids = [case_id for case_id in store.manifest.split["val"] if case_id not in bare]
    records = store.cases("val").chosen(ids)  # read one at a time
    regions = config.codes_by_region
    cases_with = {
        name: sum(not record.label_voxels.keys().isdisjoint(codes) for record in records)
        for name, codes in regions.items()
    }
    if max(cases_with.values()) < LEAST_CASES:  # no network need be asked
        few = {name: too_few(number) for name, number in cases_with.items()}
        off = reasons(few) if len(records) >= LEAST_CASES else too_few(len(records))
        chosen = PostProcessing(off=off, without=few)
        before: Dict[str, Means] = {}
        after: Dict[str, Means] = {}
    else:
        (predictor,) = trained_predictors([run], "best", Inference(device=config.device))
        evidences = _gathered(predictor, store, records)
        choice = decide_from(evidences, regions, alone=True)
        chosen = choice.chosen
        before = choice.before
        after = choice.after
    decision = Decision(
        weights_sha256=digest,
        split_hash=config.split_hash,
        cases=len(records),
        chosen=chosen,
        before=before,
        after=after,
        cases_with=cases_with,
        weights_size_bytes=status.st_size,
        weights_mtime_ns=status.st_mtime_ns,
    )
    _write(decision, run)
    return decision


def _kept(run: Path, config: RunConfig, weights: os.stat_result) -> Optional[Decision]:
    """The run's decision, if it is of this version and with its present weights."""
    try:
        decision = read_decision(run, config)
    except InputError:
        return None  # damaged: decided again
    if decision is None or decision.cases_with is None:
        return None
    if not decision.decided_with.is_of(run, config.split_hash):
        return None
    kept = dataclasses.replace(
        decision,
        weights_size_bytes=weights.st_size,
        weights_mtime_ns=weights.st_mtime_ns,
    )
    if kept != decision:  # of a copy, or by an earlier version: need not be hashed from now on
        _write(kept, run)
    return kept


def _write(decision: Decision, run: Path) -> None:
    write_json(run / FILE, {"schema": SCHEMA, **dataclasses.asdict(decision)})


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


def decide_after_training(run: Path, store_folder: Path, pulse: Pulse) -> None:
    """Decide for a run whose last step is done, in the process that has locked its folder, and
    print the choice, or why there is none: the run is whole in any case. Raises KeyboardInterrupt
    with nothing decided."""
    begin = time.perf_counter()
    pulse.phase(DECIDING)
    try:
        step = last_end(run).get("step", 0)
        pulse.phase(DECIDING, step=step, steps=step)  # an early stop has taken fewer
        line = _in_words(_decide(run, store_folder))
    except Exception as error:  # also TensorFlow's own
        why = _why(error)
        pulse.note_end(f"post-processing could not be decided, {why}")
        line = f"off: it could not be decided, {why}; repeat the same command"
    except KeyboardInterrupt:
        done = "the run is complete, its post-processing is not decided"
        raise KeyboardInterrupt(f"{done}; the same command decides it") from None
    say(f"post-processing, {format_seconds(time.perf_counter() - begin)}: {line}")


def _in_words(decision: Decision) -> str:
    """The choice, and what it changes."""
    if decision.chosen.off:
        return decision.chosen.words
    pairs = zip(decision.before.items(), decision.after.values())
    changes = ", ".join(
        f"{name} {was.lesion_dice:.3f} -> {now.lesion_dice:.3f}" for (name, was), now in pairs
    )
    cases = count(decision.cases, "validation case")
    return f"{decision.chosen.words}; lesion-wise Dice {changes} on {cases}"


def _why(error: Exception) -> str:
    text = fault_of(error) if isinstance(error, OSError) else str(error)
    return text or type(error).__name__

"""Where a job comes from: a recipe by its name, the folder of a run, a store.

    source = source_job(args)               # of the options --recipe and --run
    job = job_from(args, source.job)        # with those that were given beside them

A run's plan is read as JSON: nothing of what has written it is imported. A store is planned by
`cpu3d.plan`, as `train` would."""

import argparse
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, TypedDict, Union

from memory_estimator.common.files import read_record, typed
from memory_estimator.installed import installed_engine
from memory_estimator.job import RECIPES, Job
from memory_estimator.training import Schedule
from models.strides import Shape3

PLAN_SCHEMA = 3  # version of plan.json, which `cpu3d.plan` writes into a run's folder
OTHERS = ("shape", "depth", "strides", "batch", "cases")
"""Options beside a run with which its steps are others than its plan has."""


@dataclass(frozen=True)
class JobSource:
    """The job of --recipe, --run or --store, and the training that it is a step of."""

    # None without them; of several workers all that they compute together
    job: Optional[Job] = None
    notes: Sequence[str] = ()  # on what an estimate of it does not count, a sentence each
    workers: int = 1  # of the run
    schedule: Schedule = field(default_factory=Schedule)
    strides_why: str = ""  # what the strides were decided by; "" if they were given
    grids: Optional[Sequence[Tuple[str, Shape3]]] = None
    """Smaller grids that it could have, each with its option, the smallest first; None for any."""


def source_job(args: argparse.Namespace) -> JobSource:
    """The source of a job, but for a store. Raises ValueError as `read_run`."""
    if hasattr(args, "recipe"):
        if hasattr(args, "run"):
            rule = "--recipe must come without --run, which has the settings"
            raise ValueError(f"{rule}, got both; leave one of them out")
        return JobSource(dataclasses.replace(RECIPES[args.recipe].job, engine=installed_engine()))
    if not hasattr(args, "run"):
        return JobSource()
    if hasattr(args, "spacing"):
        rule = "--spacing must come without --run, which has the strides"
        raise ValueError(f"{rule}, got both; leave one of them out")
    source = read_run(args.run)
    given = [name for name in OTHERS if hasattr(args, name)]
    if not given:
        return source
    note = f"a step alone is estimated, as --{given[0]} gives the run other steps"
    return dataclasses.replace(source, schedule=Schedule(), grids=None, notes=[*source.notes, note])


class _SavedPlan(TypedDict):
    """The fields of plan.json that the estimator reads."""

    workers: int
    config: Dict[str, Any]
    job: Job
    schedule: Schedule
    smaller_grids: Optional[List[Tuple[str, Shape3]]]


def _source_of_plan(content: Mapping[str, Any]) -> JobSource:
    """Check the plan of a run, whose job has all of its fields: defaults are not those of the
    run."""
    fields: Any = content.get("job")
    plan: _SavedPlan = typed(content, _SavedPlan, "plan")
    job = plan["job"]
    unet = {"strides": (), **fields.get("unet", {})}  # left out if all axes are halved
    if set(fields) != set(vars(job)) or set(unet) != set(vars(job.unet)):
        raise ValueError("a job without all of its fields")
    workers = plan["workers"]
    if workers < 1 or job.batch % workers:
        raise ValueError(f"{workers} workers for batches of {job.batch}")
    notes = []
    device = plan["config"]["device"]
    if device != "cpu":
        on_card = "`train` shows what its steps take on the card"
        notes.append(f"the run is on {device}: a CPU is estimated; {on_card}")
    return JobSource(job, notes, workers, plan["schedule"], grids=plan["smaller_grids"])


def read_run(folder: Union[str, Path]) -> JobSource:
    """The job of the run in `folder`, as its plan.json has it. Raises ValueError for a folder
    without a plan, or with one that is damaged or of another version."""
    path = Path(folder) / "plan.json"
    todo = "continue the run with its store, which writes it again"
    try:
        return read_record(path, PLAN_SCHEMA, _source_of_plan, todo)
    except (FileNotFoundError, NotADirectoryError):
        todo = "name a folder that `train` has written, or one of its folds"
        raise ValueError(f"run {folder} must hold a plan.json, got none; {todo}") from None

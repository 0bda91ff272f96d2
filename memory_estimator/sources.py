"""Where a job comes from: a recipe by its name, the folder of a run, a store.

    source = source_job(args)               # of the options --recipe, --run and --store
    job = job_from(args, source.job)        # with those that were given beside them

Files are read as JSON: nothing of what has written them is imported."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, TypedDict, Union

from memory_estimator.common.files import parse_json, read_record, typed
from memory_estimator.installed import installed_engine
from memory_estimator.job import RECIPES, Job, job_from, stored_bytes
from models.strides import Shape3, Spacing3, coarse_grid, deciding_spacing

PLAN_SCHEMA = 1  # version of plan.json, which `cpu3d.plan` writes into a run's folder
STORE_SCHEMA = 1  # version of a store's layout and records, as `cpu3d.data.manifest` has it
TWICE = (
    "the run holds its variables once more while its grid changes, which is not counted; `train` "
    "adds it"
)


class JobSource(NamedTuple):
    """The job of --recipe, --run or --store."""

    # None without them; of several workers all that they compute together
    job: Optional[Job] = None
    notes: Sequence[str] = ()  # memory that an estimate of it does not count, a sentence each
    workers: int = 1  # of the run


def source_job(args: argparse.Namespace) -> JobSource:
    """The source of a job. What a store gives becomes options of `args`, where they were not given.
    Raises ValueError as `read_run` and `read_store`."""
    if hasattr(args, "spacing") and hasattr(args, "run"):
        rule = "--spacing must come without --run, which has the strides"
        raise ValueError(f"{rule}, got both; leave one of them out")
    if hasattr(args, "store"):
        for name, value in read_store(args.store).items():
            if not hasattr(args, name):
                setattr(args, name, value)
        unet = job_from(args).unet
        coarse = coarse_grid(args.shape, unet.stride(0), unet.divisors)
        return JobSource(notes=[TWICE] if coarse.is_taken else [])
    if hasattr(args, "recipe"):
        return JobSource(dataclasses.replace(RECIPES[args.recipe].job, engine=installed_engine()))
    return read_run(args.run) if hasattr(args, "run") else JobSource()


class _Config(TypedDict):
    """Settings of a run that add memory which an estimate does not count."""

    device: str
    mode: str
    resolution: float
    coarse_steps: int


class _SavedPlan(TypedDict):
    """The fields of plan.json that the estimator reads."""

    workers: int
    config: _Config
    job: Job


def _saved_plan(content: Mapping[str, Any]) -> _SavedPlan:
    """The plan of a run, whose job has all of its fields: defaults are not those of the run."""
    fields: Any = content.get("job")
    if isinstance(fields, dict) and "resampled" in fields:  # of a version that had no such changes
        fields = {name: value for name, value in fields.items() if name != "resampled"}
        fields["reworked"] = False
        content = {**content, "job": fields}
    plan: _SavedPlan = typed(content, _SavedPlan, "plan")
    job = plan["job"]
    unet = {"strides": (), **fields.get("unet", {})}  # left out if all axes are halved
    if set(fields) != set(vars(job)) or set(unet) != set(vars(job.unet)):
        raise ValueError("a job without all of its fields")
    if plan["workers"] < 1 or job.batch % plan["workers"]:
        raise ValueError(f"{plan['workers']} workers for batches of {job.batch}")
    return plan


def read_run(folder: Union[str, Path]) -> JobSource:
    """The job of the run in `folder`, as its plan.json has it. Raises ValueError for a folder
    without a plan, or with one that is damaged or of another version."""
    path = Path(folder) / "plan.json"
    todo = "continue the run with its store, which writes it again"
    try:
        plan = read_record(path, PLAN_SCHEMA, _saved_plan, todo)
    except (FileNotFoundError, NotADirectoryError):
        if not (path.parent / "config.json").is_file():
            todo = "name a folder that `train` has written"
        if (path.parent / "fold-1" / "plan.json").is_file():
            todo = f"name one of its folds, such as {path.parent / 'fold-1'}"
        raise ValueError(f"run {folder} must hold a plan.json, got none; {todo}") from None
    return JobSource(plan["job"], _not_counted(plan["config"]), plan["workers"])


def _not_counted(config: _Config) -> List[str]:
    """What a run takes besides, a sentence each."""
    notes = []
    if config["device"] != "cpu":
        on_card = "`train` shows what its steps take on the card"
        notes.append(f"the run is on {config['device']}: a CPU is estimated; {on_card}")
    if config["mode"] == "patch" or config["resolution"] != 1:
        validates = "the run validates on whole volumes of the store"
        notes.append(f"{validates}, which is not counted; `train` adds it")
    if config["coarse_steps"] > 0:
        notes.append(TWICE)
    return notes


class _Split(TypedDict):
    train: Tuple[str, ...]
    val: Tuple[str, ...]


class _Records(TypedDict):
    file: str


class _Manifest(TypedDict):
    """The fields of a store's manifest.json that the estimator reads."""

    channels: Tuple[str, ...]
    regions: Dict[str, Any]
    split: _Split
    largest_shape: Shape3
    largest_box: Shape3
    records: _Records


class _Case(TypedDict):
    """The fields of a case's record that the estimator reads."""

    case_id: str
    spacing_mm: Spacing3


def _lines(path: Path) -> List[bytes]:
    """The lines of a store's records. Raises ValueError if they are lost."""
    try:
        return path.read_bytes().splitlines()
    except FileNotFoundError:
        raise ValueError(f"no {path.name} beside it") from None


def read_store(folder: Union[str, Path]) -> Dict[str, Any]:
    """What a store gives of a job, as options and fields: `train` decides the same of it. Raises
    ValueError for a folder without a store, or with one that is damaged or of another version."""
    path = Path(folder) / "manifest.json"
    todo = "`store verify` says more"

    def options(content: Any) -> Dict[str, Any]:
        manifest: _Manifest = typed(content, _Manifest, "manifest")
        split = manifest["split"]
        spacings_mm = {}
        for line in _lines(path.parent / Path(manifest["records"]["file"]).name):
            case: _Case = typed(parse_json(line), _Case, "case")
            spacings_mm[case["case_id"]] = case["spacing_mm"]
        channels = len(manifest["channels"])
        return {
            "shape": manifest["largest_box"],
            "spacing": deciding_spacing(spacings_mm, split["train"], split["val"]),
            "channels": channels,
            "classes": len(manifest["regions"]),
            "cases": len(split["train"]),
            "case_bytes": stored_bytes(manifest["largest_shape"], channels),
            "from_store": True,
        }

    try:
        return read_record(path, STORE_SCHEMA, options, todo)
    except (FileNotFoundError, NotADirectoryError):
        rule = f"store {folder} must hold a finished manifest.json"
        raise ValueError(f"{rule}, got none; run `prepare`, or name another folder") from None

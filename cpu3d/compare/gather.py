"""What came out of a run, read back from its folder: scores by case, the learning curve, what it cost."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from cpu3d.compare.budget import step_voxels
from cpu3d.compare.planned import end_of
from cpu3d.config import RunConfig, load_config
from cpu3d.data.extent import grid_size
from cpu3d.data.store import Store
from cpu3d.inference.evaluate import METRICS, UNTOUCHED, read_scores, scores_path
from cpu3d.training.run_log import read_events

MEAN = "mean"
"""In the place of a region's name: the mean over the regions."""


@dataclass(frozen=True)
class Point:
    """A validation on the way."""

    voxels: int
    """Seen by the network so far."""
    seconds: float
    """Of steps so far, validation and saving aside."""
    mean_dice: float
    """Over the validation cases and regions."""


@dataclass(frozen=True)
class Costs:
    """What a run took. None is not known."""

    steps: int
    voxels: int
    """Seen by the network while training."""
    train_s: Optional[float]
    """Wall time of all attempts, validation and saving among it; None where the last one did not end."""
    steps_s: float
    """Wall time of the steps alone, with the compilation in the first and the waiting for data."""
    step_s: Optional[float]
    """Median of the steps."""
    validation_s: float
    case_train_s: Optional[float]
    """To see as many voxels as a whole case has, from `step_s`; None for patches whose store is not there."""
    train_peak_bytes: Optional[int]
    """Largest resident set of the process that trained."""
    allocator_peak_bytes: Optional[int]
    """Of TensorFlow, in the memory of the host."""
    core_hours: Optional[float]
    """`train_s` on all cores that the process had; None on a card."""
    case_predict_s: Optional[float]
    """Median over the cases that were scored; the first one compiles."""
    predict_peak_bytes: Optional[int]
    """Largest resident set of the process that predicted."""
    card_peak_bytes: Optional[int] = None
    """Of TensorFlow, in the memory of a card."""


@dataclass(frozen=True)
class RunResult:
    """A trained and scored run."""

    variant: str
    seed: int
    folder: Path
    config: RunConfig
    scores: Dict[str, Dict[str, Dict[str, float]]]
    """Region, or MEAN, -> metric -> case id -> value."""
    curve: Tuple[Point, ...]
    costs: Costs
    host: Dict[str, Any]
    """Of the last attempt, from the log; empty where it does not say."""
    evaluation: Path
    """Folder of its scores.json and predictions/."""


def read_run(
    variant: str,
    seed: int,
    folder: Path,
    split: Optional[str],
    *,
    store: Optional[Store] = None,
    scored: Optional[Path] = None,
) -> RunResult:
    """Read a run that was trained and scored on `split`; with None one that was only trained, its scores empty.

    `store` tells how large a whole case is to a run on patches; `scored` is the folder that holds evaluation/ where
    that is not the run's. Raises InputError where the run was not trained or scored, or its files are damaged.
    """
    folder = Path(folder)
    config, events = load_config(folder), read_events(folder)
    path = scores_path(scored or folder, split or UNTOUCHED)
    scores = read_scores(path) if split else {"cases": (), "regions": ()}
    starts = [event for event in events if event.get("event") == "start"]
    host = starts[-1].get("host", {}) if starts else {}
    return RunResult(
        variant=variant,
        seed=seed,
        folder=folder,
        config=config,
        scores=_by_region(scores),
        curve=curve_of(events, config),
        costs=costs_of(events, config, scores, host.get("cores"), case_voxels(config, store)),
        host=host,
        evaluation=path.parent,
    )


def curve_of(events: Sequence[Mapping[str, Any]], config: RunConfig) -> Tuple[Point, ...]:
    """The validations of a log, in order."""
    points, seconds = [], 0.0
    for event in events:
        if event.get("event") == "step":
            seconds += event.get("step_s", 0.0)
        elif event.get("event") == "validation":
            points.append(Point(event["step"] * step_voxels(config), seconds, event["mean_dice"]))
    return tuple(points)


def case_voxels(config: RunConfig, store: Optional[Store]) -> Optional[int]:
    """Voxels of a whole case as a run on whole volumes sees it; None for patches where there is no store to tell."""
    if not config.is_patch:
        return math.prod(config.grid)
    if store is None:
        return None
    return math.prod(grid_size(store, extent=config.extent, multiple=config.unet.divisor))


def costs_of(
    events: Sequence[Mapping[str, Any]],
    config: RunConfig,
    scores: Mapping[str, Any],
    cores: Optional[int],
    whole_voxels: Optional[int],
) -> Costs:
    """What a log and the content of scores.json say of a run's cost."""
    steps = [event for event in events if event.get("event") == "step"]
    ends = [event for event in events if event.get("event") == "end"]
    step_s = statistics.median(_column(steps, "step_s")) if _column(steps, "step_s") else None
    count = max(_column(steps, "step"), default=0)
    end = end_of(events)
    train_s = end.get("seconds") if end else None
    predict_s = [case["predict_s"] for case in scores["cases"] if "predict_s" in case]
    on_cpu = config.device == "cpu"
    peak_bytes = _most(_column(ends, "allocator_peak_bytes"))
    return Costs(
        steps=count,
        voxels=count * step_voxels(config),
        train_s=train_s,
        steps_s=math.fsum(_column(steps, "step_s")),
        step_s=step_s,
        validation_s=math.fsum(_column([e for e in events if e.get("event") == "validation"], "seconds")),
        case_train_s=step_s / step_voxels(config) * whole_voxels if step_s and whole_voxels else None,
        train_peak_bytes=_most([*_column(ends, "peak_rss_bytes"), *_column(steps, "rss_bytes")]),
        allocator_peak_bytes=peak_bytes if on_cpu else None,
        core_hours=train_s * cores / 3600 if train_s is not None and cores and on_cpu else None,
        case_predict_s=statistics.median(predict_s) if predict_s else None,
        predict_peak_bytes=scores.get("peak_rss_bytes"),
        card_peak_bytes=None if on_cpu else peak_bytes,
    )


# --- Private helpers ---


def _by_region(scores: Mapping[str, Any]) -> Dict[str, Dict[str, Dict[str, float]]]:
    regions = list(scores["regions"])
    found = {
        region: {
            metric: {case["case_id"]: float(case["regions"][region][metric]) for case in scores["cases"]}
            for metric in METRICS
        }
        for region in regions
    }
    if len(regions) > 1:
        found[MEAN] = {
            metric: {
                case_id: statistics.fmean(found[region][metric][case_id] for region in regions)
                for case_id in found[regions[0]][metric]
            }
            for metric in METRICS
        }
    return found


def _column(events: Sequence[Mapping[str, Any]], key: str) -> List[float]:
    return [event[key] for event in events if isinstance(event.get(key), (int, float))]


def _most(values: Sequence[float]) -> Optional[int]:
    return int(max(values)) if values else None

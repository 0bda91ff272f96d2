"""What a resolution study found, as frozen records that go to JSON and back. No TensorFlow."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

import numpy as np

from cpu3d.compare.study.learning_rates import Trial

Cases = Tuple[float, ...]
"""A value for each case, in the order of their names, which are the same for all runs."""


@dataclass(frozen=True)
class SeedRun:
    """One full training run, scored on the full original grids."""

    seed: int
    val_dice: Optional[float]
    """Best mean Dice on the validation cases."""
    dice: Mapping[str, Cases]
    """By region."""
    hd95_mm: Mapping[str, Cases]
    step_s: float
    """Median of the steps."""
    train_s: float
    """Wall time of the training, validations included."""
    peak_bytes: Optional[int]
    """Largest resident set of the training process; on a card what TensorFlow's allocator held there."""
    predict_s: Optional[float]
    """Median of a case, on the full grid."""

    def mean(self, metric: str, region: str = "") -> float:
        """Mean over the cases of "dice" or "hd95_mm", of one region or of all."""
        values = getattr(self, metric)
        return float(np.mean(values[region] if region else list(values.values())))

    def by_case(self) -> List[float]:
        """Dice of every case, the regions' mean."""
        return np.mean(list(self.dice.values()), axis=0).tolist()


@dataclass(frozen=True)
class Arm:
    """One resolution at one batch: its search for a learning rate, and its full runs."""

    resolution: float
    batch: int
    grid: Tuple[int, int, int]
    """Voxels that the network sees."""
    steps: int
    search_steps: int
    """Steps of each trial of the search."""
    start_rate: float
    rate: float
    """Of the full runs: the search's winner, or the next best where that diverged in full length."""
    trials: Tuple[Trial, ...]
    """The search, in ascending order of the rates; empty where there was one rate and nothing to search."""
    runs: Tuple[SeedRun, ...]
    diverged: Tuple[float, ...] = ()
    """Rates that the search preferred to `rate`, and that diverged in full length."""

    def over_seeds(self, metric: str = "dice", region: str = "") -> List[float]:
        """A value for each seed: the mean over cases, and over regions where none is named."""
        return [run.mean(metric, region) for run in self.runs]

    @property
    def dice(self) -> float:
        """Mean over seeds, regions and cases."""
        return float(np.mean(self.over_seeds()))

    def median(self, name: str) -> Optional[float]:
        """Median over seeds of a run's "step_s", "train_s", "peak_bytes" or "predict_s"."""
        values = [getattr(run, name) for run in self.runs if getattr(run, name) is not None]
        return float(np.median(values)) if values else None


@dataclass(frozen=True)
class Study:
    """All arms and what they have in common."""

    arms: Tuple[Arm, ...]
    """By batch, then by resolution."""
    about: Mapping[str, Any]
    """Data, settings, host and versions, for the reader and for the record."""

    @property
    def batches(self) -> List[int]:
        return sorted({arm.batch for arm in self.arms})

    @property
    def resolutions(self) -> List[float]:
        return sorted({arm.resolution for arm in self.arms})

    @property
    def regions(self) -> List[str]:
        return list(self.arms[0].runs[0].dice)

    @property
    def seeds(self) -> List[int]:
        return [run.seed for run in self.arms[0].runs]

    def at_batch(self, batch: int) -> List[Arm]:
        """The arms of one batch, by resolution."""
        return sorted((arm for arm in self.arms if arm.batch == batch), key=lambda arm: arm.resolution)

    def at_resolution(self, resolution: float) -> List[Arm]:
        """The arms of one resolution, by batch."""
        return sorted((arm for arm in self.arms if arm.resolution == resolution), key=lambda arm: arm.batch)


def to_json(study: Study) -> Dict[str, Any]:
    return {"about": dict(study.about), "arms": [dataclasses.asdict(arm) for arm in study.arms]}


def from_json(content: Mapping[str, Any]) -> Study:
    """The way back from `to_json`."""
    arms = []
    for arm in content["arms"]:
        parts = {
            "grid": tuple(arm["grid"]),
            "trials": tuple(Trial(**trial) for trial in arm["trials"]),
            "runs": tuple(SeedRun(**{**run, **_by_region(run)}) for run in arm["runs"]),
            "diverged": tuple(arm.get("diverged", ())),
        }
        arms.append(Arm(**{**arm, **parts}))
    return Study(tuple(arms), content["about"])


# --- Private helpers ---


def _by_region(run: Mapping[str, Any]) -> Dict[str, Dict[str, Cases]]:
    return {metric: {name: tuple(run[metric][name]) for name in run[metric]} for metric in ("dice", "hd95_mm")}

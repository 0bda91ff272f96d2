"""A run that is to be there, and how much of it is: of its options, trained, diverged, scored."""

import argparse
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from cpu3d.compare.process import RunDivergedError
from cpu3d.config import RunConfig, load_config
from cpu3d.errors import DivergedError, InputError
from cpu3d.inference.evaluate import UNTOUCHED, read_scores, scores_path
from cpu3d.inference.options import Inference
from cpu3d.inference.scores import TOLERANCE_MM
from cpu3d.recipes import RECIPES
from cpu3d.report.page import flat
from cpu3d.training.checkpoint_history import checkpoints
from cpu3d.training.run_log import read_events
from cpu3d.training_options import (
    AUGMENT_FIELDS,
    UNET_FIELDS,
    add_training_options,
    chosen_settings,
    with_settings,
)
from cpu3d.util.atomic import write_json
from memory_estimator.files import read_json

VERDICT = "diverged.json"
"""In the folder of a run that diverged: what it said."""

OF_STORE = ("store", "store_channels", "label_names", "region_codes", "split_hash", "unet.channels", "unet.outputs")
OF_NO_MATTER = ("unet.seed", "save_minutes", "read_mode", "epochs")
"""Settings that no option of a planned run decides, or that change nothing; it goes by steps, not by epochs."""

OPEN = (
    *("channels", "regions", "grid", "patches_per_case"),
    *("device", "micro_batch", "unet.dtype", "unet.policy"),
)
"""Settings that store and host decide where no option does."""


@dataclass(frozen=True)
class PlannedRun:
    """One run that is to be there: trained, and perhaps evaluated."""

    variant: str
    seed: int
    folder: Path
    options: Tuple[str, ...]
    """Of `train`, all but --store and --run; --steps and --seed are among them."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.variant}, seed {self.seed}"

    @property
    def steps(self) -> int:
        """That it is to take."""
        return int(self.options[self.options.index("--steps") + 1])


@dataclass(frozen=True)
class Failed:
    """A run that came to nothing."""

    variant: str
    seed: int
    why: str
    """In a few words, without paths."""

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}, is left out: {self.why}."


@dataclass(frozen=True)
class Evaluation:
    """How runs are scored."""

    split: str = UNTOUCHED
    tolerance_mm: float = TOLERANCE_MM

    def __post_init__(self):
        if not (math.isfinite(self.tolerance_mm) and self.tolerance_mm >= 0):
            raise InputError(f"--tolerance must be a number of mm from 0 on, got {self.tolerance_mm}; 1 is usual")


def unlike_options(run: PlannedRun) -> List[str]:
    """Settings in which the run in its folder is not what its options make of a new one, each as a problem.

    None where there is no run yet. Raises InputError for a damaged config.json.
    """
    if not (run.folder / "config.json").is_file():
        return []
    found = dict(flat(dataclasses.asdict(load_config(run.folder))))
    wanted, chosen = _wanted(run.options)
    unlike = [
        name
        for name, value in wanted.items()
        if not name.startswith(OF_STORE)
        and name not in OF_NO_MATTER
        and (name in chosen or name not in OPEN)
        and found.get(name) != value
    ]
    return [
        f"run {run.folder} must be of its options, got {name} {found.get(name)} for {wanted[name]}; move it away, or "
        "choose another --out"
        for name in unlike
    ]


def is_trained(run: PlannedRun) -> bool:
    """Whether the run has taken all of its steps, or has stopped early.

    Raises InputError for one of other options, which would be continued as what it is and not as what is planned.
    """
    problems = unlike_options(run)
    if problems:
        raise InputError(*problems)
    if not checkpoints(run.folder):
        return False
    end = end_of(read_events(run.folder))
    if end is None:
        return False
    return end["reason"] == "early stop" or (end["reason"] == "finished" and end["step"] == run.steps)


def end_of(events: Sequence[Mapping[str, Any]]) -> Optional[Mapping[str, Any]]:
    """The end of a log's last attempt; None where it was cut off, or is going on."""
    for event in reversed(events):
        if event.get("event") == "end":
            return event
        if event.get("event") in ("start", "step"):
            return None
    return None


def keep_verdict(run: PlannedRun, error: RunDivergedError) -> None:
    """Note that a run diverged, so that nobody trains it again to find out."""
    run.folder.mkdir(parents=True, exist_ok=True)
    write_json(run.folder / VERDICT, {"why": error.why, "said": str(error)})


def verdict_of(run: PlannedRun) -> Optional[RunDivergedError]:
    """How a run diverged; None for one that has not. Raises InputError as `is_trained`."""
    path = run.folder / VERDICT
    if not path.is_file():
        return None
    problems = unlike_options(run)
    if problems:
        raise InputError(*problems)
    try:
        verdict = read_json(path)
        before = f"{run.name} diverged before; remove {run.folder} to try again. It said:\n{verdict['said']}"
        return RunDivergedError(before, DivergedError.exit_code, verdict["why"])
    except (ValueError, KeyError, TypeError):
        return None  # a damaged one: it is tried again


def is_evaluated(run: Path, evaluation: Evaluation, scored: Optional[Path] = None) -> bool:
    """Whether a run has scores of this kind, younger than its weights, of the network applied as it was trained.

    They are looked for in the folder `scored`, by default the run's own.
    """
    path, weights = scores_path(scored or run, evaluation.split), run / "checkpoints" / "best.npz"
    try:
        scores, is_younger = read_scores(path), path.stat().st_mtime >= weights.stat().st_mtime
    except (InputError, FileNotFoundError):
        return False  # none, or a damaged one: they are made again
    config = load_config(run)
    usual = {**Inference().to_json(), "window": list(config.grid) if config.is_patch else None}
    return (
        is_younger
        and scores.get("inference") == {**usual, "one_pass": not config.is_patch}
        and scores["split_hash"] == config.split_hash
        and scores["tolerance_mm"] == evaluation.tolerance_mm
        and scores["weights"] == "best"
    )


# --- Private helpers ---


def _wanted(options: Sequence[str]) -> Tuple[Dict[str, str], List[str]]:
    """(the flat settings that options of `train` make of a new run, the names of those that they choose)."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_training_options(parser)
    args = parser.parse_args(list(options))
    settings = chosen_settings(args)
    patch = settings.get("patch")
    config: RunConfig = with_settings(RECIPES[args.recipe or "brats-regions"](), settings)
    if patch:
        config = dataclasses.replace(config, grid=tuple(patch))
    names = [_flat_name(name) for name, value in settings.items() if value != "auto"]
    return dict(flat(dataclasses.asdict(config))), names


def _flat_name(setting: str) -> str:
    if setting in UNET_FIELDS:
        return f"unet.{setting}"
    if setting in AUGMENT_FIELDS:
        return f"augment.{setting}"
    return {"patch": "grid"}.get(setting, setting)

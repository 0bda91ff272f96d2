"""Run folders that are there already, as variants: runs that differ in their seed alone are one."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from cpu3d.compare.budget import step_voxels
from cpu3d.compare.comparison import unpaired
from cpu3d.compare.planned import end_of
from cpu3d.config import RunConfig, load_config
from cpu3d.errors import InputError
from cpu3d.report.page import flat
from cpu3d.training.run_log import FINISHED, read_events
from cpu3d.util.lock import locked

SHARED = ("split_hash", "fold", "regions")
"""Settings that all runs must have alike: else they were trained, or are scored, on other cases."""

NO_MATTER = {
    *("seed", "unet.seed", "store", "save_minutes", "read_mode"),
    *("unet.policy", "device", "validate_every", "validations", "patience", "micro_batch"),
}
"""Settings that do not make another variant: where its files are, how a step is computed, how often one looks."""

UNEQUAL = 1.1
"""Times more that one run may have spent than another under what counts as one budget."""

Grouped = List[Tuple[str, int, Path]]
"""Variant, seed and folder of each run."""


def grouped(folders: Sequence[Path], *, force: bool = False) -> Grouped:
    """Name the variant of every run, in the order of their first ones, which is the baseline.

    A variant is named as its first run's folder is, less what follows "-seed". Raises InputError, all offenders at
    once, for folders that are no runs, were not trained or are being trained, for runs of different splits, folds or
    regions, for two runs of equal settings and seed, and for a variant that shares no seed with the baseline. Unless
    `force`, for runs that were cut off or stopped, and where the runs had neither as many voxels nor as much time, too.
    """
    problems: List[str] = []
    runs: Dict[Path, _Run] = {}
    for folder in folders:
        try:
            runs[folder] = _read(folder)
        except InputError as error:
            problems += error.problems
    problems += _unlike({folder: run.config for folder, run in runs.items()})
    if not force:
        problems += [
            f"run {folder} must have been trained to its end, got {run.steps:,} of {_wanted(run.config)}, end: "
            f"{run.end}; continue it with `train`, or add --force"
            for folder, run in runs.items()
            if run.end not in FINISHED
        ]
        problems += _unequal(runs)
    if problems:
        raise InputError(*problems)
    return _named({folder: run.config for folder, run in runs.items()})


# --- Private helpers ---


@dataclass(frozen=True)
class _Run:
    config: RunConfig
    steps: int
    """Taken so far."""
    steps_s: float
    end: str
    """The reason that its log ends with; "none" where it was cut off."""


def _read(folder: Path) -> _Run:
    config = load_config(folder)
    if not (folder / "checkpoints" / "best.npz").is_file():
        raise InputError(f"run {folder} must have been trained, found no checkpoints/best.npz; run `train` on it")
    with locked(folder, "run"):
        pass  # else it is being trained, and what is read now is not what it comes to
    events = read_events(folder)
    steps = [event for event in events if event.get("event") == "step"]
    end, last = end_of(events), max((event["step"] for event in steps), default=0)
    return _Run(
        config=config,
        steps=last,
        steps_s=sum(event.get("step_s", 0.0) for event in steps),
        end=end["reason"] if end else "none",
    )


def _wanted(config: RunConfig) -> str:
    return f"{config.steps:,} steps" if config.steps else f"the steps of {config.epochs} epochs"


def _unlike(configs: Dict[Path, RunConfig]) -> List[str]:
    first = next(iter(configs.items()), None)
    return [
        f"runs must share their {name}, got {_words(getattr(first[1], name))} in {first[0]} and "
        f"{_words(getattr(config, name))} in {folder}; compare runs of one split"
        for folder, config in configs.items()
        for name in SHARED
        if getattr(config, name) != getattr(first[1], name)
    ]


def _unequal(runs: Dict[Path, _Run]) -> List[str]:
    """A problem where some runs were given more than others, by voxels seen and by seconds of steps alike."""
    spent = {folder: (run.steps * step_voxels(run.config), run.steps_s) for folder, run in runs.items()}
    for position in (0, 1):
        column = [values[position] for values in spent.values()]
        if not column or max(column) <= UNEQUAL * min(column):
            return []
    most, least = (choose(spent, key=lambda folder: spent[folder][0]) for choose in (max, min))
    words = [f"{spent[folder][0] / 1e6:,.4g} million voxels in {spent[folder][1]:,.0f} s" for folder in (most, least)]
    return [
        f"runs must have had one budget, got {words[0]} in {most} and {words[1]} in {least}; leave some out, or add "
        "--force"
    ]


def _words(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value) or "none"


def _named(configs: Dict[Path, RunConfig]) -> Grouped:
    problems: List[str] = []
    names: Dict[str, str] = {}
    taken: Dict[Tuple[str, int], Path] = {}
    found: Grouped = []
    for folder, config in configs.items():
        kind = _kind(config)
        if kind not in names:
            names[kind] = _free_name(
                re.sub(r"[-_]?seed[-_]?\d+$", "", folder.name) or folder.name, list(names.values())
            )
        key = (names[kind], config.seed)
        if key in taken:
            problems.append(
                f"runs must differ in a setting or their seed, got {taken[key]} and {folder}, alike with seed "
                f"{config.seed}; leave one out"
            )
        taken[key] = folder
        found.append((*key, folder))
    seeds: Dict[str, List[int]] = {}
    for variant, seed, _ in found:
        seeds.setdefault(variant, []).append(seed)
    problems += unpaired(seeds, found[0][0]).values()
    if problems:
        raise InputError(*problems)
    return found


def _kind(config: RunConfig) -> str:
    """Equal for runs of one variant. Under batch norm what is computed together is what is learnt."""
    micro: Optional[int] = config.micro if config.unet.norm == "batch" else None
    settings = [pair for pair in flat(dataclasses.asdict(config)) if pair[0] not in NO_MATTER]
    return str((sorted(settings), micro))


def _free_name(name: str, taken: Sequence[str]) -> str:
    number = 2
    free = name
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free

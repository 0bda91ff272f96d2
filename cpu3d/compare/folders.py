"""Run folders that are there already, as variants: runs that differ in their seed alone are one."""

import dataclasses
import re
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

from cpu3d.config import RunConfig, load_config
from cpu3d.errors import InputError
from cpu3d.page import flat

SHARED = ("store", "split_hash", "fold", "regions")
"""Settings that all runs must have alike: else they were trained, or are scored, on other cases."""

NO_MATTER = {"seed", "unet.seed", "save_minutes", "read_mode"}
"""Settings that do not make another variant."""

Grouped = List[Tuple[str, int, Path]]
"""Variant, seed and folder of each run."""


def grouped(folders: Sequence[Path]) -> Grouped:
    """Name the variant of every run, in the order of their first ones.

    A variant is named as its first run's folder is, less what follows "-seed". Raises InputError, all offenders at
    once, for folders that are no runs or were not trained, for runs of different stores, splits, folds or regions, and
    for two runs of equal settings and seed.
    """
    problems: List[str] = []
    configs: Dict[Path, RunConfig] = {}
    for folder in folders:
        try:
            configs[folder] = load_config(folder)
        except InputError as error:
            problems += error.problems
            continue
        if not (folder / "checkpoints" / "best.npz").is_file():
            problems.append(f"run {folder} must have been trained, found no checkpoints/best.npz; run `train` on it")
    problems += _unlike(configs)
    if problems:
        raise InputError(*problems)
    names: Dict[str, str] = {}
    taken: Dict[Tuple[str, int], Path] = {}
    found: Grouped = []
    for folder, config in configs.items():
        kind = str(sorted((name, value) for name, value in flat(dataclasses.asdict(config)) if name not in NO_MATTER))
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
    if problems:
        raise InputError(*problems)
    return found


# --- Private helpers ---


def _unlike(configs: Dict[Path, RunConfig]) -> List[str]:
    first = next(iter(configs.items()), None)
    return [
        f"runs must share their {name}, got {_words(getattr(first[1], name))} in {first[0]} and "
        f"{_words(getattr(config, name))} in {folder}; compare runs of one store and split"
        for folder, config in configs.items()
        for name in SHARED
        if getattr(config, name) != getattr(first[1], name)
    ]


def _words(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value) or "none"


def _free_name(name: str, taken: Sequence[str]) -> str:
    number = 2
    free = name
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free

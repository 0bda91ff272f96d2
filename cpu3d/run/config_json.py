"""The settings of a run as its folder keeps them, config.json, and those that a run that continues
may change.

save_config(config, run)
config = load_config(run)
raise_if_any(differences(config, changed))
"""

import dataclasses
import math
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Tuple

from cpu3d.chosen import SETTINGS
from cpu3d.errors import InputError, raise_if_any
from cpu3d.run.folds import CONFIG, refuse_folds
from cpu3d.settings import Decided, RunConfig, Settings, StoreFacts
from cpu3d.util.atomic import write_json
from memory_estimator.common.files import read_json, typed
from memory_estimator.common.schema import GIVEN, option_typed
from memory_estimator.common.units import by
from models.losses import DEFAULT_LOSS
from models.optimizers import OPTIMIZERS
from models.strides import EVERY_AXIS

RESTORE = "restore it from a copy of the run, or begin another run"
SCHEMA = 1  # of the run folder's layout; a run of another one is refused, never guessed at
NESTED = ("unet", "augment")  # the settings that hold settings

CHANGEABLE = (
    "store", "epochs", "steps", "coarse_steps", "budget_minutes", "patience", "validate_every",
    "validations", "read_mode", "save_minutes", "keep", "stall_minutes", "learning_rate",
    "adam_rate", "engine", "device", "micro_batch", "unet.policy",
)  # fmt: skip
"""Settings that may change when a run is continued; all others would make it another run. With
batch norm the micro-batch is none of them, as its statistics are of the volumes that are computed
together."""

FOLLOWING = (
    *(
        field.name
        for kind in (StoreFacts, Decided)
        for field in dataclasses.fields(kind)
        if field.name != "coarse_stride"
    ),
    *("unet.channels", "unet.outputs", "unet.seed"),
)
"""What no option gives: it follows from the store, or from settings."""
FACTS = ("spacing_mm", "target_spacing_mm", "oriented", "init_record")
"""Fields that follow from the training cases, which a split's hash fixes, or from the weights that
the run has started from. Runs of earlier versions lack them."""


def save_config(config: RunConfig, run: Path) -> None:
    """Write `run`/config.json, atomically."""
    write_json(Path(run) / "config.json", {"schema": SCHEMA, **config.to_json()})


def load_config(run: Path) -> RunConfig:
    """Read `run`/config.json. Raises InputError when there is none, or it is damaged, or of another
    version."""
    path = Path(run) / CONFIG
    if not path.is_file():
        refuse_folds(run)
        rule = f"run {run} must hold a config.json"
        raise InputError(f"{rule}, found none; {_instead_of(Path(run))}")
    whole = f"run config {path} must be JSON with a schema and all settings"
    try:
        content = typed(read_json(path), Dict[str, Any], "config")
    except (InputError, ValueError) as error:
        raise InputError(f"{whole}, got {_one_line(error)}; {RESTORE}") from None
    schema = content.pop("schema", None)
    if schema != SCHEMA:
        todo = "use the version that made it, or retrain"
        raise InputError(f"run {run} must have schema {SCHEMA}, got {schema}; {todo}")
    try:
        return config_from_json(content)
    except (InputError, ValueError) as error:
        raise InputError(f"{whole}, got {_one_line(error)}; {RESTORE}") from None


def _instead_of(folder: Path) -> str:
    """What to name instead of a folder that holds no run, by what it holds or lies in."""
    if not folder.exists():
        return "there is no such folder: check the path"
    for above in list(folder.absolute().parents)[:2]:
        if (above / CONFIG).is_file():
            return f"it lies in a run: name {above}"
    for name, kind in (("manifest.json", "a store"), ("dataset.json", "a data set")):
        if (folder / name).is_file():
            return f"it is {kind}: name a folder that `train` has written"
    runs = sorted(folder.glob(f"*/{CONFIG}"))
    if runs:
        return f"name one of the runs in it, such as {runs[0].parent}"
    return "name a folder that `train` has written"


def _one_line(error: Exception) -> str:
    return "; ".join(str(error).splitlines())


def config_from_json(content: Mapping[str, Any]) -> RunConfig:
    """The configuration that its `to_json` gave. Raises ValueError or InputError if a
    setting is missing, as a default is not what the run has, or if one is not valid."""
    content = {
        "weight_decay": 0.0,
        "loss": DEFAULT_LOSS,
        "init": "",
        "freeze": "none",
        "paint": (),
        "coarse_stride": EVERY_AXIS,
        **content,
    }  # runs of earlier versions had none
    if isinstance(content.get("unet"), dict):
        content["unet"] = {"strides": (), **content["unet"]}  # left out if all axes are halved
    config = typed(content, RunConfig, "config")
    nested = {f"{outer}.{name}" for outer in NESTED for name in content.get(outer, {})}
    missing = sorted(
        set(settings_by_name(config)) - set(content) - nested - {*FACTS, "normalisation"}
    )
    problems = []
    if missing:
        problems.append(f"config must hold every setting, got none for {', '.join(missing)}")
    if config.store_channels:  # else the run is of no store yet
        for name, known in (("channels", config.store_channels), ("regions", config.region_codes)):
            chosen = getattr(config, name)
            if not chosen or not set(chosen) <= set(known):
                problems.append(f"{name} must be some of {', '.join(known)}, got {chosen}")
        if min(config.grid) < 1:
            problems.append(f"grid must be positive, got {config.grid}")
    raise_if_any(problems)
    return config


def matching_settings(config: RunConfig) -> Dict[str, Any]:
    """The settings with which another run has the network and the coarse steps of this one,
    whatever would be decided by itself."""
    return {
        "depth": config.unet.depth,
        "strides": config.unet.every_stride,
        "curriculum": config.curriculum,
        "coarse_stride": config.coarse_stride,
    }


def settings_of_begun(runs: Iterable[Path]) -> Dict[str, Any]:
    """The `matching_settings` of the first of these runs that has begun; {} if none has."""
    for run in runs:
        if (run / "config.json").is_file():
            return matching_settings(load_config(run))
    return {}


def differences(old: RunConfig, new: Settings) -> List[str]:
    """Settings that keep a run of `old` from being continued as `new`, each with both values; of
    another mode nothing else, as other settings follow from it. A micro-batch that batch norm has
    to keep is compared as it is computed."""
    left = settings_by_name(old)
    right = settings_by_name(new)
    changeable = {*CHANGEABLE, *FACTS}
    if old.unet.norm == new.unet.norm == "batch" and old.batch == new.batch:
        changeable.remove("micro_batch")
        left["micro_batch"] = old.micro
        right["micro_batch"] = new.micro
    names = ["mode"]
    if old.mode == new.mode:
        names = [name for name in {**left, **right} if name not in changeable]
    differing = [name for name in names if left.get(name) != right.get(name)]
    if "unet.depth" in differing and "unet.strides" in differing:
        differing.remove("unet.strides")  # as many as there are levels
    if "grid" in differing and "coarse_grid" in differing:
        differing.remove("coarse_grid")  # which follows from it
    chosen = [name for name in differing if name not in FOLLOWING]
    lines = []
    for name in chosen or differing:  # what only follows from a setting is not named beside it
        if name == "grid" and old.is_patch:
            todo = "leave --patch out"
        elif name in FOLLOWING:
            todo = "take the store that the run was begun on"
        else:
            todo = "leave it out"
        option, before = _as_typed(old, name, left.get(name))
        _, got = _as_typed(old, name, right.get(name))
        if before == GIVEN:
            todo = "add it"
        rule = f"{option} must stay {before}"
        lines.append(f"{rule}, got {got}; {todo}, or train into another folder")
    return lines


def _as_typed(config: RunConfig, name: str, value: Any) -> Tuple[str, str]:
    """A setting and its value as on the command line; of what no option gives its name."""
    if name == "grid" and config.is_patch:
        return "--patch", by(value, " ")
    if name in FOLLOWING:
        return name, repr(value)
    typed_so = option_typed(SETTINGS, name.rpartition(".")[2], value)
    return typed_so or (name, repr(value))


def settings_by_name(config: Settings) -> Dict[str, Any]:
    """Settings by name, those of the network and the augmentation as in "unet.filters"; strides
    those of every level."""
    settings = {}
    for outer in NESTED:
        for name, value in vars(getattr(config, outer)).items():
            settings[f"{outer}.{name}"] = value
    settings["unet.strides"] = config.unet.every_stride
    for name, value in vars(config).items():
        if name not in NESTED:
            settings[name] = value
    return settings


def continued(config: RunConfig, *, step: int, steps: int, saved_coarse_steps: int) -> RunConfig:
    """A run of `steps` steps that continues after `step`, from a checkpoint of one with
    `saved_coarse_steps`.

    If the checkpoint is of a full step, or of the last coarse one, the run keeps its coarse steps;
    else it has at least the `step` that are done. Raises InputError if no step would be at full
    resolution.
    """
    if 0 < step <= saved_coarse_steps and steps <= step:
        rule = f"steps must be above the {step} that the run has done at half resolution"
        todo = "raise it, so that its last steps are at full resolution"
        raise InputError(f"{rule}, got {steps}; {todo}")
    if step >= saved_coarse_steps:
        return dataclasses.replace(config, coarse_steps=saved_coarse_steps)
    return dataclasses.replace(config, coarse_steps=max(config.coarse_steps, step))


def rate_growth(config: Settings, workers: int) -> float:
    """By how much the learning rates grow with the workers under --batch-per-worker."""
    if OPTIMIZERS[config.optimizer].rate_scaling == "linear":
        return float(workers)
    return math.sqrt(workers)


def half_rates(config: RunConfig, *, growth: float = 1.0) -> str:
    """The options that halve the learning rates of a run that continues, if the command lets the
    rates that it gives grow by so much."""
    options = f"--learning-rate {config.peak_rate / 2 / growth:.3g}"
    if OPTIMIZERS[config.optimizer].has_two_rates:
        options += f" --adam-rate {config.adam_rate / 2 / growth:.3g}"
    return options

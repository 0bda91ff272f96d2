"""The settings of a run as its folder keeps them, config.json, and those that a run that continues
may change.

save_config(config, run)
config = load_config(run)
refuse(differences(config, changed))
"""

import dataclasses
from pathlib import Path
from typing import Any, Dict, List, Mapping

from cpu3d.data.augment import LATER
from cpu3d.errors import InputError, refuse
from cpu3d.run.folds import refuse_folds
from cpu3d.settings import RunConfig, Settings
from cpu3d.util.atomic import write_json
from memory_estimator.common.files import read_json, typed
from memory_estimator.job import OPTIMIZERS

SCHEMA = 1  # of the run folder's layout; a run of another one is refused, never guessed at
PARTS = ("unet", "augment")  # the settings that hold settings

CHANGEABLE = (
    *(
        "store",
        "epochs",
        "steps",
        "coarse_steps",
        "budget_minutes",
        "patience",
        "validate_every",
        "validations",
    ),
    *("read_mode", "save_minutes", "keep", "stall_minutes"),
    *("learning_rate", "adam_rate", "engine", "device", "micro_batch", "unet.policy"),
)
"""Settings that may change when a run is continued; all others would make it another run. With
batch norm the micro-batch is none of them, as its statistics are of the volumes that are computed
together."""

FOLLOWING = (
    *("store_channels", "label_names", "region_codes", "split_hash", "grid", "coarse_grid"),
    *("unet.channels", "unet.outputs", "unet.seed"),
)
"""Settings that no option gives: they follow from the store, or from other settings."""
FACTS = ("spacing_mm", "oriented")
"""Fields that follow from the training cases, which a split's hash fixes. Runs of earlier versions
lack them."""


def save_config(config: RunConfig, run: Path) -> None:
    """Write `run`/config.json, atomically."""
    write_json(Path(run) / "config.json", {"schema": SCHEMA, **dataclasses.asdict(config)})


def load_config(run: Path) -> RunConfig:
    """Read `run`/config.json. Raises InputError when there is none, or it is damaged, or of another
    version."""
    path = Path(run) / "config.json"
    if not path.is_file():
        refuse_folds(run)
        raise InputError(
            f"run {run} must hold a config.json, found none; name a folder that `train` has written"
        )
    try:
        content = typed(read_json(path), Dict[str, Any], "config")
        schema = content.pop("schema", None)
        config = config_from_json(content) if schema == SCHEMA else None
    except (InputError, ValueError) as error:
        got = "; ".join(str(error).splitlines())
        raise InputError(
            f"run config {path} must be JSON with a schema and all settings, got {got}; restore it"
        ) from None
    if config is None:
        raise InputError(
            f"run {run} must have schema {SCHEMA}, got {schema}; use the version that made it, or retrain"
        )
    return config


def config_from_json(content: Mapping[str, Any]) -> RunConfig:
    """The configuration that `dataclasses.asdict` gave. Raises ValueError or InputError if a
    setting is missing, as a default is not what the run has, or if one is not valid."""
    content = {"weight_decay": 0.0, **content}  # runs of earlier versions had none
    if isinstance(content.get("augment"), dict):
        content["augment"] = _with_later(content["augment"])
    config = typed(content, RunConfig, "config")
    nested = {f"{part}.{name}" for part in PARTS for name in content.get(part, {})}
    missing = sorted(set(settings_by_name(config)) - set(content) - nested - set(FACTS))
    problems = [f"config must hold every setting, got none for {', '.join(missing)}"] * bool(
        missing
    )
    if config.store_channels:  # else the run is of no store yet
        for name, known in (("channels", config.store_channels), ("regions", config.region_codes)):
            chosen = getattr(config, name)
            if not chosen or not set(chosen) <= set(known):
                problems.append(f"{name} must be some of {', '.join(known)}, got {chosen}")
        if min(config.grid) < 1:
            problems.append(f"grid must be positive, got {config.grid}")
    refuse(problems)
    return config


def _with_later(augment: Dict[str, Any]) -> Dict[str, Any]:
    """The augmentation of a config.json, with what runs of its version did not have turned off.
    Their rotation and scaling were others."""
    if set(LATER) & set(augment):
        return augment
    later = {**dict.fromkeys(LATER, 0.0), "in_planes": False}
    if augment.get("rotation_deg") or augment.get("scaling"):
        later["in_planes"] = True
    return {**later, **augment}


def differences(old: RunConfig, new: Settings) -> List[str]:
    """Settings that keep a run of `old` from being continued as `new`, each with both values; of
    another mode nothing else, as other settings follow from it. A micro-batch that batch norm has
    to keep is compared as it is computed."""
    left, right = settings_by_name(old), settings_by_name(new)
    changeable = {*CHANGEABLE, *FACTS, "augment.in_planes"}  # which has a line of its own
    if old.unet.norm == new.unet.norm == "batch" and old.batch == new.batch:
        changeable.remove("micro_batch")
        left["micro_batch"], right["micro_batch"] = old.micro, new.micro
    names = [
        name
        for name in ({**left, **right} if old.mode == new.mode else ("mode",))
        if name not in changeable
    ]
    differing = [name for name in names if left.get(name) != right.get(name)]
    chosen = [name for name in differing if name not in FOLLOWING]
    lines = []
    if old.augment.in_planes:
        rule = "rotation and scaling must be as the run was begun, in planes, got a version that turns about all axes"
        lines.append(
            f"{rule}; continue it with the version that made it, or train into another folder"
        )
    for name in chosen or differing:  # what only follows from a setting is not named beside it
        todo = "take the store that the run was begun on" if name in FOLLOWING else "leave it out"
        if name == "grid" and old.is_patch:
            todo = "leave --patch out"
        lines.append(
            f"{name} must stay {left.get(name)!r}, got {right.get(name)!r}; {todo}, or train into another folder"
        )
    return lines


def settings_by_name(config: Settings) -> Dict[str, Any]:
    """Settings by name, those of the network and the augmentation as in "unet.filters"."""
    nested = {
        f"{part}.{name}": value
        for part in PARTS
        for name, value in vars(getattr(config, part)).items()
    }
    plain = {name: value for name, value in vars(config).items() if name not in PARTS}
    return {**nested, **plain}


def continued(config: RunConfig, *, step: int, steps: int, saved_coarse_steps: int) -> RunConfig:
    """A run of `steps` steps that continues after `step`, from a checkpoint of one with
    `saved_coarse_steps`.

    If the checkpoint is of a full step, or of the last coarse one, the run keeps its coarse steps;
    else it has at least the `step` that are done. Raises InputError if no step would be at full
    resolution.
    """
    if 0 < step <= saved_coarse_steps and steps <= step:
        rule = f"steps must be above the {step} that the run has done at half resolution"
        raise InputError(
            f"{rule}, got {steps}; raise it, so that its last steps are at full resolution"
        )
    if step >= saved_coarse_steps:
        return dataclasses.replace(config, coarse_steps=saved_coarse_steps)
    return dataclasses.replace(config, coarse_steps=max(config.coarse_steps, step))


def rate_growth(config: Settings, workers: int) -> float:
    """By how much the learning rates grow with the workers under --batch-per-worker."""
    return workers ** (1.0 if OPTIMIZERS[config.optimizer].rate_scaling == "linear" else 0.5)


def half_rates(config: RunConfig, *, growth: float = 1.0) -> str:
    """The options that halve the learning rates of a run that continues, if the command lets the
    rates that it gives grow by so much."""
    options = f"--learning-rate {config.peak_rate / 2 / growth:.3g}"
    if OPTIMIZERS[config.optimizer].orthogonal:
        options += f" --adam-rate {config.adam_rate / 2 / growth:.3g}"
    return options

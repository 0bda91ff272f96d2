"""The settings of a run as its folder keeps them, config.json, and those that a run that continues
may change.

save_config(config, run)
config = load_config(run)
raise_if_any(differences(config, changed))
"""

import dataclasses
from pathlib import Path
from typing import Any, Dict, List, Mapping

from cpu3d.errors import InputError, raise_if_any
from cpu3d.run.folds import CONFIG, refuse_folds
from cpu3d.settings import SETTINGS, RunConfig
from cpu3d.store_facts import StoreFacts
from cpu3d.util.atomic import write_json
from cpu3d.util.records import listed
from memory_estimator.common.files import read_json, typed
from memory_estimator.common.schema import option_typed

RESTORE = "restore it from a copy of the run, or begin another run"
SCHEMA = 5  # of the run folder's layout; a run of another one is refused, never guessed at
NESTED = ("unet", "augment")  # the settings that hold settings
OF_STORE = [field.name for field in dataclasses.fields(StoreFacts)]

CHANGEABLE = (
    "store", "epochs", "steps", "budget_minutes", "coarse_steps", "validations",
    "learning_rate", "device", "micro_batch", "unet.policy",
)  # fmt: skip
"""Settings that may change when a run is continued: its length and what follows from it, its rate,
and how it is computed. All others would make it another run. With batch norm the micro-batch is
none of them, as its statistics are of the volumes that are computed together."""


def save_config(config: RunConfig, run: Path) -> None:
    """Write `run`/config.json, atomically."""
    write_json(Path(run) / "config.json", {"schema": SCHEMA, **config.to_json()})


def load_config(run: Path) -> RunConfig:
    """Read `run`/config.json. Raises InputError when there is none, or it is damaged, or of another
    version."""
    path = Path(run) / CONFIG
    if not path.is_file():
        refuse_folds(run)
        raise InputError(
            f"run {run} must hold a config.json, found none; name a folder that `train` has "
            "written, such as one in it"
        )
    try:
        content = typed(read_json(path), Dict[str, Any], "config")
        schema = content.pop("schema", None)
        if schema == SCHEMA:
            return config_from_json(content)
    except (InputError, ValueError) as error:
        raise InputError(
            f"run config {path} must be JSON with a schema and all settings, got "
            f"{'; '.join(str(error).splitlines())}; {RESTORE}"
        ) from None
    raise InputError(
        f"run {run} must have schema {SCHEMA}, got {schema}; use the version that made it, or "
        "retrain"
    )


def config_from_json(content: Mapping[str, Any]) -> RunConfig:
    """The configuration that its `to_json` gave. Raises ValueError or InputError if a setting is
    missing, as a default is not what the run has, or if one is not valid."""
    config = typed(dict(content), RunConfig, "config")
    missing = {field.name for field in dataclasses.fields(config)} - set(content)
    for outer in NESTED:
        inner = getattr(config, outer)
        missing.update(f"{outer}.{name}" for name in set(vars(inner)) - set(content[outer]))
    missing -= {"unet.strides"}  # left out if all axes are halved
    problems = []
    if missing:
        problems.append(f"config must hold every setting, got none for {listed(sorted(missing))}")
    if config.store_channels:  # else the run is of no store yet
        for name, known in (("channels", config.store_channels), ("regions", config.region_codes)):
            chosen = getattr(config, name)
            if not chosen or not set(chosen) <= set(known):
                problems.append(f"{name} must be some of {', '.join(known)}, got {chosen}")
        if min(config.grid) < 1:
            problems.append(f"grid must be positive, got {config.grid}")
    raise_if_any(problems)
    return config


def differences(old: RunConfig, new: RunConfig) -> List[str]:
    """A line with the settings that keep a run of `old` from going on as `new`; none if it may."""
    before = settings_by_name(old)
    now = settings_by_name(new)
    if old.unet.norm == "batch":
        before["micro"] = old.micro
        now["micro"] = new.micro
    todo = "leave them as they were, or train into another folder"
    values = []
    for name, value in now.items():
        if name not in CHANGEABLE and value != before[name]:
            if name in OF_STORE:
                todo = "take the store that the run was begun on, or train into another folder"
            typed_so = option_typed(SETTINGS, name.rpartition(".")[2], value)
            option, got = typed_so or (name, str(value))
            values.append(f"{option} {got} for {before[name]}")
    if not values:
        return []
    return [
        f"a run that continues must keep its settings, got {listed(list(dict.fromkeys(values)))}; "
        f"{todo}"
    ]


def settings_by_name(config: RunConfig) -> Dict[str, Any]:
    """Settings by name, those of the network and the augmentation as in "unet.filters"; strides
    those of every level."""
    settings = {name: value for name, value in vars(config).items() if name not in NESTED}
    for outer in NESTED:
        for name, value in vars(getattr(config, outer)).items():
            settings[f"{outer}.{name}"] = value
    settings["unet.strides"] = config.unet.every_stride
    return settings


def half_rates(config: RunConfig) -> str:
    """The option that halves the learning rates of a run that continues."""
    return f"--learning-rate {config.peak_rate / 2:.3g}"

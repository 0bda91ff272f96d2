"""What a user chooses of a training run: the options, and how they become settings.

    add_options(parser, SETTINGS)                                 # that a user may choose
    chosen, = arguments([SETTINGS], parser.parse_args())          # those that were given
    settings = with_settings(recipe_settings(chosen), chosen)     # in their places

What was chosen is a dict of name -> value. No TensorFlow.
"""

import dataclasses
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple, TypeVar

from cpu3d.data.augment import NO_AUGMENT, AugmentConfig
from cpu3d.errors import InputError
from cpu3d.settings import Settings
from memory_estimator.common.schema import option, to_command_line
from memory_estimator.job import AUTO, DEFAULT_RECIPE, RECIPES, Architecture
from models.config import DTYPES, POLICIES

_network = functools.partial(option, group="network")

_SUMMARIES = " ".join(f"{name}: {recipe.summary}" for name, recipe in RECIPES.items())


@dataclass(frozen=True)
class Network(Architecture):
    """Fields of UNetConfig that a user may choose."""

    dtype: str = _network(AUTO, "auto: bfloat16 if it is fast here", choices=(AUTO, *DTYPES))
    policy: str = _network(
        AUTO,
        "memory policy; auto: the fastest that fits the free memory, or the policy of the run that "
        "continues",
        choices=(AUTO, *POLICIES),
    )


@dataclass(frozen=True)
class Shorthand:
    """Options that become other settings: the recipe's, the grid, the batch and the rate, the
    augmentation."""

    recipe: Optional[str] = option(
        None,
        f"settings to start from (default: {DEFAULT_RECIPE}). {_SUMMARIES}",
        choices=sorted(RECIPES),
        group="data",
    )
    patch: Optional[Tuple[int, int, int]] = option(
        None,
        "voxels of a patch (default: the largest that fits the card; on a CPU 128 128 128, cut to "
        "the volume)",
        metavar=("X", "Y", "Z"),
        group="patches",
    )
    batch_per_worker: Optional[int] = option(
        None,
        "volumes a step of each worker; the learning rates grow with the number of workers (sgd) "
        "or its square root",
        "N",
        group="training",
        one_of="batch",
    )
    coarse_stride: Optional[Tuple[int, int, int]] = option(
        None,
        "2 for each axis that coarse steps and --resolution make coarser, 1 for the others "
        "(default: those that the first level halves); for a run beside one of an earlier version",
        metavar=("X", "Y", "Z"),
        choices=(1, 2),
        group="training",
    )
    no_augment: bool = option(False, "no augmentation", group="augmentation")


SETTINGS = (Settings, Shorthand, Network, AugmentConfig)
"""The declarations of all settings that a user may choose; others come from the recipe, or the
continued run."""

Chosen = Mapping[str, Any]
"""What a user chose: field name of one of SETTINGS -> value."""


@dataclass(frozen=True)
class TrainOptions:
    """Options of `train` besides the settings of a run."""

    store: Path = option(help="store that `prepare` has written", metavar="DIR")
    run: Path = option(help="folder for the run; continued if it exists", metavar="DIR")
    folds: Optional[int] = option(
        None,
        "train all K folds in turn, into RUN/fold-1 to RUN/fold-K, and score each case by the fold "
        "that held it out",
        "K",
        at_least=2,
    )
    dry_run: bool = option(
        False, "print the plan, its memory and its hours, and end: nothing is written"
    )
    json: bool = option(False, "with --dry-run: print the plan as one JSON object")
    force: bool = option(
        False, "train even if the job may not fit the free memory, or no training case is labelled"
    )
    mlflow: str = option(
        "", "also track the run here, such as sqlite:///mlflow.db or http://localhost:5000", "URI"
    )
    """No setting of the run: it may hold a password, which is never written to a file."""


TRAIN_OPTIONS = (TrainOptions, SETTINGS)  # "OPTIONS" of `train`, which `launch` reads too


def located(chosen: Chosen) -> Dict[str, Any]:
    """The chosen settings with absolute paths: a process that starts in another folder reads them
    too."""
    if not chosen.get("init"):
        return dict(chosen)
    return {**chosen, "init": os.path.abspath(chosen["init"])}


def still_open(chosen: Chosen, values: Chosen) -> Dict[str, Any]:
    """Those of `values` that the chosen settings leave to the plan."""
    return {name: value for name, value in values.items() if chosen.get(name, AUTO) == AUTO}


def as_options(chosen: Chosen) -> List[str]:
    """The command line of these settings, the recipe first."""
    recipe = {name: value for name, value in chosen.items() if name == "recipe"}
    others = {name: value for name, value in chosen.items() if name != "recipe"}
    words = []
    for some in (recipe, others):
        for cls in SETTINGS:
            words += to_command_line(cls, some)
    return words


def recipe_settings(chosen: Chosen) -> Settings:
    """The settings of the chosen "recipe", or of DEFAULT_RECIPE. dtype and grid follow from host
    and store."""
    recipe = RECIPES[chosen.get("recipe") or DEFAULT_RECIPE]
    job = recipe.job
    of_job = Settings(
        unet=job.unet, batch=job.batch, micro_batch=job.micro_batch, optimizer=job.optimizer
    )
    return with_settings(of_job, recipe.settings)


S = TypeVar("S", bound=Settings)

INSTEAD = {  # setting -> others that it replaces
    "epochs": ("steps", "budget_minutes"),
    "steps": ("budget_minutes",),
    "budget_minutes": ("steps",),
    "validate_every": ("validations",),
    "validations": ("validate_every",),
}


OF_PATCHES = ("patch", "patches_per_case", "foreground")  # settings of patches alone


def chosen_again(before: Chosen, now: Chosen) -> Dict[str, Any]:
    """The settings chosen in two calls: those of the later one, and of the earlier one those that
    they do not replace."""
    replaced = {other for name in now for other in INSTEAD.get(name, ())}
    if "batch" in now or "batch_per_worker" in now:
        replaced.update(("batch", "batch_per_worker"))
    replaced.update(_of_another_depth(before, now))
    if now.get("mode") == "whole":
        replaced.update(OF_PATCHES)
    kept = {name: value for name, value in before.items() if name not in replaced}
    return {**kept, **now}


def with_settings(settings: S, chosen: Chosen) -> S:
    """`settings` with the chosen ones in their places, but for values of "auto" and `Shorthand`,
    which the plan decides. A length, or validations, chosen in one way replace those that
    `settings` has in another. Raises ValueError or InputError for values out of range."""
    augment = NO_AUGMENT if chosen.get("no_augment") else settings.augment
    augment = dataclasses.replace(augment, **_fields_of(AugmentConfig, chosen))
    of_network = _fields_of(Network, chosen)
    decided = {name: value for name, value in of_network.items() if value != AUTO}
    if decided.get("strides"):
        decided.setdefault("depth", len(decided["strides"]) + 1)
    if decided.get("depth", settings.unet.depth) != settings.unet.depth:
        decided.setdefault("strides", ())  # those that there are are of another depth
    unet = dataclasses.replace(settings.unet, **decided)
    own = _fields_of(Settings, chosen)
    if own.get("device") == AUTO:
        del own["device"]
    if own.get("steps") and own.get("budget_minutes"):
        rule = "--budget-minutes must come without --steps"
        raise InputError(f"{rule}, got --steps {own['steps']}; leave one out")
    for name in chosen:
        for other in INSTEAD.get(name, ()):
            own.setdefault(other, getattr(Settings, other))  # its default
    return dataclasses.replace(settings, **own, unet=unet, augment=augment)


# --- Private helpers ---


def _of_another_depth(before: Chosen, now: Chosen) -> Tuple[str, ...]:
    """Those of "depth" and "strides" chosen before that do not go with the ones chosen now."""
    strides = now.get("strides", AUTO)
    if strides != AUTO:  # which have a depth
        return ("depth",)
    if "depth" not in now:
        return ()
    strides = before.get("strides", AUTO)
    if now["depth"] == AUTO or (strides != AUTO and len(strides) != now["depth"] - 1):
        return ("strides",)
    return ()


def _fields_of(cls: type, chosen: Chosen) -> Dict[str, Any]:
    """The chosen settings that are fields of `cls`, lists as tuples."""
    names = {setting.name for setting in dataclasses.fields(cls)} - {"unet", "augment"}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in chosen.items()
        if name in names
    }

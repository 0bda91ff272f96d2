"""What is compared: named ways to train, and what each comes to on one store and one host."""

import argparse
import dataclasses
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from cpu3d import memory_plan
from cpu3d.config import RunConfig
from cpu3d.data.folds import with_fold
from cpu3d.data.region import Shape3
from cpu3d.data.store import Store
from cpu3d.errors import InputError
from cpu3d.host.gpu import Gpu
from cpu3d.patch_plan import BOTTOM
from cpu3d.recipes import RECIPES
from cpu3d.resolve import resolve
from cpu3d.training_options import SIZES_OF_PATCH, add_training_options, chosen_settings
from memory_estimator.estimate import Estimate
from memory_estimator.host import Host

OF_PATCHES = (*SIZES_OF_PATCH, "patches_per_case", "foreground")
"""Settings that a run on whole volumes does not have: given for all variants, they are for those on patches."""

NOT_COMMON = ("seed", "steps", "budget_minutes", "validate_every", "patience")
"""Settings that the comparison decides for every run: an early stop would spend less than the budget."""

NOT_OWN = (*NOT_COMMON, "epochs", "validations", "fold", "regions")
"""Settings that no variant may have for itself: with them it would answer another question."""


@dataclass(frozen=True)
class Variant:
    """A way to train, by name."""

    name: str
    """Of its runs' folders and of the lines of every table."""
    settings: Dict[str, Any] = field(default_factory=dict)
    """Chosen ones, by the names of `cpu3d.training_options.chosen_settings`; the common ones are among them."""
    recipe: Optional[str] = None


@dataclass(frozen=True)
class Resolved:
    """A variant on one store and one host, with nothing left open that could differ from run to run."""

    variant: Variant
    """Its settings hold what the host decided: dtype, device, policy, patch."""
    config: RunConfig
    cases: int
    """To train on."""
    foreseen: Optional[Estimate]
    """Time and memory of a step; None on a card, or where nothing is known of the engine."""

    @property
    def steps_per_epoch(self) -> int:
        return self.cases * self.config.patches_per_case // self.config.batch


def common_settings(args: argparse.Namespace) -> Tuple[Dict[str, Any], Optional[str]]:
    """The settings that compare itself was given for all variants, and the recipe. Its budget and validations are none.

    Raises InputError for those that are not for the user to choose here.
    """
    settings = chosen_settings(args)
    for name in ("epochs", "validations"):
        settings.pop(name, None)
    _check("compare", settings, NOT_COMMON)
    return settings, args.recipe


def parse_variant(name: str, options: str, common: Dict[str, Any], recipe: Optional[str]) -> Variant:
    """The variant `name` of train's `options`, such as "--mode patch --patch 64 64 64", on top of the common settings.

    Raises InputError, which names the variant, for what is no name of a folder or what train would not take.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise InputError(
            f"--variant must have a name of letters, digits, '-', '_' and '.', got {name!r}; it names folders"
        )
    parser = _Parser(name)
    add_training_options(parser)
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise InputError(f"variant {name} must have options as on a command line, got {options!r}: {error}") from None
    args = parser.parse_args(words)
    own = chosen_settings(args)
    _check(f"variant {name}", own, NOT_OWN)
    if set(own) & set(SIZES_OF_PATCH):
        common = {key: value for key, value in common.items() if key not in SIZES_OF_PATCH}
    recipe = args.recipe or recipe
    usual = RECIPES[recipe or "brats-regions"]().mode
    if own.get("mode", common.get("mode", usual)) == "whole":
        common = {key: value for key, value in common.items() if key not in OF_PATCHES}
    return Variant(name, {**common, **own}, recipe)


def resolved(variant: Variant, store: Store, host: Host, gpus: Sequence[Gpu]) -> Resolved:
    """What a variant comes to. Raises InputError, which names the variant, where `train` would refuse it."""
    try:
        config = resolve(store, NO_RUN, host, variant.settings, variant.recipe, gpus)
        view = with_fold(store, config.fold)
        cases, volumes = len(view.cases("train")), memory_plan.volumes_of(config, view)
        foreseen, is_open = None, variant.settings.get("policy", "auto") == "auto"
        if config.device != "cpu":
            config = memory_plan.under(config, "speed") if is_open else config
        else:
            if is_open:
                config, _ = memory_plan.pick_policy(config, host, cases * config.patches_per_case, volumes)
            foreseen = memory_plan.foresee(config, host, cases * config.patches_per_case, volumes)
    except InputError as error:
        raise InputError(*(f"variant {variant.name}: {problem}" for problem in error.problems)) from None
    return Resolved(dataclasses.replace(variant, settings=_pinned(variant, config)), config, cases, foreseen)


def usual_variants(
    common: Dict[str, Any], recipe: Optional[str], store: Store, host: Host, gpus: Sequence[Gpu]
) -> List[Variant]:
    """Whole volumes, and patches: of the size that `common` has, else of half their grid along each axis.

    Raises InputError for a common mode, as there is one of each.
    """
    if "mode" in common:
        raise InputError(f"--mode must be left to the variants, got {common['mode']}; compare has one of each")
    shared = {key: value for key, value in common.items() if key not in OF_PATCHES}
    whole = Variant("whole", {**shared, "mode": "whole"}, recipe)
    if set(common) & set(SIZES_OF_PATCH):
        return [whole, Variant("patch", {**common, "mode": "patch"}, recipe)]
    config = resolved(whole, store, host, gpus).config
    patch = list(half(config.grid, config.unet.divisor))
    return [whole, Variant("patch-half", {**common, "mode": "patch", "patch": patch}, recipe)]


def half(grid: Shape3, divisor: int) -> Shape3:
    """Half of `grid` along each axis, down to a multiple of `divisor`, and no less than the network learns from."""
    return tuple(min(n, max(n // (2 * divisor) * divisor, BOTTOM * divisor)) for n in grid)


# --- Private helpers ---

NO_RUN = Path("/nonexistent")
"""Every run of a comparison is a new one."""


class _Parser(argparse.ArgumentParser):
    """Raises InputError where others print and exit."""

    def __init__(self, name: str):
        super().__init__(add_help=False, allow_abbrev=False)
        self.name = name

    def error(self, message: str):
        raise InputError(f"variant {self.name} must have options of train, got: {message}; see `train --help`")


def _check(who: str, settings: Dict[str, Any], refused: Sequence[str]) -> None:
    instead = {
        "seed": "give --seeds to compare",
        "steps": "give compare a budget: --epochs, --voxels or --minutes",
        "budget_minutes": "give compare a budget: --epochs, --voxels or --minutes",
        "epochs": "give compare a budget: --epochs, --voxels or --minutes",
        "validate_every": "give --validations to compare",
        "validations": "give it to compare, for all variants",
        "patience": "a run that stops early spends less than the others",
        "fold": "give it to compare, for all variants",
        "regions": "give them to compare, for all variants",
    }
    problems = [
        f"{who} must be without --{name.replace('_', '-')}, got {settings[name]}; {instead[name]}"
        for name in refused
        if name in settings
    ]
    if problems:
        raise InputError(*problems)


def _pinned(variant: Variant, config: RunConfig) -> Dict[str, Any]:
    """The settings with what the host decided spelled out: every run of the variant is then of one kind."""
    settings = {key: value for key, value in variant.settings.items() if key != "gpu_memory"}
    settings.update(mode=config.mode, dtype=config.unet.dtype, policy=config.unet.policy, device=config.device)
    if config.is_patch:
        settings.update(patch=list(config.grid), patches_per_case=config.patches_per_case)
    return settings

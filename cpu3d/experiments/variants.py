"""Variants of a comparison: ways to train, and the one budget that all their runs have.

    variants = {"whole": parse_variant("whole", "--mode whole", common)}
    planned = planned_variants(variants, store, ["1/5"], validations, epochs=25)

Variants differ in what the network sees, not in the network: they have the levels and strides of
the first one, unless they choose others. What a plan decides for this host is decided once, so that
all runs of a variant are alike."""

import argparse
import math
import re
import shlex
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from cpu3d.data.store import Store
from cpu3d.errors import InputError, raise_if_any
from cpu3d.host.gpu import HostGpus
from cpu3d.plan import NO_RUN, Plan, make_plan
from cpu3d.run.transfer import leak
from cpu3d.settings import SETTINGS, RunConfig, located, recipe_settings
from memory_estimator.common.schema import add_options, arguments
from memory_estimator.common.units import by, format_bytes, format_seconds
from memory_estimator.host import read_host

Json = Dict[str, Any]

DECIDED = ("seed", "fold", "steps", "budget_minutes")
"""Settings that `compare` decides for every run."""
FOR_ALL = (*DECIDED, "epochs", "validations", "regions")
NETWORK = ("recipe", "init", "depth", "strides")  # another one of them is another network
# No step is faster: a budget of minutes has the epochs that such steps would fill.
LEAST_STEP_S = 1e-3
# Steps, of which a curriculum's share is a whole number: their voxels are in proportion to those of
# many.
FEW = 12


COLUMNS = ("variant", "sees", "batch", "steps", "voxels", "policy", "a step", "a run", "memory")


@dataclass(frozen=True)
class VariantPlan:
    """The training of every run of a variant."""

    name: str
    settings: Json  # of `train`, all but seed and fold
    steps: Optional[int]  # None under a budget of minutes: each run takes those that fit
    run_s: Optional[float]  # predicted, of its steps; None if that is not known
    row: List[str]  # of the table of the plan, by COLUMNS


def parse_variant(name: str, options: str, common: Json) -> Json:
    """The common settings with those of a variant's `options`, such as "--mode patch --patch 64 64
    64", in their place. Raises InputError, with the variant's name, for an invalid name and for
    options that train would refuse."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise InputError(
            "--variant must have a name of letters, digits, '-', '_' and '.', at most 64, got "
            f"{name!r}; choose another, as it names folders"
        )
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_options(parser, SETTINGS)
    try:
        (settings,) = arguments([SETTINGS], parser.parse_args(shlex.split(options)))
    except ValueError as error:
        raise InputError(
            f"variant {name} must have options of train, got {options!r}: {error}; see `train "
            "--help`"
        ) from None
    own = located(settings)
    refuse_settings(f"variant {name}", own, FOR_ALL)
    together = {**common, **own}
    if together.get("mode", recipe_settings(together).mode) == "whole":
        return {**without(common, ("patch",)), **own}
    return together


def planned_variants(
    variants: Mapping[str, Json],
    store: Store,
    folds: Sequence[str],
    validations: int,
    *,
    epochs: float,
    minutes: Optional[float] = None,
    force: bool = False,
) -> List[VariantPlan]:
    """The plan of every variant's runs, the first of which is the baseline; `folds` are those
    that are trained, or [""], and `force` is that of `make_plan`. The budget of every run is
    `minutes` of steps, or the voxels of so many `epochs` of the baseline.

    All have the same number of validations, from which the best weights are chosen: `validations`,
    or as many as the variant with the fewest steps has steps. Raises InputError with the problems
    of all variants, each by name."""
    resolved: Dict[str, Tuple[Json, Plan]] = {}
    problems: List[str] = []
    first = next(iter(variants.values()))
    network: Json = {}
    for name, chosen in variants.items():
        settings = {**network, **chosen}
        if any(each in chosen and chosen[each] != first.get(each) for each in NETWORK):
            settings = dict(chosen)
        try:
            plan = _plan(store, settings, folds[0], force=force)
            config = plan.config
            for fold in folds if config.init else ():
                seen = leak(_plan(store, settings, fold, force=force).config.init_record)
                problems += [f"variant {name}: {seen}"] if seen else []
        except InputError as error:
            problems += [f"variant {name}: {problem}" for problem in error.problems]
            continue
        settings.update(
            mode=config.mode,
            dtype=config.unet.dtype,
            policy=config.unet.policy,
            device=config.device,
            curriculum=config.curriculum,
        )
        if not config.init:  # whose network it is
            settings.update(depth=config.unet.depth, strides=config.unet.every_stride)
        if config.is_patch:
            settings.update(patch=config.grid)
        if not resolved:
            network = {name: settings[name] for name in NETWORK if name in settings}
        resolved[name] = (settings, plan)
    raise_if_any(problems)
    steps: List[Optional[int]] = [None] * len(resolved)
    if not minutes:
        steps = _steps(epochs, [plan for _, plan in resolved.values()])
    validations = min([validations, *filter(None, steps)])
    planned = []
    for (name, (settings, plan)), own_steps in zip(resolved.items(), steps):
        settings["validations"] = validations
        if minutes:
            shortest_s = LEAST_STEP_S * plan.steps_per_epoch
            settings["epochs"] = math.ceil(60 * minutes / shortest_s)
            settings["budget_minutes"] = minutes
        else:
            settings["steps"] = own_steps
        planned.append(_variant_plan(name, settings, plan, own_steps))
    return planned


def refuse_settings(source: str, settings: Json, names: Sequence[str]) -> None:
    """Raise InputError for the settings among `names`, which `source`, such as "variant whole", may
    not choose."""
    problems = []
    for name in names:
        if name not in settings:
            continue
        todo = "give it outside the quotes, for all variants"
        if name in DECIDED:
            todo = "runs have compare's --seeds, --folds, --validations, --epochs or --minutes"
        option = f"--{name.replace('_', '-')}"
        problems.append(f"{source} must be without {option}, got {settings[name]}; {todo}")
    raise_if_any(problems)


def without(settings: Json, names: Sequence[str]) -> Json:
    """Return the settings but for those of these names."""
    return {name: value for name, value in settings.items() if name not in names}


# --- Private helpers ---


def _plan(store: Store, settings: Json, fold: str, *, force: bool) -> Plan:
    """The plan of a run of a fold, or of none."""
    chosen = {**settings, "fold": fold} if fold else settings
    return make_plan(store, NO_RUN, read_host(), chosen, gpus=HostGpus(), force=force)


def _voxels(config: RunConfig, steps: int) -> int:
    """Voxels that the network sees in a run of so many steps, a curriculum's share of them at half
    resolution."""
    full_steps = config.with_coarse_share(steps).full_steps(steps)
    return round(config.batch * config.seen_voxels * full_steps)


def _steps(epochs: float, plans: Sequence[Plan]) -> List[Optional[int]]:
    """The steps of each variant, 1 or more, whose voxels are nearest to those of so many epochs of
    the first."""
    first = plans[0]  # of patches an epoch has as many as make up the volumes
    voxels = _voxels(first.config, round(epochs * first.steps_per_epoch))
    steps: List[Optional[int]] = []
    for plan in plans:
        config = plan.config
        near = max(round(voxels * FEW / _voxels(config, FEW)), 1)
        candidates = range(max(near - FEW, 1), near + FEW)
        steps.append(min(candidates, key=lambda count: abs(_voxels(config, count) - voxels)))
    return steps


def _variant_plan(name: str, settings: Json, plan: Plan, steps: Optional[int]) -> VariantPlan:
    config = plan.config
    step_s = None
    peak_bytes = None
    if plan.forecast:
        step_s = plan.training_s / plan.steps
        peak_bytes = plan.forecast.process_peak_bytes
    length = ["by time", "by time"]
    run_s = None
    if steps:
        length = [f"{steps:,}", f"{_voxels(config, steps) / 1e6:,.1f} M"]
        run_s = steps * step_s if step_s else None
    sees = [by(config.grid), str(config.batch)]
    costs = [format_seconds(step_s), format_seconds(run_s), format_bytes(peak_bytes)]
    row = [name, *sees, *length, config.unet.policy, *costs]
    return VariantPlan(name, settings, steps, run_s, row)


class _Parser(argparse.ArgumentParser):
    """A parser that raises ValueError instead of printing and exiting."""

    def error(self, message: str):
        raise ValueError(message)

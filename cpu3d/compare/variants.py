"""The variants of a comparison: ways to train, each the common options with some of its own.

    variants = {"whole": parse_variant("whole", "--mode whole", common)}
    settings, plan = resolve_variants(variants, store)["whole"]

All runs of a variant have the settings that its plan has decided once, and all variants the network
of the first one, unless they choose another."""

import argparse
import re
import shlex
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from cpu3d.chosen import OF_PATCHES, SETTINGS, located, recipe_settings, with_settings
from cpu3d.data.store import Store, grid_size
from cpu3d.data.stores.store_decisions import depth_of_store, strides_of_store
from cpu3d.errors import InputError, raise_if_any
from cpu3d.host.gpu import HostGpus
from cpu3d.plan import NO_RUN, Plan, make_plan
from cpu3d.run.config_json import matching_settings
from cpu3d.run.transfer import leak
from memory_estimator.common.schema import add_options, arguments, to_command_line
from memory_estimator.host import read_host
from memory_estimator.job import AUTO
from memory_estimator.planner import BOTTOM

# Settings that compare decides for every run, and those that are the same for all variants.
DECIDED = ("seed", "steps", "budget_minutes", "validate_every", "patience")
FOR_ALL = (*DECIDED, "epochs", "validations", "fold", "regions")

Json = Dict[str, Any]


def as_options(settings: Mapping[str, Any]) -> List[str]:
    """The command line of these settings, the recipe first."""
    recipe = {name: settings[name] for name in settings if name == "recipe"}
    words = []
    for some in (recipe, without(settings, ("recipe",))):
        for cls in SETTINGS:
            words += to_command_line(cls, some)
    return words


def parse_variant(name: str, options: str, common: Json) -> Json:
    """The common settings with those of a variant's `options`, such as "--mode patch --patch 64 64
    64", in their place.

    Raises InputError, with the variant's name, for an invalid name and for options that train would
    refuse."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        rule = "--variant must have a name of letters, digits, '-', '_' and '.', at most 64"
        raise InputError(f"{rule}, got {name!r}; choose another, as it names folders")
    try:
        words = shlex.split(options)
    except ValueError as error:  # a quotation that does not end
        rule = f"variant {name} must have options of train"
        raise InputError(f"{rule}, got {options!r}: {error}; see `train --help`") from None
    own = read_train_options(words, f"variant {name}")
    refuse_settings(f"variant {name}", own, FOR_ALL)
    together = {**common, **own}
    mode = together.get("mode", recipe_settings(together).mode)
    if mode == "whole":
        common = without(common, OF_PATCHES)
    return {**common, **own}


def read_train_options(words: Sequence[str], who: str) -> Json:
    """The settings in words of a command line of `train`. Raises InputError for other words; `who`
    has them, such as "variant whole"."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_options(parser, SETTINGS)
    try:
        (settings,) = arguments([SETTINGS], parser.parse_args(words))
    except ValueError as error:
        rule = f"{who} must have options of train"
        got = f"{shlex.join(words)!r}: {error}"
        raise InputError(f"{rule}, got {got}; see `train --help`") from None
    return located(settings)


def usual_variants(
    common: Json, store: Store, *, begun: Optional[Json] = None, force: bool = False
) -> Dict[str, Json]:
    """Whole volumes, and patches: of the size that `common` has, else of half their grid along each
    axis, down to what the network takes and no less than it learns from. `begun` are settings of
    the network of a comparison that is continued.

    Raises InputError for a common mode, as each variant has its own.
    """
    if "mode" in common:
        rule = f"--mode must be left to the variants, got {common['mode']}"
        raise InputError(f"{rule}; leave it out to train both modes")
    whole = {**without(common, OF_PATCHES), "mode": "whole"}
    patch = {**common, "mode": "patch"}
    if "patch" in common:
        return {"whole": whole, "patch": patch}
    of_begun = {**whole, **(begun or {})}
    _, plan = resolve_variants({"whole": of_begun}, store, force=force)["whole"]
    patch["patch"] = []
    for n, divisor in zip(plan.config.grid, plan.config.unet.divisors):
        half = n // (2 * divisor) * divisor
        patch["patch"].append(min(n, max(half, BOTTOM * divisor)))
    return {"whole": whole, "patch-half": patch}


def resolve_variants(
    variants: Mapping[str, Json], store: Store, *, force: bool = False
) -> Dict[str, Tuple[Json, Plan]]:
    """The settings of every variant, with those that its plan on this store and host decides, and
    the plan; `force` is that of `make_plan`.

    So all runs of a variant have the same settings. Raises InputError with the problems of all
    variants, each by name."""
    host = read_host()
    gpus = HostGpus()
    resolved = {}
    problems = []
    baseline = next(iter(variants), "")
    for name, chosen in variants.items():
        try:
            first = resolved[baseline][1] if baseline in resolved else None
            chosen = _with_network_of(variants[baseline], first, chosen, store)
            plan = make_plan(store, NO_RUN, host, chosen, gpus=gpus, force=force)
        except InputError as error:
            problems += [f"variant {name}: {problem}" for problem in error.problems]
            continue
        config = plan.config
        if leak(config.init_record):
            problems.append(f"variant {name}: {leak(config.init_record)}")
        settings = dict(chosen)
        settings.update(
            mode=config.mode,
            dtype=config.unet.dtype,
            policy=config.unet.policy,
            device=config.device,
            **matching_settings(config),
        )
        if config.is_patch:
            settings.update(patch=list(config.grid), patches_per_case=config.patches_per_case)
        resolved[name] = settings, plan
    raise_if_any(problems)
    return resolved


def refuse_settings(source: str, settings: Json, names: Sequence[str]) -> None:
    """Raise InputError for the settings among `names`, which `source`, such as "variant whole", may
    not choose."""
    problems = []
    for name in names:
        if name not in settings:
            continue
        todo = "give it outside the quotes, for all variants"
        if name in DECIDED:
            todo = "all variants have compare's --seeds, --validations, and --epochs or --minutes"
        option = f"--{name.replace('_', '-')}"
        problems.append(f"{source} must be without {option}, got {settings[name]}; {todo}")
    raise_if_any(problems)


def without(settings: Json, names: Sequence[str]) -> Json:
    return {name: value for name, value in settings.items() if name not in names}


# --- Private helpers ---


def _with_network_of(baseline: Json, first: Optional[Plan], chosen: Json, store: Store) -> Json:
    """The settings of a variant, with the levels and strides of the baseline's whole volumes unless
    it has some of its own: variants differ in what the network sees, not in the network. `first` is
    the baseline's plan, None for the baseline itself, and if it has none."""
    try:
        settings = with_settings(recipe_settings(chosen), chosen)
        of_baseline = with_settings(recipe_settings(baseline), baseline)
    except (ValueError, InputError):  # its own plan refuses them by name
        return chosen
    has_own_strides = chosen.get("strides", AUTO) != AUTO
    if settings.init or has_own_strides:
        return chosen
    depth = settings.unet.depth  # its own, else the most of its recipe
    has_own_depth = chosen.get("depth", AUTO) != AUTO
    has_baseline_own_strides = baseline.get("strides", AUTO) != AUTO
    if first and not has_baseline_own_strides:
        network = first.config.unet
        depth_to_share = network.depth if has_own_depth else of_baseline.unet.depth
        if depth == depth_to_share:
            return {**chosen, "depth": network.depth, "strides": network.every_stride}
    extent = grid_size(store, extent=of_baseline.extent, multiple=1)
    if not has_own_depth:
        depth, _ = depth_of_store(store, of_baseline.extent, depth)
    strides, _ = strides_of_store(store, extent, depth)
    return {**chosen, "depth": depth, "strides": strides}


class _Parser(argparse.ArgumentParser):
    """A parser that raises ValueError instead of printing and exiting."""

    def error(self, message: str):
        raise ValueError(message)

"""The plan of a comparison, as it is kept in OUT/compare.json: variants, one budget for all, and the runs of each.

A second call must ask for what the first did: then it continues, and more seeds are added; anything else is refused.
Steps, dtype, policy and patch are decided once and then kept, so that every run of a variant is of one kind.
"""

import argparse
import functools
import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, TypedDict

from cpu3d.compare.run import Evaluation
from cpu3d.data.records import SPLITS
from cpu3d.data.store import Store
from cpu3d.errors import InputError, refuse
from cpu3d.host.gpu import HostGpus
from cpu3d.inference.evaluate import UNTOUCHED
from cpu3d.inference.scores import TOLERANCE_MM
from cpu3d.pages.page import flat
from cpu3d.plan import Plan, make_plan
from cpu3d.settings import SETTINGS, RunConfig, recipe_config
from cpu3d.util.atomic import is_untouched, write_json
from memory_estimator.common.files import read_json, typed
from memory_estimator.common.schema import add_options, arguments, option, to_command_line
from memory_estimator.host import read_host
from memory_estimator.planner import BOTTOM

SCHEMA, FILE = 3, "compare.json"
VALIDATIONS = 4  # of every run, where no number is chosen
WARMUP_SHARE = 10  # the warm-up is at most a tenth of a run: one of large batches or patches may have few steps
LEAST_STEP_S = 1e-3  # no step is faster: a budget of minutes has the epochs that such steps would fill
FEW = 8  # steps whose voxels are in proportion to those of many: a curriculum's share of them is whole

# Settings of patches alone, those that compare decides for every run, and those that are one for all variants.
OF_PATCHES = ("patch", "patches_per_case", "foreground")
DECIDED = ("seed", "steps", "budget_minutes", "validate_every", "patience")
FOR_ALL = (*DECIDED, "epochs", "validations", "fold", "regions")

Json = Dict[str, Any]

a_budget = functools.partial(option, None, above=0, below=math.inf)


@dataclass(frozen=True)
class Options:
    """The options of `compare` but those of training, which are for all variants."""

    out: Path = option(help="folder to write; continued where it exists", metavar="DIR")
    store: Optional[Path] = option(None, help="store that `prepare` has written", metavar="DIR")
    variant: Tuple[Tuple[str, str], ...] = option(
        (),
        help='a way to train, such as: patch-64 "--mode patch --patch 64 64 64"; repeat for each '
        "(default: whole volumes, and patches of half their size)",
        metavar=("NAME", "OPTIONS"),
        repeat=True,
    )
    runs: Tuple[Path, ...] = option((), help="compare these scored run folders; nothing is trained", metavar="DIR")
    voxels: Optional[float] = a_budget("budget of every run: voxels seen", metavar="V")
    minutes: Optional[float] = a_budget("budget of every run: wall time of its steps", metavar="M")
    seeds: Tuple[int, ...] = option((0, 1, 2), metavar="S", at_least=0)
    split: str = option(UNTOUCHED, help="cases to score", choices=SPLITS)
    tolerance: float = option(
        TOLERANCE_MM, help="tolerance of the surface Dice in mm", metavar="MM", at_least=0, below=math.inf
    )
    title: Optional[str] = option(None, help="title of page and record (default: the data's name)", metavar="TEXT")
    record: Optional[Path] = option(None, help="append the result to this .jsonl file", metavar="FILE")
    dry_run: bool = option(False, help="print the plan and stop")
    force: bool = option(False, help="train even if a job may not fit the free memory")

    @property
    def evaluation(self) -> Evaluation:
        return Evaluation(self.split, self.tolerance)


# --- Variants ---


def as_options(settings: Mapping[str, Any]) -> List[str]:
    """The command line of these settings, the recipe first."""
    parts = ({name: settings[name] for name in settings if (name == "recipe") is first} for first in (True, False))
    return [word for part in parts for cls in SETTINGS for word in to_command_line(cls, part)]


def parse_variant(name: str, options: str, common: Json) -> Json:
    """The chosen settings of the variant `name` of train's `options`, such as "--mode patch --patch 64 64 64", on top
    of the common ones.

    Raises InputError, with the variant's name, for an invalid name and for options that train would refuse.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        rule = "have a name of letters, digits, '-', '_' and '.'"
        raise InputError(f"--variant must {rule}, got {name!r}; it names folders")
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_options(parser, SETTINGS)
    try:
        (own,) = arguments([SETTINGS], parser.parse_args(shlex.split(options)))
    except ValueError as error:
        problem = f"variant {name} must have options of train, got {options!r}: {error}; see `train --help`"
        raise InputError(problem) from None
    _refuse_settings(f"variant {name}", own, FOR_ALL)
    if own.get("mode", common.get("mode", recipe_config({**common, **own}).mode)) == "whole":
        common = _without(common, OF_PATCHES)
    return {**common, **own}


def usual_variants(common: Json, store: Store) -> Dict[str, Json]:
    """Whole volumes, and patches: of the size that `common` has, else of half their grid along each axis, down to what
    the network takes and no less than it learns from.

    Raises InputError for a common mode, as there is one of each.
    """
    if "mode" in common:
        raise InputError(f"--mode must be left to the variants, got {common['mode']}; compare has one of each")
    whole, patch = {**_without(common, OF_PATCHES), "mode": "whole"}, {**common, "mode": "patch"}
    if "patch" in common:
        return {"whole": whole, "patch": patch}
    config = resolve_variants({"whole": whole}, store)["whole"][1].config
    divisor = config.unet.divisor
    patch["patch"] = [min(n, max(n // (2 * divisor) * divisor, BOTTOM * divisor)) for n in config.grid]
    return {"whole": whole, "patch-half": patch}


def resolve_variants(variants: Mapping[str, Json], store: Store) -> Dict[str, Tuple[Json, Plan]]:
    """The settings of every variant, what its plan on this store and host decides among them, and the plan.

    So nothing can differ from run to run. Raises InputError with the problems of all variants, each by name.
    """
    host, gpus, resolved, problems = read_host(), HostGpus(), {}, []
    for name, chosen in variants.items():
        try:
            plan = make_plan(store, Path("/nonexistent"), host, chosen, gpus=gpus)
        except InputError as error:
            problems += [f"variant {name}: {problem}" for problem in error.problems]
            continue
        config, settings = plan.config, dict(chosen)
        settings.update(mode=config.mode, dtype=config.unet.dtype, policy=config.unet.policy, device=config.device)
        if config.is_patch:
            settings.update(patch=list(config.grid), patches_per_case=config.patches_per_case)
        resolved[name] = settings, plan
    refuse(problems)
    return resolved


# --- The budget, and what every run of a variant does ---


class Budget(NamedTuple):
    """The budget of every run."""

    kind: str  # "epochs": voxels of so many epochs of the baseline; "voxels"; "minutes": wall time of the steps
    amount: float

    def words(self, baseline: str) -> str:
        """Such as "the voxels of 25 epochs of whole each"."""
        amount = f"{self.amount:,g}"
        return {
            "epochs": f"the voxels of {amount} epochs of {baseline} each",
            "voxels": f"{self.amount / 1e6:,.4g} million voxels each",
            "minutes": f"{amount} minutes of steps each",
        }[self.kind]


class Course(TypedDict):
    """The training of every run of a variant."""

    name: str
    options: List[str]  # of `train`, all but the seed
    grid: Tuple[int, int, int]
    batch: int
    policy: str
    step_s: Optional[float]  # predicted, as the next is; None where nothing is known of the engine
    peak_bytes: Optional[int]
    steps: Optional[int]  # None under a budget of minutes: each run takes those that fit
    voxels: Optional[int]


def run_voxels(config: RunConfig, steps: int) -> int:
    """Voxels that the network sees in a run of so many steps, of which a curriculum has its share at half."""
    return round(config.batch * math.prod(config.grid) * config.with_coarse_share(steps).full_steps(steps))


def steps_of(config: RunConfig, voxels: float) -> int:
    """The number of steps, 1 or more, with the nearest number of voxels."""
    near = max(round(voxels * FEW / run_voxels(config, FEW)), 1)
    return min(range(max(near - FEW, 1), near + FEW), key=lambda steps: abs(run_voxels(config, steps) - voxels))


def courses(variants: Mapping[str, Tuple[Json, Plan]], budget: Budget, validations: int) -> List[Course]:
    """What every run of each variant does. All have equally many validations to choose their best weights from: as
    many as the steps of the shortest allow."""
    first, voxels = next(iter(variants.values()))[1], budget.amount
    if budget.kind == "epochs":
        voxels = run_voxels(first.config, voxels * first.steps_per_epoch)  # patches as many as make up a volume
    is_timed = budget.kind == "minutes"
    steps = {name: None if is_timed else steps_of(plan.config, voxels) for name, (_, plan) in variants.items()}
    validations = min([validations, *filter(None, steps.values())])
    found = []
    for name, (settings, plan) in variants.items():
        config, predicted, own = plan.config, plan.forecast, {"validations": validations}
        if is_timed:
            own["epochs"] = math.ceil(60 * budget.amount / LEAST_STEP_S / plan.steps_per_epoch)
            own["budget_minutes"] = budget.amount
        else:
            own.update(steps=steps[name], warmup_steps=min(config.warmup_steps, steps[name] // WARMUP_SHARE))
        found.append(
            Course(
                name=name,
                options=as_options({**settings, **own}),
                grid=config.grid,
                batch=config.batch,
                policy=config.unet.policy,
                step_s=predicted and plan.training_s / plan.steps,
                peak_bytes=predicted and predicted.full.process_peak_bytes,
                steps=steps[name],
                voxels=steps[name] and run_voxels(config, steps[name]),
            )
        )
    return found


def planned(options: Options, settings: Json, store: Store) -> Tuple[Json, List[Course], Budget]:
    """What a later call must ask for too, the variants' courses and the budget.

    Raises InputError for settings that are compare's to choose, and as `parse_variant` and `resolve_variants`.
    """
    _refuse_settings("compare", settings, DECIDED)
    common = _without(settings, ("epochs", "validations"))
    named = {name: parse_variant(name, words, common) for name, words in options.variant}
    variants = named or usual_variants(common, store)
    resolved, validations = resolve_variants(variants, store), settings.get("validations", VALIDATIONS)
    baseline, (_, first) = next(iter(resolved.items()))
    amounts = {"voxels": options.voxels, "minutes": options.minutes}
    amounts["epochs"] = settings.get("epochs", first.config.epochs)
    budget = next(Budget(kind, amount) for kind, amount in amounts.items() if amount)
    asked = {
        "baseline": baseline,
        "variants": {name: {"recipe": None, **chosen} for name, chosen in variants.items()},
        "split_hash": store.manifest.split_hash,
        "validations": validations,
        "evaluation": options.evaluation._asdict(),
        "budget": budget._asdict(),
    }
    return asked, courses(resolved, budget, validations), budget


# --- compare.json ---


@dataclass(frozen=True)
class Kept:
    """The content of compare.json."""

    asked: Json  # what a later call must ask for too
    seeds: List[int]
    plan: List[Course]  # one a variant; empty for runs that were there already
    results: Optional[Json] = None  # None before the last run is done

    def save(self, out: Path) -> None:
        write_json(Path(out) / FILE, {"schema": SCHEMA, **vars(self)})


def continued(new: Kept, out: Path) -> Kept:
    """A new comparison or, in a folder that holds the same one, that with the new seeds added, then without results.

    Raises InputError for a compare.json that is damaged or of another version, for a folder of other files, and where
    another comparison was asked for there, with all differences at once.
    """
    path = Path(out) / FILE
    if not path.is_file():
        if path.parent.is_dir() and not is_untouched(path.parent, FILE):
            raise InputError(f"--out {out} must be empty or hold a {FILE}, got other files; choose another")
        return new
    try:
        content = read_json(path)
        if content.pop("schema") != SCHEMA:
            raise ValueError("another version's")
        kept = typed(content, Kept)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{path} must be as compare writes it, got {error!r}; choose another --out") from None
    before, now = dict(flat(kept.asked)), dict(flat(new.asked))
    refuse(
        f"{name} must stay as comparison {out} was started, got {now.get(name, 'none')} for {before.get(name, 'none')};"
        " leave it as it was, or choose another --out"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    )
    names = [course["name"] for course in kept.plan]  # they name folders
    if names != [course["name"] for course in new.plan]:
        problem = f"must be as compare writes it, got a plan of {', '.join(names)}"
        raise InputError(f"{path} {problem}; choose another --out")
    seeds = list(dict.fromkeys((*kept.seeds, *new.seeds)))
    return Kept(kept.asked, seeds, kept.plan, kept.results if seeds == kept.seeds else None)


# --- Private helpers ---


class _Parser(argparse.ArgumentParser):
    """Raises ValueError where others print and exit."""

    def error(self, message: str):
        raise ValueError(message)


def _refuse_settings(who: str, settings: Json, names: Sequence[str]) -> None:
    """Raise InputError for settings of these names, which `who` may not choose."""
    refuse(
        f"{who} must be without --{name.replace('_', '-')}, got {settings[name]}; compare itself has --seeds, a budget "
        "and --validations for all variants"
        for name in names
        if name in settings
    )


def _without(settings: Json, names: Sequence[str]) -> Json:
    return {name: value for name, value in settings.items() if name not in names}

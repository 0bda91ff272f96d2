"""The plan of a comparison, as it is kept in OUT/compare.json: variants, one budget for all, and the runs of each.

A second call must ask for what the first did: then it continues, and more seeds are added; anything else is refused.
Steps, dtype, policy and patch are decided once and then kept, so that every run of a variant is of one kind. To the
variants of --resolutions, a resolution at a batch each, others may be added.
"""

import argparse
import functools
import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, TypedDict

from cpu3d.compare.run import Evaluation, PlannedRun, run_voxels
from cpu3d.data.records import SPLITS
from cpu3d.data.store import Store
from cpu3d.errors import InputError, refuse
from cpu3d.host.gpu import HostGpus
from cpu3d.inference.evaluate import UNTOUCHED
from cpu3d.inference.scores import TOLERANCE_MM
from cpu3d.pages.page import flat
from cpu3d.plan import Plan, make_plan
from cpu3d.settings import SETTINGS, SIZES_OF_PATCH, RunConfig, as_options, recipe_config
from cpu3d.util.atomic import is_untouched, write_json
from memory_estimator.common.files import read_json, typed
from memory_estimator.common.schema import add_options, arguments, option
from memory_estimator.host import read_host
from memory_estimator.planner import BOTTOM

SCHEMA, FILE = 2, "compare.json"
VALIDATIONS = 4  # of every run, where no number is chosen
WARMUP_SHARE = 10  # the warm-up is at most a tenth of a run: one of large batches or patches may have few steps
LEAST_STEP_S = 1e-3  # no step is faster: a budget of minutes has the epochs that such steps would fill

# Settings of patches alone, those that compare decides for every run, and those that are one for all variants.
OF_PATCHES = (*SIZES_OF_PATCH, "patches_per_case", "foreground")
DECIDED = ("seed", "steps", "budget_minutes", "validate_every", "patience")
FOR_ALL = (*DECIDED, "epochs", "validations", "fold", "regions")

Json = Dict[str, Any]


# --- Options ---

a_budget = functools.partial(option, None, above=0, below=math.inf)


@dataclass(frozen=True)
class Options:
    """The options of `compare` but those of training, which are for all variants."""

    out: Path = option(help="folder to write; continued where it is", metavar="DIR")
    store: Optional[Path] = option(None, help="store that `prepare` has written", metavar="DIR")
    variant: Tuple[Tuple[str, str], ...] = option(
        (),
        help='a way to train, such as: patch-64 "--mode patch --patch 64 64 64"; again for each '
        "(default: whole volumes, and patches of half their size)",
        metavar=("NAME", "OPTIONS"),
        repeat=True,
    )
    resolutions: Tuple[float, ...] = option(
        (), help="instead of variants: whole volumes at these shares of the store's resolution", above=0, at_most=1
    )
    batches: Tuple[int, ...] = option((), help="of --resolutions, each at each (default: the recipe's)", above=0)
    runs: Tuple[Path, ...] = option((), help="compare these run folders; nothing is trained", metavar="DIR")
    voxels: Optional[float] = a_budget("budget of every run: voxels seen", metavar="V")
    minutes: Optional[float] = a_budget("budget of every run: wall time of its steps", metavar="M")
    seeds: Tuple[int, ...] = option((0, 1, 2), metavar="S", at_least=0)
    split: str = option(UNTOUCHED, help="cases to score", choices=SPLITS)
    tolerance: float = option(
        TOLERANCE_MM, help="tolerance of the surface Dice in mm", metavar="MM", at_least=0, below=math.inf
    )
    title: Optional[str] = option(None, help="of the page and the record (default: the data's name)", metavar="TEXT")
    record: Optional[Path] = option(None, help="append the result to this .jsonl file", metavar="FILE")
    dry_run: bool = option(False, help="print the plan and stop")
    force: bool = option(False, help="train although memory may not hold it; compare --runs that were cut off")


# --- What is asked for ---


class Budget(NamedTuple):
    """The budget of every run."""

    kind: str
    """ "epochs": voxels of so many epochs of the baseline; "voxels"; "minutes": wall time of the steps; "passes" over
    the training cases, of whatever size."""
    amount: float

    def words(self, baseline: str) -> str:
        """Such as "the voxels of 25 epochs of whole each"."""
        amount = f"{self.amount:,g}"
        return {
            "epochs": f"the voxels of {amount} epochs of {baseline} each",
            "voxels": f"{self.amount / 1e6:,.4g} million voxels each",
            "minutes": f"{amount} minutes of steps each",
            "passes": f"{amount} epochs each",
        }[self.kind]


class Variant(NamedTuple):
    """A way to train: its name in folders and tables, and the chosen settings, "recipe" and common ones among them."""

    name: str
    settings: Json


def refuse_settings(who: str, settings: Json, names: Sequence[str] = DECIDED) -> None:
    """Raise InputError for settings of these names, which `who` may not choose."""
    refuse(
        f"{who} must be without --{name.replace('_', '-')}, got {settings[name]}; compare itself has --seeds, a budget "
        "and --validations for all variants"
        for name in names
        if name in settings
    )


def parse_variant(name: str, options: str, common: Json) -> Variant:
    """The variant `name` of train's `options`, such as "--mode patch --patch 64 64 64", on top of the common settings.

    Raises InputError, with the variant's name, for an invalid name and for options that train would refuse.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise InputError(
            f"--variant must have a name of letters, digits, '-', '_' and '.', got {name!r}; it names folders"
        )
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_options(parser, SETTINGS)
    try:
        (own,) = arguments([SETTINGS], parser.parse_args(shlex.split(options)))
    except ValueError as error:
        problem = f"variant {name} must have options of train, got {options!r}: {error}; see `train --help`"
        raise InputError(problem) from None
    refuse_settings(f"variant {name}", own, FOR_ALL)
    if set(own) & set(SIZES_OF_PATCH):
        common = _without(common, SIZES_OF_PATCH)
    if own.get("mode", common.get("mode", recipe_config({**common, **own}).mode)) == "whole":
        common = _without(common, OF_PATCHES)
    return Variant(name, {**common, **own})


def usual_variants(common: Json, store: Store) -> List[Variant]:
    """Whole volumes, and patches: of the size that `common` has, else of half their grid along each axis, down to what
    the network takes and no less than it learns from.

    Raises InputError for a common mode, as there is one of each.
    """
    if "mode" in common:
        raise InputError(f"--mode must be left to the variants, got {common['mode']}; compare has one of each")
    whole = Variant("whole", {**_without(common, OF_PATCHES), "mode": "whole"})
    if set(common) & set(SIZES_OF_PATCH):
        return [whole, Variant("patch", {**common, "mode": "patch"})]
    config = resolve_variants([whole], store)[0][1].config
    divisor = config.unet.divisor
    patch = [min(n, max(n // (2 * divisor) * divisor, BOTTOM * divisor)) for n in config.grid]
    return [whole, Variant("patch-half", {**common, "mode": "patch", "patch": patch})]


def resolution_variants(common: Json, shares: Sequence[float], batches: Sequence[int]) -> List[Variant]:
    """Whole volumes at every share of the store's resolution and every batch, else the recipe's: by batch, the highest
    resolution first."""
    axes = [
        (batch, share)
        for batch in sorted(set(batches or [recipe_config(common).batch]))
        for share in sorted(set(shares), reverse=True)
    ]
    return [
        Variant(f"r{share:g}-b{batch}", {**common, "mode": "whole", "resolution": share, "batch": batch})
        for batch, share in axes
    ]


def resolve_variants(variants: Sequence[Variant], store: Store) -> List[Tuple[Variant, Plan]]:
    """Every variant with its plan on this store and host, whose decisions become its settings.

    So nothing can differ from run to run. Raises InputError with the problems of all variants, each by name.
    """
    host, gpus, resolved, problems = read_host(), HostGpus(), [], []
    for variant in variants:
        try:
            plan = make_plan(store, Path("/nonexistent"), host, variant.settings, gpus=gpus)
        except InputError as error:
            problems += [f"variant {variant.name}: {problem}" for problem in error.problems]
            continue
        config, settings = plan.config, _without(variant.settings, ("gpu_memory",))
        settings.update(mode=config.mode, dtype=config.unet.dtype, policy=config.unet.policy, device=config.device)
        if config.is_patch:
            settings.update(patch=list(config.grid), patches_per_case=config.patches_per_case)
        resolved.append((variant._replace(settings=settings), plan))
    refuse(problems)
    return resolved


FEW = 8
"""Steps whose voxels are in proportion to those of many: a curriculum's share of them is whole."""


def steps_of(config: RunConfig, voxels: float) -> int:
    """The number of steps, 1 or more, with the nearest number of voxels."""
    near = max(round(voxels * FEW / run_voxels(config, FEW)), 1)
    return min(range(max(near - FEW, 1), near + FEW), key=lambda steps: abs(run_voxels(config, steps) - voxels))


# --- compare.json ---


class Course(TypedDict):
    """The training of every run of a variant."""

    name: str
    options: List[str]  # of `train`
    grid: Tuple[int, int, int]
    batch: int
    policy: str
    steps_per_epoch: int
    step_s: Optional[float]  # predicted, as the next is; None where nothing is known of the engine
    peak_bytes: Optional[int]
    warmup_steps: int
    steps: Optional[int]  # None under a budget of minutes: each run takes those that fit
    voxels: Optional[int]
    validations: int


@dataclass(frozen=True)
class Kept:
    """The content of compare.json."""

    asked: Json  # what a later call must ask for too
    seeds: List[int]
    plan: List[Course]  # one a variant; empty for runs that were there already
    results: Optional[Json] = None  # None before the last run is done

    def save(self, out: Path) -> None:
        write_json(Path(out) / FILE, {"schema": SCHEMA, **vars(self)})


def load_same(asked: Json, out: Path) -> Optional[Kept]:
    """The content of a folder's compare.json; None for a folder that is new, or empty.

    Raises InputError for a damaged file or one of another version, for a folder of other files, and where another
    comparison was asked for there, with all differences at once.
    """
    path = Path(out) / FILE
    if not path.is_file():
        if path.parent.is_dir() and not is_untouched(path.parent, FILE):
            raise InputError(f"--out {out} must be empty or hold a {FILE}, got other files; choose another")
        return None
    try:
        content = read_json(path)
        schema = content.pop("schema")
        if schema != SCHEMA:
            way = "use the version that made it, or another --out"
            raise InputError(f"comparison {out} must have schema {SCHEMA}, got {schema}; {way}")
        kept = typed(content, Kept)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{path} must be as compare writes it, got {error!r}; choose another --out") from None
    before, now = dict(flat(kept.asked)), dict(flat(asked))
    problems = [
        f"{name} must stay as comparison {out} was started, got {now.get(name, 'none')} for {before.get(name, 'none')};"
        " leave it as it was, or choose another --out"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    names = [course["name"] for course in kept.plan] if "variants" in asked else []
    if names != list(asked.get("variants", ())):
        problems.append(f"plan of comparison {out} must be of its variants, got {', '.join(names)}; restore {FILE}")
    refuse(problems)
    return kept


def extended(before: Optional[Kept], asked: Json, seeds: Sequence[int], plan: Sequence[Course]) -> Kept:
    """A new comparison, or the one that a folder holds with more seeds and variants, then without results.

    All variants have equally many validations to choose their best weights from: as many as the shortest new variant
    can have, or as many as those before had. Raises InputError for a variant that is too short for these.
    """
    before = before or Kept({}, [], [])
    names = [course["name"] for course in before.plan]
    new = [course for course in plan if course["name"] not in names]
    least = min(course["validations"] for course in before.plan or plan)
    refuse(
        f"variant {course['name']} must have {least} validations, as the others in --out have, got {course['steps']} "
        "steps; choose a smaller batch, or compare all of them in one call with another --out"
        for course in new
        if course["validations"] < least
    )
    all_seeds = list(dict.fromkeys((*before.seeds, *seeds)))
    now = [*before.plan, *({**course, "validations": least} for course in new)]
    return Kept(asked, all_seeds, now, None if new or all_seeds != before.seeds else before.results)


def courses(variants: Sequence[Tuple[Variant, Plan]], budget: Budget, validations: int) -> List[Course]:
    """What every run of each variant does, with as many validations as its steps allow.

    Under a budget of minutes steps are None: each run times its own.
    """
    first, voxels, plan = variants[0][1], budget.amount, []
    if budget.kind == "epochs":  # patches as many as make up a volume
        an_epoch = len(first.store.cases("train")) * first.config.patches_per_case // first.config.batch
        voxels = run_voxels(first.config, voxels * an_epoch)
    for (name, settings), planned in variants:
        config, cases, predicted = planned.config, len(planned.store.cases("train")), planned.estimate
        steps = None if budget.kind == "minutes" else steps_of(config, voxels)
        if budget.kind == "passes":
            steps = max(round(cases * budget.amount / config.batch), 1)
        plan.append(
            Course(
                name=name,
                options=as_options(settings),
                grid=config.grid,
                batch=config.batch,
                policy=config.unet.policy,
                steps_per_epoch=cases * config.patches_per_case // config.batch,
                step_s=predicted and planned.training_s / planned.steps,
                peak_bytes=predicted and predicted.process_peak_bytes,
                warmup_steps=config.warmup_steps,
                steps=steps,
                voxels=steps and run_voxels(config, steps),
                validations=min(validations, steps or validations),
            )
        )
    return plan


def planned(
    options: Options, settings: Json, store: Store, evaluation: Evaluation
) -> Tuple[Json, List[Course], Budget]:
    """What a later call must ask for too, the variants' courses and the budget.

    There can always be more seeds, and with --resolutions more of these and of batches. Raises InputError for settings
    that are compare's to choose, and as `parse_variant` and `resolve_variants`.
    """
    refuse_settings("compare", settings)
    common = _without(settings, ("epochs", "validations"))
    if options.resolutions:
        variants = resolution_variants(common, options.resolutions, options.batches)
        asked: Json = {"settings": {"recipe": None, **common}}
    else:
        variants = [parse_variant(name, words, common) for name, words in options.variant]
        variants = variants or usual_variants(common, store)
        chosen = {variant.name: {"recipe": None, **variant.settings} for variant in variants}
        asked = {"baseline": variants[0].name, "variants": chosen}
    resolved, validations = resolve_variants(variants, store), settings.get("validations", VALIDATIONS)
    budget = Budget("passes" if options.resolutions else "epochs", settings.get("epochs", resolved[0][1].config.epochs))
    if options.voxels or options.minutes:
        budget = Budget("voxels", options.voxels) if options.voxels else Budget("minutes", options.minutes)
    asked.update(split_hash=store.manifest.split_hash, validations=validations)
    asked.update(evaluation=evaluation._asdict(), budget=budget._asdict())
    return asked, courses(resolved, budget, validations), budget


def planned_run(course: Course, seed: int, out: Path, *, minutes: float = 0.0) -> PlannedRun:
    """The run of a course with this seed: of its steps or, where it has none, of so many minutes."""
    steps = course["steps"]
    own: Json = {"validations": course["validations"]}
    if steps:
        own["steps"] = steps
        own["warmup_steps"] = min(course["warmup_steps"], steps // WARMUP_SHARE)
    else:
        epochs = math.ceil(60 * minutes / LEAST_STEP_S / course["steps_per_epoch"])
        own.update(epochs=epochs, budget_minutes=minutes)
    options = (*course["options"], *as_options({**own, "seed": seed}))  # what comes last holds
    return PlannedRun(course["name"], seed, Path(out) / "runs" / f"{course['name']}-seed{seed}", options)


# --- Private helpers ---


class _Parser(argparse.ArgumentParser):
    """Raises ValueError where others print and exit."""

    def error(self, message: str):
        raise ValueError(message)


def _without(settings: Json, names: Sequence[str]) -> Json:
    return {name: value for name, value in settings.items() if name not in names}

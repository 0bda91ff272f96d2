"""What a comparison does, as it is kept in OUT/compare.json: variants, one budget for all, and what each comes to here.

A second call is held to what was asked: the same goes on, more seeds are added, and anything else is refused. Steps,
dtype, policy and patch are decided once and then kept, so that every run of a variant is of one kind. Run folders that
are there already become variants by `grouped`: runs that differ in their seed alone are one.
"""

import argparse
import dataclasses
import json
import math
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, TypedDict

from cpu3d import memory_plan
from cpu3d.compare.run import TIMED_STEPS, Evaluation, PlannedRun, end_of, step_voxels
from cpu3d.compare.statistics import unpaired
from cpu3d.config import RunConfig, load_config
from cpu3d.data.region import Shape3
from cpu3d.data.splits import with_fold
from cpu3d.data.store import Store
from cpu3d.errors import InputError
from cpu3d.host.gpu import HostGpus
from cpu3d.patch_plan import BOTTOM
from cpu3d.recipes import RECIPES
from cpu3d.report.page import flat
from cpu3d.resolve import resolve
from cpu3d.training.run_log import FINISHED, read_events
from cpu3d.training.schedule import steps_within
from cpu3d.training_options import SIZES_OF_PATCH, add_training_options, as_options, chosen_settings
from cpu3d.util.atomic import is_untouched, write_json
from cpu3d.util.lock import locked
from memory_estimator.estimate import Estimate
from memory_estimator.files import read_json, typed
from memory_estimator.host import read_host

SCHEMA = 1
"""Version of compare.json."""

FILE = "compare.json"

BUDGETS = ("epochs", "voxels", "minutes")

WARMUP_SHARE = 10
"""The warm-up is at most a tenth of a run: one of large batches or patches may have few steps."""

OF_PATCHES = (*SIZES_OF_PATCH, "patches_per_case", "foreground")
"""Settings that a run on whole volumes does not have: given for all variants, they are for those on patches."""

NOT_COMMON = {
    "seed": "give --seeds to compare",
    "steps": "give compare a budget: --epochs, --voxels or --minutes",
    "budget_minutes": "give compare a budget: --epochs, --voxels or --minutes",
    "validate_every": "give --validations to compare",
    "patience": "a run that stops early spends less than the others",
}
"""Settings that the comparison decides for every run, and what to do instead."""

NOT_OWN = {
    **NOT_COMMON,
    "epochs": "give compare a budget: --epochs, --voxels or --minutes",
    **dict.fromkeys(("validations", "fold", "regions"), "give it to compare, for all variants"),
}
"""Settings that no variant may have for itself: with them it would answer another question."""

SHARED = ("split_hash", "fold", "regions")
"""Settings that all run folders must have alike: else they were trained, or are scored, on other cases."""

SAME_VARIANT = {
    *("seed", "unet.seed", "store", "save_minutes", "read_mode"),
    *("unet.policy", "device", "validate_every", "validations", "patience", "micro_batch"),
}
"""Settings that do not make another variant: where its files are, how a step is computed, how often one looks."""

UNEQUAL = 1.1
"""Times more that one run may have spent than another under what counts as one budget."""

Json = Dict[str, Any]

Grouped = List[Tuple[str, int, Path]]
"""Variant, seed and folder of each run."""


# --- One budget ---


@dataclass(frozen=True)
class Budget:
    """What every run may spend."""

    kind: str
    """ "epochs": voxels of so many epochs of the baseline; "voxels"; "minutes": wall time of the steps."""
    amount: float

    def __post_init__(self):
        if not (math.isfinite(self.amount) and self.amount > 0):
            raise InputError(f"--{self.kind} must be positive, got {self.amount:g}; it is the budget of every run")

    def words(self, baseline: str) -> str:
        """What every run may spend, as in "each for the voxels of 25 epochs of whole"."""
        if self.kind == "voxels":
            return f"{self.amount / 1e6:,.4g} million voxels"
        amount = f"{self.amount:,g} {self.kind if self.amount != 1 else self.kind[:-1]}"
        return f"the voxels of {amount} of {baseline}" if self.kind == "epochs" else f"{amount} of steps"


def budget_of(epochs: Optional[float], voxels: Optional[float], minutes: Optional[float], usual_epochs: int) -> Budget:
    """The budget asked for, by default the recipe's epochs. Raises InputError where there is more than one."""
    given = {kind: amount for kind, amount in zip(BUDGETS, (epochs, voxels, minutes)) if amount is not None}
    if len(given) > 1:
        options = " and ".join(f"--{kind}" for kind in given)
        raise InputError(f"the budget must be one of --epochs, --voxels and --minutes, got {options}; choose one")
    return Budget(*next(iter(given.items()), ("epochs", usual_epochs)))


def warmup_within(warmup_steps: int, steps: int) -> int:
    """The warm-up's steps in a run of so many: no more than the share that a warm-up may have."""
    return min(warmup_steps, steps // WARMUP_SHARE)


# --- Variants ---


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
    predicted: Optional[Estimate]
    """Time and memory of a step; None on a card, or where nothing is known of the engine."""

    @property
    def options(self) -> List[str]:
        """Of `train`."""
        recipe = ["--recipe", self.variant.recipe] if self.variant.recipe else []
        return [*recipe, *as_options(self.variant.settings)]

    @property
    def step_s(self) -> Optional[float]:
        return self.predicted.step_s if self.predicted else None

    @property
    def peak_bytes(self) -> Optional[int]:
        return self.predicted.process_peak_bytes if self.predicted else None


def common_settings(args: argparse.Namespace) -> Tuple[Dict[str, Any], Optional[str]]:
    """The settings that compare itself was given for all variants, and the recipe. Its budget and validations are none.

    Raises InputError for those that are not for the user to choose here.
    """
    settings = {name: value for name, value in chosen_settings(args).items() if name not in ("epochs", "validations")}
    _refuse("compare", settings, NOT_COMMON)
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
    _refuse(f"variant {name}", own, NOT_OWN)
    if set(own) & set(SIZES_OF_PATCH):
        common = {key: value for key, value in common.items() if key not in SIZES_OF_PATCH}
    recipe = args.recipe or recipe
    usual = RECIPES[recipe or "brats-regions"]().mode
    if own.get("mode", common.get("mode", usual)) == "whole":
        common = {key: value for key, value in common.items() if key not in OF_PATCHES}
    return Variant(name, {**common, **own}, recipe)


def usual_variants(common: Dict[str, Any], recipe: Optional[str], store: Store) -> List[Variant]:
    """Whole volumes, and patches: of the size that `common` has, else of half their grid along each axis.

    Raises InputError for a common mode, as there is one of each.
    """
    if "mode" in common:
        raise InputError(f"--mode must be left to the variants, got {common['mode']}; compare has one of each")
    shared = {key: value for key, value in common.items() if key not in OF_PATCHES}
    whole = Variant("whole", {**shared, "mode": "whole"}, recipe)
    if set(common) & set(SIZES_OF_PATCH):
        return [whole, Variant("patch", {**common, "mode": "patch"}, recipe)]
    config = resolve_variants([whole], store)[0].config
    patch = list(half(config.grid, config.unet.divisor))
    return [whole, Variant("patch-half", {**common, "mode": "patch", "patch": patch}, recipe)]


def half(grid: Shape3, divisor: int) -> Shape3:
    """Half of `grid` along each axis, down to a multiple of `divisor`, and no less than the network learns from."""
    return tuple(min(n, max(n // (2 * divisor) * divisor, BOTTOM * divisor)) for n in grid)


def resolve_variants(variants: Sequence[Variant], store: Store) -> List[Resolved]:
    """Every variant on this store and host. Raises InputError with the problems of all of them, each by name."""
    host, gpus, found, problems = read_host(), HostGpus(), [], []
    for variant in variants:
        try:
            config = resolve(store, Path("/nonexistent"), host, variant.settings, variant.recipe, gpus)
            view, is_open = with_fold(store, config.fold), variant.settings.get("policy", "auto") == "auto"
            cases, volumes, predicted = len(view.cases("train")), memory_plan.volumes_of(config, view), None
            if config.device != "cpu":
                config = memory_plan.under(config, "speed") if is_open else config
            else:
                if is_open:
                    config, _ = memory_plan.pick_policy(config, host, cases * config.patches_per_case, volumes)
                predicted = memory_plan.foresee(config, host, cases * config.patches_per_case, volumes)
        except InputError as error:
            problems += [f"variant {variant.name}: {problem}" for problem in error.problems]
            continue
        settings = {key: value for key, value in variant.settings.items() if key != "gpu_memory"}
        settings.update(mode=config.mode, dtype=config.unet.dtype, policy=config.unet.policy, device=config.device)
        if config.is_patch:
            settings.update(patch=list(config.grid), patches_per_case=config.patches_per_case)
        found.append(Resolved(dataclasses.replace(variant, settings=settings), config, cases, predicted))
    if problems:
        raise InputError(*problems)
    return found


# --- compare.json ---


@dataclass(frozen=True)
class Kept:
    """What compare.json holds."""

    asked: Json
    """What another call must ask for alike."""
    seeds: List[int]
    plan: List[Json]
    """A course a variant, as `courses` makes them; empty for runs that were there already."""
    results: Optional[Json] = None
    """What came out; None before the last run is done."""

    def save(self, out: Path) -> None:
        write_json(Path(out) / FILE, {"schema": SCHEMA, **vars(self)})


class Course(TypedDict):
    """What every run of a variant does; older plans have no number of validations and no warm-up in it."""

    name: str
    options: List[str]
    """Of `train`."""
    grid: Tuple[int, int, int]
    batch: int
    policy: str
    step_s: Optional[float]
    """Predicted, as the next is; None where nothing is known of the engine."""
    peak_bytes: Optional[int]
    steps: Optional[int]
    """None under a budget of minutes, until their time is known."""
    voxels: Optional[int]


def load(out: Path, of: Any = Course) -> Optional[Kept]:
    """What a folder's compare.json holds, with a plan `of` such records; None for a folder that is new, or empty.

    Raises InputError for a damaged one, and for other files without one: they are not a comparison's to replace.
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
            raise InputError(f"{path} must have schema {SCHEMA}, got {schema}; choose another --out")
        kept = typed(content, Kept, "content")
        for number, planned in enumerate(kept.plan):
            typed(planned, of, f"plan[{number}]")
        if not kept.seeds:
            raise ValueError("no seeds")
        json.dumps(content, allow_nan=False)  # raises ValueError for what could not be written back
        return kept
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{path} must be what compare has written, got {error!r}; choose another --out") from None


def load_same(asked: Json, out: Path, of: Any = Course) -> Optional[Kept]:
    """As `load`. Raises InputError, all differences at once, unless what is asked for is what the folder is of."""
    kept = load(out, of)
    if kept is None:
        return None
    if "search_seed" in asked:  # that of the first call, whichever seeds are added
        asked = {**asked, "search_seed": kept.seeds[0]}
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
    if problems:
        raise InputError(*problems)
    return kept


def asked_for(
    variants: Sequence[Variant], budget: Budget, validations: int, evaluation: Evaluation, split_hash: str
) -> Json:
    """What tells this comparison from others. Seeds do not: there can always be more."""
    return _plain(
        {
            "split_hash": split_hash,
            "budget": vars(budget),
            "validations": validations,
            "evaluation": vars(evaluation),
            "baseline": variants[0].name,
            "variants": {variant.name: {"recipe": variant.recipe, **variant.settings} for variant in variants},
        }
    )


def courses(found: Sequence[Resolved], budget: Budget, validations: int) -> List[Json]:
    """What every run of each variant does. Under a budget of minutes steps are None until their time is known."""
    plan = [
        _plain(
            {
                "name": one.variant.name,
                "options": one.options,
                "mode": one.config.mode,
                "grid": one.config.grid,
                "batch": one.config.batch,
                "policy": one.config.unet.policy,
                "device": one.config.device,
                "step_voxels": step_voxels(one.config),
                "steps_per_epoch": one.cases * one.config.patches_per_case // one.config.batch,
                "step_s": one.step_s,
                "peak_bytes": one.peak_bytes,
                "warmup_steps": one.config.warmup_steps,
                "steps": None,
                "voxels": None,
                "validations": None,
            }
        )
        for one in found
    ]
    if budget.kind == "minutes":
        return plan
    voxels, base = budget.amount, found[0]
    if budget.kind == "epochs":  # patches as many as make up a volume
        voxels *= base.cases * base.config.patches_per_case * math.prod(base.config.grid)
    return _with_steps(plan, [max(round(voxels / course["step_voxels"]), 1) for course in plan], validations)


def with_minutes(plan: Sequence[Json], minutes: float, step_s: Dict[str, float], validations: int) -> List[Json]:
    """The plan with the steps that fill so many minutes; `step_s` are the variants' measured seconds a step."""
    timed = [{**course, "step_s": step_s[course["name"]]} for course in plan]
    return _with_steps(timed, [steps_within(minutes, course["step_s"]) for course in timed], validations)


def planned_runs(plan: Sequence[Json], seeds: Sequence[int], out: Path) -> List[PlannedRun]:
    """All runs, seed by seed, so that what is there when a long comparison is cut off can be compared."""
    return [
        PlannedRun(
            course["name"],
            seed,
            Path(out) / "runs" / f"{course['name']}-seed{seed}",
            run_options(course, seed, course["steps"], course.get("validations") or 1),
        )
        for seed in seeds
        for course in plan
    ]


def timed_options(plan: Sequence[Json]) -> Dict[str, Tuple[str, ...]]:
    """Options of `train` by variant, for the short runs that time a step."""
    return {course["name"]: run_options({**course, "validate_every": None}, 0, TIMED_STEPS, 1) for course in plan}


def run_options(course: Json, seed: int, steps: int, validations: int) -> Tuple[str, ...]:
    """Those of `train` for one run of a course.

    A course from before there was a number of validations goes on as it was: validated every few epochs.
    """
    own = {"steps": steps, "validations": validations, "seed": seed}
    if course.get("validate_every"):
        own = {"steps": steps, "validate_every": course["validate_every"], "seed": seed}
    warmup_steps = course.get("warmup_steps", 0)
    if warmup_within(warmup_steps, steps) < warmup_steps:
        own["warmup_steps"] = warmup_within(warmup_steps, steps)
    return (*course["options"], *as_options(own))


# --- Run folders that are there already ---


def grouped(folders: Sequence[Path], *, force: bool = False) -> Grouped:
    """Name the variant of every run, in the order of their first ones, which is the baseline.

    A variant is named as its first run's folder is, less what follows "-seed". Raises InputError, all offenders at
    once, for folders that are no runs, were not trained or are being trained, for runs of different splits, folds or
    regions, for two runs of equal settings and seed, and for a variant that shares no seed with the baseline. Unless
    `force`, for runs that were cut off or stopped, and where the runs had neither as many voxels nor as much time, too.
    """
    problems: List[str] = []
    configs: Dict[Path, RunConfig] = {}
    spent: Dict[Path, Tuple[float, float]] = {}  # voxels seen, seconds of steps
    for folder in folders:
        try:
            config = load_config(folder)
            if not (folder / "checkpoints" / "best.npz").is_file():
                raise InputError(
                    f"run {folder} must have been trained, found no checkpoints/best.npz; run `train` on it"
                )
            with locked(folder, "run"):
                pass  # else it is being trained, and what is read now is not what it comes to
            events = read_events(folder)
        except InputError as error:
            problems += error.problems
            continue
        steps = [event for event in events if event.get("event") == "step"]
        last, end = max((event["step"] for event in steps), default=0), (end_of(events) or {}).get("reason", "none")
        configs[folder] = config
        spent[folder] = last * step_voxels(config), sum(event.get("step_s", 0.0) for event in steps)
        if end not in FINISHED and not force:
            wanted = f"{config.steps:,} steps" if config.steps else f"the steps of {config.epochs} epochs"
            problems.append(
                f"run {folder} must have been trained to its end, got {last:,} of {wanted}, end: {end}; continue it "
                "with `train`, or add --force"
            )
    first = next(iter(configs), None)
    problems += [
        f"runs must share their {name}, got {_words(getattr(configs[first], name))} in {first} and "
        f"{_words(getattr(config, name))} in {folder}; compare runs of one split"
        for folder, config in configs.items()
        for name in SHARED
        if getattr(config, name) != getattr(configs[first], name)
    ]
    if not force and spent and all(max(column) > UNEQUAL * min(column) for column in zip(*spent.values())):
        words = [
            f"{spent[folder][0] / 1e6:,.4g} million voxels in {spent[folder][1]:,.0f} s in {folder}"
            for folder in (max(spent, key=spent.__getitem__), min(spent, key=spent.__getitem__))
        ]
        problems.append(f"runs must have had one budget, got {' and '.join(words)}; leave some out, or add --force")
    if problems:
        raise InputError(*problems)
    return _named(configs)


# --- Private helpers ---


class _Parser(argparse.ArgumentParser):
    """Raises InputError where others print and exit."""

    def __init__(self, name: str):
        super().__init__(add_help=False, allow_abbrev=False)
        self.name = name

    def error(self, message: str):
        raise InputError(f"variant {self.name} must have options of train, got: {message}; see `train --help`")


def _refuse(who: str, settings: Dict[str, Any], refused: Dict[str, str]) -> None:
    problems = [
        f"{who} must be without --{name.replace('_', '-')}, got {settings[name]}; {instead}"
        for name, instead in refused.items()
        if name in settings
    ]
    if problems:
        raise InputError(*problems)


def _with_steps(plan: Sequence[Json], steps: Sequence[int], validations: int) -> List[Json]:
    """The courses with their steps. All have equally many validations, so none has more chances at a lucky one."""
    each = min(validations, *steps)
    return [
        {**course, "steps": count, "voxels": count * course["step_voxels"], "validations": each}
        for course, count in zip(plan, steps)
    ]


def _plain(content: Json) -> Json:
    """As it is read back from a file."""
    return json.loads(json.dumps(content))


def _words(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value) or "none"


def _named(configs: Dict[Path, RunConfig]) -> Grouped:
    problems: List[str] = []
    names: Dict[str, str] = {}
    seeds: Dict[str, Dict[int, Path]] = {}
    found: Grouped = []
    for folder, config in configs.items():
        settings = sorted(pair for pair in flat(dataclasses.asdict(config)) if pair[0] not in SAME_VARIANT)
        # Under batch norm what is computed together is what is learnt.
        kind = str((settings, config.micro if config.unet.norm == "batch" else None))
        if kind not in names:
            name = re.sub(r"[-_]?seed[-_]?\d+$", "", folder.name) or folder.name
            free = (f"{name}-{number}" if number > 1 else name for number in range(1, len(configs) + 2))
            names[kind] = next(one for one in free if one not in names.values())
        own = seeds.setdefault(names[kind], {})
        if config.seed in own:
            problems.append(
                f"runs must differ in a setting or their seed, got {own[config.seed]} and {folder}, alike with seed "
                f"{config.seed}; leave one out"
            )
        own[config.seed] = folder
        found.append((names[kind], config.seed, folder))
    problems += unpaired({name: list(own) for name, own in seeds.items()}, found[0][0]).values()
    if problems:
        raise InputError(*problems)
    return found

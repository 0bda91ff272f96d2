"""The plan of a comparison, as it is kept in OUT/compare.json: one budget for all variants, and the
runs of each.

A second call with the same options continues, and adds seeds; one with other options is refused.
Steps, dtype, policy, strides, coarse steps and patch are decided once and then kept, so that all
runs of a variant are alike."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, TypedDict

from cpu3d.chosen import recipe_settings, still_open, with_settings
from cpu3d.compare.run import Evaluation
from cpu3d.compare.variants import (
    DECIDED,
    Json,
    as_options,
    parse_variant,
    read_train_options,
    refuse_settings,
    resolve_variants,
    usual_variants,
    without,
)
from cpu3d.data.split import SPLITS
from cpu3d.data.store import Store
from cpu3d.errors import InputError, raise_if_any
from cpu3d.inference.scores import TOLERANCE_MM
from cpu3d.inference.scores_file import UNTOUCHED
from cpu3d.plan import Plan
from cpu3d.run.config_json import settings_of_begun
from cpu3d.run.folds import COMPARISON, CONFIG
from cpu3d.run.folds import FILE as FOLDS
from cpu3d.settings import RunConfig
from cpu3d.util.atomic import is_untouched, write_json
from memory_estimator.common.files import read_json, reason, typed
from memory_estimator.common.schema import option
from memory_estimator.job import AUTO
from models.strides import EVERY_AXIS

SCHEMA = 1
VALIDATIONS = 4  # of every run, unless a number is chosen
# The warm-up is at most a tenth of a run: one of large batches or patches may have few steps.
WARMUP_SHARE = 10
# No step is faster: a budget of minutes has the epochs that such steps would fill.
LEAST_STEP_S = 1e-3
# Steps, of which a curriculum's share is a whole number: their voxels are in proportion to those of
# many.
FEW = 8


@dataclass(frozen=True)
class Options:
    """The options of `compare` beside those of training, which are for all variants."""

    out: Path = option(help="folder to write; an existing comparison is continued", metavar="DIR")
    store: Optional[Path] = option(None, help="store that `prepare` has written", metavar="DIR")
    variant: Tuple[Tuple[str, str], ...] = option(
        (),
        help='a way to train, such as: patch-64 "--mode patch --patch 64 64 64"; repeat for each '
        "(default: whole volumes, and patches of half their size)",
        metavar=("NAME", "OPTIONS"),
        repeat=True,
    )
    runs: Tuple[Path, ...] = option(
        (), help="compare these scored run folders; nothing is trained", metavar="DIR"
    )
    voxels: Optional[float] = option(None, "budget of every run: voxels seen", metavar="V", above=0)
    minutes: Optional[float] = option(
        None, "budget of every run: minutes of its steps", "M", above=0
    )
    seeds: Tuple[int, ...] = option(
        (0, 1, 2), help="one run a variant for each seed", metavar="S", at_least=0
    )
    split: str = option(UNTOUCHED, help="cases to score", choices=SPLITS)
    tolerance: float = option(
        TOLERANCE_MM,
        help="tolerance of the surface Dice in mm",
        metavar="MM",
        at_least=0,
    )
    title: Optional[str] = option(
        None, help="title of page and record (default: the data's name)", metavar="TEXT"
    )
    record: Optional[Path] = option(
        None, help="append the result to this .jsonl file", metavar="FILE"
    )
    dry_run: bool = option(False, help="print the plan and stop")
    force: bool = option(False, help="train even if a job may not fit the free memory")

    @property
    def evaluation(self) -> Evaluation:
        return Evaluation(self.split, self.tolerance)


# --- The budget, and the course of every run of a variant ---


class Budget(NamedTuple):
    """The budget of every run."""

    # "epochs": voxels of so many epochs of the baseline; "voxels"; "minutes": wall time of the
    # steps
    kind: str
    amount: float

    def words(self, baseline: str) -> str:
        """Such as "the voxels of 25 epochs of whole"."""
        if self.kind == "epochs":
            return f"the voxels of {self.amount:,g} epochs of {baseline}"
        if self.kind == "voxels":
            return f"{self.amount / 1e6:,.4g} million voxels"
        return f"{self.amount:,g} minutes of steps"


class Course(TypedDict):
    """The training of every run of a variant."""

    name: str
    options: List[str]  # of `train`, all but the seed
    grid: Tuple[int, int, int]
    batch: int
    policy: str
    step_s: Optional[float]  # predicted, as the next is; None if the engine is unknown
    peak_bytes: Optional[int]
    steps: Optional[int]  # None under a budget of minutes: each run takes those that fit
    voxels: Optional[int]


def run_voxels(config: RunConfig, steps: int) -> int:
    """Voxels that the network sees in a run of so many steps, a curriculum's share of them at half
    resolution."""
    full_steps = config.with_coarse_share(steps).full_steps(steps)
    return round(config.batch * math.prod(config.grid) * full_steps)


def steps_of(config: RunConfig, voxels: float) -> int:
    """The number of steps, 1 or more, whose voxels are nearest to `voxels`."""
    near = max(round(voxels * FEW / run_voxels(config, FEW)), 1)
    candidates = range(max(near - FEW, 1), near + FEW)
    return min(candidates, key=lambda steps: abs(run_voxels(config, steps) - voxels))


def courses(
    variants: Mapping[str, Tuple[Json, Plan]], baseline: str, budget: Budget, validations: int
) -> List[Course]:
    """The course of every variant's runs. All have the same number of validations, from which the
    best weights are chosen: `validations`, or as many as the variant with the fewest steps has
    steps."""
    voxels = budget.amount
    if budget.kind == "epochs":
        _, first = variants[baseline]
        # Of patches an epoch has as many as make up the volumes.
        voxels = run_voxels(first.config, budget.amount * first.steps_per_epoch)
    steps: Dict[str, int] = {}
    if budget.kind != "minutes":
        steps = {name: steps_of(plan.config, voxels) for name, (_, plan) in variants.items()}
    validations = min([validations, *steps.values()])
    result = []
    for name, (settings, plan) in variants.items():
        config = plan.config
        own = {"validations": validations}
        if budget.kind == "minutes":
            own["epochs"] = math.ceil(60 * budget.amount / LEAST_STEP_S / plan.steps_per_epoch)
            own["budget_minutes"] = budget.amount
        else:
            own["steps"] = steps[name]
            own["warmup_steps"] = min(config.warmup_steps, steps[name] // WARMUP_SHARE)
        course = Course(
            name=name,
            options=as_options({**settings, **own}),
            grid=config.grid,
            batch=config.batch,
            policy=config.unet.policy,
            step_s=None,
            peak_bytes=None,
            steps=steps.get(name),
            voxels=run_voxels(config, steps[name]) if steps else None,
        )
        if plan.forecast:
            course["step_s"] = plan.training_s / plan.steps
            course["peak_bytes"] = plan.forecast.process_peak_bytes
        result.append(course)
    return result


def planned(options: Options, settings: Json, store: Store) -> Tuple[Json, List[Course], Budget]:
    """The request that a later call must repeat, the variants' courses and the budget.

    Raises InputError for settings that compare itself decides, and as `parse_variant` and
    `resolve_variants`."""
    refuse_settings("compare", settings, DECIDED)
    common = without(settings, ("epochs", "validations"))
    variants = {name: parse_variant(name, words, common) for name, words in options.variant}
    begun: Json = {}
    if not variants:
        begun = _begun_network(options.out, common)
        variants = usual_variants(common, store, begun=begun, force=options.force)
    of_begun = {name: {**chosen, **begun} for name, chosen in variants.items()}
    resolved = resolve_variants(of_begun, store, force=options.force)
    validations = settings.get("validations", VALIDATIONS)
    baseline = next(iter(variants))  # as the user has them in order
    _, first = resolved[baseline]
    if options.voxels:
        budget = Budget("voxels", options.voxels)
    elif options.minutes:
        budget = Budget("minutes", options.minutes)
    else:
        budget = Budget("epochs", settings.get("epochs", first.config.epochs))
    asked = {
        "baseline": baseline,
        "variants": {name: {"recipe": None, **chosen} for name, chosen in variants.items()},
        "split_hash": store.manifest.split_hash,
        "validations": validations,
        "evaluation": options.evaluation._asdict(),
        "budget": budget._asdict(),
    }
    return asked, courses(resolved, baseline, budget, validations), budget


# --- compare.json ---


@dataclass(frozen=True)
class Kept:
    """The content of compare.json."""

    asked: Json  # a later call must ask for the same
    seeds: List[int]
    plan: List[Course]  # one a variant; empty for --runs, which are trained already
    results: Optional[Json] = None  # None before the last run is done

    def save(self, out: Path) -> None:
        write_json(Path(out) / COMPARISON, {"schema": SCHEMA, **vars(self)})


def resumed(new: Kept, out: Path) -> Kept:
    """The comparison in the folder `out` with the seeds of `new` added, then without results; `new`
    if there is none.

    Raises InputError for a compare.json that is damaged or of another version, for a folder of
    other files, and for a folder where another comparison was asked for, with all differences at
    once."""
    path = Path(out) / COMPARISON
    if not path.is_file():
        if path.parent.is_dir() and not is_untouched(path.parent, COMPARISON):
            got = f"{min(path.name for path in path.parent.iterdir())} in it"
            for name, kind in ((CONFIG, "a run"), (FOLDS, "a folder of folds")):
                if path.with_name(name).is_file():
                    got = kind
            rule = f"--out {out} must be empty or hold a {COMPARISON}"
            raise InputError(f"{rule}, got {got}; choose another")
        return new
    try:
        content = read_json(path)
        schema = content.pop("schema")
        if schema != SCHEMA:
            raise ValueError(f"schema {schema} of another version")
        kept = typed(content, Kept)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        rule = f"{path} must be as compare writes it, got {reason(error)}"
        raise InputError(f"{rule}; choose another --out") from None
    before = _by_name(kept.asked)
    now = _by_name(json.loads(json.dumps(new.asked)))  # as it is kept, without tuples
    problems = []
    for name in dict.fromkeys((*before, *now)):
        if before.get(name) != now.get(name):
            rule = f"{name} must stay as comparison {out} was started"
            got = f"got {now.get(name, 'none')} for {before.get(name, 'none')}"
            problems.append(f"{rule}, {got}; leave it as it was, or choose another --out")
    raise_if_any(problems)
    names = [course["name"] for course in kept.plan]  # they name folders
    if names != [course["name"] for course in new.plan]:
        problem = f"must be as compare writes it, got a plan of {', '.join(names)}"
        raise InputError(f"{path} {problem}; choose another --out")
    seeds = list(dict.fromkeys((*kept.seeds, *new.seeds)))
    results = kept.results if seeds == kept.seeds else None
    plan = []
    for course in kept.plan:
        plan.append(_with_coarse_steps(_with_strides(course), out, kept.seeds))
    return Kept(kept.asked, seeds, plan, results)


def run_folder(out: Path, variant: str, seed: int) -> Path:
    """The folder of a variant's run."""
    return Path(out) / "runs" / f"{variant}-seed{seed}"


# --- Private helpers ---


def _begun_network(out: Path, common: Json) -> Json:
    """The strides, and with them the levels, of a comparison that was started in the folder `out`,
    unless they are chosen: an earlier version may have decided others, and its patches follow from
    them. {} for a new comparison, and for one that `resumed` refuses."""
    if any(common.get(name, AUTO) != AUTO for name in ("depth", "strides")):
        return {}
    path = Path(out) / COMPARISON
    try:
        first = _with_strides(typed(read_json(path)["plan"][0], Course))
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return {}
    settings = read_train_options(first["options"], f"variant {first['name']}")
    if "strides" not in settings:  # with --init, whose network it is
        return {}
    return {"strides": settings["strides"]}


def _with_strides(course: Course) -> Course:
    """The course with the strides of all axes, if it is of an earlier version, which had none."""
    settings = read_train_options(course["options"], f"variant {course['name']}")
    if "strides" in settings or settings.get("init"):
        return course
    unet = with_settings(recipe_settings(settings), settings).unet
    more = as_options({"strides": unet.every_stride})
    return {**course, "options": [*course["options"], *more]}


def _with_coarse_steps(course: Course, out: Path, seeds: Sequence[int]) -> Course:
    """The course with the coarse steps of its runs, if an earlier version decided them, which did
    not keep them here: it halved every axis, and whether they pay follows from that."""
    settings = read_train_options(course["options"], f"variant {course['name']}")
    if "coarse_stride" in settings:
        return course
    runs = (run_folder(out, course["name"], seed) for seed in seeds)
    of_runs = {"coarse_stride": EVERY_AXIS, **settings_of_begun(runs)}
    more = as_options(still_open(settings, of_runs))
    return {**course, "options": [*course["options"], *more]}


def _by_name(content: Any, name: str = "") -> Json:
    """Nested JSON by dotted names, such as "variants.whole.norm"."""
    if not isinstance(content, dict):
        return {name: content}
    by_name = {}
    for key, value in content.items():
        by_name.update(_by_name(value, f"{name}.{key}".strip(".")))
    return by_name

"""What a comparison is to do, as it is kept in OUT/compare.json: what was asked for, and what it came to here.

A second call is held to what was asked: the same goes on, more seeds are added, and anything else is refused. What it
came to, steps, dtype, policy, patch, is decided once and then kept, so that every run of a variant is of one kind.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, TypedDict

from cpu3d.compare.budget import Budget, steps_for, voxels_of_epochs, warmup_within
from cpu3d.compare.planned import Evaluation, PlannedRun
from cpu3d.compare.variants import Resolved, Variant
from cpu3d.errors import InputError
from cpu3d.report.page import flat
from cpu3d.training.schedule import steps_within
from cpu3d.training_options import as_options
from cpu3d.util.atomic import is_untouched, write_json
from memory_estimator.files import read_json, typed

SCHEMA = 1
"""Version of compare.json."""

FILE = "compare.json"

Json = Dict[str, Any]


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


def check_same(asked: Json, kept: Kept, out: Path) -> None:
    """Raise InputError, all differences at once, unless what is asked for is what the folder is of."""
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


def courses(found: Sequence[Resolved], budget: Budget, validations: int) -> List[Json]:
    """What every run of each variant does. Under a budget of minutes steps are None until their time is known."""
    plan = [_course(one) for one in found]
    if budget.kind == "minutes":
        return plan
    baseline = found[0]
    voxels = budget.amount
    if budget.kind == "epochs":
        voxels = voxels_of_epochs(budget.amount, baseline.config, baseline.cases)
    return _with_steps(plan, [steps_for(voxels, one.config) for one in found], validations)


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


def run_options(course: Json, seed: int, steps: int, validations: int) -> Tuple[str, ...]:
    """Those of `train` for one run of a course.

    A course that was planned before there was a choice goes on as it was: validated by epochs, warmed up as it says.
    """
    own = {"steps": steps, "validations": validations, "seed": seed}
    if course.get("validate_every"):
        own = {"steps": steps, "validate_every": course["validate_every"], "seed": seed}
    warmup_steps = course.get("warmup_steps", 0)
    if warmup_within(warmup_steps, steps) < warmup_steps:
        own["warmup_steps"] = warmup_within(warmup_steps, steps)
    return (*course["options"], *as_options(own))


# --- Private helpers ---


def _course(one: Resolved) -> Json:
    variant, config, foreseen = one.variant, one.config, one.foreseen
    recipe = ["--recipe", variant.recipe] if variant.recipe else []
    return _plain(
        {
            "name": variant.name,
            "options": [*recipe, *as_options(variant.settings)],
            "mode": config.mode,
            "grid": config.grid,
            "batch": config.batch,
            "policy": config.unet.policy,
            "device": config.device,
            "step_voxels": config.batch * config.grid[0] * config.grid[1] * config.grid[2],
            "steps_per_epoch": one.steps_per_epoch,
            "step_s": foreseen.step_s if foreseen else None,
            "peak_bytes": foreseen.process_peak_bytes if foreseen else None,
            "warmup_steps": config.warmup_steps,
            "steps": None,
            "voxels": None,
            "validations": None,
        }
    )


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

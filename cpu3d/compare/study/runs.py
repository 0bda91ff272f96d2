"""The runs of a resolution study: short ones that search each arm's learning rate, then full ones for every seed."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from cpu3d.compare.budget import validate_every, warmup_within
from cpu3d.compare.gather import MEAN, RunResult, read_run
from cpu3d.compare.planned import Evaluation, PlannedRun
from cpu3d.compare.runner import RunDivergedError, carry_out
from cpu3d.compare.study.learning_rates import EXTENSIONS, Trial, by_dice, candidates, rate_beyond, rounded, start_rate
from cpu3d.compare.study.result import Arm, SeedRun
from cpu3d.compare.variants import Variant, resolved
from cpu3d.config import RunConfig
from cpu3d.data.store import Store
from cpu3d.errors import InputError
from cpu3d.host.gpu import Gpu
from cpu3d.training_options import as_options
from memory_estimator.host import Host

SEARCH_VALIDATIONS = 3
"""Of a trial. All trials of an arm have equally many, so none has more chances at a lucky one."""


@dataclass(frozen=True)
class Plan:
    """What is asked of every arm."""

    epochs: float
    """Passes over the training cases of a full run, whatever its batch: equal data."""
    seeds: Tuple[int, ...]
    """The first one's is the search."""
    search_share: float
    """Part of a full run's steps that a trial takes."""
    search_factors: Tuple[float, ...]
    """Of the start rate."""
    learning_rates: Tuple[float, ...]
    """To try instead of those, as they are, and none beyond them; () goes by the factors."""
    validations: int
    """Of a full run."""
    evaluation: Evaluation
    force: bool = False


@dataclass(frozen=True)
class PlannedArm:
    """One resolution at one batch, before anything is trained. Goes to JSON by `vars` and back."""

    resolution: float
    batch: int
    grid: Tuple[int, int, int]
    """Voxels that the network sees."""
    options: Tuple[str, ...]
    """Of `train`, for all of the arm's runs."""
    start_rate: float
    steps: int
    """Of a full run."""
    search_steps: int
    """Of a trial."""
    steps_per_epoch: int
    warmup_steps: int
    """That a long run takes."""
    step_s: Optional[float]
    """Foreseen, as the next is; None where nothing is known of the engine."""
    peak_bytes: Optional[int]
    rates: Tuple[float, ...] = ()
    """That its search tries before it knows anything, in ascending order; one alone is not searched."""
    goes_beyond: bool = True
    """Whether the search goes on where its best is at an end; not where the user named the rates."""

    @property
    def name(self) -> str:
        """Of its runs' folders."""
        return f"r{self.resolution:g}-b{self.batch}"


Trials = Dict[float, Trial]
"""By learning rate."""


def plan_arms(
    store: Store,
    host: Host,
    gpus: Sequence[Gpu],
    settings: Dict[str, Any],
    recipe: Optional[str],
    base: RunConfig,
    resolutions: Sequence[float],
    batches: Sequence[int],
    plan: Plan,
) -> List[PlannedArm]:
    """Every resolution at every batch, by batch. Raises InputError, for all of them at once, where `train` would.

    `base` has the learning rate that the start is scaled from, and the batch that it is for.
    """
    arms, problems = [], []
    for batch in batches:
        start = start_rate(base.learning_rate, batch=batch, base_batch=base.batch, optimizer=base.optimizer)
        for resolution in resolutions:
            own = {**settings, "mode": "whole", "resolution": resolution, "batch": batch}
            variant = Variant(f"resolution {resolution:g} at batch {batch}", own, recipe)
            try:
                found = resolved(variant, store, host, gpus)
            except InputError as error:
                problems += error.problems
                continue
            steps = max(round(plan.epochs * found.cases / batch), 1)
            foreseen = found.foreseen
            arms.append(
                PlannedArm(
                    resolution=resolution,
                    batch=batch,
                    grid=found.config.grid,
                    options=(*(("--recipe", recipe) if recipe else ()), *as_options(found.variant.settings)),
                    start_rate=start,
                    steps=steps,
                    search_steps=max(round(plan.search_share * steps), 1),
                    steps_per_epoch=found.steps_per_epoch,
                    warmup_steps=found.config.warmup_steps,
                    step_s=foreseen.step_s if foreseen else None,
                    peak_bytes=foreseen.process_peak_bytes if foreseen else None,
                    rates=first_rates(start, plan),
                    goes_beyond=not plan.learning_rates,
                )
            )
    if problems:
        raise InputError(*problems)
    return arms


def first_rates(start: float, plan: Plan) -> Tuple[float, ...]:
    """What a search that starts at a rate tries before it knows anything."""
    named = tuple(sorted({rounded(rate) for rate in plan.learning_rates}))
    return named or candidates(start, plan.search_factors)


def arms_of(
    planned: Sequence[Mapping[str, Any]], arms: Sequence[PlannedArm], plan: Plan, *, more: bool
) -> List[PlannedArm]:
    """The arms that were `planned` before, as `vars` of them, and the new ones of `arms`; by batch and resolution.

    What was planned stays as it was, as what the host decides may be another thing today. With `more` the rates of
    `arms`, as somebody asked for them, are searched besides those that were.
    """
    found: Dict[Tuple[int, float], PlannedArm] = {}
    for content in planned:
        arm = PlannedArm(**{**content, **{name: tuple(content[name]) for name in ("grid", "options")}})
        # One from before arms had rates of their own: it was searched as this call, which is the same, says.
        rates = tuple(content.get("rates") or first_rates(arm.start_rate, plan))
        beyond = content.get("goes_beyond", not plan.learning_rates)
        found[arm.batch, arm.resolution] = dataclasses.replace(arm, rates=rates, goes_beyond=beyond)
    for arm in arms:
        before = found.setdefault((arm.batch, arm.resolution), arm)
        if more:
            rates = tuple(sorted({*before.rates, *arm.rates}))
            found[arm.batch, arm.resolution] = dataclasses.replace(before, rates=rates)
    return [found[key] for key in sorted(found)]


def search(arms: Sequence[PlannedArm], plan: Plan, store: Path, out: Path) -> List[Trials]:
    """Train every arm's trials, and up to EXTENSIONS more where the best is at an end; the trials of each arm.

    An arm with one rate has nothing to search, and so no trials.
    """
    trials: List[Trials] = [{} for _ in arms]
    wanted = [arm.rates if len(arm.rates) > 1 else () for arm in arms]
    for extension in range(EXTENSIONS + 1):
        for arm, found, rates in zip(arms, trials, wanted):
            found.update({rate: _try(arm, rate, plan, store, out) for rate in rates})
        if extension == EXTENSIONS:
            break
        beyond = [rate_beyond(list(found.values())) if arm.goes_beyond else None for arm, found in zip(arms, trials)]
        wanted = [() if rate is None else (rate,) for rate in beyond]
    return trials


def full_runs(arms: Sequence[PlannedArm], trials: Sequence[Trials], plan: Plan, store: Path, out: Path) -> List[Arm]:
    """Train every arm with its best rate for every seed, score all, and gather what the arms come to.

    A rate that diverges in full length, with any seed, makes place for the next best of the search, and the arm says
    so. Raises RunDivergedError where there is no other.
    """
    # The best is last, and one that diverges is taken off.
    rates = [
        [trial.rate for trial in reversed(by_dice(list(found.values())))] if found else list(arm.rates)
        for arm, found in zip(arms, trials)
    ]
    diverged: List[List[float]] = [[] for _ in arms]
    while True:
        runs = [[_full_run(arm, left[-1], seed, plan, out) for seed in plan.seeds] for arm, left in zip(arms, rates)]
        try:
            carry_out([run for of_seed in zip(*runs) for run in of_seed], store, out, plan.evaluation, force=plan.force)
            break
        except RunDivergedError as error:
            position = next((number for number, group in enumerate(runs) if error.run in group), None)
            if position is None or len(rates[position]) < 2:
                raise
            diverged[position].append(rates[position].pop())
    split = plan.evaluation.split
    return [
        Arm(
            resolution=arm.resolution,
            batch=arm.batch,
            grid=arm.grid,
            steps=arm.steps,
            search_steps=arm.search_steps,
            start_rate=arm.start_rate,
            rate=left[-1],
            trials=tuple(found[each] for each in sorted(found)),
            runs=tuple(seed_run(read_run(run.variant, run.seed, run.folder, split)) for run in group),
            diverged=tuple(lost),
        )
        for arm, found, left, lost, group in zip(arms, trials, rates, diverged, runs)
    ]


def seed_run(result: RunResult) -> SeedRun:
    """What a trained and scored run comes to."""
    costs, scores = result.costs, {name: found for name, found in result.scores.items() if name != MEAN}

    def by_case(metric: str) -> Dict[str, Tuple[float, ...]]:
        return {
            name: tuple(round(found[metric][case], 5) for case in sorted(found[metric]))
            for name, found in scores.items()
        }

    return SeedRun(
        seed=result.seed,
        val_dice=best_validation(result),
        dice=by_case("dice"),
        hd95_mm=by_case("hd95_mm"),
        step_s=costs.step_s,
        train_s=costs.train_s,
        peak_bytes=costs.card_peak_bytes or costs.train_peak_bytes,
        predict_s=costs.case_predict_s,
    )


def best_validation(result: RunResult) -> Optional[float]:
    """The highest mean Dice of a run's validations; None where there was none."""
    return max((point.mean_dice for point in result.curve), default=None)


# --- Private helpers ---


def _try(arm: PlannedArm, rate: float, plan: Plan, store: Path, out: Path) -> Trial:
    run = PlannedRun(
        f"search at resolution {arm.resolution:g}, batch {arm.batch}, rate {rate:g}",
        plan.seeds[0],
        out / "runs" / f"search-{arm.name}-lr{rate:g}",
        _options(arm, rate, plan.seeds[0], arm.search_steps, SEARCH_VALIDATIONS),
    )
    try:
        carry_out([run], store, out, None, force=plan.force)
    except RunDivergedError:
        return Trial(rate, None)  # an answer, which is kept, and not a failure of the search
    return Trial(rate, best_validation(read_run(run.variant, run.seed, run.folder, None)))


def _full_run(arm: PlannedArm, rate: float, seed: int, plan: Plan, out: Path) -> PlannedRun:
    # The rate is part of the name: a search over more rates may choose another, and that is another run.
    folder = out / "runs" / f"{arm.name}-lr{rate:g}-seed{seed}"
    options = _options(arm, rate, seed, arm.steps, plan.validations)
    return PlannedRun(f"resolution {arm.resolution:g}, batch {arm.batch}", seed, folder, options)


def _options(arm: PlannedArm, rate: float, seed: int, steps: int, validations: int) -> Tuple[str, ...]:
    """Of `train`, for one run. What comes last holds, as on any command line."""
    own = {
        "learning_rate": rate,
        "warmup_steps": warmup_within(arm.warmup_steps, steps),
        "steps": steps,
        "validate_every": validate_every(steps, arm.steps_per_epoch, validations),
        "seed": seed,
    }
    return (*arm.options, *as_options(own))

"""The runs of a resolution study: short ones that search each arm's learning rate, then full ones for every seed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from cpu3d.compare.budget import validate_every
from cpu3d.compare.gather import MEAN, RunResult, read_run
from cpu3d.compare.learning_rates import EXTENSIONS, Trial, candidates, rate_beyond, rounded, start_rate, winner
from cpu3d.compare.runner import Evaluation, PlannedRun, RunFailedError, carry_out
from cpu3d.compare.study import Arm, SeedRun
from cpu3d.compare.variants import Variant, resolved
from cpu3d.config import RunConfig
from cpu3d.data.store import Store
from cpu3d.errors import InputError
from cpu3d.host.gpu import Gpu
from cpu3d.training_options import as_options
from memory_estimator.host import Host

SEARCH_VALIDATIONS = 3
"""Of a trial. All trials of an arm have equally many, so none has more chances at a lucky one."""

WARMUP_SHARE = 10
"""The warm-up is at most a tenth of a run: a trial at a large batch may have fewer steps than the usual warm-up."""


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
    """To try instead of those, as they are; () goes by the factors."""
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
                )
            )
    if problems:
        raise InputError(*problems)
    return arms


def first_rates(arm: PlannedArm, plan: Plan) -> Tuple[float, ...]:
    """What an arm's search tries before it knows anything; one rate alone is not searched."""
    named = tuple(sorted({rounded(rate) for rate in plan.learning_rates}))
    return named or candidates(arm.start_rate, plan.search_factors)


def search(arms: Sequence[PlannedArm], plan: Plan, store: Path, out: Path) -> List[Trials]:
    """Train every arm's trials, and up to EXTENSIONS more where the best is at an end; the trials of each arm.

    Rates that the user named are all there are. An arm with one rate has nothing to search, and so no trials.
    """
    trials: List[Trials] = [{} for _ in arms]
    wanted = [rates if len(rates) > 1 else () for rates in (first_rates(arm, plan) for arm in arms)]
    for extension in range(EXTENSIONS + 1):
        for arm, found, rates in zip(arms, trials, wanted):
            found.update({rate: _try(arm, rate, plan, store, out) for rate in rates})
        if extension == EXTENSIONS or plan.learning_rates:
            break
        beyond = [rate_beyond(list(found.values())) for found in trials]
        wanted = [() if rate is None else (rate,) for rate in beyond]
    return trials


def full_runs(arms: Sequence[PlannedArm], trials: Sequence[Trials], plan: Plan, store: Path, out: Path) -> List[Arm]:
    """Train every arm with its best rate for every seed, score all, and gather what the arms come to."""
    rates = [
        winner(list(found.values())).rate if found else first_rates(arm, plan)[0] for arm, found in zip(arms, trials)
    ]
    runs = [[_full_run(arm, rate, seed, plan, out) for seed in plan.seeds] for arm, rate in zip(arms, rates)]
    carry_out([run for of_seed in zip(*runs) for run in of_seed], store, out, plan.evaluation, force=plan.force)
    split = plan.evaluation.split
    return [
        Arm(
            resolution=arm.resolution,
            batch=arm.batch,
            grid=arm.grid,
            steps=arm.steps,
            search_steps=arm.search_steps,
            start_rate=arm.start_rate,
            rate=rate,
            trials=tuple(found[each] for each in sorted(found)),
            runs=tuple(seed_run(read_run(run.variant, run.seed, run.folder, split)) for run in group),
        )
        for arm, found, rate, group in zip(arms, trials, rates, runs)
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
        peak_bytes=costs.train_peak_bytes,
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
    except RunFailedError as error:
        if "must be finite" not in str(error):
            raise
        return Trial(rate, None)  # a rate that diverges is an answer, and not a failure of the search
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
        "warmup_steps": min(arm.warmup_steps, steps // WARMUP_SHARE),
        "steps": steps,
        "validate_every": validate_every(steps, arm.steps_per_epoch, validations),
        "seed": seed,
    }
    return (*arm.options, *as_options(own))

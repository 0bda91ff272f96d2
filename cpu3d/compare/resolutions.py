"""The resolution study: a comparison of resolutions, and batches, each with a learning rate of its own (source S2).

    ./run.sh compare --store store --out study --resolutions 0.5 0.75 1 --batches 1 4 --epochs 30 --seeds 0 1 2

Every arm, a resolution at a batch, sees every training case equally often and is scored on the full original grid. Its
learning rate is searched first: short runs at the start rate times --search-factors, the best by validation Dice (never
test) wins, and where that is at an end one more factor is tried, twice at most. The start follows the batch: linearly
for SGD (Krizhevsky 2014, Goyal et al. 2017), with its square root for Adam (Krizhevsky 2014; Malladi et al. 2022); both
are rules for large batches, and say nothing about resolution. Rerun to continue, or to add seeds, resolutions, batches
and rates.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
from rich.console import Console

from cpu3d.compare.plan import Json, Kept, Variant, load_same, resolve_variants, warmup_within
from cpu3d.compare.report import RULE, Section, show_results, write_page
from cpu3d.compare.run import MEAN, Evaluation, PlannedRun, RunDivergedError, RunResult, carry_out, read_run
from cpu3d.compare.statistics import mean_and_sd, paired_difference
from cpu3d.config import RunConfig
from cpu3d.data.store import Store
from cpu3d.data.words import by, count
from cpu3d.errors import InputError
from cpu3d.inference.evaluate import UNTOUCHED, warning
from cpu3d.recipes import RECIPES
from cpu3d.report.page import flat, gib
from cpu3d.training_options import as_options, with_settings
from cpu3d.util.atomic import writable_folder
from cpu3d.util.lock import locked
from cpu3d.util.records import append_record, duration, newest, number, plus_minus, seconds, versions
from memory_estimator.figure import PALETTE, new_figure, plain, png
from memory_estimator.host import read_host
from memory_estimator.table import Bold, Table

if TYPE_CHECKING:
    from cpu3d.compare.command import Options

RECORD = "resolutions"
"""The kind of its records."""

SEARCH_FACTORS = (0.5, 1.0, 2.0)

SEARCH_SHARE = 0.25

SEARCH_VALIDATIONS = 3
"""Of a trial. All trials of an arm have equally many, so none has more chances at a lucky one."""

EXTENSIONS = 2
"""How often a search goes on beyond its range."""

SCALING = {"adam": 0.5, "sgd": 1.0}
"""Optimizer -> the power of the batch that its learning rate grows with."""

SCORES = (
    "Mean over cases, then \u00b1 standard deviation over seeds. Rate: that of the full runs, chosen by the search. "
    "Last: mean Dice less the highest of the same batch and of the same resolution, which is picked by the scores "
    f"shown here and so flattered. {RULE}"
)

COSTS = (
    "Medians over seeds; HD95 in mm, the mean over cases. Grid: the voxels that the network sees. Training with its "
    "validations. Memory: the largest resident set of the training process; on a card that of TensorFlow's allocator."
)


@dataclass(frozen=True)
class Trial:
    """A short run with one learning rate."""

    rate: float
    dice: Optional[float]
    """Best mean Dice on the validation cases; None where the loss diverged."""


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
    """Predicted, as the next is; None where nothing is known of the engine."""
    peak_bytes: Optional[int]
    rates: Tuple[float, ...] = ()
    """That its search tries before it knows anything, in ascending order; one alone is not searched."""
    goes_beyond: bool = True
    """Whether the search goes on where its best is at an end; not where the user named the rates."""

    @property
    def name(self) -> str:
        """Of its runs' folders."""
        return f"r{self.resolution:g}-b{self.batch}"


@dataclass(frozen=True)
class Study:
    """What is asked of every arm."""

    epochs: float
    """Passes over the training cases of a full run, whatever its batch: equal data."""
    seeds: Tuple[int, ...]
    """The first one's is the search."""
    validations: int
    """Of a full run."""
    evaluation: Evaluation
    store: Path
    out: Path
    force: bool = False


def run_study(options: "Options", settings: Dict[str, Any], recipe: Optional[str], epochs: Optional[float]) -> int:
    """Carry out the study that `compare` was asked for. Restartable; what is of another study is refused.

    Seeds, resolutions, batches and rates that are asked for are added to those of the folder, and all are reported.
    """
    store = options.checked_store()
    if not store.cases("val"):
        raise InputError(
            f"split val of {store.folder} must hold cases, as rates are chosen on them; prepare with --split"
        )
    try:
        base = with_settings(RECIPES[recipe or "brats-regions"](), settings)
    except ValueError as error:
        raise InputError(str(error)) from None
    epochs, evaluation = epochs or base.epochs, Evaluation(options.split, options.tolerance)
    arms = plan_arms(options, store, settings, recipe, base, epochs)
    asked = {
        "study": RECORD,
        "split_hash": store.manifest.split_hash,
        "recipe": recipe,
        "settings": settings,
        "epochs": epochs,
        "validations": options.validations,
        "evaluation": vars(evaluation),
        "search_share": options.search_share or SEARCH_SHARE,
        "search_seed": options.seeds[0],
    }

    def taken_up() -> Tuple[Kept, List[PlannedArm]]:
        before = load_same(asked, options.out, PlannedArm)
        planned = merged_arms(before.plan if before else (), arms, options)
        seeds = list(dict.fromkeys((*(before.seeds if before else ()), *options.seeds)))
        same = before and (before.seeds, len(before.plan)) == (seeds, len(planned))
        kept = Kept({**asked, "search_seed": seeds[0]}, seeds, list(map(vars, planned)))
        messages = Console(stderr=True)
        messages.print(plan_table(planned, seeds, epochs).rich())
        if options.split != UNTOUCHED:
            messages.print(f"[bold yellow]{warning(options.split)}")
        return dataclasses.replace(kept, results=before.results if same else None), planned

    if options.dry_run:
        taken_up()
        return 0
    out = writable_folder(options.out, "folder of --out").resolve()
    with locked(out, "comparison"):
        kept, planned = taken_up()
        kept.save(out)
        study = Study(
            epochs, tuple(kept.seeds), options.validations, evaluation, store.folder.resolve(), out, options.force
        )
        trials = search(planned, study)
        about = {
            **_about(options, store, study, settings, base),
            "title": options.title or f"Which resolution? {store.manifest.name}",
        }
        results = {"about": about, "arms": full_runs(planned, trials, study)}
        kept = dataclasses.replace(kept, results=results)
        kept.save(out)
        write_page(out / "report.html", about["title"], page_sections(results), split=options.split)
    if options.record:
        append_record(options.record, RECORD, {"title": about["title"], **results})
    show_results(kept, [scores_table(results), costs_table(results)], out, as_json=options.json)
    return 0


# --- Learning rates ---


def start_rate(rate: float, *, batch: int, base_batch: int, optimizer: str) -> float:
    """The learning rate at `batch` to start a search from, where `rate` is that at `base_batch`."""
    return rounded(rate * (batch / base_batch) ** SCALING[optimizer])


def rounded(rate: float) -> float:
    """To four digits, so that a rate reads the same in a folder's name, on a command line and in a record."""
    return float(f"{rate:.4g}")


def by_dice(trials: Sequence[Trial]) -> List[Trial]:
    """The trials that ended well from the best to the worst, the lower rate first of equals.

    Raises InputError when all diverged.
    """
    finished = [trial for trial in trials if trial.dice is not None]
    if not finished:
        rates = ", ".join(f"{trial.rate:g}" for trial in trials)
        raise InputError(f"a learning rate must train to a finite loss, none of {rates} did; lower --learning-rates")
    return sorted(finished, key=lambda trial: (-trial.dice, trial.rate))


def rate_beyond(trials: Sequence[Trial]) -> Optional[float]:
    """The rate to try next: one more step of the same ratio where the best is the lowest or highest that was tried.

    Where all diverged that is a lower one. None where the best lies inside, or there is no ratio as one rate was tried.
    """
    rates = sorted(trial.rate for trial in trials)
    if len(rates) < 2:
        return None
    best = by_dice(trials)[0].rate if any(trial.dice is not None for trial in trials) else rates[0]
    if best == rates[0]:
        return rounded(best * best / rates[1])
    # A higher rate that diverged closes its side: the best is then not the highest that was tried.
    return rounded(best * best / rates[-2]) if best == rates[-1] else None


# --- Plan and runs ---


def plan_arms(
    options: "Options", store: Store, settings: Dict[str, Any], recipe: Optional[str], base: RunConfig, epochs: float
) -> List[PlannedArm]:
    """Every resolution at every batch, by batch. Raises InputError, for all of them at once, where `train` would.

    `base` has the learning rate that the start is scaled from, and the batch that it is for.
    """
    variants = [
        Variant(
            f"resolution {resolution:g} at batch {batch}",
            {**settings, "mode": "whole", "resolution": resolution, "batch": batch},
            recipe,
        )
        for batch in sorted(set(options.batches or [base.batch]))
        for resolution in sorted(set(options.resolutions))
    ]
    arms = []
    for one in resolve_variants(variants, store):
        batch, steps = one.config.batch, max(round(epochs * one.cases / one.config.batch), 1)
        start = start_rate(base.learning_rate, batch=batch, base_batch=base.batch, optimizer=base.optimizer)
        arms.append(
            PlannedArm(
                resolution=one.config.resolution,
                batch=batch,
                grid=one.config.grid,
                options=tuple(one.options),
                start_rate=start,
                steps=steps,
                search_steps=max(round((options.search_share or SEARCH_SHARE) * steps), 1),
                steps_per_epoch=one.cases // batch,
                warmup_steps=one.config.warmup_steps,
                step_s=one.step_s,
                peak_bytes=one.peak_bytes,
                rates=first_rates(options, start),
                goes_beyond=not options.learning_rates,
            )
        )
    return arms


def first_rates(options: "Options", start: float) -> Tuple[float, ...]:
    """What a search that starts at a rate tries before it knows anything, in ascending order."""
    rates = options.learning_rates or [start * factor for factor in options.search_factors or SEARCH_FACTORS]
    return tuple(sorted(set(map(rounded, rates))))


def merged_arms(planned: Sequence[Json], arms: Sequence[PlannedArm], options: "Options") -> List[PlannedArm]:
    """The arms that were `planned` before, as `vars` of them, and the new ones of `arms`; by batch and resolution.

    What was planned stays as it was, as what the host decides may be another thing today. Rates that `options` name are
    searched besides those that were.
    """
    found: Dict[Tuple[int, float], PlannedArm] = {}
    for content in planned:
        arm = PlannedArm(**{**content, **{name: tuple(content[name]) for name in ("grid", "options")}})
        # One from before arms had rates of their own: it was searched as this call, which is the same, says.
        rates = tuple(arm.rates or first_rates(options, arm.start_rate))
        beyond = content.get("goes_beyond", not options.learning_rates)
        found[arm.batch, arm.resolution] = dataclasses.replace(arm, rates=rates, goes_beyond=beyond)
    for arm in arms:
        before = found.setdefault((arm.batch, arm.resolution), arm)
        if options.learning_rates or options.search_factors:
            rates = tuple(sorted({*before.rates, *arm.rates}))
            found[arm.batch, arm.resolution] = dataclasses.replace(before, rates=rates)
    return [found[key] for key in sorted(found)]


def search(arms: Sequence[PlannedArm], study: Study) -> List[List[Trial]]:
    """Train every arm's trials, and up to EXTENSIONS more where the best is at an end; the trials of each arm.

    An arm with one rate has nothing to search, and so no trials.
    """
    trials: List[Dict[float, Trial]] = [{} for _ in arms]
    wanted = [arm.rates if len(arm.rates) > 1 else () for arm in arms]
    for extension in range(EXTENSIONS + 1):
        for arm, found, rates in zip(arms, trials, wanted):
            found.update({rate: _try(arm, rate, study) for rate in rates})
        if extension < EXTENSIONS:
            beyond = [rate_beyond(list(one.values())) if arm.goes_beyond else None for arm, one in zip(arms, trials)]
            wanted = [() if rate is None else (rate,) for rate in beyond]
    return [[found[rate] for rate in sorted(found)] for found in trials]


def full_runs(arms: Sequence[PlannedArm], trials: Sequence[Sequence[Trial]], study: Study) -> List[Json]:
    """Train every arm with its best rate for every seed, score all, and gather what the arms come to, for JSON.

    A rate that diverges in full length, with any seed, makes place for the next best of the search, and the arm says
    so. Raises RunDivergedError where there is no other.
    """
    # The best is last, and one that diverges is taken off.
    rates = [
        [trial.rate for trial in reversed(by_dice(found))] if found else list(arm.rates)
        for arm, found in zip(arms, trials)
    ]
    diverged: List[List[float]] = [[] for _ in arms]
    while True:
        runs = [[_full_run(arm, left[-1], seed, study) for seed in study.seeds] for arm, left in zip(arms, rates)]
        every = [run for of_seed in zip(*runs) for run in of_seed]
        try:
            carry_out(every, study.store, study.out, study.evaluation, force=study.force)
            break
        except RunDivergedError as error:
            position = next((number for number, group in enumerate(runs) if error.run in group), None)
            if position is None or len(rates[position]) < 2:
                raise
            diverged[position].append(rates[position].pop())
    return [
        {
            "resolution": arm.resolution,
            "batch": arm.batch,
            "grid": list(arm.grid),
            "steps": arm.steps,
            "search_steps": arm.search_steps,
            "start_rate": arm.start_rate,
            "rate": left[-1],
            "trials": list(map(vars, found)),
            "runs": [_run_json(read_run(run.variant, run.seed, run.folder, study.evaluation.split)) for run in group],
            "diverged": lost,
        }
        for arm, found, left, lost, group in zip(arms, trials, rates, diverged, runs)
    ]


# --- Tables, pictures, page, Markdown: of the results as compare.json and the records hold them ---


def plan_table(arms: Sequence[PlannedArm], seeds: Sequence[int], epochs: float) -> Table:
    """What is about to happen, a line an arm."""
    rows, whole = [], []
    for arm in arms:
        searched = len(arm.rates) if len(arm.rates) > 1 else 0
        rates = ", ".join(f"{rate:g}" for rate in arm.rates)
        rows.append(
            (
                f"{arm.resolution:g}",
                str(arm.batch),
                by(arm.grid, " x "),
                f"{arm.steps:,}",
                f"{searched} x {arm.search_steps:,} steps: {rates}" if searched else f"none: {rates}",
                f"{arm.step_s:.2f} s" if arm.step_s else "?",
                gib(arm.peak_bytes) if arm.peak_bytes else "?",
            )
        )
        whole.append(arm.step_s and arm.step_s * (len(seeds) * arm.steps + searched * arm.search_steps))
    return Table(
        ("resolution", "batch", "sees", "steps", "rates to search", "a step", "memory"),
        rows,
        title=f"{count(arms, 'arm')} x {count(seeds, 'seed')}, {epochs:g} epochs each",
        caption=f"predicted: {duration(sum(whole))} for all steps, validation and scoring aside" if all(whole) else "",
    )


def scores_table(results: Json) -> Table:
    """Dice of each arm, and how far it is from the best of its batch and of its resolution; bold counts."""
    arms, regions = _in_order(results), _regions(results)
    axes = [name for name in ("batch", "resolution") if len({arm[name] for arm in arms}) < len(arms)]
    rows = []
    for arm in arms:
        dice = [plus_minus(*mean_and_sd(_over_seeds(arm, "dice", region)), 3) for region in regions]
        mean = [plus_minus(*mean_and_sd(_over_seeds(arm, "dice")), 3)] if len(regions) > 1 else []
        apart = [_to_best(arm, [one for one in arms if one[axis] == arm[axis]]) for axis in axes]
        rows.append((f"{arm['resolution']:g}", str(arm["batch"]), f"{arm['rate']:g}", *mean, *dice, *apart))
    means = ["mean Dice"] if len(regions) > 1 else []
    header = ("resolution", "batch", "rate", *means, *(f"{name} Dice" for name in regions))
    return Table((*header, *(f"to the best of the {axis}" for axis in axes)), rows, title="Dice", caption=SCORES)


def costs_table(results: Json) -> Table:
    """HD95 and what a run of each arm took."""
    regions = _regions(results)
    rows = [
        (
            f"{arm['resolution']:g}",
            str(arm["batch"]),
            *(plus_minus(*mean_and_sd(_over_seeds(arm, "hd95_mm", region)), 1) for region in regions),
            by(arm["grid"], " x "),
            f"{arm['steps']:,}",
            number(_median(arm, "step_s")),
            seconds(_median(arm, "train_s")),
            gib(_median(arm, "peak_bytes")),
            number(_median(arm, "predict_s")),
        )
        for arm in _in_order(results)
    ]
    header = ("grid", "steps", "s a step", "training", "memory", "s to predict a case")
    names = (f"{name} HD95" for name in regions)
    return Table(("resolution", "batch", *names, *header), rows, title="HD95 and costs", caption=COSTS)


def search_table(results: Json) -> Table:
    """The search of each arm: every rate's validation Dice, the rate of the full runs bold."""
    rates = sorted({trial["rate"] for arm in results["arms"] for trial in arm["trials"]})
    rows = []
    for arm in _in_order(results):
        if not arm["trials"]:
            continue
        dice = {one["rate"]: "diverged" if one["dice"] is None else f"{one['dice']:.4f}" for one in arm["trials"]}
        cells = [Bold(dice[rate]) if rate == arm["rate"] else dice.get(rate, "") for rate in rates]
        open_end = rate_beyond([Trial(**one) for one in arm["trials"]]) is not None
        lost = ", ".join(f"{rate:g}" for rate in arm.get("diverged", ()))
        names = (f"{arm['resolution']:g}", str(arm["batch"]), f"{arm['search_steps']:,}")
        rows.append((*names, *cells, "yes" if open_end else "no", lost or "-"))
    columns = (*(f"{rate:g}" for rate in rates), "best at an end", "diverged in full length")
    share = f"{100 * results['about']['search_share']:g} % of a full run's steps"
    caption = f"Best validation Dice of short runs of one seed, {share}, by learning rate. Bold: that of the full runs."
    return Table(("resolution", "batch", "steps", *columns), rows, title="Search", caption=caption)


def draw_scores(results: Json) -> bytes:
    """Mean Dice and training time over resolution: a line through a batch's means, a dot for each seed. PNG."""
    figure = new_figure(9.4, 3.5)
    panels = figure.subplots(1, 2, gridspec_kw={"width_ratios": (3, 2)})
    arms = _in_order(results)
    resolutions, batches = (sorted({arm[name] for arm in arms}) for name in ("resolution", "batch"))
    # Batches stand a little apart, or their dots would hide each other.
    apart = 0.12 * min(np.diff(resolutions), default=0.1)
    times = {id(arm): [run["train_s"] for run in arm["runs"] if run["train_s"] is not None] for arm in arms}
    for axes, title, label in ((panels[0], "Dice on the full grid", "Dice"), (panels[1], "Training time", "s")):
        for position, batch in enumerate(batches):
            style = {"color": PALETTE[position % len(PALETTE)], "marker": "os^DvP"[position % 6]}
            own = [arm for arm in arms if arm["batch"] == batch]
            values = [_over_seeds(arm, "dice") if label == "Dice" else times[id(arm)] for arm in own]
            x = [arm["resolution"] + apart * (position - (len(batches) - 1) / 2) for arm in own]
            axes.plot(x, [np.mean(one) if one else np.nan for one in values], "-", label=str(batch), **style)
            for at, seeds in zip(x, values):
                axes.plot([at] * len(seeds), seeds, linestyle="", alpha=0.45, markersize=3.6, **style)
        plain(axes, title)
        axes.set_xticks(resolutions, [f"{value:g}" for value in resolutions])
        axes.set_xlabel("resolution (share of the store's)", fontsize=9)
        axes.set_ylabel(label, fontsize=9)
    panels[1].set_ylim(bottom=0)
    panels[0].legend(frameon=False, fontsize=8, title="effective batch", title_fontsize=8)
    figure.tight_layout(pad=0.6, w_pad=2)
    return png(figure)


def page_sections(results: Json) -> List[Section]:
    """Scores and costs, the search, and how it was done."""
    about = results["about"]
    scores = Section(
        "Scores",
        [scores_table(results), costs_table(results)],
        [("Dice and training time over resolution, a line for each batch", draw_scores(results))],
        [
            f"Equal data: each arm takes as many steps as {about['epochs']:g} passes over the "
            f"{about['cases']['train']} training cases make at its batch; logits are interpolated back to the "
            "store's voxels before they are scored."
        ],
    )
    facts = Table(("", ""), flat(about), names=2)
    searched = [Section("The search for the learning rate", [search_table(results)])] if _searched(results) else []
    return [scores, *searched, Section("Data, settings, host and versions", [facts])]


def studies_markdown(records: Sequence[Json]) -> List[str]:
    """For docs/compare.md: the tables of the newest record of each title."""
    lines: List[str] = []
    for record in newest(records, lambda record: record.get("title") or record["about"]["title"]):
        about, host = record["about"], record["about"]["host"]
        lines += [
            f"### {about['title']}",
            "",
            f"{record.get('date', '')}, {about['data']}: {count(about['cases']['train'], 'case')} to train on, "
            f"{about['cases'][about['split']]} to score, {about['epochs']:g} epochs, {count(about['seeds'], 'seed')}; "
            f"{about['network']}; {host['cores']} cores of {host['cpu']}.".lstrip(", "),
            "",
        ]
        tables = [scores_table(record), costs_table(record), *([search_table(record)] if _searched(record) else [])]
        for table in tables:
            lines += [*table.markdown(), ""]
    return lines


# --- Private helpers ---


def _about(options: "Options", store: Store, study: Study, settings: Dict[str, Any], base: RunConfig) -> Json:
    """What the page and the record say of data, settings, host and versions; no paths."""
    manifest, unet = store.manifest, base.unet
    return {
        "data": manifest.name,
        "shape": list(manifest.largest_shape),
        "brain_box": list(manifest.largest_box),
        "cases": {name: len(ids) for name, ids in manifest.split.items()},
        "settings": settings,
        "network": f"{unet.network}, {unet.depth} levels, {unet.filters} filters, {unet.norm} norm",
        "optimizer": base.optimizer,
        "epochs": study.epochs,
        "seeds": list(study.seeds),
        "validations": study.validations,
        "search_share": options.search_share or SEARCH_SHARE,
        "search_factors": list(options.search_factors or SEARCH_FACTORS),
        "learning_rates": list(options.learning_rates or ()),
        "split": study.evaluation.split,
        "tolerance_mm": study.evaluation.tolerance_mm,
        "host": read_host().summary(),
        "versions": versions(),
    }


def _try(arm: PlannedArm, rate: float, study: Study) -> Trial:
    run = PlannedRun(
        f"search at resolution {arm.resolution:g}, batch {arm.batch}, rate {rate:g}",
        study.seeds[0],
        study.out / "runs" / f"search-{arm.name}-lr{rate:g}",
        _options(arm, rate, study.seeds[0], arm.search_steps, SEARCH_VALIDATIONS),
    )
    try:
        carry_out([run], study.store, study.out, None, force=study.force)
    except RunDivergedError:
        return Trial(rate, None)  # an answer, which is kept, and not a failure of the search
    return Trial(rate, _best_validation(read_run(run.variant, run.seed, run.folder, None)))


def _full_run(arm: PlannedArm, rate: float, seed: int, study: Study) -> PlannedRun:
    # The rate is part of the name: a search over more rates may choose another, and that is another run.
    folder = study.out / "runs" / f"{arm.name}-lr{rate:g}-seed{seed}"
    options = _options(arm, rate, seed, arm.steps, study.validations)
    return PlannedRun(f"resolution {arm.resolution:g}, batch {arm.batch}", seed, folder, options)


def _options(arm: PlannedArm, rate: float, seed: int, steps: int, validations: int) -> Tuple[str, ...]:
    """Of `train`, for one run. What comes last holds, as on any command line."""
    own = {
        "learning_rate": rate,
        "warmup_steps": warmup_within(arm.warmup_steps, steps),
        "steps": steps,
        "validations": min(validations, steps),
        "seed": seed,
    }
    return (*arm.options, *as_options(own))


def _run_json(result: RunResult) -> Json:
    """A full run, its scores by region and case in the order of the cases' names."""
    costs, scores = result.costs, {name: found for name, found in result.scores.items() if name != MEAN}
    by_case = {
        metric: {
            name: [round(found[metric][case], 5) for case in sorted(found[metric])] for name, found in scores.items()
        }
        for metric in ("dice", "hd95_mm")
    }
    return {
        "seed": result.seed,
        "val_dice": _best_validation(result),
        **by_case,
        "step_s": costs.step_s,
        "train_s": costs.train_s,
        "peak_bytes": costs.card_peak_bytes or costs.train_peak_bytes,
        "predict_s": costs.case_predict_s,
    }


def _best_validation(result: RunResult) -> Optional[float]:
    """The highest mean Dice of a run's validations; None where there was none."""
    return max((point.mean_dice for point in result.curve), default=None)


def _in_order(results: Json) -> List[Json]:
    return sorted(results["arms"], key=lambda arm: (arm["batch"], arm["resolution"]))


def _regions(results: Json) -> List[str]:
    return list(results["arms"][0]["runs"][0]["dice"])


def _searched(results: Json) -> bool:
    return any(arm["trials"] for arm in results["arms"])


def _by_case(arm: Mapping[str, Any], metric: str, region: str = "") -> np.ndarray:
    """(seeds, cases): of one region, or the mean over them."""
    return np.array(
        [run[metric][region] if region else np.mean(list(run[metric].values()), axis=0) for run in arm["runs"]]
    )


def _over_seeds(arm: Mapping[str, Any], metric: str, region: str = "") -> List[float]:
    """The mean over cases for each seed."""
    return _by_case(arm, metric, region).mean(1).tolist()


def _median(arm: Mapping[str, Any], name: str) -> Optional[float]:
    values = [run[name] for run in arm["runs"] if run[name] is not None]
    return float(np.median(values)) if values else None


def _to_best(arm: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """Mean Dice less that of the best of `others`, paired by seed and case, with its interval; bold where it counts."""
    best = max(others, key=lambda one: np.mean(_over_seeds(one, "dice")))
    if best is arm:
        return "best" if len(others) > 1 else "-"
    found = paired_difference(_by_case(arm, "dice"), _by_case(best, "dice"))
    interval = " ({:+.3f} to {:+.3f})".format(*found.interval) if found.interval else ""
    text = f"{found.mean:+.3f}{interval}"
    return Bold(text) if found.is_clear else text

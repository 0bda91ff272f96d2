"""The plan of a training run, decided before anything is computed: settings -> plan -> run.

    plan = make_plan(store, run_folder, host, settings, gpus=gpus, workers=2)
    print(*plan.describe(host))
    check_fits(plan, host, gpus)             # raises DoesNotFitError with the nearest settings that fit
    save_plan(plan, run_folder)              # run/plan.json

Only here is a setting decided that was left open: names, channels and outputs from the store; batch
and learning rate from the workers, if they grow with them; device and dtype from the host; the
grid, or the patch, from both; and the memory policy by the estimate of a step."""

import contextlib
import dataclasses
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from cpu3d.data.labels import mirror_pair
from cpu3d.data.nifti import is_placed
from cpu3d.data.region import Shape3
from cpu3d.data.resolution import field_of, network_grid
from cpu3d.data.store import Store, check_names, grid_size
from cpu3d.data.stores.splits import with_fold
from cpu3d.errors import DoesNotFitError, InputError, raise_if_any
from cpu3d.host.gpu import (
    Gpu,
    best_dtype,
    card_of,
    check_card,
    largest_patch,
    pick_device,
    why_no_card,
)
from cpu3d.host.thread_plan import thread_plan
from cpu3d.run.checkpoint import checkpoints
from cpu3d.run.config_json import differences, load_config, rate_growth
from cpu3d.settings import (
    AUTO,
    VALIDATIONS,
    RunConfig,
    chosen_again,
    left_open,
    recipe_config,
    with_settings,
)
from cpu3d.util.atomic import write_json
from memory_estimator import planner
from memory_estimator.accuracy import Accuracy, load_accuracy
from memory_estimator.calibration import HostConstants, find_constants
from memory_estimator.common.files import read_json
from memory_estimator.common.units import by, format_bytes
from memory_estimator.estimate import Estimate
from memory_estimator.host import Host
from memory_estimator.installed import installed_engine, installed_versions
from memory_estimator.job import PLAN_SCHEMA, Job, statistics_note, stored_bytes
from memory_estimator.training import Beside, Forecast, price_of_run
from models.layer_plan import training_flops

LEAST_COARSE_VOXELS = 40**3
"""Of a coarse grid, for a curriculum that no setting asks for. On 32^3 what was learnt at half
resolution was lost at full resolution (docs/log.md, "Short runs on real sets"). 48^3
was not tried long enough to leave it out."""


@dataclass(frozen=True)
class Plan:
    """A run in which nothing is left open."""

    config: RunConfig
    store: Store  # as the run's fold sees it
    saved: Optional[RunConfig] = None  # of the run that is continued; None for a new one
    workers: int = 1
    chosen: Optional[Mapping[str, Any]] = field(default_factory=dict)
    """The settings that the user gave in all calls for this run; None if an earlier version began
    it, which did not note them."""
    rate_growth: float = 1.0  # of the learning rates that are given to this run, with its workers
    forecast: Optional[Forecast] = None  # of one worker; None on a card, and if `reasons` have why
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Name of a setting that was left open -> why it was decided so; under "memory" why there is no
    forecast."""

    @property
    def samples_per_epoch(self) -> int:
        """Training cases, or patches of them."""
        return len(self.store.manifest.split["train"]) * self.config.patches_per_case

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches that an epoch's samples fill."""
        return self.samples_per_epoch // self.config.batch

    @property
    def steps(self) -> int:
        """Steps of the whole run, as long as no budget of minutes cuts it."""
        return self.config.steps or self.config.epochs * self.steps_per_epoch

    @property
    def least_steps(self) -> int:
        """Steps that a budget of minutes keeps in any case: an epoch, or those of --validate-every.
        A run for which a number of validations was chosen spreads them over any number of steps."""
        if self.config.validate_every:
            return self.config.validate_every * self.steps_per_epoch
        has_chosen = self.chosen is None or "validations" in self.chosen
        return 1 if has_chosen else self.steps_per_epoch

    @property
    def job(self) -> Job:
        """The run as a job of the estimator, on one thread."""
        case_bytes = stored_bytes(
            self.store.manifest.largest_shape, len(self.store.manifest.channels)
        )
        return dataclasses.replace(
            job_of(self.config, 1, self.samples_per_epoch), case_bytes=case_bytes
        )

    @property
    def predicted(self) -> Dict[str, Any]:
        """Time and memory of a step, for the log and the report to compare with the measured
        ones."""
        if self.config.device != "cpu":
            return planner.gpu_forecast(self.job)
        return self.forecast.to_json() if self.forecast else {}

    @property
    def training_s(self) -> Optional[float]:
        """Predicted seconds of all steps, validations aside; None if no step is predicted."""
        return self.forecast and self.forecast.seconds(self.steps, self.config.coarse_steps)

    def to_json(self) -> Dict[str, Any]:
        """The content of plan.json."""
        return {
            "schema": PLAN_SCHEMA,
            "continues": self.saved is not None,
            "workers": self.workers,
            "chosen": self.chosen,
            "rate_growth": self.rate_growth,
            "engine": self.job.engine,
            "micro_batch": self.config.micro,
            "volume_shape": list(volume_shape(self.store, self.config)),
            "cases": {name: len(ids) for name, ids in self.store.manifest.split.items()},
            "steps_per_epoch": self.steps_per_epoch,
            "steps": self.steps,
            "training_s": self.training_s,
            "reasons": dict(self.reasons),
            "predicted": self.predicted,
            "job": dataclasses.asdict(self.job),  # which `estimate --run` starts from
            "config": dataclasses.asdict(self.config),
        }

    def describe(self, host: Host) -> List[str]:
        """Lines to print before the run starts."""
        config, unet, manifest = self.config, self.config.unet, self.store.manifest
        fold = f", fold {config.fold}" * bool(config.fold)
        cases = ", ".join(f"{len(ids)} {name}" for name, ids in manifest.split.items())
        sees = f"{by(config.grid, ' x ')} of {by(volume_shape(self.store, config), ' x ')} ({config.extent})"
        if config.is_patch:
            sees += f", {config.patches_per_case} of a case an epoch, {config.foreground:.0%} around labels"
        length = f"{self.steps} steps, {self.steps_per_epoch} an epoch"
        if config.budget_minutes and not config.steps:
            length += f", cut to {config.budget_minutes:g} minutes"
        elif config.coarse_steps:
            length += f", {config.coarse_steps} of them on {by(config.coarse_grid, ' x ')}"
        forecast = self.forecast.describe(host, self.training_s) if self.forecast else []
        if config.device != "cpu":
            forecast = [
                f"a step takes about {format_bytes(planner.gpu_bytes(self.job))} of the card"
            ]
        notes = [statistics_note(unet.norm, config.batch, config.micro)]
        pair = mirror_pair(manifest.labels.values())
        if pair and config.augment.flip:
            sides = " and ".join(pair)
            notes.append(f"no mirroring along X, as the labels {sides} are left and right")
        if not manifest.split["val"]:
            notes.append("no validation cases in this split: the last weights count as the best")
        return [
            f"store: {self.store.folder}, {len(manifest.cases)} cases, split {config.split_hash}{fold}: {cases}",
            f"{config.mode}: {sees}, on {config.device}, {', '.join(config.channels)} -> {', '.join(config.regions)}",
            f"network: {unet.network}, {unet.depth} levels, {unet.filters} filters, {unet.norm} norm, {unet.dtype}, "
            f"policy {unet.policy}, {training_flops(unet, config.grid, config.batch) / 1e9:,.0f} GFLOP a step",
            f"run: {length}; batch {config.batch}, {config.micro} at a time, workers {self.workers}",
            *(f"note: {note}" for note in notes if note),
            *(f"plan: {line}" for line in (*forecast, *self.reasons.values())),
        ]


def make_plan(
    store: Store,
    run_folder: Path,
    host: Host,
    settings: Mapping[str, Any],
    *,
    gpus: Sequence[Gpu] = (),
    workers: int = 1,
    force: bool = False,
) -> Plan:
    """The plan of a run: recipe or saved run, then the chosen settings, then the decisions by store
    and host, of which this worker has its share. Device, dtype, policy and micro-batch of a saved
    run only a setting changes, no recipe.

    Before a run's first checkpoint nothing is trained that would have to be continued: the settings
    that were chosen for it are kept, and all else is decided again.

    Raises InputError for settings that do not suit the store or the saved run, and, unless `force`,
    if the host's calibration cannot be read."""
    saved = load_config(run_folder) if (run_folder / "config.json").is_file() else None
    is_begun = saved is not None and bool(checkpoints(run_folder))
    chosen = dict(settings)
    in_all = None
    earlier = read_plan(run_folder).get("chosen") if saved else {}
    if isinstance(earlier, dict):
        in_all = chosen_again(earlier, settings)
    if in_all is not None and not is_begun:
        chosen, saved = in_all, None
    start = recipe_config(chosen) if saved is None or "recipe" in chosen else saved
    inputs = Inputs(
        store, host, _with_kept(chosen, start, saved, workers), gpus, workers, saved, is_begun
    )
    config = _decided(start, inputs)
    reasons = {}
    if config.device == "cpu":
        reasons.update(
            zip(
                ["device"], why_no_card(left_open(inputs.settings.get("device")), config.mode, gpus)
            )
        )
    growth = rate_growth(config, workers) if "batch_per_worker" in chosen else 1.0
    split = with_fold(store, config.fold)
    plan = Plan(config, split, saved, workers, in_all, growth, reasons=reasons)
    if not plan.steps_per_epoch:
        kind = "patches of an epoch" if config.is_patch else "training cases"
        raise InputError(
            f"batch must be at most the {plan.samples_per_epoch} {kind}, got {config.batch}; {_smaller_batch(inputs)}"
        )
    plan = _with_coarse_steps(_with_validations(plan), is_begun)
    return with_forecast(
        plan, host, pick=left_open(inputs.settings.get("policy")) is None, force=force
    )


def read_plan(run_folder: Path) -> Dict[str, Any]:
    """The content of a run's plan.json; {} if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        content = read_json(Path(run_folder) / "plan.json")
        if isinstance(content, dict) and content.get("schema") == PLAN_SCHEMA:
            return content
    return {}


def with_forecast(plan: Plan, host: Host, *, pick: bool, force: bool) -> Plan:
    """The plan with its memory policy, picked if it was left open, and its forecast."""
    config, reasons = plan.config, dict(plan.reasons)
    if config.device != "cpu":
        return dataclasses.replace(plan, config=config.with_policy("speed") if pick else config)
    job = dataclasses.replace(plan.job, threads=thread_plan(host).intra_op)
    if not host.instructions:
        why = "TensorFlow's layers compute, which take twice the time and memory"
        todo = "`./run.sh doctor` says what is missing"
        reasons["own operations"] = f"warning: no own operations ({host.own.why}); {why}; {todo}"
    try:
        measured, coarse = (
            (find_constants(host), load_accuracy(versions=installed_versions())),
            None,
        )
        if config.coarse_steps:
            of_coarse = dataclasses.replace(plan, config=config.at(0))
            coarse_job = dataclasses.replace(
                job, shape=of_coarse.config.grid, unet=of_coarse.config.unet
            )
            coarse = _price(of_coarse, *measured)(coarse_job)
        price = _price(plan, *measured, coarse)
        if pick:
            choice = planner.fastest_that_fits(job, price, host.free_bytes)
            config, job = config.with_policy(choice.policy), choice.estimate.job
            reasons["policy"] = (
                f"policy {choice.policy}: {choice.reason(f'{format_bytes(host.free_bytes)} free')}"
            )
        return dataclasses.replace(
            plan, config=config, forecast=Forecast(price(job), coarse), reasons=reasons
        )
    except ValueError as error:
        if not force:
            raise InputError(f"{error}; or --force") from None
        return dataclasses.replace(plan, reasons={**reasons, "memory": f"none, {error}"})


def save_plan(plan: Plan, run_folder: Path) -> None:
    """Write `run_folder`/plan.json, atomically."""
    write_json(Path(run_folder) / "plan.json", plan.to_json())


def check_fits(plan: Plan, host: Host, gpus: Sequence[Gpu] = ()) -> None:
    """Raise DoesNotFitError, with the nearest settings that fit, if the upper bound of a run is
    more than is free. A run that continues may change its policy and, but for batch norm, its
    micro-batch: else it is another run."""
    if plan.config.device != "cpu":
        smaller = (
            "another --device"
            if plan.saved
            else "fewer --filters, a smaller --patch or --micro-batch"
        )
        check_card(card_of(plan.config.device, gpus), plan.job, f"choose {smaller}, or --force")
        return
    free_bytes, bound_bytes = (
        host.free_bytes,
        plan.forecast.upper_bound_bytes if plan.forecast else 0,
    )
    if bound_bytes <= free_bytes:
        return
    full = plan.forecast.full
    price = _price(plan, full.constants, full.accuracy, plan.forecast.coarse)
    options = planner.nearest(full.job, price, free_bytes, same_training=True) if plan.saved else []
    place = ", as a run in another folder" if plan.saved and not options else ""
    options = options or planner.nearest(full.job, price, free_bytes, grids=_other_grids(plan))
    listed = "; ".join(map(str, options))
    smaller = (
        f"what fits{place}: {listed}"
        if options
        else f"no smaller setting fits{place and ', even' + place[1:]}"
    )
    raise DoesNotFitError(
        f"memory must hold this training, up to {format_bytes(bound_bytes)}, got {format_bytes(free_bytes)} free; "
        f"{smaller}; end other programs, use a host with more memory, or --force"
    )


def job_of(config: RunConfig, threads: int, cases: int) -> Job:
    """The run as a job of the estimator. `cases` are volumes an epoch, or patches."""
    engine = installed_engine() if config.engine == AUTO else config.engine
    same = {name: getattr(config, name) for name in ("unet", "batch", "micro_batch", "optimizer")}
    fed = {
        "averaged": config.ema > 0,
        "from_store": True,
        "reworked": config.augment.needs_volume,
        "cases": cases,
    }
    return Job(shape=config.grid, engine=engine, threads=threads, **same, **fed)


def volume_shape(store: Store, config: RunConfig) -> Shape3:
    """Voxels X, Y, Z of a volume as the run is validated on it, at the store's resolution: the box
    that holds every case and the network's field."""
    extent = grid_size(store, extent=config.extent, multiple=1)
    return field_of(config.grid, config.resolution, at_least=extent)


# --- The decisions ---


class Inputs(NamedTuple):
    """The facts that a run's settings are decided by."""

    store: Store
    host: Host
    settings: Mapping[str, Any]  # as `_with_kept` gives them
    gpus: Sequence[Gpu]
    workers: int
    saved: Optional[RunConfig] = None  # of the run that is continued
    is_begun: bool = False  # whether that run has a checkpoint


def _with_kept(
    settings: Mapping[str, Any], start: RunConfig, saved: Optional[RunConfig], workers: int
) -> Dict[str, Any]:
    """The settings with the batch of all workers, a recipe's card, and those of a saved run that no
    recipe changes."""
    batch, kept = (
        settings.get("batch", start.batch),
        {} if start.device == "cpu" else {"device": start.device},
    )
    if "batch_per_worker" in settings:
        batch = settings["batch_per_worker"] * workers
    if saved:
        kept = {"device": saved.device, "dtype": saved.unet.dtype, "policy": saved.unet.policy}
        kept["micro_batch"] = saved.micro_batch if batch == saved.batch else 0
        kept.update(
            {"patch": saved.grid, "patches_per_case": saved.patches_per_case}
            if saved.is_patch
            else {}
        )
    return {**kept, **settings, "batch": batch}


def _decided(start: RunConfig, inputs: Inputs) -> RunConfig:
    """Every setting but the memory policy of a new run, from a recipe's or the saved ones."""
    saved = inputs.saved
    try:
        config = with_settings(start, inputs.settings)
        if saved and config.budget_minutes:
            budget = (config.budget_minutes, config.epochs)
            is_timed = inputs.is_begun and budget == (saved.budget_minutes, saved.epochs)
            config = dataclasses.replace(config, steps=saved.steps if is_timed else 0)
        if config.learning_rate is None:
            config = dataclasses.replace(config, learning_rate=config.peak_rate)
        if saved and saved.mode != config.mode:
            raise InputError(*differences(saved, config))
        config = _for_workers(config, inputs, scale=start is not saved)
        config = _for_store(config, with_fold(inputs.store, config.fold))
        config = _with_curriculum(_with_grid(_for_host(config, inputs), inputs), inputs)
    except ValueError as error:
        raise InputError(str(error)) from None
    raise_if_any(differences(saved, config) if saved else ())
    return config


def _for_workers(config: RunConfig, inputs: Inputs, *, scale: bool) -> RunConfig:
    """Fill in the settings that follow from the number of workers: the learning rates, if the batch
    grows with it, and the micro-batch. The rates of a run that continues have grown already, unless
    a setting or `scale` gives them."""
    settings, workers = inputs.settings, inputs.workers
    if "batch_per_worker" in settings:
        growth = rate_growth(config, workers)
        grown = [name for name in ("learning_rate", "adam_rate") if scale or name in settings]
        config = dataclasses.replace(
            config, **{name: getattr(config, name) * growth for name in grown}
        )
    if config.batch % workers:
        rule = f"batch must be a multiple of the {workers} workers, got {config.batch}"
        todo = "choose another --batch, or --batch-per-worker in its place"
        if inputs.saved:  # its batch must stay
            todo = "take as many workers as divide it"
        raise InputError(f"{rule}; {todo}")
    share = config.batch // workers
    if workers > 1 and config.unet.norm == "batch" and not config.micro_batch:
        config = dataclasses.replace(config, micro_batch=share)
    if share % config.micro:
        rule = f"micro-batch must divide the {share} volumes of a worker, got {config.micro}"
        todo = "choose another --micro-batch, or fewer workers"
        if inputs.saved and config.unet.norm == "batch":  # its micro-batch must stay
            todo = "take fewer workers"
        raise InputError(f"{rule}; {todo}")
    return config


def _for_store(config: RunConfig, store: Store) -> RunConfig:
    """Fill in the settings that follow from the store: names, the network's channels and
    outputs."""
    manifest = store.manifest
    if not manifest.split["train"]:
        raise InputError(
            f"split train of {store.folder} must hold cases, got none; prepare with another --split"
        )
    channels, regions = (
        config.channels or manifest.channels,
        config.regions or tuple(manifest.regions),
    )
    check_names("channels", channels, manifest.channels)
    check_names("regions", regions, tuple(manifest.regions))
    return dataclasses.replace(
        config,
        store=str(store.folder.resolve()),
        store_channels=manifest.channels,
        label_names=manifest.labels,
        region_codes=manifest.regions,
        split_hash=manifest.split_hash,
        **_training_grid(store),
        channels=tuple(channels),
        regions=tuple(regions),
        unet=dataclasses.replace(
            config.unet, channels=len(channels), outputs=len(regions), seed=config.seed
        ),
    )


def _training_grid(store: Store) -> Dict[str, Any]:
    """The fields of a run that say what voxels its training cases have, and whether their sides are
    known."""
    spacings, placed = [], set()
    for record in store.cases("train"):  # each is read from disk
        spacings.append(record.spacing_mm)
        placed.add(is_placed(record.geometry))
    return {
        "spacing_mm": tuple(float(statistics.median(lengths)) for lengths in zip(*spacings)),
        "oriented": placed.pop() if len(placed) == 1 else None,
    }


def _for_host(config: RunConfig, inputs: Inputs) -> RunConfig:
    """Fill in the settings that follow from the host: the device, and the dtype that is fast on
    it."""
    device = pick_device(left_open(inputs.settings.get("device")), config.mode, inputs.gpus)
    if device != "cpu" and config.engine == "itex":
        rule = f"engine must be auto or stock on {device}, got itex, which computes on CPUs"
        raise InputError(f"{rule}; give --engine stock")
    if device != "cpu" and inputs.workers > 1:
        raise InputError(f"device must be cpu for several workers, got {device}; give --device cpu")
    fast = inputs.host.best_dtype if device == "cpu" else best_dtype(card_of(device, inputs.gpus))
    unet = dataclasses.replace(config.unet, dtype=left_open(inputs.settings.get("dtype")) or fast)
    return dataclasses.replace(config, device=device, unet=unet)


def _with_grid(config: RunConfig, inputs: Inputs) -> RunConfig:
    """Fill in the network's grid: the extent's at the run's resolution, or a patch of it."""
    settings, divisor = inputs.settings, config.unet.divisor
    grid = network_grid(
        grid_size(inputs.store, extent=config.extent, multiple=1), config.resolution, divisor
    )
    if not config.is_patch:
        for name in ("patch", "patches_per_case", "foreground"):
            if name in settings:
                todo = "leave it out" if inputs.saved else "add that"
                raise InputError(
                    f"--{name.replace('_', '-')} must come with --mode patch, got mode whole; {todo}"
                )
        return dataclasses.replace(config, grid=grid, patches_per_case=1)
    if "patch" in settings:
        patch = tuple(settings["patch"])
    elif config.device != "cpu":
        job = job_of(dataclasses.replace(config, grid=grid), threads=1, cases=0)
        patch = largest_patch(card_of(config.device, inputs.gpus), job)
    else:
        patch = planner.usual_patch(grid, divisor)
    planner.check_patch(patch, grid, divisor)
    as_many_voxels = max(round(math.prod(grid) / math.prod(patch)), 1)
    return dataclasses.replace(
        config, grid=patch, patches_per_case=settings.get("patches_per_case", as_many_voxels)
    )


def _with_curriculum(config: RunConfig, inputs: Inputs) -> RunConfig:
    """Fill in whether there is a curriculum, and its coarse grid: none if that would leave the
    deepest level fewer than two voxels along an axis, and by itself none on a grid so small that
    coarse steps do not pay."""
    without = dataclasses.replace(config, curriculum="off", coarse_grid=(0, 0, 0))
    if config.curriculum == "off":
        return without
    divisor = config.unet.divisor
    extent = (
        config.grid
        if config.is_patch
        else grid_size(inputs.store, extent=config.extent, multiple=1)
    )
    coarse = network_grid(extent, config.resolution / 2, divisor)  # the resolution of patches is 1
    is_possible = min(coarse) >= 2 * divisor
    pays = math.prod(coarse) >= LEAST_COARSE_VOXELS
    if is_possible and (pays or config.curriculum == "half"):
        return dataclasses.replace(config, curriculum="half", coarse_grid=coarse)
    if config.curriculum == "half":  # and it is not possible
        rule = f"--curriculum must be off if half of {by(config.grid)} is below {2 * divisor} along an axis"
        todo = "leave it out" if inputs.saved else "leave it out, or choose a smaller --depth"
        raise InputError(f"{rule}, got half, a grid of {by(coarse)}; {todo}")
    return without


def _with_validations(plan: Plan) -> Plan:
    """The plan with a number of validations, unless a setting says how often there is one."""
    config = plan.config
    chosen = {"validations"} if plan.chosen is None else plan.chosen
    if config.validate_every or ("validations" in chosen and config.validations):
        return plan
    epochs = max(plan.steps // plan.steps_per_epoch, 1)
    config = dataclasses.replace(config, validations=min(epochs, VALIDATIONS))
    return dataclasses.replace(plan, config=config)


def _with_coarse_steps(plan: Plan, is_begun: bool) -> Plan:
    """The plan with the coarse steps of its length. A run that has begun keeps its own if it stays
    as long, or is made longer: the steps that are added are in full."""
    saved, config = plan.saved, plan.config.with_coarse_share(plan.steps)
    share, reasons = config.coarse_steps, dict(plan.reasons)
    if saved and is_begun:
        is_as_long = (saved.steps, saved.epochs) == (config.steps, config.epochs)
        if is_as_long or saved.coarse_steps < share:
            config = dataclasses.replace(config, coarse_steps=saved.coarse_steps)
        if not is_as_long and saved.coarse_steps < share:
            reason = f"coarse steps: {saved.coarse_steps}, as the run was begun, and what is added in full"
            if config.steps or not config.budget_minutes:  # else the length is not known yet
                reason += f"; a new run of {plan.steps} steps would have {share}"
            reasons["coarse steps"] = reason
    return dataclasses.replace(plan, config=config, reasons=reasons)


def _smaller_batch(inputs: Inputs) -> str:
    """What to do about a batch that is too large, of all workers together."""
    if "batch_per_worker" not in inputs.settings:
        return "choose a smaller --batch"
    if inputs.settings["batch_per_worker"] == 1:
        return "take fewer workers"
    return "choose a smaller --batch-per-worker, or fewer workers"


# --- Time and memory ---


def _price(
    plan: Plan, constants: HostConstants, accuracy: Accuracy, coarse: Optional[Estimate] = None
) -> planner.Price:
    """The price of jobs as steps of the run, after coarse steps if `coarse` is their estimate."""
    config = plan.config
    sees_less = config.is_patch or config.resolution < 1  # than a validation
    is_validated = bool(plan.store.manifest.split["val"])
    beside = Beside(
        volume_shape=volume_shape(plan.store, config) if sees_less and is_validated else None,
        resolution=config.resolution,
        copies=bool(config.coarse_steps) + (bool(config.budget_minutes) and not config.steps),
        left_bytes=coarse.allocator_peak_bytes if coarse else 0,
        cases=len(plan.store.manifest.cases),
    )
    return price_of_run(constants, accuracy, beside, workers=plan.workers)


def _other_grids(plan: Plan) -> List[Tuple[str, Shape3]]:
    """Smaller grids that the run could have, each with its option, the smallest first."""
    config = plan.config
    if config.is_patch:
        *smaller, _ = planner.patch_shapes(config.grid, config.unet.divisor)
        return [(f"--patch {by(shape, ' ')}", shape) for shape in smaller]
    if config.resolution < 1 or config.extent == "brain":
        return []
    return [("--extent brain", grid_size(plan.store, extent="brain", multiple=config.unet.divisor))]

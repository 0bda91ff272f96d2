"""What a training run will be, decided before anything is computed: settings -> plan -> run.

    plan = make_plan(store, run_folder, host, settings, gpus=gpus, workers=2)
    print(*plan.describe(host), sep="\\n")
    check_fits(plan, host, gpus)             # raises DoesNotFitError with the nearest settings that fit
    save_plan(plan, run_folder)              # run/plan.json

Whatever a setting leaves open is decided here, the memory policy and what a step takes in memory and time, and in
`cpu3d.decide`, all else; nowhere else.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from cpu3d.data.region import Shape3
from cpu3d.data.resolution import field_of
from cpu3d.data.splits import with_fold
from cpu3d.data.store import Store, grid_size
from cpu3d.decide import Given, decided, job_of
from cpu3d.errors import DoesNotFitError, InputError
from cpu3d.host.gpu import Gpu, card_of, why_no_card
from cpu3d.host.thread_plan import thread_plan
from cpu3d.settings import RunConfig, config_from_json, load_config
from cpu3d.util.atomic import write_json
from cpu3d.util.records import by
from memory_estimator import planner
from memory_estimator.calibration import HostConstants, find_constants
from memory_estimator.common.units import format_bytes, format_seconds
from memory_estimator.estimate import (
    STORE_NOTE,
    Accuracy,
    Component,
    Estimate,
    estimate,
    load_accuracy,
    whole_volume_bytes,
)
from memory_estimator.host import Host
from memory_estimator.job import PLAN_SCHEMA, Job, installed_versions, statistics_note, stored_bytes
from memory_estimator.scaling import of_one
from memory_estimator.step.training_step import training_step
from models.layer_plan import training_flops

VARIABLES = ("weights", "optimizer slots", "averaged weights")
"""Groups of the estimator's tensors that a checkpoint holds."""


@dataclass(frozen=True)
class Plan:
    """A run, all of it decided."""

    config: RunConfig
    """Every setting."""
    store: Store
    """As the run's fold sees it."""
    saved: Optional[RunConfig] = None
    """Of the run that is continued; None for a new one."""
    workers: int = 1
    estimate: Optional[Estimate] = None
    """Memory and time of a step of one worker in full; None on a card, and where `reasons` say why there is none."""
    coarse: Optional[Estimate] = None
    """The same of a coarse step; None without a curriculum, and where `estimate` is."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why what was left open was decided so, by the name of the setting; under "memory" why there is no estimate."""

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches that the training cases, or their patches, fill."""
        return len(self.store.manifest.split["train"]) * self.config.patches_per_case // self.config.batch

    @property
    def steps(self) -> int:
        """Of the whole run, as long as no budget of minutes cuts it."""
        return self.config.steps or self.config.epochs * self.steps_per_epoch

    @property
    def volume_shape(self) -> Shape3:
        """Voxels X, Y, Z of a whole volume."""
        return volume_shape(self.store, self.config)

    @property
    def job(self) -> Job:
        """What the estimator is asked for, on one thread."""
        stored = self.store.manifest
        job = job_of(self.config, threads=1, cases=len(stored.split["train"]) * self.config.patches_per_case)
        return dataclasses.replace(job, case_bytes=stored_bytes(stored.largest_shape, len(stored.channels)))

    @property
    def predicted(self) -> Dict[str, Any]:
        """What a step takes, for the log and the report to hold against what was measured."""
        if self.config.device != "cpu":
            card_bytes = _card_bytes(self.config)
            return {
                "allocator_peak_bytes": card_bytes - planner.CONTEXT_BYTES,  # its allocator holds all but the context
                "card_bytes": card_bytes,
                "constants": "assumed, not verified on a GPU",
            }
        if not self.estimate:
            return {}
        names = ("allocator_peak_bytes", "process_peak_bytes", "upper_bound_bytes", "step_s")
        full, coarse = ({name: getattr(one, name) for name in names if one} for one in (self.estimate, self.coarse))
        return {**full, "constants": self.estimate.constants.name, **({"coarse": coarse} if coarse else {})}

    @property
    def training_s(self) -> Optional[float]:
        """Predicted seconds of all steps, validations aside; None where no step is predicted."""
        if not self.estimate:
            return None
        coarse_s = self.coarse.step_s if self.coarse else 0.0
        coarse_steps = self.config.coarse_steps
        return coarse_steps * coarse_s + (self.steps - coarse_steps) * self.estimate.step_s

    @property
    def upper_bound_bytes(self) -> Optional[int]:
        """Of the process over the whole run; None where no step is predicted."""
        return max((one.upper_bound_bytes for one in (self.estimate, self.coarse) if one), default=None)

    def to_json(self) -> Dict[str, Any]:
        """What plan.json holds."""
        return {
            "schema": PLAN_SCHEMA,
            "continues": self.saved is not None,
            "workers": self.workers,
            "engine": self.job.engine,
            "micro_batch": self.config.micro,
            "volume_shape": list(self.volume_shape),
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
        volume, seen = by(self.volume_shape, " x "), by(config.grid, " x ")
        at = f", at {config.resolution:g} of the resolution of {volume}" if config.resolution < 1 else ""
        sees = f"volumes: {seen} ({config.extent}){at}"
        if config.is_patch:
            sees = f"patches: {seen} of {volume} ({config.extent}), {config.patches_per_case} of a case an epoch, "
            sees += f"{config.foreground:.0%} around labels, on {config.device}"
        length = f"{config.epochs} epochs of {self.steps_per_epoch} steps"
        length += f", cut to {config.budget_minutes:g} minutes" if config.budget_minutes else ""
        length = f"{self.steps} steps, {self.steps_per_epoch} an epoch" if config.steps else length
        if config.coarse_steps and (config.steps or not config.budget_minutes):
            cost = f"{config.full_steps(self.steps):.1f} full steps"
            grids = f"on {by(config.coarse_grid, ' x ')}, then {self.steps - config.coarse_steps} on {seen}"
            length += f": {config.coarse_steps} {grids}, as many voxels as {cost}"
        together = f", {config.micro} at a time" if config.parts > 1 else ""
        workers = f", {self.workers} workers" if self.workers > 1 else ""
        fold = f", fold {config.fold}" if config.fold else ""
        cases = ", ".join(f"{len(ids)} {name}" for name, ids in manifest.split.items())
        note = statistics_note(unet.norm, config.batch, config.micro)
        notes = [f"note: {note}"] if note else []
        if not manifest.split["val"]:
            notes.append("no validation cases in this split: the last weights count as the best")
        return [
            f"store: {self.store.folder}, {len(manifest.cases)} cases, split {config.split_hash}{fold}: {cases}",
            f"{sees}, {', '.join(config.channels)} -> {', '.join(config.regions)}",
            f"network: {unet.network}, {unet.depth} levels, {unet.filters} filters, {unet.norm} norm, {unet.dtype}, "
            f"policy {unet.policy}, {training_flops(unet, config.grid, config.batch) / 1e9:,.0f} GFLOP a step",
            f"run: {length} at batch {config.batch}{together}{workers}",
            *notes,
            *(f"plan: {line}" for line in (*self._memory(host), *self.reasons.values())),
        ]

    # --- Private helpers ---

    def _memory(self, host: Host) -> List[str]:
        """Memory and time of a step."""
        found = self.estimate
        if self.config.device != "cpu":
            return [f"a step takes {format_bytes(_card_bytes(self.config))} of the card; {planner.ASSUMPTIONS}"]
        if found is None:
            return []
        coarse = []
        if self.coarse:
            coarse = [
                f"coarse steps: allocator peak {format_bytes(self.coarse.allocator_peak_bytes)}, process peak "
                f"{format_bytes(self.coarse.process_peak_bytes)}, {format_seconds(self.coarse.step_s)} a step"
            ]
        return [
            *coarse,
            f"allocator peak {format_bytes(found.allocator_peak_bytes)} ({found.error('allocator_peak')}), "
            f"process peak {format_bytes(found.process_peak_bytes)} ({found.error('process_peak')}), up to "
            f"{format_bytes(self.upper_bound_bytes)} of {format_bytes(host.free_bytes)} free ({found.margin})",
            f"{format_seconds(found.step_s)} a step, {format_seconds(found.volume_s)} a volume, "
            f"{format_seconds(found.epoch_s)} an epoch ({found.error('step_s')}); "
            f"{format_seconds(self.training_s)} in all, validation aside",
            f"seconds: {found.constants.basis(host)}",
            STORE_NOTE,
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
    """The plan of a run: recipe or saved run, then the chosen settings, then what store and host decide.

    `host` is this worker's share of one. How a saved run computes its steps, in device, dtype, policy and micro-batch,
    only a setting changes, no recipe. Raises InputError when the settings do not suit the store, when a saved run
    cannot continue under them, or, unless `force`, where the host's calibration cannot be read.
    """
    saved = load_config(run_folder) if (run_folder / "config.json").is_file() else None
    given = Given(store, host, settings, saved, gpus, workers)
    config = decided(given)
    unused = why_no_card(given.named("device"), config.mode, gpus) if config.device == "cpu" else []
    plan = Plan(config, with_fold(store, config.fold), saved, workers, None, dict(zip(["device"], unused)))
    if not plan.steps_per_epoch:
        seen = len(plan.store.manifest.split["train"]) * config.patches_per_case
        what, more = f"{seen} training cases", ""
        if config.is_patch:
            what, more = f"{seen} patches of an epoch", ", or raise --patches-per-case"
        raise InputError(f"batch must be at most the {what}, got {config.batch}; lower it{more}")
    config = config.with_coarse_share(plan.steps)
    if saved and saved.coarse_steps < config.coarse_steps:  # made longer, it goes on in full
        config = dataclasses.replace(config, coarse_steps=saved.coarse_steps)
    plan = dataclasses.replace(plan, config=config)
    return _with_estimate(plan, host, pick=given.named("policy") is None, force=force)


def plan_of_chief(content: Mapping[str, Any], store: Store, host: Host, engine: str) -> Plan:
    """The chief's plan, as `to_json` gave it with the name of its engine, on this worker's store, host and engine.

    Raises InputError for a store or an engine that is not the chief's.
    """
    config = dataclasses.replace(config_from_json(dict(content["config"])), store=str(store.folder.resolve()))
    if engine != content["engine_name"]:
        raise InputError(
            f"engine must be the chief's, {content['engine_name']}, got {engine}; give all workers the same --engine, "
            "and their hosts the same packages"
        )
    if config.split_hash != store.manifest.split_hash:
        raise InputError(
            f"store {store.folder} must be the chief's, got split {store.manifest.split_hash} for {config.split_hash}; "
            "copy that one to this host, or name a folder that all hosts see"
        )
    saved = config if content["continues"] else None
    plan = Plan(config, with_fold(store, config.fold), saved, content["workers"], None, {})
    return _with_estimate(plan, host, pick=False, force=True)


def save_plan(plan: Plan, run_folder: Path) -> None:
    """Write `run_folder`/plan.json, atomically."""
    write_json(Path(run_folder) / "plan.json", plan.to_json())


def check_fits(plan: Plan, host: Host, gpus: Sequence[Gpu] = ()) -> None:
    """Raise DoesNotFitError where a run may take more than is free; the error names the nearest settings that do fit.

    A run that continues may change its policy and, but for batch norm, its micro-batch; it has to keep its other
    settings: else it is another run. Between the predicted peak and the upper bound it is a matter of luck whether a
    run is killed: luck is not for long runs.
    """
    if plan.config.device != "cpu":
        _check_card(plan, card_of(plan.config.device, gpus))
        return
    found, free_bytes = plan.estimate, host.free_bytes
    if found is None or plan.upper_bound_bytes <= free_bytes:
        return
    price = _price(plan, host, found.constants, found.accuracy)
    same = planner.nearest(found.job, price, free_bytes, same_training=True) if plan.saved else []
    other = planner.nearest(found.job, price, free_bytes, grids=_other_grids(plan))
    fits = "; ".join(map(str, same or other)) or "nothing smaller does"
    advice = f"what fits: {fits}; or --force"
    if plan.saved and not same:
        advice = f"free some, continue on a host with more, or --force; what fits, as a run in another folder: {fits}"
    what = "this training,"
    if found.regions_short:
        what = "the allocator's regions, which double in size,"
    elif 2 * _whole_volumes(plan, found.job) > found.upper_bound_bytes:
        what = "this training, most of it validation on whole volumes,"
    raise DoesNotFitError(
        f"memory must hold {what} up to {format_bytes(plan.upper_bound_bytes)}, got "
        f"{format_bytes(free_bytes)} free; {advice}"
    )


def volume_shape(store: Store, config: RunConfig) -> Shape3:
    """Voxels X, Y, Z of a volume as the run is validated on it, at the store's resolution: what holds every case, and
    what the network sees."""
    extent = grid_size(store, extent=config.extent, multiple=1)
    return field_of(config.grid, config.resolution, at_least=extent)


# --- Private helpers ---


def _with_estimate(plan: Plan, host: Host, *, pick: bool, force: bool) -> Plan:
    """The plan with its memory policy, picked where that was left open, and what a step takes."""
    config, reasons = plan.config, dict(plan.reasons)
    if config.device != "cpu":
        return dataclasses.replace(plan, config=config.with_policy("speed") if pick else config)
    job = dataclasses.replace(plan.job, threads=thread_plan(host).intra_op)
    try:
        known = find_constants(host), load_accuracy(versions=installed_versions())
        coarse = None
        if config.coarse_steps:
            at_half = dataclasses.replace(plan, config=config.at(0))
            half_job = dataclasses.replace(job, shape=at_half.config.grid, unet=at_half.config.unet)
            coarse = _price(at_half, host, *known)(half_job)
        plan = dataclasses.replace(plan, coarse=coarse)
        price = _price(plan, host, *known)
        if pick:
            choice = planner.fastest_that_fits(job, price, host.free_bytes)
            config = config.with_policy(choice.policy)
            reasons["policy"] = f"policy {choice.policy}: {choice.reason(f'{format_bytes(host.free_bytes)} free')}"
            job = dataclasses.replace(job, unet=config.unet)
        found = price(job)
    except ValueError as error:
        if not force:
            raise InputError(f"{error}; or --force") from None
        return dataclasses.replace(plan, reasons={**reasons, "memory": f"none, {error}"})
    return dataclasses.replace(plan, config=config, estimate=found, reasons=reasons)


def _price(plan: Plan, host: Host, constants: HostConstants, accuracy: Accuracy) -> planner.Price:
    """What jobs take on this host, the run's whole volumes and the workers' exchange in their upper bound.

    Of several workers it is the memory of one, of which `host` is the share, and the time of all of them together,
    their exchange aside. Its variables are held once more where its grid changes, and where steps are timed before it.
    """
    config, store = plan.config, plan.store
    again = bool(config.coarse_steps) + (bool(config.budget_minutes) and not config.steps)
    kept, left = 0, plan.coarse.allocator_peak_bytes if plan.coarse else 0
    if config.read_mode == "ram":  # asked for: else the kernel may drop what it keeps of files
        cases = [case for split in ("train", "val") for case in store.cases(split)]
        kept = sum(case.image_bytes + case.label_bytes for case in cases) // plan.workers

    def price(job: Job) -> Estimate:
        variables = again * sum(one.bytes for one in training_step(job).resident if one.group in VARIABLES)
        return of_one(estimate(job, constants, accuracy, host.memory_bytes), plan.workers).with_beside(
            Component("whole volumes", _whole_volumes(plan, job), "derived: of validation, or to be averaged down"),
            Component(
                "variables, once more", variables, "exact: as they were before steps are timed, or of the other grid"
            ),
            Component("left by coarse steps", left, "at most: pages that lie too scattered for maps of full size"),
            Component("files kept in memory", kept, "exact: all that the run reads, in read mode ram"),
        )

    return price


def _whole_volumes(plan: Plan, job: Job) -> int:
    """Bytes of whole volumes beside the steps; 0 where they are what these see, or no validation follows patches."""
    config = plan.config
    if config.resolution == 1 and not (config.is_patch and plan.store.manifest.split["val"]):
        return 0
    return whole_volume_bytes(job, plan.volume_shape, config.resolution)


def _card_bytes(config: RunConfig) -> int:
    return planner.gpu_bytes(job_of(config, threads=1, cases=0))


def _check_card(plan: Plan, card: Gpu) -> None:
    config, needed = plan.config, _card_bytes(plan.config)
    if card.free_bytes is None or needed <= card.free_bytes:
        return
    what = ["another --device" if plan.saved else "a smaller --patch" if config.is_patch else "--mode patch"]
    if config.micro > 1 and not (plan.saved and config.unet.norm == "batch"):  # which has to keep it
        what.append("a smaller --micro-batch")
    what += [] if plan.saved else ["fewer --filters"]
    raise DoesNotFitError(
        f"{config.device} must hold a step of {format_bytes(needed)}, got {format_bytes(card.free_bytes)} free of "
        f"{format_bytes(card.memory_bytes)}; choose {', '.join(what)}, or --force"
    )


def _other_grids(plan: Plan) -> List[Tuple[str, Shape3]]:
    """Smaller grids that the run could have, each with its option, the smallest first."""
    config = plan.config
    if config.is_patch:
        *smaller, _ = planner.patch_shapes(config.grid, config.unet.divisor)
        return [(f"--patch {by(shape, ' ')}", shape) for shape in smaller]
    brain = grid_size(plan.store, extent="brain", multiple=config.unet.divisor)
    smaller = config.resolution == 1 and config.extent == "full" and brain != config.grid
    return [("--extent brain", brain)] if smaller else []

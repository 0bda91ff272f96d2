"""The plan of a training run, decided before anything is computed: settings -> plan -> run.

    plan = make_plan(store, run_folder, host, chosen, gpus=gpus, workers=2)
    save_plan(plan, run_folder)      # run/plan.json

`cpu3d.plan_text` has it for reading. Only here, with `cpu3d.decisions`, is a setting decided that
was left open. This file decides what rests on the length of the run and on the estimate of a step:
validations, coarse steps and the memory policy; and what of a run that continues may change."""

import contextlib
import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from cpu3d.data.fold import with_fold
from cpu3d.data.region import Shape3
from cpu3d.data.sampling import VolumeSampling
from cpu3d.data.store import Store, open_store
from cpu3d.data.windows import window_count
from cpu3d.decisions import (
    check_device,
    decide,
    job_of,
    largest_extent,
    micro_batch_of,
)
from cpu3d.errors import InputError, raise_if_any
from cpu3d.host.gpu import Gpu, card_of
from cpu3d.host.thread_plan import thread_plan
from cpu3d.run.checkpoint import checkpoints, step_of
from cpu3d.run.config_json import differences, load_config
from cpu3d.run.log import read_events
from cpu3d.run.summary import Pace
from cpu3d.run.transfer import Transfer
from cpu3d.settings import (
    LEAST_CASES,
    LENGTH,
    VALIDATIONS,
    Chosen,
    RunConfig,
    chosen_again,
    located,
    recipe_settings,
    with_settings,
)
from cpu3d.store_facts import store_facts
from cpu3d.util.atomic import write_json
from memory_estimator import planner
from memory_estimator.accuracy import load_accuracy
from memory_estimator.calibration import find_constants
from memory_estimator.common.files import read_record
from memory_estimator.common.units import by, format_bytes
from memory_estimator.host import Host
from memory_estimator.installed import installed_versions
from memory_estimator.job import AUTO, Job, stored_bytes
from memory_estimator.sources import PLAN_SCHEMA, JobSource
from memory_estimator.training import ExtraMemory, Forecast, Schedule
from models.engine import check_layers
from models.strides import strides_line

NO_RUN = Path("/nonexistent")  # the folder of a plan that is of no run


@dataclass(frozen=True)
class Plan:
    """A run in which nothing is left open."""

    config: RunConfig
    store: Store  # as the run's fold sees it
    continues: bool = False  # whether the run has a checkpoint
    workers: int = 1
    chosen: Chosen = field(default_factory=dict)
    """The settings that the user gave in all calls for this run."""
    done: int = 0  # steps of a run that continues
    left_s: Optional[float] = None  # predicted seconds to the end; None if no step is predicted
    forecast: Optional[Forecast] = None  # of one worker; None on a card, and if `reasons` have why
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Name of a setting that was left open -> why it was decided so; under "memory" why there is no
    forecast."""
    transfer: Optional[Transfer] = None
    """The weights that a run with `init` starts from; None for one that continues, which has its
    own."""

    @property
    def samples_per_epoch(self) -> int:
        """Training cases, or patches of them."""
        return len(self.store.manifest.split["train"]) * self.config.samples_per_case

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
        """Steps that a budget of minutes keeps in any case: an epoch; a chosen number of
        validations is spread over any number of steps."""
        return 1 if "validations" in self.chosen else self.steps_per_epoch

    @property
    def job(self) -> Job:
        """The run as a job of the estimator, on one thread."""
        manifest = self.store.manifest
        job = job_of(self.config, self.config.grid, threads=1, cases=self.samples_per_epoch)
        case_bytes = stored_bytes(manifest.largest_shape, len(manifest.channels))
        return dataclasses.replace(job, case_bytes=case_bytes)

    @property
    def schedule(self) -> Schedule:
        """What the run does besides its full steps."""
        config = self.config
        store = self.store
        held_out = store.cases("val")
        shapes = [record.scored_shape for record in held_out]
        judged_shape = max(shapes, key=math.prod, default=None)  # the largest that is scored
        scored_voxels = math.prod(judged_shape or store.manifest.largest_shape)
        labelled = sum(record.has_label for record in held_out)
        cases_with = []  # of each region
        for codes in config.codes_by_region.values():
            has_region = [not set(codes).isdisjoint(each.label_voxels) for each in held_out]
            cases_with.append(sum(has_region))
        if max(cases_with, default=0) < LEAST_CASES:  # then no network need be asked
            labelled = 0
            judged_shape = None
        crops = grids_of(config, store, is_crop=True) if config.whole_every > 1 else ()
        schedule = Schedule(
            steps=self.steps,
            extra=_extra_memory(config, store, judged_shape),
            budget_s=60 * config.budget_minutes if config.has_open_length else None,
            validations=config.validations,
            held_out=len(held_out),
            windows=_windows(config, store),
            decided=labelled,
            flips=2 ** len(config.mirrored_axes),
            scored_voxels=scored_voxels,
            grids=() if config.is_patch else tuple(grids_of(config, store)),
            whole_every=config.whole_every,
            crop_grids=tuple(crops),
        )
        if not config.coarse_steps:
            return schedule
        first = config.at(0)
        return dataclasses.replace(
            schedule,
            coarse_steps=config.coarse_steps,
            coarse_shape=first.grid,
            coarse_average=first.unet.average,
            coarse_extra=_extra_memory(first, store, judged_shape),
            coarse_windows=_windows(first, store),
            coarse_grids=() if config.is_patch else tuple(grids_of(first, store)),
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
        return self.forecast.training_s if self.forecast else None

    def to_json(self) -> Dict[str, Any]:
        """The content of plan.json."""
        return {
            "schema": PLAN_SCHEMA,
            "continues": self.continues,
            "workers": self.workers,
            "chosen": dict(self.chosen),
            "engine": self.job.engine,
            "micro_batch": self.config.micro,
            "cases": {name: len(ids) for name, ids in self.store.manifest.split.items()},
            "steps_per_epoch": self.steps_per_epoch,
            "steps": self.steps,
            "done": self.done,
            "training_s": self.training_s,
            "left_s": self.left_s,
            "reasons": dict(self.reasons),
            "predicted": self.predicted,
            "run": self.forecast.run_json() if self.forecast else None,
            "job": self.job.fields(),  # which `estimate --run` starts from
            "schedule": dataclasses.asdict(self.schedule),  # likewise
            "smaller_grids": smaller_grids(self.config),  # likewise
            "config": self.config.to_json(),
        }


def make_plan(
    store: Store,
    run_folder: Path,
    host: Host,
    chosen: Chosen,
    *,
    gpus: Sequence[Gpu] = (),
    workers: int = 1,
    force: bool = False,
    forecasts: bool = True,
) -> Plan:
    """The plan of a run by the chosen settings, of which this worker has its share. A run with a
    checkpoint continues: its settings stay, but for CHANGEABLE ones of `cpu3d.run.config_json`. Any
    other is new: recipe, then the chosen settings, then the decisions by store and host.

    Without `forecasts` memory and time are left open, and with them the memory policy: those of
    another host are asked for.

    Raises InputError for settings that do not suit the store or the run, and, unless `force`, if
    the host's calibration cannot be read."""
    chosen = located(chosen)
    saved_steps = checkpoints(run_folder)
    try:
        if saved_steps:
            done = step_of(saved_steps[0])
            plan = _continued(store, run_folder, chosen, gpus, workers, done)
        else:
            plan = _new(store, host, chosen, gpus, workers)
    except ValueError as error:
        raise InputError(str(error)) from None
    if not forecasts:
        return plan
    pick = not plan.continues and chosen.get("policy", AUTO) == AUTO
    plan = with_forecast(plan, host, pick=pick, force=force)
    if plan.done and plan.forecast:
        now = {
            "workers": plan.workers,
            "policy": plan.config.unet.policy,
            "device": plan.config.device,
            "host": host.summary(),
        }
        # The pace of the last attempt, if that was computed as this one will be.
        pace = Pace(read_events(run_folder))
        if any(pace.start.get(name) != value for name, value in now.items()):
            pace = Pace([{"event": "start", "step": 0, "coarse_steps": plan.config.coarse_steps}])
        left_s = pace.seconds_left(plan.done, plan.steps, plan.predicted)
        plan = dataclasses.replace(plan, left_s=left_s)
    return plan


def read_plan(run_folder: Path) -> Dict[str, Any]:
    """The content of a run's plan.json; {} if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        return read_record(Path(run_folder) / "plan.json", PLAN_SCHEMA, dict, "")
    return {}


def reasons_of(run_folder: Path) -> Tuple[str, ...]:
    """Why a run's plan has decided so what was left open, such as the policy and the strides, a
    line each."""
    reasons = read_plan(run_folder).get("reasons")
    return tuple(map(str, reasons.values())) if isinstance(reasons, dict) else ()


def with_forecast(plan: Plan, host: Host, *, pick: bool, force: bool) -> Plan:
    """The plan with its memory policy, picked if it was left open, and its forecast."""
    config = plan.config
    reasons = dict(plan.reasons)
    if config.device != "cpu":
        if pick:
            config = config.with_policy("speed")
        return dataclasses.replace(plan, config=config)
    if not host.instructions:
        if host.is_here:
            check_layers(config.unet.dtype)
        why = "TensorFlow's layers compute, which take twice the time and memory"
        todo = "`./run.sh doctor` says what is missing"
        reasons["native operations"] = (
            f"warning: no native operations ({host.native.why}); {why}; {todo}"
        )
    job = dataclasses.replace(plan.job, threads=thread_plan(host).intra_op)
    try:
        forecast = plan.schedule.forecast(
            job,
            find_constants(host),
            load_accuracy(versions=installed_versions()),
            workers=plan.workers,
            budget_bytes=host.free_bytes if pick else None,
        )
    except ValueError as error:
        if not force:
            raise InputError(f"{error}; or --force") from None
        reasons["memory"] = f"memory and time: not predicted, {error}"
        return dataclasses.replace(plan, reasons=reasons)
    if forecast.choice:
        policy = forecast.choice.policy
        config = config.with_policy(policy)
        why = forecast.choice.reason(f"{format_bytes(host.free_bytes)} free")
        reasons["policy"] = f"policy {policy}: {why}"
    left_s = None if plan.done else forecast.all_s
    return dataclasses.replace(
        plan, config=config, forecast=forecast, reasons=reasons, left_s=left_s
    )


def source_of_store(host: Host, chosen: Chosen) -> JobSource:
    """The run that `train` would plan on `chosen["store"]`, for `estimate` and `bench`. Raises
    ValueError for a store that cannot be read, settings that do not suit it, and what it has
    itself."""
    for name in ("shape", "spacing", "channels", "classes", "cases"):
        if name in chosen:
            todo = "leave one of them out"
            if name == "spacing":
                todo += "; `prepare --spacing` makes stores of another"
            raise ValueError(f"--{name} must come without --store, which has it, got both; {todo}")
    folder = chosen["store"]
    chosen = {name: chosen[name] for name in chosen if name not in ("store", "threads")}
    notes = []
    device = recipe_settings(chosen).device
    if device not in ("cpu", AUTO):
        notes.append(f"the recipe is for {device}: a CPU is estimated")
    try:
        plan = make_plan(
            open_store(folder), NO_RUN, host, {"device": "cpu", **chosen}, forecasts=False
        )
    except InputError as error:
        raise ValueError(str(error)) from None
    line = plan.reasons.get("strides", "")
    decided = strides_line(plan.config.unet.every_stride, "")
    if "depth" in plan.reasons:
        notes.append(plan.reasons["depth"])
    return JobSource(
        job=plan.job,
        notes=notes,
        schedule=plan.schedule,
        strides_why=line[len(decided) :],
        grids=smaller_grids(plan.config),
    )


def save_plan(plan: Plan, run_folder: Path) -> None:
    """Write `run_folder`/plan.json, atomically."""
    write_json(Path(run_folder) / "plan.json", plan.to_json())


# --- What the estimator is asked ---


def grids_of(config: RunConfig, store: Store, *, is_crop: bool = False) -> List[Shape3]:
    """The grids of whole training cases, or of crops around their labels, the smallest first."""
    volumes = VolumeSampling(config.extent, multiple=config.unet.divisors, is_crop=is_crop)
    return sorted(map(volumes.grid_of, store.cases("train")), key=math.prod)


def smaller_grids(config: RunConfig) -> List[Tuple[str, Shape3]]:
    """Smaller grids that a run could have, each with its option, the smallest first."""
    if not config.is_patch:
        return []
    *smaller, _ = planner.patch_shapes(config.grid, config.unet.divisors)
    return [(f"--patch {by(shape, ' ')}", shape) for shape in smaller]


def _extra_memory(config: RunConfig, store: Store, judged_shape: Optional[Shape3]) -> ExtraMemory:
    """Return the memory that a worker holds besides a step's: volumes of a validation, copies of
    the variables, records of cases."""
    manifest = store.manifest
    whole: Optional[Shape3] = None
    if config.is_patch and manifest.split["val"]:  # a validation sees more than a step
        whole = config.grid_of(largest_extent(store, config))
    return ExtraMemory(
        volume_shape=whole,
        copies=bool(config.coarse_steps) + config.has_open_length,  # of the variables
        judged_shape=judged_shape,
        cases=len(manifest.cases),
    )


def _windows(config: RunConfig, store: Store) -> int:
    """The windows that cover the median case."""
    if not config.is_patch:
        return 1
    grids = grids_of(config, store)
    return window_count(grids[len(grids) // 2], config.grid)


# --- A new run ---


def _new(store: Store, host: Host, chosen: Chosen, gpus: Sequence[Gpu], workers: int) -> Plan:
    """The plan of a new run: all of it but its memory policy."""
    config, reasons, transfer = decide(store, host, chosen, gpus, workers)
    split = with_fold(store, config.fold)
    plan = Plan(config, split, False, workers, chosen, reasons=reasons, transfer=transfer)
    if not plan.steps_per_epoch:
        kind = "patches of an epoch" if config.is_patch else "training cases"
        raise InputError(
            f"--batch must be at most the {plan.samples_per_epoch} {kind}, got {config.batch}; "
            "choose a smaller --batch"
        )
    config = _with_validations(config.with_coarse_share(plan.steps), plan, chosen)
    return dataclasses.replace(plan, config=config)


# --- A run that continues ---


def _continued(
    store: Store,
    run_folder: Path,
    chosen: Chosen,
    gpus: Sequence[Gpu],
    workers: int,
    done: int,
) -> Plan:
    """The plan of a run that has done so many steps: its own settings with the chosen ones that may
    change."""
    saved = load_config(run_folder)
    kept_plan = read_plan(run_folder)
    before = kept_plan.get("chosen", {})
    config = _with_length(with_settings(saved, chosen), saved, chosen)
    split = with_fold(store, saved.fold)
    facts = vars(store_facts(split))
    config = dataclasses.replace(config, **facts, micro_batch=micro_batch_of(config, workers))
    if config.device != "cpu":
        card_of(config.device, gpus)  # which must be there
    check_device(config, workers)
    problems = differences(saved, config)
    for name, value in (("recipe", "that of its beginning"), ("patch", saved.grid)):
        given = chosen.get(name)
        if kept_plan and given not in (None, before.get(name), value):
            problems.append(
                f"--{name} must stay as the run was begun, {before.get(name, value)}, got {given}; "
                "leave it out, or train into another folder"
            )
    raise_if_any(problems)
    in_all = chosen_again(before, chosen)
    reasons = kept_plan.get("reasons", {})
    for name in ("memory", *chosen):  # which is another now
        reasons.pop(name, None)
    plan = Plan(config, split, True, workers, in_all, done, reasons=reasons)
    steps = plan.steps
    if not config.has_open_length and steps < done:
        raise InputError(
            f"steps must be at least {done}, which the run has, got {steps}; --steps {done} ends "
            "it there"
        )
    old_steps = dataclasses.replace(plan, config=saved).steps
    if steps == old_steps:
        return plan
    config = _with_validations(config, plan, in_all)
    if steps < old_steps:
        config = config.shortened(done, steps)
        if not config.has_open_length and 0 < steps <= config.coarse_steps:
            raise InputError(
                f"steps must be above the {done} that the run has done at half resolution, got "
                f"{steps}; raise it, so that its last steps are at full resolution"
            )
    return dataclasses.replace(plan, config=config)


def _with_length(config: RunConfig, saved: RunConfig, chosen: Chosen) -> RunConfig:
    """A run that continues with its chosen length, if there is one: a budget of minutes that stays
    keeps the steps that it became."""
    is_by_steps = "steps" in chosen or not any(name in chosen for name in LENGTH)
    is_as_long = (config.epochs, config.budget_minutes) == (saved.epochs, saved.budget_minutes)
    if is_by_steps or not is_as_long or not saved.budget_minutes:
        return config
    return dataclasses.replace(config, steps=saved.steps)


def _with_validations(config: RunConfig, plan: Plan, chosen: Chosen) -> RunConfig:
    """The run with a number of validations, the chosen one or one an epoch, at most VALIDATIONS."""
    if "validations" in chosen:
        return config
    by_recipe = recipe_settings(chosen).validations
    epochs = max(plan.steps // plan.steps_per_epoch, 1)
    return dataclasses.replace(config, validations=by_recipe or min(epochs, VALIDATIONS))

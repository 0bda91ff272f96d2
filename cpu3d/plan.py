"""The plan of a training run, decided before anything is computed: settings -> plan -> run.

    plan = make_plan(store, run_folder, host, chosen, gpus=gpus, workers=2)
    save_plan(plan, run_folder)      # run/plan.json

`cpu3d.plan_text` has it for reading.

Only here, with `cpu3d.decisions`, is a setting decided that was left open. This file decides what
rests on the length of the run and on the estimate of a step: validations, coarse steps and the
memory policy."""

import contextlib
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from cpu3d.chosen import Chosen, chosen_again, located, recipe_settings, with_settings
from cpu3d.data.fold import with_fold
from cpu3d.data.store import Store, open_store
from cpu3d.decisions import Start, decide, job_of, joined, volume_shape
from cpu3d.errors import InputError, raise_if_any
from cpu3d.forecast import course_of, smaller_grids
from cpu3d.host.gpu import Gpu, why_no_card
from cpu3d.host.thread_plan import thread_plan
from cpu3d.run.checkpoint import checkpoints, progress_of, read_state, step_of
from cpu3d.run.config_json import differences, load_config, rate_growth
from cpu3d.run.folds import runs_beside
from cpu3d.run.log import recent_events
from cpu3d.run.rules import has_rules
from cpu3d.run.summary import Pace, take_as_long
from cpu3d.run.transfer import Transfer, open_transfer
from cpu3d.settings import VALIDATIONS, RunConfig, Settings
from cpu3d.util.atomic import write_json
from memory_estimator import planner
from memory_estimator.accuracy import load_accuracy
from memory_estimator.calibration import find_constants
from memory_estimator.common.files import read_json
from memory_estimator.common.units import format_bytes
from memory_estimator.host import Host
from memory_estimator.installed import installed_versions
from memory_estimator.job import AUTO, Job, stored_bytes
from memory_estimator.sources import PLAN_SCHEMA, JobSource
from memory_estimator.training import NOTHING_DONE, Done, Forecast, RunCourse
from models.engine import check_layers
from models.strides import strides_line

NO_RUN = Path("/nonexistent")  # the folder of a plan that is of no run


@dataclass(frozen=True)
class Plan:
    """A run in which nothing is left open."""

    config: RunConfig
    store: Store  # as the run's fold sees it
    saved: Optional[RunConfig] = None  # of the run that is continued; None for a new one
    workers: int = 1
    chosen: Optional[Chosen] = field(default_factory=dict)
    """The settings that the user gave in all calls for this run; None if an earlier version began
    it, which did not note them."""
    done: Done = NOTHING_DONE
    """How far a run that goes on has got, and its pace; of a fold the pace of another one until it
    has its own."""
    rate_growth: float = 1.0  # of the learning rates that are given to this run, with its workers
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
        manifest = self.store.manifest
        job = job_of(self.config, self.config.grid, threads=1, cases=self.samples_per_epoch)
        case_bytes = stored_bytes(manifest.largest_shape, len(manifest.channels))
        return dataclasses.replace(job, case_bytes=case_bytes)

    @property
    def validations(self) -> int:
        """Validations of the whole run."""
        if self.config.validations:
            return self.config.validations
        return self.steps // (self.steps_per_epoch * self.config.validate_every)

    @property
    def course(self) -> RunCourse:
        """What the run does besides its full steps."""
        return course_of(self.config, self.store, self.steps, self.validations)

    @property
    def predicted(self) -> Dict[str, Any]:
        """Time and memory of a step, for the log and the report to compare with the measured
        ones."""
        if self.config.device != "cpu":
            return planner.gpu_forecast(self.job)
        return self.forecast.to_json() if self.forecast else {}

    @property
    def paced(self) -> Optional[Forecast]:
        """The forecast at the pace of the steps that were measured, if any were."""
        return self.forecast.at_pace_of(self.done) if self.forecast else None

    @property
    def training_s(self) -> Optional[float]:
        """Predicted seconds of all steps, validations aside; None if no step is predicted."""
        return self.forecast.training_s if self.forecast else None

    @property
    def left_s(self) -> Optional[float]:
        """Seconds from here to the end, post-processing included, at the pace of the run's own
        steps where there are enough; None if no step is predicted."""
        return self.forecast.left(self.done).all_s if self.forecast else None

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
            "done": self.done.steps,
            "training_s": self.training_s,
            "left_s": self.left_s,
            "reasons": dict(self.reasons),
            "predicted": self.predicted,
            "run": self.forecast.run_json() if self.forecast else None,
            "job": self.job.fields(),  # which `estimate --run` starts from
            "course": dataclasses.asdict(self.course),  # likewise
            "smaller_grids": smaller_grids(self.config, self.store),  # likewise
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
    """The plan of a run: recipe or saved run, then the chosen settings, then the decisions by store
    and host, of which this worker has its share. Device, dtype, policy and micro-batch of a saved
    run only a setting changes, no recipe.

    Before a run's first checkpoint nothing is trained that would have to be continued: the settings
    that were chosen for it are kept, and all else is decided again.

    Without `forecasts` memory and time are left open, and with them the memory policy: those of
    another host are asked for.

    Raises InputError for settings that do not suit the store or the saved run, and, unless `force`,
    if the host's calibration cannot be read."""
    in_all, start = _start(run_folder, located(chosen), workers)
    saved = start.saved
    try:
        if saved and saved.mode != start.settings.mode:
            raise InputError(*differences(saved, start.settings))
        facts, settings, decided, reasons = decide(start, store, host, gpus, workers)
        config = joined(facts, settings, decided)
    except ValueError as error:
        raise InputError(str(error)) from None
    raise_if_any(differences(saved, config) if saved else ())
    config, transfer = _with_first_weights(config, start, store)
    if config.device == "cpu":
        for line in why_no_card(start.wanted("device"), config.mode, gpus):
            reasons["device"] = line
    if saved and start.is_begun and "policy" not in start.chosen:
        reasons["policy"] = f"policy {config.unet.policy}: as the run was begun"
    growth = 1.0
    if "batch_per_worker" in start.chosen:
        growth = rate_growth(config, workers)
    plan = Plan(
        config=config,
        store=with_fold(store, config.fold),
        saved=saved,
        workers=workers,
        chosen=in_all,
        done=Done(start.done),
        rate_growth=growth,
        reasons=reasons,
        transfer=transfer,
    )
    _check_batch(plan, start.chosen)
    plan = _with_coarse_steps(_with_validations(plan), start.is_begun)
    if not forecasts:
        return plan
    plan = with_forecast(plan, host, pick=start.wanted("policy") is None, force=force)
    done = _done(run_folder, plan) if start.done else plan.done
    return dataclasses.replace(plan, done=_with_pace(done, run_folder, plan, host))


def read_plan(run_folder: Path) -> Dict[str, Any]:
    """The content of a run's plan.json; {} if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        content = read_json(Path(run_folder) / "plan.json")
        if isinstance(content, dict) and content.get("schema") == PLAN_SCHEMA:
            return content
    return {}


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
        reasons["own operations"] = f"warning: no own operations ({host.own.why}); {why}; {todo}"
    job = dataclasses.replace(plan.job, threads=thread_plan(host).intra_op)
    try:
        forecast = plan.course.forecast(
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
    return dataclasses.replace(plan, config=config, forecast=forecast, reasons=reasons)


def source_of_store(folder: Path, host: Host, chosen: Chosen) -> JobSource:
    """What `estimate --store` starts from: the run that `train` would plan on a store. Raises
    ValueError for a store that cannot be read, and for settings that do not suit it."""
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
        course=plan.course,
        strides_why=line[len(decided) :],
        grids=smaller_grids(plan.config, plan.store),
    )


def save_plan(plan: Plan, run_folder: Path) -> None:
    """Write `run_folder`/plan.json, atomically."""
    write_json(Path(run_folder) / "plan.json", plan.to_json())


# --- The start of the decisions ---


def _with_first_weights(
    config: RunConfig, start: Start, store: Store
) -> Tuple[RunConfig, Optional[Transfer]]:
    """A configuration with the record of the weights that it starts from, and these, if they are
    still to be taken."""
    if start.saved and start.is_begun:
        return dataclasses.replace(config, init_record=start.saved.init_record), None
    if not config.init:
        return config, None
    transfer = open_transfer(config, store)
    return dataclasses.replace(config, init_record=transfer.record), transfer


def _done(run_folder: Path, plan: Plan) -> Done:
    """How far a run that has a checkpoint has got."""
    steps = plan.done.steps
    steps_s = 0.0
    is_over = not plan.config.has_open_length and steps >= plan.steps
    # One that is damaged is named, and replaced by the one before, when it is read whole.
    with contextlib.suppress(ValueError, IndexError):
        progress = progress_of(read_state(checkpoints(run_folder)[0]))
        steps_s = progress.trained_s - progress.validated_s
        is_over = progress.is_over(plan.config, plan.steps)
    has_decision = is_over and has_rules(run_folder, plan.config.split_hash)
    return Done(steps, steps_s, is_over, has_decision)


def _with_pace(done: Done, run_folder: Path, plan: Plan, host: Host) -> Done:
    """The same with the steps that the run has taken as it would go on now; of a fold without any
    with those of the first one beside it that has some."""
    way = _way(plan, host)
    whose = {run_folder: "its own"}
    for fold, run in runs_beside(run_folder, plan.config.fold).items():
        whose[run] = f"fold {fold}'s"
    for run, words in whose.items():
        pace = Pace(recent_events(run))
        if not take_as_long(pace.start, way) or not _computes_as(run, plan.config):
            continue
        full = pace.own_steps(coarse=False)
        coarse = pace.own_steps(coarse=True)
        if full or coarse:
            return dataclasses.replace(done, full=full, coarse=coarse, whose=words)
    return done


def _computes_as(run: Path, config: RunConfig) -> bool:
    """Whether a step of the run in a folder is one of `config`: the same network, batch, and what
    is done with them."""
    try:
        own = load_config(run)
    except InputError:
        return False
    jobs = [job_of(each, each.grid, threads=1, cases=0) for each in (own, config)]
    return jobs[0] == jobs[1] and (own.coarse_grid, own.freeze) == (
        config.coarse_grid,
        config.freeze,
    )


def _way(plan: Plan, host: Host) -> Dict[str, Any]:
    """What the log of an attempt by this plan would have of how and where steps are computed."""
    config = plan.config
    return {
        "workers": plan.workers,
        "device": config.device,
        "precision": config.unet.dtype,
        "policy": config.unet.policy,
        "micro_batch": config.micro,
        "grid": list(config.grid),
        "host": host.summary(),
    }


def _start(run_folder: Path, chosen: Chosen, workers: int) -> Tuple[Optional[Chosen], Start]:
    """What was chosen in all calls for a run, None if that is not known, and the start of its
    decisions."""
    saved: Optional[RunConfig] = None
    in_all: Optional[Chosen] = dict(chosen)
    if (run_folder / "config.json").is_file():
        saved = load_config(run_folder)
        before = read_plan(run_folder).get("chosen")
        in_all = chosen_again(before, chosen) if isinstance(before, dict) else None
    is_begun = saved is not None and bool(checkpoints(run_folder))
    done = step_of(checkpoints(run_folder)[0]) if is_begun else 0
    if in_all is not None and not is_begun:  # nothing is trained that would have to be continued
        chosen = in_all
        saved = None
    has_new_rates = saved is None or "recipe" in chosen
    if saved is None or "recipe" in chosen:
        settings = recipe_settings(chosen)
    else:
        settings = saved.settings
    batch = chosen.get("batch", settings.batch)
    if "batch_per_worker" in chosen:
        batch = chosen["batch_per_worker"] * workers
    kept = _kept(settings, saved, batch)
    try:
        settings = with_settings(settings, {**kept, **chosen, "batch": batch})
    except ValueError as error:
        raise InputError(str(error)) from None
    return in_all, Start(settings, chosen, kept, saved, done, is_begun, has_new_rates)


def _kept(settings: Settings, saved: Optional[RunConfig], batch: int) -> Dict[str, Any]:
    """A recipe's card, or the settings of a saved run that no recipe changes; `batch` is that of
    the run as it continues."""
    if saved is None:
        return {} if settings.device == "cpu" else {"device": settings.device}
    kept = {
        "device": saved.device,
        "dtype": saved.unet.dtype,
        "policy": saved.unet.policy,
        "micro_batch": saved.micro_batch if batch == saved.batch else 0,
    }
    if saved.is_patch:
        kept["patch"] = saved.grid
        kept["patches_per_case"] = saved.patches_per_case
    return kept


def _check_batch(plan: Plan, chosen: Chosen) -> None:
    """Raise InputError if an epoch has fewer samples than a batch."""
    if plan.steps_per_epoch:
        return
    kind = "patches of an epoch" if plan.config.is_patch else "training cases"
    # --batch-per-worker gives the batch of all workers together.
    name = "batch" if "batch_per_worker" in chosen else "--batch"
    rule = f"{name} must be at most the {plan.samples_per_epoch} {kind}"
    raise InputError(f"{rule}, got {plan.config.batch}; {_smaller_batch(chosen)}")


def _smaller_batch(chosen: Chosen) -> str:
    """What to do about a batch that is too large, of all workers together."""
    if "batch_per_worker" not in chosen:
        return "choose a smaller --batch"
    if chosen["batch_per_worker"] == 1:
        return "take fewer workers"
    return "choose a smaller --batch-per-worker, or fewer workers"


# --- The length ---


def _with_validations(plan: Plan) -> Plan:
    """The plan with a number of validations, unless a setting says how often there is one."""
    config = plan.config
    # None is of an earlier version: then those of the config count as chosen.
    is_chosen = plan.chosen is None or "validations" in plan.chosen
    if config.validate_every or (is_chosen and config.validations):
        return plan
    epochs = max(plan.steps // plan.steps_per_epoch, 1)
    config = dataclasses.replace(config, validations=min(epochs, VALIDATIONS))
    return dataclasses.replace(plan, config=config)


def _with_coarse_steps(plan: Plan, is_begun: bool) -> Plan:
    """The plan with the coarse steps of its length. A run that has begun keeps its own if it stays
    as long, or is made longer: the steps that are added are in full."""
    saved = plan.saved
    config = plan.config.with_coarse_share(plan.steps)
    reasons = dict(plan.reasons)
    if saved and is_begun:
        share = config.coarse_steps
        is_as_long = (saved.steps, saved.epochs) == (config.steps, config.epochs)
        if is_as_long or saved.coarse_steps < share:
            config = dataclasses.replace(config, coarse_steps=saved.coarse_steps)
        if not is_as_long and saved.coarse_steps < share:
            kept = f"coarse steps: {saved.coarse_steps}, as the run was begun"
            reasons["coarse steps"] = f"{kept}, and what is added in full"
            if not config.has_open_length:  # else the length is not known yet
                new = f"a new run of {plan.steps} steps would have {share}"
                reasons["coarse steps"] += f"; {new}"
    return dataclasses.replace(plan, config=config, reasons=reasons)

"""One call of `train` on a run, from the moment that TensorFlow is there: the run is opened, its
settings are saved, its budget of minutes becomes steps, and it trains to its end."""

import dataclasses
import os
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Dict, Mapping, Optional

from cpu3d.distributed.all_reduce import Exchange
from cpu3d.distributed.cluster import Cluster
from cpu3d.host.apply import in_force
from cpu3d.host.memory import reserve
from cpu3d.host.speed import Observer, computes_as_predicted
from cpu3d.host.thread_plan import ThreadPlan, describe
from cpu3d.plan import Plan, save_plan, with_forecast
from cpu3d.plan_text import learnable
from cpu3d.run.config_json import save_config
from cpu3d.run.log import flush_log, last_event
from cpu3d.settings import RunConfig
from cpu3d.training.fit import Fit
from cpu3d.training.watchdog import Guard
from cpu3d.util.progress import say
from cpu3d.util.records import versions
from memory_estimator.common.units import format_seconds
from memory_estimator.host import Host

# How a run is computed: if one of these changes, its weights are not the same to the bit.
WAYS = ("engine", "workers", "policy", "device", "micro_batch", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Attempt:
    """What one worker of a run knows of a call of `train`."""

    plan: Plan
    folder: Path
    settings: Mapping[str, Any]  # of this call
    host: Host  # this worker's share
    threads: ThreadPlan
    engine: str  # as of `host.apply.engine_name`
    cluster: Cluster

    def open(self, exchange: Exchange, guard: Guard) -> Fit:
        """The run, from its last checkpoint or its start."""
        if self.plan.forecast:
            reserve(self.plan.job)
        return Fit(self.plan, self.folder, exchange, guard)

    def carry_out(self, fit: Fit, guard: Guard, mlflow: str) -> None:
        """Save settings and plan, and train to the end, or log the end of a run that is over."""
        self._save(fit.config)  # its coarse steps may be those of the checkpoint
        say(*describe(self.host, self.threads, self.engine), *fit.warnings)
        if self.cluster.is_chief and not fit.is_over:
            warning, _ = learnable(self.plan)
            if warning:
                say(warning)
        say(f"reads: {fit.feeds.reader.mode}")
        if fit.step:
            say(f"run: continued after step {fit.step}")
        if fit.is_over:
            todo = f"{self._what_continues(fit)} continues"
            say(f"nothing to do after step {fit.step}: finished; {todo}")
            fit.run(mlflow=mlflow)  # sends what is missing there
            return
        forecast = self.plan.forecast
        guard.plan(
            step=fit.step,
            steps=fit.steps,
            bound_bytes=forecast.upper_bound_bytes if forecast else None,
            save_bytes=fit.learner.largest_bytes,
            here=len(self.cluster.local_ranks),
        )
        if fit.config.has_open_length:
            self._fit_budget(fit)
        guard.now.steps = fit.steps
        if self.cluster.is_chief:
            threads = in_force(self.threads)
            log_start(fit, self.host, self.engine, threads, self.plan.predicted)
        fit.run(self._observer(), mlflow)

    def _fit_budget(self, fit: Fit) -> None:
        budget = f"budget of {fit.config.budget_minutes:g} min"
        whole = fit.steps
        say(f"{budget}: timing steps, to find how many of {whole} fit")
        step_s = ", then ".join(map(format_seconds, fit.fit_budget()))
        length = f"{fit.steps} of {whole} steps, {fit.config.coarse_steps} of them coarse"
        say(f"{budget}: {length}, {step_s} a step")
        if fit.steps < whole:
            say("note: --budget-minutes 0 takes all steps")
        self._save(fit.config)  # a restart keeps this length

    def _what_continues(self, fit: Fit) -> str:
        """The option that makes a run which is over longer, and from where."""
        config = fit.config
        if config.budget_minutes and fit.step < config.epochs * fit.steps_per_epoch:
            return "a larger --budget-minutes"
        if "epochs" in self.settings or config.budget_minutes or not config.steps:
            return f"--epochs above {fit.step // fit.steps_per_epoch}"
        return f"--steps above {fit.step}"

    def _save(self, config: RunConfig) -> None:
        """Have the chief write config.json and plan.json."""
        if not self.cluster.is_chief:
            return
        plan = self.plan
        if config != plan.config:  # its steps were cut: the rest of the plan is of these too
            plan = dataclasses.replace(plan, config=config)
            plan = with_forecast(plan, self.host, pick=False, force=True)
        flush_log(self.folder)
        save_config(config, self.folder)
        save_plan(plan, self.folder)

    def _observer(self) -> Optional[Observer]:
        """An observer of the chief's steps on a CPU; None if they are not computed as predicted."""
        plan = self.plan
        if not self.cluster.is_chief or plan.forecast is None or not computes_as_predicted():
            return None
        if plan.config.freeze != "none":  # a step leaves out what is predicted
            return None
        job = plan.forecast.full.job
        of_this_worker = dataclasses.replace(
            job,
            batch=plan.config.batch // self.cluster.workers,
            micro_batch=plan.config.micro,
            threads=int(os.environ.get("TF_NUM_INTRAOP_THREADS") or job.threads),
        )
        return Observer(of_this_worker, self.host, warm_up=1)


def log_start(
    fit: Fit, host: Host, engine: str, threads: Dict[str, str], predicted: Mapping[str, Any]
) -> None:
    """Log where and with what an attempt runs; print a note if the run was computed in another way
    before."""
    config = fit.config
    before = last_event(fit.folder, "start")
    way = {**before, **before.get("threads", {})}
    start = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "parameters": fit.learner.parameters,
        "read_mode": fit.feeds.reader.mode,
        "micro_batch": config.micro,
        "workers": fit.workers,
        "steps": fit.steps,
        "coarse_steps": config.coarse_steps,
        "predicted": predicted,
        "host": host.summary(),
        "versions": versions(),
        "engine": engine,
        "threads": threads,
        "store": str(fit.store.folder),
        "split_hash": config.split_hash,
        "grid": list(config.grid),
        "mode": config.mode,
        "device": config.device,
        "precision": config.unet.dtype,
        "policy": config.unet.policy,
    }
    now = {**start, **threads}
    other = [name for name in WAYS if name in way and way[name] != now.get(name)]
    if other:
        was = ", ".join(f"{name} {way[name]}" for name in other)
        say(f"note: this run had {was} before, so its weights will not be the same to the bit")
    fit.log("start", **start)

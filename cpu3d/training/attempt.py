"""One call of `train` on a run, from the moment that TensorFlow is there: the run is opened, its
settings are saved, its budget of minutes becomes steps, and it trains to its end."""

import dataclasses
from datetime import datetime, timezone

from cpu3d.data.stores.store_decisions import grids_text
from cpu3d.distributed.all_reduce import Exchange
from cpu3d.host.apply import in_force
from cpu3d.host.memory import reserve
from cpu3d.host.thread_plan import describe
from cpu3d.plan import grids_of, save_plan, with_forecast
from cpu3d.plan_text import learnable
from cpu3d.run.config_json import save_config
from cpu3d.run.log import flush_log, last_event
from cpu3d.settings import RunConfig
from cpu3d.training.call import Call
from cpu3d.training.fit import Fit
from cpu3d.training.watchdog import Watchdog
from cpu3d.util.progress import say
from cpu3d.util.records import versions
from memory_estimator.common.units import format_seconds

COMPUTE_SETUP = ("engine", "workers", "policy", "device", "micro_batch", "OMP_NUM_THREADS")
"""How a run is computed: if one of these changes, its weights are not the same to the bit."""


def carry_out(call: Call, exchange: Exchange, watchdog: Watchdog, mlflow: str) -> RunConfig:
    """Open the run, save its settings and plan, and train to the end, or log the end of a run that
    is over; returns its configuration."""
    plan = call.plan
    if plan.forecast:
        reserve(plan.job)
    fit = Fit(plan, call.folder, watchdog, exchange)
    if not fit.is_over:  # one that is over takes no memory
        call.refuse_what_does_not_fit()
    _save(call, fit.config)  # its coarse steps may be those of the checkpoint
    say(*describe(call.host, call.threads, call.engine_name), *fit.warnings)
    say(f"reads: {fit.data.reader.mode}")
    if fit.step:
        say(f"run: continued after step {fit.step}")
    if fit.is_over:
        todo = "larger --steps, --epochs or --budget-minutes continue"
        say(f"nothing to do after step {fit.step}: finished; {todo}")
        fit.run()
        return fit.config
    if call.cluster.is_chief:
        warning, _ = learnable(plan)
        if warning:
            say(warning)
    watchdog.plan(
        step=fit.step,
        steps=fit.steps,
        bound_bytes=plan.forecast.upper_bound_bytes if plan.forecast else None,
        save_bytes=fit.learner.largest_bytes,
        here=len(call.cluster.local_ranks),
    )
    if fit.config.has_open_length:
        whole = fit.steps
        say(f"budget of {fit.config.budget_minutes:g} min: timing steps")
        step_s = ", then ".join(map(format_seconds, fit.fit_budget()))
        say(f"budget: {fit.steps} of {whole} steps, {step_s} a step; --budget-minutes 0 takes all")
        watchdog.now.steps = fit.steps
        _save(call, fit.config)  # a restart keeps this length
    if call.cluster.is_chief:
        _log_start(call, fit)
    fit.run(mlflow)
    return fit.config


# --- Private helpers ---


def _save(call: Call, config: RunConfig) -> None:
    """Have the chief write config.json and plan.json."""
    if not call.cluster.is_chief:
        return
    plan = call.plan
    if config != plan.config:  # its steps were cut: the rest of the plan is of these too
        plan = dataclasses.replace(plan, config=config)
        plan = with_forecast(plan, call.host, pick=False, force=True)
    flush_log(call.folder)
    save_config(config, call.folder)
    save_plan(plan, call.folder)


def _log_start(call: Call, fit: Fit) -> None:
    """Log where and with what an attempt runs; print a note if the run was computed in another way
    before."""
    config = fit.config
    before = last_event(fit.folder, "start")
    before = {**before, **before.get("threads", {})}
    threads = in_force(call.threads)
    start = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "parameters": fit.learner.parameters,
        "read_mode": fit.data.reader.mode,
        "micro_batch": config.micro,
        "workers": fit.workers,
        "steps": fit.steps,
        "coarse_steps": config.coarse_steps,
        "predicted": call.plan.predicted,
        "host": call.host.summary(),
        "versions": versions(),
        "engine": call.engine_name,
        "threads": threads,
        "grids": grids_text(grids_of(config, fit.store)),
        "device": config.device,
        "precision": config.unet.dtype,
        "policy": config.unet.policy,
    }
    now = {**start, **threads}
    was = [
        f"{name} {before[name]}"
        for name in COMPUTE_SETUP
        if name in before and before[name] != now.get(name)
    ]
    if was:
        words = ", ".join(was)
        say(f"note: this run had {words} before, so its weights will not be the same to the bit")
    fit.log("start", **start)

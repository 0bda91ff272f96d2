"""Train a 3D U-Net on the whole volumes of a store, or on patches of them.

    ./run.sh train --store store --run runs/first
    ./run.sh train --store store --run runs/flair --recipe paper-flair --epochs 25
    ./run.sh train --store store --run runs/patches --mode patch --patch 96 96 96
    ./run.sh train --store store --run runs/fold-2 --fold 2/5

The same command again continues a run that was cut off; a larger --epochs, or --steps, extends a finished one.
Several processes that train one run together are started by `launch`; under a TF_CONFIG, as Kubernetes sets it, this is
one of them.
"""

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

from cpu3d.data.store import open_store
from cpu3d.distributed.all_reduce import join
from cpu3d.distributed.cluster import Cluster, read_cluster
from cpu3d.errors import InputError
from cpu3d.host.apply import engine_name, in_force, set_up
from cpu3d.host.gpu import HostGpus, fits_memory
from cpu3d.host.speed import Observer
from cpu3d.host.thread_plan import describe, share_of
from cpu3d.plan import Plan, check_fits, make_plan, plan_of_chief, save_plan
from cpu3d.run.checkpoint import BEST, checkpoints
from cpu3d.run.log import flush_log, read_events
from cpu3d.settings import SETTINGS, RunConfig, left_open, load_config, save_config
from cpu3d.training.tracking import require_mlflow, tracked
from cpu3d.training.watchdog import Guard
from cpu3d.util.atomic import remove_partials, writable_folder
from cpu3d.util.lock import locked
from cpu3d.util.progress import say
from memory_estimator.common.schema import option
from memory_estimator.common.units import format_seconds
from memory_estimator.host import Host, read_host


@dataclass(frozen=True)
class Options:
    """What `train` is given besides the settings of a run."""

    store: Path = option(help="store that `prepare` has written", metavar="DIR")
    run: Path = option(help="folder for the run; continued where it exists", metavar="DIR")
    force: bool = option(False, "train although it may not fit the memory that is free")
    mlflow: str = option("", "where to track the run too, such as sqlite:///mlflow.db or http://localhost:5000", "URI")
    """No setting of the run: it may hold a password, which is written nowhere."""


OPTIONS = (Options, SETTINGS)


def run(options: Options, settings: Dict[str, Any]) -> int:
    train(options.store, options.run, settings=settings, force=options.force, mlflow=options.mlflow)
    return 0


def train(
    store_folder: Path,
    run_folder: Path,
    *,
    settings: Optional[Dict[str, Any]] = None,
    force: bool = False,
    mlflow: str = "",
) -> RunConfig:
    """Train, or continue, the run in `run_folder` on the store in `store_folder`; returns the run's configuration.

    SIGINT and SIGTERM finish the step, save, and raise Interrupted. Before anything is written it raises InputError for
    bad settings and, unless `force`, DoesNotFitError for a run that the free memory may not hold; a finished run asks
    for none. While it trains it raises DivergedError, MemoryRunsOutError and WorkerLostError, each once what is good is
    saved.

    Where the environment names other workers (`cluster.read_cluster`) this is one of them. All must be called alike.
    """
    if mlflow:
        require_mlflow()
    settings = settings or {}
    cluster = read_cluster(os.environ)
    store = open_store(store_folder)
    store.check_split()
    place = (cluster.local_index, len(cluster.local_ranks))
    host = share_of(read_host(), place[1])
    gpus = HostGpus()
    engine, device, plan = left_open(settings.get("engine")), "cpu", None

    def refuse_what_does_not_fit() -> None:
        if not force:
            check_fits(plan, host, gpus)

    if cluster.is_chief:  # the others get its plan once they are together
        plan = make_plan(store, run_folder, host, settings, gpus=gpus, workers=cluster.workers, force=force)
        say(*plan.describe(host))
        engine, device = left_open(plan.config.engine), plan.config.device
        if plan.saved is None:
            refuse_what_does_not_fit()
    elif "engine" not in settings and (run_folder / "config.json").is_file():
        engine = left_open(load_config(run_folder).engine)
    watched = Guard(run_folder, say=say, rank=cluster.rank, workers=cluster.workers)
    with _lock_of_chief(cluster, run_folder), watched as guard:
        _, threads, tf = set_up(engine, device, local=place)
        engine = engine_name(tf)
        exchange = join(cluster, plan=plan and {**plan.to_json(), "engine_name": engine}, say=say)
        if cluster.workers > 1:
            plan = plan or plan_of_chief(exchange.plan, store, host, engine)
            if plan.saved is None and not cluster.is_chief:
                refuse_what_does_not_fit()
        config = plan.config

        from cpu3d.training.fit import Fit  # imports TensorFlow, so not before the host is set up

        smaller = "a smaller --patch" if config.is_patch else "a leaner --policy, or fewer --filters in another folder"
        with fits_memory("a training step", f"train with {smaller}"):
            fit = Fit(plan, run_folder, exchange)
            if plan.saved is not None and not fit.is_over:  # one that is over takes no memory any more
                refuse_what_does_not_fit()
            config = fit.config  # whose coarse steps are those that were done
            if cluster.is_chief:
                save_config(config, run_folder)
                save_plan(dataclasses.replace(plan, config=config), run_folder)
            changes = _changes(run_folder, engine, in_force(threads), cluster.workers, plan.saved, config)
            going_on = [f"run: continued after step {fit.step}"] if fit.step else []
            reads = f"reads: {fit.feeds.reading.plan.reason}"
            say(*describe(host, threads, engine), *fit.warnings, reads, *going_on, *changes)
            if fit.is_over:
                fit.note_end()
                guard.note_end(fit.reason)
                if mlflow and cluster.is_chief:
                    with tracked(run_folder, config, mlflow):
                        pass  # it gets what it has not
                say(f"nothing to do after step {fit.step}; a larger {fit.longer} goes on")
            else:
                guard.plan(
                    step=fit.step,
                    steps=fit.steps,
                    bound_bytes=plan.upper_bound_bytes,  # None on a card
                    save_bytes=fit.learner.largest_bytes,
                    here=len(cluster.local_ranks),
                    stall_minutes=config.stall_minutes,
                )
                if fit.has_open_length:
                    whole, step_s = fit.steps, fit.fit_budget(guard)
                    guard.plan(steps=fit.steps)
                    each = ", then ".join(map(format_seconds, step_s))
                    coarse = f", {fit.config.coarse_steps} of them coarse" if fit.config.coarse_steps else ""
                    say(
                        f"budget of {config.budget_minutes:g} min: {fit.steps} of {whole} steps{coarse}; "
                        f"{each} a step; --epochs {config.epochs} takes all"
                    )
                guard.plan()
                if cluster.is_chief and fit.config != config:  # a restart keeps the length that was timed
                    flush_log(run_folder)
                    save_config(fit.config, run_folder)
                    save_plan(dataclasses.replace(plan, config=fit.config), run_folder)
                config = fit.config
                fit.log_start(host, engine, in_force(threads), plan.predicted)
                fit.run(guard, _observer(plan, host, cluster), mlflow)
            exchange.close()
    return config


# --- Private helpers ---


@contextlib.contextmanager
def _lock_of_chief(cluster: Cluster, run_folder: Path) -> Iterator[None]:
    """Hold the run's folder, as one process alone may write to it."""
    if not cluster.is_chief:
        yield
        return
    writable_folder(run_folder, "run")
    with locked(run_folder, "run"):
        for path in (run_folder / "log.jsonl", run_folder / "checkpoints" / BEST, *checkpoints(run_folder)):
            if path.is_file() and path.stat().st_size and not (run_folder / "config.json").is_file():
                rule = f"run {run_folder} must hold a config.json beside {path.relative_to(run_folder)}, found none"
                raise InputError(f"{rule}; restore it, or choose another --run")
        (run_folder / "checkpoints").mkdir(exist_ok=True)
        remove_partials(run_folder, run_folder / "checkpoints")
        yield


def _observer(plan: Plan, host: Host, cluster: Cluster) -> Optional[Observer]:
    """Of the chief's steps on a CPU."""
    if not cluster.is_chief or plan.estimate is None:
        return None
    config, workers = plan.config, cluster.workers
    threads = int(os.environ.get("TF_NUM_INTRAOP_THREADS") or plan.estimate.job.threads)
    job = dataclasses.replace(
        plan.estimate.job, batch=config.batch // workers, micro_batch=config.micro, threads=threads, averaged=False
    )
    return Observer(job, host, warm_up=1)


def _changes(
    run_folder: Path, engine: str, threads: Dict[str, str], workers: int, saved: Optional[RunConfig], config: RunConfig
) -> List[str]:
    """A line of warning where the run was computed in another way before."""
    starts = [event for event in read_events(run_folder) if event["event"] == "start"]
    now = {"engine": engine, "workers": 1 if starts else workers, "threads": threads}  # earlier versions said less
    last, saved = {**now, **(starts[-1] if starts else {})}, saved or config
    ways = (  # before, now, in words
        (last["engine"], engine, "on {}"),
        (last["workers"], workers, "of {} workers"),
        (last["threads"].get("OMP_NUM_THREADS"), threads.get("OMP_NUM_THREADS"), "with OMP_NUM_THREADS={}"),
        (saved.unet.policy, config.unet.policy, "under policy {}"),
        (saved.device, config.device, "on device {}"),
        (f"{saved.peak_rate:g}", f"{config.peak_rate:g}", "at a learning rate of {}"),
        (f"{saved.adam_rate:g}", f"{config.adam_rate:g}", "at an Adam rate of {}"),
        (saved.micro, config.micro, "in micro-batches of {}"),
    )
    before = ", ".join(words.format(then) for then, today, words in ways if then != today)
    return [f"note: this run was {before} before, so it goes on alike but not to the bit"] if before else []

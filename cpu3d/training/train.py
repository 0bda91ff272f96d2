"""Train a 3D U-Net on the whole volumes of a store, or on patches of them.

    ./run.sh train --store store --run runs/first
    ./run.sh train --store store --run runs/flair --recipe paper-flair --epochs 25
    ./run.sh train --store store --run runs/patches --mode patch --patch 96 96 96
    ./run.sh train --store store --run runs/fold-2 --fold 2/5
    ./run.sh train --store store --run runs/folds --folds 5

The same command continues an interrupted run; more --epochs, --steps or --budget-minutes extend a
finished one. `launch` starts several processes that train one run together. If TF_CONFIG is set, as
by Kubernetes, this process is one of them.

--folds trains all folds one after the other, each by a process of its own; scores every case once,
by the fold that has not seen it; decides post-processing on all of them; and writes
RUN/report.html. `predict --run RUN` and `evaluate --run RUN` then take the folds together. It uses
the last weights of each fold, as the best ones are chosen by the cases that are to be scored."""

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any, Dict, Iterator, Optional

from cpu3d.data.store import open_store
from cpu3d.distributed.all_reduce import Exchange, join
from cpu3d.distributed.cluster import Cluster, read_cluster
from cpu3d.distributed.rendezvous import plan_of_chief
from cpu3d.errors import InputError
from cpu3d.host.apply import engine_name, in_force, set_up
from cpu3d.host.gpu import HostGpus, fits_memory
from cpu3d.host.memory import reserve
from cpu3d.host.speed import Observer, computes_as_predicted
from cpu3d.host.thread_plan import describe, host_share
from cpu3d.plan import Plan, check_fits, make_plan, save_plan
from cpu3d.run.checkpoint import BEST, checkpoints
from cpu3d.run.config_json import load_config, save_config
from cpu3d.run.folds import refuse_folds
from cpu3d.run.log import flush_log
from cpu3d.settings import TRAIN_OPTIONS, RunConfig, left_open
from cpu3d.settings import TrainOptions as Options
from cpu3d.training.tracking import require_mlflow
from cpu3d.training.watchdog import Guard
from cpu3d.util.atomic import remove_partials, writable_folder
from cpu3d.util.lock import locked
from cpu3d.util.progress import say
from memory_estimator.common.units import format_seconds
from memory_estimator.host import Host, read_host

OPTIONS = TRAIN_OPTIONS


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
    """Train, or continue, the run in `run_folder` on the store in `store_folder`; returns the run's
    configuration. If the environment names other workers (`cluster.read_cluster`) this is one of
    them; all need the same arguments.

    Before anything is written it raises InputError and, unless `force`, DoesNotFitError; then, each
    once the good steps are saved, Interrupted after SIGINT and SIGTERM, DivergedError,
    MemoryRunsOutError and WorkerLostError."""
    if mlflow:
        require_mlflow()
    refuse_folds(run_folder)
    attempt = _Attempt(Path(store_folder), Path(run_folder), settings or {}, force, mlflow)
    attempt.decide()
    guard = Guard(
        attempt.folder, say=say, rank=attempt.cluster.rank, workers=attempt.cluster.workers
    )
    with _lock_of_chief(attempt.cluster, attempt.folder), guard:
        exchange = attempt.join()
        is_patch = attempt.plan.config.is_patch
        smaller = "a smaller --patch" if is_patch else "a leaner --policy, or fewer --filters"
        smaller += " in another folder" if attempt.plan.saved or not is_patch else ""
        with fits_memory("a training step", f"train with {smaller}"):
            fit = attempt.open(exchange, guard)
            attempt.carry_out(fit, guard)
            exchange.close()
    return fit.config


# --- Private helpers ---


class _Attempt:
    """A call of `train`, by one worker of a run, in four steps."""

    def __init__(
        self, store_folder: Path, folder: Path, settings: Dict[str, Any], force: bool, mlflow: str
    ):
        self.folder, self.settings, self.force, self.mlflow = folder, settings, force, mlflow
        self.cluster = read_cluster(os.environ)
        self.store = open_store(store_folder)
        self.host = host_share(read_host(), len(self.cluster.local_ranks))
        self.gpus = HostGpus()
        self.engine, self.device = left_open(settings.get("engine")), "cpu"
        self.plan: Optional[Plan] = None  # of a worker that is not the chief, once it has joined

    def decide(self) -> None:
        """Plan the run, and refuse a new one that may not fit. The chief alone does it; the others
        get its plan."""
        if self.cluster.is_chief:
            more = {"gpus": self.gpus, "workers": self.cluster.workers, "force": self.force}
            self.plan = make_plan(self.store, self.folder, self.host, self.settings, **more)
            say(*self.plan.describe(self.host))
            self.engine, self.device = left_open(self.plan.config.engine), self.plan.config.device
            if self.plan.saved is None:
                self._refuse_what_does_not_fit()
        elif "engine" not in self.settings and (self.folder / "config.json").is_file():
            self.engine = left_open(load_config(self.folder).engine)

    def join(self) -> Exchange:
        """Set up this process for TensorFlow, meet the other workers, and take the chief's plan."""
        cluster = self.cluster
        place = (cluster.local_index, len(cluster.local_ranks))
        _, self.threads, tf = set_up(self.engine, self.device, local=place)
        self.engine = engine_name(tf)
        plan = self.plan and {**self.plan.to_json(), "engine_name": self.engine}
        exchange = join(cluster, plan=plan, say=say)
        if not cluster.is_chief:
            self.plan = plan_of_chief(exchange.plan, self.store, self.host, self.engine)
        return exchange

    def open(self, exchange: Exchange, guard: Guard) -> Any:
        """The run, a Fit, from its last checkpoint or its start. Saves its settings and plan."""
        from cpu3d.training.fit import Fit  # imports TensorFlow, so not before the host is set up

        if self.plan.forecast:
            reserve(self.plan.job)
        fit = Fit(self.plan, self.folder, exchange, guard)
        if not fit.is_over:  # one that is over takes no memory
            self._refuse_what_does_not_fit()
        self._save(fit.config)  # its coarse steps may be those of the checkpoint
        continued = [f"run: continued after step {fit.step}"] if fit.step else []
        reads = f"reads: {fit.feeds.reader.mode}"
        say(*describe(self.host, self.threads, self.engine), *fit.warnings, reads, *continued)
        return fit

    def carry_out(self, fit: Any, guard: Guard) -> None:
        """Train to the end, or log the end of a run that is over."""
        if fit.is_over:
            say(
                f"nothing to do after step {fit.step}: {fit.reason}; {self._what_continues(fit)} continues"
            )
            fit.run(mlflow=self.mlflow)  # sends what is missing there
            return
        guard.plan(
            step=fit.step,
            steps=fit.steps,
            bound_bytes=self.plan.forecast and self.plan.forecast.upper_bound_bytes,
            save_bytes=fit.learner.largest_bytes,
            here=len(self.cluster.local_ranks),
            stall_minutes=fit.config.stall_minutes,
        )
        if fit.has_open_length:
            budget, whole = f"budget of {fit.config.budget_minutes:g} min", fit.steps
            say(f"{budget}: timing steps, to find how many of {whole} fit")
            step_s = ", then ".join(map(format_seconds, fit.fit_budget()))
            length = f"{fit.steps} of {whole} steps, {fit.config.coarse_steps} of them coarse"
            say(f"{budget}: {length}, {step_s} a step")
            if fit.steps < whole:
                say("note: --budget-minutes 0 takes all steps")
            self._save(fit.config)  # a restart keeps this length
        guard.now.steps = fit.steps
        fit.log_start(self.host, self.engine, in_force(self.threads), self.plan.predicted)
        fit.run(_observer(self.plan, self.host, self.cluster), self.mlflow)

    def _what_continues(self, fit: Any) -> str:
        """The option that makes a run which is over longer, and from where."""
        if fit.reason == "early stop":
            return f"--patience above {fit.config.patience}"
        is_cut = fit.config.budget_minutes and fit.step < fit.config.epochs * fit.steps_per_epoch
        if is_cut:
            return "a larger --budget-minutes"
        if "epochs" in self.settings or not fit.config.steps or fit.config.budget_minutes:
            return f"--epochs above {fit.step // fit.steps_per_epoch}"
        return f"--steps above {fit.step}"

    def _save(self, config: RunConfig) -> None:
        """Have the chief write config.json and plan.json."""
        if self.cluster.is_chief:
            flush_log(self.folder)
            save_config(config, self.folder)
            save_plan(dataclasses.replace(self.plan, config=config), self.folder)

    def _refuse_what_does_not_fit(self) -> None:
        if not self.force:
            check_fits(self.plan, self.host, self.gpus)


@contextlib.contextmanager
def _lock_of_chief(cluster: Cluster, run_folder: Path) -> Iterator[None]:
    """Hold the run's folder, which only one process may write to."""
    if not cluster.is_chief:
        yield
        return
    writable_folder(run_folder, "run")
    with locked(run_folder, "run"):
        written = (
            run_folder / "log.jsonl",
            run_folder / "checkpoints" / BEST,
            *checkpoints(run_folder),
        )
        foreign = [path for path in written if path.is_file() and path.stat().st_size]
        if foreign and not (run_folder / "config.json").is_file():
            rule = f"run {run_folder} must hold a config.json beside {foreign[0].relative_to(run_folder)}, found none"
            raise InputError(f"{rule}; restore it, or choose another --run")
        (run_folder / "checkpoints").mkdir(exist_ok=True)
        remove_partials(run_folder, run_folder / "checkpoints")
        yield


def _observer(plan: Plan, host: Host, cluster: Cluster) -> Optional[Observer]:
    """An observer of the chief's steps on a CPU; None if they are not computed as predicted."""
    if not cluster.is_chief or plan.forecast is None or not computes_as_predicted():
        return None
    config, job = plan.config, plan.forecast.full.job
    own = {"batch": config.batch // cluster.workers, "micro_batch": config.micro, "averaged": False}
    threads = int(os.environ.get("TF_NUM_INTRAOP_THREADS") or job.threads)
    return Observer(dataclasses.replace(job, **own, threads=threads), host, warm_up=1)

"""Train a run, or continue it, on the whole volumes of a store or on patches of them.

train("store", "runs/first", settings={"epochs": 25})
"""

import contextlib
import gc
import json
import os
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional

from cpu3d.data.datasets.dataset_json import NAME as DATASET_JSON
from cpu3d.data.store import open_store
from cpu3d.data.stores.folder import SOURCE
from cpu3d.distributed.all_reduce import Exchange, join
from cpu3d.distributed.cluster import Cluster, read_cluster
from cpu3d.distributed.rendezvous import plan_of_chief
from cpu3d.errors import InputError
from cpu3d.host.apply import engine_name, set_up
from cpu3d.host.gpu import HostGpus, fits_memory
from cpu3d.host.thread_plan import host_share
from cpu3d.plan import Plan, make_plan
from cpu3d.plan_text import check_run, learnable, plan_lines
from cpu3d.run.checkpoint import BEST, checkpoints, is_trained
from cpu3d.run.folds import refuse_folds
from cpu3d.settings import SETTINGS, RunConfig, TrainOptions
from cpu3d.training.pulse import Pulse
from cpu3d.training.tracking import require_mlflow
from cpu3d.training.watchdog import Guard
from cpu3d.util.atomic import check_folder, remove_partials, writable_folder
from cpu3d.util.lock import locked
from cpu3d.util.progress import say
from memory_estimator.common.schema import check_given
from memory_estimator.host import read_host


def train(
    store_folder: Path,
    run_folder: Path,
    *,
    settings: Optional[Dict[str, Any]] = None,
    force: bool = False,
    mlflow: str = "",
    on_finished: Optional[Callable[[Path, Path, Pulse], None]] = None,
) -> RunConfig:
    """Train, or continue, the run in `run_folder` on the store in `store_folder`; returns the run's
    configuration. If the environment names other workers (`cluster.read_cluster`) this is one of
    them; all need the same arguments. `on_finished` is called after the last step, with the folders
    of run and store and the heartbeat, while the chief still holds the run's lock.

    Before anything is written it raises InputError and, unless `force`, DoesNotFitError; then, each
    once the good steps are saved, Interrupted after SIGINT and SIGTERM, DivergedError,
    MemoryRunsOutError and WorkerLostError."""
    check_given(SETTINGS, settings or {}, InputError)
    if mlflow:
        require_mlflow()
    if read_cluster(os.environ).is_chief:  # the others do not write there
        check_place(Path(run_folder))
    call = _Call(Path(store_folder), Path(run_folder), settings or {}, force=force)
    call.decide()
    cluster = call.cluster
    pulse = Pulse(call.folder, say=say, rank=cluster.rank, workers=cluster.workers)
    with _lock_of_chief(cluster, call.folder), pulse:
        config = _carry_out(call, pulse, mlflow)
        if on_finished is not None and cluster.is_chief:
            gc.collect()  # frees the network that was trained
            on_finished(call.folder, call.store.folder, pulse)
    return config


def show_plan(options: TrainOptions, settings: Dict[str, Any]) -> None:
    """Print what `train` would do with these options, and write nothing. Raises InputError and,
    unless forced, DoesNotFitError, as `train` does before it writes."""
    if options.mlflow:
        require_mlflow()
    check_place(options.run)
    call = _Call(options.store, options.run, settings, force=options.force)
    plan = call.made_plan()
    if options.json:
        print(json.dumps(plan.to_json()))
    else:
        say(*plan_lines(plan, call.host), stderr=False)
        warning, _ = learnable(plan)
        if warning and not plan.continues:
            say(warning, stderr=False)
    steps = 0 if plan.config.has_open_length else plan.steps
    if not is_trained(options.run, steps):  # one that is takes no memory
        call.refuse_what_does_not_fit()


def check_place(run_folder: Path) -> None:
    """Raise InputError unless a run can be written to, or continued in, `run_folder`."""
    refuse_folds(run_folder)
    check_folder(run_folder, "run")
    for path in (run_folder / name for name in ("checkpoints", "heartbeats", "logs")):
        if path.exists():
            check_folder(path, "folder of the run")
    refuse_foreign(run_folder)


OF_DATA = (DATASET_JSON, "imagesTr", "labelsTr", "manifest.json", SOURCE)
"""Of a data set's folder, or a store's."""


def refuse_foreign(run_folder: Path) -> None:
    """Raise InputError for the folder of a data set or a store, and for one with files of a run
    that has lost its configuration."""
    if (run_folder / "config.json").is_file():
        return  # a run that was begun goes on, also among data
    for name in OF_DATA:
        if (run_folder / name).exists():
            rule = f"--run {run_folder} must not be the folder of a data set or a store"
            raise InputError(f"{rule}, got one with {name} in it; choose another folder")
    written = (
        run_folder / "log.jsonl",
        run_folder / "checkpoints" / BEST,
        *checkpoints(run_folder),
    )
    foreign = [path for path in written if path.is_file() and path.stat().st_size]
    if foreign:
        beside = foreign[0].relative_to(run_folder)
        rule = f"run {run_folder} must hold a config.json beside {beside}, found none"
        raise InputError(f"{rule}; restore it, or choose another --run")


# --- Private helpers ---


def _carry_out(call: "_Call", pulse: Pulse, mlflow: str) -> RunConfig:
    """Set up this process, and train to the end."""
    with Guard(pulse) as guard:
        exchange = call.join()
        # Imports TensorFlow, so not before the process is set up.
        from cpu3d.training.attempt import Attempt

        attempt = Attempt(
            plan=call.plan,
            folder=call.folder,
            settings=call.settings,
            host=call.host,
            threads=call.threads,
            engine=call.engine_name,
            cluster=call.cluster,
        )
        with fits_memory("a training step", f"train with {_smaller(call.plan)}"):
            fit = attempt.open(exchange, guard)
            if not fit.is_over:  # one that is over takes no memory
                call.refuse_what_does_not_fit()
            attempt.carry_out(fit, guard, mlflow)
            exchange.close()
    return fit.config


class _Call:
    """A call of `train`, by one worker of a run, until this process is set up for TensorFlow."""

    def __init__(self, store_folder: Path, folder: Path, settings: Dict[str, Any], *, force: bool):
        self.folder = folder
        self.settings = settings
        self.force = force
        self.cluster = read_cluster(os.environ)
        self.store = open_store(store_folder)
        self.host = host_share(read_host(), len(self.cluster.local_ranks))
        self.gpus = HostGpus()
        self.device = "cpu"
        self.engine_name = ""  # once this process is set up
        self._plan: Optional[Plan] = None  # of a worker that is not the chief, once it has joined

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            raise RuntimeError("a worker must have a plan to train, got none; join it first")
        return self._plan

    def made_plan(self) -> Plan:
        """The plan of the run, which is from now on the one that this call follows."""
        self._plan = make_plan(
            self.store,
            self.folder,
            self.host,
            self.settings,
            gpus=self.gpus,
            workers=self.cluster.workers,
            force=self.force,
        )
        return self._plan

    def decide(self) -> None:
        """Plan the run, and refuse a new one that may not fit. The chief alone does it; the others
        get its plan."""
        if self.cluster.is_chief:
            self.made_plan()
            say(*plan_lines(self.plan, self.host))
            self.device = self.plan.config.device
            if not self.plan.continues:
                self.refuse_what_does_not_fit()

    def join(self) -> Exchange:
        """Set up this process for TensorFlow, meet the other workers, and take the chief's plan."""
        cluster = self.cluster
        place = (cluster.local_index, len(cluster.local_ranks))
        _, self.threads, tf = set_up(device=self.device, local=place)
        self.engine_name = engine_name(tf)
        if cluster.is_chief:
            plan = {**self.plan.to_json(), "engine_name": self.engine_name}
            return join(cluster, plan=plan, say=say)
        exchange = join(cluster, say=say)
        self._plan = plan_of_chief(exchange.plan, self.store, self.host, self.engine_name)
        return exchange

    def refuse_what_does_not_fit(self) -> None:
        """Raise DoesNotFitError if the plan may not fit, unless `force`."""
        if not self.force:
            check_run(self.plan, self.host, self.gpus)


def _smaller(plan: Plan) -> str:
    """What takes less memory than a plan."""
    if not plan.config.is_patch:
        return "a leaner --policy, or fewer --filters in another folder"
    place = " in another folder" if plan.continues else ""
    return f"a smaller --patch{place}"


@contextlib.contextmanager
def _lock_of_chief(cluster: Cluster, run_folder: Path) -> Iterator[None]:
    """Hold the run's folder, which only one process may write to."""
    if not cluster.is_chief:
        yield
        return
    writable_folder(run_folder, "run")
    with locked(run_folder, "run"):
        (run_folder / "checkpoints").mkdir(exist_ok=True)
        remove_partials(run_folder, run_folder / "checkpoints")
        yield

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
from cpu3d.data.stores.folder import SOURCE
from cpu3d.distributed.cluster import Cluster, read_cluster
from cpu3d.errors import InputError
from cpu3d.host.gpu import fits_memory
from cpu3d.plan_text import learnable, plan_lines
from cpu3d.run.checkpoint import BEST, checkpoints, is_trained
from cpu3d.run.folds import refuse_folds
from cpu3d.settings import SETTINGS, RunConfig, TrainOptions
from cpu3d.training.call import Call
from cpu3d.training.heartbeat_writer import HeartbeatWriter
from cpu3d.training.tracking import require_mlflow
from cpu3d.training.watchdog import Watchdog
from cpu3d.util.atomic import check_folder, remove_partials, writable_folder
from cpu3d.util.lock import locked
from cpu3d.util.progress import say
from memory_estimator.common.schema import check_given


def train(
    store_folder: Path,
    run_folder: Path,
    *,
    settings: Optional[Dict[str, Any]] = None,
    force: bool = False,
    mlflow: str = "",
    on_finished: Optional[Callable[[Path, Path, HeartbeatWriter], None]] = None,
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
    call = Call(Path(store_folder), Path(run_folder), settings or {}, force=force)
    call.decide()
    cluster = call.cluster
    heartbeat = HeartbeatWriter(call.folder, say=say, rank=cluster.rank, workers=cluster.workers)
    with _lock_of_chief(cluster, call.folder), heartbeat:
        with Watchdog(heartbeat) as watchdog, fits_memory("a training step", ADVICE):
            exchange = call.join()
            # Imports TensorFlow, so not before the process is set up.
            from cpu3d.training.attempt import carry_out

            config = carry_out(call, exchange, watchdog, mlflow)
            exchange.close()
        if on_finished is not None and cluster.is_chief:
            gc.collect()  # frees the network that was trained
            on_finished(call.folder, call.store.folder, heartbeat)
    return config


def show_plan(options: TrainOptions, settings: Dict[str, Any]) -> None:
    """Print what `train` would do with these options, and write nothing. Raises InputError and,
    unless forced, DoesNotFitError, as `train` does before it writes."""
    if options.mlflow:
        require_mlflow()
    check_place(options.run)
    call = Call(options.store, options.run, settings, force=options.force)
    call.make_plan()
    plan = call.plan
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
    refuse_foreign(run_folder)


OF_DATA = (DATASET_JSON, "imagesTr", "labelsTr", "manifest.json", SOURCE)
OF_RUN = ("log.jsonl", f"checkpoints/{BEST}")


ADVICE = "train with a leaner --policy, a smaller --patch, or fewer --filters in another folder"


def refuse_foreign(run_folder: Path) -> None:
    """Raise InputError for the folder of a data set or a store, and for one with files of a run
    that has lost its configuration."""
    if (run_folder / "config.json").is_file():
        return  # a run that was begun goes on, also among data
    for path in (*(run_folder / name for name in (*OF_DATA, *OF_RUN)), *checkpoints(run_folder)):
        if path.exists():
            got = f"one with {path.relative_to(run_folder)} and no config.json"
            rule = f"--run {run_folder} must be a run or a new folder"
            raise InputError(f"{rule}, got {got}; restore that, or choose another folder")


# --- Private helpers ---


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

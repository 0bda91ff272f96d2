"""Sends a run to TensorBoard, in run/tensorboard, and to MLflow.

    with tracked(run, config, mlflow="sqlite:///mlflow.db") as track:
        track(event)                 # as it is logged

Both get the settings and the numbers of every step and validation. What MLflow did not get while
its server was away is in the log alone."""

import contextlib
import dataclasses
import importlib.util
import os
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Mapping, Union

from cpu3d.errors import InputError
from cpu3d.run.config_json import settings_by_name
from cpu3d.settings import RunConfig
from cpu3d.store_facts import StoreFacts
from cpu3d.util.atomic import write_json
from cpu3d.util.progress import say
from cpu3d.util.records import without_passwords
from memory_estimator.common.files import read_json
from memory_estimator.installed import how_to_install

SCALARS = {
    "step": ("loss", "learning_rate", "step_s", "wait_s", "voxels"),
    "validation": ("loss", "mean_dice"),
}
"""Kind of event -> its fields that are curves, besides the Dice of each region."""

# Settings of a run that are not sent: its store's folder, the hash of its split and `init` tell
# them.
DERIVED = {field.name for field in dataclasses.fields(StoreFacts)} - {"store", "split_hash"}
DERIVED.add("init_record")

Parameters = Dict[str, Union[str, float, bool]]
Track = Callable[[Mapping[str, Any]], None]


def require_mlflow() -> None:
    """Raise InputError if its client is not installed."""
    if importlib.util.find_spec("mlflow") is None:
        todo = f"{how_to_install('mlflow')}, or leave it out"
        raise InputError(f"mlflow must be installed for --mlflow, got none; {todo}")


@contextlib.contextmanager
def tracked(run: Path, config: RunConfig, mlflow: str = "") -> Iterator[Track]:
    """Yields a function that sends an event of the log. `mlflow` is the URI of a tracking server or
    database; "" is none. When MLflow fails, nothing more is sent to it, with one line on stderr;
    the training goes on."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.hparams.api import hparams_pb
    from tensorboard.plugins.scalar.summary import scalar_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    named = parameters(config)
    # tf.summary would keep some KiB of every step in the process.
    writer = EventFileWriter(str(run / "tensorboard"))

    def write(summary: Any, step: int) -> None:
        writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    write(hparams_pb(named, trial_id=run.resolve().name), 0)
    server = _Mlflow(mlflow)
    server.call(_open_run, run, named, mlflow)

    def track(event: Mapping[str, Any]) -> None:
        values = scalars(event)
        for name, value in values.items():
            write(scalar_pb(name, value), event["step"])
        server.call(_log_metrics, values, event["step"])

    try:
        yield track
    finally:
        with contextlib.suppress(Exception):  # of a full disk, which the log has met before
            writer.close()
        server.call(_end_run)


def scalars(event: Mapping[str, Any]) -> Dict[str, float]:
    """The curves' names and values in an event of the log; {} for one that has none."""
    group = event["event"]
    if group not in SCALARS:
        return {}
    named = {f"{group}/{name}": event[name] for name in SCALARS[group] if name in event}
    for region, value in event.get("dice", {}).items():
        named[f"{group}/dice/{region}"] = value
    return named


def parameters(config: RunConfig) -> Parameters:
    """The settings of a run by name; a tuple as its elements with spaces between. Empty ones are
    left out."""
    named: Parameters = {}
    for name, value in settings_by_name(config).items():
        if isinstance(value, (tuple, list)):
            value = " ".join(map(str, value))
        if name in DERIVED or value in ("", None):
            continue
        named[name] = value if isinstance(value, (bool, int, float)) else str(value)
    return named


# --- Private helpers ---


class _Mlflow:
    """Calls MLflow, until a call fails."""

    def __init__(self, uri: str):
        self._answers = bool(uri)
        # Short, as the training waits.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_EXPERIMENT_NAME", "cpu3d")

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        if not self._answers:
            return
        try:
            function(*arguments)
        except Exception as error:  # of the server or the client
            self._answers = False
            why = without_passwords(f"{type(error).__name__}: {error}".partition("\n")[0][:300])
            say(f"warning: nothing more is sent to MLflow: {why}; the training continues")


def _open_run(run: Path, named: Parameters, uri: str) -> None:
    """Open the run in MLflow of all attempts of a run: run/mlflow.json has its id."""
    import mlflow

    mlflow.set_tracking_uri(uri)
    noted = run / "mlflow.json"
    if noted.is_file():
        mlflow.start_run(read_json(noted)["run_id"])
        return
    opened = mlflow.start_run(run_name=run.resolve().name)
    mlflow.log_params(named)
    write_json(noted, {"run_id": opened.info.run_id})


def _log_metrics(values: Mapping[str, float], step: int) -> None:
    import mlflow

    mlflow.log_metrics(values, step=step)


def _end_run() -> None:
    import mlflow

    mlflow.end_run()

"""Sends a run to TensorBoard, in run/tensorboard, and to MLflow.

    with tracked(run, config, mlflow="sqlite:///mlflow.db") as track:
        track(event)                 # as it is logged

Both get the settings and the numbers of every step and validation. What MLflow did not get while
its server was away is in the log alone."""

import contextlib
import dataclasses
import importlib.util
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Union

from cpu3d.errors import InputError
from cpu3d.run.config_json import settings_by_name
from cpu3d.settings import RunConfig, StoreFacts
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
PATIENCE_S = 60.0  # how long the end of a training waits for MLflow

Track = Callable[[Mapping[str, Any]], None]


def require_mlflow() -> None:
    """Raise InputError if its client is not installed."""
    if importlib.util.find_spec("mlflow") is None:
        todo = f"{how_to_install('mlflow')}, or leave it out"
        raise InputError(f"mlflow must be installed for --mlflow, got none; {todo}")


@contextlib.contextmanager
def tracked(run: Path, config: RunConfig, mlflow: str = "") -> Iterator[Track]:
    """Yields a function that sends an event of the log. `mlflow` is the URI of a tracking server or
    database; "" is none. MLflow neither ends nor delays a training: a thread of its own sends, and
    stops with one line on stderr when MLflow fails."""
    sinks: List[Union[_TensorBoard, _Mlflow]] = [_TensorBoard(run, config)]
    if mlflow:
        sinks.append(_Mlflow(run, config, mlflow))

    def track(event: Mapping[str, Any]) -> None:
        for sink in sinks:
            sink.track(event)

    try:
        yield track
    finally:
        for sink in sinks:
            sink.close()


def scalars(event: Mapping[str, Any]) -> Dict[str, float]:
    """The curves' names and values in an event of the log; {} for one that has none."""
    group = event["event"]
    if group not in SCALARS:
        return {}
    named = {f"{group}/{name}": event[name] for name in SCALARS[group] if name in event}
    for region, value in event.get("dice", {}).items():
        named[f"{group}/dice/{region}"] = value
    return named


def parameters(config: RunConfig) -> Dict[str, Union[str, float, bool]]:
    """The settings of a run by name; a tuple as its elements with spaces between. Empty ones are
    left out."""
    named: Dict[str, Union[str, float, bool]] = {}
    for name, value in settings_by_name(config).items():
        if isinstance(value, (tuple, list)):
            value = " ".join(map(str, value))
        if name in DERIVED or value in ("", None):
            continue
        named[name] = value if isinstance(value, (bool, int, float)) else str(value)
    return named


# --- Private helpers ---


class _TensorBoard:
    def __init__(self, run: Path, config: RunConfig):
        import tensorflow as tf
        from tensorboard.plugins.hparams import api

        self._summary = tf.summary
        self._writer = tf.summary.create_file_writer(str(run / "tensorboard"))
        with self._writer.as_default(step=0):
            api.hparams(parameters(config), trial_id=run.resolve().name)

    def track(self, event: Mapping[str, Any]) -> None:
        with self._writer.as_default(step=event["step"]):
            for name, value in scalars(event).items():
                self._summary.scalar(name, value)

    def close(self) -> None:
        self._writer.close()


class _Mlflow:
    """A run in MLflow for all attempts of a run: run/mlflow.json has its id."""

    def __init__(self, run: Path, config: RunConfig, uri: str):
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")  # short, for the thread below
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        self._run = run
        self._config = config
        self._uri = uri
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def track(self, event: Mapping[str, Any]) -> None:
        if self._thread.is_alive():
            self._events.put(event)

    def close(self) -> None:
        self._events.put(None)
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            say(f"warning: MLflow did not get all within {PATIENCE_S:g} s of the end")

    def _work(self) -> None:
        try:
            self._send()
        except Exception as error:  # of the server or the client
            why = without_passwords(f"{type(error).__name__}: {error}".partition("\n")[0][:300])
            say(f"warning: nothing more is sent to MLflow: {why}; the training continues")

    def _send(self) -> None:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(self._uri)
        from mlflow.entities import Metric, Param

        noted = self._run / "mlflow.json"
        if noted.is_file():
            run_id = read_json(noted)["run_id"]
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "cpu3d")
            experiment = client.get_experiment_by_name(name)
            place = experiment.experiment_id if experiment else client.create_experiment(name)
            run_id = client.create_run(place, run_name=self._run.resolve().name).info.run_id
            params = [Param(name, str(value)) for name, value in parameters(self._config).items()]
            client.log_batch(run_id, params=params)
            write_json(noted, {"run_id": run_id})
        for event in iter(self._events.get, None):
            now = int(1000 * time.time())
            values = scalars(event).items()
            metrics = [Metric(name, float(value), now, event["step"]) for name, value in values]
            client.log_batch(run_id, metrics=metrics)
        client.set_terminated(run_id)

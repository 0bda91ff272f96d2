"""Sends a run to TensorBoard, in run/tensorboard, and to MLflow.

    with tracked(run, config, mlflow="sqlite:///mlflow.db") as track:
        track(event)                 # as it is logged

Both get the settings and the numbers of every step and validation, MLflow also the files in FILES.
A step that a restart repeats is sent again only if its loss or rate has changed."""

import contextlib
import dataclasses
import importlib.util
import logging
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Union

from cpu3d.errors import InputError
from cpu3d.run.config_json import settings_by_name
from cpu3d.run.log import FINISHED, iter_events, last_event
from cpu3d.settings import RunConfig, StoreFacts
from cpu3d.util.atomic import write_json
from cpu3d.util.progress import say
from cpu3d.util.records import VERSION, count, without_passwords
from memory_estimator.common.files import read_json
from memory_estimator.installed import how_to_install

SCALARS = {
    "step": ("loss", "learning_rate", "step_s", "wait_s", "voxels"),
    "validation": ("loss", "mean_dice"),
}
"""Kind of event -> its fields that are curves, besides the Dice of each region."""

# An event is sent again only if one of them changed.
SENT_BY = ("step/loss", "step/learning_rate", "validation/loss")
# Of the run's folder, as they are when an attempt ends.
FILES = ("config.json", "plan.json", "report.html")
# Settings of a run that are not sent: its store's folder, the hash of its split and `init` tell
# them.
DERIVED = {field.name for field in dataclasses.fields(StoreFacts)} - {"store", "split_hash"}
DERIVED.add("init_record")
PATIENCE_S = 60.0  # how long the end of a training waits for MLflow
MOST_METRICS = 1000  # the most that MLflow takes in one call
WAITING = 1000  # the most steps that wait for a slow server, less than 2 MB; the log has the others

Track = Callable[[Mapping[str, Any]], None]
Sent = Dict[str, Dict[int, float]]  # name in SENT_BY -> step -> the value that MLflow has


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
    """A run in MLflow for all attempts of a run: run/mlflow.json has its id, and nothing of the
    URI."""

    def __init__(self, run: Path, config: RunConfig, uri: str):
        variables = {
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # short, for the thread below
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_LOGGING_LEVEL": "WARNING",
        }
        for name, value in variables.items():
            os.environ.setdefault(name, value)
        self._run = run
        self._config = config
        self._uri = uri
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._left_out = 0  # steps that came while WAITING others waited
        self._given_up = False
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def track(self, event: Mapping[str, Any]) -> None:
        if self._given_up or not scalars(event):
            return
        if event["event"] == "step" and self._events.qsize() >= WAITING:
            # It is read from the log at the end. Validations are few: they always wait.
            self._left_out += 1
        else:
            self._events.put(event)

    def close(self) -> None:
        self._events.put(None)
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            why = f"it did not finish within {PATIENCE_S:g} s of the end"
            if self._left_out:
                why += f", after {count(self._left_out, 'step')} that it was too slow for"
            self._give_up(why)

    # --- In the thread ---

    def _give_up(self, why: str) -> None:
        if not self._given_up:
            self._given_up = True
            again = "the training continues; a later call with --mlflow sends the missing steps"
            say(f"warning: nothing more is sent to MLflow: {without_passwords(why)}; {again}")

    def _work(self) -> None:
        try:
            self._send_all()
        except Exception as error:  # of the server or the client
            self._give_up(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}")

    def _send_all(self) -> None:
        from mlflow.tracking import MlflowClient

        before = logging.root.manager.disable
        # For a new database its client prints a line for each migration of its tables.
        logging.disable(logging.INFO)
        try:
            client = MlflowClient(self._uri)
            run_id = self._open(client)
        finally:
            logging.disable(before)
        sent = self._catch_up(client, run_id)
        ended = False
        while not ended:
            events = [self._events.get()]
            while not self._events.empty():
                events.append(self._events.get())
            ended = events[-1] is None
            self._send(client, run_id, [event for event in events if event is not None], sent)
        if self._left_out:
            self._catch_up(client, run_id)
        for name in FILES:
            if (self._run / name).is_file():
                client.log_artifact(run_id, str(self._run / name))
        last = last_event(self._run)
        status = "FAILED"
        if last.get("reason") in FINISHED:
            status = "FINISHED"
        elif last.get("event") == "end":
            status = "KILLED"
        client.set_terminated(run_id, status)

    def _open(self, client: Any) -> str:
        """The id of the run in MLflow: that of earlier attempts, else a new one."""
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        of_another_server = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
        noted = self._run / "mlflow.json"
        run = None
        # Raised if there is no file, or a damaged one.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            try:
                run = client.get_run(read_json(noted)["run_id"])
                client.update_run(run.info.run_id, status="RUNNING")
            except MlflowException as error:
                run = None
                if error.error_code not in of_another_server:
                    raise
        if run is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "cpu3d")
            experiment = client.get_experiment_by_name(name)
            if experiment:
                place = experiment.experiment_id
            else:
                place = client.create_experiment(name)
            run_name = self._run.resolve().name
            run = client.create_run(place, run_name=run_name, tags={"cpu3d.version": VERSION})
            write_json(noted, {"run_id": run.info.run_id})
        # A parameter in MLflow cannot change; of an extended run config.json has the present ones.
        new = [
            Param(name, str(value))
            for name, value in parameters(self._config).items()
            if name not in run.data.params
        ]
        client.log_batch(run.info.run_id, params=new)
        return run.info.run_id

    def _catch_up(self, client: Any, run_id: str) -> Sent:
        """Send the numbers in the log that MLflow does not have: of steps that earlier attempts
        could not send, or that were left out. Returns what it has of the last steps, which may wait
        here too, and of later ones, which an earlier attempt did: a restart repeats them."""
        sent = {}
        for name in SENT_BY:
            history = client.get_metric_history(run_id, name)
            history = sorted(history, key=lambda metric: metric.timestamp)
            sent[name] = {metric.step: metric.value for metric in history}
        last = self._send(client, run_id, iter_events(self._run), sent)
        for name, known in sent.items():
            sent[name] = {step: value for step, value in known.items() if step > last - WAITING}
        return sent

    def _send(
        self, client: Any, run_id: str, events: Iterable[Mapping[str, Any]], sent: Sent
    ) -> int:
        """Send the numbers of events whose loss or rate is not in `sent`, which gets those of the
        last WAITING steps; returns the last step."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics: List[Metric] = []
        step = 0
        for event in events:
            named = scalars(event)
            step = event["step"]
            if any(sent[name].get(step) != named[name] for name in sent.keys() & named.keys()):
                # The loss last: if MLflow has it, it has all of the event.
                for name in reversed(list(named)):
                    metrics.append(Metric(name, float(named[name]), now, step))
            for name in sent.keys() & named.keys():
                sent[name][step] = named[name]
                sent[name].pop(step - WAITING, None)
            while len(metrics) >= MOST_METRICS:
                client.log_batch(run_id, metrics=metrics[:MOST_METRICS])
                del metrics[:MOST_METRICS]
        if metrics:
            client.log_batch(run_id, metrics=metrics)
        return step

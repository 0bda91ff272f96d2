"""The numbers that TensorBoard and MLflow get of a run: read back by their own programs."""

import sys
import types

import pytest
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.plugins.hparams import plugin_data_pb2

from tests.cpu3d.runs import start_without_network, steps_of


def test_tensorboard_has_the_settings_and_the_scores(phantom_store, tmp_path):
    start_without_network(phantom_store, tmp_path, epochs=2).run()
    read = EventMultiplexer().AddRunsFromDirectory(str(tmp_path))
    read.Reload()
    (run,) = read.Runs()
    content = read.SummaryMetadata(run, "_hparams_/session_start_info").plugin_data.content
    settings = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert settings.hparams["learning_rate"].number_value == 0.01
    assert settings.hparams["regions"].string_value == "WT TC ET"
    assert "region_codes" not in settings.hparams
    names = set(read.PluginRunToTagToContent("scalars")[run])
    assert " ".join(sorted(names)) == (
        "step/dice/ET step/dice/TC step/dice/WT step/learning_rate step/loss step/step_s "
        "step/voxels step/wait_s validation/dice/ET validation/dice/TC validation/dice/WT "
        "validation/loss validation/mean_dice"
    )
    assert [point.step for point in read.Tensors(run, "validation/dice/ET")] == [4, 8]


@pytest.mark.filterwarnings("ignore")  # of MLflow's own libraries
def test_mlflow_has_one_run_with_the_points_of_all_attempts(phantom_store, tmp_path, monkeypatch):
    reason = "needs mlflow: requirements-mlflow.txt"
    tracking_module = pytest.importorskip("mlflow.tracking", reason=reason)
    pytest.importorskip("sqlalchemy", reason=reason)
    monkeypatch.chdir(tmp_path)  # MLflow keeps files beside a database in ./mlruns
    folder = tmp_path / "run"
    uri = f"sqlite:///{tmp_path}/records.db"
    for epochs in (1, 2):
        start_without_network(phantom_store, folder, epochs=epochs).run(mlflow=uri)
    client = tracking_module.MlflowClient(uri)
    experiment = client.get_experiment_by_name("cpu3d").experiment_id
    (run,) = client.search_runs([experiment])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["unet.norm"] == "instance"
    history = client.get_metric_history(run.info.run_id, "step/loss")
    logged = {event["step"]: event["loss"] for event in steps_of(folder)}
    assert {metric.step: metric.value for metric in history} == logged
    assert "records.db" not in (folder / "mlflow.json").read_text()


def test_a_server_that_fails_is_one_warning_without_its_password(
    phantom_store, tmp_path, monkeypatch, capsys
):
    def refuse(uri):
        raise ConnectionError(f"no way to {uri}")

    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(set_tracking_uri=refuse))
    fit = start_without_network(phantom_store, tmp_path, epochs=2)
    fit.run(mlflow="http://someone:s3cret@localhost:5000")
    printed = capsys.readouterr().err
    assert printed.count("MLflow") == 1
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"s3cret" not in printed.encode() + kept

"""What an answer takes is told once its image is read: memory, time, and whether one pass fits."""

import dataclasses
import subprocess
import sys

import pytest

from cpu3d.data.region import whole
from cpu3d.errors import DoesNotFitError, InputError
from cpu3d.inference import predict
from cpu3d.inference.forecast import Forecast, Forecaster
from cpu3d.inference.postprocessing.rules import PostProcessing, Rule
from cpu3d.inference.runs import Inference
from cpu3d.run.config_json import load_config, save_config
from tests.cpu3d.conftest import FakePredictor, write_case
from tests.cpu3d.runs import HOST, run_command, with_free

SIZE = (320, 320, 320)  # nothing of it is allocated


@pytest.fixture
def config(tiny_run):
    """Of a run on whole volumes of up to 16 x 16 x 16 voxels, two channels, three regions."""
    config = load_config(tiny_run)
    unet = dataclasses.replace(config.unet, channels=2)
    config = dataclasses.replace(config, unet=unet)
    save_config(config, tiny_run)
    return config


@pytest.fixture
def record(tiny_store):
    case = tiny_store.cases("train")[0]
    return dataclasses.replace(case, shape=SIZE, box=whole(SIZE), resampled_from=None)


def forecaster(*configs, free_bytes=64 * 2**30, written_bytes=6, **how):
    return Forecaster(configs, Inference(**how), HOST, free_bytes, written_bytes)


def test_runs_keep_their_answers_and_take_turns_with_their_networks(config, record):
    two_runs = forecaster(config, config)
    one = forecaster(config).forecast(record)
    two = two_runs.forecast(record)
    voxels = 320**3
    assert two.grid == SIZE
    assert two.peak_bytes - one.peak_bytes == pytest.approx(4 * 3 * voxels, rel=0.2)
    writing_s = 1e-7 * voxels
    assert two.seconds - writing_s == pytest.approx(2 * (one.seconds - writing_s))
    single_s = forecaster(config, flips=False).forecast(record).seconds - writing_s
    assert one.seconds - writing_s == pytest.approx(8 * single_s)
    # Of 16 voxels without overlap 20 windows cover an axis, and of half overlap 39.
    apart, usual = (
        forecaster(config, window=(16, 16, 16), **how).forecast(record).seconds - writing_s
        for how in ({"overlap": 0}, {})
    )
    assert usual / apart == pytest.approx((39 / 20) ** 3)
    # Beside the answers two maps more of three regions, 24 bytes a voxel, or what is written.
    written = forecaster(config, written_bytes=60).forecast(record)
    assert written.peak_bytes - one.peak_bytes == pytest.approx((60 - 24) * voxels, rel=0.2)
    # The networks keep two maps of 16 channels at least.
    small = dataclasses.replace(record, shape=(16, 16, 16), box=whole((16, 16, 16)))
    assert two_runs.forecast(small) == two_runs.forecast(small)
    assert (
        two_runs.forecast(small).peak_bytes - forecaster(config).forecast(small).peak_bytes
        > 2 * 16 * 2 * voxels
    )


def test_what_does_not_fit_is_answered_in_windows_or_refused(config, record):
    alone = forecaster(config).forecast(record)
    tight = forecaster(config, free_bytes=1.09 * alone.peak_bytes)  # which leaves no tenth of it
    little = tight.forecast(record)
    assert (alone.in_windows, little.in_windows) == (False, True)
    assert little.peak_bytes < alone.peak_bytes / 2
    assert little.seconds > alone.seconds
    assert str(little).startswith("320 x 320 x 320 voxels, in windows, ")
    assert not forecaster(config, free_bytes=1.11 * alone.peak_bytes).forecast(record).in_windows
    with pytest.raises(DoesNotFitError, match=rf"case {record.case_id} must leave"):
        forecaster(config, free_bytes=2**29).forecast(record)


@pytest.mark.usefixtures("needs_native")
def test_a_dry_run_tells_each_image_and_writes_nothing_and_a_run_answers_what_fits(
    tiny_run, config, tmp_path, monkeypatch, capsys
):
    fake = FakePredictor(None, config.codes_by_region, config.label_names, config=config)
    monkeypatch.setattr(predict, "trained_predictors", lambda runs, *_: [fake])
    (image,) = write_case(tmp_path, "a", seed=1).images
    ask = (predict, "--run", tiny_run, "--image", image, "--out", tmp_path / "out")
    assert run_command(*ask, "--dry-run") == 0
    assert "a: 16 x 16 x 16 voxels, " in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert run_command(*ask) == run_command(*ask, "--dry-run") == 0
    assert capsys.readouterr().out.count("a: 16 x") == 1, "of an answer that is kept, too"
    monkeypatch.setattr("cpu3d.inference.forecast.read_host", lambda: with_free(2**20))
    with pytest.raises(DoesNotFitError, match="case a"):
        run_command(*ask, "--overwrite")
    with monkeypatch.context() as patch:
        slid = Forecast((8, 8, 8), True, 1, 1.0, 2)
        patch.setattr(Forecaster, "forecast", lambda *_: slid)
        assert run_command(*ask, "--overwrite") == 0
    assert "in windows of" in (tmp_path / "out/a.json").read_text()
    held = []  # of each voxel of an answer while it is written
    monkeypatch.setattr(
        predict, "postprocessing_together", lambda _: PostProcessing({"WT": Rule()})
    )
    monkeypatch.setattr(predict, "forecaster_of", lambda *about: held.append(about[-1]))
    for words in ([], ["--raw"], ["--probabilities"]):
        with pytest.raises(InputError, match="--dry-run must come with runs"):  # none foresees it
            run_command(*ask, "--dry-run", *words)
    assert held == [10, 6, 20]


SCRIPT = """
import dataclasses, sys
from pathlib import Path
import numpy as np
from cpu3d.host.apply import set_up
set_up()
from cpu3d.data.region import whole
from cpu3d.data.store import open_store
from cpu3d.host.memory import peak_rss_bytes
from cpu3d.inference.forecast import forecaster_of
from cpu3d.inference.predictor import AS_TRAINED, Predictor
from cpu3d.run.config_json import load_config
from models.unet3d import build_unet3d

config = load_config(Path(sys.argv[1]))
shape = (144, 160, 128)
case = open_store(config.store).cases("train")[0]
record = dataclasses.replace(case, shape=shape, box=whole(shape))
predictor = Predictor(config, build_unet3d(config.unet, batch_size=1).get_weights(), AS_TRAINED)
image = np.ones((*shape, 2), np.int16)
predicted = forecaster_of([predictor], AS_TRAINED, 6).forecast(record).peak_bytes
before = peak_rss_bytes()
predictor.probabilities(image, record)[..., 0]
print(predicted - before, peak_rss_bytes() - before)
"""


@pytest.mark.usefixtures("needs_native", "config")
def test_the_peak_is_the_measured_one(tiny_run):
    command = [sys.executable, "-c", SCRIPT, str(tiny_run)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    predicted, measured = map(int, done.stdout.split())
    assert predicted == pytest.approx(measured, rel=0.25)

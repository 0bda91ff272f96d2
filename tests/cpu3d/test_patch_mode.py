"""Training on patches: the same run but for what a step sees; sizes that are refused; a window for predicting."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.config import load_config
from cpu3d.data.extent import grid_size
from cpu3d.data.folds import with_fold
from cpu3d.data.patches import patch_at
from cpu3d.data.source import patch_sampling
from cpu3d.errors import DoesNotFitError, InputError
from cpu3d.host.gpu import Gpu
from cpu3d.inference import Predictor, load_predictor, over_mirror_images
from cpu3d.inference_options import Inference
from cpu3d.learner import Learner
from cpu3d.patch_plan import patches_per_case
from cpu3d.run_log import read_events
from cpu3d.train import resolve
from memory_estimator.gpu import gpu_bytes
from memory_estimator.host import read_host
from memory_estimator.job import Job
from tests.cpu3d.runs import SMALL, assert_cut_and_continued_is_uninterrupted, start, weights

PATCH = {"mode": "patch", "patch": [16, 16, 16]}
CARD = Gpu(index=0, name="made up", memory_bytes=2**34, free_bytes=2**34, compute_capability=(8, 0))


def resolved(store, folder, **settings):
    return resolve(store, folder, read_host(), {**SMALL, **settings}, None)


def test_a_patch_run_learns_validates_on_whole_volumes_and_predicts_by_its_window(phantom_store, tmp_path):
    fit = start(phantom_store, tmp_path, epochs=2, batch=2, **PATCH)
    grid = grid_size(phantom_store, extent="brain", multiple=4)
    assert fit.config.grid == (16, 16, 16)
    assert fit.config.patches_per_case == round(np.prod(grid) / 16**3)
    assert fit.steps_per_epoch == 4 * fit.config.patches_per_case // 2
    assert "patches: 16 x 16 x 16 of" in "\n".join(fit.plan())
    fit.run()
    events = read_events(tmp_path)
    losses = [event["loss"] for event in events if event["event"] == "step"]
    assert np.mean(losses[-4:]) < 0.95 * np.mean(losses[:4])
    assert [event["cases"] for event in events if event["event"] == "validation"] == [1, 1]

    predictor = load_predictor(tmp_path)
    assert predictor.window == (16, 16, 16)
    record = phantom_store.cases("test")[0]
    answers = predictor.probabilities(phantom_store.image(record.case_id), record)
    assert answers.shape == (*record.shape, 3)
    inside = record.box.slices(record.shape)
    assert np.all(answers[inside] > 0)
    answers[inside] = 0
    assert not answers.any()


def test_validation_scores_what_the_window_predicts(phantom_store, tmp_path):
    fit = start(phantom_store, tmp_path, steps=3, validate_every=1, **PATCH)
    fit.run()
    record = phantom_store.cases("val")[0]
    probabilities = load_predictor(tmp_path).probabilities(phantom_store.image(record.case_id), record)
    truth = np.asarray(phantom_store.label(record.case_id))
    told = [event for event in read_events(tmp_path) if event["event"] == "validation"][-1]["dice"]
    for index, (name, codes) in enumerate(phantom_store.manifest.regions.items()):
        found, true = probabilities[..., index] > 0.5, np.isin(truth, codes)
        # Not to the bit: tiles begin at the case's own box there, at the box common to all cases in a validation.
        assert told[name] == pytest.approx(2 * (found & true).sum() / (found.sum() + true.sum()), abs=0.02)


def test_a_patch_run_that_is_cut_ends_with_the_uninterrupted_one_s_weights(phantom_store, tmp_path, monkeypatch):
    assert_cut_and_continued_is_uninterrupted(
        phantom_store, tmp_path, monkeypatch, steps=12, patches_per_case=1, **PATCH
    )


def test_a_step_s_patches_are_those_of_the_patch_dataset(phantom_store, tmp_path):
    fit = start(phantom_store, tmp_path, no_augment=True, seed=3, **PATCH)
    sampling = patch_sampling(phantom_store, (16, 16, 16), sampling="foreground", multiple=4, seed=3)
    records = phantom_store.cases("train")
    for position, (image, target) in enumerate(fit.feeds.training(0, 4)):
        sample = patch_at(position, sampling, records)
        record = records[sample.index]
        assert fit.feeds.case_ids(position) == [record.case_id]
        label = np.asarray(phantom_store.label(record.case_id))[sample.region.slices(record.shape)]
        np.testing.assert_array_equal(target[0, ..., 0], np.isin(label, (1, 2, 3)))
        assert image.shape == (1, 16, 16, 16, 4)


def test_whole_and_patch_runs_share_everything_else(phantom_store, tmp_path):
    whole, patch = resolved(phantom_store, tmp_path), resolved(phantom_store, tmp_path, **PATCH)
    changed = {name for name, value in vars(whole).items() if value != getattr(patch, name)}
    assert changed == {"mode", "grid", "patches_per_case"}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"patch": [16, 16, 64]}, "--patch 16 16 64 must lie within the volumes of 24 36 32; 16 16 32 does"),
        ({"patch": [16, 18, 16]}, r"--patch 16 18 16 must be divisible by 4, .* 16 20 16 is"),
        ({"patch": [4, 16, 16]}, "at least 8 along each axis; 8 16 16 is"),
        ({"gpu_memory": "16"}, "--gpu-memory must be a number with its unit, got '16'"),
        ({"resolution": 0.5}, "resolution must be 1 with --mode patch"),
        ({"device": "gpu:0"}, "device must be a GPU of this host, got gpu:0 with none found"),
        ({"device": "tpu"}, "device must be"),
    ],
)
def test_what_no_patch_run_can_be_is_refused(phantom_store, tmp_path, settings, told):
    with pytest.raises(InputError, match=told):
        resolved(phantom_store, tmp_path, mode="patch", **settings)


def test_a_card_too_small_for_any_patch_is_refused_with_what_the_least_takes(phantom_store, tmp_path):
    with pytest.raises(DoesNotFitError, match=r"gpu_memory must hold a patch of at least .* takes .*, got 102 MiB"):
        resolved(phantom_store, tmp_path, mode="patch", gpu_memory="0.1GiB")


def test_a_patch_beside_the_brain_breaks_nothing(phantom_store, tmp_path):
    learner = Learner(resolved(phantom_store, tmp_path, **PATCH, optimizer="sgd"))
    image, target = (tf.zeros((1, 16, 16, 16, channels), dtype) for channels, dtype in ((4, "float32"), (3, "uint8")))
    for _ in range(3):
        loss, _ = learner.step(iter([(image, target)]), 0.1)
        assert np.isfinite(loss)
    assert all(np.isfinite(array).all() for array in learner.weights().values())


def test_a_patch_without_its_mode_is_refused(phantom_store, tmp_path):
    with pytest.raises(InputError, match="--patch must come with --mode patch, got mode whole"):
        resolved(phantom_store, tmp_path, patch=[16, 16, 16])


def test_the_patch_of_a_card_is_the_largest_that_fits_it(phantom_store, tmp_path):
    config = resolved(phantom_store, tmp_path, mode="patch", gpu_memory="1.02GiB", dtype="float32")
    grid = grid_size(phantom_store, extent="brain", multiple=4)
    assert all(n <= most and n % 4 == 0 for n, most in zip(config.grid, grid))
    assert gpu_bytes(Job(config.unet, config.grid, engine="stock")) <= 1.02 * 2**30
    assert config.patches_per_case == patches_per_case(grid, config.grid)


def test_without_a_size_a_patch_is_the_usual_one_within_the_volume(phantom_store, tmp_path):
    assert resolved(phantom_store, tmp_path, mode="patch").grid == grid_size(phantom_store, extent="brain", multiple=4)


def test_a_card_sets_device_dtype_and_patch(phantom_store, tmp_path):
    settings = {**SMALL, "mode": "patch", "dtype": "auto", "device": "gpu:0"}
    config = resolve(phantom_store, tmp_path, read_host(), settings, None, (CARD,))
    assert (config.device, config.unet.dtype) == ("gpu:0", "bfloat16")
    assert config.grid == grid_size(phantom_store, extent="brain", multiple=4)  # a small volume fits a large card
    older = dataclasses.replace(CARD, compute_capability=(7, 5))
    assert resolve(phantom_store, tmp_path, read_host(), settings, None, (older,)).unet.dtype == "float32"
    with pytest.raises(InputError, match="engine must be auto or stock on gpu:0, got itex"):
        resolve(phantom_store, tmp_path, read_host(), {**settings, "engine": "itex"}, None, (CARD,))


def test_a_patch_run_continues_without_its_options_repeated(phantom_store, tmp_path):
    fit = start(phantom_store, tmp_path, steps=1, **PATCH)
    assert resolve(phantom_store, tmp_path, read_host(), {}, None) == load_config(tmp_path) == fit.config
    with pytest.raises(InputError, match="grid must stay as the run was started"):
        resolve(phantom_store, tmp_path, read_host(), {"patch": [8, 16, 16]}, None)


def test_steps_set_the_length_of_run_and_schedule(phantom_store, tmp_path):
    fit = start(phantom_store, tmp_path, steps=5, **PATCH)
    fit.run()
    rates = [event["learning_rate"] for event in read_events(tmp_path) if event["event"] == "step"]
    assert len(rates) == 5
    assert rates[-1] < rates[2]


def test_a_fold_validates_on_its_own_part(phantom_store, tmp_path):
    store = with_fold(phantom_store, "2/5")
    config = resolved(phantom_store, tmp_path, fold="2/5")
    assert config.fold == "2/5"
    assert config.split_hash == phantom_store.manifest.split_hash
    assert len(store.cases("train")) == 4
    assert len(store.cases("val")) == 1


@pytest.fixture
def networks(phantom_store, tmp_path):
    """A whole-volume run's predictor in any way of inference, from untrained weights."""
    config = resolved(phantom_store, tmp_path)
    from models.unet3d import build_unet3d

    arrays = [v.numpy() for v in build_unet3d(config.unet, (16, 16, 16), 1).weights]
    return lambda **how: Predictor(config, arrays, Inference(**how))


def test_a_window_as_large_as_the_volume_is_one_pass(phantom_store, networks):
    record = phantom_store.cases("test")[0]
    image = phantom_store.image(record.case_id)
    one_pass = networks()
    window = networks(window=one_pass.config.grid)
    np.testing.assert_array_equal(window.probabilities(image, record), one_pass.probabilities(image, record))


def test_flips_are_the_mean_over_mirror_images(phantom_store, networks):
    record = phantom_store.cases("test")[0]
    image = phantom_store.image(record.case_id)
    plain, flipped = (networks(flips=flips).probabilities(image, record) for flips in (False, True))
    assert np.abs(plain - flipped).max() > 1e-3


def test_the_mean_over_mirror_images_undoes_each_mirror():
    volume = tf.constant(np.random.default_rng(0).standard_normal((1, 3, 4, 5, 2)), tf.float32)
    np.testing.assert_allclose(over_mirror_images(lambda x: x.numpy()[0], volume), volume[0], rtol=1e-6)
    calls = []
    over_mirror_images(lambda x: calls.append(x.numpy().tobytes()) or x.numpy()[0], volume)
    assert len(set(calls)) == 8


def test_a_window_that_the_network_cannot_take_is_refused(networks):
    with pytest.raises(InputError, match=r"--window \(16, 18, 16\) must be divisible by 4"):
        networks(window=(16, 18, 16))
    with pytest.raises(InputError, match=r"--overlap must be in \[0, 1\), got 1"):
        networks(overlap=1)


def test_one_pass_takes_a_patch_run_s_network_over_the_whole_volume(phantom_store, tmp_path):
    start(phantom_store, tmp_path, steps=2, **PATCH).run()
    assert weights(tmp_path)
    record = phantom_store.cases("test")[0]
    predictor = load_predictor(tmp_path, inference=Inference(one_pass=True))
    assert predictor.window is None
    size = predictor.region(record).size
    assert all(n % 4 == 0 and n >= have for n, have in zip(size, record.box.size))
    assert predictor.probabilities(phantom_store.image(record.case_id), record).shape == (*record.shape, 3)

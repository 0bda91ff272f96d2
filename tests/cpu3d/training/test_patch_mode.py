"""Training on patches: the same run but for what a step sees; sizes that are refused; a window for predicting."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from cpu3d.config import load_config
from cpu3d.data.region import Region, crop, grid_size, whole
from cpu3d.data.sampling import patch_at
from cpu3d.data.source import patch_sampling
from cpu3d.data.splits import with_fold
from cpu3d.errors import DoesNotFitError, InputError
from cpu3d.host.gpu import Gpu
from cpu3d.inference.options import Inference
from cpu3d.inference.predictor import Predictor, load_predictor, over_mirror_images
from cpu3d.patch_plan import check_patch, patches_per_case, usual_patch
from cpu3d.resolve import resolve
from cpu3d.training.fit import Fit
from cpu3d.training.learner import Learner
from cpu3d.training.plan_lines import plan_lines
from cpu3d.training.run_log import read_events
from cpu3d.training.train import train
from memory_estimator.gpu import gpu_bytes, patch_shapes
from memory_estimator.host import read_host
from memory_estimator.job import Job
from models.config import UNetConfig
from models.unet3d import build_unet3d
from tests.cpu3d.runs import SMALL, assert_cut_and_continued_is_uninterrupted, start

PATCH = {"mode": "patch", "patch": [16, 16, 16]}
CARD = Gpu(index=0, name="made up", memory_bytes=2**34, free_bytes=2**34, compute_capability=(8, 0))


def resolved(store, folder, **settings):
    return resolve(store, folder, read_host(), {**SMALL, **settings}, None)


@pytest.fixture(scope="module")
def learnt(phantom_store, tmp_path_factory):
    """The folder of a run of 10 steps of two patches."""
    folder = tmp_path_factory.mktemp("learnt")
    start(phantom_store, folder, steps=10, batch=2, **PATCH).run()
    return folder


def test_a_patch_run_learns_in_its_steps_and_validates_on_whole_volumes(phantom_store, learnt):
    events = read_events(learnt)
    steps = [event for event in events if event["event"] == "step"]
    assert len(steps) == 10
    assert np.mean([step["loss"] for step in steps[-4:]]) < 0.95 * np.mean([step["loss"] for step in steps[:4]])
    assert steps[-1]["learning_rate"] < steps[2]["learning_rate"], "the decay spans the steps"
    assert [event["cases"] for event in events if event["event"] == "validation"] == [1]


def test_a_patch_run_sees_as_much_in_an_epoch_as_one_of_whole_volumes(phantom_store, tmp_path):
    fit = start(phantom_store, tmp_path, batch=2, rotation_deg=5.0, **PATCH)
    grid = grid_size(phantom_store, extent="brain", multiple=4)
    assert fit.config.grid == (16, 16, 16)
    assert fit.config.patches_per_case == round(np.prod(grid) / 16**3)
    assert fit.steps_per_epoch == 4 * fit.config.patches_per_case // 2
    plan = "\n".join(plan_lines(fit))
    assert "patches: 16 x 16 x 16 of" in plan
    assert "rotation and scaling: computed in the step" in plan


def test_a_patch_run_predicts_by_its_window_and_within_the_brain_alone(phantom_store, learnt):
    predictor = load_predictor(learnt)
    assert predictor.window == (16, 16, 16)
    record = phantom_store.cases("test")[0]
    answers = predictor.probabilities(phantom_store.image(record.case_id), record)
    assert answers.shape == (*record.shape, 3)
    inside = record.box.slices(record.shape)
    assert np.all(answers[inside] > 0)
    answers[inside] = 0
    assert not answers.any()


def test_validation_scores_what_the_window_predicts(phantom_store, learnt):
    record = phantom_store.cases("val")[0]
    probabilities = load_predictor(learnt).probabilities(phantom_store.image(record.case_id), record)
    truth = np.asarray(phantom_store.label(record.case_id))
    told = [event for event in read_events(learnt) if event["event"] == "validation"][-1]["dice"]
    for index, (name, codes) in enumerate(phantom_store.manifest.regions.items()):
        found, true = probabilities[..., index] > 0.5, np.isin(truth, codes)
        # Not to the bit: tiles begin at the case's own box there, at the box common to all cases in a validation.
        assert told[name] == pytest.approx(2 * (found & true).sum() / (found.sum() + true.sum()), abs=0.02)


def test_a_patch_run_that_is_cut_ends_with_the_uninterrupted_one_s_weights(phantom_store, tmp_path, monkeypatch):
    assert_cut_and_continued_is_uninterrupted(
        phantom_store, tmp_path, monkeypatch, steps=12, patches_per_case=1, batch=2, micro_batch=1, rotation_deg=10.0,
        validations=1, depth=2, **PATCH,
    )  # fmt: skip


def test_a_run_at_half_the_resolution_goes_on_and_predicts_on_the_full_grid(phantom_store, tmp_path, monkeypatch):
    assert_cut_and_continued_is_uninterrupted(
        phantom_store, tmp_path, monkeypatch, steps=3, done=2, resolution=0.5, validations=1, depth=2
    )
    predictor = load_predictor(tmp_path / "cut")
    extent = grid_size(phantom_store, extent="brain", multiple=1)
    assert predictor.config.grid == tuple(-(-n // 4) * 2 for n in extent)
    record = phantom_store.cases("test")[0]
    answers = predictor.probabilities(phantom_store.image(record.case_id), record)
    assert answers.shape == (*record.shape, 3)
    assert np.all(answers[record.box.slices(record.shape)] > 0)
    assert answers.max() <= 1


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
        ({"patch": [16, 16, 64]}, "--patch 16 16 64 must lie within the volumes of 24 36 32; give 16 16 32, or --mode"),
        ({"patch": [16, 18, 16]}, r"^--patch 16 18 16 must be divisible by 4, .*; give 16 20 16$"),
        ({"patch": [4, 16, 16]}, "at least 8 8 8; give 8 16 16$"),
        (
            {"patch": [10, 10, 90]},
            r"^--patch 10 10 90 must lie within .* and be divisible by 4, .*; give 12 12 32, [^\n]*$",
        ),
        ({"patch": [16, 0, 16]}, r"--patch must be three positive numbers, got \(16, 0, 16\)"),
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
    with pytest.raises(DoesNotFitError, match=r"^--gpu-memory must hold a patch of at least .* takes .*, got 102 MiB"):
        resolved(phantom_store, tmp_path, mode="patch", gpu_memory="0.1GiB")
    full, silent = (dataclasses.replace(CARD, free_bytes=free) for free in (2**20, None))
    settings = {**SMALL, "mode": "patch", "device": "gpu:0"}
    with pytest.raises(DoesNotFitError, match=r"^gpu:0, with 1 MiB free, must hold a patch of at least 8 x 8 x 8,"):
        resolve(phantom_store, tmp_path, read_host(), settings, None, (full,))
    with pytest.raises(InputError, match=r"the free memory of gpu:0 must be known, .* give --gpu-memory or --patch"):
        resolve(phantom_store, tmp_path, read_host(), settings, None, (silent,))


def test_a_patch_beside_the_brain_breaks_nothing(phantom_store, tmp_path):
    learner = Learner(resolved(phantom_store, tmp_path, **PATCH, optimizer="sgd"))
    image, target = (tf.zeros((1, 16, 16, 16, channels), dtype) for channels, dtype in ((4, "float32"), (3, "uint8")))
    for _ in range(3):
        assert np.isfinite(learner.step(iter([(image, target)]), 0.1).loss)
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
    assert usual_patch((240, 240, 160), 16) == (128, 128, 128)
    assert usual_patch((512, 512, 128), 128) == (256, 256, 128)  # two voxels at the bottom of 8 levels


@given(
    sides=st.tuples(*[st.integers(1, 12)] * 3), depth=st.integers(2, 8),
    patch=st.tuples(*[st.integers(1, 800)] * 3),
)  # fmt: skip
def test_what_is_offered_instead_of_a_patch_is_one_that_is_taken(sides, depth, patch):
    unet = UNetConfig(depth=depth)
    grid = tuple(unet.divisor * n for n in sides)
    for shape in (*patch_shapes(grid, unet.divisor), usual_patch(grid, unet.divisor)):
        check_patch(shape, grid, unet)  # what a card is given, thin volumes whole, is what may be asked for
    try:
        check_patch(patch, grid, unet)
    except InputError as error:
        (problem,) = error.problems
        offered = problem.rpartition("; give ")[2].partition(",")[0]
        check_patch(tuple(map(int, offered.split())), grid, unet)


def test_a_batch_is_at_most_an_epoch_s_patches(phantom_store, tmp_path):
    assert resolved(phantom_store, tmp_path, **PATCH, batch=28).patches_per_case == 7
    with pytest.raises(
        InputError, match="batch must be at most the 28 patches of an epoch, got 29; lower it, or raise"
    ):
        resolved(phantom_store, tmp_path, **PATCH, batch=29)
    assert resolved(phantom_store, tmp_path, **PATCH, batch=29, patches_per_case=8).batch == 29


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
    with pytest.raises(InputError, match=r"^mode must stay as the run was started, got 'whole' for 'patch'; [^\n]*$"):
        resolve(phantom_store, tmp_path, read_host(), {"mode": "whole"}, None)


def test_a_fold_trains_and_validates_on_its_own_cases(phantom_store, tmp_path, monkeypatch):
    own = phantom_store.manifest.split["val"]
    fold = next(
        f"{part}/5" for part in range(1, 6) if with_fold(phantom_store, f"{part}/5").manifest.split["val"] != own
    )
    split, run, trained = with_fold(phantom_store, fold).manifest.split, Fit.run, []
    monkeypatch.setattr(Fit, "run", lambda fit, *given: trained.append(fit) or run(fit, *given))
    settings = {**SMALL, **PATCH, "depth": 2, "steps": 1, "batch": 4, "patches_per_case": 1, "fold": fold}
    config = train(phantom_store.folder, tmp_path, settings=settings)
    assert (config.fold, config.split_hash) == (fold, phantom_store.manifest.split_hash)
    (step,) = [event for event in read_events(tmp_path) if event["event"] == "step"]
    assert sorted(step["case_id"].split()) == sorted(split["train"]), "an epoch in one step"
    ((_, target),) = trained[0].feeds.validation()
    label = np.asarray(phantom_store.label(split["val"][0]))
    assert target.numpy()[..., 0].sum() == np.isin(label, (1, 2, 3)).sum()
    assert target.numpy()[..., 0].sum() != np.isin(phantom_store.label(own[0]), (1, 2, 3)).sum()


@pytest.fixture
def networks(phantom_store, tmp_path):
    """A whole-volume run's predictor in any way of inference, from untrained weights."""
    config = resolved(phantom_store, tmp_path)
    arrays = [v.numpy() for v in build_unet3d(config.unet, (16, 16, 16), 1).weights]
    return lambda **how: Predictor(config, arrays, Inference(**how))


def test_a_window_as_large_as_the_volume_is_one_pass(phantom_store, networks):
    record = phantom_store.cases("test")[0]
    image = phantom_store.image(record.case_id)
    one_pass = networks()
    window = networks(window=one_pass.config.grid)
    np.testing.assert_array_equal(window.probabilities(image, record), one_pass.probabilities(image, record))


def test_an_image_smaller_than_the_window_is_predicted_as_if_zeros_were_around_it(phantom_store, networks):
    record = phantom_store.cases("test")[0]
    middle = Region(tuple(a + n // 2 - want // 2 for a, n, want in zip(*_box(record), (12, 20, 10))), (12, 20, 10))
    image = crop(np.asarray(phantom_store.image(record.case_id)), middle)
    small = dataclasses.replace(record, shape=image.shape[:3], box=whole(image.shape[:3]))
    predictor = networks(window=(16, 16, 16))
    region = predictor.region(small)
    assert region.size == (16, 20, 16)
    answers = predictor.probabilities(image, small)
    assert answers.shape == (12, 20, 10, 3)
    padded = dataclasses.replace(record, shape=region.size, box=whole(region.size))
    around = predictor.probabilities(crop(image, region), padded)
    np.testing.assert_array_equal(answers, crop(around, Region(tuple(-n for n in region.start), image.shape[:3])))


def _box(record):
    return record.box.start, record.box.size


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


def test_memory_that_runs_out_names_a_smaller_way(phantom_store, networks, monkeypatch):
    record = phantom_store.cases("test")[0]

    def full(*_):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    for how, told in (({}, "slide a --window X Y Z"), ({"window": (16, 16, 16)}, "a --window smaller than 16 16 16")):
        predictor = networks(**how)
        monkeypatch.setattr(predictor, "_network", lambda size: full)
        with pytest.raises(DoesNotFitError, match=f"the prediction of case {record.case_id}, got out of.*{told}"):
            predictor.probabilities(phantom_store.image(record.case_id), record)


def test_a_window_that_the_network_cannot_take_is_refused(networks):
    with pytest.raises(InputError, match=r"--window \(16, 18, 16\) must be divisible by 4"):
        networks(window=(16, 18, 16))
    with pytest.raises(InputError, match=r"--overlap must be in \[0, 1\), got 1"):
        networks(overlap=1)


def test_mirror_images_are_refused_for_a_network_that_has_never_seen_any(phantom_store, tmp_path):
    config = resolved(phantom_store, tmp_path, flip=False)
    with pytest.raises(InputError, match="--flips must come with a run that was trained on mirror images"):
        Predictor(config, [], Inference(flips=True))


def test_one_pass_takes_a_patch_run_s_network_over_the_whole_volume(phantom_store, learnt):
    record = phantom_store.cases("test")[0]
    predictor = load_predictor(learnt, inference=Inference(one_pass=True))
    assert predictor.window is None
    size = predictor.region(record).size
    assert all(n % 4 == 0 and n >= have for n, have in zip(size, record.box.size))
    assert predictor.probabilities(phantom_store.image(record.case_id), record).shape == (*record.shape, 3)

"""The scores of a validation, and its memory, which is that of the estimator."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.data.fold import with_fold
from cpu3d.host.memory import allocator_peak_bytes
from cpu3d.inference.evaluate import evaluate_split
from cpu3d.inference.predictor import load_predictor
from cpu3d.inference.runs import Inference
from cpu3d.run.log import read_events
from cpu3d.settings import RunConfig
from cpu3d.training.learner import Learner
from cpu3d.training.validation import validate
from memory_estimator.job import Job
from memory_estimator.step.timeline import Program, timeline
from memory_estimator.step.training_step import training_step, validation_pass
from models.config import UNetConfig
from models.losses import DEFAULT_LOSS, LOSSES
from models.native.shared import IGNORED
from models.supervision import supervise
from tests.cpu3d.runs import start

SMALL = (16, 16, 12)
SHAPE = (48, 48, 44)


def made_data(config, ignored=0.0):
    """A held-out volume of random numbers, which is there already; a share of its voxels is not
    annotated."""
    rng = tf.random.Generator.from_seed(0)
    target = rng.uniform((1, *config.grid, config.unet.outputs)) < np.linspace(
        0, 0.5, config.unet.outputs
    )
    is_ignored = rng.uniform((1, *config.grid, 1)) < ignored
    target = tf.where(is_ignored, IGNORED, tf.cast(target, tf.int32))
    volume = rng.normal((1, *config.grid, config.unet.channels)), tf.cast(target, tf.uint8)
    return SimpleNamespace(
        config=config,
        held_out=1,
        held_out_share=lambda: (0,),
        validation=lambda: [volume],
        inside=lambda case: tuple(slice(2, n - 1) for n in config.grid),
    )


def learner(grid, **network):
    unet = UNetConfig(**network)
    codes = range(1, unet.outputs + 1)
    regions = {str(code): tuple(codes[code - 1 :]) for code in codes}  # nested
    return Learner(
        RunConfig(region_codes=regions, regions=tuple(regions), grid=grid, unet=unet, batch=1)
    )


@pytest.mark.parametrize("ignored", [0, 0.5, 1])
def test_dice_is_of_the_painted_label_in_the_case_s_own_voxels_and_the_loss_of_the_maps(ignored):
    learned = learner(SMALL, channels=1, outputs=4, filters=4, depth=2)
    learned.model.get_layer("head").bias.assign(np.zeros(4))  # about half of all are predicted
    ((image, target),) = made_data(learned.config, ignored).validation()
    logits = learned.logits(image)
    scores, _ = validate(made_data(learned.config, ignored), learned)
    np.testing.assert_allclose(
        scores.loss, supervise(LOSSES[DEFAULT_LOSS], target, [logits]).loss, rtol=1e-5
    )
    logits, target = (array.numpy()[0, 2:-1, 2:-1, 2:-1] for array in (logits, target))
    assert scores.dice[1:].min() > 0
    for region in range(4):  # painted wherever it or a smaller one is predicted
        predicted = (logits[..., region:] >= 0).any(-1) & (target[..., region] != IGNORED)
        true = target[..., region] == 1
        total = predicted.sum() + true.sum()
        dice = 2 * np.count_nonzero(predicted & true) / total if total else 1
        assert scores.dice[region] == pytest.approx(dice, abs=1e-12)


@pytest.mark.parametrize(
    ("settings", "average"),
    [
        ({}, (1, 1, 1)),
        ({"extent": "full", "depth": 4, "norm": "batch"}, (1, 1, 1)),
        ({"curriculum": "half", "steps": 2, "strides": ((2, 2, 1),)}, (2, 2, 1)),
        ({"curriculum": "all", "depth": 3}, (2, 2, 2)),
    ],
)
def test_a_validation_of_a_run_has_the_dice_that_evaluate_has_of_its_weights(
    phantom_store, tmp_path, settings, average
):
    """Also where zeros are added around a volume, whose voxels count in neither, and after the last
    coarse step."""
    chosen = {"steps": 1, "validations": 2, "learning_rate": 1e-6, "fold": "1/2", **settings}
    fit = start(phantom_store, tmp_path, **chosen)
    fit.steps = 1
    rng = np.random.default_rng(0)
    for variable in fit.learner.model.weights:  # so that the maps of the regions are not nested
        variable.assign_add(rng.normal(0, 0.3, variable.shape).astype(np.float32))
        if variable.name == "head/bias:0":  # each map is of about half of the voxels
            variable.assign(tf.zeros_like(variable))
    fit.run()
    (event,) = [event for event in read_events(tmp_path) if event["event"] == "validation"]
    # A validation sees each case once, and no mirror images of it.
    predictor = load_predictor(tmp_path, inference=Inference(flips=False))
    scores = evaluate_split(predictor, with_fold(phantom_store, "1/2"), "val", tmp_path)
    dice = {name: of_region["dice"]["mean"] for name, of_region in scores["summary"].items()}
    assert event["dice"] == pytest.approx(dice, abs=1e-9)
    assert event["mean_dice"] == pytest.approx(scores["mean_dice"])
    assert predictor.config.unet.average == average


@pytest.mark.usefixtures("needs_native")
def test_of_many_regions_a_validation_takes_no_more_than_is_counted():
    if allocator_peak_bytes() is None:
        pytest.skip("needs an engine that counts its memory")
    learned = learner(SHAPE, outputs=13, filters=4, depth=3, policy="lean")
    data = made_data(learned.config)
    job = Job(learned.config.unet, SHAPE, threads=2)
    resident = training_step(job).resident
    # A volume is in use, another is ready.
    held = sum(tensor.bytes for tensor in (*resident, *resident[-2:]))
    counted = timeline(Program(resident, validation_pass(job))).peak_bytes - held
    validate(data, learned)  # traced, and its weights in oneDNN's layout
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    validate(data, learned)
    # Chunks are larger than what is asked for, more so where other tests left holes. Whole maps are
    # twice as much.
    assert allocator_peak_bytes() - before <= 1.75 * counted

"""The scores of a validation, and its memory, which is that of the estimator."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.host.memory import allocator_peak_bytes
from cpu3d.settings import RunConfig
from cpu3d.training.learner import Learner
from cpu3d.training.losses import DiceCrossEntropy, hard_dice_counts
from cpu3d.training.validation import validate
from memory_estimator.job import Job
from memory_estimator.step.program import Program, timeline
from memory_estimator.step.training_step import training_step, validation_pass
from models.config import UNetConfig
from models.supervision import supervise

SMALL, SHAPE = (16, 16, 12), (48, 48, 44)


def feeds(config):
    """A held-out volume of random numbers, which is there already."""
    rng = tf.random.Generator.from_seed(0)
    target = rng.uniform((1, *config.grid, config.unet.outputs)) < np.linspace(0, 0.5, config.unet.outputs)
    volume = rng.normal((1, *config.grid, config.unet.channels)), tf.cast(target, tf.uint8)
    return SimpleNamespace(
        config=config, held_out=1, held_out_share=lambda: (0,), validation=lambda: [volume], resizing=None
    )


def learner(grid, **network):
    return Learner(RunConfig(grid=grid, unet=UNetConfig(**network), batch=1, micro_batch=1, engine="auto"))


def test_scores_are_those_of_the_whole_volume():
    learned = learner(SMALL, channels=1, outputs=4, filters=4, depth=2)
    ((image, target),) = feeds(learned.config).validation()
    logits = learned.logits(image)
    overlap, predicted, true = np.moveaxis(hard_dice_counts(target, logits).numpy()[0], -1, 0)
    scores, _ = validate(feeds(learned.config), learned)
    np.testing.assert_allclose(scores.loss, supervise(DiceCrossEntropy(), target, [logits]).loss, rtol=1e-5)
    np.testing.assert_array_equal(scores.dice, 2 * overlap / (predicted + true))


def test_of_many_regions_a_validation_takes_no_more_than_is_counted():
    if allocator_peak_bytes() is None:
        pytest.skip("needs an engine that counts its memory")
    learned = learner(SHAPE, outputs=13, filters=4, depth=3, policy="lean")
    data, job = feeds(learned.config), Job(learned.config.unet, SHAPE, threads=2)
    resident = training_step(job).resident
    *_, image, target = resident
    held = sum(tensor.bytes for tensor in (*resident, image, target))  # a volume is in use, another is ready
    counted = timeline(Program(resident, validation_pass(job))).peak_bytes - held
    validate(data, learned)  # traced, and its weights in oneDNN's layout
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    validate(data, learned)
    # Chunks are larger than what is asked for, more so where other tests left holes. Whole maps are twice as much.
    assert allocator_peak_bytes() - before <= 1.75 * counted

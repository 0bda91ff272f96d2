"""What the network computes."""

import numpy as np
import pytest
import tensorflow as tf

from models.config import UNetConfig
from models.unet3d import build_unet3d


def test_a_sample_is_computed_alike_alone_and_in_a_batch():
    config = UNetConfig(filters=4, depth=3)
    pair = build_unet3d(config, (16, 8, 12), batch_size=2)
    single = build_unet3d(config, (16, 8, 12), batch_size=1)
    single.set_weights(pair.get_weights())
    x = np.random.default_rng(2).normal(size=(2, 16, 8, 12, 4)).astype("f4")
    np.testing.assert_allclose(pair(x)[1:], single(x[1:]), rtol=1e-4, atol=1e-5)


def test_deep_supervision_gives_a_map_for_each_decoder_and_bfloat16_keeps_weights_in_float32():
    config = UNetConfig(filters=2, depth=4, deep_supervision=True, dtype="bfloat16")
    model = build_unet3d(config, (16, 16, 8), batch_size=1)
    assert [tuple(logits.shape[1:4]) for logits in model.outputs] == [(16, 16, 8), (4, 4, 2), (8, 8, 4)]
    assert {layer.output.dtype for layer in model.layers} == {tf.bfloat16}
    assert {weight.dtype for weight in model.weights} == {tf.float32}


def test_lean_without_a_batch_size_is_refused():
    with pytest.raises(ValueError, match="batch_size must be given under the policy lean, got None"):
        build_unet3d(UNetConfig(policy="lean"), (16, 16, 16))


def test_initial_weights_depend_on_the_seed_and_the_layer_alone():
    first, again, other, deeper = (
        build_unet3d(UNetConfig(filters=2, depth=depth, seed=seed), (4, 4, 4), 1).get_weights()
        for seed, depth in ((1, 2), (1, 2), (2, 2), (1, 3))
    )
    assert all(np.array_equal(a, b) for a, b in zip(first, again))
    assert not np.array_equal(first[0], other[0])
    # The first block's second kernel, in a network of any depth.
    np.testing.assert_array_equal(deeper[3], first[3])
    assert first[3].shape == (3, 3, 3, 2, 2)

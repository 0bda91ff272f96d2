"""A step's operations as data, and that each of its readers knows all of their kinds."""

import itertools
from typing import List, Set

import pytest

from memory_estimator.step.training_step import WRITE
from models.config import NETWORKS, POLICIES, UPS, UNetConfig
from models.layer_plan import LAYERS, layer_plan
from models.network import network_program
from models.program import TARGET, Form, Kind, Op, Value, kernel_of, loss_program

ORTHOGONAL = "orthogonal"  # a native operation of an optimizer, which no network emits

STRIDES = {2: ((2, 1, 2),), 3: (), 5: ((2, 2, 1), (2, 2, 1), (2, 2, 2), (1, 2, 2))}  # by depth
CONFIGS = [
    UNetConfig(
        network=network,
        policy=policy,
        up=up,
        residual=residual,
        deep_supervision=deep,
        depth=depth,
        strides=STRIDES[depth],
    )
    for network, policy, up, residual, deep, depth in itertools.product(
        NETWORKS, POLICIES, UPS, (False, True), (False, True), STRIDES
    )
]

every_config = pytest.mark.parametrize("config", CONFIGS, ids=str)


def step_ops(config: UNetConfig) -> List[Op]:
    """All operations of a step, and the gradient of the image."""
    network = network_program(config)
    loss = loss_program(network.logits)
    return [*network.forward, *loss.sums, *loss.slopes, *network.backward, *network.to_image]


def kernel_layers(config: UNetConfig) -> Set[str]:
    return {layer.name for layer in layer_plan(config, config.divisors) if layer.kernel}


def test_the_estimator_writes_every_kind():
    assert set(WRITE) == set(Kind)


def test_every_kind_is_computed_in_one_place():
    from models.step import COMPUTE
    from models.supervision import BY_OWN_OPERATIONS, BY_TENSORFLOW

    assert set(BY_OWN_OPERATIONS) == set(BY_TENSORFLOW)
    assert {*COMPUTE, *BY_OWN_OPERATIONS} == set(Kind)
    assert not {*COMPUTE} & {*BY_OWN_OPERATIONS}


@every_config
def test_every_forward_operation_has_its_layers(config):
    assert {op.kind for op in network_program(config).forward} <= set(LAYERS)


@every_config
def test_each_value_is_made_once_and_before_it_is_read(config):
    known: Set[Value] = {network_program(config).image, TARGET}
    known |= {kernel_of(layer) for layer in kernel_layers(config)}
    for op in step_ops(config):
        assert {*op.reads} <= known, op
        assert not {*op.makes} & known, op
        known |= {*op.makes}


@every_config
def test_names_are_unique(config):
    names = [value.name for op in step_ops(config) for value in op.makes]
    assert len(names) == len(set(names))


@every_config
def test_an_operation_writes_over_what_it_reads_or_what_that_is_formed_of(config):
    formed = {}
    for op in step_ops(config):
        if op.made.form is Form.FORMED_GRADIENT:
            formed[op.made] = op.reads
        sources = {*op.reads}
        for value in op.reads:
            sources |= {*formed.get(value, ())}
        assert {*op.over} <= sources, op


@every_config
def test_each_kernel_has_one_gradient(config):
    program = network_program(config)
    layers = [layer for layer, _ in program.kernel_gradients]
    assert sorted(layers) == sorted(kernel_layers(config))
    made = [value for op in program.backward for value in op.makes]
    for _, gradient in program.kernel_gradients:
        assert gradient.form is Form.KERNEL_GRADIENT
        assert made.count(gradient) == 1


@every_config
def test_each_head_has_the_gradient_of_its_logits(config):
    program = network_program(config)
    slopes = [op.made for op in loss_program(program.logits).slopes]
    assert slopes == [*program.slopes]
    assert len(slopes) == (config.depth - 1 if config.deep_supervision else 1)


@every_config
def test_what_is_made_again_is_what_a_policy_does_not_keep(config):
    forgotten: Set[str] = set()
    if config.policy == "lean":
        bottom = config.depth - 1
        last = config.convolutions
        forgotten |= {f"encoder0_conv{number}" for number in range(1, last + 1)}
        for level in range(1, bottom):
            forgotten |= {f"encoder{level}_conv{number}" for number in range(1, last)}
        if config.residual:
            forgotten |= {f"encoder0_act{last}"}
        convolution = "" if config.up == "transposed" else "_conv"
        forgotten |= {f"decoder{level}_up{convolution}" for level in range(bottom)}
    again = [op for op in step_ops(config) if op.again]
    assert {op.layer for op in again} == forgotten
    assert not any(op.kept for op in again)

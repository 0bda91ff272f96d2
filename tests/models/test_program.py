"""A step's operations as data, and that each of its readers knows all of their kinds."""

import itertools
from typing import List, Set

import pytest

from memory_estimator.step.training_step import WRITE
from models.config import NETWORKS, POLICIES, UPS, UNetConfig
from models.layer_plan import LAYERS, layer_plan
from models.network import network_program
from models.program import TARGET, Kind, Op, Value, ValueKind, kernel_of, loss_program

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


def test_every_kind_has_its_entry_in_each_table():
    from models.step import COMPUTE
    from models.supervision import BY_NATIVE_OPERATIONS, BY_TENSORFLOW

    assert set(WRITE) == set(Kind)
    assert set(BY_NATIVE_OPERATIONS) == set(BY_TENSORFLOW)
    assert {*COMPUTE, *BY_NATIVE_OPERATIONS} == set(Kind)
    assert not {*COMPUTE} & {*BY_NATIVE_OPERATIONS}


@every_config
def test_each_value_is_made_once_under_its_name_before_it_is_read_or_written_over(config):
    assert {op.kind for op in network_program(config).forward} <= set(LAYERS)
    known: Set[Value] = {network_program(config).image, TARGET}
    known |= {kernel_of(layer) for layer in kernel_layers(config)}
    formed = {}  # what a gradient is formed of on reading
    for op in step_ops(config):
        assert {*op.reads} <= known, op
        assert not {value.name for value in op.makes} & {value.name for value in known}, op
        known |= {*op.makes}
        if op.made.kind is ValueKind.FORMED_GRADIENT:
            formed[op.made] = op.reads
        sources = {*op.reads}
        for value in op.reads:
            sources |= {*formed.get(value, ())}
        assert {*op.over} <= sources, op


@every_config
def test_each_kernel_has_one_gradient_and_each_head_that_of_its_logits(config):
    program = network_program(config)
    layers = [layer for layer, _ in program.kernel_gradients]
    assert sorted(layers) == sorted(kernel_layers(config))
    made = [value for op in program.backward for value in op.makes]
    for _, gradient in program.kernel_gradients:
        assert gradient.kind is ValueKind.KERNEL_GRADIENT
        assert made.count(gradient) == 1
    slopes = [op.made for op in loss_program(program.logits).slopes]
    assert slopes == [*program.slopes]
    assert len(slopes) == (config.depth - 1 if config.deep_supervision else 1)


@every_config
def test_what_is_made_again_was_not_kept(config):
    ops = step_ops(config)
    again = {op.layer for op in ops if op.again}
    assert bool(again) == (config.policy == "lean")
    assert not any(op.kept for op in ops if op.again)

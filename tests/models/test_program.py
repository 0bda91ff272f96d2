"""A step's operations as data."""

import itertools

import pytest

from models.config import NETWORKS, POLICIES, UPS, UNetConfig
from models.layer_plan import layer_plan
from models.network import network_program
from models.program import TARGET, ValueKind, kernel_of, loss_program

STRIDES = {2: ((2, 1, 2),), 5: ((2, 2, 1), (2, 2, 1), (2, 2, 2), (1, 2, 2))}  # by depth


@pytest.mark.parametrize(
    "config",
    [
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
    ],
)
def test_a_step_reads_what_is_made_and_makes_the_gradient_of_every_kernel_once(config):
    program = network_program(config)
    loss = loss_program(program.logits)
    step = (*program.forward, *loss.sums, *loss.slopes, *program.backward, *program.to_image)
    kernels = [op.name for op in layer_plan(config, config.divisors) if op.kernel]
    known = {program.image, TARGET, *map(kernel_of, kernels)}
    formed = {}  # what a gradient is formed of on reading
    for op in step:
        assert {*op.reads} <= known, op
        assert not {value.name for value in op.makes} & {value.name for value in known}, op
        known |= {*op.makes}
        if op.made.kind is ValueKind.FORMED_GRADIENT:
            formed[op.made] = op.reads
        sources = {*op.reads}.union(*(formed.get(value, ()) for value in op.reads))
        assert {*op.over} <= sources, op

    assert sorted(layer for layer, _ in program.kernel_gradients) == sorted(kernels)
    made = [value for op in program.backward for value in op.makes]
    for _, gradient in program.kernel_gradients:
        assert gradient.kind is ValueKind.KERNEL_GRADIENT
        assert gradient in made
    assert [op.made for op in loss.slopes] == [*program.slopes]
    assert len(program.slopes) == (config.depth - 1 if config.deep_supervision else 1)
    assert any(op.again for op in step) == (config.policy == "lean")
    assert not any(op.kept and op.again for op in step)  # what is made again was not kept

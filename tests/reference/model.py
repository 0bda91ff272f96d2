"""Memory of one training step of any Keras functional model, read off its traced graph. Nothing volume-sized is taken.

What TensorFlow would run is asked of TensorFlow itself, so the estimate is for the engine of this process. Not counted:
a second inter-op thread, which would hold more.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Callable, List, Optional, Sequence

from memory_estimator.host import read_host
from memory_estimator.step.allocator import use
from memory_estimator.step.onednn import Kernels
from memory_estimator.step.program import Program, StepOp, Tensor, Timeline, kernel_made, timeline
from tests.reference.graph import executed_graph, execution_order
from tests.reference.lifetimes import program_of


@dataclass(frozen=True)
class Replay:
    """One training step, replayed, in one order of those that a model may leave open."""

    program: Program
    timeline: Timeline
    allocator_peak_bytes: int  # from the third step on: `get_memory_info("CPU:0")["peak"]`
    resident_bytes: int  # what the allocator's part of the process's memory grows to
    hidden_bytes: int
    """Scratch that oneDNN takes outside the allocator, at its most: with stock TensorFlow alone."""


def estimate_model(model: Any, input_shape: Sequence[int], *, batch: int = 1, optimizer: Any = None) -> Replay:
    """The training step of a Keras functional model with one input and one output on samples of `input_shape` (without
    the batch), by mean squared error; Adam where no `optimizer` is given. Takes the memory of the weights and of the
    optimizer's slots. Raises ValueError as `estimate_step`."""
    import tensorflow as tf

    optimizer = optimizer or tf.keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    given = tf.TensorSpec((batch, *input_shape), model.inputs[0].dtype, name="input")
    target = tf.TensorSpec(model.compute_output_shape(given.shape))

    def step(given, target):
        with tf.GradientTape() as tape:
            found = tf.reduce_mean(tf.keras.losses.mean_squared_error(target, model(given, training=True)))
        optimizer.apply_gradients(zip(tape.gradient(found, model.trainable_variables), model.trainable_variables))
        return found

    return estimate_step(step, given, target, variables=[*model.variables, *optimizer.variables])


def estimate_step(
    step: Callable,
    *specs: Any,
    variables: Sequence[Any] = (),
    threads: int = 2,
    region_bytes: int = 0,
    kernels: Optional[Kernels] = None,
) -> Replay:
    """Any training step: a function or tf.function of tensors like `specs` (tf.TensorSpec). `variables` are those that
    are there in the order they were made, which the allocator's regions depend on; those that the step uses beside them
    are found. `region_bytes` is as of `memory_estimator.step.program.Program`, `kernels` are those that oneDNN takes,
    None for this host's. Raises ValueError for a step with loops, and where a size is not fixed."""
    kernels = kernels or read_host().kernels
    nodes, trace = executed_graph(step, specs)
    # By their memory: under mixed precision the same variable comes in two wrappers.
    unique = {id(variable.handle): variable for variable in (*variables, *trace.graph.variables)}
    held: List[Tensor] = []
    made: List[StepOp] = []
    for index, variable in enumerate(unique.values()):
        size = variable.dtype.size * variable.shape.num_elements()
        tensor = Tensor(f"{variable.name}#{index}", size, "variables")
        held.append(tensor)
        is_kernel = variable.trainable and len(variable.shape) > 1  # made by Keras' usual three operations
        made += kernel_made(tensor) if is_kernel else [StepOp(tensor.name, "update", writes=(tensor,))]
    program = program_of(execution_order(nodes), held, made, threads, kernels)
    program = dataclasses.replace(program, region_bytes=region_bytes)
    used, hidden = use(program), max(op.hidden_bytes for op in program.ops)
    return Replay(program, timeline(program), used.peak_bytes, used.resident_bytes + used.small_bytes, hidden)

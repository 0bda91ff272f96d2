"""Memory of one training step of any Keras functional model, read off its traced graph. Nothing volume-sized is taken.

    estimate_model(model, (128, 128, 128, 4), batch=2, loss="binary_crossentropy").allocator_peak_bytes

What TensorFlow would run is asked of TensorFlow itself, so the estimate is for the engine of this process: for ITEX,
import TensorFlow with it; for stock TensorFlow, without. Not counted: a second inter-op thread, which would hold more.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Callable, List, Optional, Sequence, Union

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


def estimate_model(
    model: Any,
    input_shape: Sequence[int],
    *,
    batch: int = 1,
    loss: Union[str, Callable, None] = None,
    optimizer: Any = "adam",
    target: Any = None,
    threads: int = 2,
) -> Replay:
    """The training step of a Keras functional model on samples of `input_shape` (without the batch).

    `loss(target, prediction)` gives the loss, or a tuple that begins with it; a name is one of Keras' losses, of each
    output; None is what the model was compiled with, else the mean squared error. `target` is the tf.TensorSpec of what
    the loss compares with, batch included; None is float32 in the shape of the prediction. `optimizer` is a name or a
    tf.keras.optimizers.Optimizer. Takes the memory of the weights and of the optimizer's slots. Raises ValueError for
    shapes that do not fit the model, and for a step with loops.
    """
    import tensorflow as tf

    if len(model.inputs) != 1:
        raise ValueError(f"model must have one input, got {len(model.inputs)}; estimate its step with estimate_step")
    own = model.inputs[0].shape[0]
    if own not in (None, batch):
        raise ValueError(f"batch must be the model's, {own}, got {batch}; build the model for that batch")
    loss = loss or getattr(model, "loss", None) or "mean_squared_error"
    optimizer = tf.keras.optimizers.get(optimizer)
    optimizer.build(model.trainable_variables)
    given = tf.TensorSpec((batch, *input_shape), model.inputs[0].dtype, name="input")
    if target is None:
        shapes = model.compute_output_shape((batch, *input_shape))
        many = isinstance(model.output, (list, tuple))
        target = [tf.TensorSpec(s) for s in shapes] if many else tf.TensorSpec(shapes)

    def step(given, target):
        with tf.GradientTape() as tape:
            prediction = model(given, training=True)
            if callable(loss) and not isinstance(loss, type):
                found = loss(target, prediction)
                found = found[0] if isinstance(found, (list, tuple)) else found
            else:
                pairs = zip(tf.nest.flatten(target), tf.nest.flatten(prediction))
                found = tf.add_n([tf.reduce_mean(tf.keras.losses.get(loss)(*pair)) for pair in pairs])
        gradients = tape.gradient(found, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return found

    # An attribute in Keras 2.11 and later, a method in its legacy optimizers.
    slots = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    return estimate_step(step, given, target, variables=[*model.variables, *slots], threads=threads)


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
    None for this host's. Raises ValueError as `estimate_model`."""
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

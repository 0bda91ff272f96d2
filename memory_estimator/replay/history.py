"""What ran before the step: how its variables came to be. The allocator's regions keep the traces of it."""

from typing import Any, List, Sequence, Tuple

from memory_estimator.step.program import StepOp, Tensor, kernel_made


def variables_made(variables: Sequence[Any]) -> Tuple[List[Tensor], List[StepOp]]:
    """The memory of `variables` (tf.Variable), and how they were made: a kernel by Keras' usual three operations."""
    held, made = [], []
    for index, variable in enumerate(variables):
        size = variable.dtype.size * variable.shape.num_elements()
        tensor = Tensor(f"{variable.name}#{index}", size, "variables")
        held.append(tensor)
        if variable.trainable and len(variable.shape) > 1:
            made += kernel_made(tensor)
        else:
            made.append(StepOp(tensor.name, "update", writes=(tensor,)))
    return held, made

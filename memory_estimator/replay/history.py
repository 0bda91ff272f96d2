"""What ran before the step: how its variables and inputs came to be. The allocator's regions keep the traces of it."""

from typing import Any, List, Sequence, Tuple

from memory_estimator.program import StepOp, Tensor


def variables_made(variables: Sequence[Any]) -> Tuple[List[Tensor], List[StepOp]]:
    """The memory of `variables` (tf.Variable), and how they were made: a kernel by Keras' usual three operations."""
    held, made = [], []
    for index, variable in enumerate(variables):
        size = variable.dtype.size * variable.shape.num_elements()
        tensor = Tensor(f"{variable.name}#{index}", size, "variables")
        held.append(tensor)
        if variable.trainable and len(variable.shape) > 1:
            uniform, scaled = (Tensor(f"{tensor.name}/{part}", size, "variables") for part in ("uniform", "scaled"))
            made += [_op(uniform), _op(scaled, uniform), _op(tensor, uniform, scaled)]
        else:
            made.append(_op(tensor))
    return held, made


def inputs_made(inputs: Sequence[Tuple[Tensor, str]]) -> List[StepOp]:
    """How (memory, dtype) of each input came to be, in order: all drawn at random, then cast, as `bench memory` does.

    What `train` reads from a store comes another way, with less in between.
    """
    drawn, cast, wide = [], [], []
    for tensor, dtype in inputs:
        floating = "float" in dtype
        size = (
            tensor.bytes * 4 // {"bfloat16": 2, "float16": 2, "float64": 8, "int64": 8}.get(dtype, 4 if floating else 1)
        )
        noise, scaled = (Tensor(f"{tensor.name}/{part}", size, tensor.group) for part in ("noise", "scaled"))
        if dtype == "float32":
            drawn += [_op(noise), _op(scaled, noise), _op(tensor, scaled, noise)]
        elif floating:
            shifted = Tensor(f"{tensor.name}/shifted", size, tensor.group)
            drawn += [_op(noise), _op(scaled, noise), _op(shifted, scaled, noise)]
            cast.append(_op(tensor))
            wide.append(shifted.name)
        else:
            hits = Tensor(f"{tensor.name}/hits", size // 4, tensor.group)
            drawn.append(_op(noise))
            cast += [_op(hits), _op(tensor, hits)]
            wide.append(noise.name)
    return [*drawn, *cast, StepOp("inputs made", "pointwise", tuple(wide))]


# --- Private helpers ---


def _op(written: Tensor, *read: Tensor) -> StepOp:
    return StepOp(written.name, "pointwise", tuple(tensor.name for tensor in read), (written,))

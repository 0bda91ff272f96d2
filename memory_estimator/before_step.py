"""What runs before the first step, as both engines of the estimator need it: the allocator's regions keep traces of it.

The inputs are those of `cpu3d.bench.step.made_up`, drawn at random by TensorFlow; the two must stay in step. What
`train` reads from a store comes another way, with less in between.
"""

import re
from typing import List, Sequence, Tuple

from memory_estimator.program import StepOp, Tensor


def kernel_made(kernel: Tensor, uniform: str, scaled: str) -> List[StepOp]:
    """By Glorot's three operations in float32: numbers drawn (`uniform`), `scaled`, and shifted into place."""
    drawn, wide = (Tensor(name, kernel.bytes, kernel.group) for name in (uniform, scaled))
    return [_op("update", drawn), _op("update", wide, drawn), _op("update", kernel, drawn, wide)]


def inputs_made(inputs: Sequence[Tuple[Tensor, str]]) -> List[StepOp]:
    """How (memory, dtype) of each input came to be: all drawn in order, in four bytes a value, then cast in order.

    Floating point is noise scaled and shifted; in float32 that is the input already. All else is numbers compared with
    one of them. What was drawn to be cast goes when everything has been.
    """
    drawn, cast, wide = [], [], []
    for tensor, dtype in inputs:
        values = tensor.bytes // _value_bytes(dtype)

        def made(part: str, value_bytes: int, tensor: Tensor = tensor, values: int = values) -> Tensor:
            return Tensor(f"{tensor.name}/{part}", value_bytes * values, tensor.group)

        if "float" in dtype:
            noise, scaled = made("noise", 4), made("scaled", 4)
            shifted = tensor if dtype == "float32" else made("shifted", 4)
            drawn += [_op("pointwise", noise), _op("pointwise", scaled, noise)]
            drawn.append(_op("pointwise", shifted, scaled, noise))
            if dtype != "float32":
                cast.append(_op("pointwise", tensor))
                wide.append(shifted.name)
        else:
            numbers, hits = made("drawn", 4), made("hits", 1)
            drawn.append(_op("pointwise", numbers))
            cast += [_op("pointwise", hits), _op("pointwise", tensor, hits)]
            wide.append(numbers.name)
    return [*drawn, *cast, StepOp("inputs made", "pointwise", tuple(wide))]


# --- Private helpers ---


def _op(kind: str, written: Tensor, *read: Tensor) -> StepOp:
    return StepOp(written.name, kind, tuple(tensor.name for tensor in read), (written,))


def _value_bytes(dtype: str) -> int:
    """Of TensorFlow's names: "bfloat16" is 2, "uint8" 1, "bool" 1."""
    bits = re.search(r"\d+$", dtype)
    return int(bits.group()) // 8 if bits else 1

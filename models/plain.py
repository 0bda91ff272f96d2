"""Operations of a network that TensorFlow computes, with gradients by its tape: a new block needs
no C. They take longer and more memory than native operations.

    PLAIN["gate"] = PlainOperation(weights=gate_weights, compute=gate)

models/network.py emits one by its name (`Emitter.plain`, `Emitter.plain_gradients`); the layers of
Keras, the checkpoint, the estimate and a SavedModel follow.
"""

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Sequence, Tuple

Shapes = Dict[str, Tuple[int, ...]]


@dataclass(frozen=True)
class PlainOperation:
    """An operation on the values of one map or several, (N, X, Y, Z, C) in float32."""

    weights: Callable[[Sequence[int]], Shapes]
    """Channels of the maps -> name and shape of each weight. A bias is at first 0."""
    compute: Callable[[List[Any], Dict[str, Any]], Any]
    """Values of the maps, and weights by their names -> a map on the grid of the first."""


PLAIN: Dict[str, PlainOperation] = {}

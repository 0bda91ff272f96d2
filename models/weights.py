"""The weights of a network: layer, name and shape of each, in the order in which Keras and
checkpoints have them. No TensorFlow.

    for weight in network_weights(UNetConfig()):
        print(weight.array, weight.layer, weight.name, weight.shape)

Two networks are compared by it, and those weights are named that a training leaves as they are.
"""

from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

from models.config import NORMS, UNetConfig
from models.layer_plan import NORM_KINDS, LayerKind, LayerOp, layer_plan

FREEZE = ("none", "encoder")
"""What a training may leave as it is. "encoder": all levels on the way down and the deepest one,
their norms included."""


@dataclass(frozen=True)
class Weight:
    """One array of a network."""

    array: str  # its name in a checkpoint, such as "model/003"
    layer: str  # the Keras layer's name, such as "encoder0_conv1"
    name: str  # "kernel", "bias", "gamma", "beta", "moving_mean" or "moving_variance"
    shape: Tuple[int, ...]
    channel_axis: Optional[int] = None  # along which the image's channels lie
    region_axis: Optional[int] = None  # along which the regions lie


def is_frozen(layer: str, freeze: str) -> bool:
    """Whether a layer stays as it is; `freeze` is one of FREEZE."""
    return freeze != "none" and layer.startswith(freeze)


def array_name(place: int) -> str:
    """The name in a checkpoint of the weight that is at this place among all of the network."""
    return f"model/{place:03d}"


def network_weights(config: UNetConfig) -> List[Weight]:
    """The weights of a network in their order. Only their number hangs on channels and outputs,
    none of it on the grid."""
    plan = layer_plan(config, config.divisors)
    given = {op.name for op in plan if not op.has_gradient}
    weights: List[Weight] = []
    for op in plan:
        for name, shape in _shapes(config, op).items():
            channel_axis = None
            if name == "kernel" and given & {*op.inputs}:
                channel_axis = 3
            region_axis = None
            if op.kind is LayerKind.HEAD:
                region_axis = len(shape) - 1
            weight = Weight(
                array=array_name(len(weights)),
                layer=op.name,
                name=name,
                shape=shape,
                channel_axis=channel_axis,
                region_axis=region_axis,
            )
            weights.append(weight)
    return weights


# --- Private helpers ---


def _shapes(config: UNetConfig, op: LayerOp) -> Dict[str, Tuple[int, ...]]:
    """Name -> shape of the weights of a layer, in Keras' order."""
    width = op.shape[3]
    shapes: Dict[str, Tuple[int, ...]] = dict(op.weights)
    if op.kernel:
        shapes["kernel"] = op.kernel_shape
    if op.kind is LayerKind.HEAD:
        shapes["bias"] = (width,)
    if op.kind in NORM_KINDS:
        norm = NORMS[config.norm]
        shapes.update(dict.fromkeys((*norm.trained, *norm.moving), (width,)))
    return shapes

"""The weights of a network: layer, name and shape of each, in the order in which Keras and
checkpoints have them. No TensorFlow.

    for weight in network_weights(UNetConfig()):
        print(weight.array, weight.layer, weight.name, weight.shape)

Two networks are compared by it, and those weights are named that a training leaves as they are.
"""

from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

from models.config import UNetConfig
from models.layer_plan import LayerOp, layer_plan

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

    @property
    def is_trainable(self) -> bool:
        """Whether it has a gradient; moving statistics have none."""
        return not self.name.startswith("moving_")


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
    image = plan[0].name
    weights: List[Weight] = []
    for op in plan:
        for name, shape in _shapes(config, op).items():
            is_kernel = name == "kernel"
            weight = Weight(
                array=array_name(len(weights)),
                layer=op.name,
                name=name,
                shape=shape,
                channel_axis=3 if is_kernel and image in op.inputs else None,
                region_axis=len(shape) - 1 if op.kind == "head" else None,
            )
            weights.append(weight)
    return weights


# --- Private helpers ---


def _shapes(config: UNetConfig, op: LayerOp) -> Dict[str, Tuple[int, ...]]:
    """Name -> shape of the weights of a layer, in Keras' order."""
    width = op.shape[3]
    if op.kind in ("conv", "shortcut"):
        return {"kernel": (*op.kernel, op.in_channels, width)}
    if op.kind == "up_conv":  # a transposed kernel
        return {"kernel": (*op.kernel, width, op.in_channels)}
    if op.kind == "head":
        return {"kernel": (*op.kernel, op.in_channels, width), "bias": (width,)}
    if op.kind not in ("norm", "norm_act"):
        return {}
    if config.norm == "none":
        return {"bias": (width,)}
    names = ["gamma", "beta"]
    if config.norm == "batch":
        names += ["moving_mean", "moving_variance"]
    return dict.fromkeys(names, (width,))

"""The weights of a run as a network takes them, in Keras' order.

    weights = run_weights(config, weights_file(run, "best"))
    arrays = [weights.arrays[name] for name in weights.names]

No TensorFlow."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List

from cpu3d.errors import InputError
from cpu3d.run.checkpoint import SavedArrays, how_to_go_on, load_checkpoint
from cpu3d.settings import RunConfig
from models.weights import network_weights


@dataclass(frozen=True)
class RunWeights:
    """The weights in one of a run's checkpoints."""

    arrays: SavedArrays
    state: Dict[str, Any]  # the checkpoint's, as `training.fit` writes it
    names: List[str]  # of the arrays that predict, in the order of `network_weights`


def run_weights(config: RunConfig, path: Path) -> RunWeights:
    """The weights in a checkpoint of the run of `config`. Raises InputError if it is missing,
    damaged, or of another network."""
    arrays, state = load_checkpoint(path)
    weights = network_weights(config.unet)
    needed: Dict[str, Any] = {weight.array: weight.shape for weight in weights}
    saved: Dict[str, Any] = {**arrays.shapes}
    needed["channels and regions"] = (len(config.channels), len(config.regions))
    saved["channels and regions"] = (config.unet.channels, config.unet.outputs)
    for name, size in needed.items():
        if saved.get(name) != size:
            rule = f"checkpoint {path} must hold the weights of its run's config.json"
            got = f"{name} {saved.get(name)} for {size}"
            todo = f"restore both, or the one that is of another run: {how_to_go_on(path)}"
            raise InputError(f"{rule}, got {got}; {todo}")
    return RunWeights(arrays, state, [weight.array for weight in weights])

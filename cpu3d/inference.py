"""A trained run as a function from a whole volume to probabilities on its full grid, in one pass and without tiles."""

from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from cpu3d.checkpoint import load_checkpoint
from cpu3d.config import RunConfig, load_config
from cpu3d.data.extent import case_region
from cpu3d.data.loader import normalise
from cpu3d.data.records import CaseRecord
from cpu3d.data.region import Shape3, paste, round_up
from cpu3d.errors import InputError
from cpu3d.learner import finest, weight_names
from models.unet3d import build_unet3d


class Predictor:
    """The best weights of a run, ready for any case with the same channels."""

    def __init__(self, config: RunConfig, weights: List[np.ndarray]):
        self.config = config
        self.channels: Tuple[str, ...] = config.store_channels
        """Of the store the run was trained on."""
        self.inputs: Tuple[str, ...] = config.channels
        """The run's own among them: what an image must have."""
        self.labels: Dict[int, str] = config.label_names
        self.regions: Dict[str, Tuple[int, ...]] = {name: config.region_codes[name] for name in config.regions}
        self._weights = weights
        self._model = self._size = None

    def probabilities(
        self, image: np.ndarray, record: CaseRecord, channels: Optional[Sequence[str]] = None
    ) -> np.ndarray:
        """Probability of each region, float32 (X, Y, Z, R), on the full grid of `image` (X, Y, Z, C).

        `image` and `record` are a store's or `load_case`'s; `channels` names the image's, all of the store's if None.
        The network sees the extent it was trained on, larger where this case's brain needs it; outside of that the
        probability is 0.
        """
        size = self._size_for(record)
        region = case_region(record, size, self.config.extent)
        there = tuple(self.channels if channels is None else channels)
        picked = [there.index(name) for name in self.inputs]
        part = normalise(image, record, region)[None, ..., picked]
        logits = self._network(size)(tf.cast(part, self.config.unet.dtype))
        return paste(tf.sigmoid(tf.cast(logits, tf.float32)).numpy()[0], region, record.shape)

    def _size_for(self, record: CaseRecord) -> Shape3:
        needed = record.box.size if self.config.extent == "brain" else record.shape
        size = tuple(max(pair) for pair in zip(self.config.grid, needed))
        return round_up(size, self.config.unet.divisor)

    def _network(self, size: Shape3):
        """The compiled network for one grid; kept, since most cases share the training grid."""
        if size != self._size:
            model = build_unet3d(self.config.unet, size, batch_size=1)
            model.set_weights(self._weights)
            self._model, self._size = tf.function(lambda image: finest(model(image, training=False))), size
        return self._model


def load_predictor(run: Path, weights: str = "best") -> Predictor:
    """The predictor of the run in `run`, with its "best" or "last" weights.

    Raises InputError when the run or its weights are missing, damaged, or do not fit together.
    """
    run = Path(run)
    config = load_config(run)
    arrays, _ = load_checkpoint(run / "checkpoints" / f"{weights}.npz")
    expected = build_unet3d(config.unet, (config.unet.divisor,) * 3, 1).weights
    names = weight_names(expected)
    if any(name not in arrays or arrays[name].shape != tuple(w.shape) for name, w in zip(names, expected)):
        raise InputError(f"checkpoint of {run} must hold the weights of its config.json, got others; restore it")
    return Predictor(config, [arrays[name] for name in names])

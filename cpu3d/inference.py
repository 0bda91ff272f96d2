"""A trained run as a function from a whole volume to probabilities on its full grid, in one pass and without tiles."""

from pathlib import Path
from typing import Dict, Tuple

import numpy as np
import tensorflow as tf

from cpu3d.checkpoint import load_checkpoint
from cpu3d.config import RunConfig, load_config
from cpu3d.data.extent import case_region
from cpu3d.data.region import Shape3, paste, round_up
from cpu3d.data.source import normalise
from cpu3d.data.store import CaseRecord
from cpu3d.errors import InputError
from models.unet3d import build_unet3d


class Predictor:
    """The best weights of a run, ready for any case with the same channels."""

    def __init__(self, config: RunConfig, weights: Dict[str, np.ndarray]):
        self.config = config
        self.store = Path(config.store)
        self.channels: Tuple[str, ...] = config.store_channels
        """Of the store the run was trained on: what an image must have; the run picks its own among them."""
        self.labels: Dict[int, str] = config.label_names
        self.regions: Dict[str, Tuple[int, ...]] = {name: config.region_codes[name] for name in config.regions}
        self._weights = [weights[name] for name in sorted(weights)]
        self._model = self._size = None

    def probabilities(self, image: np.ndarray, record: CaseRecord) -> np.ndarray:
        """Probability of each region, float32 (X, Y, Z, R), on the full grid of `image` (X, Y, Z, C).

        `image` and `record` are a store's or `load_case`'s. The network sees the extent it was trained on, larger where
        this case's brain needs it; outside of that the probability is 0.
        """
        size = self._size_for(record)
        region = case_region(record, size, self.config.extent)
        picked = [self.channels.index(name) for name in self.config.channels]
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

            def forward(image):
                logits = model(image, training=False)
                return logits[0] if isinstance(logits, (list, tuple)) else logits

            self._model, self._size = tf.function(forward), size
        return self._model


def load_predictor(run: Path, weights: str = "best") -> Predictor:
    """The predictor of the run in `run`, with its "best" or "last" weights.

    Raises InputError when the run or its weights are missing, damaged, or do not fit together.
    """
    run = Path(run)
    config = load_config(run)
    arrays, _ = load_checkpoint(run / "checkpoints" / f"{weights}.npz")
    arrays = {name: array for name, array in arrays.items() if name.startswith("model/")}
    expected = len(build_unet3d(config.unet, (config.unet.divisor,) * 3, 1).weights)
    if len(arrays) != expected:
        raise InputError(f"checkpoint of {run} must hold {expected} weights, got {len(arrays)}; restore it, or retrain")
    return Predictor(config, arrays)

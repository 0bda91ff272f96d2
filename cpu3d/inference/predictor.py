"""A trained run as a function from a volume to probabilities on its full grid: in one pass, or
window by window."""

import functools
import itertools
from pathlib import Path
from typing import Any, Callable, List, Optional, Sequence

import numpy as np
import tensorflow as tf

from cpu3d.data.cases.resample import rows_for, to_source_grid
from cpu3d.data.manifest import CaseRecord
from cpu3d.data.normalise import normalise
from cpu3d.data.region import Region, Shape3, bounding_box, centred, paste, round_up, xyz
from cpu3d.data.sampling import LABEL_MARGIN
from cpu3d.data.store import case_box, case_region
from cpu3d.data.windows import sliding_window
from cpu3d.errors import DivergedError
from cpu3d.host.gpu import fits_memory
from cpu3d.inference.answers import Answers
from cpu3d.inference.runs import Inference, config_of_state, mirrored_axes_of, window_of
from cpu3d.run.checkpoint import weights_file
from cpu3d.run.config_json import load_config
from cpu3d.run.trained_weights import run_weights
from cpu3d.settings import RunConfig
from models.config import UNetConfig
from models.strides import shape3
from models.unet3d import build_unet3d, finest

AS_TRAINED = Inference()
ADVICE = "slide a smaller --window X Y Z, or take --device cpu if a card ran out"


class Predictor:
    """A run's weights, ready for any case with the same channels."""

    # The file of the run that the weights are from, if there is one.
    checkpoint = ""
    weights_sha256 = ""

    def __init__(
        self, config: RunConfig, weights: List[np.ndarray], inference: Inference = AS_TRAINED
    ):
        self.config = config
        self.inference = inference
        # Those of the store the run was trained on, and the run's own: what an image must have.
        self.channels = config.store_channels
        self.inputs = config.channels
        self.labels = config.label_names
        self.normalisation_of = config.normalisation_of
        self.regions = config.codes_by_region
        self.target_spacing_mm = config.target_spacing_mm  # that images must have; None: any
        self.weights = weights  # in the order of Keras

    @functools.cached_property
    def _network(self) -> Callable:
        return compiled_network(self.config.unet, self.weights)

    def probabilities(
        self,
        image: np.ndarray,
        record: CaseRecord,
        channels: Sequence[str] = (),
        in_windows: bool = False,
    ) -> Answers:
        """Probability of each region, float32 (X, Y, Z, R), on the full grid of `image` (X, Y, Z,
        C); on its source's grid, if the case was resampled.

        `image` and `record` are a store's or `load_case`'s; `channels` names the image's, all of
        the store's if none. The network sees the content box, or with the full extent the volume,
        rounded up to its multiples: in one pass, or window by window, always so with `in_windows`.
        Outside of that the probability is 0. A run on crops answers once more on the crop around
        all that it has found. Raises DoesNotFitError if memory runs out, DivergedError for answers
        that are not finite."""
        region = self.region(record)
        # Voxels X, Y, Z that slide; None is one pass.
        window = window_of(self.config, self.inference) or (
            self.config.grid if in_windows else None
        )
        logits_of = functools.partial(self._logits, window=window)
        with fits_memory(f"the prediction of case {record.case_id}", ADVICE):
            seen = self._seen(image, record, region, tuple(channels or self.channels))
            axes = mirrored_axes_of(self.config, self.inference)
            logits = over_mirror_images(logits_of, seen, axes)
            if self.config.whole_every > 1 and (logits > 0).any():  # trained on crops
                found = bounding_box((logits > 0).any(-1))
                size = xyz(side + 2 * LABEL_MARGIN for side in found.size)
                size = round_up(size, self.config.unet.divisors)
                crop = centred(found, size, region.size).slices(region.size)
                part = seen[(slice(None), *crop)]
                logits[crop] = over_mirror_images(logits_of, part, axes)
            seen_answers = tf.sigmoid(logits).numpy()
        if not np.isfinite(seen_answers).all():
            raise DivergedError(
                f"probabilities for case {record.case_id} must be finite, got NaN or infinity; the "
                "training has diverged, train again with a lower learning rate or in float32"
            )

        def on_full_grid(index: int, rows: slice) -> np.ndarray:
            stored = rows_for(rows, record)
            box = Region((region.start[0] - stored.start, *region.start[1:]), region.size)
            shape = (stored.stop - stored.start, *record.shape[1:])
            return to_source_grid(paste(seen_answers[..., index], box, shape), record, rows)

        return Answers(record.scored_shape, len(self.regions), on_full_grid)

    def _seen(
        self, image: np.ndarray, record: CaseRecord, region: Region, present: Sequence[str]
    ) -> tf.Tensor:
        """A region of an image with these channels as the network takes it, (1, x, y, z,
        inputs)."""
        picked = [present.index(name) for name in self.inputs]
        scores = normalise(image, record, region, self.config.normalisation_of(present))
        return tf.cast(scores[None, ..., picked], self.config.unet.dtype)

    def region(self, record: CaseRecord) -> Region:
        """The box of a case that is predicted, in the voxels of its image, padding included."""
        config = self.config
        size = config.grid_of(case_box(record, config.extent).size)
        return case_region(record, size, config.extent)

    def _logits(self, image, window: Optional[Shape3]) -> np.ndarray:
        """Logits float32 (X, Y, Z, R) of one image (1, X, Y, Z, C)."""
        if window:
            window = shape3(map(min, window, image.shape[1:4]))
            return sliding_window(self._network, image, window, self.inference.overlap)
        return self._network(image).numpy()[0]


def compiled_network(unet: UNetConfig, weights: Sequence[np.ndarray]) -> Callable:
    """A compiled network: image (1, X, Y, Z, C) -> logits float32 (1, X, Y, Z, R). `weights` are in
    Keras' order."""
    model = build_unet3d(unet, batch_size=1)
    model.set_weights(weights)
    taken = tf.TensorSpec((1, None, None, None, unet.channels), unet.dtype)
    # A partial, not a lambda: TensorFlow counts traces by the function's code, and took the first
    # traces of five networks for five traces of one.
    return tf.function(functools.partial(_finest_logits, model), [taken], autograph=False)


def _finest_logits(model: Any, image: Any) -> Any:
    """Logits float32 at full resolution."""
    return tf.cast(finest(model(image, training=False)), tf.float32)


def over_mirror_images(logits_of: Callable, image, axes: Sequence[int] = (0, 1, 2)) -> np.ndarray:
    """Mean of the logits (X, Y, Z, R) of `image` (1, X, Y, Z, C) and of its mirror images along
    some `axes` of X, Y, Z, seven along all three, each mirrored back."""
    images = [
        some for count in range(len(axes) + 1) for some in itertools.combinations(axes, count)
    ]
    total = 0
    for some in images:
        mirror = tf.reverse(image, np.array(some, np.int32) + 1)
        total = total + np.flip(logits_of(mirror), some) / np.float32(len(images))
    return total


def load_predictor(
    run: Path, weights: str = "best", inference: Inference = AS_TRAINED
) -> Predictor:
    """The predictor of a run with its "best" or "last" weights. Raises InputError when the run or
    its weights are missing, damaged, or of another network."""
    path = weights_file(run, weights)
    settings = load_config(run)
    loaded = run_weights(settings, path)
    arrays = [loaded.arrays[name] for name in loaded.names]
    # Weights of coarse steps predict by the network of these.
    predictor = Predictor(config_of_state(settings, loaded.state), arrays, inference)
    predictor.checkpoint = path.name
    predictor.weights_sha256 = loaded.arrays.sha256
    return predictor

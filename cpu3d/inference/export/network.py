"""An exported network that predicts, as a run does.

predictor = ExportedPredictor(Path("exported"))     # for `predict --network exported`
"""

import logging
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Sequence

import numpy as np
import tensorflow as tf

from cpu3d.data.manifest import CaseRecord
from cpu3d.data.normalise import in_units, levels_of
from cpu3d.data.region import Region, Shape3, xyz
from cpu3d.errors import InputError
from cpu3d.inference.export.contract import FILE, OUTPUT, SCHEMA
from cpu3d.inference.postprocessing.rules import PostProcessing
from cpu3d.inference.predictor import AS_TRAINED, Predictor
from cpu3d.inference.runs import Inference, check_inference
from cpu3d.run.config_json import config_from_json
from memory_estimator.common.files import read_record, typed


class ExportedPredictor(Predictor):
    """The network of a folder that `export` has written, with the interface of a run's. Raises
    InputError for a folder without one."""

    def __init__(self, folder: Path, inference: Inference = AS_TRAINED):
        try:
            about = read_record(folder / FILE, SCHEMA, dict, "export again", InputError)
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(
                f"--network {folder} must hold an {FILE}, found none; name what `export` has "
                "written"
            ) from None
        config = config_from_json(about["config"])
        check_inference(config, inference)
        super().__init__(config, [], inference)
        self.weights_choice = about["weights"]  # "best" or "last"
        self.weights_sha256 = about["weights_sha256"]
        self.postprocessing = typed(about["postprocessing"], PostProcessing)
        self._inputs = about["inputs"]
        self._exported = load_network(folder / about["file"], about["format"])
        self._network = self._logits_of_tile
        self._statistics: Dict[str, np.ndarray] = {}

    def _seen(
        self, image: np.ndarray, record: CaseRecord, region: Region, present: Sequence[str]
    ) -> tf.Tensor:
        """Intensities of the source instead of scores: the network normalises."""
        levels = levels_of(record.statistics, self.config.normalisation_of(present))
        steps, offsets = np.array([each[-2:] for each in record.statistics]).T
        origin = 0.0 if levels.window is None else levels.window[:, 2]
        around = np.float32(origin * steps + offsets)
        shape = xyz(image.shape[:3])
        values = in_units(image[region.slices(shape)], record.units).astype(np.float32) - around
        values = np.pad(values, [*region.padding(shape), (0, 0)]) + around
        # A score is (value - mean) / std, of any kind.
        constant = levels.shift + levels.outside - origin * levels.scale
        picked = [present.index(name) for name in self.inputs]
        statistics = {
            "mean": offsets - constant / levels.scale * steps,
            "std": steps / levels.scale,
        }
        self._statistics = {}
        for name, each in statistics.items():
            if name in self._inputs:
                self._statistics[name] = np.float32(each[picked])
        return tf.constant(values[None, ..., picked])

    def _logits(self, image: Any, window: Optional[Shape3]) -> np.ndarray:
        if window and "mean" not in self._inputs:
            raise InputError(
                "--network must name an export that takes a mean to answer in windows, got one "
                "that normalises what it is given; predict with --run"
            )
        return super()._logits(image, window)

    def _logits_of_tile(self, image: tf.Tensor) -> tf.Tensor:
        return tf.constant(self._exported(image=image.numpy()[0], **self._statistics)[None])


def load_network(file: Path, format_: str) -> Callable[..., np.ndarray]:
    """A network as a function of its inputs by name."""
    if format_ == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        return lambda **inputs: session.run(None, inputs)[0]
    # It warns that gradients, which no export has, are not there.
    logging.getLogger("absl").setLevel(logging.ERROR)
    model = tf.saved_model.load(str(file))

    def network(**inputs: Any) -> np.ndarray:
        tensors = {name: tf.constant(array) for name, array in inputs.items()}
        answer: np.ndarray = model.signatures["serving_default"](**tensors)[OUTPUT].numpy()
        return answer

    return network

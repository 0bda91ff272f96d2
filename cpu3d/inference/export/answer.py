"""A network that was exported, asked as another program would: read from its files, with nothing of the run at hand.

python -m cpu3d.inference.export.answer '{"format": "onnx", "file": ..., "output": ..., "question": ..., ...}'

`question` is an .npz with image (X, Y, Z, C) float32 and, for windows, mean and std (C,); `answer` is written, an .npy
of probabilities (X, Y, Z, R) float32.
"""

import json
import sys
from typing import Any, Callable, Dict

import numpy as np

from cpu3d.inference.sliding_window import sliding_window


def main() -> None:
    request = json.loads(sys.argv[1])
    with np.load(request["question"], allow_pickle=False) as question:
        given = {name: question[name] for name in question.files}
    np.save(request["answer"], probabilities(request, given))


def probabilities(request: Dict[str, Any], given: Dict[str, np.ndarray]) -> np.ndarray:
    """Float32 (X, Y, Z, R), from one call or from windows."""
    network = _LOADERS[request["format"]](request["file"], request["output"])
    image = given.pop("image")
    if not request["window"]:
        return network(image=image)

    def at_tile(tile):
        return network(image=tile[0], **given)[None]

    logits = sliding_window(at_tile, image[None], tuple(request["window"]))
    return (0.5 + 0.5 * np.tanh(logits.astype(np.float64) / 2)).astype(np.float32)  # a sigmoid that overflows nowhere


# --- Private helpers ---


def _saved_model(file: str, output: str) -> Callable[..., np.ndarray]:
    import tensorflow as tf

    loaded = tf.saved_model.load(file)  # its variables live as long as it does
    network = loaded.signatures["serving_default"]
    return lambda **given: network(**{name: tf.constant(one) for name, one in given.items()})[output].numpy()


def _onnx(file: str, output: str) -> Callable[..., np.ndarray]:
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda **given: session.run([output], given)[0]


_LOADERS = {"savedmodel": _saved_model, "onnx": _onnx}

if __name__ == "__main__":
    main()

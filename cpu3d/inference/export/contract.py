"""What an exported network takes and gives: export.json, a program in USAGE.md, and how to ask the files.

    python -m cpu3d.inference.export.contract '{"format": "onnx", "file": ..., "output": ..., "question": ..., ...}'

reads an exported network as another program would, from its files, with nothing of the run at hand. `question` is an
.npz with image (X, Y, Z, C) float32 and, for windows, mean and std (C,); `answer` is written, an .npy of probabilities
(X, Y, Z, R) float32. Importing this does not import TensorFlow.
"""

import dataclasses
import json
import sys
from dataclasses import dataclass
from typing import Any, Callable, Dict, Tuple

import numpy as np

from cpu3d.data.labels import THRESHOLD, code_meanings, paint_order
from cpu3d.data.region import Shape3
from cpu3d.data.sampling import OVERLAP
from cpu3d.errors import InputError
from cpu3d.settings import RunConfig
from cpu3d.training.sliding_window import SIGMA_SHARE, sliding_window

SCHEMA = 1
"""Version of export.json."""

WRITER = "cpu3d export"

FILES = {"savedmodel": "saved_model", "onnx": "model.onnx"}
"""Format -> what holds the network."""

PACKAGES = {"savedmodel": "tensorflow", "onnx": "onnxruntime"}
"""What reads each format."""


@dataclass(frozen=True)
class Contract:
    """One exported network. What a run on whole volumes and one on patches promise differs in one thing only:

    Statistics are those of the whole volume's non-zero voxels. Where the network sees all of them at once, they are
    worked out inside and the answer is probabilities. A window does not see them, so whoever slides it gives them, and
    gets logits, because those are what windows are blended by.
    """

    config: RunConfig
    """Of the run; its network is float32 here and its grid is `size`."""
    trained_dtype: str
    """Compute dtype of the run's own network."""
    file: str
    """What holds the network, beside export.json."""

    @property
    def size(self) -> Shape3:
        """Voxels X, Y, Z of the image that the network takes."""
        return tuple(self.config.grid)

    @property
    def slides(self) -> bool:
        """Whether the network takes windows of a volume rather than all of it."""
        return self.config.is_patch

    @property
    def regions(self) -> Dict[str, Tuple[int, ...]]:
        """Region -> label codes, in the order of the answer's last axis."""
        return {name: self.config.region_codes[name] for name in self.config.regions}

    @property
    def output(self) -> str:
        """Name of the answer."""
        return "logits" if self.slides else "probabilities"

    def inputs(self) -> Dict[str, Dict[str, Any]]:
        """Name -> dtype, shape and meaning, as in export.json."""
        channels = len(self.config.channels)
        image = {
            "dtype": "float32",
            "shape": [*self.size, channels],
            "axes": "X, Y, Z towards right, anterior, superior; then the channels",
            "values": "intensities as in the file; 0 is background",
        }
        if not self.slides:
            return {"image": image}
        rest = "of each channel over the non-zero voxels of the whole volume, intensities as in the file"
        return {
            "image": image,
            "mean": {"dtype": "float32", "shape": [channels], "values": f"mean {rest}"},
            "std": {"dtype": "float32", "shape": [channels], "values": f"standard deviation (division by n) {rest}"},
        }  # fmt: skip

    def to_json(self) -> Dict[str, Any]:
        """Everything in export.json that follows from the run's settings."""
        config, unet = self.config, dataclasses.asdict(self.config.unet)
        return {
            "schema": SCHEMA,
            "written_by": WRITER,
            "file": self.file,
            "inputs": self.inputs(),
            "outputs": {
                self.output: {"dtype": "float32", "shape": [*self.size, len(config.regions)], "regions": config.regions}
            },
            "channels": config.channels,
            "regions": self.regions,
            "threshold": THRESHOLD,
            "label_names": {str(code): name for code, name in config.label_names.items()},
            "label_codes": {str(c): name for c, name in code_meanings(self.regions, config.label_names).items()},
            "paint": [[{"output": at, "code": code} for at, code in group] for group in paint_order(self.regions)],
            "axes": "RAS",
            "extent": config.extent,
            "mode": config.mode,
            "size": self.size,
            "overlap": OVERLAP if self.slides else None,
            "sigma": SIGMA_SHARE if self.slides else None,
            "network": {name: value for name, value in unet.items() if name != "policy"},
            "trained_dtype": self.trained_dtype,
        }  # fmt: skip


# --- Asking the files ---


def main() -> None:
    """Answer the request on the command line."""
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


def require_onnx() -> Any:
    """The onnx package. Raises InputError where it or onnxruntime, which the result is tried with, is missing."""
    try:
        import onnx
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"onnx and onnxruntime must be installed for --format onnx, got {error}; run `./run.sh setup`, or choose"
            " --format savedmodel"
        ) from None
    return onnx


# --- USAGE.md ---


def usage(contract: Contract, format_: str) -> str:
    """The text of USAGE.md. The program in it is run by the tests as it stands."""
    channels = ", ".join(contract.config.channels)
    codes = ", ".join(f"{code} {name}" for code, name in contract.to_json()["label_codes"].items())
    return f"""# How to use this network

`{contract.file}` holds the network, `export.json` its inputs, outputs, size and label codes, its origin and how well it
agrees with `predict`. Keep the files of this folder together.

It takes {channels}, each a 3D file in this order, or together a 4D file. `predict` rounds images whose voxels are not
all whole numbers from -32768 to 32767 to float16 after normalisation; this network does not.
Save the program below as `segment.py` beside `export.json` and run it (pip install nibabel {PACKAGES[format_]}):

    python segment.py IMAGE.nii.gz [IMAGE.nii.gz ...] LABEL.nii.gz

```python
{_program(contract, format_)}```

The label lies on the image's own place in space, with axes R A S; codes: {codes}.
"""


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


def _program(contract: Contract, format_: str) -> str:
    box = _BOX if contract.config.extent == "brain" else _GRID
    return _BEGIN + _LOAD[format_] + _READ + box + (_SLIDE if contract.slides else _ONE_CALL) + _END


_BEGIN = """\
import itertools, json, pathlib, sys
import nibabel, numpy as np

here = pathlib.Path(__file__).resolve().parent
about = json.loads((here / "export.json").read_text())
"""

_LOAD = {
    "savedmodel": """\
import tensorflow as tf
model = tf.saved_model.load(str(here / about["file"]))
ask = model.signatures["serving_default"]
answer_of = lambda **given: ask(**{name: tf.constant(value) for name, value in given.items()})
network = lambda **given: answer_of(**given)[next(iter(about["outputs"]))].numpy()
""",
    "onnx": """\
import onnxruntime
session = onnxruntime.InferenceSession(str(here / about["file"]), providers=["CPUExecutionProvider"])
network = lambda **given: session.run(None, given)[0]
""",
}

_READ = """
*paths, target = sys.argv[1:]
files = [nibabel.as_closest_canonical(nibabel.load(path)) for path in paths]  # axes R A S
image = np.concatenate([file.get_fdata(dtype=np.float32).reshape(*file.shape[:3], -1) for file in files], -1)
image = np.nan_to_num(image, posinf=0, neginf=0)
shape, size = image.shape[:3], about["size"]
"""

_BOX = """\
full = [np.flatnonzero((image != 0).any(tuple({0, 1, 2, 3} - {axis}))) for axis in range(3)]
low, high = [at[0] for at in full], [at[-1] + 1 for at in full]  # the box around all non-zero voxels
"""

_GRID = """\
low, high = (0, 0, 0), shape
"""

_CROP = """\
{size}start = [
    min(max(a - (w - (b - a)) // 2, 0), n - w) if w < n else -((w - n) // 2)
    for a, b, w, n in zip(low, high, {name}, shape)
]
inside = tuple(slice(max(s, 0), min(s + w, n)) for s, w, n in zip(start, {name}, shape))
before = [max(-s, 0) for s in start]
part = np.zeros((*{name}, image.shape[3]), np.float32)
place = tuple(slice(b, b + i.stop - i.start) for b, i in zip(before, inside))
part[place] = image[inside]
"""

_ONE_CALL = (
    """\
assert all(b - a <= w for a, b, w in zip(low, high, size)), "the brain does not fit: export with a larger --size"
"""
    + _CROP.format(name="size", size="")
    + """\
answer = network(image=part)
"""
)

_SLIDE = (
    _CROP.format(name="whole", size="whole = [max(b - a, w) for a, b, w in zip(low, high, size)]\n")
    + """\
seen = [image[..., channel][image[..., channel] != 0].astype(np.float64) for channel in range(image.shape[3])]
mean, std = (np.float32([getattr(values, name)() for values in seen]) for name in ("mean", "std"))
bells = [np.exp(-0.5 * ((np.arange(w) - (w - 1) / 2) / (w * about["sigma"])) ** 2) for w in size]
bell = np.einsum("x,y,z->xyz", *bells).astype(np.float32)[..., None]
steps = [-(-(n - w) // max(int(w * (1 - about["overlap"])), 1)) for n, w in zip(whole, size)]
starts = [[i * (n - w) // max(k, 1) for i in range(k + 1)] for n, w, k in zip(whole, size, steps)]
total, weight = 0 * part[..., :1] + np.zeros(len(about["regions"]), np.float32), 0 * part[..., :1]
for corner in itertools.product(*starts):
    tile = tuple(slice(s, s + w) for s, w in zip(corner, size))
    total[tile] += bell * network(image=part[tile], mean=mean, std=std)
    weight[tile] += bell
answer = 0.5 + 0.5 * np.tanh(total / weight / 2)  # logits are blended, and then the sigmoid
"""
)

_END = """
probabilities = np.zeros((*shape, answer.shape[-1]), np.float32)
probabilities[inside] = answer[place]
label = np.zeros(shape, np.uint8)
for group in about["paint"]:  # later groups override earlier ones
    rivals = probabilities[..., [one["output"] for one in group]]
    codes = np.uint8([one["code"] for one in group])[rivals.argmax(-1)]
    label = np.where(rivals.max(-1) >= about["threshold"], codes, label)
nibabel.save(nibabel.Nifti1Image(label, files[0].affine), target)
"""

if __name__ == "__main__":
    main()

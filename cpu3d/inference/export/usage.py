"""USAGE.md beside an exported network: a program that segments one case with it, and with nothing of this project."""

from typing import Mapping

from cpu3d.inference.export.contract import Contract

PACKAGES = {"savedmodel": "tensorflow", "onnx": "onnxruntime"}
"""What reads each format."""


def usage(contract: Contract, format_: str) -> str:
    """The text of USAGE.md. The program in it is run by the tests as it stands."""
    channels = ", ".join(contract.config.channels)
    return f"""# How to use this network

`{contract.file}` holds the network, `export.json` says all there is to know about it: inputs, outputs, how to crop, how
to paint a label, where it comes from and how well it agrees with `predict`. Keep the files of this folder together.

It takes {channels}, each a 3D file in this order, or together a 4D file.
Save the program below as `segment.py` beside `export.json` and run it (pip install nibabel {PACKAGES[format_]}):

    python segment.py IMAGE.nii.gz [IMAGE.nii.gz ...] LABEL.nii.gz

```python
{_program(contract, format_)}```

The label lies on the image's own place in space, with axes R A S; codes: {_listed(contract)}.
"""


def program(text: str) -> str:
    """The program in the text of a USAGE.md."""
    return text.split("```python\n", 1)[1].split("```", 1)[0]


# --- Private helpers ---


def _program(contract: Contract, format_: str) -> str:
    box = _BOX if contract.config.extent == "brain" else _GRID
    return _BEGIN + _LOAD[format_] + _READ + box + (_SLIDE if contract.slides else _ONE_CALL) + _END


def _listed(contract: Contract) -> str:
    codes: Mapping[str, str] = contract.to_json()["label_codes"]
    return ", ".join(f"{code} {name}" for code, name in codes.items())


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

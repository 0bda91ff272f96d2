"""What an exported network takes and gives: export.json, and a program in USAGE.md. Imports no TensorFlow."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Tuple

from cpu3d.data.labels import THRESHOLD, code_meanings, paint_order
from cpu3d.data.windows import OVERLAP, SIGMA_SHARE
from cpu3d.errors import InputError
from cpu3d.settings import RunConfig
from memory_estimator.installed import how_to_install

FILES = {"savedmodel": "saved_model", "onnx": "model.onnx"}  # format -> what holds the network
PACKAGES = {"savedmodel": "tensorflow", "onnx": "onnxruntime"}  # what reads each format


@dataclass(frozen=True)
class Contract:
    """What one exported network takes and gives. A network of whole volumes computes the statistics of their non-zero
    voxels and gives probabilities. A window does not see the volume: the caller passes the statistics, and gets logits
    to blend."""

    config: RunConfig  # of the run; its network is float32 here and its grid is what it takes
    trained_dtype: str
    format: str  # one of FILES

    @property
    def regions(self) -> Dict[str, Tuple[int, ...]]:
        """Region -> label codes, in the order of the answer's last axis."""
        return {name: self.config.region_codes[name] for name in self.config.regions}

    @property
    def output(self) -> str:
        return "logits" if self.config.is_patch else "probabilities"

    def inputs(self) -> Dict[str, Dict[str, Any]]:
        """Name -> dtype, shape and meaning, as in export.json."""
        channels = len(self.config.channels)
        image = {
            "dtype": "float32",
            "shape": [*self.config.grid, channels],
            "axes": "X, Y, Z towards right, anterior, superior; then the channels",
            "values": "intensities as in the file; 0 is background",
        }
        given = {"dtype": "float32", "shape": [channels]}
        rest = "of each channel over the non-zero voxels of the whole volume, intensities as in the file"
        mean = {**given, "values": f"mean {rest}"}
        std = {**given, "values": f"standard deviation (division by n) {rest}"}
        return {"image": image, "mean": mean, "std": std} if self.config.is_patch else {"image": image}

    def to_json(self) -> Dict[str, Any]:
        """Everything in export.json that follows from the run's settings."""
        config, unet = self.config, dataclasses.asdict(self.config.unet)
        answer = {"dtype": "float32", "shape": [*self.config.grid, len(config.regions)], "regions": config.regions}
        return {
            "schema": 1,
            "written_by": "cpu3d export",
            "file": FILES[self.format],
            "inputs": self.inputs(),
            "outputs": {self.output: answer},
            "channels": config.channels,
            "regions": self.regions,
            "threshold": THRESHOLD,
            "label_names": {str(code): name for code, name in config.label_names.items()},
            "label_codes": {str(c): name for c, name in code_meanings(self.regions, config.label_names).items()},
            "paint": [[{"output": at, "code": code} for at, code in group] for group in paint_order(self.regions)],
            "axes": "RAS",
            "extent": config.extent,
            "mode": config.mode,
            "size": self.config.grid,
            "overlap": OVERLAP if self.config.is_patch else None,
            "sigma": SIGMA_SHARE if self.config.is_patch else None,
            "network": {name: value for name, value in unet.items() if name != "policy"},
            "trained_dtype": self.trained_dtype,
            "format": self.format,
        }


def require_onnx() -> Any:
    """The onnx package. Raises InputError where it or onnxruntime, which the result is tried with, is missing."""
    try:
        import onnx
        import onnxruntime  # noqa: F401
    except ImportError as error:
        rule = f"onnx and onnxruntime must be installed for --format onnx, got {error}"
        raise InputError(f"{rule}; {how_to_install('onnx')}, or choose --format savedmodel") from None
    return onnx


def usage(contract: Contract) -> str:
    """The text of USAGE.md, with the program of segment.py."""
    channels = ", ".join(contract.config.channels)
    about, package = contract.to_json(), PACKAGES[contract.format]
    codes = ", ".join(f"{code} {name}" for code, name in about["label_codes"].items())
    program = Path(__file__).with_name("segment.py").read_text(encoding="utf-8")
    return f"""# How to use this network

`{about["file"]}` holds the network, `export.json` its inputs, outputs, size and label codes, its origin and how well it
agrees with `predict`. Keep the files of this folder together.

It takes {channels}, each a 3D file in this order, or together a 4D file. `predict` rounds images whose voxels are not
all whole numbers from -32768 to 32767 to float16 after normalisation; this network does not.
Save the program below as `segment.py` beside `export.json` and run it (pip install nibabel {package}):

    python segment.py IMAGE.nii.gz [IMAGE.nii.gz ...] LABEL.nii.gz

```python
{program}```

The label has the image's place in space, with axes R A S; codes: {codes}.
"""

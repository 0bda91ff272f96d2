"""What an exported network takes and gives, in words and numbers: the content of export.json. No TensorFlow."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Dict, List, Tuple

from cpu3d.config import RunConfig
from cpu3d.data.labels import THRESHOLD, code_meanings, paint_order
from cpu3d.data.region import Shape3
from cpu3d.data.sampling import OVERLAP
from cpu3d.inference.sliding_window import SIGMA_SHARE

SCHEMA = 1
"""Version of export.json."""

WRITER = "cpu3d export"


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
            "recipe": self.recipe(),
            "network": {name: value for name, value in unet.items() if name != "policy"},
            "trained_dtype": self.trained_dtype,
        }  # fmt: skip

    def recipe(self) -> List[str]:
        """How to get from an image file to a label map, step by step."""
        size = " x ".join(map(str, self.size))
        box = (
            "Find the box: the smallest that holds every voxel that is non-zero in any channel."
            if self.config.extent == "brain"
            else "The box is the whole volume."
        )
        asks = f"{size} voxels or the box, whichever is larger along each axis" if self.slides else f"{size} voxels"
        steps = [
            f"Turn the image to axes R A S; channels last, in this order: {', '.join(self.config.channels)}.",
            "Set NaN and infinite voxels to 0, which is background.",
            box,
            f"Crop to {asks}. Along an axis where the volume is longer than that, start at box start - (size - box"
            " size) // 2, shifted so as to stay inside the volume. Where it is not, take all of it, with zeros around:"
            " (size - volume) // 2 before, the rest after.",
        ]
        if self.slides:
            steps += [
                "mean and std: of each channel over its non-zero voxels.",
                f"Slide a window of {size} voxels over the crop: along each axis the fewest evenly spread windows that"
                f" overlap by {OVERLAP:g} of their size or more, the first and the last flush with the crop's ends.",
                "Blend the logits by a mean weighted with a Gaussian around each window's middle, whose standard"
                f" deviation is {SIGMA_SHARE:g} of the window's size along each axis; then take the sigmoid.",
            ]
        else:
            steps.append(
                f"A box larger than {size} does not fit: export once more with a larger --size. Statistics are worked"
                " out inside, over the crop's non-zero voxels, which are the volume's."
            )
        return [
            *steps,
            "`predict` rounds images whose voxels are not all whole numbers from -32768 to 32767 to float16 first,"
            " after normalisation; the exported network does not, so there they differ by that rounding.",
            "Outside the crop every probability is 0.",
            "Paint the label: begin with 0 everywhere, then group by group of `paint`, in order: a voxel whose largest"
            " probability among the group's outputs is the threshold or more gets the code of that output, the first in"
            " a tie. Later groups override earlier ones.",
        ]

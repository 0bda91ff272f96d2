"""What a program must know of an exported network: export.json.

config = exported_config(load_config(run))
about = contract(config, "onnx", postprocessing)
"""

import dataclasses
from typing import Any, Dict

from cpu3d.data.labels import THRESHOLD, code_meanings, paint_order
from cpu3d.data.sampling import LABEL_MARGIN
from cpu3d.data.windows import OVERLAP, SIGMA_SHARE
from cpu3d.inference.postprocessing.rules import PostProcessing
from cpu3d.inference.runs import Inference, mirrored_axes_of
from cpu3d.settings import RunConfig

FILE = "export.json"
SCHEMA = 2  # of that file
FILES = {"savedmodel": "saved_model", "onnx": "model.onnx"}
"""Format -> file or folder of the network."""
OUTPUT = "logits"  # name of a network's output
SIDES = ("X", "Y", "Z")  # of an image, any that are multiples of what the network needs


def exported_config(config: RunConfig) -> RunConfig:
    """The run as it is exported: in float32."""
    unet = dataclasses.replace(config.unet, dtype="float32", policy="speed")
    return dataclasses.replace(config, unet=unet)


def contract(config: RunConfig, format_: str, postprocessing: PostProcessing) -> Dict[str, Any]:
    """Inputs and outputs of an exported network: everything in export.json that follows from
    `exported_config` and the post-processing.

    It returns logits: the caller takes their mean over windows and mirror images, and then the
    sigmoid. With a `crop_margin` the network answers once more, likewise, on the crop around all
    voxels where some logit is above 0, and that takes the place of the first answer: the box of
    these voxels with so many on each side, its sides rounded up to `multiples`, centred, and moved
    into the volume."""
    regions = config.codes_by_region  # in the order of the answer's last axis
    answer = {"dtype": "float32", "shape": [*SIDES, len(regions)], "regions": config.regions}
    paint = [
        [{"output": output, "code": code} for output, code in group]
        for group in paint_order(regions)
    ]
    meanings = code_meanings(regions, config.label_names)
    return {
        "schema": SCHEMA,
        "written_by": "cpu3d export",
        "file": FILES[format_],
        "inputs": inputs_of(config),
        "outputs": {OUTPUT: answer},
        "channels": config.channels,
        "normalisation": [each.to_json() for each in config.normalisation_of(config.channels)],
        "regions": regions,
        "threshold": THRESHOLD,
        "label_codes": {str(code): name for code, name in meanings.items()},
        "paint": paint,
        "axes": "RAS",
        "target_spacing_mm": config.target_spacing_mm,
        "mirrored_axes": mirrored_axes_of(config, Inference()),
        "multiples": config.unet.divisors,  # of the sides
        "crop_margin": LABEL_MARGIN if config.whole_every > 1 else None,
        "window": config.grid if config.is_patch else None,
        "overlap": OVERLAP if config.is_patch else None,
        "sigma": SIGMA_SHARE if config.is_patch else None,
        "format": format_,
        "postprocessing": dataclasses.asdict(postprocessing),
        "postprocessing_in_words": postprocessing.words,
        "config": config.to_json(),
    }


def inputs_of(config: RunConfig) -> Dict[str, Dict[str, Any]]:
    """What an exported network takes, by name. One of whole volumes computes the statistics of
    their non-zero voxels. A window or a crop does not see the volume, so the caller passes them; as
    well if a channel is not normalised over its foreground."""
    around = (
        "outside of the volume what surrounds it" if config.normalisation else "0 is background"
    )
    image = {
        "dtype": "float32",
        "shape": [*SIDES, len(config.channels)],
        "axes": "X, Y, Z towards right, anterior, superior; then the channels",
        "values": f"intensities as in the file; {around}",
    }
    inputs = {"image": image}
    if config.is_patch or config.whole_every > 1 or config.normalisation:
        statistic = {"dtype": "float32", "shape": [len(config.channels)]}
        inputs["mean"] = {**statistic, "values": "what normalisation takes from each channel"}
        inputs["std"] = {**statistic, "values": "by what it then divides"}
    return inputs

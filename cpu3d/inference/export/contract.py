"""What another program must know of an exported network: export.json, and the text of USAGE.md.

    config = exported_config(load_config(run))
    about = {**contract(config, "bfloat16", "onnx"), "postprocessing": rules.steps(regions)}
    usage(about)

The program in USAGE.md is made of image.py and segment.py, which need nothing of this project."""

import dataclasses
from pathlib import Path
from typing import Any, Dict, List, Optional

from cpu3d.data.cases.normalisation import refuses_ct
from cpu3d.data.datasets.names import CHANNEL_NAMES, channel_key
from cpu3d.data.labels import THRESHOLD, code_meanings, paint_order
from cpu3d.data.normalise import of_all
from cpu3d.data.region import Shape3
from cpu3d.data.windows import OVERLAP, SIGMA_SHARE
from cpu3d.errors import InputError
from cpu3d.inference.runs import Inference, mirrored_axes_of
from cpu3d.settings import RunConfig

FILES = {"savedmodel": "saved_model", "onnx": "model.onnx"}
"""Format -> file or folder of the network."""


def exported_config(config: RunConfig, size: Optional[Shape3] = None) -> RunConfig:
    """The run as it is exported: in float32, for images of `size`, by default its own grid. Raises
    InputError for a size that the network cannot take, and for a run at a lower resolution."""
    if config.resolution != 1:
        rule = f"export needs a run at full resolution, got {config.resolution:g}"
        raise InputError(
            f"{rule}: an exported network does not make images smaller; export another run"
        )
    size = tuple(size or config.grid)
    try:
        config.unet.check_shape(size, "--size")
    except ValueError as error:
        raise InputError(str(error)) from None
    unet = dataclasses.replace(config.unet, dtype="float32", policy="speed")
    return dataclasses.replace(config, grid=size, unet=unet)


def contract(config: RunConfig, trained_dtype: str, format_: str) -> Dict[str, Any]:
    """Inputs and outputs of an exported network: everything in export.json that follows from
    `exported_config`.

    It returns logits: the caller takes their mean over windows and mirror images, and then the
    sigmoid. A network of whole volumes computes the statistics of their non-zero voxels; a window
    does not see the volume, so the caller passes them. The caller passes them as well if a channel
    is not normalised over its foreground: "normalisation" then has the kind of each."""
    regions = config.codes_by_region  # in the order of the answer's last axis
    answer = {"dtype": "float32", "shape": [*config.grid, len(regions)], "regions": config.regions}
    paint = []
    for group in paint_order(regions):
        paint.append([{"output": output, "code": code} for output, code in group])
    meanings = code_meanings(regions, config.label_names)
    network = config.unet.to_json()
    del network["policy"]
    normalisation = {}
    if config.normalisation:
        kinds = config.normalisation_of(config.channels)
        normalisation = {"normalisation": [each.to_json() for each in kinds]}
    return {
        "schema": 1,
        "written_by": "cpu3d export",
        "file": FILES[format_],
        "inputs": _inputs(config),
        "outputs": {"logits": answer},
        "channels": config.channels,
        "channel_names": _channel_names(config),
        "not_ct": _not_ct(config),
        **normalisation,
        "regions": regions,
        "threshold": THRESHOLD,
        "label_names": {str(code): name for code, name in config.label_names.items()},
        "label_codes": {str(code): name for code, name in meanings.items()},
        "paint": paint,
        "axes": "RAS",
        "trained_spacing_mm": config.spacing_mm,
        "target_spacing_mm": config.target_spacing_mm,
        "trained_with_orientation": config.oriented,
        "extent": config.extent,
        "mode": config.mode,
        "mirrored_axes": mirrored_axes_of(config, Inference()),
        "size": config.grid,
        "overlap": OVERLAP if config.is_patch else None,
        "sigma": SIGMA_SHARE if config.is_patch else None,
        "network": network,
        "trained_dtype": trained_dtype,
        "format": format_,
    }


def _inputs(config: RunConfig) -> Dict[str, Dict[str, Any]]:
    """What an exported network takes, by name."""
    around = "0 is background"
    over = "over the non-zero voxels of the whole volume, intensities as in the file"
    if config.normalisation:
        around = "outside of the volume what surrounds it"
        over = "as `numbers_of` gives it by the kind of its normalisation"
    image = {
        "dtype": "float32",
        "shape": [*config.grid, len(config.channels)],
        "axes": "X, Y, Z towards right, anterior, superior; then the channels",
        "values": f"intensities as in the file; {around}",
    }
    inputs = {"image": image}
    if config.is_patch or config.normalisation:
        statistic = {"dtype": "float32", "shape": [len(config.channels)]}
        deviation = "standard deviation (division by n)"
        inputs["mean"] = {**statistic, "values": f"mean of each channel {over}"}
        inputs["std"] = {**statistic, "values": f"{deviation} of each channel {over}"}
    return inputs


def _not_ct(config: RunConfig) -> List[str]:
    """The channels that must not look like CT, as `predict` refuses them."""
    kinds = of_all(config.normalisation_of(config.channels), len(config.channels))
    return [name for name, each in zip(config.channels, kinds) if refuses_ct(name, each)]


def _channel_names(config: RunConfig) -> Dict[str, List[str]]:
    """Channel -> what it may be called in a dataset.json and at the end of a file's name, nnU-Net's
    number included; in lower case, without blanks, - and _. The network's channels come first;
    files of the others are not taken for these."""
    names: Dict[str, List[str]] = {}
    keys = set()
    for channel in (*config.channels, *config.store_channels, *CHANNEL_NAMES.values()):
        key = channel_key(channel)
        if key in keys:
            continue
        keys.add(key)
        names[channel] = [name for name, known in CHANNEL_NAMES.items() if known == key] or [key]
        if channel in config.store_channels:
            names[channel].append(f"{config.store_channels.index(channel):04d}")
    return names


def usage(about: Dict[str, Any]) -> str:
    """The text of USAGE.md, with the `program`; `about` is the `contract` with the
    post-processing."""
    codes = ", ".join(f"{code} {name}" for code, name in about["label_codes"].items())
    package = {"savedmodel": "tensorflow", "onnx": "onnxruntime"}[about["format"]]
    return f"""# How to use this network

`{about["file"]}` holds the network, `export.json` its inputs, outputs, size and label codes,
its origin and how well it agrees with `predict`. Keep the files of this folder together.

It takes {", ".join(about["channels"])}, each a 3D file, or together a 4D file.
Channels are found by the names in a dataset.json above imagesTr or imagesTs, or at the end of 3D
files' names (`channel_names` in `export.json`); if no name tells, they must be in this order.
`predict` rounds images whose voxels are not all whole numbers from -32768 to 32767, to
1/65534 of a channel's range; this network does not. Save the program
below as `segment.py` beside `export.json` and run it (pip install nibabel scipy {package}):

    python segment.py [--zero-nan] IMAGE.nii.gz [IMAGE.nii.gz ...] LABEL.nii.gz

It refuses images with NaN or infinite voxels unless --zero-nan makes these background, as `predict`
does.

```python
{program()}```

The label has the image's place in space, with axes R A S; codes: {codes}.
Post-processing, as `predict` does it: {about["postprocessing"]["words"]}.
"""


def program() -> str:
    """The program that segments with an exported network in one text: the imports and functions of
    image.py and segment.py."""
    folder = Path(__file__).parent
    image = (folder / "image.py").read_text(encoding="utf-8")
    segment = (folder / "segment.py").read_text(encoding="utf-8")
    about, _, _ = segment.partition("import ")
    lines = [*image.splitlines(), *segment.splitlines()]
    imports = sorted({line for line in lines if line.startswith("import ")})
    of_image, of_network = (text[text.index("\n\n\ndef ") :] for text in (image, segment))
    return about + "\n".join(imports) + of_image.rstrip() + of_network

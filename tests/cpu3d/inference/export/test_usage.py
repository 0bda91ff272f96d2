"""The program in USAGE.md crops, pads, blends and paints as `predict` does, whatever the shapes."""

import dataclasses
import json
import sys
import types

import nibabel
import numpy as np
import pytest

from cpu3d.data.labels import label_from_regions
from cpu3d.data.region import bounding_box, centred, crop, paste, whole
from cpu3d.inference.export.contract import Contract, usage
from cpu3d.settings import RunConfig
from cpu3d.training.sliding_window import sliding_window
from models.config import UNetConfig

REGIONS = {"all": (1, 2, 3, 4), "left": (1,), "right": (3,), "inner": (2,)}
"""One holds three that are as large as each other and so compete."""


class MadeUp:
    """A network whose logits depend on the normalised voxel and on where in its image it lies."""

    def __init__(self, slides):
        self.slides = slides

    @staticmethod
    def logits(scores):
        waves = np.sin(np.einsum("ixyz,i->xyz", np.indices(scores.shape[:3]), [1, 2, 3]))[..., None]
        return (
            waves
            + np.stack([scores[..., 0], -scores[..., 1], scores[..., 1] - scores[..., 0], scores[..., 1]], -1)
            - 0.2
        )

    @staticmethod
    def statistics(image):
        seen = [image[..., channel][image[..., channel] != 0].astype(np.float64) for channel in range(2)]
        return np.array([values.mean() for values in seen]), np.array([values.std() for values in seen])

    def run(self, _, given):
        image = given["image"]
        mean, std = (given["mean"], given["std"]) if self.slides else self.statistics(image)
        logits = self.logits(np.where(image == 0, 0, (image - mean) / std)).astype(np.float32)
        return [logits if self.slides else 1 / (1 + np.exp(-logits))]


@pytest.mark.parametrize("extent", ["brain", "full"])
@pytest.mark.parametrize("mode", ["whole", "patch"])
def test_the_program_finds_the_voxels_that_predict_looks_at(mode, extent, tmp_path, monkeypatch):
    rng = np.random.default_rng(4)
    for shape, size in (((9, 12, 7), (12, 8, 8)), ((10, 5, 11), (8, 8, 12)), ((13, 13, 13), (4, 12, 8))):
        config = RunConfig(
            label_names=dict(enumerate("0abcd")), region_codes=REGIONS, regions=tuple(REGIONS),
            channels=("FLAIR", "T1w"), mode=mode, extent=extent, grid=size, unet=UNetConfig(channels=2, outputs=4),
        )  # fmt: skip
        image = np.zeros((*shape, 2), np.float32)
        inside = tuple(slice(1, max(min(n - 2, want), 3)) for n, want in zip(shape, size))
        image[inside] = rng.integers(0, 99, image[inside].shape)
        box = bounding_box(image.any(-1)) if extent == "brain" else whole(shape)
        if mode == "whole":  # which fits, or is exported larger
            config = dataclasses.replace(config, grid=tuple(max(pair) for pair in zip(box.size, size)))
        contract = Contract(config, "float32", "model.onnx")

        region = centred(box, tuple(max(pair) for pair in zip(box.size, config.grid)), shape)
        mean, std = MadeUp.statistics(image)
        part = crop(image, region)
        scores = np.where(part == 0, 0, (part - mean) / std)
        window = config.grid if contract.slides else region.size
        logits = sliding_window(lambda tile: MadeUp.logits(tile[0])[None], scores[None], window)
        expected = label_from_regions(paste(1 / (1 + np.exp(-logits)), region, shape), REGIONS)
        assert len(np.unique(expected)) == 5

        made_up = types.SimpleNamespace(InferenceSession=lambda *_, slides=contract.slides, **__: MadeUp(slides))
        monkeypatch.setitem(sys.modules, "onnxruntime", made_up)
        (tmp_path / "export.json").write_text(json.dumps(contract.to_json()))
        nibabel.save(nibabel.Nifti1Image(image, np.diag([1, 1, 2, 1])), tmp_path / "image.nii")
        monkeypatch.setattr(sys, "argv", ["segment.py", str(tmp_path / "image.nii"), str(tmp_path / "label.nii")])
        program = usage(contract, "onnx").split("```python\n")[1].split("```")[0]
        exec(program, {"__file__": str(tmp_path / "segment.py")})
        found = np.asarray(nibabel.load(tmp_path / "label.nii").dataobj)
        np.testing.assert_array_equal(found, expected)

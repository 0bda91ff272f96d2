"""Data sets a few voxels large, written with nibabel itself and not with what is under test."""

import json
from pathlib import Path

import nibabel
import numpy as np
import pytest

SUFFIXES = {
    "brats2017": ("_flair", "_t1", "_t1ce", "_t2", "_seg"),
    "brats2023": ("-t2f", "-t1n", "-t1c", "-t2w", "-seg"),
}
SHAPE = (6, 5, 4)


@pytest.fixture
def write_nifti():
    """write_nifti(path, array, affine=None, codes=(1, 1)): a NIfTI-1 file, sform and qform codes as given."""

    def write(path: Path, array: np.ndarray, affine=None, codes=(1, 1)) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        image = nibabel.Nifti1Image(array, np.eye(4) if affine is None else affine)
        image.set_sform(image.affine, codes[0])
        image.set_qform(image.affine, codes[1])
        nibabel.save(image, path)
        return path

    return write


@pytest.fixture
def tiny_image():
    """tiny_image(seed): `(6, 5, 4)` int16 with zeros around values of 1 to 999."""

    def make(seed: int = 0) -> np.ndarray:
        volume = np.zeros(SHAPE, np.int16)
        volume[1:5, 1:4, 1:3] = np.random.default_rng(seed).integers(1, 1000, (4, 3, 2))
        return volume

    return make


@pytest.fixture
def tiny_label():
    """tiny_label(codes): `(6, 5, 4)` uint8 background with one voxel of every code."""

    def make(*codes: int) -> np.ndarray:
        label = np.zeros(SHAPE, np.uint8)
        for place, code in enumerate(codes):
            label[1 + place, 2, 1] = code
        return label

    return make


@pytest.fixture
def brats_case(write_nifti, tiny_image, tiny_label):
    """brats_case(folder, layout="brats2023", end=".nii.gz"): one good case; returns suffix -> file."""

    def write(folder: Path, layout: str = "brats2023", end: str = ".nii.gz", prefix: str = "") -> dict:
        codes = (1, 2, 4) if layout == "brats2017" else (1, 2, 3)
        files = {}
        for seed, suffix in enumerate(SUFFIXES[layout]):
            volume = tiny_label(*codes) if suffix.endswith("seg") else tiny_image(seed)
            files[suffix[1:]] = write_nifti(folder / f"{prefix or folder.name}{suffix}{end}", volume)
        return files

    return write


@pytest.fixture
def decathlon(write_nifti, tiny_image, tiny_label):
    """decathlon(folder, cases=3, **changes to dataset.json): a good data set; returns its folder."""

    def write(folder: Path, cases: int = 3, **changes) -> Path:
        training = []
        for number in range(cases):
            name = f"BRATS_{number:03d}.nii.gz"
            channels = [tiny_image(10 * number + channel) for channel in range(4)]
            write_nifti(folder / "imagesTr" / name, np.stack(channels, -1))
            write_nifti(folder / "labelsTr" / name, tiny_label(1, 2, 3))
            training.append({"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"})
        content = {
            "name": "BRATS",
            "modality": {"0": "FLAIR", "1": "T1w", "2": "t1gd", "3": "T2w"},
            "labels": {"0": "background", "1": "edema", "2": "non-enhancing tumor", "3": "enhancing tumour"},
            "training": training,
        }
        content.update(changes)
        folder.mkdir(exist_ok=True)
        (folder / "dataset.json").write_text(json.dumps(content))
        return folder

    return write

"""Data sets a few voxels large, written with nibabel itself and not with what is under test."""

import contextlib
import dataclasses
import hashlib
import json
import zlib
from pathlib import Path
from typing import Iterator

import nibabel
import numpy as np

from cpu3d.data.cases.case import centres_of
from cpu3d.data.manifest import (
    ArrayFile,
    CaseRecord,
    Geometry,
    Manifest,
    SourceFile,
    make_manifest,
)
from cpu3d.data.region import Region
from cpu3d.data.stores.convert import write_arrays

SUFFIXES = {
    "brats2017": ("_flair", "_t1", "_t1ce", "_t2", "_seg"),
    "brats2023": ("-t2f", "-t1n", "-t1c", "-t2w", "-seg"),
}
SHAPE = (6, 5, 4)
ALL = {"fractions": (1, 0, 0), "workers": 1}
"""How `prepare` trains on all cases, in one process."""


def write_nifti(
    path: Path, array: np.ndarray, affine=None, codes=(1, 1), qform=None, unit=None
) -> Path:
    """A NIfTI-1 file with these sform and qform codes; `qform` is one of another place, and `unit`
    the number that tells the unit of lengths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Nifti1Image(array, np.eye(4) if affine is None else affine)
    image.set_sform(image.affine, codes[0])
    image.set_qform(image.affine if qform is None else qform, codes[1])
    if unit is not None:
        image.header["xyzt_units"] = unit
    nibabel.save(image, path)
    return path


def tiny_image(seed: int = 0) -> np.ndarray:
    """`(6, 5, 4)` int16 with zeros around values of 1 to 999."""
    volume = np.zeros(SHAPE, np.int16)
    volume[1:5, 1:4, 1:3] = np.random.default_rng(seed).integers(1, 1000, (4, 3, 2))
    return volume


def tiny_label(*codes: int) -> np.ndarray:
    """`(6, 5, 4)` uint8 background with one voxel of every code."""
    label = np.zeros(SHAPE, np.uint8)
    for place, code in enumerate(codes):
        label[1 + place, 2, 1] = code
    return label


def brats_case(folder: Path, layout: str = "brats2023", end: str = ".nii.gz") -> dict:
    """One good case; returns suffix -> file."""
    codes = (1, 2, 4) if layout == "brats2017" else (1, 2, 3)
    files = {}
    for seed, suffix in enumerate(SUFFIXES[layout], zlib.crc32(folder.name.encode())):
        volume = tiny_label(*codes) if suffix.endswith("seg") else tiny_image(seed)
        files[suffix[1:]] = write_nifti(folder / f"{folder.name}{suffix}{end}", volume)
    return files


def decathlon(folder: Path, cases: int = 3, **changes) -> Path:
    """A good data set; returns its folder."""
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
        "labels": {
            "0": "background",
            "1": "edema",
            "2": "non-enhancing tumor",
            "3": "enhancing tumour",
        },
        "training": training,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dataset.json").write_text(json.dumps({**content, **changes}))
    return folder


@contextlib.contextmanager
def dataset_json(folder: Path) -> Iterator[dict]:
    """What a data set's list says, to be changed in place: it is written back."""
    path = folder / "dataset.json"
    content = json.loads(path.read_text())
    yield content
    path.write_text(json.dumps(content))


def content_of(folder: Path) -> dict:
    """Path in the folder -> the bytes of that file."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def nnunet(folder: Path, cases: int = 3, version: int = 2, **changes) -> Path:
    """The data set of `decathlon` as nnU-Net's raw data; returns its folder. A change to None
    leaves a field out."""
    content = json.loads((decathlon(folder, 0) / "dataset.json").read_text())
    for number in range(cases):
        name = f"BRATS_{number:03d}"
        for channel in range(4):
            path = folder / f"imagesTr/{name}_{channel:04d}.nii.gz"
            write_nifti(path, tiny_image(10 * number + channel))
        label = f"labelsTr/{name}.nii.gz"
        write_nifti(folder / label, tiny_label(1, 2, 3))
        content["training"].append({"image": f"./imagesTr/{name}.nii.gz", "label": f"./{label}"})
    if version == 2:
        del content["training"]
        content["channel_names"] = content.pop("modality")
        content["labels"] = {name: int(code) for code, name in content["labels"].items()}
    content.update(changes)
    content = {name: value for name, value in content.items() if value is not None}
    (folder / "dataset.json").write_text(json.dumps(content))
    return folder


def make_record(case_id: str = "a", **changes) -> CaseRecord:
    """The record of a labelled case (4, 4, 4) of one channel that is on no disk."""
    label = np.zeros((4, 4, 4), np.uint8)
    label[1, 2, 3] = 1
    digest = hashlib.sha256(case_id.encode()).hexdigest()
    fields = {
        "case_id": case_id, "patient_id": case_id, "shape": (4, 4, 4),
        "spacing_mm": (1.0, 1.0, 1.0), "box": Region((1, 1, 1), (2, 2, 3)),
        "max_abs_error": 0.0, "channel_mean": (1.5,),
        "channel_std": (0.5,), "channel_min": (1.0,), "channel_max": (2.0,), "channel_voxels": (8,),
        "zeroed_voxels": 0, "label_voxels": {0: 63, 1: 1}, "centres": centres_of(label),
        "geometry": Geometry((4, 4, 4), tuple(map(tuple, np.eye(4).tolist())), "RAS", 1, 1),
        "sources": (SourceFile(f"{case_id}.nii.gz", 99, digest, 0),),
        "format": "npy", "stored": Region((0, 0, 0), (4, 4, 4)),
        "image_voxels_sha256": digest, "label_voxels_sha256": digest,
    }  # fmt: skip
    record = CaseRecord(**{**fields, **changes})
    if "files" in changes:
        return record
    files = {kind: ArrayFile(256 if kind == "x" else 192, digest) for kind in record.kinds}
    return dataclasses.replace(record, files=files)


def manifest_of(records, split=None, **changes) -> Manifest:
    """The manifest of these cases; without a split all of them train."""
    split = {"val": (), "test": (), **(split or {"train": [record.case_id for record in records]})}
    fields = {
        "name": "made up",
        "layout": "decathlon",
        "channels": ("CT",),
        "labels": {0: "background", 1: "tumour"},
        "regions": {"tumour": (1,)},
        "split": split,
        "split_seed": 3,
        "cases": records,
        "versions": {"numpy": "1"},
    }
    return make_manifest(**{**fields, **changes})


def stored_case(folder: Path, image: np.ndarray, label: np.ndarray, kind="npy") -> CaseRecord:
    """Write a case's arrays; returns their record."""
    (folder / "cases").mkdir(parents=True, exist_ok=True)
    record = make_record(channel_mean=(0.0,) * image.shape[3], shape=label.shape)
    return write_arrays(folder, record, image, label, format_=kind, cropped=False)

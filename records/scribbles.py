"""Scribbles made of whole labels, to learn from few labelled voxels: a copy of a data set of
nnU-Net's layout in which the training cases of a fold keep about 1 % of their labels.

    python -m records.scribbles --dataset ACDC --splits splits_final.json --fold 1 --out scribbles

In each slice across Z a structure keeps its middle line: the voxels that are farther from its
border than their neighbours along X or Y, and than half of the farthest. The background keeps one
curve around all structures, 10 mm from them, and a cross through the slice's middle as far as it is
more than 20 mm away. All other voxels are "ignore". Scribbles of people are shorter and less
central (Valvano et al. 2021 drew ACDC's by hand).
"""

import argparse
import json
import shutil
from pathlib import Path

import nibabel
import numpy as np
from scipy import ndimage

CURVE_MM = 10.0  # from the structures to the background's curve
FAR_MM = 20.0  # from the structures to the background's cross


def middle_line(mask, spacing_mm):
    """Voxels (X, Y) of a mask's middle line."""
    # a border of the slice is one of the mask
    inside = ndimage.distance_transform_edt(np.pad(mask, 1), sampling=spacing_mm)[1:-1, 1:-1]
    along_x = inside >= ndimage.maximum_filter1d(inside, 3, axis=0)
    along_y = inside >= ndimage.maximum_filter1d(inside, 3, axis=1)
    return (along_x | along_y) & (inside > inside.max() / 2)


def scribbled_slice(labels, spacing_mm, ignore):
    """The scribbles of a slice's labels (X, Y)."""
    made = np.full_like(labels, ignore)
    width, height = labels.shape
    cross = np.zeros(labels.shape, bool)
    cross[width // 2] = True
    cross[:, height // 2] = True
    if labels.any():
        outside_mm = ndimage.distance_transform_edt(labels == 0, sampling=spacing_mm)
        cross &= outside_mm > FAR_MM
        made[np.abs(outside_mm - CURVE_MM) <= max(spacing_mm) / 2] = 0
    made[cross] = 0
    for code in np.unique(labels[labels > 0]):
        made[middle_line(labels == code, spacing_mm)] = code
    return made


def scribbled(labels, spacing_mm, ignore):
    """The scribbles of a volume's labels (X, Y, Z)."""
    slices = [
        scribbled_slice(labels[:, :, z], spacing_mm[:2], ignore) for z in range(labels.shape[2])
    ]
    return np.stack(slices, axis=2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--splits", type=Path, required=True)
    parser.add_argument("--fold", type=int, required=True, help="from 1")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args()
    shutil.copytree(options.dataset, options.out)
    fold = json.loads(options.splits.read_text())[options.fold - 1]
    (options.out / "splits.json").write_text(json.dumps([fold]))
    content = json.loads((options.out / "dataset.json").read_text())
    ignore = max(content["labels"].values()) + 1
    content["labels"]["ignore"] = ignore
    (options.out / "dataset.json").write_text(json.dumps(content, indent=1))
    kept = []
    for case in fold["train"]:
        path = options.out / "labelsTr" / (case + content["file_ending"])
        image = nibabel.load(path)
        made = scribbled(np.asarray(image.dataobj), image.header.get_zooms(), ignore)
        kept.append(np.mean(made != ignore))
        path.unlink()
        nibabel.save(nibabel.Nifti1Image(made, image.affine, image.header), path)
    print(f"{len(kept)} cases keep {np.mean(kept):.2%} of their voxels' labels")


if __name__ == "__main__":
    main()

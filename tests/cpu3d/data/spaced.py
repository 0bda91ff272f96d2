"""A drawn head, sampled with voxels of any size, as files of a data set."""

import numpy as np

from tests.cpu3d.data.made_datasets import decathlon, write_nifti

FIELD_MM = (48.0, 40.0, 32.0)  # along R, A, S, of every image
CORNER_MM = (-20.0, 11.0, -30.0)  # of the field, in the world
CENTRES_MM = {1: (22.0, 19.0, 17.0), 2: (24.0, 20.0, 17.0)}  # in the field
RADII_MM = {1: (12.0, 10.0, 9.0), 2: (7.0, 6.0, 5.5)}  # of ellipsoids, 2 within 1
LABELS = {0: "background", 1: "edema", 2: "core"}
CHANNELS = ("FLAIR", "T1gd")
SPACINGS = {  # case -> mm along R, A, S: the median is 1 mm along each axis
    "a": (1.0, 1.0, 1.0),
    "b": (2.0, 2.0, 2.0),
    "c": (1.0, 1.0, 1.0),
    "d": (0.8, 0.8, 4.0),
    "e": (1.0, 1.0, 1.0),
    "f": (1.0, 1.0, 2.0),
    "g": (1.0, 1.0, 1.0),
}


def drawn(spacing_mm):
    """(image (X, Y, Z, 2) int16, label (X, Y, Z) uint8) of voxels of this size."""
    shape = [round(length / step) for length, step in zip(FIELD_MM, spacing_mm)]
    places = np.moveaxis(np.indices(shape), 0, -1) * spacing_mm + np.divide(spacing_mm, 2)
    label = np.zeros(shape, np.uint8)
    for code in (1, 2):
        away = (places - CENTRES_MM[code]) / RADII_MM[code]
        label[(away**2).sum(-1) <= 1] = code
    head = (((places - np.divide(FIELD_MM, 2)) / np.multiply(FIELD_MM, 0.46)) ** 2).sum(-1) <= 1
    waves = np.sin(places / 5).sum(-1)
    image = np.stack([400 + 40 * waves + 100 * label, 300 - 30 * waves + 50 * label], -1)
    return np.where(head[..., None], np.rint(image), 0).astype(np.int16), label


def write_drawn(folder, case_id, spacing_mm, axes="RAS"):
    """The image and label files of a case, below imagesTr and labelsTr; returns both paths. No two
    cases have the same image."""
    image, label = drawn(spacing_mm)
    image = np.where(image, image + ord(case_id[0]), 0).astype(np.int16)
    affine = np.diag([*spacing_mm, 1.0])
    affine[:3, 3] = np.add(CORNER_MM, np.divide(spacing_mm, 2))
    if axes == "LPS":
        affine[:2, 3] += np.subtract(label.shape, 1)[:2] * spacing_mm[:2]
        affine[:2, :2] *= -1
        image = image[::-1, ::-1]
        label = label[::-1, ::-1]
    return [
        write_nifti(folder / f"{name}/{case_id}.nii.gz", volume, affine)
        for name, volume in (("imagesTr", image), ("labelsTr", label))
    ]


def spaced_set(folder, spacings=SPACINGS):
    """A data set in Decathlon's layout of cases with these spacings, some with axes LPS."""
    training = []
    for case_id, spacing_mm in spacings.items():
        write_drawn(folder, case_id, spacing_mm, "LPS" if case_id in "bdf" else "RAS")
        training.append(
            {"image": f"imagesTr/{case_id}.nii.gz", "label": f"labelsTr/{case_id}.nii.gz"}
        )
    modality = dict(enumerate(CHANNELS))
    return decathlon(folder, 0, modality=modality, labels=LABELS, training=training)

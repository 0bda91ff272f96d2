"""Write a data set of made-up brains with tumours that a network can learn, in the Decathlon
layout.

Example: ./run.sh phantom --out phantom --cases 10 --shape 240 240 155 --seed 0

With --kind ct they are bodies on a table, in Hounsfield units: air around them, fat, muscle, bone,
a bladder of water at 0, and a liver with lesions, which are the labels.

With --annotate-every 10 every tenth axial slice is labelled, as by hand; the voxels of the others
are of a label "ignore"."""

import contextlib
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import numpy as np

from cpu3d.data.manifest import Geometry
from cpu3d.data.nifti import affine_rows, write_volume
from cpu3d.data.phantoms.ct import CT_CHANNELS, CT_LABELS, ct_case
from cpu3d.data.phantoms.head import CHANNELS, LABELS, VERSION, phantom_case
from cpu3d.data.region import Array, Shape3, require
from cpu3d.data.stores.folder import claimed
from cpu3d.util.atomic import write_json
from cpu3d.util.child import run_jobs, worker_count
from cpu3d.util.progress import bar, say
from memory_estimator.common.schema import option
from memory_estimator.common.units import by

USUAL_SHAPE = (240, 240, 155)
LEAST_VOXELS = 24  # along an axis; with fewer the enhancing rim does not show
MOST_VOXELS = 32767  # along an axis: NIfTI-1 has 16 bits for them
IGNORE = "ignore"  # name of the label of voxels that are not annotated; its code is the highest


@dataclass(frozen=True)
class Options:
    """The options of `phantom`."""

    out: Path = option(help="folder to write; made if absent, continued if unfinished")
    cases: int = option(10, "number of cases", at_least=1)
    shape: Shape3 = option(USUAL_SHAPE, "voxels", metavar=("X", "Y", "Z"))
    seed: int = option(0, "seed of everything that is random", at_least=0)
    annotate_every: int = option(
        1,
        'label every N-th axial slice; the voxels of the others are of a label "ignore"',
        metavar="N",
        at_least=1,
    )
    kind: str = option("mr", "heads in four MR channels, or bodies in CT", choices=("mr", "ct"))
    workers: Optional[int] = option(None, "processes (default: one per usable core)", at_least=1)


OPTIONS = (Options,)


def run(options: Options) -> int:
    write_phantom(**vars(options))
    return 0


@dataclass(frozen=True)
class Drawing:
    """What the cases of a phantom are like; case n follows from it and from n alone."""

    shape: Shape3
    seed: int
    kind: str
    annotate_every: int

    def case(self, index: int) -> Tuple[Array, Array]:
        """Draw image `(X, Y, Z)` or `(X, Y, Z, C)` int16 and label `(X, Y, Z)` uint8, axes R A
        S."""
        if self.kind == "ct":
            image, label = ct_case(self.shape, self.seed, index)
        else:
            image, label = phantom_case(self.shape, self.seed, index)
        is_annotated = np.arange(self.shape[2]) % self.annotate_every == 0
        label[..., ~is_annotated] = max(self.labels)
        return image, label

    @property
    def channels(self) -> Tuple[str, ...]:
        return CT_CHANNELS if self.kind == "ct" else CHANNELS

    @property
    def labels(self) -> Dict[int, str]:
        """Label code -> name."""
        labels = CT_LABELS if self.kind == "ct" else LABELS
        if self.annotate_every == 1:
            return labels
        return {**labels, max(labels) + 1: IGNORE}


def write_phantom(
    out: Path,
    *,
    cases: int,
    shape: Shape3 = USUAL_SHAPE,
    seed: int = 0,
    workers: Optional[int] = None,
    kind: str = "mr",
    annotate_every: int = 1,
) -> Path:
    """Write `cases` phantom cases below `out` and return that folder.

    Case n depends on (seed, n) and on shape and kind alone, so more can be added later;
    `annotate_every` changes labels alone. Raises InputError for a shape out of range, and a folder
    with other files or in use; MemoryError as `run_jobs`."""
    drawing = Drawing(shape, seed, kind, annotate_every)
    is_shape = min(shape) >= LEAST_VOXELS and max(shape) <= MOST_VOXELS
    require(("--shape", f"from {LEAST_VOXELS} to {MOST_VOXELS}", shape, is_shape))
    folders = ("imagesTr", "labelsTr")
    settings = {"phantom": VERSION, **vars(drawing), "shape": list(shape)}
    with claimed(out, "phantom folder", "phantom.json", settings, folders):
        job = functools.partial(_write_case, out, drawing)
        results = run_jobs(job, range(cases), worker_count(workers))
        with contextlib.closing(results), bar("phantom", cases) as advance:
            for _ in results:
                advance()
        write_json(out / "dataset.json", _dataset_json(cases, drawing))
    say(f"{cases} phantom cases of {by(shape)} in {out}", stderr=False)
    return out


def _write_case(out: Path, drawing: Drawing, index: int) -> None:
    """Write a case's two files unless both exist."""
    name = f"BRATS_{index + 1:03d}.nii.gz"
    image_path = out / "imagesTr" / name
    label_path = out / "labelsTr" / name
    if image_path.is_file() and label_path.is_file():
        return
    image, label = drawing.case(index)
    geometry = Geometry(drawing.shape, affine_rows(np.eye(4)), "RAS", sform_code=1, qform_code=1)
    write_volume(image_path, image, geometry, compression=1)
    write_volume(label_path, label, geometry)


def _dataset_json(cases: int, drawing: Drawing) -> Dict[str, Any]:
    """The content of dataset.json, in the form of MSD Task01_BrainTumour."""
    name = "CT phantom" if drawing.kind == "ct" else "BRATS phantom"
    channels = drawing.channels
    files = [f"BRATS_{index + 1:03d}.nii.gz" for index in range(cases)]
    return {
        "name": name,
        "description": "Made-up volumes for trials of the software; no patient's data",
        "tensorImageSize": "4D" if len(channels) > 1 else "3D",
        "modality": {str(index): channel for index, channel in enumerate(channels)},
        "labels": {str(code): label for code, label in drawing.labels.items()},
        "numTraining": cases,
        "numTest": 0,
        "training": [
            {"image": f"./imagesTr/{file}", "label": f"./labelsTr/{file}"} for file in files
        ],
        "test": [],
    }

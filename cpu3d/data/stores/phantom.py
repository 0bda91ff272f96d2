"""A made-up brain tumour data set that is worth learning from, in the Decathlon layout.

Example: python -m cpu3d phantom --out phantom --cases 10 --shape 240 240 155 --seed 0

With --context count the tumours look alike and only what their rim is called depends on something far away: whether
there is another lesion. WT and TC are then to be had from a patch, and ET is not, where the patch is shorter than the
gap in between: of volumes of 240 voxels up to 70 from front to back. What is written says how many it is.
"""

import contextlib
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional, Union

import numpy as np

from cpu3d.data.nifti import write_label, write_volume
from cpu3d.data.records import Geometry
from cpu3d.data.region import Shape3
from cpu3d.data.stores.conversion import claimed
from cpu3d.data.stores.phantom_case import CHANNELS, CONTEXTS, LABELS, RULE, VERSION, blind_patch, phantom_case
from cpu3d.errors import InputError, refuse
from cpu3d.util.atomic import write_json
from cpu3d.util.child import KILLED, run_jobs, worker_count
from cpu3d.util.progress import bar
from cpu3d.util.records import by
from memory_estimator.schema import option

SMALLEST = 24
"""Voxels along an axis below which the enhancing rim no longer shows."""


@dataclass(frozen=True)
class Options:
    """What `phantom` takes."""

    out: Path = option(help="folder to write; made if absent, continued if unfinished")
    cases: int = option(10, "how many")
    shape: Shape3 = option((240, 240, 155), "voxels", metavar=("X", "Y", "Z"))
    seed: int = option(0, "of everything that is random")
    context: str = option(
        "none", "what far away decides whether a rim is called enhancing; in half of the cases it is", choices=CONTEXTS
    )
    workers: Optional[int] = option(None, "processes (default: one per usable core)", at_least=1)


OPTIONS = (Options,)


def run(options: Options) -> int:
    settings = dict(vars(options))
    write_phantom(settings.pop("out"), **settings)
    return 0


def write_phantom(
    out: Union[str, Path],
    *,
    cases: int,
    shape: Shape3,
    seed: int = 0,
    workers: Optional[int] = None,
    context: str = "none",
) -> Path:
    """Write `cases` phantom cases below `out` and return that folder.

    Case n depends on (seed, n, shape, context) alone, so more cases can be added later and workers do not matter.
    dataset.json comes last. Raises InputError for a shape or count that is too small, a shape that is too large for the
    memory, and a folder that holds anything else or that another process writes.
    """
    workers, out = worker_count(workers), Path(out)
    rules = (
        ("--cases", "at least 1", cases, cases >= 1),
        ("--shape", f"from {SMALLEST} to 32767", tuple(shape), min(shape) >= SMALLEST and max(shape) <= 32767),
        ("--seed", "at least 0", seed, seed >= 0),
    )
    refuse(f"{name} must be {rule}, got {value}; choose another" for name, rule, value, holds in rules if not holds)
    settings = {"phantom": VERSION, "seed": seed, "shape": list(shape), "context": context}
    # "none" was the only context before it was kept.
    with claimed(out, "phantom folder", "phantom.json", settings, ("imagesTr", "labelsTr"), context="none"):
        write = functools.partial(_write_case, out, tuple(shape), seed, context)
        try:
            with (
                contextlib.closing(run_jobs(write, range(cases), workers)) as results,
                bar("phantom", cases) as advance,
            ):
                for _, result in results:
                    if result is KILLED:
                        raise MemoryError
                    advance()
        except MemoryError:
            advice = "choose a smaller one or run again with fewer --workers"
            raise InputError(f"--shape must fit into memory, got {by(shape)}; {advice}") from None
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"what is in {out} is kept; run the same command again to continue") from None
        write_json(out / "dataset.json", _dataset_json(cases, context, shape))
    blind = blind_patch(context, shape)
    hint = f"; patches of up to {blind} voxels from front to back cannot tell enhancing tumour" if blind else ""
    print(f"{cases} phantom cases of {by((*shape, len(CHANNELS)))} in {out}{hint}")
    return out


def _write_case(out: Path, shape: Shape3, seed: int, context: str, index: int) -> None:
    """Write a case's two files unless both are there; each appears whole or not at all."""
    image_path, label_path = (out / folder / f"{_case_id(index)}.nii.gz" for folder in ("imagesTr", "labelsTr"))
    if image_path.is_file() and label_path.is_file():
        return
    image, label = phantom_case(shape, seed, index, context)
    geometry = Geometry(shape, tuple(map(tuple, np.eye(4).tolist())), "RAS", sform_code=1, qform_code=1)
    write_volume(image_path, image, geometry, compression=1)
    write_label(label_path, label, geometry)


def _case_id(index: int) -> str:
    return f"BRATS_{index + 1:03d}"


def _dataset_json(cases: int, context: str, shape: Shape3) -> Dict[str, Any]:
    """A dataset.json like that of MSD Task01_BrainTumour; the description states the rule of a context."""
    description = "Made-up gliomas in made-up brains, for trials of the software; no patient's data"
    if context == "count":
        description += (
            f". Context count: a rim is called {LABELS[3]} where {RULE}, else {LABELS[2]}; a patch of up to"
            f" {blind_patch(context, shape)} voxels from front to back has nothing in it that tells which"
        )
    ids = [_case_id(index) for index in range(cases)]
    return {
        "name": "BRATS phantom" if context == "none" else f"BRATS phantom, context {context}",
        "description": description,
        "tensorImageSize": "4D",
        "modality": {str(index): name for index, name in enumerate(CHANNELS)},
        "labels": {str(code): name for code, name in LABELS.items()},
        "numTraining": cases,
        "numTest": 0,
        "training": [{"image": f"./imagesTr/{i}.nii.gz", "label": f"./labelsTr/{i}.nii.gz"} for i in ids],
        "test": [],
    }

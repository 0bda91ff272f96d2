"""Write a data set of made-up brains with tumours that a network can learn, in the Decathlon
layout.

Example: ./run.sh phantom --out phantom --cases 10 --shape 240 240 155 --seed 0

With --context count all tumours look alike, and the code of their rim depends on whether there is
another lesion, far away. A patch that is shorter than the gap between lesions shows WT and TC, but
not ET; dataset.json has this length.

With --lesion-size small the whole tumour, in one to three lesions, is 0.2 to 1 % of the brain's
box, and the enhancing tumour at least 0.02 %. With --warp CASE the cases are warped copies of a
real case: they show how fast a network learns the look of a real tumour, not how well it does on
other patients.

With --kind ct they are bodies on a table, in Hounsfield units: air around them, fat, muscle, bone,
a bladder of water at 0, and a liver with lesions, which are the labels.

With --annotate-every 10 every tenth axial slice is labelled, as by hand; the voxels of the others
are of a label "ignore"."""

import contextlib
import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, Optional, Tuple, Union

import numpy as np

from cpu3d.data.manifest import Geometry
from cpu3d.data.nifti import affine_rows, write_label, write_volume
from cpu3d.data.phantoms.ct import CT_CHANNELS, CT_LABELS, ct_case
from cpu3d.data.phantoms.head import (
    CHANNELS,
    ENHANCING,
    LABELS,
    NON_ENHANCING,
    SMALL_WT,
    VERSION,
    blind_patch,
    phantom_case,
)
from cpu3d.data.phantoms.warp import case_to_warp, warped_case
from cpu3d.data.region import Array, Shape3, xyz
from cpu3d.data.stores.folder import claimed
from cpu3d.errors import InputError, raise_if_any
from cpu3d.util.atomic import write_json
from cpu3d.util.child import KILLED, run_jobs, worker_count
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
    cases: int = option(10, "number of cases")
    shape: Shape3 = option(USUAL_SHAPE, "voxels", metavar=("X", "Y", "Z"))
    seed: int = option(0, "seed of everything that is random")
    context: str = option(
        "none",
        "count: a rim is called enhancing if its lesion is the only one, in half of the cases",
        choices=("none", "count"),
    )
    lesion_size: str = option(
        "usual",
        "small: a whole tumour is 0.2 to 1 % of the brain's box",
        choices=("usual", "small"),
    )
    annotate_every: int = option(
        1,
        'label every N-th axial slice; the voxels of the others are of a label "ignore"',
        metavar="N",
        at_least=1,
    )
    kind: str = option("mr", "heads in four MR channels, or bodies in CT", choices=("mr", "ct"))
    warp: Optional[Path] = option(
        None,
        "warped copies of the real case in this folder, which has a label, on its grid",
        metavar="CASE",
    )
    workers: Optional[int] = option(None, "processes (default: one per usable core)", at_least=1)


OPTIONS = (Options,)


def run(options: Options) -> int:
    write_phantom(
        options.out,
        cases=options.cases,
        shape=options.shape,
        seed=options.seed,
        workers=options.workers,
        context=options.context,
        lesion_size=options.lesion_size,
        warp=options.warp,
        kind=options.kind,
        annotate_every=options.annotate_every,
    )
    return 0


@dataclass(frozen=True)
class Drawing:
    """What the cases of a phantom are like; case n follows from it and from n alone."""

    shape: Shape3
    seed: int
    context: str
    lesion_size: str
    warp: Optional[Path]
    kind: str
    annotate_every: int

    def case(self, index: int) -> Tuple[Array, Array, Geometry]:
        """Image `(X, Y, Z)` or `(X, Y, Z, C)` int16, label `(X, Y, Z)` uint8, axes R A S, and their
        grid."""
        geometry = Geometry(self.shape, affine_rows(np.eye(4)), "RAS", sform_code=1, qform_code=1)
        if self.warp:
            image, label = warped_case(self.warp, self.seed, index)
            geometry = case_to_warp(self.warp)[1].record.geometry
        elif self.kind == "ct":
            image, label = ct_case(self.shape, self.seed, index)
        else:
            image, label = phantom_case(
                self.shape, self.seed, index, self.context, self.lesion_size
            )
        if self.annotate_every > 1:
            is_annotated = np.arange(self.shape[2]) % self.annotate_every == 0
            label[..., ~is_annotated] = max(self.labels)
        return image, label, geometry

    @property
    def channels(self) -> Tuple[str, ...]:
        if self.warp:
            return case_to_warp(self.warp)[0].channels
        return CT_CHANNELS if self.kind == "ct" else CHANNELS

    @property
    def labels(self) -> Dict[int, str]:
        """Label code -> name."""
        labels = LABELS
        if self.warp:
            labels = case_to_warp(self.warp)[0].labels
        elif self.kind == "ct":
            labels = CT_LABELS
        if self.annotate_every == 1:
            return labels
        return {**labels, max(labels) + 1: IGNORE}

    @property
    def settings(self) -> Dict[str, Any]:
        """The content of phantom.json, by which a folder is continued."""
        settings: Dict[str, Any] = {"phantom": VERSION, "seed": self.seed}
        if self.warp:
            settings["warp"] = case_to_warp(self.warp)[1].record.image_voxels_sha256
        else:
            settings["shape"] = list(self.shape)
            settings["context"] = self.context
            settings["lesion_size"] = self.lesion_size
        if self.kind == "ct":
            settings["kind"] = self.kind
        if self.annotate_every > 1:
            settings["annotate_every"] = self.annotate_every
        return settings


def write_phantom(
    out: Union[str, Path],
    *,
    cases: int,
    shape: Shape3 = USUAL_SHAPE,
    seed: int = 0,
    workers: Optional[int] = None,
    context: str = "none",
    lesion_size: str = "usual",
    warp: Optional[Path] = None,
    kind: str = "mr",
    annotate_every: int = 1,
) -> Path:
    """Write `cases` phantom cases, or warped copies of the one in folder `warp`, below `out` and
    return that folder.

    Case n depends on (seed, n) and on shape, context and lesion_size, `warp` or `kind`, alone, so
    more can be added later; `annotate_every` changes labels alone. Raises InputError for options
    out of range or that exclude each other, a shape that does not fit into memory, a case that
    cannot be warped, and a folder with other files or in use."""
    out = Path(out)
    shape = xyz(shape)
    workers = worker_count(workers)
    drawing = Drawing(shape, seed, context, lesion_size, warp, kind, annotate_every)
    _refuse(cases, drawing)
    if warp:
        drawing = replace(drawing, shape=case_to_warp(warp)[1].record.shape)
    folders = ("imagesTr", "labelsTr")
    with claimed(out, "phantom folder", "phantom.json", drawing.settings, folders):
        results = run_jobs(functools.partial(_write_case, out, drawing), range(cases), workers)
        try:
            with contextlib.closing(results), bar("phantom", cases) as advance:
                for _, result in results:
                    if result is KILLED:
                        raise MemoryError
                    advance()
        except MemoryError:
            advice = "choose a smaller one or run again with fewer --workers"
            raise InputError(
                f"--shape must fit into memory, got {by(drawing.shape)}; {advice}"
            ) from None
        write_json(out / "dataset.json", _dataset_json(cases, drawing))
    say(f"{cases} phantom cases of {by(drawing.shape)} in {out}", stderr=False)
    return out


def _refuse(cases: int, drawing: Drawing) -> None:
    """Raise InputError for options out of range or that exclude each other."""
    shape = drawing.shape
    context = drawing.context
    lesion_size = drawing.lesion_size
    warp = drawing.warp
    is_usual = (shape, context, lesion_size) == (USUAL_SHAPE, "none", "usual")
    is_plain = (context, lesion_size, warp) == ("none", "usual", None)
    is_shape = min(shape) >= LEAST_VOXELS and max(shape) <= MOST_VOXELS
    is_one_of_both = lesion_size == "usual" or context == "none"
    is_kind = drawing.kind == "mr" or is_plain
    every = drawing.annotate_every
    alone = "without --shape, --context and --lesion-size"
    of_heads = "--context, --lesion-size or --warp"
    rules = (
        ("--cases", "at least 1", cases, cases >= 1),
        ("--shape", f"from {LEAST_VOXELS} to {MOST_VOXELS}", shape, is_shape),
        ("--seed", "at least 0", drawing.seed, drawing.seed >= 0),
        ("--lesion-size", "usual with --context", lesion_size, is_one_of_both),
        ("--warp", alone, warp, warp is None or is_usual),
        ("--kind", f"mr with {of_heads}", drawing.kind, is_kind),
        ("--annotate-every", "at least 1", every, every >= 1),
    )
    raise_if_any(
        f"{name} must be {rule}, got {value}; choose another"
        for name, rule, value, holds in rules
        if not holds
    )


def _write_case(out: Path, drawing: Drawing, index: int) -> None:
    """Write a case's two files unless both exist."""
    name = f"BRATS_{index + 1:03d}.nii.gz"
    image_path = out / "imagesTr" / name
    label_path = out / "labelsTr" / name
    if image_path.is_file() and label_path.is_file():
        return
    image, label, geometry = drawing.case(index)
    write_volume(image_path, image, geometry, compression=1)
    write_label(label_path, label, geometry)


def _dataset_json(cases: int, drawing: Drawing) -> Dict[str, Any]:
    """The content of dataset.json, in the form of MSD Task01_BrainTumour."""
    name, description = _about(drawing)
    channels = drawing.channels
    files = [f"BRATS_{index + 1:03d}.nii.gz" for index in range(cases)]
    return {
        "name": name,
        "description": description,
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


def _about(drawing: Drawing) -> Tuple[str, str]:
    """The name and the description of a data set."""
    name = "BRATS phantom"
    description = "Made-up gliomas in made-up brains, for trials of the software; no patient's data"
    if drawing.warp:
        name = f"Warped copies of {case_to_warp(drawing.warp)[1].record.case_id}"
        copies = "Copies of one real case, warped and with other intensities"
        description = f"{copies}, for trials of the software"
    if drawing.kind == "ct":
        name = "CT phantom"
        livers = "Made-up livers in made-up bodies"
        description = f"{livers}, for trials of the software; no patient's data"
    if drawing.lesion_size == "small":
        least, most = SMALL_WT
        name += ", small lesions"
        size = f"a whole tumour is {least:.1%} to {most:.0%} of the brain's box"
        description += f". Small lesions: {size}"
    if drawing.context == "count":
        name += ", context count"
        one = f"{LABELS[ENHANCING]} where the lesion is the only one"
        rim = f"a rim is called {one}, else {LABELS[NON_ENHANCING]}"
        patch = f"a patch of up to {blind_patch(drawing.shape)} voxels from front to back"
        description += f". Context count: {rim}; {patch} has nothing in it that tells which"
    if drawing.annotate_every > 1:
        name += f", every {drawing.annotate_every}th slice"
        description += f". Of {drawing.annotate_every} axial slices one is annotated"
    return name, description

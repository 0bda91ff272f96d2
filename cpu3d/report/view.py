"""Write a page to scroll through the slices of a case in a browser: any NIfTI, with labels and predictions over it.

    ./run.sh view --image data/BraTS-GLI-00001-000 --out page.html
    ./run.sh view --image flair.nii.gz t1ce.nii.gz --label truth.nii.gz --prediction ours.nii.gz theirs.nii.gz \\
        --out page.html

A case is a folder of NIfTI files on one grid, one 3D or 4D file, or several 3D files. A file named as a segmentation
(_seg, -seg) is the label unless --label names another. Predictions are label maps in the label's codes on that grid.
What the codes mean is known from the files' names, as in `predict`; others are called by their numbers.

The page is one file without network, some 3 MB, that every browser of 2023 or later opens: three linked planes, the
modalities, truth, prediction and error. It holds the box around the brain, at most 255 grey values.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.nifti import is_placed, read_volume, to_ras
from cpu3d.data.records import Geometry
from cpu3d.data.stores.case import grid_problems
from cpu3d.data.stores.layouts import labels_in_use, regions_of
from cpu3d.errors import InputError, refuse
from cpu3d.inference.cases import channels_of, label_codes_of, viewed_files
from cpu3d.pages.page import page_file
from cpu3d.pages.viewer import ViewedCase, write_case_page
from memory_estimator.common.schema import option

MOST_CHANNELS = 16
"""More are time points, say, and no modalities."""


@dataclass(frozen=True)
class Options:
    """Command-line options of `view`."""

    image: Tuple[Path, ...] = option(help="the case: a folder, a 4D file, or 3D files on one grid", metavar="PATH")
    out: Path = option(help="page to write", metavar="FILE")
    label: Optional[Path] = option(
        None, help="the true label map (default: the segmentation beside it)", metavar="FILE"
    )
    prediction: Tuple[Path, ...] = option((), help="label maps to hold against it", metavar="FILE")


OPTIONS = (Options,)


def run(options: Options) -> int:
    inputs = [*options.image, *options.prediction, *([options.label] if options.label else [])]
    refuse(f"{path} must exist, found none; check the path" for path in inputs if not path.exists())
    case = read_case(options.image, options.label, options.prediction)
    out = page_file(options.out)
    for note in _notes(case):
        print(f"note: {note}", file=sys.stderr)
    write_case_page(out, case, "view")
    print(f"written: {out} ({out.stat().st_size / 1e6:.1f} MB)")
    return 0


def read_case(image: Sequence[Path], label: Optional[Path], predictions: Sequence[Path]) -> ViewedCase:
    """Read a case from its files.

    Raises InputError for files that cannot be read, lie on different grids, or hold no label map where one must be.
    """
    files, names = viewed_files(image)
    label = label or files.label
    answers = dict(zip(_distinct(predictions), predictions))
    volumes, channels, maps, problems = [], [], {}, []
    geometry: Optional[Geometry] = None
    for path, name in (
        *zip(files.images, names),
        *((path, None) for path in [*([label] if label else []), *predictions]),
    ):
        try:
            array, grid = read_volume(path)
            if geometry is None:
                geometry, first = grid, path
            refuse(grid_problems(path, grid, first, geometry))
            if name is None:
                maps[path] = to_ras(_label_map(path, array), geometry)
            else:
                array = array if array.ndim == 4 else array[..., None]
                volumes.append(to_ras(_modalities(path, array, alone=len(names) == 1), geometry))
                channels += [name] if array.shape[3] == 1 else channels_of(path, array.shape[3])
        except InputError as error:
            problems += error.problems
    refuse(problems)
    labels, regions = _meanings(label_codes_of(files), maps.values())
    return ViewedCase(
        name=files.case_id,
        image=volumes[0] if len(volumes) == 1 else np.concatenate(volumes, axis=-1),
        channels=channels,
        geometry=geometry,
        regions=regions,
        labels=labels,
        truth=maps[label] if label else None,
        predictions={name: maps[path] for name, path in answers.items()},
    )


# --- Private helpers ---


def _notes(case: ViewedCase) -> Iterator[str]:
    for number, channel in enumerate(case.channels):
        if not case.image[..., number].any():
            yield f"{channel} of {case.name} is empty: no voxel is a number other than 0"
    if not is_placed(case.geometry):
        rule = "does not say how the patient lies (its sform and qform codes are 0)"
        yield f"{case.name} {rule}: R, L, A, P, S, I and mm are guesses"


def _modalities(path: Path, array: np.ndarray, *, alone: bool) -> np.ndarray:
    most = MOST_CHANNELS if alone else 1
    if array.shape[3] > most:
        rule = f"have at most {most} channels" if alone else "be 3D beside other images"
        raise InputError(f"--image {path} must {rule}, got {array.shape[3]} channels; give others or one alone")
    return np.nan_to_num(array, posinf=0, neginf=0)


def _label_map(path: Path, array: np.ndarray) -> np.ndarray:
    """As uint8 `(X, Y, Z)`."""
    array = array[..., 0] if array.ndim == 4 and array.shape[3] == 1 else array
    if array.ndim != 3:
        raise InputError(f"label map {path} must be 3D, got shape {array.shape}; give one label map")
    with np.errstate(invalid="ignore"):
        codes = array.astype(np.uint8)
    others = array[codes != array]
    if others.size:
        got = f"{others[0]}, one of {others.size} other values"
        raise InputError(f"label map {path} must hold integers 0..255, got {got}; give a label map")
    return codes


def _meanings(
    known: Optional[Tuple[str, Dict[int, str]]], maps: Any
) -> Tuple[Mapping[int, str], Mapping[str, Sequence[int]]]:
    """Code -> name and region -> codes; codes that the files' names do not explain are regions of their own."""
    codes = sorted({int(code) for one in maps for code in np.unique(one)} - {0})
    if not known:
        return {0: "background"}, {f"label {code}": (code,) for code in codes}
    labels = labels_in_use(*known, codes)
    others = {f"label {code}": (code,) for code in codes if code not in labels}
    return labels, {**regions_of(labels), **others}


def _distinct(paths: Sequence[Path]) -> List[str]:
    """A name for each file: its own without the ending; of equal ones that of the nearest folder that tells them all
    apart, or else their number."""
    names = [path.name.split(".nii")[0] for path in paths]
    if len(set(names)) == len(names):
        return names
    resolved = [path.resolve() for path in paths]
    if len(set(resolved)) < len(resolved):
        raise InputError(f"--prediction must name different files, got {paths[0]} and others twice; leave one out")
    for folders in zip(*(path.parents for path in resolved)):
        found = [folder.name for folder in folders]
        if all(found) and len(set(found)) == len(found):
            return found
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]

"""Write a page to scroll through the slices of a case in a browser: any NIfTI, with labels and
predictions over it.

    ./run.sh view --image data/BraTS-GLI-00001-000 --out page.html
    ./run.sh view --image flair.nii.gz t1ce.nii.gz --label truth.nii.gz \\
        --prediction ours.nii.gz theirs.nii.gz --out page.html

A case is a folder of NIfTI files on one grid, one 3D or 4D file, or several 3D files. A file named
as a segmentation (_seg, -seg) is the label unless --label names another. Predictions are label maps
in the label's codes on that grid. The files' names show what the codes mean, as in `predict`;
unknown codes are shown as numbers.

The page is one file of about 3 MB that every browser of 2023 or later opens without a network:
three linked planes, the modalities, truth, prediction and error. It holds the content box,
at most 255 grey values. Voxels of the label that are not annotated are hatched, and counted. """

from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.background import without_residue
from cpu3d.data.cases.case import label_codes
from cpu3d.data.cases.kinds import is_ct, looks_like_ct
from cpu3d.data.cases.notes import note_lines
from cpu3d.data.datasets.dataset import CaseFiles
from cpu3d.data.datasets.find import find_cases
from cpu3d.data.datasets.layouts import (
    LabelCodes,
    channels_of,
    label_codes_of,
    labels_in_use,
)
from cpu3d.data.datasets.names import (
    is_ignored,
    name_of,
    read_name,
    stem_of,
    volumes_in,
)
from cpu3d.data.manifest import Geometry
from cpu3d.data.nifti import on_grid, orientation_note, read_volume, to_ras
from cpu3d.data.normalise import Kind, Normalisation
from cpu3d.errors import InputError, raise_if_any
from cpu3d.pages.page import page_file
from cpu3d.pages.viewer import ViewedCase, write_case_page
from cpu3d.util.progress import say
from cpu3d.util.records import listed
from memory_estimator.common.schema import option
from memory_estimator.common.units import format_bytes

MOST_CHANNELS = 16  # of an image; more are no modalities but, for example, time points


@dataclass(frozen=True)
class Options:
    """Options of `view`."""

    image: Tuple[Path, ...] = option(
        help="the case: a folder, a 4D file, or 3D files on one grid", metavar="PATH"
    )
    out: Path = option(help="page to write", metavar="FILE")
    label: Optional[Path] = option(
        None, "true label map (default: the segmentation beside the image)", metavar="FILE"
    )
    prediction: Tuple[Path, ...] = option(
        (), help="label maps to compare with the truth", metavar="FILE"
    )
    ignore: Optional[int] = option(
        None,
        "label code of voxels that are not annotated, which are hatched and are no errors (default:"
        ' that of a label named as such, as "ignore")',
        metavar="CODE",
        at_least=1,
        at_most=255,
    )


OPTIONS = (Options,)


def run(options: Options) -> int:
    inputs = [*options.image, *options.prediction]
    if options.label:
        inputs.append(options.label)
    raise_if_any(
        f"{path} must exist, found none; check the path" for path in inputs if not path.exists()
    )
    case = read_case(options.image, options.label, options.prediction, options.ignore)
    out = page_file(options.out)
    for number, channel in enumerate(case.channels):
        if not case.image[..., number].any():
            say(f"note: {channel} of {case.name} is empty: all voxels are 0 or not finite")
    orientation = orientation_note(case.geometry)
    if orientation:
        say(*note_lines({case.name: [orientation]}))
    if case.ignored_share:
        share = f"{case.ignored_share:.1%} of the voxels"
        say(f"not annotated: {share}, code {case.ignore}", stderr=False)
    write_case_page(out, case, "view")
    say(f"written: {out} ({format_bytes(out.stat().st_size)})", stderr=False)
    return 0


def read_case(
    image: Sequence[Path],
    label: Optional[Path],
    predictions: Sequence[Path],
    ignore: Optional[int] = None,
) -> ViewedCase:
    """Read a case from its files. `ignore` is the code of the label's voxels that are not
    annotated, by default that of a name that says so.

    Raises InputError for files that cannot be read, are on different grids, or are no label map but
    must be, and for a code to be ignored without a label."""
    files = viewed_files(image)
    if label is None:
        label = files.label
    if ignore is not None and label is None:
        raise InputError(f"--ignore must come with a label, got {ignore} alone; name its --label")
    labels = list(predictions)
    if label:
        labels.insert(0, label)
    answers = dict(zip(_distinct(predictions), predictions))
    images, maps, geometry = _read(files.images, labels)
    channels = []
    for name, (path, volume) in zip(files.names, images.items()):
        if volume.shape[3] == 1:
            channels.append(name)
        else:
            channels += channels_of(path, volume.shape[3])
    meanings, regions = _meanings(label_codes_of(files), list(maps.values()), ignore)
    if ignore is None:
        ignored = (code for code, name in meanings.items() if code and is_ignored(name))
        ignore = next(ignored, None)
    volumes = list(images.values())
    image = volumes[0] if len(volumes) == 1 else np.concatenate(volumes, axis=-1)
    kinds = []
    for number, channel in enumerate(channels):
        is_hounsfield = is_ct(channel) or looks_like_ct(image[..., number])
        kinds.append(Normalisation(Kind.CT) if is_hounsfield else Normalisation())
    return ViewedCase(
        name=files.case_id,
        image=image,
        channels=channels,
        geometry=geometry,
        regions=regions,
        labels=meanings,
        ignore=ignore,
        truth=maps[label] if label else None,
        predictions={name: maps[path] for name, path in answers.items()},
        normalisation=kinds,
    )


def viewed_files(paths: Sequence[Path]) -> CaseFiles:
    """A case to look at: its images, named by channel or else by file, and the segmentation beside
    them, if there is one. Raises InputError for several cases or none, and for several
    segmentations."""
    first = paths[0]
    files = list(paths)
    if first.is_dir() and len(paths) == 1:
        files = volumes_in(first)
    if files == [first]:
        name = read_name(files[0])
        case = CaseFiles(name.case or first.name, "", tuple(files), None)
        unread = []
    else:
        found = find_cases(files, ())
        raise_if_any(found.problems)
        if len(found.cases) != 1:
            raise InputError(
                f"--image {listed(paths)} must be one case, the folder or the files, found "
                f"{len(found.cases) or 'none'}; correct the path"
            )
        case = found.cases[0]
        unread = found.unread
    if len(unread) > 1:
        raise InputError(
            f"--image must have one segmentation, got {listed(unread)}; give the files of one case"
        )
    names = case.names
    if len(names) != len(case.images):
        names = tuple(read_name(path).channel or stem_of(path) for path in case.images)
    case_id = name_of(first) if first.is_dir() else case.case_id
    label = unread[0] if unread else None
    return CaseFiles(case_id, case.case_id, case.images, label, names)


# --- Private helpers ---


Volumes = Dict[Path, np.ndarray]  # by their files, in axes R A S


def _read(images: Sequence[Path], labels: Sequence[Path]) -> Tuple[Volumes, Volumes, Geometry]:
    """Read images (X, Y, Z, C) and label maps (X, Y, Z) uint8 that must be on one grid, that of the
    first image. Raises InputError with the problems of all."""
    read: Volumes = {}
    maps: Volumes = {}
    problems: List[str] = []
    first = None  # file and its grid
    for path in (*images, *labels):
        try:
            array, geometry = read_volume(path)
            if first is None:
                first = (path, geometry)
            array = on_grid(array, path, geometry, *first)
            if path in images:
                read[path] = to_ras(_modalities(path, array, alone=len(images) == 1), first[1])
            if path in labels:
                maps[path] = to_ras(label_codes(path, array), first[1])
        except InputError as error:
            problems += error.problems
    raise_if_any(problems)
    return read, maps, first[1]


def _modalities(path: Path, array: np.ndarray, *, alone: bool) -> np.ndarray:
    """An image as `(X, Y, Z, C)` of finite numbers."""
    if array.ndim != 4:
        array = array[..., None]
    most = MOST_CHANNELS if alone else 1
    rule = f"have at most {most} channels" if alone else "be 3D beside other images"
    if array.shape[3] > most:
        raise InputError(
            f"--image {path} must {rule}, got {array.shape[3]} channels; give other images or one "
            "alone"
        )
    array = np.nan_to_num(array, posinf=0, neginf=0)
    for number in range(array.shape[3]):
        if not looks_like_ct(array[..., number]):
            array[..., number] = without_residue(array[..., number])
    return array


def _meanings(
    known: Optional[LabelCodes], maps: Sequence[np.ndarray], ignore: Optional[int]
) -> Tuple[Mapping[int, str], Mapping[str, Sequence[int]]]:
    """Code -> name and region -> codes; codes that the files' names do not explain are regions of
    their own. The code to `ignore` is in none."""
    codes = sorted({int(code) for label in maps for code in np.unique(label)} - {0})
    labels: Mapping[int, str] = {0: "background"}
    regions: Dict[str, Sequence[int]] = {}
    if known:
        labels = labels_in_use(known.of, known.labels, codes)
        for region, own in known.regions.items():
            learnt = tuple(code for code in own if code in labels and code != ignore)
            if learnt:
                regions[region] = learnt
    for code in codes:
        if code not in labels and code != ignore:
            regions[f"label {code}"] = (code,)
    return labels, regions


def _distinct(paths: Sequence[Path]) -> List[str]:
    """A name for each file: its own without the ending, or its folder's if some of them are
    equal. Raises InputError if some of these are equal too."""
    for names in (
        [stem_of(path) for path in paths],
        [path.resolve().parent.name for path in paths],
    ):
        if len(set(names)) == len(paths):
            return names
    raise InputError(
        "--prediction must name files of other names or in folders of other names, got "
        f"{listed(paths)}; rename one"
    )

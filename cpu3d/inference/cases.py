"""The files of cases to predict or to look at, as a user names them: folders, 4D files, or a file a channel."""

from collections import Counter
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

from cpu3d.data.stores.layouts import (
    CHANNEL_NAMES,
    FOLDER_LAYOUTS,
    LABEL_CODES,
    MODALITY_SUFFIX,
    CaseFiles,
    modality_of,
    name_of,
    one_each,
    read_decathlon,
    refuse_other_codes,
    stem_of,
    volumes_in,
)
from cpu3d.errors import InputError, refuse
from cpu3d.util.records import listed


def case_files(paths: Sequence[Path], channels: Sequence[str]) -> CaseFiles:
    """The image files of one case to predict: a BraTS case folder, one 4D file, or one 3D file per channel. Files that
    all end in a known modality (`_flair`, `-t1c`, ...) are put in the order of `channels`, others must be given in it.
    Segmentations are left out: `label` is None. Raises InputError when a channel is missing or double."""
    first, own = paths[0], [CHANNEL_NAMES.get(name.lower()) for name in channels]
    folder, named = first.is_dir(), all(own) and all(map(modality_of, paths))
    case_id = name_of(first) if folder else stem_of(first)
    apart = not folder and (len(paths) > 1 or len(channels) == 1)
    if apart:
        paths = [path for path in paths if modality_of(path) != "seg"]
        if named:
            case_id = MODALITY_SUFFIX.sub("", f"{case_id}.nii") or name_of(first.parent)
        elif len(paths) != len(channels):
            rule = f"one 4D file or one for each of {', '.join(channels)}"
            raise InputError(f"--image must name {rule}, got {len(paths)} files; name them all")
        else:
            rule = f"must be the file of its channel by its place among {', '.join(channels)}"
            others = [
                (path, modality_of(path)) for path, one in zip(paths, own) if modality_of(path) in {*own} - {None, one}
            ]
            refuse(f"{path} {rule}, got a name of {other}; give files in that order" for path, other in others)
    if folder or (named and apart):
        wanted = [known or name for known, name in zip(own, channels)]
        files, wrong = one_each(volumes_in(first) if folder else paths, wanted, first if folder else first.parent)
        refuse(wrong)
        paths = [files[name] for name in wanted]
    return CaseFiles(case_id, case_id, tuple(paths), None)


def grouped_by_case(paths: Sequence[Path], channels: Sequence[str]) -> List[List[Path]]:
    """3D files to predict, those of one case together: they are one case, or for a single channel a case each, without
    the files of other modalities and segmentations."""
    if len(channels) > 1:
        return [list(paths)] if paths else []
    wanted = (None, CHANNEL_NAMES.get(channels[0].lower()))
    return [[path] for path in paths if modality_of(path) in wanted] or [[path] for path in paths]


def viewed_files(paths: Sequence[Path]) -> Tuple[CaseFiles, Tuple[str, ...]]:
    """A case to look at and the names of its images: their modality, or else their file's name. The label is the
    segmentation beside them, if there is one. Raises InputError for several cases or none, and for images of one
    name."""
    first = paths[0]
    if len(paths) > 1 and any(path.is_dir() for path in paths):
        raise InputError(f"--image must be one case, got {listed(paths)}; give one folder or its files")
    files = volumes_in(first) if first.is_dir() else list(paths)
    images = [path for path in files if modality_of(path) != "seg"]
    if not images and first.is_dir():
        found = "a segmentation alone" if files else "none"
        rule = f"--image {first} must hold .nii.gz or .nii files of images, found {found}"
        raise InputError(f"{rule}; give the folder of a case, or a file")
    images = images or files  # a segmentation that is named is looked at
    labels = [path for path in files if path not in images]
    names = [modality_of(path) or stem_of(path) for path in images]
    twice = [name for name, count in Counter(names).items() if count > 1]
    refuse(f"--image must name one file of {name}, got several; give the files of one case" for name in twice)
    if len(labels) > 1:
        raise InputError(f"--image must have one segmentation, got {len(labels)}; give the files of one case")
    named = MODALITY_SUFFIX.sub("", images[0].name) if all(map(modality_of, images)) else stem_of(images[0])
    case_id = name_of(first) if first.is_dir() else named
    order = list(FOLDER_LAYOUTS["brats2017"].suffixes.values())
    pairs = sorted(zip(names, images), key=lambda one: order.index(one[0]) if one[0] in order else len(order))
    case = CaseFiles(case_id or first.name, case_id, tuple(path for _, path in pairs), labels[0] if labels else None)
    return case, tuple(name for name, _ in pairs)


def channels_of(image: Path, count: int) -> List[str]:
    """The channels of a 4D file: as the dataset.json above it names them, else by number."""
    dataset = _decathlon_above(image)
    return list(dataset[2]) if dataset and len(dataset[2]) == count else [f"channel {n + 1}" for n in range(count)]


def label_codes_of(files: CaseFiles) -> Optional[Tuple[str, Dict[int, str]]]:
    """Whose label codes go with the images of a case, and code -> name: those of the dataset.json above imagesTr/ or
    imagesTs/, else of the release that all files are named as in; None for others, and for BraTS-PED, which has the
    names of BraTS 2023 and other codes."""
    folder = files.images[0].absolute().parent
    dataset = _decathlon_above(files.images[0])
    if dataset:
        return str(folder.parent / "dataset.json"), dataset[3]
    try:
        refuse_other_codes(folder, [files.case_id])
    except InputError:
        return None
    named = [layout for layout in FOLDER_LAYOUTS if all(modality_of(path, layout) for path in files.images)]
    return (named[0], LABEL_CODES[named[0]]) if named else None


def _decathlon_above(image: Path):
    """What `read_decathlon` gives of the data set that an image lies in; None where it lies in none, or a bad one."""
    folder = image.absolute().parent
    if folder.name not in ("imagesTr", "imagesTs") or not (folder.parent / "dataset.json").is_file():
        return None
    try:
        return read_decathlon(folder.parent)
    except InputError:
        return None

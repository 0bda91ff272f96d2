"""Data sets whose cases a list names, or a folder in nnU-Net's way: the Decathlon's and MONAI's
dataset.json, and nnU-Net's raw data.

dataset = read_listed(Path("Dataset001_Tumour/dataset.json"))
"""

import contextlib
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from cpu3d.data.datasets.dataset import CaseFiles, Dataset, Problems
from cpu3d.data.datasets.dataset_json import (
    LABELS_RULE,
    Description,
    Entry,
    describe,
    entries_of,
    listing_of,
)
from cpu3d.data.datasets.names import (
    VOLUME_END,
    FileName,
    channel_key,
    composed,
    file_named,
    ids_of_cases,
    name_of,
    read_name,
    read_names,
    stem_of,
    volumes_in,
)
from cpu3d.data.nifti import read_grid
from cpu3d.data.split import Split
from cpu3d.errors import InputError, raise_if_any
from cpu3d.util.records import count

_AGAIN = "fetch it again, or leave the case out"


class _Named(NamedTuple):
    """A case as a list names it."""

    case_id: str
    images: List[str]
    label: Optional[str]


def read_listed(path: Path, labels: Optional[Mapping[int, str]] = None) -> Dataset:
    """The data set of a dataset.json, or of a list of that form, each case a patient of its own.
    `labels`, code -> name, are those of a list that names none.

    Raises InputError as `describe`, and for a list without labels or cases, for paths outside of
    its folder, and for files of nnU-Net's names that are not as many as its channels."""
    about = describe(path)
    if not about.labels and labels:
        about = replace(about, labels=dict(labels))
    problems = []
    if not about.labels:
        problems.append(f"labels of {path} {LABELS_RULE}, got none; add them, or --regions")
    entries: List[Entry] = []
    warnings: Tuple[str, ...] = ()
    layout = "nnunet"
    if about.is_nnunet2:
        named = []
        for case_id, case in listing_of(path).items():
            named.append(_Named(composed(case_id), case.images, case.label))
    else:
        entries = entries_of(path)
        named = _named_by(path, entries)
        # It is refused where cases need not be listed, as they are in nnU-Net 2.
        warnings = tuple(f"warning: {problem}" for problem in _other_number(about, len(entries)))
        if about.unread:
            told = f'warning: {count(about.unread, "case")} under "validation" of {path} not read'
            warnings += (f'{told}; give them "fold": 0 under "training" to hold them out',)
    raise_if_any([*problems, *_outside(path, named)])
    if about.is_nnunet2:
        ending = _ending_of(about)
        if named:
            raise_if_any(_other_number(about, len(named)))
        else:
            named = _in_folders(about, ending)
    elif _is_nnunet1(about, entries):
        named = _of_nnunet1(about, named)
    else:
        has_lists = any(isinstance(entry.image, list) for entry in entries)
        layout = "datalist" if has_lists else "decathlon"
    cases, bad = _of_files(about, named)
    return Dataset(
        folder=path.parent,
        name=about.name or name_of(path.parent),
        layout=layout,
        channels=about.channels,
        labels=about.labels,
        cases=tuple(cases),
        problems=bad,
        patient_rules={},
        regions=about.regions,
        class_order=about.class_order,
        ignore=about.ignore,
        folds=_folds_of(entries, [case.case_id for case in cases]),
        warnings=warnings,
    )


# --- Private helpers ---


def _outside(path: Path, named: Iterable[_Named]) -> List[str]:
    """A problem for each path that leads out of the list's folder: a downloaded list must not reach
    beyond it; a link may, as it is the owner's. So for each id that is no name of a file."""
    problems = []
    for case in named:
        for name in (*case.images, case.label):
            parts = PurePosixPath(name or "")
            if parts.is_absolute() or ".." in parts.parts:
                rule = f"paths in {path} must stay inside its folder"
                problems.append(f"{rule}, got {str(parts)!r}; make it relative")
        if "/" in case.case_id or case.case_id in ("", ".", ".."):
            rule = f"case ids in {path} must be names of files"
            problems.append(f"{rule}, got {case.case_id!r}; correct it")
    return problems


def _of_files(about: Description, named: Iterable[_Named]) -> Tuple[List[CaseFiles], Problems]:
    """The cases whose files a list names: images in 4D, or a file for each channel."""
    folder = about.path.parent
    cases = []
    bad: Problems = {}
    for case_id, images, label in named:
        paths = tuple(file_named(folder, name) for name in images)
        label_path = file_named(folder, label) if label else None
        cases.append(CaseFiles(case_id, case_id, paths, label_path))
        problems = _order_problems(about, case_id, images)
        wanted = [("image", *pair) for pair in zip(images, paths)]
        for kind, name, path in [*wanted, ("label", label, label_path)]:
            if path is None or not path.is_file():
                problems.append(_no_file(about, kind, case_id, name))
        if problems:
            bad[case_id] = problems
    return cases, bad


def _ending_of(about: Description) -> str:
    """The ending of the files of nnU-Net 2. Raises InputError for one that is not read."""
    ending = about.file_ending
    if ending is None:
        return ".nii.gz"
    if not isinstance(ending, str) or not VOLUME_END.fullmatch(ending):
        rule = f"file_ending of {about.path} must be .nii.gz or .nii, which are read"
        raise InputError(f"{rule}, got {ending}; convert the files")
    return ending


def _in_folders(about: Description, ending: str) -> List[_Named]:
    """The cases of nnU-Net 2 in imagesTr and labelsTr. Raises InputError for files of other names
    or of another number than those that dataset.json tells of."""
    folder = about.path.parent
    images = folder / "imagesTr"
    names = {path: read_name(path) for path in _volumes_of(images, ending)}
    rule = f"images in {images} must be named CASE_0000{ending}, by case and channel"
    unnamed = [path.name for path, name in names.items() if name.number is None]
    if unnamed or not names:
        got = _and_more(unnamed) if unnamed else "found none"
        raise InputError(f"{rule}, got {got}; correct them, or file_ending in {about.path}")
    _check_channels(about, names.values())
    file_of = {(name.case, name.number): f"imagesTr/{path.name}" for path, name in names.items()}
    label_of = {
        stem_of(path): f"labelsTr/{path.name}" for path in _volumes_of(folder / "labelsTr", ending)
    }
    if len(file_of) < len(names):
        times = Counter((name.case, name.number) for name in names.values())
        (case, number), _ = times.most_common(1)[0]
        raise InputError(f"{rule}, got two files {case}_{number:04d}; remove one")
    with_images = {name.case for name in names.values()}
    raise_if_any(_other_number(about, len(with_images)))
    named = []
    for case in sorted(with_images | set(label_of)):
        files = []
        for number in range(len(about.channels)):
            usual = f"imagesTr/{case}_{number:04d}{ending}"
            files.append(file_of.get((case, number), usual))
        named.append(_Named(case, files, label_of.get(case, f"labelsTr/{case}{ending}")))
    return named


def _is_nnunet1(about: Description, entries: Sequence[Entry]) -> bool:
    """Whether nnU-Net's files of a channel each lie in the place of the images of a list."""
    folder = about.path.parent
    singles = [folder / entry.image for entry in entries if isinstance(entry.image, str)]
    for image in singles:
        first = image.with_name(VOLUME_END.sub(r"_0000\g<0>", image.name))
        if not image.is_file() and first.is_file():
            return True
    if not singles or len(about.channels) == 1 or read_name(singles[0]).number is None:
        return False
    with contextlib.suppress(InputError):  # its problem is named when it is loaded
        return read_grid(singles[0])[1] == 1
    return False


def _of_nnunet1(about: Description, named: Iterable[_Named]) -> List[_Named]:
    """The cases of nnU-Net 1, whose list names imagesTr/CASE.nii.gz, or its first channel, for
    imagesTr/CASE_0000.nii.gz and so on."""
    folder = about.path.parent
    cases = []
    places = set()
    for case in named:
        image = Path(case.images[0])
        places.add(folder / image.parent)
        case_id = case.case_id
        if read_name(image).number is not None and (folder / image).is_file():
            case_id = read_name(image).case
            image = image.with_name(re.sub(r"_\d{4}(?=\.)", "", image.name))
        files = []
        for number in range(len(about.channels)):
            name = VOLUME_END.sub(rf"_{number:04d}\g<0>", image.name)
            files.append(str(image.with_name(name)))
        cases.append(_Named(case_id, files, case.label))
    _check_channels(about, [read_name(path) for each in places for path in _volumes_of(each, "")])
    return cases


def _check_channels(about: Description, names: Iterable[FileName]) -> None:
    """Raise InputError for a channel that no case has, and for files of more channels than there
    are."""
    numbers: Dict[int, FileName] = {}
    for name in names:
        if name.number is not None:
            numbers.setdefault(name.number, name)
    order = [f"{number:04d} {channel}" for number, channel in enumerate(about.channels)]
    problems = []
    beyond = [name for number, name in sorted(numbers.items()) if number >= len(order)]
    if beyond:
        rule = f"files of {about.path.parent} must be of the channels that {about.path.name} names"
        todo = f'name the others in its "{about.channels_field}", or remove their files'
        got = f"{beyond[0].case}_{beyond[0].number:04d}"
        problems.append(f"{rule}, {', '.join(order)}, got {got}; {todo}")
    absent = [words for number, words in enumerate(order) if number not in numbers]
    if absent:
        rule = f"channels of {about.path} must have files CASE_0000 and so on"
        todo = f'fetch them, or correct "{about.channels_field}" there'
        problems.append(f"{rule}, got none of {', '.join(absent)}; {todo}")
    raise_if_any(problems)


def _other_number(about: Description, number: int) -> List[str]:
    """The problem of a dataset.json that tells of another number of training cases."""
    said = about.training_cases
    if said is None or said == number:
        return []
    rule = f"numTraining of {about.path} must be the number of its training cases, {number}"
    return [f"{rule}, got {said!r}; fetch the missing cases, or correct it"]


def _and_more(names: Sequence[str]) -> str:
    """The first name, and how many follow."""
    if len(names) == 1:
        return names[0]
    return f"{names[0]} and {len(names) - 1} more"


def _volumes_of(folder: Path, ending: str) -> List[Path]:
    """The volumes in a folder, if there is one, with an ending in letters of any case; with "" of
    any ending."""
    paths = volumes_in(folder) if folder.is_dir() else []
    return [path for path in paths if path.name.lower().endswith(ending.lower())]


def _named_by(path: Path, entries: Sequence[Entry]) -> List[_Named]:
    """The cases of a list, called by their 4D files, or by what their files' names have in common
    without their channels."""
    names = []
    images = []
    for entry in entries:
        paths = [path.parent / name for name in entry.images]
        own = {stem_of(paths[0])}
        if len(paths) > 1:
            own = {name.case for name in read_names(paths).values()}
        names.append(own.pop() if len(own) == 1 else "")
        images.append(paths[0])
    ids = ids_of_cases(names, images)
    return [_Named(name, entry.images, entry.label) for name, entry in zip(ids, entries)]


def _order_problems(about: Description, case_id: str, images: Sequence[str]) -> List[str]:
    """The problems of a case whose files are several but not one a channel, or are named after
    other channels of the list than those in their places."""
    if len(images) == 1:
        return []
    own = f"images of case {case_id} in {about.path} must be"
    if len(images) != len(about.channels):
        rule = f"{own} {count(about.channels, 'file')}, of {', '.join(about.channels)}"
        return [f"{rule}, got {len(images)}; {_AGAIN}"]
    keys = [channel_key(name) for name in about.channels]
    problems = []
    for name, key, channel in zip(images, keys, about.channels):
        told = read_name(Path(name)).channel
        if told in keys and told != key:
            rule = f"{own} in the order {', '.join(about.channels)}"
            problems.append(f"{rule}, got {name} for {channel}; correct it")
    return problems


def _no_file(about: Description, kind: str, case_id: str, name: Any) -> str:
    rule = f"{kind} of case {case_id} in {about.path} must be a file, got {name or 'none'}"
    return f"{rule}; {_AGAIN}"


def _folds_of(entries: Sequence[Entry], case_ids: Sequence[str]) -> Tuple[Split, ...]:
    """The folds of a list whose cases have the number of the one that holds them out. A case
    without a number is in the training of all; a single number of all cases is no fold."""
    is_division = len({entry.fold for entry in entries}) > 1
    numbers = sorted({entry.fold for entry in entries if entry.fold is not None})
    folds = []
    for number in numbers if is_division else ():
        sides: Dict[str, List[str]] = {"train": [], "val": []}
        for entry, case_id in zip(entries, case_ids):
            sides["val" if entry.fold == number else "train"].append(case_id)
        folds.append({side: tuple(sorted(ids)) for side, ids in sides.items()})
    return tuple(folds)

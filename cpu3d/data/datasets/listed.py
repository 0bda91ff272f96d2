"""Data sets whose cases a list names, or a folder in nnU-Net's way: the Decathlon's and MONAI's
dataset.json, and nnU-Net's raw data.

dataset = read_listed(Path("Dataset001_Tumour/dataset.json"))
"""

from pathlib import Path, PurePosixPath
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from cpu3d.data.datasets.dataset import CaseFiles, Dataset, Problems
from cpu3d.data.datasets.dataset_json import LABELS_RULE, Description, Entry, describe
from cpu3d.data.datasets.names import (
    VOLUME_END,
    channel_key,
    composed,
    file_named,
    ids_of_cases,
    name_of,
    read_name,
    stem_of,
    volumes_in,
)
from cpu3d.data.split import Split
from cpu3d.errors import InputError, raise_if_any
from cpu3d.util.records import count


class _Named(NamedTuple):
    """A case as a list names it."""

    case_id: str
    images: List[str]
    label: Optional[str]


def read_listed(path: Path) -> Dataset:
    """The data set of a dataset.json, or of a list of that form, each case a patient of its own.

    Raises InputError as `describe`, and for a list without labels or cases, for paths outside of
    its folder, and for files of nnU-Net's names that are not as many as its channels."""
    about = describe(path)
    entries = about.entries
    if not about.labels:
        raise InputError(f"labels of {path} {LABELS_RULE}, got none; add them")
    warnings: Tuple[str, ...] = ()
    if about.is_nnunet2:
        entries = []
        layout = "nnunet"
        named = [
            _Named(composed(case_id), case.images, case.label)
            for case_id, case in about.listing.items()
        ]
        raise_if_any(_outside(path, named))
        named = named or _in_folders(about)
        said = about.training_cases
        if said is not None and said != len(named):
            rule = f"numTraining of {path} must be the number of its training cases, {len(named)}"
            raise InputError(f"{rule}, got {said}; fetch the missing cases, or correct it")
    else:
        if not entries:
            raise InputError(f'"training" of {path} must list cases, got none; add them')
        listed = _named_by(path, entries)
        raise_if_any(_outside(path, listed))
        named = [case._replace(images=_numbered(about, case.images)) for case in listed]
        layout = "decathlon"
        if any(isinstance(entry.image, list) for entry in entries):
            layout = "datalist"
        if named != listed:
            layout = "nnunet"
        if about.unread:
            told = f'warning: {count(about.unread, "case")} under "validation" of {path}'
            todo = 'give them "fold": 0 under "training" to hold them out'
            warnings = (f"{told} not read; {todo}",)
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
        for path, name in zip((*paths, label_path), (*images, label)):
            if path is None or not path.is_file():
                kind = "label" if path == label_path else "image"
                rule = f"{kind} of case {case_id} in {about.path} must be a file"
                todo = "fetch it again, or leave the case out"
                problems.append(f"{rule}, got {name or 'none'}; {todo}")
        if problems:
            bad[case_id] = problems
    return cases, bad


def _in_folders(about: Description) -> List[_Named]:
    """The cases of nnU-Net 2 in imagesTr and labelsTr. Raises InputError for an ending that is not
    read, for files of other names, and for channels that dataset.json does not name."""
    ending = about.file_ending
    if not VOLUME_END.fullmatch(ending):
        rule = f"file_ending of {about.path} must be .nii.gz or .nii, which are read"
        raise InputError(f"{rule}, got {ending}; convert the files")
    images = about.path.parent / "imagesTr"
    rule = f"images in {images} must be named CASE_0000{ending}, by case and channel"
    names = [read_name(path) for path in _volumes_of(images, ending)]
    other = [name.case for name in names if name.number is None]
    if other or not names:
        got = f"{other[0]}{ending}" if other else "none"
        raise InputError(f"{rule}, got {got}; correct them, or file_ending in {about.path}")
    for name in names:
        if name.number is not None and name.number >= len(about.channels):
            got = f"{name.case}_{name.number:04d}{ending}"
            todo = f'name its channel in "channel_names" of {about.path}, or remove such files'
            raise InputError(f"{rule}, {', '.join(about.channels)}, got {got}; {todo}")
    labelled = map(stem_of, _volumes_of(about.path.parent / "labelsTr", ending))
    named = []
    for case in sorted({*labelled, *(name.case for name in names)}):
        files = [f"imagesTr/{case}_{n:04d}{ending}" for n in range(len(about.channels))]
        named.append(_Named(case, files, f"labelsTr/{case}{ending}"))
    return named


def _numbered(about: Description, images: List[str]) -> List[str]:
    """The files of a case, of which nnU-Net 1 lists imagesTr/CASE.nii.gz for
    imagesTr/CASE_0000.nii.gz and so on."""
    folder = about.path.parent
    if len(images) > 1 or file_named(folder, images[0]).is_file():
        return images
    files = [VOLUME_END.sub(rf"_{n:04d}\g<0>", images[0]) for n in range(len(about.channels))]
    return files if any((folder / name).is_file() for name in files) else images


def _volumes_of(folder: Path, ending: str) -> List[Path]:
    """The volumes with an ending in a folder, if there is one."""
    paths = volumes_in(folder) if folder.is_dir() else []
    return [path for path in paths if path.name.endswith(ending)]


def _named_by(path: Path, entries: Sequence[Entry]) -> List[_Named]:
    """The cases of a list, called by their 4D files, or by what their files' names have in common
    without their channels."""
    names = []
    images = []
    for entry in entries:
        paths = [path.parent / name for name in entry.images]
        shared = {stem_of(paths[0])}
        if len(paths) > 1:
            shared = {read_name(each).case for each in paths}
        names.append(shared.pop() if len(shared) == 1 else "")
        images.append(paths[0])
    ids = ids_of_cases(names, images)
    return [_Named(name, entry.images, entry.label) for name, entry in zip(ids, entries)]


def _order_problems(about: Description, case_id: str, images: Sequence[str]) -> List[str]:
    """The problems of a case whose files are several but not one a channel, or are named after
    other channels of the list than those in their places."""
    if len(images) == 1:
        return []
    must = f"images of case {case_id} in {about.path} must be"
    if len(images) != len(about.channels):
        rule = f"{must} {count(about.channels, 'file')}, of {', '.join(about.channels)}"
        return [f"{rule}, got {len(images)}; correct it, or leave the case out"]
    keys = [channel_key(name) for name in about.channels]
    problems = []
    for name, key, channel in zip(images, keys, about.channels):
        told = read_name(Path(name)).channel
        if told in keys and told != key:
            rule = f"{must} in the order {', '.join(about.channels)}"
            problems.append(f"{rule}, got {name} for {channel}; correct it")
    return problems


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

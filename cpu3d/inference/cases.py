"""The cases to predict, from the paths a user gives: folders, 4D files, or 3D files, one a channel."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Mapping, Sequence, Tuple

from cpu3d.data.nifti import channel_count
from cpu3d.data.stores.layouts import (
    CHANNEL_NAMES,
    LABEL_CODES,
    MODALITY_SUFFIX,
    CaseFiles,
    label_codes_of,
    modality_of,
    name_of,
    one_each,
    regions_of,
    stem_of,
    volumes_in,
)
from cpu3d.errors import InputError, refuse
from cpu3d.settings import AUTO

STORE = "the run's store"  # the origin of label codes if a case has none of its own


@dataclass(frozen=True)
class Case:
    """A case to predict, and the label codes that it is written in."""

    files: CaseFiles
    channels: Tuple[str, ...]  # of its image: those of the run's store, or just the run's own
    codes_of: str  # origin of the codes: STORE, a layout, or the path of a dataset.json
    labels: Mapping[int, str]  # code -> name
    regions: Mapping[str, Tuple[int, ...]]  # the run's regions, in its order, in these codes


def check_exist(name: str, paths: Sequence[Path]) -> None:
    """Raise InputError for each of the `paths` of an option that does not exist."""
    refuse(f"{name} {path} must exist, found none; check the path" for path in paths if not path.exists())


def find_cases(paths: Sequence[Path], predictor: Any, codes: str = AUTO) -> Tuple[List[Case], List[str]]:
    """The cases in `paths`, and the problems of paths that are none. A case is a folder, a 4D file, or all 3D files;
    for a run of one channel each 3D file, without those of other modalities and segmentations. A case has each of the
    channels of the run's store, or else of the run's own."""
    together, groups, cases, problems = [], [], [], []
    for path in paths:
        try:
            is_case = path.is_dir() or channel_count(path) > 1
        except InputError:
            is_case = True  # its problem is named when it is loaded
        groups.append([path]) if is_case else together.append(path)
    named = (None, CHANNEL_NAMES.get(predictor.inputs[0].lower()))
    own = [path for path in together if modality_of(path) in named] or together
    groups += [together] if together and len(predictor.inputs) > 1 else [[path] for path in own]
    for group in groups:
        try:
            files, channels = _files(group, tuple(predictor.channels), tuple(predictor.inputs))
            cases.append(Case(files, channels, *codes_for(predictor, files, codes)))
        except InputError as error:
            problems.extend(error.problems)
    return cases, problems


def codes_for(predictor: Any, files: CaseFiles, choice: str = AUTO) -> Tuple[str, Mapping, Mapping]:
    """The last fields of a `Case`: the codes of --codes, or of the case's own data set, or the store's if that is not
    known or lacks a region of the run. Raises InputError if codes that were chosen lack one."""
    of, labels = (label_codes_of(files) or (STORE, {})) if choice == AUTO else (choice, LABEL_CODES.get(choice, {}))
    regions = {**{name: (code,) for code, name in labels.items() if code}, **regions_of(labels)}
    missing = [name for name in predictor.regions if name not in regions]
    if not labels or (missing and choice == AUTO):
        return STORE, predictor.labels, predictor.regions
    known = ", ".join(f"{code} {label}" for code, label in labels.items())
    refuse(
        f"region {name} of the run must have a code among those of {of} for case {files.case_id}, got {known}; "
        "choose other --codes"
        for name in missing
    )
    return of, labels, {name: regions[name] for name in predictor.regions}


def case_files(paths: Sequence[Path], channels: Sequence[str]) -> CaseFiles:
    """The image files of one case to predict: a BraTS case folder, one 4D file, or one 3D file per channel. Files that
    all end in a known modality (`_flair`, `-t1c`, ...) are put in the order of `channels`; without such names they must
    be in it. Segmentations are left out: `label` is None. Raises InputError when a channel is missing or double."""
    first, own = paths[0], [CHANNEL_NAMES.get(name.lower()) for name in channels]
    if first.is_dir():
        case_id, folder, files = name_of(first), first, volumes_in(first)
    elif len(paths) == 1 < len(channels):
        return CaseFiles(stem_of(first), stem_of(first), (first,), None)
    else:
        case_id, folder, files = stem_of(first), first.parent, [path for path in paths if modality_of(path) != "seg"]
        if not (all(own) and all(map(modality_of, paths))):
            if len(files) != len(channels):
                rule = f"one 4D file or one for each of {', '.join(channels)}"
                raise InputError(f"--image must name {rule}, got {len(files)} files; name them all")
            rule = f"--image must name files in the order {', '.join(channels)}"
            refuse(
                f"{rule}, got {path} for {channel}; put them in that order"
                for path, channel, suffix in zip(files, channels, own)
                if modality_of(path) in {*own} - {None, suffix}
            )
            return CaseFiles(case_id, case_id, tuple(files), None)
        case_id = MODALITY_SUFFIX.sub("", f"{case_id}.nii") or name_of(folder)
    wanted = [known or name for known, name in zip(own, channels)]
    by_name, wrong = one_each(files, wanted, folder)
    refuse(wrong)
    return CaseFiles(case_id, case_id, tuple(by_name[name] for name in wanted), None)


def _files(paths: List[Path], channels: Tuple[str, ...], inputs: Tuple[str, ...]) -> Tuple[CaseFiles, Tuple[str, ...]]:
    """The case that `paths` make with the store's channels, else with the run's own. Raises InputError for neither."""
    if len(paths) == 1 and paths[0].is_file():
        own = inputs if channel_count(paths[0]) == len(inputs) != len(channels) else channels
        return case_files(paths, own), own
    try:
        return case_files(paths, channels), channels
    except InputError:
        return case_files(paths, inputs), inputs

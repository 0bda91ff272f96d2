"""The data set layouts that `prepare` and `predict` understand: the files that make up a case.

    decathlon   dataset.json beside imagesTr/ and labelsTr/; one 4D image a case
                (Medical Segmentation Decathlon)
    nnunet      dataset.json beside imagesTr/<id>_0000, _0001, ... and labelsTr/<id>, .nii or
                .nii.gz; a 3D image for each channel (raw data of nnU-Net 1 and 2)
    datalist    a JSON list as the Decathlon's, with a list of 3D images for each case (MONAI)
    brats2017   <id>/<id>_flair _t1 _t1ce _t2 _seg .nii or .nii.gz, also below HGG/ and LGG/
                (BraTS 2017-2021)
    brats2023   <id>/<id>-t2f -t1n -t1c -t2w -seg .nii or .nii.gz (BraTS 2023 and later)

Label codes differ between releases: they come from dataset.json or the layout, never from voxels.
Code 4 of brats2023, the resection cavity, is a region RC."""

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Container, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from cpu3d.data.datasets.dataset import CaseFiles, Dataset
from cpu3d.data.datasets.dataset_json import NAME, describing
from cpu3d.data.datasets.listed import read_listed
from cpu3d.data.datasets.names import (
    check_printable,
    folders_with_volumes,
    is_ignored,
    name_of,
    stem_of,
    volumes_in,
)
from cpu3d.data.datasets.patients import TABLE, patient_of, read_patients
from cpu3d.errors import InputError, raise_if_any


@dataclass(frozen=True)
class FolderLayout:
    """A layout with a folder of 3D files for each case, named <case><separator><suffix>."""

    separator: str
    suffixes: Dict[str, str]  # suffix -> channel, in the store's order, or "seg"
    labels: Dict[int, str]
    optional: Tuple[int, ...] = ()  # codes that a store has only if they occur in its cases

    def channel_of(self, path: Path) -> Optional[str]:
        """The channel, or "seg", that a file's name ends in; else None."""
        _, separator, suffix = stem_of(path).rpartition(self.separator)
        return self.suffixes.get(suffix.lower()) if separator else None


_GLIOMA = {0: "background", 1: "necrotic and non-enhancing tumour core", 2: "oedema"}
FOLDER_LAYOUTS = {
    "brats2017": FolderLayout(
        "_",
        {"flair": "FLAIR", "t1": "T1w", "t1ce": "T1gd", "t2": "T2w", "seg": "seg"},
        {**_GLIOMA, 4: "enhancing tumour"},
    ),
    "brats2023": FolderLayout(
        "-",
        {"t2f": "FLAIR", "t1n": "T1w", "t1c": "T1gd", "t2w": "T2w", "seg": "seg"},
        {**_GLIOMA, 3: "enhancing tumour", 4: "resection cavity"},
        optional=(4,),
    ),
}

CAVITY = "resection cavity"
OEDEMA = "oedema"
ENHANCING = "enhancing tumour"
CORE = "other tumour core"
# Part of a glioma -> what its label's name has, in lower case.
GLIOMA_PARTS = {
    CAVITY: "cavity",
    OEDEMA: "edema",
    ENHANCING: r"(?<!non-)(?<!non)(?<!non )\benhanc",
}

# Layout -> code -> name of its brain tumour labels; those of "decathlon" are Task01's.
LABEL_CODES = {
    **{name: layout.labels for name, layout in FOLDER_LAYOUTS.items()},
    "decathlon": {0: "background", 1: "edema", 2: "non-enhancing tumor", 3: "enhancing tumour"},
}


def read_dataset(
    folder: Union[str, Path],
    patients: Optional[Path] = None,
    regions: Optional[Dict[str, Tuple[int, ...]]] = None,
    ignore: Optional[int] = None,
) -> Dataset:
    """Recognise the layout of `folder` and list its cases. A single BraTS case folder is a data set
    of one. `folder` may also be a list itself, a file .json.

    `patients` is a table of the cases' patients, else their names show them. `regions`, by name,
    take the place of those that the data set has. `ignore` is the code of voxels that are not to be
    learnt, else that of a label whose name says so. Links are followed.

    Raises InputError for no folder, no cases, two layouts, a case id twice, a dataset.json that is
    damaged or names files outside its folder, several labels to be ignored, and as
    `Dataset.with_regions` and `ignoring`."""
    folder = Path(folder)
    if folder.is_file() and folder.suffix.lower() == ".json":
        dataset = read_listed(folder)
    elif not folder.is_dir():
        got = "a file" if folder.exists() else "none"
        raise InputError(f"data set {folder} must be a folder, found {got}; check the path")
    elif (folder / NAME).is_file():
        dataset = read_listed(folder / NAME)
    else:
        dataset = _read_folders(folder)
    dataset = _with_ignored(dataset, ignore)
    if regions:
        dataset = dataset.with_regions(regions)
    check_printable(folder, (dataset.name, *(case.case_id for case in dataset.cases)))
    times = Counter(case.case_id for case in dataset.cases)
    rule = f"in {folder} must be used once"
    raise_if_any(
        f"case id {name} {rule}, got {n} cases; rename one" for name, n in times.items() if n > 1
    )
    whole = [case for case in dataset.cases if case.case_id not in dataset.problems]
    whole.sort(key=lambda case: case.case_id)
    ids = [case.case_id for case in whole]
    patient_ids = {}
    rules = {}
    for case_id in ids:
        patient_ids[case_id], rules[case_id] = patient_of(case_id)
    if patients is not None:
        patient_ids = read_patients(patients, ids)
        check_printable(f"--patients {patients}", patient_ids.values())
        rules = dict.fromkeys(ids, TABLE)
    cases = tuple(replace(case, patient_id=patient_ids[case.case_id]) for case in whole)
    return replace(dataset, cases=cases, patient_rules=rules)


def ignoring(dataset: Dataset, code: int) -> Dataset:
    """The same cases, with the voxels of a label code not to be learnt. Raises InputError if it is
    no code of a label, if the data set has another such code or a region with it, or if nothing
    else is left."""
    rule = f"the label to be ignored in data set {dataset.folder} must"
    codes = [other for other in sorted(dataset.labels) if other]
    if code not in codes:
        known = ", ".join(map(str, codes))
        raise InputError(f"{rule} be one of its codes {known}, got {code}; choose one of them")
    if dataset.ignore is not None and dataset.ignore != code:
        name = f"{dataset.ignore} {dataset.labels[dataset.ignore]}"
        todo = "leave --ignore out, or correct the names"
        raise InputError(f"{rule} be the one that its names show, {name}, got {code}; {todo}")
    learnt = regions_in(replace(dataset, ignore=code), dataset.labels)
    if not learnt:
        todo = "name the labels that are to be learnt"
        raise InputError(f"{rule} leave a region to be learnt, got {code} alone; {todo}")
    within = [name for name, codes_of in learnt.items() if code in codes_of]
    if within:
        todo = "correct the regions, or leave --ignore out"
        raise InputError(f"{rule} be in no region, got {code} of {', '.join(within)}; {todo}")
    return replace(dataset, ignore=code)


def _with_ignored(dataset: Dataset, ignore: Optional[int]) -> Dataset:
    """The data set with the voxels of a code ignored, by default of a label whose name says so.
    Raises InputError as `ignoring`, and for several such labels."""
    named = [code for code, name in dataset.labels.items() if code and is_ignored(name)]
    if len(named) > 1:
        names = ", ".join(f"{code} {dataset.labels[code]}" for code in named)
        rule = f"labels of data set {dataset.folder} must have at most one to be ignored"
        raise InputError(f"{rule}, got {names}; give their voxels one code")
    if named and dataset.ignore is None:  # else its layout has told
        dataset = ignoring(dataset, named[0])
    return dataset if ignore is None else ignoring(dataset, ignore)


def regions_in(dataset: Dataset, labels: Dict[int, str]) -> Dict[str, Tuple[int, ...]]:
    """The regions of a data set with these of its labels: as they are named, else `regions_of`."""
    if dataset.regions is not None:
        return dataset.regions
    return regions_of(labels, dataset.ignore)


def labels_in_use(layout: str, labels: Dict[int, str], codes: Container[int]) -> Dict[int, str]:
    """`labels` without the optional ones of `layout`, unless they are among `codes`."""
    optional = FOLDER_LAYOUTS[layout].optional if layout in FOLDER_LAYOUTS else ()
    return {code: name for code, name in labels.items() if code not in optional or code in codes}


def regions_of(labels: Dict[int, str], ignore: Optional[int] = None) -> Dict[str, Tuple[int, ...]]:
    """Region -> codes: WT, TC, ET if the names show one oedema and one enhancing tumour, and RC if
    they show a resection cavity; else each label is a region. The code `ignore`, or one whose name
    says that it is to be ignored, is in none."""
    not_learnt = {0, ignore, *(code for code, name in labels.items() if is_ignored(name))}
    codes = [code for code in sorted(labels) if code not in not_learnt]

    parts = _glioma_parts(labels, codes)
    if not parts:
        return {labels[code]: (code,) for code in codes}
    tumour = [code for code in codes if parts[code] != CAVITY]
    regions = {
        "WT": tuple(tumour),
        "TC": tuple(code for code in tumour if parts[code] != OEDEMA),
        "ET": tuple(code for code in tumour if parts[code] == ENHANCING),
    }
    if len(codes) > len(tumour):
        regions["RC"] = tuple(code for code in codes if parts[code] == CAVITY)
    return regions


def _glioma_parts(labels: Mapping[int, str], codes: Sequence[int]) -> Dict[int, str]:
    """Code -> part of a glioma, whatever a data set calls it; {} if `codes` are not of one oedema,
    one enhancing tumour, one other part of the tumour, and at most one cavity."""
    parts = {}
    for code in codes:
        name = labels[code].lower()
        found = [part for part, pattern in GLIOMA_PARTS.items() if re.search(pattern, name)]
        parts[code] = found[0] if found else CORE
    times = Counter(parts.values())
    whole = [OEDEMA, ENHANCING, CORE]
    if any(times[part] != 1 for part in whole) or times[CAVITY] > 1:
        return {}
    return parts


def channels_of(image: Path, count: int) -> List[str]:
    """The channels of a 4D file: as the dataset.json of its data set names them, else by number."""
    about = describing(image)
    if about and len(about.channels) == count:
        return list(about.channels)
    return [f"channel {n + 1}" for n in range(count)]


@dataclass(frozen=True)
class LabelCodes:
    """Label codes that images belong to."""

    of: str  # a layout, or the path of a dataset.json
    labels: Dict[int, str]  # code -> name
    regions: Dict[str, Tuple[int, ...]]  # in these codes

    @classmethod
    def of_layout(cls, layout: str) -> "LabelCodes":
        """Those of LABEL_CODES."""
        labels = LABEL_CODES[layout]
        return cls(layout, labels, regions_of(labels))

    def translated(
        self, labels: Mapping[int, str], regions: Mapping[str, Sequence[int]]
    ) -> Dict[int, int]:
        """Code of other `regions` -> the code here of the label with its name; {} if one of them
        has none. `labels` are code -> name."""
        codes = sorted({code for held in regions.values() for code in held})
        if all(code in labels and self.labels.get(code) == labels[code] for code in codes):
            return {code: code for code in codes}
        names = _label_keys(labels)
        code_of = {name: code for code, name in _label_keys(self.labels).items()}
        if all(names.get(code) in code_of for code in codes):
            return {code: code_of[names[code]] for code in codes}
        return {}


def _label_keys(labels: Mapping[int, str]) -> Dict[int, str]:
    """Code -> name by which labels of several data sets are compared."""
    codes = [code for code, name in labels.items() if code and not is_ignored(name)]
    return _glioma_parts(labels, codes) or {code: labels[code].casefold() for code in codes}


def label_codes_of(files: CaseFiles) -> Optional[LabelCodes]:
    """The label codes that belong to a case's images: those of their data set's dataset.json, else
    of the release that the files' names follow.

    None for others, and for BraTS-PED, which has the names of BraTS 2023 and other codes. Raises
    InputError as `describing`.
    """
    about = describing(files.images[0])
    if about and about.labels:
        regions = about.regions
        if regions is None:
            regions = regions_of(about.labels, about.ignore)
        return LabelCodes(str(about.path), about.labels, regions)
    if _is_paediatric(files.case_id):
        return None
    for name, layout in FOLDER_LAYOUTS.items():
        if all(map(layout.channel_of, files.images)):
            return LabelCodes.of_layout(name)
    return None


def _read_folders(folder: Path) -> Dataset:
    """The data set of a folder of case folders, each case a patient of its own."""
    folders = [folder] if volumes_in(folder) else folders_with_volumes(folder)
    layouts = sorted({layout for layout in map(_layout_of, folders) if layout})
    if len(layouts) != 1:
        known = ", ".join(FOLDER_LAYOUTS)
        rule = f"data set {folder} must hold a dataset.json or case folders of one layout ({known})"
        names = " and ".join(layouts) or "neither"
        raise InputError(f"{rule}, found {names}; name the folder of one data set")
    layout = FOLDER_LAYOUTS[layouts[0]]
    others = [name_of(case) for case in folders if _is_paediatric(name_of(case))]
    if others:
        rule = f"cases of {folder} must have the label codes of BraTS gliomas"
        todo = "bring them into the Decathlon layout with a dataset.json that names their codes"
        got = ", ".join(others)
        raise InputError(f"{rule}, got BraTS-PED: {got}; {todo}, or leave them out")
    channels = [name for name in layout.suffixes.values() if name != "seg"]
    cases = []
    problems = {}
    for case in folders:
        case_id = name_of(case)
        files = {}
        wrong = []
        for channel in (*channels, "seg"):
            own = [path for path in volumes_in(case) if layout.channel_of(path) == channel]
            if len(own) == 1:
                files[channel] = own[0]
            else:
                rule = f"{channel} of {case} must have one file named after it"
                got = ", ".join(path.name for path in own) or "none"
                wrong.append(f"{rule}, got {got}; repair the case or leave it out")
        if wrong:
            problems[case_id] = wrong
        images = tuple(files[channel] for channel in channels if channel in files)
        cases.append(CaseFiles(case_id, case_id, images, files.get("seg")))
    return Dataset(
        folder=folder,
        name=name_of(folder),
        layout=layouts[0],
        channels=tuple(channels),
        labels=layout.labels,
        cases=tuple(cases),
        problems=problems,
        patient_rules={},
    )


def _layout_of(case: Path) -> Optional[str]:
    """The layout that most files of a folder are named in; None if no file is."""
    paths = volumes_in(case)
    files = {}
    for name, layout in FOLDER_LAYOUTS.items():
        files[name] = sum(layout.channel_of(path) is not None for path in paths)
    best = max(files, key=files.__getitem__)
    return best if files[best] else None


def _is_paediatric(case_id: str) -> bool:
    """Whether a case is of BraTS-PED, which has the layout of BraTS 2023 and other label codes."""
    return case_id.upper().startswith("BRATS-PED-")

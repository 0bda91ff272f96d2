"""The data set layouts that `prepare` and `predict` understand: the files that make up a case.

    decathlon   dataset.json beside imagesTr/ and labelsTr/; one 4D image a case
                (Medical Segmentation Decathlon)
    brats2017   <id>/<id>_flair _t1 _t1ce _t2 _seg .nii or .nii.gz, also below HGG/ and LGG/
                (BraTS 2017-2021)
    brats2023   <id>/<id>-t2f -t1n -t1c -t2w -seg .nii or .nii.gz (BraTS 2023 and later)

Label codes differ between releases: they come from dataset.json or the layout, never from voxels.
Code 4 of brats2023, the resection cavity, is a region RC."""

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Container, Dict, Iterable, List, Optional, Sequence, Tuple, Union

from cpu3d.data.nifti import channel_count
from cpu3d.data.normalise import Normalisation
from cpu3d.data.stores.dataset_json import LABELS_RULE, NAME, describe, describing, entries_of
from cpu3d.data.stores.names import is_volume, places_of, read_name, stem_of
from cpu3d.data.stores.splits import TABLE, read_patients
from cpu3d.errors import InputError, raise_if_any

UNKNOWN = "not known from the name: each case counts as a patient of its own"


@dataclass(frozen=True)
class FolderLayout:
    """A layout with a folder of 3D files for each case, named <case><separator><suffix>."""

    separator: str
    suffixes: Dict[str, str]  # suffix -> channel, in the store's order, or "seg"
    labels: Dict[int, str]
    optional: Tuple[int, ...] = ()  # codes that a store has only if they occur in its cases
    patients: Dict[str, str] = field(default_factory=dict)
    """As PATIENT_NAMES, for this layout alone."""


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
        patients={"layout brats2023, <patient>-<time point>": r"(.+)-\d{3}$"},
    ),
}

# Layout -> code -> name of its brain tumour labels; those of "decathlon" are Task01's.
LABEL_CODES = {
    **{name: layout.labels for name, layout in FOLDER_LAYOUTS.items()},
    "decathlon": {0: "background", 1: "edema", 2: "non-enhancing tumor", 3: "enhancing tumour"},
}
# Rule -> pattern of a case's name in any layout, whose group 1 is the patient.
PATIENT_NAMES = {
    "BraTS 2023 and later, <patient>-<time point>": r"(BraTS(?:-[a-z]+)+-\d+)-\d{1,3}(?!\d)",
    "BraTS 2017 to 2019, <patient>_<time point>": r"(BraTS1[5-9]_[^_]+_[^_]+)_\d+(?!\d)",
    "BraTS 2020 and 2021, one case a patient": r"(BraTS(?:20_[a-z]+|2021)_\d+)",
    "TCGA-<site>-<patient>": r"(TCGA-\w\w-\w{4})(?![a-z0-9])",
}
Problems = Dict[str, List[str]]  # case that cannot be used -> the reasons why


@dataclass(frozen=True)
class CaseFiles:
    """The files of one case."""

    case_id: str
    patient_id: str
    images: Tuple[Path, ...]
    """One 4D file with the channels last, or one 3D file per channel in the order of the
    channels."""
    label: Optional[Path]
    names: Tuple[str, ...] = ()
    """The channels that a 4D file holds, in its order, if they are not the ones that are wanted."""

    @property
    def paths(self) -> Tuple[Path, ...]:
        """The images, then the label if there is one."""
        if self.label is None:
            return self.images
        return (*self.images, self.label)


@dataclass(frozen=True)
class Dataset:
    """A data set as found on disk; no volume has been opened yet."""

    folder: Path
    name: str
    layout: str  # "decathlon", or one of FOLDER_LAYOUTS
    channels: Tuple[str, ...]
    labels: Dict[int, str]  # label code -> name; 0 is background
    cases: Tuple[CaseFiles, ...]  # the complete cases, by case id
    problems: Problems  # of the cases with a file missing or double, which are not in `cases`
    patient_rules: Dict[str, str]
    """Case id -> the rule that tells its patient, from `patient_of`, or TABLE."""
    normalisation: Tuple[Normalisation, ...] = ()
    """Of each channel, as decided for its store; none is over the foreground in all of them."""

    def with_channels(self, wanted: Sequence[str]) -> "Dataset":
        """The same cases with these channels, by name. Raises InputError if one is missing."""
        places = places_of(wanted, self.channels, f"data set {self.folder}")
        if places == tuple(range(len(self.channels))):
            return replace(self, channels=tuple(wanted))

        def picked(case: CaseFiles) -> CaseFiles:
            if len(case.images) == 1:
                return replace(case, names=self.channels)
            return replace(case, images=tuple(case.images[place] for place in places))

        return replace(self, channels=tuple(wanted), cases=tuple(map(picked, self.cases)))


def read_dataset(folder: Union[str, Path], patients: Optional[Path] = None) -> Dataset:
    """Recognise the layout of `folder` and list its cases. A single BraTS case folder is a data set
    of one.

    `patients` is a table of the cases' patients, else their names show them. Links are followed.
    Raises InputError for no folder, no cases, two layouts, a case id twice, a dataset.json that is
    damaged or names files outside its folder."""
    folder = Path(folder)
    if not folder.is_dir():
        got = "a file" if folder.exists() else "none"
        raise InputError(f"data set {folder} must be a folder, found {got}; check the path")
    if (folder / NAME).is_file():
        dataset = _read_decathlon(folder)
    else:
        dataset = _read_folders(folder)
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
        patient_ids[case_id], rules[case_id] = patient_of(case_id, dataset.layout)
    if patients is not None:
        patient_ids = read_patients(patients, ids)
        rules = dict.fromkeys(ids, TABLE)
    cases = tuple(replace(case, patient_id=patient_ids[case.case_id]) for case in whole)
    return replace(dataset, cases=cases, patient_rules=rules)


def patient_of(case_id: str, layout: str) -> Tuple[str, str]:
    """(patient, rule that tells it) from the name of a case; (case_id, UNKNOWN) if no rule
    matches."""
    patterns = dict(PATIENT_NAMES)
    if layout in FOLDER_LAYOUTS:
        patterns.update(FOLDER_LAYOUTS[layout].patients)
    for rule, pattern in patterns.items():
        match = re.match(pattern, case_id, re.IGNORECASE)
        if match:
            return match[1], rule
    return case_id, UNKNOWN


def labels_in_use(layout: str, labels: Dict[int, str], codes: Container[int]) -> Dict[int, str]:
    """`labels` without the optional ones of `layout`, unless they are among `codes`."""
    optional = FOLDER_LAYOUTS[layout].optional if layout in FOLDER_LAYOUTS else ()
    return {code: name for code, name in labels.items() if code not in optional or code in codes}


def regions_of(labels: Dict[int, str]) -> Dict[str, Tuple[int, ...]]:
    """Region -> codes: WT, TC, ET if the names show one oedema and one enhancing tumour, and RC if
    they show a resection cavity; else each label is a region."""
    codes = [code for code in sorted(labels) if code != 0]

    def named(pattern: str) -> Tuple[int, ...]:
        return tuple(code for code in codes if re.search(pattern, labels[code].lower()))

    cavity = named("cavity")
    oedema = named("edema")
    enhancing = named(r"(?<!non-)(?<!non)(?<!non )\benhanc")
    tumour = tuple(codes)
    if len(cavity) == 1:
        tumour = tuple(code for code in codes if code not in cavity)
    has_one_each = len(oedema) == 1 and len(enhancing) == 1
    if not has_one_each or len(tumour) != 3 or not {*oedema, *enhancing} <= {*tumour}:
        return {labels[code]: (code,) for code in codes}
    regions = {
        "WT": tumour,
        "TC": tuple(code for code in tumour if code not in oedema),
        "ET": enhancing,
    }
    if len(codes) > len(tumour):
        regions["RC"] = cavity
    return regions


def channels_of(image: Path, count: int) -> List[str]:
    """The channels of a 4D file: as the dataset.json of its data set names them, else by number."""
    about = describing(image)
    if about and len(about.channels) == count:
        return list(about.channels)
    return [f"channel {n + 1}" for n in range(count)]


def label_codes_of(files: CaseFiles) -> Optional[Tuple[str, Dict[int, str]]]:
    """(source, code -> name) of the label codes that belong to a case's images: those of their data
    set's dataset.json, else of the release that the files' names follow.

    None for others, and for BraTS-PED, which has the names of BraTS 2023 and other codes. Raises
    InputError as `describing`.
    """
    about = describing(files.images[0])
    if about and about.labels:
        return str(about.path), about.labels
    if _other_codes(files.images[0].parent, [files.case_id]):
        return None
    for layout in FOLDER_LAYOUTS:
        if all(modality_of(path, layout) for path in files.images):
            return layout, LABEL_CODES[layout]
    return None


def _read_folders(folder: Path) -> Dataset:
    """The data set of a folder of case folders, each case a patient of its own."""
    folders = _case_folders(folder)
    layouts = sorted({layout for layout in folders.values() if layout})
    if len(layouts) != 1:
        known = ", ".join(FOLDER_LAYOUTS)
        rule = f"data set {folder} must hold a dataset.json or case folders of one layout ({known})"
        names = " and ".join(layouts) or "neither"
        raise InputError(f"{rule}, found {names}; name the folder of one data set")
    layout = FOLDER_LAYOUTS[layouts[0]]
    raise_if_any(_other_codes(folder, [name_of(case) for case in folders]))
    channels = tuple(name for name in layout.suffixes.values() if name != "seg")
    cases = []
    problems = {}
    for case in folders:
        case_id = name_of(case)
        files, wrong = one_each(volumes_in(case), (*channels, "seg"), case, layouts[0])
        if wrong:
            problems[case_id] = wrong
        images = tuple(files[channel] for channel in channels if channel in files)
        cases.append(CaseFiles(case_id, case_id, images, files.get("seg")))
    return Dataset(
        folder=folder,
        name=name_of(folder),
        layout=layouts[0],
        channels=channels,
        labels=layout.labels,
        cases=tuple(cases),
        problems=problems,
        patient_rules={},
    )


def _case_folders(folder: Path) -> Dict[Path, Optional[str]]:
    """Case folder -> its layout: `folder` itself, its subfolders, or theirs. The layout of a bad
    case is None."""

    def layout_of(case: Path) -> Optional[str]:
        paths = volumes_in(case)
        best = None
        most = 0
        for name in FOLDER_LAYOUTS:
            files = sum(modality_of(path, name) is not None for path in paths)
            if files > most:
                best = name
                most = files
        return best

    def subfolders(parent: Path) -> Dict[Path, Optional[str]]:
        paths = [path for path in sorted(parent.iterdir()) if not path.name.startswith(".")]
        return {path: layout_of(path) for path in paths if path.is_dir()}

    own = layout_of(folder)
    if own:
        return {folder: own}
    cases = {}
    for child, layout in subfolders(folder).items():
        below = {} if layout else subfolders(child)
        if any(below.values()):
            cases.update(below)
        else:
            cases[child] = layout

    def is_case(path: Path) -> bool:
        # A bad case is a folder that is empty, or that holds volumes but none with a known name.
        return bool(cases[path] or volumes_in(path)) or not any(path.iterdir())

    return {path: layout for path, layout in cases.items() if is_case(path)}


def _other_codes(folder: Path, ids: Sequence[str]) -> List[str]:
    """The problems of cases of BraTS-PED, which has the layout of BraTS 2023 and other label
    codes, and what to do."""
    rule = "must have the label codes of BraTS gliomas, got those of BraTS-PED"
    others = [case_id for case_id in ids if case_id.upper().startswith("BRATS-PED-")]
    if not others:
        return []
    problems = [f"case {case_id} of {folder} {rule}" for case_id in others]
    way = "bring them into the Decathlon layout with a dataset.json that names their codes"
    return [*problems, f"{way}, or leave them out"]


def _read_decathlon(folder: Path) -> Dataset:
    """The data set of a dataset.json, each case a patient of its own."""
    path = folder / NAME
    about = describe(path)
    if about.is_nnunet2:
        raise InputError(_not_decathlon(folder, "nnU-Net 2's raw data, with channel_names"))
    entries = entries_of(path)
    problems = []
    if not about.labels:
        problems.append(f"labels of {path} {LABELS_RULE}, got none; add them")
    # A downloaded list must not reach beyond its folder; a link may, as it is the owner's.
    files = [name for entry in entries for name in (entry.image, entry.label) if name]
    named = [PurePosixPath(name) for name in files]
    outside = [str(name) for name in named if name.is_absolute() or ".." in name.parts]
    problems += [
        f"paths in {path} must stay inside its folder, got {name!r}; make it relative"
        for name in outside
    ]
    raise_if_any(problems)
    images = [folder / entry.image for entry in entries]
    first = _first_of_nnunet(images, len(about.channels))
    if first:
        got = f"nnU-Net's files for each channel, such as {first.name}"
        raise InputError(_not_decathlon(folder, got))
    cases = []
    bad: Problems = {}
    for entry, image in zip(entries, images):
        case_id = stem_of(image)
        label = folder / entry.label if entry.label else None
        cases.append(CaseFiles(case_id, case_id, (image,), label))
        for kind, name in (("image", entry.image), ("label", entry.label)):
            if name is None or not (folder / name).is_file():
                rule = f"{kind} of case {case_id} in {path} must be a file, got {name or 'none'}"
                todo = "fetch it again, or leave the case out"
                bad.setdefault(case_id, []).append(f"{rule}; {todo}")
    return Dataset(
        folder=folder,
        name=about.name or name_of(folder),
        layout="decathlon",
        channels=about.channels,
        labels=about.labels,
        cases=tuple(cases),
        problems=bad,
        patient_rules={},
    )


def _not_decathlon(folder: Path, got: str) -> str:
    """The problem of a data set whose layout is recognised and cannot be prepared."""
    rule = f"data set {folder} must be in the Decathlon layout, one image file for each case"
    todo = "join each case's files _0000, _0001, ... in a 4D file, and list these under training"
    return f"{rule}, got {got}, which is not supported yet; {todo}"


def _first_of_nnunet(images: Sequence[Path], channels: int) -> Optional[Path]:
    """A file of a first channel, if nnU-Net's files lie in the place of an image; else None."""
    for image in images:
        stem = stem_of(image)
        first = image.with_name(f"{stem}_0000{image.name[len(stem) :]}")
        if not image.is_file() and first.is_file():
            return first
    image = images[0]
    if channels == 1 or read_name(image).number is None:
        return None
    try:
        return image if channel_count(image) == 1 else None
    except InputError:
        return None  # its problem is named when it is loaded


def volumes_in(folder: Path) -> List[Path]:
    """NIfTI files in `folder`, without the "._" companions that macOS leaves in archives."""
    named = (path for path in sorted(folder.iterdir()) if is_volume(path))
    return [path for path in named if not path.name.startswith(".") and path.is_file()]


def name_of(folder: Path) -> str:
    return folder.resolve().name


def modality_of(path: Path, layout: Optional[str] = None) -> Optional[str]:
    """The channel, or "seg", that a file's name ends in, as `layout` names files or in any way;
    else None."""
    if layout is None:
        return read_name(path).channel
    names = FOLDER_LAYOUTS[layout]
    _, separator, suffix = stem_of(path).rpartition(names.separator)
    if not separator:
        return None
    return names.suffixes.get(suffix.lower())


def one_each(
    paths: Sequence[Path], channels: Iterable[str], folder: Path, layout: Optional[str] = None
) -> Tuple[Dict[str, Path], List[str]]:
    """The file of each channel, or "seg", by their names, and a problem for each channel of no or
    several files."""
    files = {}
    problems = []
    for channel in channels:
        own = [path for path in paths if modality_of(path, layout) == channel]
        if len(own) == 1:
            files[channel] = own[0]
        else:
            rule = f"{channel} of {folder} must have one file named after it"
            got = ", ".join(path.name for path in own) or "none"
            problems.append(f"{rule}, got {got}; repair the case or leave it out")
    return files, problems

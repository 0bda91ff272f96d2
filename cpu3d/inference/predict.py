"""Segment new NIfTI images: writes label maps with the image's own grid, orientation, affine and label codes.

    ./run.sh predict --run runs/first --image data/BraTS-GLI-00001-000 --out predictions
    ./run.sh predict --run runs/first --image flair.nii.gz t1.nii.gz t1ce.nii.gz t2.nii.gz --out predictions
    ./run.sh predict --run runs/fold-1 runs/fold-2 runs/fold-3 --image data/BraTS-GLI-00001-000 --out predictions
    ./run.sh predict --run runs/flair --image a.nii.gz b.nii.gz --codes brats2023 --out predictions

An image is a case folder, one 4D file, or one 3D file per channel. Several folders or 4D files are separate cases: a
bad case is reported at the end, and the others are predicted. No label is needed or read. A run that was trained on
some of its store's channels also takes images of these channels alone, such as one 3D FLAIR file.

3D files are one case. Files named after their modality (x_flair, x_t1, ...) are sorted by it; others must be given in
the order of the channels. For a run of one channel each 3D file is a case; files of other modalities are ignored.

Labels are written in the codes of the image's own data set: those of the BraTS release whose names its files have, or
of the dataset.json above its imagesTr or imagesTs. Where neither is known they are the codes of the run's store.
--codes chooses other codes.

Several runs predict together, by the mean of their probabilities; folds must be complete. Small parts of regions are
removed as the runs have decided (`cpu3d.inference.postprocessing`), if all runs have; --raw keeps them.

<case_id>.json beside <case_id>.nii.gz has the meaning of the codes, volumes in ml, sources with their hashes, the runs.
--page adds <case_id>.html, to scroll through the slices; --probabilities adds the maps as the network gives them.
"""

import dataclasses
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import nibabel
import numpy as np
from rich.console import Console

from cpu3d.data.labels import THRESHOLD, code_meanings, region_mask
from cpu3d.data.nifti import read_volume, write_label, write_volume
from cpu3d.data.records import CaseRecord
from cpu3d.data.stores.case import load_case
from cpu3d.data.stores.layouts import LABEL_CODES, CaseFiles, regions_of
from cpu3d.errors import DoesNotFitError, InputError, refuse
from cpu3d.inference.cases import case_files, grouped_by_case, label_codes_of
from cpu3d.inference.evaluate import check_finite
from cpu3d.inference.postprocessing import RAW, PostProcessing, gentlest, postprocessing_of
from cpu3d.inference.runs import Ensemble, Inference, RunOptions, describe, load_configs, trained_predictors
from cpu3d.pages.viewer import SCORES, ViewedCase, write_case_page
from cpu3d.settings import AUTO
from cpu3d.util.atomic import writable_folder, write_json
from cpu3d.util.progress import bar, say
from cpu3d.util.records import listed
from memory_estimator.common.files import read_json
from memory_estimator.common.schema import option
from memory_estimator.common.table import Table

SCHEMA = 1  # version of the sidecar
WRITER = "cpu3d predict"  # how a sidecar says that the label beside it was made here and may be replaced
STORE = "the run's store"  # whose label codes they are where a case says nothing of its own


@dataclass(frozen=True)
class Options:
    """What is predicted, and what is written."""

    image: Tuple[Path, ...] = option(
        help="case folders, 4D files, or a 3D file per channel, named after its modality or in the channels' order; "
        "for a run of one channel 3D files are a case each",
        metavar="PATH",
    )
    out: Path = option(help="folder for the predictions", metavar="DIR")
    raw: bool = option(False, help="leave out the post-processing that the run has decided")
    zero_nan: bool = option(False, help="make NaN and infinite voxels background")
    probabilities: bool = option(False, help="write <case_id>_<region>_probability.nii.gz, too, in float32")
    page: bool = option(False, help="write <case_id>.html, too: a page to scroll through the slices in a browser")
    codes: str = option(
        AUTO,
        help="whose label codes to write; auto: those of the image's own data set where known, else of the run's store",
        choices=(AUTO, "store", *LABEL_CODES),
    )


@dataclass(frozen=True)
class Codes:
    """The label codes that a case is written in."""

    of: str  # whose they are: STORE, a layout, or the path of a dataset.json
    labels: Mapping[int, str]  # code -> name
    regions: Mapping[str, Tuple[int, ...]]  # the run's regions, in its order, in these codes


@dataclass(frozen=True)
class Case:
    """A case to predict."""

    files: CaseFiles
    channels: Tuple[str, ...]  # of its image: those of the run's store, or just the run's own
    codes: Codes


OPTIONS = (RunOptions, Options, Inference)


def run(chosen: RunOptions, options: Options, inference: Inference) -> int:
    check_there("--image", options.image)
    configs = load_configs(chosen.run, some_folds=chosen.some_folds)
    decided = [RAW if options.raw else postprocessing_of(*one, chosen.weights) for one in zip(chosen.run, configs)]
    writable_folder(options.out, "--out")
    predictors = trained_predictors(chosen.run, chosen.weights, inference)
    predictor, postprocessing = Ensemble(predictors), gentlest(decided)
    cases, problems = find_cases(options.image, predictor, options.codes)
    check_out(options.out, options.image, cases)
    read = {path for case in cases for path in case.files.images}
    unread = [path for path in options.image if path.is_file() and path not in read]
    lines = [*(f"not read: {path}" for path in unread), f"post-processing: {postprocessing.words}"]
    say(*lines, *_mapping(cases), stderr=False)
    about = {**describe(chosen.run, configs, predictors), "weights": chosen.weights}
    done, kind = [], InputError
    with bar("predict", total=len(cases)) as advance:
        for case in cases:
            try:
                done.append(predict_case(predictor, case, options, about, postprocessing))
            except InputError as error:
                problems += error.problems
                kind = DoesNotFitError if isinstance(error, DoesNotFitError) else kind
            advance()
    if done:
        head = ("file", *(f"{name} ml" for name in done[0]["volumes_ml"]), "seconds")
        rows = [
            (one["label"], *(f"{ml:.2f}" for ml in one["volumes_ml"].values()), f"{one['seconds']:.1f}") for one in done
        ]
        Console().print(Table(head, rows, title="predictions").rich())
    if problems:
        raise kind(*problems)
    return 0


def check_there(name: str, paths: Sequence[Path]) -> None:
    """Raise InputError for each of the `paths` of an option that does not exist."""
    refuse(f"{name} {path} must exist, found none; check the path" for path in paths if not path.exists())


def predict_case(
    predictor: Any, case: Case, options: Options, about: Mapping[str, Any], postprocessing: PostProcessing
) -> Dict[str, Any]:
    """Segment one case into `options.out`; returns the content of its sidecar, `about` included: whose answer it is. A
    label among the case's files is not read. Raises InputError for an image that cannot be read or does not fit the
    run, and where a file would be overwritten whose sidecar does not say that it was written here."""
    begin, out, files, codes = time.monotonic(), options.out, case.files, case.codes
    names = _probability_names(files.case_id, tuple(predictor.regions)) if options.probabilities else {}
    label_file, sidecar, page_file = (out / f"{files.case_id}.{end}" for end in ("nii.gz", "json", "html"))
    outputs = (sidecar, label_file, *(out / name for name in names.values()), *([page_file] if options.page else []))
    _check_replaceable(sidecar, outputs, files)
    folder = Path(files.images[0]).parent
    loaded = load_case(files, channels=case.channels, labels=None, dataset_folder=folder, zero_nan=options.zero_nan)
    record, geometry = loaded.record, loaded.record.geometry
    answers = predictor.probabilities(loaded.image, record, case.channels)
    check_finite(answers, files.case_id)
    label = postprocessing.paint(answers, codes.regions, record.spacing_mm)
    content = _sidecar(case, record, label, postprocessing=postprocessing.words, probabilities=names)
    content.update(about)
    write_json(sidecar, content)  # first, so that a label cut off by a crash is known as ours and can be redone
    for position, name in enumerate(names):
        # Level 1: probabilities are noise in their last bits, and level 6 takes three times as long for little.
        write_volume(out / names[name], answers[..., position].astype(np.float32), geometry, compression=1)
    write_label(label_file, label, geometry)
    if options.page:
        shown = ViewedCase(
            files.case_id, loaded.image, case.channels, geometry, codes.regions, codes.labels,
            predictions={"prediction": label}, unit=SCORES if loaded.image.dtype.kind == "f" else "",
        )  # fmt: skip
        write_case_page(page_file, shown, "predict")
    content.update(complete=True, seconds=round(time.monotonic() - begin, 3))
    write_json(sidecar, content)
    return content


def find_cases(paths: Sequence[Path], predictor: Any, codes: str = AUTO) -> Tuple[List[Case], List[str]]:
    """The cases that `paths` name, and what is wrong with those that cannot be one: a folder, a 4D file, or 3D files as
    `grouped_by_case` has them. A case has each of the channels of the run's store, or else of the run's own."""
    together, groups, cases, problems = [], [], [], []
    for path in paths:
        try:
            if path.is_dir() or _channel_count(path) > 1:
                groups.append([path])
            else:
                together.append(path)
        except InputError as error:
            problems.extend(error.problems)
    for group in [*groups, *grouped_by_case(together, predictor.inputs)]:
        try:
            files, channels = _files(group, tuple(predictor.channels), tuple(predictor.inputs))
            cases.append(Case(files, channels, codes_for(predictor, files, codes)))
        except InputError as error:
            problems.extend(error.problems)
    return cases, problems


def codes_for(predictor: Any, files: CaseFiles, choice: str = AUTO) -> Codes:
    """The label codes that a case is written in: those of --codes, or of the case's own data set, or the store's where
    that is not known or lacks a region of the run. Raises InputError where codes that were chosen lack one."""
    if choice == AUTO:
        of, labels = label_codes_of(files) or (STORE, None)
    else:
        of, labels = choice, LABEL_CODES.get(choice)
    regions = {**{name: (code,) for code, name in (labels or {}).items() if code}, **regions_of(labels or {})}
    missing = [name for name in predictor.regions if name not in regions]
    if labels is None or (missing and choice == AUTO):
        return Codes(STORE, predictor.labels, predictor.regions)
    known = ", ".join(f"{code} {label}" for code, label in labels.items())
    refuse(
        f"region {name} of the run must have a code among those of {of} for case {files.case_id}, got {known}; "
        "choose other --codes"
        for name in missing
    )
    return Codes(of, labels, {name: regions[name] for name in predictor.regions})


def check_out(out: Path, inputs: Sequence[Path], cases: Sequence[Case]) -> None:
    """Raise InputError, all problems together, when `out` cannot take the predictions without harm."""
    problems = []
    if out.resolve() in (path.resolve() for path in inputs):
        problems.append(f"--out must not be a folder that is predicted on, got {out}; choose another")
    ids = Counter(case.files.case_id for case in cases)
    twice = [case_id for case_id, times in ids.items() if times > 1]
    refuse(
        [*problems, *(f"case ids must differ, got {one} twice; predict them into separate folders" for one in twice)]
    )


def _sidecar(case: Case, record: CaseRecord, label: np.ndarray, **about: Any) -> Dict[str, Any]:
    """What a case's sidecar holds of its label, grid and sources, before it is complete."""
    codes, voxel_ml = case.codes, float(np.prod(record.spacing_mm)) / 1000.0
    voxels = {name: np.count_nonzero(region_mask(label, of_region)) for name, of_region in codes.regions.items()}
    return {
        "schema": SCHEMA,
        "written_by": WRITER,
        "complete": False,
        "case_id": case.files.case_id,
        "label": f"{case.files.case_id}.nii.gz",
        "codes_of": codes.of,
        "label_codes": {str(code): name for code, name in code_meanings(codes.regions, codes.labels).items()},
        "regions": {name: list(of_region) for name, of_region in codes.regions.items()},
        "volumes_ml": {name: round(int(count) * voxel_ml, 4) for name, count in voxels.items()},
        "threshold": THRESHOLD,
        **about,
        "axes": record.geometry.axes,
        "spacing_mm": list(record.spacing_mm),
        "zeroed_voxels": record.zeroed_voxels,
        "sources": [dataclasses.asdict(source) for source in record.sources],
    }


def _mapping(cases: Sequence[Case]) -> List[str]:
    """The codes that are written, a line for all cases with the same codes."""
    lines = []
    for of, codes in {case.codes.of: case.codes for case in cases}.items():
        ids = listed(case.files.case_id for case in cases if case.codes.of == of)
        meanings = ", ".join(f"{code} {name}" for code, name in code_meanings(codes.regions, codes.labels).items())
        lines.append(f"{ids}: label codes of {of}: {meanings}{'; --codes chooses others' * (of == STORE)}")
    return lines


def _files(paths: List[Path], channels: Tuple[str, ...], inputs: Tuple[str, ...]) -> Tuple[CaseFiles, Tuple[str, ...]]:
    """The case that `paths` make with the store's channels, else with the run's own. Raises InputError for neither."""
    if len(paths) == 1 and paths[0].is_file():
        own = inputs if _channel_count(paths[0]) == len(inputs) != len(channels) else channels
        return case_files(paths, own), own
    try:
        return case_files(paths, channels), channels
    except InputError:
        return case_files(paths, inputs), inputs


def _channel_count(path: Path) -> int:
    """Channels of a file by its header. Raises InputError with the reason where it has none."""
    try:
        shape = nibabel.load(path).shape
    except Exception:  # nibabel raises its own errors, zlib's, numpy's and OSError for bytes that are no image
        shape = ()
    if len(shape) not in (3, 4):
        shape = read_volume(path)[0].shape  # raises it
    return shape[3] if len(shape) == 4 else 1


def _probability_names(case_id: str, regions: Sequence[str]) -> Dict[str, str]:
    """Region -> file name. Regions may be named after labels, and those may hold blanks or slashes."""
    slugs = [re.sub(r"[^\w.-]+", "-", name) for name in regions]
    if len(set(slugs)) < len(slugs):
        slugs = [f"{position}-{slug}" for position, slug in enumerate(slugs, start=1)]
    return {name: f"{case_id}_{slug}_probability.nii.gz" for name, slug in zip(regions, slugs)}


def _check_replaceable(sidecar: Path, outputs: Sequence[Path], files: CaseFiles) -> None:
    """Raise InputError when an output is a source, or exists and no sidecar says that it was written here."""
    sources = {path.resolve() for path in files.paths}
    try:
        ours = read_json(sidecar).get("written_by") == WRITER
    except (OSError, ValueError, AttributeError):
        ours = False
    reasons = {path: "was not written by predict" for path in outputs if path.exists() and not ours}
    reasons.update({path: "is a source image" for path in outputs if path.resolve() in sources})
    refuse(f"{path} must not be overwritten, it {why}; choose another --out" for path, why in reasons.items())

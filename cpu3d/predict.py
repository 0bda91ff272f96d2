"""Segment new images: NIfTI in, a label map on the image's own grid, orientation, affine and label codes out.

    ./run.sh predict --run runs/first --image data/BraTS-GLI-00001-000 --out predictions
    ./run.sh predict --run runs/first --image flair.nii.gz t1.nii.gz t1ce.nii.gz t2.nii.gz --out predictions
    ./run.sh predict --run runs/fold-1 runs/fold-2 runs/fold-3 --image data/BraTS-GLI-00001-000 --out predictions

An image is a case folder, one 4D file, or one 3D file per channel. Several folders or 4D files are cases of their own,
done one after another: a bad one is reported at the end and costs nothing else. No label is needed or read. A run that
was trained on some of its store's channels takes images of those alone, too, such as one 3D FLAIR file.

Several runs answer together, with the mean of their probabilities; folds have to be all there.

Beside <case_id>.nii.gz lies <case_id>.json: what the codes mean, volumes in ml, sources with their hashes, the runs.
"""

import argparse
import dataclasses
import re
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import nibabel
import numpy as np
from rich.console import Console
from rich.table import Table

from cpu3d.atomic import writable_folder, write_json
from cpu3d.data.case import load_case
from cpu3d.data.layouts import CaseFiles, case_files
from cpu3d.data.nifti import read_volume, write_label, write_volume
from cpu3d.ensemble import add_run_options, describe, joined, load_configs
from cpu3d.errors import DoesNotFitError, InputError
from cpu3d.evaluate import check_finite
from cpu3d.inference_options import add_inference_options, inference_from
from cpu3d.labels import THRESHOLD, code_meanings, label_from_regions, region_mask
from cpu3d.predictors import trained_predictors
from cpu3d.progress import bar
from memory_estimator.files import read_json

SCHEMA = 1
"""Version of the sidecar."""

WRITER = "cpu3d predict"
"""How a sidecar says that the label beside it was made here and may be replaced."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    parser.add_argument(
        "--image", type=Path, required=True, nargs="+", metavar="PATH",
        help="case folders, 4D files, or one file per channel in the store's or the run's order",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the predictions")
    parser.add_argument(
        "--probabilities", action="store_true",
        help="write a float32 NIfTI per region, too (<case_id>_<region>_probability.nii.gz)",
    )  # fmt: skip
    add_inference_options(parser)


def run(args: argparse.Namespace) -> int:
    missing = [f"--image {path} must exist, found none; check the path" for path in args.image if not path.exists()]
    if missing:
        raise InputError(*missing)
    inference = inference_from(args)
    configs = load_configs(args.run, some_folds=args.some_folds)
    writable_folder(args.out, "--out")
    predictors = trained_predictors(args.run, args.weights, inference)
    predictor = joined(predictors)
    told = [describe(*one) for one in zip(args.run, configs, predictors)]
    about = {**(told[0] if len(told) == 1 else {"runs": told}), "weights": args.weights}
    cases, problems = find_cases(args.image, predictor.channels, predictor.inputs)
    check_out(args.out, args.image, cases)
    console = Console()
    for code, meaning in code_meanings(predictor.regions, predictor.labels).items():
        console.print(f"code {code}: {meaning}", highlight=False)
    done, kind = [], InputError
    with bar("predict", total=len(cases)) as advance:
        for files in cases:
            try:
                done.append(predict_case(predictor, files, args.out, probabilities=args.probabilities, about=about))
            except InputError as error:
                problems.extend(error.problems)
                kind = DoesNotFitError if isinstance(error, DoesNotFitError) else kind
            advance()
    if done:
        console.print(_table(done, predictor.regions))
    if problems:
        raise kind(*problems)
    return 0


def predict_case(
    predictor: Any,
    files: CaseFiles,
    out: Path,
    *,
    probabilities: bool = False,
    about: Optional[Mapping[str, Any]] = None,
) -> Dict[str, Any]:
    """Segment one case into `out`; returns the content of its sidecar.

    `predictor` is what `load_predictor` gives; `about` says whose answer it is and goes into the sidecar. The image has
    the channels of its store or just its own inputs; which, is told by their number. A label among `files` is not read.
    Files that are there are replaced only when their sidecar says that they were written here.

    Raises InputError for an image that cannot be read or that does not fit the run, and where a file would be
    overwritten that was not written here.
    """
    begin = time.monotonic()
    out = Path(out)
    names = _probability_names(files.case_id, tuple(predictor.regions)) if probabilities else {}
    label_name, sidecar = f"{files.case_id}.nii.gz", out / f"{files.case_id}.json"
    _check_replaceable(sidecar, [out / name for name in (label_name, *names.values())], files)
    out.mkdir(parents=True, exist_ok=True)  # before the work: a folder that cannot be made is told at once
    channels = channels_of(files, predictor.channels, predictor.inputs)
    case = load_case(files, channels=channels, labels=None, dataset_folder=Path(files.images[0]).parent)
    geometry = case.record.geometry
    answers = predictor.probabilities(case.image, case.record, channels)
    check_finite(answers, files.case_id)
    label = label_from_regions(answers, predictor.regions)
    voxel_ml = float(np.prod(case.record.spacing_mm)) / 1000.0
    content = {
        "schema": SCHEMA,
        "written_by": WRITER,
        "complete": False,
        "case_id": files.case_id,
        "label": label_name,
        "label_codes": {str(c): name for c, name in code_meanings(predictor.regions, predictor.labels).items()},
        "regions": {name: list(codes) for name, codes in predictor.regions.items()},
        "volumes_ml": {
            name: round(int(np.count_nonzero(region_mask(label, codes))) * voxel_ml, 4)
            for name, codes in predictor.regions.items()
        },
        "threshold": THRESHOLD,
        "probabilities": names,
        "axes": geometry.axes,
        "spacing_mm": list(case.record.spacing_mm),
        "sources": [dataclasses.asdict(source) for source in case.record.sources],
        **(about or {}),
    }
    write_json(sidecar, content)  # first, so that a label cut off by a crash is known as ours and can be redone
    for position, name in enumerate(names):
        # Level 1: probabilities are noise in their last bits, and level 6 takes three times as long for little.
        write_volume(out / names[name], answers[..., position].astype(np.float32), geometry, compression=1)
    write_label(out / label_name, label, geometry)
    content.update(complete=True, seconds=round(time.monotonic() - begin, 3))
    write_json(sidecar, content)
    return content


def find_cases(
    paths: Sequence[Path], channels: Sequence[str], inputs: Sequence[str]
) -> Tuple[List[CaseFiles], List[str]]:
    """The cases that `paths` name, and what is wrong with those that cannot be one.

    A folder is a case, a 4D file is a case, 3D files together are one case with a file per channel. That is a file for
    each of `channels`, the store's, or else for each of `inputs`, the run's own. With a single input, 3D files that
    make no such case are a case each.
    """
    alone, together, cases, problems = [], [], [], []
    for path in paths:
        try:
            (alone if path.is_dir() or _channel_count(path) > 1 else together).append(path)
        except InputError as error:
            problems.extend(error.problems)
    damaged = bool(problems)
    for group in [[path] for path in alone] + _groups(together, channels, inputs):
        try:
            cases.append(_case(group, channels, inputs))
        except InputError as error:
            if len(group) == 1 or not damaged:  # a damaged file is the reason why the others make no case
                problems.extend(error.problems)
    return cases, problems


def channels_of(files: CaseFiles, channels: Sequence[str], inputs: Sequence[str]) -> Tuple[str, ...]:
    """The channels of a case that `find_cases` found."""
    count = len(files.images) if len(files.images) > 1 else _channel_count(files.images[0])
    return _fitting(count, channels, inputs)


def check_out(out: Path, inputs: Sequence[Path], cases: Sequence[CaseFiles]) -> None:
    """Raise InputError, all problems together, when `out` cannot take the predictions without harm."""
    problems = [
        f"--out {out} must not be a folder that is predicted on, got {path}; choose another folder"
        for path in inputs
        if path.is_dir() and path.resolve() == out.resolve()
    ]
    by_id: Dict[str, List[CaseFiles]] = {}
    for files in cases:
        by_id.setdefault(files.case_id, []).append(files)
    for case_id, same in by_id.items():
        if len(same) > 1:
            where = ", ".join(str(files.images[0]) for files in same)
            problems.append(f"case ids must differ, got {case_id} for each of {where}; predict them into folders apart")
    if problems:
        raise InputError(*problems)


# --- Private helpers ---


def _groups(three_d: List[Path], channels: Sequence[str], inputs: Sequence[str]) -> List[List[Path]]:
    """Which of the 3D files belong together: all, unless a single one is enough and all of them make no case."""
    if len(inputs) == 1:
        try:
            _case(three_d, channels, inputs)
        except InputError:
            return [[path] for path in three_d]
    return [three_d] if three_d else []


def _case(paths: List[Path], channels: Sequence[str], inputs: Sequence[str]) -> CaseFiles:
    """The case that `paths` make with the store's channels, else with the run's own. Raises InputError for neither."""
    if len(paths) == 1 and paths[0].is_file():
        return case_files(paths, _fitting(_channel_count(paths[0]), channels, inputs))
    try:
        return case_files(paths, channels)
    except InputError:
        return case_files(paths, inputs)


def _fitting(count: int, channels: Sequence[str], inputs: Sequence[str]) -> Tuple[str, ...]:
    """The run's own channels for as many as those, else the store's."""
    return tuple(inputs if count == len(inputs) != len(channels) else channels)


def _channel_count(path: Path) -> int:
    """Channels that the header of a file tells. Raises InputError, saying what is wrong, where it tells nothing."""
    try:
        shape = nibabel.load(path).shape
    except Exception:  # nibabel raises its own errors, zlib's, numpy's and OSError for bytes that are no image
        shape = ()
    if len(shape) not in (3, 4):
        shape = read_volume(path)[0].shape
    return shape[3] if len(shape) == 4 else 1


def _probability_names(case_id: str, regions: Sequence[str]) -> Dict[str, str]:
    """Region -> file name. Regions may be named after labels, and those may hold blanks or slashes."""
    slugs = [re.sub(r"[^\w.-]+", "-", name) for name in regions]
    if len(set(slugs)) < len(slugs):
        slugs = [f"{position}-{slug}" for position, slug in enumerate(slugs, start=1)]
    return {name: f"{case_id}_{slug}_probability.nii.gz" for name, slug in zip(regions, slugs)}


def _check_replaceable(sidecar: Path, outputs: Sequence[Path], files: CaseFiles) -> None:
    """Raise InputError when an output is a source, or is there and no sidecar says that it was written here."""
    sources = {Path(path).resolve() for path in (*files.images, *([files.label] if files.label else []))}
    try:
        found = read_json(sidecar)
        ours = isinstance(found, dict) and found.get("written_by") == WRITER
    except (OSError, ValueError):
        ours = not sidecar.exists() and not any(path.exists() for path in outputs)
    problems = []
    for path in (sidecar, *outputs):
        if path.resolve() in sources:
            problems.append(f"{path} must not be overwritten, it is a source image; choose another --out")
        elif path.exists() and not ours:
            problems.append(f"{path} must not be overwritten, it was not written by predict; choose another --out")
    if problems:
        raise InputError(*problems)


def _table(done: Sequence[Dict[str, Any]], regions: Sequence[str]) -> Table:
    table = Table(title="predictions")
    table.add_column("file")
    for name in regions:
        table.add_column(f"{name} ml", justify="right")
    table.add_column("seconds", justify="right")
    for content in done:
        volumes = [f"{content['volumes_ml'][name]:.2f}" for name in regions]
        table.add_row(content["label"], *volumes, f"{content['seconds']:.1f}")
    return table

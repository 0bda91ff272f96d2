"""Segment new NIfTI images: writes label maps with the image's own grid, orientation, affine and
label codes.

    ./run.sh predict --run runs/first --image data/BraTS-GLI-00001-000 --out predictions
    ./run.sh predict --run runs/first --image flair.nii.gz t1.nii.gz t1ce.nii.gz t2.nii.gz --out p
    ./run.sh predict --run runs/fold-1 runs/fold-2 --image data/BraTS-GLI-00001-000 --out p
    ./run.sh predict --run runs/folds --image data/BraTS-GLI-00001-000 --out predictions --dry-run
    ./run.sh predict --network exported --image data/BraTS-GLI-00001-000 --out predictions
    ./run.sh predict --run runs/flair --image a.nii.gz b.nii.gz --codes brats2023 --out predictions

An image is a case folder, one 4D file, or one 3D file per channel; a folder may also hold several
cases, as imagesTs does. Several folders or 4D files are separate cases: a bad case is reported at
the end, and the others are predicted. No label is needed or read. A run that was trained on some of
its store's channels also takes images of these channels alone, such as one 3D FLAIR file.

Channels are found by name: those of a 4D file, and of nnU-Net's files (x_0000, x_0001, ...), in the
dataset.json above their imagesTr or imagesTs, those of 3D files at the end of their names (x_flair,
x_t1, ...). Other names are refused. Without a dataset.json 4D files and numbers have the order of
the run's channels, and so have 3D files whose names do not tell; a note says so. A run of one
channel takes each 3D file as a case and ignores files of other modalities.

Labels are written in the codes of the image's own data set: of the BraTS release whose file names
it has, or of the dataset.json above its imagesTr or imagesTs; else in those of the run's store.
--codes chooses other codes.

Memory and time are predicted for each image once it is read, where native operations compute a run
on a CPU; --dry-run ends there. A run on whole
volumes answers in windows of the largest grid that it was trained on where one pass would not fit
the free memory; a note says so. An image that does not fit so either is refused.

Several runs predict together, by the mean of their probabilities. The folder of `train --folds`
stands for all of its folds, which must be complete. Answers are post-processed as the runs decided,
if all did, or as the cases of such a folder did; --raw leaves that out.

A case that was predicted before of the same image, with the same weights and settings, is kept and
named; another answer is replaced with --overwrite alone, and its files go. Files that `predict` has
not written, and labels that were changed since, are never overwritten.

<case_id>.json beside <case_id>.nii.gz has the meaning of the codes, volumes in ml, sources with
their hashes, the runs, and the notes that are printed: an image without orientation, with voxels of
another size than the training's, or with a background other than 0. A run whose store was resampled
sees images at its spacing; the answer is on their own grid all the same. --page adds
<case_id>.html, to scroll through the slices; --probabilities adds the network's probabilities.
"""

import dataclasses
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple
from urllib.parse import quote

import numpy as np

from cpu3d.data.cases.case import LoadedCase, load_case
from cpu3d.data.cases.notes import case_notes, note_lines, window_notes
from cpu3d.data.cases.resample import grid_of, resample_label
from cpu3d.data.datasets.layouts import LABEL_CODES
from cpu3d.data.files.arrays import file_sha256
from cpu3d.data.labels import code_meanings, region_mask
from cpu3d.data.manifest import CaseRecord
from cpu3d.data.nifti import ras_shape, ras_spacing_mm, ras_steps_mm, volume_content, write_volume
from cpu3d.data.normalise import in_units
from cpu3d.errors import DoesNotFitError, InputError, raise_if_any
from cpu3d.host.apply import set_up
from cpu3d.inference.cases import STORE, Case, cases_to_predict, check_exist
from cpu3d.inference.ensemble import Ensemble, origin, trained_predictors
from cpu3d.inference.forecast import (
    POSTPROCESSED_BYTES,
    PROBABILITIES_BYTES,
    WRITTEN_BYTES,
    Forecaster,
    forecaster_of,
)
from cpu3d.inference.postprocessing.rules import RAW, PostProcessing
from cpu3d.inference.postprocessing.run_rules import postprocessing_together
from cpu3d.inference.runs import (
    RUN_HELP,
    Inference,
    RunOptions,
    RunSet,
    open_runs,
    seen_notes,
    training_notes,
)
from cpu3d.inference.scores import voxel_mm3
from cpu3d.inference.sidecar import (
    FILES,
    LABEL_HASHES,
    SCHEMA,
    WRITER,
    Outputs,
    changes,
    check_replaceable,
    is_changed,
    read_sidecar,
    remove_stale,
)
from cpu3d.pages.viewer import ViewedCase, write_case_page
from cpu3d.settings import AUTO, RunConfig
from cpu3d.util.atomic import check_folder, writable_folder, write_bytes, write_json
from cpu3d.util.progress import bar, say
from cpu3d.util.records import count, listed
from memory_estimator.common.schema import option
from memory_estimator.common.table import Table, new_console
from memory_estimator.common.units import format_seconds

IN_WINDOWS = (
    "in windows of the training's largest grid, as one pass over the image may not fit the free "
    "memory: the answer may be worse than in one pass, which a host with more memory takes"
)
NO_NETWORK = "--run or --network must be given, got neither; name a run, or an export"


@dataclass(frozen=True)
class Options:
    """Options of `predict`."""

    image: Tuple[Path, ...] = option(
        help="case folders, folders of cases, 4D files, or a 3D file per channel, named after it, "
        "numbered as by nnU-Net, or in the channels' order; with one channel each is a case",
        metavar="PATH",
    )
    out: Path = option(help="folder for the predictions", metavar="DIR")
    zero_nan: bool = option(False, help="make NaN and infinite voxels background")
    probabilities: bool = option(
        False, help="also write <case_id>_<region>_probability.nii.gz, in float32"
    )
    page: bool = option(
        False, help="also write <case_id>.html, a page to scroll through the slices in a browser"
    )
    overwrite: bool = option(
        False,
        help="predict again the cases that are there, also those of another run (default: the same "
        "answers are kept, and others refused)",
    )
    dry_run: bool = option(
        False, help="read each image, print its memory and time, and write nothing"
    )
    codes: str = option(
        AUTO,
        help="label codes to write; auto: those of the image's own data set if known, else of the "
        "run's store",
        choices=(AUTO, "store", *LABEL_CODES),
    )


@dataclass(frozen=True)
class Networks(RunOptions):
    """Options of the networks that predict: of runs, or one that was exported."""

    run: Tuple[Path, ...] = option((), RUN_HELP, metavar="DIR", one_of="network")
    network: Optional[Path] = option(
        None, "folder written by export, instead of a run", metavar="DIR", one_of="network"
    )


OPTIONS = (Networks, Options, Inference)


def run(chosen: Networks, options: Options, inference: Inference) -> int:
    check_exist("--image", options.image)
    check_folder(options.out, "--out")
    together, predictors, postprocessing = _networks(chosen, inference)
    configs = together.configs
    predictor = Ensemble(predictors)
    cases, problems, notes = cases_to_predict(options.image, predictor, options.codes, options.out)
    about = {
        **origin(together.runs, configs, predictors),
        "weights": together.weights,
    }
    sources = [path.resolve() for case in cases for path in case.files.paths]
    if options.out.resolve() in (path.parent for path in sources):
        raise InputError(
            f"--out must not be a folder that is predicted on, got {options.out}; choose another",
            *problems,
        )
    raise_if_any(() if cases else problems)
    forecaster = None  # of an export: what it takes depends on what runs it
    if chosen.run:
        written_bytes = _written_bytes(options, postprocessing)
        forecaster = forecaster_of(predictors, inference, written_bytes)
    if options.dry_run:
        if forecaster is None:
            raise InputError(
                "--dry-run must come with runs that native operations compute on a CPU, got "
                "others; leave it out"
            )
        return _dry_run(predictor, cases, options, forecaster, problems)
    todo, kept = _to_do(predictor, cases, options, about, postprocessing)
    writable_folder(options.out, "--out")
    notes += seen_notes([case.files.case_id for case in cases], configs)
    say(*notes, f"post-processing: {postprocessing.words}", *_mapping(cases), stderr=False)
    if kept:
        say(
            f"kept {listed(kept)}, predicted before of the same image; with --overwrite they are "
            "predicted again",
            stderr=False,
        )
    if not todo and not problems:
        return 0
    begin = time.monotonic()
    sidecars = []
    failures: List[InputError] = []
    with bar("predict", total=len(todo)) as advance:
        for case, made_from in todo:
            try:
                sidecars.append(
                    predict_case(
                        predictor, case, options, made_from, postprocessing, configs, forecaster
                    )
                )
            except InputError as error:
                failures.append(error)
            advance()
    say(*note_lines({sidecar["case_id"]: sidecar["notes"] for sidecar in sidecars}))
    if sidecars:
        new_console().print(_volumes_table(sidecars))
        seconds = format_seconds(time.monotonic() - begin)
        say(
            f"{count(sidecars, 'case')} predicted in {seconds} into {options.out}, on the grids of "
            "their images",
            stderr=False,
        )
    _raise_problems(problems, failures)
    return 0


def _dry_run(
    predictor: Any,
    cases: Sequence[Case],
    options: Options,
    forecaster: Forecaster,
    problems: List[str],
) -> int:
    """Print the forecasts of all cases, those that were predicted before too."""
    lines = []
    failures: List[InputError] = []
    with bar("read", total=len(cases)) as advance:
        for case in cases:
            try:
                record = _read(predictor, case, options).record
                lines.append(f"{record.case_id}: {forecaster.forecast(record)}")
            except InputError as error:
                failures.append(error)
            advance()
    say(*lines, stderr=False)
    _raise_problems(problems, failures)
    return 0


def _raise_problems(problems: Sequence[str], failures: Sequence[InputError]) -> None:
    """Raise the problems of cases, if there are any."""
    every = [*problems, *(problem for error in failures for problem in error.problems)]
    if any(isinstance(error, DoesNotFitError) for error in failures):
        raise DoesNotFitError(*every)
    raise_if_any(every)


def _networks(chosen: Networks, inference: Inference) -> Tuple[RunSet, List[Any], PostProcessing]:
    """Open the runs, or the export, that predict: their predictors and rules."""
    if chosen.network is None:
        if not chosen.run:
            raise InputError(NO_NETWORK)
        together = open_runs(chosen)
        rules = RAW if chosen.raw else postprocessing_together(together)
        return together, trained_predictors(together.runs, together.weights, inference), rules
    set_up()
    from cpu3d.inference.export.network import ExportedPredictor  # imports TensorFlow

    exported = ExportedPredictor(chosen.network, inference)
    together = RunSet([chosen.network], [exported.config], exported.weights_choice)
    return together, [exported], RAW if chosen.raw else exported.postprocessing


def _written_bytes(options: Options, postprocessing: PostProcessing) -> int:
    """Of each voxel of an answer, what is held at most while it is written."""
    if options.probabilities:
        return PROBABILITIES_BYTES
    return POSTPROCESSED_BYTES if postprocessing.rules else WRITTEN_BYTES


def _read(predictor: Any, case: Case, options: Options) -> LoadedCase:
    """Read a case as the runs take it. A label among its files is not read."""
    return load_case(
        case.files,
        channels=case.channels,
        zero_nan=options.zero_nan,
        target_spacing_mm=predictor.target_spacing_mm,
        normalisation=predictor.normalisation_of(case.channels),
    )


def _volumes_table(sidecars: Sequence[Mapping[str, Any]]) -> Table:
    """The volume of each region in each predicted case."""
    regions = list(sidecars[0]["volumes_ml"])
    rows = []
    for sidecar in sidecars:
        volumes = [f"{ml:.2f}" for ml in sidecar["volumes_ml"].values()]
        rows.append((sidecar["label"], *volumes, f"{sidecar['seconds']:.1f}"))
    head = ("file", *(f"{name} ml" for name in regions), "seconds")
    return Table(head, rows, title="predictions")


def predict_case(
    predictor: Any,
    case: Case,
    options: Options,
    made_from: Mapping[str, Any],
    postprocessing: PostProcessing,
    configs: Sequence[RunConfig] = (),
    forecaster: Optional[Forecaster] = None,
) -> Dict[str, Any]:
    """Segment one case into `options.out`; returns the content of its sidecar, with `made_from`.
    With the `configs` of the runs its notes say how the image differs from what they were trained
    on. Raises InputError for an image that cannot be
    read or does not fit the run, and as `check_replaceable`."""
    begin = time.monotonic()
    outputs = _outputs(case, options)
    before = read_sidecar(outputs.sidecar)
    check_replaceable(outputs, before)
    kinds = predictor.normalisation_of(case.channels)
    loaded = _read(predictor, case, options)
    record = loaded.record
    geometry = record.geometry
    in_windows = False
    if forecaster:
        forecast = forecaster.forecast(record)
        say(f"{case.files.case_id}: {forecast}")
        in_windows = forecast.in_windows
    answers = predictor.probabilities(loaded.image, record, case.channels, in_windows)
    painted = postprocessing.paint(answers, predictor.regions, ras_steps_mm(geometry))
    label = case.translated(painted)
    notes = [
        *case_notes(record, case.channels),
        *training_notes(record, configs),
        *window_notes(loaded.image, record, case.channels, kinds),
        *[IN_WINDOWS] * in_windows,
    ]
    label_file = volume_content(outputs.label, label, geometry)
    hashes = [hashlib.sha256(label_file).hexdigest()]
    content: Dict[str, Any] = {
        "schema": SCHEMA,
        "written_by": WRITER,
        "complete": True,
        "case_id": case.files.case_id,
        "label": outputs.label.name,
        "codes_of": case.codes_of,
        **made_from,
        **_answered(case, record, label),
        LABEL_HASHES: hashes,
        "probabilities": {name: path.name for name, path in outputs.probabilities.items()},
        FILES: [path.name for path in outputs.paths],
        "notes": notes,
    }
    # The sidecar is first, so that a label is known as ours from the moment that it is there, and
    # can be redone after a crash; one that is corrected by hand meanwhile is told from it.
    unfinished = {**content, "complete": False}
    unfinished[FILES] = [*content[FILES], *before.get(FILES, ())]
    if outputs.label.is_file():
        unfinished[LABEL_HASHES] = [*hashes, file_sha256(outputs.label)]
    write_json(outputs.sidecar, unfinished)
    for position, path in enumerate(outputs.probabilities.values()):
        probability = answers[..., position]
        # Level 1: probabilities are noise in their last bits, and level 6 takes three times as long
        # for little.
        write_volume(path, probability, geometry, compression=1)
    write_bytes(outputs.label, label_file)
    if outputs.page:
        viewed = ViewedCase(
            name=case.files.case_id,
            image=in_units(loaded.image, record.units),
            channels=case.channels,
            geometry=grid_of(record),  # which the network has seen
            regions=case.regions,
            labels=case.labels,
            predictions={"prediction": resample_label(label, record.shape)},
            normalisation=kinds,
        )
        write_case_page(outputs.page, viewed, "predict")
    remove_stale(outputs, before)
    content["seconds"] = round(time.monotonic() - begin, 3)
    write_json(outputs.sidecar, content)
    return content


def _to_do(
    predictor: Any,
    cases: Sequence[Case],
    options: Options,
    about: Mapping[str, Any],
    postprocessing: PostProcessing,
) -> Tuple[List[Tuple[Case, Dict[str, Any]]], List[str]]:
    """Find the cases to predict, each with what its answer is made from, and the names of those
    that are kept. Raises InputError for other answers of these cases, unless they are to be
    overwritten."""
    todo = []
    kept = []
    others: Dict[str, List[str]] = {}  # what differs -> cases
    for case in cases:
        case_id = case.files.case_id
        outputs = _outputs(case, options)
        before = read_sidecar(outputs.sidecar)
        made_from = _made_from(predictor, case, options, about, postprocessing)
        if before.get("complete") and not options.overwrite:
            differing = changes(before, made_from, case.files.paths)
            if differing:
                others.setdefault(listed(differing), []).append(case_id)
            elif all(path.is_file() and path.name in before[FILES] for path in outputs.paths):
                if is_changed(outputs, before):
                    case_id += " (its label as it was changed since)"
                kept.append(case_id)
                continue
        todo.append((case, made_from))
    raise_if_any(
        f"--out {options.out} must not hold other answers for its cases, got those of "
        f"{listed(ids)}, whose {names} differ; choose another --out, or give --overwrite"
        for names, ids in others.items()
    )
    return todo, kept


def _outputs(case: Case, options: Options) -> Outputs:
    """The files of a case."""
    out = options.out
    case_id = case.files.case_id
    probabilities = {}
    if options.probabilities:
        for region in case.regions:  # whose names may hold slashes
            name = f"{case_id}_{quote(region, safe=' ')}_probability.nii.gz"
            probabilities[region] = out / name
    return Outputs(
        sidecar=out / f"{case_id}.json",
        label=out / f"{case_id}.nii.gz",
        page=out / f"{case_id}.html" if options.page else None,
        probabilities=probabilities,
    )


def _made_from(
    predictor: Any,
    case: Case,
    options: Options,
    about: Mapping[str, Any],
    postprocessing: PostProcessing,
) -> Dict[str, Any]:
    """All that an answer is made from, but for the voxels of its images: what differs from this
    list in the sidecar of an answer makes it be computed again."""
    meanings = code_meanings(case.regions, case.labels)
    kinds = predictor.normalisation_of(case.channels)
    return {
        **about,
        "images": [path.name for path in case.files.images],
        "channels": case.files.names or case.channels,  # in the order of the images
        "normalisation": [kind.to_json() for kind in kinds],
        "target_spacing_mm": predictor.target_spacing_mm,
        "zero_nan": options.zero_nan,
        "regions": {name: list(codes) for name, codes in case.regions.items()},
        "painting": list(case.regions.paint.items()),
        "label_codes": {str(code): name for code, name in meanings.items()},
        "postprocessing": postprocessing.words,
    }


def _answered(case: Case, record: CaseRecord, label: np.ndarray) -> Dict[str, Any]:
    """The content of a case's sidecar that its image and its answer tell."""
    voxel_ml = voxel_mm3(ras_steps_mm(record.geometry)) / 1000.0
    volumes_ml = {}
    for name, codes in case.regions.items():
        voxels = int(np.count_nonzero(region_mask(label, codes)))
        volumes_ml[name] = round(voxels * voxel_ml, 4)
    return {
        "volumes_ml": volumes_ml,
        "axes": record.geometry.axes,
        "shape": ras_shape(record.geometry),
        "spacing_mm": ras_spacing_mm(record.geometry),
        "zeroed_voxels": record.zeroed_voxels,
        "sources": [dataclasses.asdict(source) for source in record.sources],
    }


def _mapping(cases: Sequence[Case]) -> List[str]:
    """The codes that are written, a line for each meaning of them."""
    lines = []
    for case in cases:
        meanings = code_meanings(case.regions, case.labels)
        codes = ", ".join(f"{code} {name}" for code, name in meanings.items())
        todo = "; --codes chooses others" if case.codes_of == STORE else ""
        line = f"label codes of {case.codes_of}: {codes}{todo}"
        if line not in lines:
            lines.append(line)
    return lines

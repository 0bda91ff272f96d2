"""Write a trained network for other programs: SavedModel or ONNX, compared with `predict` on a
case.

    ./run.sh export --run runs/first --format savedmodel --out exported
    ./run.sh export --run runs/first --format onnx --out exported --case data/BraTS-GLI-00001-000

The network takes the image as it is in the file, or its content box, of any size that divides:
normalisation is inside, and everything is float32. OUT/export.json describes it: channels, how to
crop and pad, what the outputs mean and how to paint a label from them, post-processing, weights,
versions. Who calls that of a run on patches slides it over a volume and gives the volume's
statistics. `predict --network OUT` does all of it.

At the end the files are read back and run on a case, as `predict --network` does: the store's first
of test, val or train, or --case, from its files to the label. The result must be that of `predict`;
else nothing is written. Voxels whose label differs, such as from a run in bfloat16, are counted in
export.json.
"""

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Tuple

import numpy as np

from cpu3d.data.cases.case import load_case
from cpu3d.data.cases.notes import case_notes, note_lines
from cpu3d.data.manifest import CaseRecord
from cpu3d.data.nifti import ras_steps_mm
from cpu3d.errors import InputError, raise_if_any
from cpu3d.host.apply import set_up
from cpu3d.inference.cases import cases_to_predict, check_exist
from cpu3d.inference.export.contract import FILE, FILES, contract, exported_config
from cpu3d.inference.postprocessing.rules import PostProcessing, Regions
from cpu3d.inference.postprocessing.run_rules import postprocessing_of
from cpu3d.inference.runs import WEIGHTS, Inference, store_of_run, training_notes
from cpu3d.run.config_json import load_config
from cpu3d.settings import RunConfig
from cpu3d.util.atomic import check_folder, replace_files, writable_folder, write_json
from cpu3d.util.progress import say
from cpu3d.util.records import versions
from memory_estimator.common.schema import option
from memory_estimator.common.table import Table, new_console

# Largest difference of a probability from the same network in float32, which is computed by its
# definition in all programs: 2e-6 in a brain of 144 x 176 x 128 voxels. One sum over all of a map
# in float32, as of a fused norm, is 1.6e-4 off.
TOLERANCE = 2e-5
# The export is tried without mirror images, which add nothing but time to what is compared.
ONE_PASS = Inference(flips=False)


@dataclass(frozen=True)
class Options:
    """Options of `export`."""

    run: Path = option(help="run folder written by train", metavar="DIR")
    format: str = option(help="SavedModel of TensorFlow, or ONNX", choices=tuple(FILES))
    out: Path = option(help="folder for the export, new or empty", metavar="DIR")
    case: Tuple[Path, ...] = option(
        (), "case to check it on, as predict's --image (default: the store's first)", "PATH"
    )
    zero_nan: bool = option(False, help="make the NaN and infinite voxels of that case background")
    weights: str = option("best", help=WEIGHTS, choices=("best", "last"))


OPTIONS = (Options,)


def run(options: Options) -> int:
    out = options.out
    if out.is_dir() and any(out.iterdir()):
        raise InputError(
            f"--out {out} must be a new or an empty folder, got one with files; choose another"
        )
    check_folder(out, "--out")
    exported_config(load_config(options.run))  # before TensorFlow is loaded
    set_up()
    from cpu3d.inference.export import formats  # imports TensorFlow, so not before
    from cpu3d.inference.export.network import ExportedPredictor
    from cpu3d.inference.predictor import Predictor, load_predictor

    own = load_predictor(options.run, options.weights, ONE_PASS)
    config = own.config
    exported = exported_config(config)
    exact = own if exported == config else Predictor(exported, own.weights, ONE_PASS)
    record, image, channels = _case_to_try(options, config, own)
    postprocessing = postprocessing_of(options.run, config, options.weights)
    about = {
        **contract(exported, options.format, postprocessing),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "run": str(options.run.resolve()),
        "versions": versions(),
        "weights": options.weights,
        "checkpoint": own.checkpoint,
        "weights_sha256": own.weights_sha256,
    }
    writable_folder(out, "--out")
    write = {"onnx": formats.write_onnx, "savedmodel": formats.write_saved_model}[options.format]
    with replace_files(out, (about["file"], FILE)) as new:
        write(exported, own.weights, new / about["file"])
        write_json(new / FILE, about)
        answers = np.asarray(
            ExportedPredictor(new, ONE_PASS).probabilities(image, record, channels)
        )
        expected = np.asarray(exact.probabilities(image, record, channels))
        as_predicted = expected
        if own is not exact:
            as_predicted = np.asarray(own.probabilities(image, record, channels))
        verification = _compared(
            answers, expected, as_predicted, record, own.regions, postprocessing
        )
        rows = [(name.replace("_", " "), str(value)) for name, value in verification.items()]
        new_console().print(
            Table(("", ""), rows, title="Against predict, and the same network in float32")
        )
        if verification["largest_difference"] > TOLERANCE:
            raise InputError(
                f"an exported network must answer as the run's within {TOLERANCE:g}, got a "
                f"difference of {verification['largest_difference']:g}; report it, nothing is "
                "written"
            )
        write_json(new / FILE, {**about, "verification": verification})
    say(f"post-processing: {postprocessing.words}", stderr=False)
    say(f"written: {out}", stderr=False)
    return 0


def _compared(
    answers: np.ndarray,
    expected: np.ndarray,
    as_predicted: np.ndarray,
    record: CaseRecord,
    regions: Regions,
    postprocessing: PostProcessing,
) -> Dict[str, Any]:
    """How far an exported network's probabilities of a case are from those `expected` of the run in
    float32, and its labels from those that `predict` makes in the run's dtype."""
    steps_mm = ras_steps_mm(record.geometry)
    label = postprocessing.paint(answers, regions, steps_mm)
    by_predict = postprocessing.paint(as_predicted, regions, steps_mm)
    return {
        "case_id": record.case_id,
        "tolerance": TOLERANCE,
        "largest_difference": float(np.abs(answers - expected).max()),
        "largest_difference_from_predict": float(np.abs(answers - as_predicted).max()),
        "label_voxels": int(np.count_nonzero(label)),
        "different_labels": int(np.count_nonzero(label != by_predict)),
    }


def _case_to_try(
    options: Options, config: RunConfig, predictor: Any
) -> Tuple[CaseRecord, np.ndarray, Tuple[str, ...]]:
    """The case of --case, read as by `predict`, else the first of the run's store that was not
    trained on, or its first; with the channels of its image."""
    if not options.case:
        store = store_of_run(config)
        splits = map(store.cases, ("test", "val", "train"))
        record = next(record for records in splits for record in records)
        return record, store.image(record.case_id), store.manifest.channels
    check_exist("--case", options.case)
    cases, problems, notes = cases_to_predict(options.case, predictor)
    raise_if_any(problems)
    say(*notes)
    if len(cases) != 1:
        raise InputError(
            f"--case must be one case, got {len(cases)}; the network is tried on one alone"
        )
    channels = cases[0].channels
    loaded = load_case(
        cases[0].files,
        channels=channels,
        zero_nan=options.zero_nan,
        target_spacing_mm=config.target_spacing_mm,
        normalisation=config.normalisation_of(channels),
    )
    record = loaded.record
    notes = [*case_notes(record, channels), *training_notes(record, [config])]
    say(*note_lines({record.case_id: notes}))
    return record, loaded.image, channels

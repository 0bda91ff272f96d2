"""Write a trained network for other programs: SavedModel or ONNX, compared with `predict` on a
case.

    ./run.sh export --run runs/first --format savedmodel --out exported
    ./run.sh export --run runs/first --format onnx --out exported --case data/BraTS-GLI-00001-000

The network takes the image as it is in the file, cropped to a fixed size: normalisation is inside,
and everything is float32. OUT/export.json describes it: channels, how to crop and pad, what the
outputs mean and how to paint a label from them, weights, versions. OUT/USAGE.md is a short program
that does all of it with nibabel. A run on patches is exported at its patch's size; the caller
slides it over a volume and gives the volume's statistics.

Post-processing is that of `predict` with the weights that are exported: export.json holds the
rules, and the program applies them.

At the end the files are read back and run on a case: the store's first of test, val or train, or
--case. The result must be that of `predict`; else the exit code is 1 and no export.json is written.
For a run at a spacing of its own the program's resampling is tried too, on finer voxels.
Voxels whose label differs, such as from a run in bfloat16, are counted there.
"""

import contextlib
import dataclasses
import datetime
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Optional, Tuple

import numpy as np

from cpu3d.data.cases.case import facts_of, load_case
from cpu3d.data.cases.notes import case_notes, note_lines
from cpu3d.data.cases.resample import grid_of
from cpu3d.data.files.arrays import file_sha256
from cpu3d.data.manifest import CaseRecord
from cpu3d.data.region import Shape3
from cpu3d.errors import InputError, raise_if_any
from cpu3d.host.apply import set_up
from cpu3d.inference.cases import cases_to_predict, check_exist
from cpu3d.inference.export.check import check_case_fits, verify
from cpu3d.inference.export.contract import FILES, contract, exported_config, usage
from cpu3d.inference.postprocessing.run_rules import postprocessing_of
from cpu3d.inference.runs import WEIGHTS, Inference, store_of_run, training_notes
from cpu3d.run.checkpoint import weights_file
from cpu3d.run.config_json import load_config
from cpu3d.settings import RunConfig
from cpu3d.util.atomic import check_folder, writable_folder, write_bytes, write_json
from cpu3d.util.progress import say
from cpu3d.util.records import versions
from memory_estimator.common.schema import option
from memory_estimator.common.table import Table, new_console
from memory_estimator.installed import how_to_install

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
    size: Optional[Shape3] = option(
        None, "voxels of its image (default: as trained)", ("X", "Y", "Z"), at_least=1
    )


OPTIONS = (Options,)


def run(options: Options) -> int:
    out = options.out
    _check_empty(out)
    check_folder(out, "--out")
    config = load_config(options.run)
    exported_config(config, options.size)  # before TensorFlow is loaded
    if options.format == "onnx":
        require_onnx()
    set_up()
    from cpu3d.inference.export import formats  # imports TensorFlow, so not before
    from cpu3d.inference.predictor import Predictor, load_weights

    # Once, as a run that continues replaces its last checkpoint.
    path = weights_file(options.run, options.weights)
    config, weights = load_weights(config, path)
    origin = _origin(options, path)
    exported = exported_config(config, options.size)
    own = Predictor(dataclasses.replace(config, grid=exported.grid), weights, ONE_PASS)
    exact = own  # as a SavedModel has predict's own operations
    write = formats.write_saved_model
    if options.format == "onnx":  # programs that read it compute norms by their definition
        exact = formats.ExactPredictor(exported, weights, ONE_PASS)
        write = formats.write_onnx
    elif exported != own.config:
        exact = Predictor(exported, weights, ONE_PASS)
    record, image = _case_to_try(options, config, own)
    check_case_fits(record, exact)
    postprocessing = postprocessing_of(options.run, config, options.weights)
    about = {
        **contract(exported, config.unet.dtype, options.format),
        "postprocessing": postprocessing.steps(exact.regions),
        **origin,
    }
    writable_folder(out, "--out")
    with _empty_after_an_error(out):
        write(about, weights, out / about["file"])
        write_bytes(out / "USAGE.md", usage(about).encode())
        verification = verify(about, out, record, image, exact, own, postprocessing)
        if verification["passed"]:
            about["files"] = sorted(path.name for path in out.iterdir())
            about["verification"] = verification
            write_json(out / "export.json", about)
    new_console().print(_table(verification))
    say(f"post-processing: {postprocessing.words}", stderr=False)
    if not verification["passed"]:
        say(f"failed: {out} has no export.json; do not use the network", stderr=False)
        return 1
    say(f"written: {out}", stderr=False)
    return 0


def _table(verification: Mapping[str, Any]) -> Table:
    rows = [(name.replace("_", " "), str(value)) for name, value in verification.items()]
    return Table(("", ""), rows, title="Against predict, and the same network in float32")


def _origin(options: Options, weights: Path) -> Dict[str, Any]:
    """When and from what an export was made; `weights` is the run's file."""
    packages = versions()
    if options.format == "onnx":
        packages |= {name: metadata.version(name) for name in ("onnx", "onnxruntime")}
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "run": str(options.run.resolve()),
        "versions": packages,
        "weights": options.weights,
        "checkpoint": weights.name,
        "weights_sha256": file_sha256(weights),
    }


@contextlib.contextmanager
def _empty_after_an_error(out: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for path in out.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        raise


def _check_empty(out: Path) -> None:
    """Raise InputError unless the folder is new or empty."""
    if not out.exists():
        return
    if not out.is_dir():
        got = "a file"
    elif any(out.iterdir()):
        got = "a folder with files"
    else:
        return
    raise InputError(f"--out {out} must be a new or an empty folder, got {got}; choose another")


def require_onnx() -> None:
    """Raise InputError if onnx or onnxruntime, which the result is tried with, is missing."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        rule = f"onnx and onnxruntime must be installed for --format onnx, got {error}"
        todo = f"{how_to_install('onnx')}, or choose --format savedmodel"
        raise InputError(f"{rule}; {todo}") from None


def _case_to_try(
    options: Options, config: RunConfig, predictor: Any
) -> Tuple[CaseRecord, np.ndarray]:
    """The case of --case, else the first of the run's store that was not trained on, or its first.
    Of its channels it has only those that the network takes. One that was resampled is on the
    network's grid alone."""
    if options.case:
        check_exist("--case", options.case)
        cases, problems, notes = cases_to_predict(options.case, predictor)
        raise_if_any(problems)
        say(*notes)
        if len(cases) != 1:
            raise InputError(
                f"--case must be one case, got {len(cases)}; the network is tried on one alone"
            )
        files = cases[0].files
        channels = cases[0].channels
        loaded = load_case(
            files,
            channels=channels,
            zero_nan=options.zero_nan,
            target_spacing_mm=config.target_spacing_mm,
            normalisation=config.normalisation_of(channels),
        )
        record = loaded.record
        image = loaded.image
        notes = [*case_notes(record, channels), *training_notes(record, [config])]
        say(*note_lines({record.case_id: notes}))
    else:
        store = store_of_run(config)
        splits = map(store.cases, ("test", "val", "train"))
        record = next(record for records in splits for record in records)
        image = store.image(record.case_id)
        channels = store.manifest.channels
    places = [channels.index(name) for name in config.channels]
    image = image[..., places]
    units = ()
    if record.units:
        units = tuple(record.units[place] for place in places)
    facts = facts_of(image, None, config.normalisation_of(config.channels), units)
    on_grid = {"geometry": grid_of(record), "resampled_from": None}
    return dataclasses.replace(record, units=units, **facts, **on_grid), image

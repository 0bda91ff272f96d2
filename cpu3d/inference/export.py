"""Write a trained network for other programs: SavedModel or ONNX, compared with `predict` on a case.

    ./run.sh export --run runs/first --format savedmodel --out exported
    ./run.sh export --run runs/first --format onnx --out exported-onnx --case data/BraTS-GLI-00001-000

The network takes the image as it is in the file, cropped to a fixed size: normalisation is inside, and everything is
float32. OUT/export.json describes it: channels, how to crop and pad, what the outputs mean and how to paint a label
from them, weights, versions. OUT/USAGE.md is a short program that does all of it with nibabel. A run on patches is
exported at its patch's size; the caller slides it over a volume and gives the volume's statistics.

At the end the files are read back and run on a case: the store's first of test, val or train, or --case. The result
must be that of `predict`. If it is not, the exit code is 1 and there is no export.json.
"""

import dataclasses
import datetime
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from rich.console import Console

from cpu3d.data.files.arrays import file_sha256
from cpu3d.data.labels import label_from_regions
from cpu3d.data.records import CaseRecord
from cpu3d.data.region import Region, Shape3, crop, paste
from cpu3d.data.stores.case import load_case
from cpu3d.data.windows import sliding_window
from cpu3d.errors import InputError, refuse
from cpu3d.host.apply import set_up
from cpu3d.inference.evaluate import check_finite
from cpu3d.inference.export_contract import FILES, Contract, require_onnx, usage
from cpu3d.inference.predict import check_there, find_cases
from cpu3d.inference.runs import store_of_run
from cpu3d.inference.segment import load_network
from cpu3d.run.checkpoint import weights_file
from cpu3d.run.config import load_config
from cpu3d.settings import RunConfig
from cpu3d.util.atomic import write_json
from cpu3d.util.progress import say
from cpu3d.util.records import by, versions
from memory_estimator.common.schema import option
from memory_estimator.common.table import Table

# Largest difference of a probability from the same network in float32. In a brain of 144 x 176 x 128 voxels it is 2e-6
# in ONNX and 0 as a SavedModel.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Options:
    """Options of `export`."""

    run: Path = option(help="run folder written by train", metavar="DIR")
    format: str = option(help="SavedModel of TensorFlow, or ONNX", choices=tuple(FILES))
    out: Path = option(help="folder for the export, new or empty", metavar="DIR")
    case: Tuple[Path, ...] = option(
        (), help="case to check it on, as predict's --image (default: the first of the store)", metavar="PATH"
    )
    zero_nan: bool = option(False, help="make the NaN and infinite voxels of that case background")
    weights: str = option("best", help="checkpoint", choices=("best", "last"))
    size: Optional[Shape3] = option(
        None, "voxels of the image that it takes (default: as the network was trained)", ("X", "Y", "Z"), at_least=1
    )


class Case(NamedTuple):
    """The case that the exported network and `predict` both segment."""

    record: CaseRecord
    image: np.ndarray  # (X, Y, Z, C), as `predict` has it: int16, or float16 after normalisation
    channels: Sequence[str]


OPTIONS = (Options,)


def run(options: Options) -> int:
    if options.out.exists() and not (options.out.is_dir() and not any(options.out.iterdir())):
        raise InputError(
            f"--out {options.out} must be a new or an empty folder, got a file or a full one; choose another"
        )
    config = load_config(options.run)
    _contract(config, options.format, options.size)  # before TensorFlow is loaded
    if options.format == "onnx":
        require_onnx()
    set_up()
    from cpu3d.inference import export_network as networks  # imports TensorFlow, so not before
    from cpu3d.inference.predictor import Predictor, load_weights

    path = weights_file(options.run, options.weights)  # once: a run that goes on replaces its last one
    (config, weights), digest = load_weights(config, path), file_sha256(path)
    contract = _contract(config, options.format, options.size)
    own = Predictor(dataclasses.replace(config, grid=contract.config.grid), weights)
    # A SavedModel has predict's own operations; a program that reads ONNX computes norms by their definition.
    exact = (Predictor if options.format == "savedmodel" else networks.ExactPredictor)(contract.config, weights)
    case = _case_to_try(options, config, own)
    check_fits(case, exact)
    packages = {name: metadata.version(name) for name in ("onnx", "onnxruntime") if options.format == "onnx"}
    about = {
        **contract.to_json(),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "run": str(options.run.resolve()),
        "versions": {**versions(), **packages},
        "weights": options.weights,
        "checkpoint": path.name,
        "weights_sha256": digest,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        network = networks.exported_network(contract, weights)
        write = networks.write_onnx if options.format == "onnx" else networks.write_saved_model
        write(contract, network, options.out / FILES[contract.format])
        (options.out / "USAGE.md").write_text(usage(contract), encoding="utf-8")
        verification = verify(contract, options.out, case, exact, own)
        if verification["passed"]:
            about |= {"files": sorted(path.name for path in options.out.iterdir()), "verification": verification}
            write_json(options.out / "export.json", about)
    except BaseException:
        for path in options.out.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise
    rows = [(name.replace("_", " "), str(value)) for name, value in verification.items()]
    Console().print(Table(("", ""), rows, title="Against predict, and the same network in float32").rich())
    if not verification["passed"]:
        say(f"failed: {options.out} has no export.json and is not to be used", stderr=False)
        return 1
    say(f"written: {options.out}", stderr=False)
    return 0


def check_fits(case: Case, exact: Any) -> None:
    """Raise InputError unless the region of the case that `predict` would read is of the network's size."""
    config, record = exact.config, case.record
    size = tuple(exact.region(record).size)
    if not config.is_patch and size != tuple(config.grid):
        what, needed = ("brain", record.box.size) if config.extent == "brain" else ("volume", record.shape)
        raise InputError(
            f"case {record.case_id} must fit into {by(config.grid, ' x ')}, got a {what} of {by(needed, ' x ')}; "
            f"export with --size {by(size, ' ')}, or name another --case"
        )


def verify(contract: Contract, folder: Path, case: Case, exact: Any, own: Any) -> Dict[str, Any]:
    """Differences of the exported network from `exact`, the predictor in float32, and from `own`, in the run's dtype as
    `predict` computes, as in export.json; "passed" is whether it may be used. Raises InputError where `exact`'s answer
    is not finite."""
    record, regions, region = case.record, contract.regions, exact.region(case.record)
    answer = paste(_answer(contract, folder, case, region), region, record.shape)
    expected, in_own_dtype = (one.probabilities(case.image, record, case.channels) for one in (exact, own))
    check_finite(expected, record.case_id)
    label, *others = (label_from_regions(one, regions) for one in (answer, expected, in_own_dtype))
    finite = bool(np.isfinite(answer).all())
    largest, from_predict = (float(np.abs(answer - other).max()) for other in (expected, in_own_dtype))
    return {
        "case_id": record.case_id,
        "passed": finite and largest <= TOLERANCE,
        "tolerance": TOLERANCE,
        "largest_difference": largest if finite else None,
        "largest_difference_from_predict": from_predict if finite else None,
        "voxels": int(np.prod(region.size)),
        "different_labels": {
            name: int(np.count_nonzero(label != other)) for name, other in zip(("float32", "predict"), others)
        },
        "label_voxels": int(np.count_nonzero(label)),
    }


def _answer(contract: Contract, folder: Path, case: Case, region: Region) -> np.ndarray:
    """Probabilities (X, Y, Z, R) of `region`, from the exported files and the voxels alone."""
    network = load_network(folder, contract.to_json())
    picked = [list(case.channels).index(name) for name in contract.config.channels]
    image = crop(case.image, region)[..., picked].astype(np.float32)
    if not contract.config.is_patch:
        return network(image=image)
    mean, std = (np.float32(one)[picked] for one in (case.record.channel_mean, case.record.channel_std))
    logits = sliding_window(
        lambda tile: network(image=tile[0], mean=mean, std=std)[None], image[None], contract.config.grid
    )
    return (0.5 + 0.5 * np.tanh(logits.astype(np.float64) / 2)).astype(np.float32)  # a sigmoid that overflows nowhere


def _contract(config: RunConfig, format_: str, size: Optional[Shape3]) -> Contract:
    """Raises InputError for a size that the network cannot take, and for a run at a lower resolution."""
    if config.resolution != 1:
        rule = f"export must have a run of resolution 1, got {config.resolution:g}"
        raise InputError(f"{rule}: an exported network does not make images smaller; export another run")
    size = tuple(size or config.grid)
    try:
        config.unet.check_shape(size, "--size")
    except ValueError as error:
        raise InputError(str(error)) from None
    unet = dataclasses.replace(config.unet, dtype="float32", policy="speed")
    return Contract(dataclasses.replace(config, grid=size, unet=unet), config.unet.dtype, format_)


def _case_to_try(options: Options, config: RunConfig, predictor: Any) -> Case:
    """The case of --case, else the first of the run's store: one that was not trained on, where there is one."""
    if not options.case:
        store = store_of_run(config)
        record = next(record for split in ("test", "val", "train") for record in store.cases(split))
        return Case(record, store.image(record.case_id), store.manifest.channels)
    check_there("--case", options.case)
    cases, problems = find_cases(options.case, predictor)
    refuse(problems)
    if len(cases) != 1:
        raise InputError(f"--case must be one case, got {len(cases)}; one is enough to try the network on")
    files, channels = cases[0].files, cases[0].channels
    folder = Path(files.images[0]).parent
    loaded = load_case(files, channels=channels, labels=None, dataset_folder=folder, zero_nan=options.zero_nan)
    return Case(loaded.record, loaded.image, channels)

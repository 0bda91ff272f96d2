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
from typing import Any, Dict, Optional, Tuple

import numpy as np
from rich.console import Console

from cpu3d.data.files.arrays import file_sha256
from cpu3d.data.labels import THRESHOLD, code_meanings, label_from_regions, paint_order
from cpu3d.data.records import CaseRecord
from cpu3d.data.region import Shape3
from cpu3d.data.stores.case import facts_of, load_case
from cpu3d.data.windows import OVERLAP, SIGMA_SHARE
from cpu3d.errors import InputError, refuse
from cpu3d.host.apply import set_up
from cpu3d.inference.cases import check_there, find_cases
from cpu3d.inference.runs import store_of_run
from cpu3d.inference.segment import load_network, painted, probabilities_of
from cpu3d.run.checkpoint import weights_file
from cpu3d.run.config import load_config
from cpu3d.settings import RunConfig
from cpu3d.util.atomic import write_json
from cpu3d.util.progress import say
from cpu3d.util.records import versions
from memory_estimator.common.schema import option
from memory_estimator.common.table import Table
from memory_estimator.common.units import by
from memory_estimator.installed import how_to_install

FILES = {"savedmodel": "saved_model", "onnx": "model.onnx"}  # format -> what holds the network

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


OPTIONS = (Options,)


def run(options: Options) -> int:
    if options.out.exists() and not (options.out.is_dir() and not any(options.out.iterdir())):
        raise InputError(
            f"--out {options.out} must be a new or an empty folder, got a file or a full one; choose another"
        )
    config = load_config(options.run)
    exported_config(config, options.size)  # before TensorFlow is loaded
    if options.format == "onnx":
        require_onnx()
    set_up()
    from cpu3d.inference import export_network as networks  # imports TensorFlow, so not before
    from cpu3d.inference.predictor import Predictor, load_weights

    path = weights_file(options.run, options.weights)  # once: a run that goes on replaces its last one
    (config, weights), digest = load_weights(config, path), file_sha256(path)
    exported = exported_config(config, options.size)
    own = Predictor(dataclasses.replace(config, grid=exported.grid), weights)
    # A SavedModel has predict's own operations; a program that reads ONNX computes norms by their definition.
    exact = (Predictor if options.format == "savedmodel" else networks.ExactPredictor)(exported, weights)
    record, image = _case_to_try(options, config, own)
    check_fits(record, exact)
    packages = {name: metadata.version(name) for name in ("onnx", "onnxruntime") if options.format == "onnx"}
    about = {
        **contract(exported, config.unet.dtype, options.format),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "run": str(options.run.resolve()),
        "versions": {**versions(), **packages},
        "weights": options.weights,
        "checkpoint": path.name,
        "weights_sha256": digest,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        write = networks.write_onnx if options.format == "onnx" else networks.write_saved_model
        write(about, networks.exported_network(exported, weights), options.out / about["file"])
        (options.out / "USAGE.md").write_text(usage(about), encoding="utf-8")
        verification = verify(about, options.out, record, image, exact, own)
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


def exported_config(config: RunConfig, size: Optional[Shape3] = None) -> RunConfig:
    """The run as it is exported: in float32, for images of `size`, by default its own grid. Raises InputError for a
    size that the network cannot take, and for a run at a lower resolution."""
    if config.resolution != 1:
        rule = f"export must have a run of resolution 1, got {config.resolution:g}"
        raise InputError(f"{rule}: an exported network does not make images smaller; export another run")
    size = tuple(size or config.grid)
    try:
        config.unet.check_shape(size, "--size")
    except ValueError as error:
        raise InputError(str(error)) from None
    unet = dataclasses.replace(config.unet, dtype="float32", policy="speed")
    return dataclasses.replace(config, grid=size, unet=unet)


def contract(config: RunConfig, trained_dtype: str, format_: str) -> Dict[str, Any]:
    """What an exported network takes and gives: everything in export.json that follows from `exported_config`.

    A network of whole volumes computes the statistics of their non-zero voxels and gives probabilities. A window does
    not see the volume: the caller passes the statistics, and gets logits to blend."""
    regions = {name: config.region_codes[name] for name in config.regions}  # in the order of the answer's last axis
    image = {
        "dtype": "float32",
        "shape": [*config.grid, len(config.channels)],
        "axes": "X, Y, Z towards right, anterior, superior; then the channels",
        "values": "intensities as in the file; 0 is background",
    }
    statistic = {"dtype": "float32", "shape": [len(config.channels)]}
    rest = "of each channel over the non-zero voxels of the whole volume, intensities as in the file"
    mean = {**statistic, "values": f"mean {rest}"}
    std = {**statistic, "values": f"standard deviation (division by n) {rest}"}
    answer = {"dtype": "float32", "shape": [*config.grid, len(regions)], "regions": config.regions}
    unet = dataclasses.asdict(config.unet)
    return {
        "schema": 1,
        "written_by": "cpu3d export",
        "file": FILES[format_],
        "inputs": {"image": image, **({"mean": mean, "std": std} if config.is_patch else {})},
        "outputs": {"logits" if config.is_patch else "probabilities": answer},
        "channels": config.channels,
        "regions": regions,
        "threshold": THRESHOLD,
        "label_names": {str(code): name for code, name in config.label_names.items()},
        "label_codes": {str(c): name for c, name in code_meanings(regions, config.label_names).items()},
        "paint": [[{"output": at, "code": code} for at, code in group] for group in paint_order(regions)],
        "axes": "RAS",
        "extent": config.extent,
        "mode": config.mode,
        "size": config.grid,
        "overlap": OVERLAP if config.is_patch else None,
        "sigma": SIGMA_SHARE if config.is_patch else None,
        "network": {name: value for name, value in unet.items() if name != "policy"},
        "trained_dtype": trained_dtype,
        "format": format_,
    }


def require_onnx() -> None:
    """Raise InputError where onnx or onnxruntime, which the result is tried with, is missing."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        rule = f"onnx and onnxruntime must be installed for --format onnx, got {error}"
        raise InputError(f"{rule}; {how_to_install('onnx')}, or choose --format savedmodel") from None


def usage(about: Dict[str, Any]) -> str:
    """The text of USAGE.md, with the program of segment.py; `about` is the `contract`."""
    codes = ", ".join(f"{code} {name}" for code, name in about["label_codes"].items())
    channels, package = (
        ", ".join(about["channels"]),
        {"savedmodel": "tensorflow", "onnx": "onnxruntime"}[about["format"]],
    )
    program = Path(__file__).with_name("segment.py").read_text(encoding="utf-8")
    return f"""# How to use this network

`{about["file"]}` holds the network, `export.json` its inputs, outputs, size and label codes, its origin and how well it
agrees with `predict`. Keep the files of this folder together.

It takes {channels}, each a 3D file in this order, or together a 4D file. `predict` rounds images whose voxels are not
all whole numbers from -32768 to 32767 to float16 after normalisation; this network does not.
Save the program below as `segment.py` beside `export.json` and run it (pip install nibabel {package}):

    python segment.py IMAGE.nii.gz [IMAGE.nii.gz ...] LABEL.nii.gz

```python
{program}```

The label has the image's place in space, with axes R A S; codes: {codes}.
"""


def check_fits(record: CaseRecord, exact: Any) -> None:
    """Raise InputError unless the region of the case that `predict` would read is of the network's size."""
    config, size = exact.config, exact.region(record).size
    if not config.is_patch and size != config.grid:
        what, needed = ("brain", record.box.size) if config.extent == "brain" else ("volume", record.shape)
        raise InputError(
            f"case {record.case_id} must fit into {by(config.grid, ' x ')}, got a {what} of {by(needed, ' x ')}; "
            f"export with --size {by(size, ' ')}, or name another --case"
        )


def verify(
    about: Dict[str, Any], folder: Path, record: CaseRecord, image: np.ndarray, exact: Any, own: Any
) -> Dict[str, Any]:
    """Differences of the exported network, as the program of USAGE.md applies it, from `exact`, the predictor in
    float32, and from `own`, in the run's dtype as `predict` computes, as in export.json; "passed" is whether it may be
    used. `image` has the channels of the run. Raises InputError where `exact`'s answer is not finite."""
    answer = probabilities_of(load_network(folder, about), about, image.astype(np.float32))
    expected, in_own_dtype = (one.probabilities(image, record, exact.inputs) for one in (exact, own))
    label, others = painted(answer, about), [label_from_regions(one, exact.regions) for one in (expected, in_own_dtype)]
    differ = [int(np.count_nonzero(label != other)) for other in others]
    finite = bool(np.isfinite(answer).all())
    largest, from_predict = (float(np.abs(answer - other).max()) for other in (expected, in_own_dtype))
    return {
        "case_id": record.case_id,
        "passed": finite and largest <= TOLERANCE,
        "tolerance": TOLERANCE,
        "largest_difference": largest if finite else None,
        "largest_difference_from_predict": from_predict if finite else None,
        "voxels": int(np.prod(exact.region(record).size)),
        "different_labels": dict(zip(("float32", "predict"), differ)),
        "label_voxels": int(np.count_nonzero(label)),
    }


def _case_to_try(options: Options, config: RunConfig, predictor: Any) -> Tuple[CaseRecord, np.ndarray]:
    """The case of --case, else the first of the run's store: one that was not trained on, where there is one. Of its
    channels it has those that the network takes, as if there were no others."""
    if options.case:
        check_there("--case", options.case)
        cases, problems = find_cases(options.case, predictor)
        refuse(problems)
        if len(cases) != 1:
            raise InputError(f"--case must be one case, got {len(cases)}; one is enough to try the network on")
        files, channels = cases[0].files, cases[0].channels
        loaded = load_case(files, channels=channels, zero_nan=options.zero_nan)
        record, image = loaded.record, loaded.image
    else:
        store = store_of_run(config)
        record = next(record for split in ("test", "val", "train") for record in store.cases(split))
        image, channels = store.image(record.case_id), store.manifest.channels
    image = image[..., [channels.index(name) for name in config.channels]]
    return dataclasses.replace(record, **facts_of(image, None)), image

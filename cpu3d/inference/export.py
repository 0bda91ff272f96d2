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
import math
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import numpy as np

from cpu3d.data.files.arrays import file_sha256
from cpu3d.data.labels import THRESHOLD, code_meanings, label_from_regions, paint_order
from cpu3d.data.manifest import CaseRecord, SourceGrid
from cpu3d.data.nifti import ras_steps_mm
from cpu3d.data.normalise import Kind, in_units, of_all
from cpu3d.data.region import Array, Shape3, xyz
from cpu3d.data.stores.case import facts_of, load_case
from cpu3d.data.stores.names import CHANNEL_NAMES, channel_key
from cpu3d.data.stores.normalisation import refuses_ct
from cpu3d.data.stores.notes import case_notes, note_lines
from cpu3d.data.stores.resample import (
    TIE,
    grid_of,
    resample_image,
    resampled_shape,
    to_source_grid,
)
from cpu3d.data.windows import OVERLAP, SIGMA_SHARE
from cpu3d.errors import InputError, raise_if_any
from cpu3d.host.apply import set_up
from cpu3d.inference.cases import check_exist, find_cases
from cpu3d.inference.postprocessing.decision import postprocessing_of
from cpu3d.inference.postprocessing.rules import PostProcessing
from cpu3d.inference.runs import (
    WEIGHTS,
    Inference,
    mirrored_axes_of,
    store_of_run,
    training_notes,
)
from cpu3d.inference.scores import voxel_mm3
from cpu3d.inference.segment import (
    kinds_of,
    load_network,
    painted,
    probabilities_at,
    probabilities_of,
    processed,
    seen_of,
)
from cpu3d.run.checkpoint import weights_file
from cpu3d.run.config_json import load_config
from cpu3d.settings import RunConfig
from cpu3d.util.atomic import write_json
from cpu3d.util.progress import say
from cpu3d.util.records import versions
from memory_estimator.common.schema import option
from memory_estimator.common.table import Table, new_console
from memory_estimator.common.units import by
from memory_estimator.installed import how_to_install

FILES = {"savedmodel": "saved_model", "onnx": "model.onnx"}
"""Format -> file or folder of the network."""

# Largest difference of a probability from the same network in float32. In a brain of 144 x 176 x
# 128 voxels it is 2e-6 in ONNX and 0 as a SavedModel.
TOLERANCE = 1e-4
FINER = 0.8  # voxels of an image that the program's resampling is tried on, of the network's
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
    config = load_config(options.run)
    exported_config(config, options.size)  # before TensorFlow is loaded
    if options.format == "onnx":
        require_onnx()
    set_up()
    from cpu3d.inference import export_network as networks  # imports TensorFlow, so not before
    from cpu3d.inference.predictor import Predictor, load_weights

    # Once, as a run that continues replaces its last checkpoint.
    path = weights_file(options.run, options.weights)
    config, weights = load_weights(config, path)
    origin = _origin(options, path)
    exported = exported_config(config, options.size)
    own = Predictor(dataclasses.replace(config, grid=exported.grid), weights, ONE_PASS)
    if options.format == "onnx":
        # A program that reads ONNX computes norms by their definition.
        exact = networks.ExactPredictor(exported, weights, ONE_PASS)
        write = networks.write_onnx
    else:
        # A SavedModel has predict's own operations.
        exact = Predictor(exported, weights, ONE_PASS)
        write = networks.write_saved_model
    record, image = _case_to_try(options, config, own)
    check_case_fits(record, exact)
    postprocessing = postprocessing_of(options.run, config, options.weights)
    about = {
        **contract(exported, config.unet.dtype, options.format),
        "postprocessing": postprocessing.steps(exact.regions),
        **origin,
    }
    out.mkdir(parents=True, exist_ok=True)
    with _empty_after_an_error(out):
        write(about, networks.exported_network(exported, weights), out / about["file"])
        (out / "USAGE.md").write_text(usage(about), encoding="utf-8")
        verification = verify(about, out, record, image, exact, own, postprocessing)
        if verification["passed"]:
            about["files"] = sorted(path.name for path in out.iterdir())
            about["verification"] = verification
            write_json(out / "export.json", about)
    rows = [(name.replace("_", " "), str(value)) for name, value in verification.items()]
    title = "Against predict, and the same network in float32"
    new_console().print(Table(("", ""), rows, title=title))
    say(f"post-processing: {postprocessing.words}", stderr=False)
    if not verification["passed"]:
        say(f"failed: {out} has no export.json; do not use the network", stderr=False)
        return 1
    say(f"written: {out}", stderr=False)
    return 0


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


def exported_config(config: RunConfig, size: Optional[Shape3] = None) -> RunConfig:
    """The run as it is exported: in float32, for images of `size`, by default its own grid. Raises
    InputError for a size that the network cannot take, and for a run at a lower resolution."""
    if config.resolution != 1:
        rule = f"export needs a run at full resolution, got {config.resolution:g}"
        raise InputError(
            f"{rule}: an exported network does not make images smaller; export another run"
        )
    size = tuple(size or config.grid)
    try:
        config.unet.check_shape(size, "--size")
    except ValueError as error:
        raise InputError(str(error)) from None
    unet = dataclasses.replace(config.unet, dtype="float32", policy="speed")
    return dataclasses.replace(config, grid=size, unet=unet)


def contract(config: RunConfig, trained_dtype: str, format_: str) -> Dict[str, Any]:
    """Inputs and outputs of an exported network: everything in export.json that follows from
    `exported_config`.

    It returns logits: the caller takes their mean over windows and mirror images, and then the
    sigmoid. A network of whole volumes computes the statistics of their non-zero voxels; a window
    does not see the volume, so the caller passes them. The caller passes them as well if a channel
    is not normalised over its foreground: "normalisation" then has the kind of each."""
    regions = config.codes_by_region  # in the order of the answer's last axis
    answer = {"dtype": "float32", "shape": [*config.grid, len(regions)], "regions": config.regions}
    paint = []
    for group in paint_order(regions):
        paint.append([{"output": output, "code": code} for output, code in group])
    meanings = code_meanings(regions, config.label_names)
    network = config.unet.to_json()
    del network["policy"]
    normalisation = {}
    if config.normalisation:
        kinds = config.normalisation_of(config.channels)
        normalisation = {"normalisation": [each.to_json() for each in kinds]}
    return {
        "schema": 1,
        "written_by": "cpu3d export",
        "file": FILES[format_],
        "inputs": _inputs(config),
        "outputs": {"logits": answer},
        "channels": config.channels,
        "channel_names": _channel_names(config),
        "not_ct": _not_ct(config),
        **normalisation,
        "regions": regions,
        "threshold": THRESHOLD,
        "label_names": {str(code): name for code, name in config.label_names.items()},
        "label_codes": {str(code): name for code, name in meanings.items()},
        "paint": paint,
        "axes": "RAS",
        "trained_spacing_mm": config.spacing_mm,
        "target_spacing_mm": config.target_spacing_mm,
        "trained_with_orientation": config.oriented,
        "extent": config.extent,
        "mode": config.mode,
        "mirrored_axes": mirrored_axes_of(config, Inference()),
        "size": config.grid,
        "overlap": OVERLAP if config.is_patch else None,
        "sigma": SIGMA_SHARE if config.is_patch else None,
        "network": network,
        "trained_dtype": trained_dtype,
        "format": format_,
    }


def _inputs(config: RunConfig) -> Dict[str, Dict[str, Any]]:
    """What an exported network takes, by name."""
    around = "0 is background"
    over = "over the non-zero voxels of the whole volume, intensities as in the file"
    if config.normalisation:
        around = "outside of the volume what surrounds it"
        over = "as `numbers_of` gives it by the kind of its normalisation"
    image = {
        "dtype": "float32",
        "shape": [*config.grid, len(config.channels)],
        "axes": "X, Y, Z towards right, anterior, superior; then the channels",
        "values": f"intensities as in the file; {around}",
    }
    inputs = {"image": image}
    if config.is_patch or config.normalisation:
        statistic = {"dtype": "float32", "shape": [len(config.channels)]}
        deviation = "standard deviation (division by n)"
        inputs["mean"] = {**statistic, "values": f"mean of each channel {over}"}
        inputs["std"] = {**statistic, "values": f"{deviation} of each channel {over}"}
    return inputs


def _not_ct(config: RunConfig) -> List[str]:
    """The channels that must not look like CT, as `predict` refuses them."""
    kinds = of_all(config.normalisation_of(config.channels), len(config.channels))
    return [name for name, each in zip(config.channels, kinds) if refuses_ct(name, each)]


def _channel_names(config: RunConfig) -> Dict[str, List[str]]:
    """Channel -> what it may be called in a dataset.json and at the end of a file's name, nnU-Net's
    number included; in lower case, without blanks, - and _. The network's channels come first;
    files of the others are not taken for these."""
    names: Dict[str, List[str]] = {}
    keys = set()
    for channel in (*config.channels, *config.store_channels, *CHANNEL_NAMES.values()):
        key = channel_key(channel)
        if key in keys:
            continue
        keys.add(key)
        names[channel] = [name for name, known in CHANNEL_NAMES.items() if known == key] or [key]
        if channel in config.store_channels:
            names[channel].append(f"{config.store_channels.index(channel):04d}")
    return names


def require_onnx() -> None:
    """Raise InputError if onnx or onnxruntime, which the result is tried with, is missing."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        rule = f"onnx and onnxruntime must be installed for --format onnx, got {error}"
        todo = f"{how_to_install('onnx')}, or choose --format savedmodel"
        raise InputError(f"{rule}; {todo}") from None


def usage(about: Dict[str, Any]) -> str:
    """The text of USAGE.md, with the program of segment.py; `about` is the `contract` with the
    post-processing."""
    codes = ", ".join(f"{code} {name}" for code, name in about["label_codes"].items())
    package = {"savedmodel": "tensorflow", "onnx": "onnxruntime"}[about["format"]]
    program = Path(__file__).with_name("segment.py").read_text(encoding="utf-8")
    return f"""# How to use this network

`{about["file"]}` holds the network, `export.json` its inputs, outputs, size and label codes,
its origin and how well it agrees with `predict`. Keep the files of this folder together.

It takes {", ".join(about["channels"])}, each a 3D file, or together a 4D file.
Channels are found by the names in a dataset.json above imagesTr or imagesTs, or at the end of 3D
files' names (`channel_names` in `export.json`); if no name tells, they must be in this order.
`predict` rounds images whose voxels are not all whole numbers from -32768 to 32767, to float16
after normalisation or to 1/65534 of a channel's range; this network does not. Save the program
below as `segment.py` beside `export.json` and run it (pip install nibabel scipy {package}):

    python segment.py [--zero-nan] IMAGE.nii.gz [IMAGE.nii.gz ...] LABEL.nii.gz

It refuses images with NaN or infinite voxels unless --zero-nan makes these background, as `predict`
does.

```python
{program}```

The label has the image's place in space, with axes R A S; codes: {codes}.
Post-processing, as `predict` does it: {about["postprocessing"]["words"]}.
"""


def check_case_fits(record: CaseRecord, exact: Any) -> None:
    """Raise InputError unless the region of the case that `predict` would read is of the network's
    size."""
    config = exact.config
    size = exact.region(record).size
    if not config.is_patch and size != config.grid:
        if config.extent == "brain":
            extent = "brain"
            needed = record.box.size
        else:
            extent = "volume"
            needed = record.shape
        rule = f"case {record.case_id} must fit into {by(config.grid, ' x ')}"
        todo = f"export with --size {by(size, ' ')}, or name another --case"
        raise InputError(f"{rule}, got a {extent} of {by(needed, ' x ')}; {todo}")


def verify(
    about: Dict[str, Any],
    folder: Path,
    record: CaseRecord,
    image: np.ndarray,
    exact: Any,
    own: Any,
    postprocessing: PostProcessing,
) -> Dict[str, Any]:
    """Differences of the exported network, in one pass of the program of USAGE.md, from `exact`,
    the predictor in float32, and from `own`, in the run's dtype as `predict` computes, as in
    export.json; "passed" is whether it may be used. Labels are compared after the run's
    `postprocessing`, those of `predict --raw` without it. `image` has the channels of the run.
    Raises InputError if `exact`'s answer is not finite."""
    regions = exact.regions
    steps_mm = ras_steps_mm(record.geometry)
    values = in_units(image, record.units).astype(np.float32)
    one_pass = {**about, "mirrored_axes": ()}
    network = load_network(folder, about)
    answer = probabilities_at(network, one_pass, values, record.spacing_mm)
    expected = [predictor.probabilities(image, record, exact.inputs) for predictor in (exact, own)]
    raw = painted(answer, about)
    label = processed(answer, about, voxel_mm3(steps_mm))
    differ = {
        name: int(np.count_nonzero(label != postprocessing.paint(other, regions, steps_mm)))
        for name, other in zip(("float32", "predict"), expected)
    }
    differ["predict --raw"] = int(np.count_nonzero(raw != label_from_regions(expected[1], regions)))
    largest, from_predict = (float(np.abs(answer - other).max()) for other in expected)
    differences = {"largest_difference": largest}
    if about["target_spacing_mm"]:
        differences.update(_resampling_differences(network, one_pass, values, record))
    passed = all(difference <= TOLERANCE for difference in differences.values())  # none is NaN
    differences["largest_difference_from_predict"] = from_predict
    return {
        "case_id": record.case_id,
        "passed": passed,
        "tolerance": TOLERANCE,
        **{name: each if math.isfinite(each) else None for name, each in differences.items()},
        "voxels": int(np.prod(exact.region(record).size)),
        "different_labels": differ,
        "label_voxels": int(np.count_nonzero(label)),
        "postprocessed_voxels": int(np.count_nonzero(label != raw)),
    }


def _resampling_differences(
    network: Any, about: Dict[str, Any], values: Array, record: CaseRecord
) -> Dict[str, float]:
    """The largest differences of the program's resampling from that of `predict`, on an image whose
    voxels are finer than the network's: of what the network sees, as a share of its channel's
    range, and of the answer that is brought back.

    Where half of a voxel is background, rounding decides whether it is: it is left out of the
    first, and the second is of one and the same image that is seen."""
    target_mm = about["target_spacing_mm"]
    finer_mm = xyz(FINER * length for length in target_mm)
    own_shape = xyz(values.shape[:3])
    shape = resampled_shape(record.case_id, own_shape, finer_mm, target_mm)
    seen = seen_of(about, values, finer_mm)
    if seen.shape[:3] != shape:
        return {"largest_difference_resampled": math.inf}
    of_image = []
    for channel, each in enumerate(kinds_of(about)):
        volume = values[..., channel]
        outside = 0.0 if each["kind"] == Kind.FOREGROUND.value else None
        expected = resample_image(volume, shape, finer_mm, outside)
        apart = np.abs(seen[..., channel] - expected)
        if outside is not None:
            shares = _on_grid((volume != outside)[..., None], shape, record)[..., 0]
            apart[np.abs(shares - 0.5) <= TIE] = 0
        of_image.append(float(apart.max()) / max(float(np.ptp(volume)), 1e-30))
    answer = probabilities_of(network, about, seen)
    brought_back = probabilities_at(network, about, values, finer_mm)
    apart = np.abs(brought_back - _on_grid(answer, own_shape, record))
    return {
        "largest_difference_resampled": float(np.max(of_image)),
        "largest_difference_brought_back": float(apart.max()),
    }


def _on_grid(answers: Array, shape: Shape3, record: CaseRecord) -> Array:
    """Probabilities `(X, Y, Z, R)` as `predict` brings them to a grid of another shape."""
    made = dataclasses.replace(
        record, shape=xyz(answers.shape[:3]), resampled_from=SourceGrid(shape, {}, "")
    )
    return to_source_grid(answers, made)


def _case_to_try(
    options: Options, config: RunConfig, predictor: Any
) -> Tuple[CaseRecord, np.ndarray]:
    """The case of --case, else the first of the run's store that was not trained on, or its first.
    Of its channels it has only those that the network takes. One that was resampled is on the
    network's grid alone."""
    if options.case:
        check_exist("--case", options.case)
        cases, problems, notes = find_cases(options.case, predictor)
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

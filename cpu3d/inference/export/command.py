"""Write a trained network for other programs: SavedModel or ONNX, tried on a case before it is called done.

    ./run.sh export --run runs/first --format savedmodel --out exported
    ./run.sh export --run runs/first --format onnx --out exported-onnx --case data/BraTS-GLI-00001-000

The network takes the image as it is in the file, cropped to a fixed size: normalisation is inside, and everything is
float32. OUT/export.json says the rest: channels, how to crop and pad, what the outputs mean and how to paint a label
from them, weights, versions. OUT/USAGE.md is a short program that does all of it with nibabel.

A run on patches is exported at its patch's size; whoever slides it over a volume gives the volume's statistics.

At the end the files are read in a process of their own and asked about a case, the store's first of test, val or train
or --case; the answer must be that of `predict`. Else the exit code is 1 and there is no export.json.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, Iterator, Optional, Sequence, Tuple

import numpy as np
from rich.console import Console

from cpu3d.data.files.arrays import file_sha256
from cpu3d.data.labels import label_from_regions
from cpu3d.data.records import CaseRecord
from cpu3d.data.region import Shape3, crop, paste
from cpu3d.data.stores.case import load_case
from cpu3d.errors import InputError
from cpu3d.host.apply import set_up
from cpu3d.inference.evaluate import check_finite
from cpu3d.inference.export.contract import FILES, Contract, require_onnx, usage
from cpu3d.inference.predict import ZeroNan, channels_of, check_there, find_cases
from cpu3d.inference.runs import store_of_run, zeroes_nan
from cpu3d.settings import RunConfig, load_config
from cpu3d.training.checkpoint import weights_file
from cpu3d.util.atomic import PARTIAL, write_json
from cpu3d.util.child import ROOT
from cpu3d.util.lock import locked
from cpu3d.util.records import by, versions
from memory_estimator.schema import option
from memory_estimator.table import Table

CASE_INSTEAD = "--case must name a case to try it on if the store is gone or changed"

TOLERANCE = 1e-4
"""Largest difference of a probability from the same network in float32. In a brain of 144 x 176 x 128 voxels it is 2e-6
in ONNX and 0 as a SavedModel."""


@dataclass(frozen=True)
class Options:
    """What is exported, where to, and the case that it is tried on."""

    run: Path = option(help="run folder written by train", metavar="DIR")
    format: str = option(help="SavedModel of TensorFlow, or ONNX", choices=tuple(FILES))
    out: Path = option(help="folder for the export, new or empty", metavar="DIR")
    case: Tuple[Path, ...] = option(
        (), help="case to try it on, as predict's --image (default: the first of the store)", metavar="PATH"
    )
    weights: str = option("best", help="checkpoint", choices=("best", "last"))
    size: Optional[Shape3] = option(
        None,
        help="voxels of the image that it takes (default: what the network was trained on)",
        metavar=("X", "Y", "Z"),
        at_least=1,
    )


@dataclass(frozen=True)
class Case:
    """What the exported network and ours are asked about."""

    record: CaseRecord
    image: np.ndarray
    """(X, Y, Z, C), as `predict` has it: int16, or float16 after normalisation."""
    channels: Sequence[str]
    """Names of the image's channels."""


class NotReadableError(Exception):
    """The exported files do not run."""


OPTIONS = (Options, ZeroNan)


def run(options: Options, background: ZeroNan) -> int:
    _check_out(options.out)
    config = load_config(options.run)
    contract = _contract(config, FILES[options.format], options.size)
    if options.format == "onnx":
        require_onnx()
    console = Console()
    set_up()
    from cpu3d.inference.export import network as networks  # imports TensorFlow, so not before
    from cpu3d.inference.predictor import Predictor, load_weights

    # Asked for once: while a run goes on, its last one is soon another.
    path = weights_file(options.run, options.weights)
    weights = load_weights(config, path)
    source = {"weights": options.weights, "checkpoint": path.name, "weights_sha256": file_sha256(path)}
    own = Predictor(dataclasses.replace(config, grid=contract.size), weights)
    # A SavedModel has predict's own operations; a program that reads ONNX computes norms by their definition.
    exact = (Predictor if options.format == "savedmodel" else networks.ExactPredictor)(contract.config, weights)
    if options.case:
        case = _given_case(options.case, own, zero_nan=background.zero_nan or zeroes_nan([config]))
    else:
        case = _stores_case(config)
    check_fits(case, exact)

    with _finished_folder(options.out) as folder:
        network = networks.exported_network(contract, weights)
        if options.format == "onnx":
            networks.write_onnx(contract, networks.layer_weights(network), folder / contract.file)
        else:
            networks.write_saved_model(contract, network, folder / contract.file)
        (folder / "USAGE.md").write_text(usage(contract, options.format), encoding="utf-8")
        with console.status(f"trying it on {case.record.case_id}"):
            try:
                found = verify(contract, options.format, folder, case, exact, own)
            except NotReadableError as error:
                found = {"passed": False, "error": str(error)}
        if found["passed"]:
            more = {**source, "files": sorted(path.name for path in folder.iterdir()), "verification": found}
            write_json(folder / "export.json", {**_about(contract, options), **more})
    rows = [(name.replace("_", " "), str(value)) for name, value in found.items()]
    console.print(Table(("", ""), rows, title="Against predict, and the same network in float32").rich())
    if not found["passed"]:
        console.print(f"[bold red]failed: {options.out} has no export.json and is not to be used", soft_wrap=True)
        return 1
    console.print(f"written: {options.out}", highlight=False, soft_wrap=True)
    return 0


def check_fits(case: Case, exact: Any) -> None:
    """Raise InputError unless the network's size holds all that `predict` would show it of the case."""
    config, record = exact.config, case.record
    found = tuple(exact.region(record).size)
    if not config.is_patch and found != tuple(config.grid):
        what = "brain" if config.extent == "brain" else "volume"
        needed = record.box.size if config.extent == "brain" else record.shape
        raise InputError(
            f"case {record.case_id} must fit into {by(config.grid, ' x ')}, got a {what} of {by(needed, ' x ')}; "
            f"export with --size {by(found, ' ')}, or name another --case"
        )


def verify(contract: Contract, format_: str, folder: Path, case: Case, exact: Any, own: Any) -> Dict[str, Any]:
    """What export.json tells of the verification; "passed" is whether the network may be used.

    `exact` and `own` are predictors at the exported size: in float32 and as `predict` has it, in the run's own dtype.
    Voxels are compared where the network looks. Raises InputError where the run's own answer is not finite.
    """
    region, shape = exact.region(case.record), case.record.shape
    begin = time.monotonic()
    answer = paste(_ask(contract, format_, folder, case, region), region, shape)
    seconds = time.monotonic() - begin
    expected = exact.probabilities(case.image, case.record, case.channels)
    check_finite(expected, case.record.case_id)
    in_own_dtype = own.probabilities(case.image, case.record, case.channels)
    label, voxels = label_from_regions(answer, contract.regions), int(np.prod(region.size))
    different = {
        name: int(np.count_nonzero(label != label_from_regions(other, contract.regions)))
        for name, other in (("float32", expected), ("predict", in_own_dtype))
    }
    finite = bool(np.isfinite(answer).all())
    largest = float(np.abs(answer - expected).max()) if finite else None
    return {
        "case_id": case.record.case_id,
        "passed": finite and largest <= TOLERANCE,
        "tolerance": TOLERANCE,
        "largest_difference": largest,
        "largest_difference_from_predict": float(np.abs(answer - in_own_dtype).max()) if finite else None,
        "voxels": voxels,
        "different_labels": different,
        "equal_labels": {name: 1 - count / voxels for name, count in different.items()},
        "label_voxels": int(np.count_nonzero(label)),
        "seconds": round(seconds, 3),
    }


# --- Private helpers ---


def _ask(contract: Contract, format_: str, folder: Path, case: Case, region: Any) -> np.ndarray:
    """Probabilities (X, Y, Z, R) of `region`, from a process that has the exported files and the voxels alone."""
    picked = [list(case.channels).index(name) for name in contract.config.channels]
    given = {"image": crop(case.image, region)[..., picked].astype(np.float32)}
    if contract.slides:
        given["mean"] = np.float32(case.record.channel_mean)[picked]
        given["std"] = np.float32(case.record.channel_std)[picked]
    with tempfile.TemporaryDirectory() as place:
        question, answer = Path(place) / "question.npz", Path(place) / "answer.npy"
        np.savez(question, **given)
        request = {
            "format": format_, "file": str(folder / contract.file), "output": contract.output,
            "window": contract.size if contract.slides else None, "question": str(question), "answer": str(answer),
        }  # fmt: skip
        command = [sys.executable, "-m", "cpu3d.inference.export.contract", json.dumps(request)]
        # TensorFlow with CUDA would take a card by itself, and the answer is held against one of the CPU.
        on_cpu = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
        done = subprocess.run(command, cwd=ROOT, env=on_cpu, capture_output=True, text=True, check=False)
        if done.returncode:
            message = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise NotReadableError(f"the exported network could not be run: exit code {done.returncode}, {message}")
        return np.load(answer, allow_pickle=False)


def _check_out(out: Path) -> None:
    """Raise InputError unless `out` can be made, or is an empty folder."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        found = f"{len(list(out.iterdir()))} entries in it" if out.is_dir() else "a file"
        raise InputError(f"--out {out} must be a new or an empty folder, got {found}; choose another, or empty it")


def _contract(config: RunConfig, file: str, size: Optional[Shape3]) -> Contract:
    """Raises InputError for a size that the network cannot take, and for a run that no file can stand for."""
    if config.resolution != 1:
        raise InputError(
            f"export must have a run of resolution 1, got {config.resolution:g}: its images are made smaller before the"
            " network, which no exported file does; export another run"
        )
    size = tuple(size or config.grid)
    try:
        config.unet.check_shape(size, "--size")
    except ValueError as error:
        raise InputError(str(error)) from None
    unet = dataclasses.replace(config.unet, dtype="float32", policy="speed")
    return Contract(dataclasses.replace(config, grid=size, unet=unet), config.unet.dtype, file)


def _given_case(paths: Sequence[Path], predictor: Any, *, zero_nan: bool) -> Case:
    check_there("--case", paths)
    cases, problems = find_cases(paths, predictor.channels, predictor.inputs)
    if problems:
        raise InputError(*problems)
    if len(cases) != 1:
        raise InputError(f"--case must be one case, got {len(cases)}; one is enough to try the network on")
    channels = channels_of(cases[0], predictor.channels, predictor.inputs)
    folder = Path(cases[0].images[0]).parent
    loaded = load_case(cases[0], channels=channels, labels=None, dataset_folder=folder, zero_nan=zero_nan)
    return Case(loaded.record, loaded.image, channels)


def _stores_case(config: RunConfig) -> Case:
    """The first case of the run's store that was not trained on, or else that was."""
    store = store_of_run(config, way_out=CASE_INSTEAD)
    if store.manifest.channels != config.store_channels:
        raise InputError(
            f"channels of store {store.folder} must be the run's {config.store_channels}, got"
            f" {store.manifest.channels}; name a case with --case"
        )
    record = next(record for split in ("test", "val", "train") for record in store.cases(split))
    return Case(record, store.image(record.case_id), store.manifest.channels)


@contextlib.contextmanager
def _finished_folder(out: Path) -> Iterator[Path]:
    """Yield a folder beside `out` that becomes it at the end; on an error it is removed and `out` is as it was.

    What an export that was killed has left there is removed first.
    """
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    name = re.compile(rf"\.{re.escape(out.name)}\.\d+{re.escape(PARTIAL)}")
    for left in [path for path in out.parent.iterdir() if name.fullmatch(path.name)]:
        with contextlib.suppress(InputError), locked(left, "unfinished export"):  # InputError: it is being written
            shutil.rmtree(left, ignore_errors=True)
    partial = out.parent / f".{out.name}.{os.getpid()}{PARTIAL}"
    partial.mkdir()
    try:
        with locked(partial, "unfinished export"):
            yield partial
            if out.is_dir():
                out.rmdir()
            partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _about(contract: Contract, options: Options) -> Dict[str, Any]:
    """The content of export.json that is known before anything is written."""
    more = {name: metadata.version(name) for name in ("onnx", "onnxruntime") if options.format == "onnx"}
    return {
        **contract.to_json(),
        "format": options.format,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "run": str(options.run.resolve()),
        "versions": {**versions(), **more},
    }

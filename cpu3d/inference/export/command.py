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

import argparse
import contextlib
import dataclasses
import datetime
import os
import re
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, Iterator

from rich.console import Console

from cpu3d.config import RunConfig, load_config
from cpu3d.data.files.arrays import file_sha256
from cpu3d.data.stores.case import load_case
from cpu3d.errors import InputError
from cpu3d.host.apply import set_up
from cpu3d.inference.export.contract import Contract
from cpu3d.inference.export.onnx_graph import require_onnx, write_onnx
from cpu3d.inference.export.usage import usage
from cpu3d.inference.export.verify import Case, NotReadableError, check_fits, verify
from cpu3d.inference.predict import add_zero_nan, channels_of, find_cases
from cpu3d.inference.predictors import store_of_run, zeroes_nan
from cpu3d.training.checkpoint_history import weights_file
from cpu3d.util.atomic import PARTIAL, write_json
from cpu3d.util.lock import locked
from cpu3d.util.versions import versions

CASE_INSTEAD = "--case must name a case to try it on if the store is gone or changed"

FILES = {"savedmodel": "saved_model", "onnx": "model.onnx"}
"""Format -> what holds the network."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run folder written by train")
    parser.add_argument("--format", choices=tuple(FILES), required=True, help="SavedModel of TensorFlow, or ONNX")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the export, new or empty")
    parser.add_argument(
        "--case", type=Path, nargs="+", metavar="PATH",
        help="case to try it on, as predict's --image (default: the first of the store)",
    )  # fmt: skip
    add_zero_nan(parser)
    parser.add_argument("--weights", choices=("best", "last"), default="best", help="checkpoint (default: best)")
    parser.add_argument(
        "--size", type=int, nargs=3, metavar=("X", "Y", "Z"),
        help="voxels of the image that it takes (default: what the network was trained on)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    _check_out(args.out)
    config = load_config(args.run)
    contract = _contract(config, FILES[args.format], args.size)
    if args.format == "onnx":
        require_onnx()
    console = Console()
    set_up()
    from cpu3d.inference.export import saved_model  # imports TensorFlow, so not before
    from cpu3d.inference.predictor import Predictor, load_weights

    path = weights_file(args.run, args.weights)  # asked for once: while a run goes on, its last one is soon another
    weights = load_weights(config, path)
    source = {"weights": args.weights, "checkpoint": path.name, "weights_sha256": file_sha256(path)}
    own = Predictor(dataclasses.replace(config, grid=contract.size), weights)
    # A SavedModel has predict's own operations; a program that reads ONNX computes norms by their definition.
    exact = (Predictor if args.format == "savedmodel" else saved_model.ExactPredictor)(contract.config, weights)
    if args.case:
        case = _given_case(args.case, own, zero_nan=args.zero_nan or zeroes_nan([config]))
    else:
        case = _stores_case(config)
    check_fits(case, exact)

    with _finished_folder(args.out) as folder:
        network = saved_model.exported_network(contract, weights)
        if args.format == "onnx":
            write_onnx(contract, saved_model.layer_weights(network), folder / contract.file)
        else:
            saved_model.write_saved_model(contract, network, folder / contract.file)
        (folder / "USAGE.md").write_text(usage(contract, args.format), encoding="utf-8")
        with console.status(f"trying it on {case.record.case_id}"):
            try:
                found = verify(contract, args.format, folder, case, exact, own)
            except NotReadableError as error:
                found = {"passed": False, "error": str(error)}
        if found["passed"]:
            more = {**source, "files": sorted(path.name for path in folder.iterdir()), "verification": found}
            write_json(folder / "export.json", {**_about(contract, args), **more})
    console.print(_told(found), highlight=False, soft_wrap=True)
    if not found["passed"]:
        console.print(f"[bold red]failed: {args.out} has no export.json and is not to be used", soft_wrap=True)
        return 1
    console.print(f"written: {args.out}", highlight=False, soft_wrap=True)
    return 0


# --- Private helpers ---


def _check_out(out: Path) -> None:
    """Raise InputError unless `out` can be made, or is an empty folder."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        found = f"{len(list(out.iterdir()))} entries in it" if out.is_dir() else "a file"
        raise InputError(f"--out {out} must be a new or an empty folder, got {found}; choose another, or empty it")


def _contract(config: RunConfig, file: str, size: Any) -> Contract:
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


def _given_case(paths: Any, predictor: Any, *, zero_nan: bool) -> Case:
    missing = [f"--case {path} must exist, found none; check the path" for path in paths if not path.exists()]
    if missing:
        raise InputError(*missing)
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


def _about(contract: Contract, args: argparse.Namespace) -> Dict[str, Any]:
    """The content of export.json that is known before anything is written."""
    more = {name: metadata.version(name) for name in ("onnx", "onnxruntime") if args.format == "onnx"}
    return {
        **contract.to_json(),
        "format": args.format,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "run": str(args.run.resolve()),
        "versions": {**versions(), **more},
    }


def _told(found: Dict[str, Any]) -> str:
    """The figures of a verification, in words."""
    if "error" in found:
        return found["error"]
    if found["largest_difference"] is None:
        return f"case {found['case_id']}: the exported network's answer has NaN or infinity in it"
    different = found["different_labels"]
    return (
        f"case {found['case_id']}: probabilities differ by {found['largest_difference']:.2g} at most (allowed:"
        f" {found['tolerance']:g}) from the same network in float32, by {found['largest_difference_from_predict']:.2g}"
        f" from predict's; labels in {different['float32']} and {different['predict']} of {found['voxels']} voxels"
        f" ({found['label_voxels']} labelled)"
    )

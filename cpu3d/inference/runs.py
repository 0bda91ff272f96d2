"""Trained runs and how their networks are applied: options, stores, which runs may predict
together.

configs = load_configs(runs)
store = store_of_run(configs[0])
"""

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from cpu3d.data.cases.resample import differs, in_mm
from cpu3d.data.fold import with_fold
from cpu3d.data.manifest import CaseRecord
from cpu3d.data.nifti import is_placed
from cpu3d.data.region import Shape3
from cpu3d.data.store import Store, open_store
from cpu3d.data.windows import OVERLAP
from cpu3d.errors import InputError, raise_if_any
from cpu3d.run.checkpoint import read_state, weights_file
from cpu3d.run.config_json import load_config
from cpu3d.run.folds import WEIGHTS as FOLD_WEIGHTS
from cpu3d.run.folds import read_folds, trained_folds
from cpu3d.settings import AUTO, RunConfig
from cpu3d.util.records import listed
from memory_estimator.common.schema import check, option

WEIGHTS = "best: highest validation Dice; last: newest checkpoint"  # help of --weights
# Settings that runs must share to be averaged. With another split, test cases of one are training
# cases of the other.
COMMON = (
    "store_channels", "label_names", "region_codes", "paint", "regions", "split_hash",
    "target_spacing_mm",
)  # fmt: skip
GROUP = "inference (default: as the run was trained)"
RUN_HELP = (
    "run folder written by train; several, such as all folds, predict by their mean probabilities, "
    "and so does the folder of `train --folds`"
)
_WEIGHTS = f"{WEIGHTS} (default: best; of a folder of folds last)"
_WINDOW = "slide a window of this size in voxels, also for a run on whole volumes"
_OVERLAP = "minimum overlap of neighbouring windows, as a share of the window; ignored in one pass"
_FLIPS = (
    "the mean of the logits of all mirror images, eight, or four if labels are left and right; or "
    "one pass, which is faster (default: on if the run was trained on mirror images)"
)
_DEVICE = (
    "auto, cpu, or gpu:0 (default: auto, a GPU if the host has one and every run slides a window)"
)


@dataclass(frozen=True)
class RunOptions:
    """Options of the runs that predict, and of their weights."""

    run: Tuple[Path, ...] = option(help=RUN_HELP, metavar="DIR")
    weights: Optional[str] = option(None, help=_WEIGHTS, choices=("best", "last"))
    raw: bool = option(False, help="keep what post-processing would remove")


@dataclass(frozen=True)
class Inference:
    """How a network is applied. The default is as the run was trained: whole volumes in one pass,
    patches by windows. Raises InputError for values out of range."""

    window: Optional[Shape3] = option(
        None, _WINDOW, metavar=("X", "Y", "Z"), at_least=1, group=GROUP, one_of="size"
    )
    one_pass: bool = option(
        False, "predict whole volumes, also with a run on patches", group=GROUP, one_of="size"
    )
    overlap: float = option(OVERLAP, _OVERLAP, metavar="S", at_least=0, below=1, group=GROUP)
    flips: Optional[bool] = option(None, _FLIPS, group=GROUP)
    device: str = option(AUTO, _DEVICE, metavar="D", group=GROUP)

    def __post_init__(self):
        check(self, InputError)


def window_of(config: RunConfig, inference: Inference) -> Optional[Shape3]:
    """Voxels X, Y, Z of the window that slides over this run's volumes; None for one pass."""
    if inference.window:
        return tuple(inference.window)
    if config.is_patch and not inference.one_pass:
        return tuple(config.grid)
    return None


def mirrored_axes_of(config: RunConfig, inference: Inference) -> Tuple[int, ...]:
    """The axes of X, Y, Z along which this run's answers are averaged over mirror images: those
    that it was trained on; none without them."""
    if inference.flips is False:
        return ()
    return config.mirrored_axes


def applied(config: RunConfig, inference: Inference) -> Dict[str, Any]:
    """How a run's network is applied, as scores.json and sidecars have it; without the device,
    which changes the last bits of an answer alone."""
    window = window_of(config, inference)
    return {
        "window": list(window) if window else None,
        "one_pass": not window,
        "overlap": inference.overlap,
        "flips": bool(mirrored_axes_of(config, inference)),
    }


def config_of_state(config: RunConfig, state: Mapping[str, Any]) -> RunConfig:
    """A run as the weights of a checkpoint with this state predict: those of coarse steps by the
    network of these."""
    return dataclasses.replace(config, coarse_steps=state["coarse_steps"]).after(state["step"])


def config_of_weights(run: Path, weights: str) -> RunConfig:
    """A run as its "best" or "last" weights predict; if they cannot be read, whose problem is named
    when they are loaded, the run as its last step is computed. Raises InputError as
    `load_config`."""
    config = load_config(run)
    try:
        return config_of_state(config, read_state(weights_file(run, weights)))
    except (InputError, OSError, KeyError, TypeError):
        return config


def check_inference(config: RunConfig, inference: Inference) -> None:
    """Raise InputError, all problems together, if a run's network cannot be applied so. `config` is
    that of the weights that are applied."""
    problems = []
    window = window_of(config, inference)
    if window:
        try:
            config.unet.check_shape(window, "--window")
        except ValueError as error:
            problems.append(str(error))
    if inference.flips and not config.augment.flip:
        problems.append(
            "--flips must come with a run that was trained on mirror images, got --no-flip; "
            "leave it out"
        )
    raise_if_any(problems)


def store_of_run(config: RunConfig, folder: Optional[Path] = None) -> Store:
    """The store of a run, as its fold sees it: in `folder`, or in that of the run's settings.
    Raises InputError if it is missing, and if its split is not that of the training: its test cases
    may have been seen then."""
    try:
        store = open_store(folder or config.store)
    except InputError as error:
        problems = list(error.problems)
        if not folder:
            problems.append(
                "if the store was moved, name its folder with --store, or in `export` a case with "
                "--case"
            )
        raise InputError(*problems) from None
    if store.manifest.split_hash != config.split_hash:
        raise InputError(
            f"store {store.folder} must have the split that the run was trained with, "
            f"{config.split_hash}, got {store.manifest.split_hash}; its test cases may have been "
            "trained on, so name the run's own store"
        )
    return with_fold(store, config.fold)


def training_notes(record: CaseRecord, configs: Sequence[RunConfig]) -> List[str]:
    """What to say of a case that is not as the training cases of the runs: voxels of another size,
    or an orientation where they had none. Nothing of runs that do not know. None where they had one
    is said in any case, by `case_notes`."""
    notes = []
    for config in configs:
        trained = config.spacing_mm or record.spacing_mm
        # If the run has a target, what it sees is resampled to that.
        if config.target_spacing_mm is None and differs(record.spacing_mm, trained):
            notes.append(
                f"voxels of {in_mm(record.spacing_mm)}, but the run was trained on "
                f"{in_mm(trained)}: the answer may be worse; resample the image to the latter"
            )
        if config.oriented is False and is_placed(record.geometry):
            notes.append(
                "an image with orientation, but the run was trained on images without: left and "
                "right may be exchanged in the answer"
            )
    return list(dict.fromkeys(notes))


@dataclass(frozen=True)
class RunSet:
    """Runs that answer together."""

    runs: List[Path]
    configs: List[RunConfig]
    weights: str  # "best" or "last"
    folder: Optional[Path] = None  # the folder of folds that was named instead of them


def seen_notes(case_ids: Sequence[str], configs: Sequence[RunConfig]) -> List[str]:
    """A note that names the cases that some of the runs were trained on, if there are any."""
    trained = set()
    for config in configs:
        with contextlib.suppress(InputError, OSError):  # the store may have been moved
            trained.update(store_of_run(config).manifest.split["train"])
    seen = sorted(trained.intersection(case_ids))
    if not seen:
        return []
    note = f"note: the runs were trained on cases of these names, {listed(seen)}: if they are the"
    return [f"{note} same ones, their answers are better than those of new cases"]


def open_runs(options: RunOptions) -> RunSet:
    """The runs that are named, or the folds of a folder of folds. Raises InputError as
    `load_configs`, and for such a folder beside other runs."""
    runs = [run.resolve() for run in options.run]
    weights = "best"
    folder = next(filter(read_folds, runs), None)
    if folder:
        if len(runs) > 1:
            raise InputError(
                f"--run must name a folder of folds alone, got {listed(runs)}; leave the others out"
            )
        trained = trained_folds(folder)
        lacking = [fold for fold in read_folds(folder).names if fold not in trained]
        if lacking:
            raise InputError(
                f"folds of {folder} must all be trained to their end, got {listed(lacking)} "
                "without; repeat its `train --folds`, or name the runs of some folds"
            )
        runs = list(trained.values())
        weights = FOLD_WEIGHTS
    configs = load_configs(runs)
    return RunSet(runs, configs, options.weights or weights, folder)


def load_configs(runs: Sequence[Path]) -> List[RunConfig]:
    """The settings of each run. Raises InputError, with all problems, unless the runs differ and
    share store, regions and split."""
    configs = [load_config(run) for run in runs]
    if len(runs) == 1:
        return configs
    problems = []
    if len({Path(run).resolve() for run in runs}) < len(runs):
        problems.append(f"runs must differ, got {listed(runs)}; name each once")
    for run, config in zip(runs[1:], configs[1:]):
        for name in COMMON:
            first = getattr(configs[0], name)
            other = getattr(config, name)
            if first != other:
                problems.append(
                    f"{name} of run {run} must be {first}, as of run {runs[0]}, got {other}; put "
                    "runs of one store and of the same regions together"
                )
    raise_if_any(problems)
    return configs

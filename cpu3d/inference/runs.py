"""Trained runs made ready to predict: their options, store, device and predictors, alone or several as one.

    configs = load_configs(runs)  # and check that they may answer together
    predictor = Ensemble(trained_predictors(runs, "best", Inference(window=(96, 96, 96))))

Logits are averaged over windows and mirror images, probabilities over runs, as in nnU-Net. Imports no TensorFlow.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.records import CaseRecord
from cpu3d.data.region import Shape3
from cpu3d.data.store import Store, open_store
from cpu3d.data.stores.splits import parse_fold, with_fold
from cpu3d.data.windows import OVERLAP
from cpu3d.errors import InputError, refuse
from cpu3d.host.apply import set_up
from cpu3d.host.gpu import CPU, HostGpus, pick_device, why_no_card
from cpu3d.run.config import load_config
from cpu3d.settings import AUTO, RunConfig, left_open
from cpu3d.util.progress import say
from cpu3d.util.records import listed
from memory_estimator.common.schema import check, option

# Settings that runs must share to be averaged. With another split, test cases of one are training cases of the other.
COMMON = ("store_channels", "label_names", "region_codes", "regions", "split_hash")
GROUP = "inference (default: as the run was trained)"
_WINDOW = "slide a window of so many voxels, also for a run on whole volumes"
_OVERLAP = "least share of a window that its neighbour along an axis covers too; ignored in one pass"
_DEVICE = "auto, cpu, or gpu:0 (default: auto, a GPU where there is one and every run slides a window)"


@dataclass(frozen=True)
class RunOptions:
    """Which runs predict, and with which of their weights."""

    run: Tuple[Path, ...] = option(
        help="run folder written by train; several, such as all folds, predict together by their mean", metavar="DIR"
    )
    some_folds: bool = option(False, help="allow some of the folds to be missing")
    weights: str = option("best", help="checkpoint", choices=("best", "last"))


@dataclass(frozen=True)
class Inference:
    """How a network is applied. The default is as the run was trained: whole volumes in one pass, patches by windows.

    Raises InputError for values out of range.
    """

    window: Optional[Shape3] = option(None, _WINDOW, metavar=("X", "Y", "Z"), at_least=1, group=GROUP, one_of="size")
    one_pass: bool = option(False, "the whole volume at once, also for a run on patches", group=GROUP, one_of="size")
    overlap: float = option(OVERLAP, _OVERLAP, metavar="S", at_least=0, below=1, group=GROUP)
    flips: bool = option(False, "mean of the logits over eight mirror images, in eight times the time", group=GROUP)
    device: str = option(AUTO, _DEVICE, metavar="D", group=GROUP)

    def __post_init__(self):
        check(self, InputError)

    def to_json(self) -> Dict[str, Any]:
        """What decides the answer: the device changes its last bits alone, so scores do not depend on it."""
        return {name: value for name, value in vars(self).items() if name != "device"}


def window_of(config: RunConfig, inference: Inference) -> Optional[Shape3]:
    """Voxels X, Y, Z of the window that slides over this run's volumes; None for one pass."""
    if inference.window:
        return tuple(inference.window)
    return tuple(config.grid) if config.is_patch and not inference.one_pass else None


def check_inference(config: RunConfig, inference: Inference) -> None:
    """Raise InputError, all problems together, where the run's network cannot be applied so."""
    problems, window = [], window_of(config, inference)
    if window and config.resolution < 1:
        problems.append(f"--window must come with a run at full resolution, got {config.resolution:g}; leave it out")
    elif window:
        try:
            config.unet.check_shape(window, "--window")
        except ValueError as error:
            problems.append(str(error))
    if inference.flips and not config.augment.flip:
        problems.append("--flips must come with a run that was trained on mirror images, got --no-flip; leave it out")
    refuse(problems)


AS_TRAINED = Inference()


def store_of_run(config: RunConfig, folder: Optional[Path] = None) -> Store:
    """The store of a run, as its fold sees it: in `folder`, or where the run's settings have it. Raises InputError
    where there is none, and where its split is not that of the training: its test cases may have been seen then."""
    try:
        store = open_store(folder or config.store)
    except InputError as error:
        moved = "if the store is no longer there, name its folder with --store, or in `export` a case with --case"
        raise InputError(*error.problems, *([] if folder else [moved])) from None
    if store.manifest.split_hash != config.split_hash:
        raise InputError(
            f"store {store.folder} must have the split {config.split_hash} that the run was trained with, got "
            f"{store.manifest.split_hash}; its test cases may have been trained on, so name the run's own store"
        )
    return with_fold(store, config.fold)


def trained_predictors(runs: Sequence[Path], weights: str = "best", inference: Inference = AS_TRAINED) -> List[Any]:
    """The predictor of each run, all on the device of `inference`, for which the host is set up. Raises InputError,
    before TensorFlow is imported, for what a run cannot be applied as or a device that is not there; and as
    `load_predictor`."""
    configs = [load_config(run) for run in runs]
    for config in configs:
        check_inference(config, inference)
    # Left open it is a card only where every run slides a window: a whole volume in one pass is for a CPU's memory.
    mode = "patch" if all(window_of(config, inference) for config in configs) else "whole"
    requested, gpus = left_open(inference.device), HostGpus()
    device = pick_device(requested, mode, gpus)
    if device == CPU:
        say(*why_no_card(requested, mode, gpus))
    set_up(device=device)
    from cpu3d.inference.predictor import load_predictor  # imports TensorFlow, so not before

    return [load_predictor(run, weights, inference) for run in runs]


class Ensemble:
    """The mean of predictors, with the interface of each; of one it is that. Their networks all stay in memory."""

    def __init__(self, predictors: Sequence[Any]):
        first, self.predictors = predictors[0], tuple(predictors)
        self.channels, self.labels, self.regions = first.channels, first.labels, first.regions
        # What any of the runs needs: they may have learnt from different channels.
        self.inputs = tuple(name for name in first.channels if any(name in one.inputs for one in predictors))

    def probabilities(
        self, image: np.ndarray, record: CaseRecord, channels: Optional[Sequence[str]] = None
    ) -> np.ndarray:
        """The mean of the runs' probabilities, float32 (X, Y, Z, R), on the full grid; of equal ones it is each."""
        mean = self.predictors[0].probabilities(image, record, channels)
        for count, predictor in enumerate(self.predictors[1:], start=2):
            mean = mean + (predictor.probabilities(image, record, channels) - mean) / np.float32(count)
        return mean


def describe(
    runs: Sequence[Path],
    configs: Sequence[RunConfig],
    predictors: Sequence[Any],
    held_out: Optional[Sequence[Sequence[str]]] = None,
) -> Dict[str, Any]:
    """What is written beside an answer: the run's folder, its fold, and how the network was applied. Of several runs
    that is a list, "runs", with the ids of the cases that each fold has held out, if they are given."""
    about = []
    for number, (run, config, predictor) in enumerate(zip(runs, configs, predictors)):
        how = {**predictor.inference.to_json(), "window": predictor.window, "one_pass": not predictor.window}
        own = {"run": str(Path(run).resolve()), "fold": config.fold, "inference": how}
        about.append({**own, "held_out": held_out[number]} if held_out else own)
    return about[0] if len(about) == 1 else {"runs": about}


def load_configs(runs: Sequence[Path], *, some_folds: bool = False) -> List[RunConfig]:
    """The settings of each run. Raises InputError, with all that is wrong, unless they differ and share store, regions
    and split, and folds are all folds of one K, each once, or with `some_folds` some of them."""
    configs = [load_config(run) for run in runs]
    if len(runs) == 1:
        return configs
    problems = []
    if len({Path(run).resolve() for run in runs}) < len(runs):
        problems.append(f"runs must differ, got {listed(runs)}; name each once")
    for run, config in zip(runs[1:], configs[1:]):
        for name in COMMON:
            first, other = getattr(configs[0], name), getattr(config, name)
            if first != other:
                rule = f"{name} of run {run} must be {first}, as of run {runs[0]}, got {other}"
                problems.append(f"{rule}; put runs of one store and of the same regions together")
    folds = [config.fold for config in configs]
    if any(folds):
        parts = max(parse_fold(fold)[1] for fold in folds if fold)
        wanted = {f"{part}/{parts}" for part in range(1, parts + 1)}
        if len(set(folds)) < len(folds) or not set(folds) <= wanted or not (some_folds or set(folds) == wanted):
            rule = (
                f"runs must be different folds of {parts}" if some_folds else f"runs must be all folds of {parts}, once"
            )
            got = listed(fold or "a run of no fold" for fold in folds)
            problems.append(f"{rule}, got {got}; name others{'' if some_folds else ', or add --some-folds'}")
    refuse(problems)
    return configs

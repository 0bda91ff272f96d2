"""Trained runs made ready to predict: their options, store, device and predictors, alone or several as one.

    configs = load_configs(runs)  # and check that they may answer together
    predictor = joined(trained_predictors(runs, "best", Inference(window=(96, 96, 96))))

Several runs answer with the mean of their probabilities. Logits are averaged over windows and mirror images,
probabilities over runs, as in nnU-Net. Importing this does not import TensorFlow.
"""

import contextlib
import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.records import CaseRecord
from cpu3d.data.region import Shape3
from cpu3d.data.sampling import OVERLAP
from cpu3d.data.splits import parse_fold, with_fold
from cpu3d.data.store import Store, open_store
from cpu3d.data.stores.prepare import settings_of
from cpu3d.errors import InputError, refuse
from cpu3d.host.apply import set_up
from cpu3d.host.gpu import CPU, HostGpus, pick_device, why_no_card
from cpu3d.settings import AUTO, RunConfig, left_open, load_config
from cpu3d.util.progress import say
from cpu3d.util.records import listed
from memory_estimator.common.schema import check, option

COMMON = ("store_channels", "label_names", "region_codes", "regions", "split_hash")
"""Settings that runs must share to be averaged. The split is one of them: with another, test cases of one run are
training cases of the other."""

GROUP = "inference (default: as the run was trained)"

STORE_HAS_MOVED = "--store must name the store's folder if it is no longer there"


# --- Options ---


@dataclass(frozen=True)
class RunOptions:
    """Which runs answer, and with which of their weights."""

    run: Tuple[Path, ...] = option(
        help="run folder written by train; of several the mean, such as of all folds", metavar="DIR"
    )
    some_folds: bool = option(False, help="accept that folds are missing among the runs")
    weights: str = option("best", help="checkpoint", choices=("best", "last"))


@dataclass(frozen=True)
class Inference:
    """How a network is applied. The default is as the run was trained: whole volumes in one pass, patches by windows.

    Raises InputError for values out of range.
    """

    window: Optional[Shape3] = option(
        None,
        help="slide a window of so many voxels, also for a run on whole volumes",
        metavar=("X", "Y", "Z"),
        at_least=1,
        group=GROUP,
        one_of="size",
    )
    one_pass: bool = option(
        False, help="the whole volume at once, also for a run on patches", group=GROUP, one_of="size"
    )
    overlap: float = option(
        OVERLAP,
        help="least share of a window that the next one along an axis covers again; in one pass it is ignored",
        metavar="S",
        at_least=0,
        below=1,
        group=GROUP,
    )
    flips: bool = option(
        False, help="mean of the logits over eight mirror images, in eight times the time", group=GROUP
    )
    device: str = option(
        AUTO,
        help="auto, cpu, or gpu:0 (default: auto, a GPU where there is one and every run slides a window)",
        metavar="D",
        group=GROUP,
    )

    def __post_init__(self):
        check(self, InputError)
        if self.window and self.one_pass:
            raise InputError("--window and --one-pass must not be given together; choose one")

    def to_json(self) -> Dict[str, Any]:
        """What decides the answer: the device changes its last bits alone, so scores do not depend on it."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "device"}


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
        rule = "--flips must come with a run that was trained on mirror images, got one without (--no-flip or"
        problems.append(f"{rule} --no-augment); leave it out")
    refuse(problems)


AS_TRAINED = Inference()


# --- The store ---


def store_of_run(config: RunConfig, folder: Optional[Path] = None, *, advice: str = STORE_HAS_MOVED) -> Store:
    """The store of a run, as its fold sees it: in `folder`, or where the run's settings have it.

    Raises InputError where there is none, with `advice` if no `folder` was named, and where its split is not the one
    that the run was trained with: its test cases may have been seen then.
    """
    try:
        store = open_store(folder or config.store)
        store.check_split()
        if store.manifest.split_hash != config.split_hash:
            raise InputError(
                f"store {store.folder} must have the split {config.split_hash} that the run was trained with, got "
                f"{store.manifest.split_hash}; its test cases may have been trained on, so name the run's own store"
            )
    except InputError as error:
        raise InputError(*error.problems, *([] if folder else [advice])) from None
    return with_fold(store, config.fold)


def zeroes_nan(configs: Sequence[RunConfig]) -> bool:
    """Whether NaN and infinite voxels became background in the store of any run.

    False of a store that is gone, damaged or out of reach: prediction does not need it.
    """
    for config in configs:
        with contextlib.suppress(OSError, InputError):
            if settings_of(Path(config.store)).zero_nan:
                return True
    return False


# --- Predictors ---


def trained_predictors(runs: Sequence[Path], weights: str = "best", inference: Inference = AS_TRAINED) -> List[Any]:
    """The predictor of each run, all on the device of `inference`, for which the host is set up where it is not yet.

    Raises InputError, before TensorFlow is imported, for what a run cannot be applied as and for a device that is not
    there; and as `load_predictor`.
    """
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
    """The mean of several predictors, with the interface of each. Their networks are small and all stay in memory."""

    def __init__(self, predictors: Sequence[Any]):
        first, self.predictors = predictors[0], tuple(predictors)
        self.channels, self.labels, self.regions = first.channels, first.labels, first.regions
        self.inputs = tuple(name for name in first.channels if any(name in one.inputs for one in predictors))
        """What any of the runs needs: they may have learnt from different channels."""

    def probabilities(
        self, image: np.ndarray, record: CaseRecord, channels: Optional[Sequence[str]] = None
    ) -> np.ndarray:
        """The mean of the runs' probabilities, float32 (X, Y, Z, R), on the full grid; of equal ones it is each.

        Takes twice the memory of one run's answer, however many there are.
        """
        mean = self.predictors[0].probabilities(image, record, channels)
        for count, predictor in enumerate(self.predictors[1:], start=2):
            mean = mean + (predictor.probabilities(image, record, channels) - mean) / np.float32(count)
        return mean


def joined(predictors: Sequence[Any]) -> Any:
    """Several as an `Ensemble`, or the only one."""
    return predictors[0] if len(predictors) == 1 else Ensemble(predictors)


def describe(
    runs: Sequence[Path],
    configs: Sequence[RunConfig],
    predictors: Sequence[Any],
    held_out: Optional[Sequence[Sequence[str]]] = None,
) -> Dict[str, Any]:
    """What is written beside an answer, as JSON: the run's folder, its fold, and how the network was applied.

    Of several runs that is a list, "runs", with the ids of the cases that each fold has held out, if they are given.
    """
    about = []
    for number, (run, config) in enumerate(zip(runs, configs)):
        window, inference = predictors[number].window, predictors[number].inference
        how = {**inference.to_json(), "window": window and list(window), "one_pass": not window}
        own = {"run": str(Path(run).resolve()), "fold": config.fold, "inference": how}
        about.append({**own, "held_out": list(held_out[number])} if held_out else own)
    return about[0] if len(about) == 1 else {"runs": about}


# --- Which runs may answer together ---


def load_configs(runs: Sequence[Path], *, some_folds: bool = False) -> List[RunConfig]:
    """The settings of each run. Raises InputError, with all that is wrong, unless the runs can answer together.

    They must differ, and share store, regions and split. Where they are folds they must be all folds of one K, each
    once, or with `some_folds` some of them. A single run always can.
    """
    configs, folders = [load_config(run) for run in runs], [Path(run).resolve() for run in runs]
    if len(runs) == 1:
        return configs
    problems = [
        f"runs must differ, got {folder} {times} times; name it once"
        for folder, times in Counter(folders).items()
        if times > 1
    ]
    for run, config in zip(runs[1:], configs[1:]):
        for name in COMMON:
            first, other = getattr(configs[0], name), getattr(config, name)
            if first != other:
                rule = f"{name} of run {run} must be {first}, as of run {runs[0]}, got {other}"
                problems.append(f"{rule}; put runs of one store and of the same regions together")
    refuse([*problems, *_fold_problems(runs, [config.fold for config in configs], some_folds)])
    return configs


def _fold_problems(runs: Sequence[Path], folds: Sequence[str], some_folds: bool) -> List[str]:
    if not any(folds):
        return []
    runs_of: Dict[str, List[str]] = {}
    for run, fold in zip(runs, folds):
        runs_of.setdefault(fold, []).append(str(run))
    if "" in runs_of:
        rule = f"runs must all be of folds, or none of them, got no fold for {listed(runs_of[''])}"
        return [f"{rule}; leave out one kind"]
    problems = [
        f"runs must be of different folds, got {fold} for {listed(same)}; leave one out"
        for fold, same in runs_of.items()
        if len(same) > 1
    ]
    parsed = sorted(map(parse_fold, runs_of))
    present, parts = [f"{part}/{parts}" for part, parts in parsed], parsed[0][1]
    missing = [f"{part}/{parts}" for part in range(1, parts + 1) if (part, parts) not in parsed]
    if any(other != parts for _, other in parsed):
        rule = f"runs must be folds of one number of parts, got {listed(present)}"
        problems.append(f"{rule}; leave some out")
    elif missing and not some_folds:
        rule = f"runs must be all folds of {parts}, got {listed(present)}, missing {', '.join(missing)}"
        problems.append(f"{rule}; train those, or add --some-folds")
    return problems

"""Trained runs made ready to predict: the store they rest on, and their predictors, all on one device.

    store = store_of_run(load_config(run))
    predictors = trained_predictors([run], "best", Inference(window=(96, 96, 96)))

The one place where commands that predict set up TensorFlow; importing this does not.
"""

import contextlib
from pathlib import Path
from typing import Any, List, Optional, Sequence

from rich.console import Console

from cpu3d.config import RunConfig, load_config
from cpu3d.data.splits import with_fold
from cpu3d.data.store import Store, open_store
from cpu3d.data.stores.conversion import settings_of
from cpu3d.errors import InputError
from cpu3d.host.apply import set_up
from cpu3d.host.gpu import CPU, Gpu, HostGpus, pick_device, why_no_card
from cpu3d.inference.options import Inference, check_inference, window_of

STORE_HAS_MOVED = "--store must name the store's folder if it is no longer there"


def store_of_run(config: RunConfig, given: Optional[Path] = None, *, way_out: str = STORE_HAS_MOVED) -> Store:
    """The store of a run, as its fold sees it: in the folder `given`, or in the one that the run names.

    Raises InputError where there is none, and where its split is not the one that the run was trained with: its test
    cases may have been seen then. Where no folder is given, `way_out` is said besides.
    """
    try:
        store = open_store(given or config.store)
        store.check_split()
        if store.manifest.split_hash != config.split_hash:
            raise InputError(
                f"store {store.folder} must have the split {config.split_hash} that the run was trained with, got "
                f"{store.manifest.split_hash}; its test cases may have been trained on, so name the run's own store"
            )
    except InputError as error:
        raise InputError(*error.problems, *([] if given else [way_out])) from None
    return with_fold(store, config.fold)


def zeroes_nan(configs: Sequence[RunConfig]) -> bool:
    """Whether NaN and infinite voxels became background in the store of any run.

    False of a store that is gone, damaged or out of reach: what a run learnt does not hang on its store.
    """
    for config in configs:
        with contextlib.suppress(OSError, InputError):
            if settings_of(Path(config.store)).zero_nan:
                return True
    return False


def trained_predictor(run: Path, weights: str = "best", inference: Optional[Inference] = None) -> Any:
    """`load_predictor` of a run, with the host set up for TensorFlow first where this process has not done so yet."""
    return trained_predictors([run], weights, inference)[0]


def trained_predictors(runs: Sequence[Path], weights: str = "best", inference: Optional[Inference] = None) -> List[Any]:
    """The predictor of each run, all on the device that `inference` asks for.

    Raises InputError, before TensorFlow is imported, for what a run cannot be applied as and for a device that is not
    there; and as `load_predictor`.
    """
    inference = inference or Inference()
    configs = [load_config(run) for run in runs]
    for config in configs:
        check_inference(config, inference)
    set_up(device=_device(configs, inference, HostGpus()))
    from cpu3d.inference.predictor import load_predictor  # imports TensorFlow, so not before

    return [load_predictor(run, weights, inference) for run in runs]


# --- Private helpers ---


def _device(configs: Sequence[RunConfig], inference: Inference, gpus: Sequence[Gpu]) -> str:
    """Left open it is a card only where every run slides a window: a whole volume in one pass is for a CPU's memory."""
    mode = "patch" if all(window_of(config, inference) for config in configs) else "whole"
    device = pick_device(inference.device, mode, gpus)
    if device == CPU:
        for line in why_no_card(inference.device, mode, gpus):
            Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)
    return device

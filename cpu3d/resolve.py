"""The whole configuration of a run, before anything is computed: from recipe or saved run, settings, store and host."""

import dataclasses
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

from cpu3d import memory_plan
from cpu3d.config import RunConfig, differences, load_config
from cpu3d.data.region import grid_size
from cpu3d.data.resolution import network_grid
from cpu3d.data.splits import with_fold
from cpu3d.data.store import Store, check_names
from cpu3d.errors import InputError
from cpu3d.host.gpu import Gpu, best_dtype, card_of, pick_device
from cpu3d.patch_plan import check_patch, patch_of_card, patch_of_memory, patches_per_case, usual_patch
from cpu3d.recipes import RECIPES
from cpu3d.training_options import SIZES_OF_PATCH, with_settings
from memory_estimator.host import Host

RATE_SCALES = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
"""Power of the number of workers that the learning rate grows by, where the batch grows with them."""

USUAL_SCALE = {"sgd": "linear", "adam": "sqrt"}
"""Linear for SGD (Goyal et al. 2017, "Accurate, Large Minibatch SGD"), the square root for Adam (Malladi et al. 2022,
"On the SDEs and Scaling Rules for Adaptive Gradient Algorithms")."""


def resolve(
    store: Store,
    run_folder: Path,
    host: Host,
    settings: Dict[str, Any],
    recipe: Optional[str],
    gpus: Sequence[Gpu] = (),
    workers: int = 1,
) -> RunConfig:
    """The whole configuration of a run: recipe or saved run, then the chosen settings, then what store and host decide.

    How a saved run computes its steps, in device, dtype, policy and micro-batch, only a setting changes, no recipe. A
    new run's policy is left for `train` to pick by memory. Raises InputError when the settings do not suit the store,
    or when a saved run cannot continue under them.
    """
    saved = load_config(run_folder) if (run_folder / "config.json").is_file() else None
    start = saved if saved is not None and recipe is None else RECIPES[recipe or "brats-regions"]()
    if saved and "micro_batch" not in settings:
        start = dataclasses.replace(start, micro_batch=0)  # it is the saved one again where the batch is, below
    try:
        config = with_settings(start, settings)
        if saved and config.budget_minutes and config.budget_minutes == saved.budget_minutes:
            config = dataclasses.replace(config, steps=saved.steps)  # as it was timed when the run began
        if saved and saved.mode != config.mode:
            raise InputError(*differences(saved, config))
        config = _for_workers(config, settings, workers, scale=saved is None or recipe is not None)
        view = with_fold(store, config.fold)
        config = _for_store(config, view)
        config = _for_host(config, saved, host, settings, gpus)
        if workers > 1 and config.device != "cpu":
            raise InputError(f"device must be cpu for several workers, got {config.device}; give --device cpu")
        if saved and "micro_batch" not in settings and saved.batch == config.batch:
            config = dataclasses.replace(config, micro_batch=saved.micro_batch)
        config = _micro_batches(config, workers)
        config = _with_grid(config, saved, store, settings, gpus)
    except ValueError as error:
        raise InputError(str(error)) from None
    _check_batch(config, len(view.manifest.split["train"]))
    if saved is not None:
        problems = differences(saved, config)
        if problems:
            raise InputError(*problems)
    return config


# --- Private helpers ---


def _for_store(config: RunConfig, store: Store) -> RunConfig:
    """Fill in what follows from the store: names, grid, the network's channels and outputs."""
    manifest = store.manifest
    if not manifest.split["train"]:
        raise InputError(f"split train of {store.folder} must hold cases, it is empty; prepare with another --split")
    channels = config.channels or manifest.channels
    regions = config.regions or tuple(manifest.regions)
    check_names("channels", channels, manifest.channels)
    check_names("regions", regions, tuple(manifest.regions))
    unet = dataclasses.replace(config.unet, channels=len(channels), outputs=len(regions), seed=config.seed)
    return dataclasses.replace(
        config,
        store=str(store.folder.resolve()),
        store_channels=manifest.channels,
        label_names=manifest.labels,
        region_codes=manifest.regions,
        split_hash=manifest.split_hash,
        channels=tuple(channels),
        regions=tuple(regions),
        unet=unet,
    )


def _for_workers(config: RunConfig, settings: Dict[str, Any], workers: int, *, scale: bool) -> RunConfig:
    """Fill in what follows from the number of workers, where the batch is to grow with it: batch and learning rate.

    The rate of a run that continues has grown already, unless it is given again: by a setting, or with `scale`.
    """
    if "batch_per_worker" in settings:
        config = dataclasses.replace(config, batch=settings["batch_per_worker"] * workers)
        if scale or "learning_rate" in settings:
            power = RATE_SCALES[settings.get("rate_scaling") or USUAL_SCALE[config.optimizer]]
            config = dataclasses.replace(config, learning_rate=config.learning_rate * workers**power)
    elif "rate_scaling" in settings:
        raise InputError(
            f"--rate-scaling must come with --batch-per-worker, got {settings['rate_scaling']} for a batch that "
            "does not grow with the workers; add it, or choose --learning-rate"
        )
    if config.batch % workers:
        raise InputError(
            f"batch must be a multiple of the {workers} workers, got {config.batch}; choose --batch-per-worker, "
            "another --batch, or another number of workers"
        )
    return config


def _micro_batches(config: RunConfig, workers: int) -> RunConfig:
    """Fill in what is computed together, where that follows from the number of workers, and check it."""
    share = config.batch // workers
    if workers > 1 and config.unet.norm == "batch" and not config.micro_batch:
        config = dataclasses.replace(config, micro_batch=share)
    if share % config.micro:
        raise InputError(
            f"micro-batch must divide the {share} volumes of a worker, got {config.micro} of batch {config.batch} on "
            f"{workers} workers; choose another --micro-batch, or fewer workers"
        )
    return config


def _for_host(
    config: RunConfig, saved: Optional[RunConfig], host: Host, settings: Dict[str, Any], gpus: Sequence[Gpu]
) -> RunConfig:
    """Fill in what follows from the host: the device, and the dtype that is fast on it; the saved ones stay."""
    own = saved.device if saved else config.device if config.device != "cpu" else "auto"
    device = pick_device(settings.get("device", own), config.mode, gpus)
    if device != "cpu" and config.engine == "itex":
        raise InputError(f"engine must be auto or stock on {device}, got itex, which computes on CPUs; leave it out")
    dtype = settings.get("dtype") or (saved.unet.dtype if saved else "auto")
    if dtype == "auto":
        dtype = host.best_dtype if device == "cpu" else best_dtype(card_of(device, gpus))
    unet = dataclasses.replace(config.unet, dtype=dtype)
    if saved and "policy" not in settings:
        unet = dataclasses.replace(unet, policy=saved.unet.policy)
    return dataclasses.replace(config, device=device, unet=unet)


def _with_grid(
    config: RunConfig, saved: Optional[RunConfig], store: Store, settings: Dict[str, Any], gpus: Sequence[Gpu]
) -> RunConfig:
    """Fill in what the network sees: the extent's grid at the run's resolution, or a patch of it."""
    extent, divisor = grid_size(store, extent=config.extent, multiple=1), config.unet.divisor
    grid = network_grid(extent, config.resolution, divisor)
    if not config.is_patch:
        odd = [name for name in (*SIZES_OF_PATCH, "patches_per_case", "foreground") if name in settings]
        if odd:
            raise InputError(f"--{odd[0].replace('_', '-')} must come with --mode patch, got mode whole; add it")
        return dataclasses.replace(config, grid=grid, patches_per_case=1)
    whole = memory_plan.job_of(dataclasses.replace(config, grid=grid, engine="stock"), threads=1, cases=0)
    if "patch" in settings:
        patch = tuple(settings["patch"])
    elif "gpu_memory" in settings:
        patch = patch_of_memory(whole, settings["gpu_memory"])
    elif saved is not None:
        patch = saved.grid
    elif config.device != "cpu":
        patch = patch_of_card(whole, card_of(config.device, gpus))
    else:
        patch = usual_patch(grid, divisor)
    check_patch(patch, grid, config.unet)
    count = settings.get("patches_per_case") or (saved.patches_per_case if saved else patches_per_case(grid, patch))
    return dataclasses.replace(config, grid=patch, patches_per_case=count)


def _check_batch(config: RunConfig, cases: int) -> None:
    """Raise InputError for a batch that no epoch fills: there would be no step."""
    seen = cases * config.patches_per_case
    if config.batch > seen:
        what = f"{seen} patches of an epoch" if config.is_patch else f"{cases} training cases"
        more = ", or raise --patches-per-case" if config.is_patch else ""
        raise InputError(f"batch must be at most the {what}, got {config.batch}; lower it{more}")

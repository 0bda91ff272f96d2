"""The settings of a run that were left open, decided from the store, the host and the number of workers.

    config = decided(Given(store, host, {"mode": "patch"}, None, gpus, 1))

Names, channels and outputs follow from the store; batch and learning rate from the workers, where they grow with them;
device and dtype from the host; the grid, or the patch, from both. The memory policy is left to `cpu3d.plan`, which asks
the estimator.
"""

import dataclasses
import math
from typing import Any, Mapping, NamedTuple, Optional, Sequence

from cpu3d.data.region import Shape3
from cpu3d.data.resolution import network_grid
from cpu3d.data.splits import with_fold
from cpu3d.data.store import Store, check_names, grid_size
from cpu3d.errors import DoesNotFitError, InputError, refuse
from cpu3d.host.gpu import Gpu, best_dtype, card_of, pick_device
from cpu3d.settings import (
    AUTO,
    RATE_SCALES,
    SIZES_OF_PATCH,
    RunConfig,
    differences,
    left_open,
    recipe_config,
    with_settings,
)
from cpu3d.util.records import by
from memory_estimator import planner
from memory_estimator.common.units import format_bytes, parse_bytes
from memory_estimator.host import Host
from memory_estimator.job import OPTIMIZERS, Job, installed_engine

NONE = (0, 0, 0)
"""The coarse grid of a run without a curriculum."""


class Given(NamedTuple):
    """What a run's settings are decided from."""

    store: Store
    host: Host
    settings: Mapping[str, Any]
    saved: Optional[RunConfig]
    gpus: Sequence[Gpu]
    workers: int

    def named(self, name: str) -> Optional[str]:
        """The device, dtype or policy that was chosen, or that the saved run has; None where it is left open."""
        own = self.saved and {**vars(self.saved), **vars(self.saved.unet)}[name]
        return left_open(self.settings.get(name, own))


def decided(given: Given) -> RunConfig:
    """Every setting but the memory policy of a new run."""
    store, _, settings, saved, _, _ = given
    is_new = saved is None or "recipe" in settings
    start = recipe_config(settings) if is_new else saved
    if saved and "micro_batch" not in settings:
        start = dataclasses.replace(start, micro_batch=0)  # it is the saved one again where the batch is
    try:
        config = with_settings(start, settings)
        if saved and config.budget_minutes and config.budget_minutes == saved.budget_minutes:
            config = dataclasses.replace(config, steps=saved.steps)  # as it was timed when the run began
        if config.learning_rate is None:
            config = dataclasses.replace(config, learning_rate=config.peak_rate)
        if saved and saved.mode != config.mode:
            raise InputError(*differences(saved, config))
        view = with_fold(store, config.fold)
        config = _for_store(_for_workers(config, given, scale=is_new), view)
        config = _with_curriculum(_with_grid(_for_host(config, given), given), given)
    except ValueError as error:
        raise InputError(str(error)) from None
    refuse(differences(saved, config) if saved else ())
    return config


def job_of(config: RunConfig, threads: int, cases: int) -> Job:
    """The run as a job of the estimator. `cases` are volumes an epoch, or patches."""
    engine = installed_engine() if config.engine == AUTO else config.engine
    same = {name: getattr(config, name) for name in ("unet", "batch", "micro_batch", "optimizer")}
    fed = {"averaged": config.ema > 0, "from_store": True, "resampled": config.augment.resamples, "cases": cases}
    return Job(shape=config.grid, engine=engine, threads=threads, **same, **fed)


# --- Private helpers ---


def _for_workers(config: RunConfig, given: Given, *, scale: bool) -> RunConfig:
    """Fill in what follows from the number of workers: batch and learning rate, where the batch grows with it, and what
    is computed together.

    The rate of a run that continues has grown already, unless it is given again: by a setting, or with `scale`.
    """
    settings, saved, workers = given.settings, given.saved, given.workers
    if "batch_per_worker" in settings:
        config = dataclasses.replace(config, batch=settings["batch_per_worker"] * workers)
        power = RATE_SCALES[settings.get("rate_scaling") or OPTIMIZERS[config.optimizer].rate_scaling]
        grown = [name for name in ("learning_rate", "adam_rate") if scale or name in settings]
        config = dataclasses.replace(config, **{name: getattr(config, name) * workers**power for name in grown})
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
    share = config.batch // workers
    if saved and "micro_batch" not in settings and saved.batch == config.batch:
        config = dataclasses.replace(config, micro_batch=saved.micro_batch)
    if workers > 1 and config.unet.norm == "batch" and not config.micro_batch:
        config = dataclasses.replace(config, micro_batch=share)
    if share % config.micro:
        raise InputError(
            f"micro-batch must divide the {share} volumes of a worker, got {config.micro} of batch {config.batch} on "
            f"{workers} workers; choose another --micro-batch, or fewer workers"
        )
    return config


def _for_store(config: RunConfig, store: Store) -> RunConfig:
    """Fill in what follows from the store: names, the network's channels and outputs."""
    manifest = store.manifest
    if not manifest.split["train"]:
        raise InputError(f"split train of {store.folder} must hold cases, it is empty; prepare with another --split")
    channels, regions = config.channels or manifest.channels, config.regions or tuple(manifest.regions)
    check_names("channels", channels, manifest.channels)
    check_names("regions", regions, tuple(manifest.regions))
    return dataclasses.replace(
        config,
        store=str(store.folder.resolve()),
        store_channels=manifest.channels,
        label_names=manifest.labels,
        region_codes=manifest.regions,
        split_hash=manifest.split_hash,
        channels=tuple(channels),
        regions=tuple(regions),
        unet=dataclasses.replace(config.unet, channels=len(channels), outputs=len(regions), seed=config.seed),
    )


def _for_host(config: RunConfig, given: Given) -> RunConfig:
    """Fill in what follows from the host: the device, and the dtype that is fast on it; the saved ones stay."""
    named = given.named("device")
    if "device" not in given.settings and not given.saved and config.device != "cpu":
        named = config.device  # the recipe's
    device = pick_device(named, config.mode, given.gpus)
    if device != "cpu" and config.engine == "itex":
        raise InputError(f"engine must be auto or stock on {device}, got itex, which computes on CPUs; leave it out")
    if device != "cpu" and given.workers > 1:
        raise InputError(f"device must be cpu for several workers, got {device}; give --device cpu")
    dtype = given.named("dtype")
    dtype = dtype or (given.host.best_dtype if device == "cpu" else best_dtype(card_of(device, given.gpus)))
    unet = dataclasses.replace(config.unet, dtype=dtype)
    if given.saved and "policy" not in given.settings:
        unet = dataclasses.replace(unet, policy=given.saved.unet.policy)
    return dataclasses.replace(config, device=device, unet=unet)


def _with_grid(config: RunConfig, given: Given) -> RunConfig:
    """Fill in what the network sees: the extent's grid at the run's resolution, or a patch of it."""
    settings, saved, divisor = given.settings, given.saved, config.unet.divisor
    grid = network_grid(grid_size(given.store, extent=config.extent, multiple=1), config.resolution, divisor)
    if not config.is_patch:
        of_patches = [name for name in (*SIZES_OF_PATCH, "patches_per_case", "foreground") if name in settings]
        if of_patches:
            name = of_patches[0].replace("_", "-")
            raise InputError(f"--{name} must come with --mode patch, got mode whole; add it")
        return dataclasses.replace(config, grid=grid, patches_per_case=1)
    if "patch" in settings:
        patch = tuple(settings["patch"])
    elif "gpu_memory" in settings or (saved is None and config.device != "cpu"):
        patch = _largest_patch(config, grid, given)
    else:
        patch = saved.grid if saved else planner.usual_patch(grid, divisor)
    planner.check_patch(patch, grid, divisor)
    as_many_voxels = max(round(math.prod(grid) / math.prod(patch)), 1)
    each = settings.get("patches_per_case") or (saved.patches_per_case if saved else as_many_voxels)
    return dataclasses.replace(config, grid=patch, patches_per_case=each)


def _with_curriculum(config: RunConfig, given: Given) -> RunConfig:
    """Fill in whether there is a curriculum, and its coarse grid: none where that would leave the deepest level fewer
    than two voxels along an axis."""
    if config.curriculum == "off":
        return dataclasses.replace(config, coarse_grid=NONE)
    divisor = config.unet.divisor
    extent = config.grid if config.is_patch else grid_size(given.store, extent=config.extent, multiple=1)
    coarse = network_grid(extent, (1 if config.is_patch else config.resolution) / 2, divisor)
    is_wide = min(coarse) >= 2 * divisor
    if config.curriculum == "half" and not is_wide:
        raise InputError(
            f"--curriculum must be off for a network of {config.unet.depth} levels on {by(config.grid)}, got half, "
            f"which is {by(coarse)} and must be at least {2 * divisor} along each axis; leave it out"
        )
    return dataclasses.replace(config, curriculum="half" if is_wide else "off", coarse_grid=coarse if is_wide else NONE)


def _largest_patch(config: RunConfig, grid: Shape3, given: Given) -> Shape3:
    """The largest patch that the card, or one of --gpu-memory, trains."""
    if "gpu_memory" in given.settings:
        name = "--gpu-memory"
        try:
            memory_bytes = parse_bytes(given.settings["gpu_memory"])
        except ValueError as error:
            raise InputError(f"--gpu-{error}") from None
    else:
        memory_bytes = card_of(config.device, given.gpus).free_bytes
        if memory_bytes is None:
            raise InputError(
                f"the free memory of {config.device} must be known, its driver is silent; give --gpu-memory or --patch"
            )
        name = f"{config.device}, with {format_bytes(memory_bytes)} free,"
    try:
        return planner.patch_for(job_of(dataclasses.replace(config, grid=grid), 1, 0), memory_bytes, name)
    except ValueError as error:
        raise DoesNotFitError(str(error)) from None

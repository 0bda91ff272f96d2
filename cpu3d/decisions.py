"""What is decided of a new run before its memory is known: settings that were left open, and what
follows from store, host and workers.

    config, reasons, transfer = decide(store, host, chosen, gpus, workers)

Names, channels and outputs follow from the store; device and dtype from the host; levels, strides
and grid from the store, or the patch from the card."""

import dataclasses
import math
import operator
from typing import Dict, Optional, Sequence, Tuple

from cpu3d.data.fold import with_fold
from cpu3d.data.labels import PaintedRegions, check_painting
from cpu3d.data.region import NO_GRID, Shape3
from cpu3d.data.sampling import WHOLE_EVERY
from cpu3d.data.store import Store, case_box, check_names
from cpu3d.data.stores.store_decisions import (
    crop_share_of_store,
    curriculum_of_store,
    depth_of_store,
    median_extent,
    strides_of_store,
)
from cpu3d.errors import InputError
from cpu3d.host.gpu import Gpu, best_dtype, card_of, largest_patch, pick_device, why_no_card
from cpu3d.run.transfer import Transfer, network_of_init, open_transfer
from cpu3d.settings import (
    COARSE_RATE,
    Chosen,
    RunConfig,
    Settings,
    recipe_settings,
    with_settings,
)
from cpu3d.store_facts import store_facts
from memory_estimator import planner
from memory_estimator.common.units import by
from memory_estimator.host import Host
from memory_estimator.installed import installed_engine
from memory_estimator.job import AUTO, USUAL_PATCH, Job, micro_of
from models.config import UNetConfig
from models.strides import (
    Strides,
    coarse_grid,
    depth_line,
    shape3,
    strides_line,
)


def decide(
    store: Store, host: Host, chosen: Chosen, gpus: Sequence[Gpu], workers: int
) -> Tuple[RunConfig, Dict[str, str], Optional[Transfer]]:
    """Return a new run without its memory policy and without what follows from its length; a reason
    for each setting that was decided; and the weights that it starts from. Raises InputError
    or ValueError for settings that do not suit the others."""
    settings = with_settings(recipe_settings(chosen), chosen)
    if not settings.is_patch and "patch" in chosen:
        raise InputError(
            "--patch must come with --mode patch, got mode whole; add that, or leave it out"
        )
    facts = store_facts(with_fold(store, settings.fold))
    channels = settings.channels or facts.store_channels
    regions = settings.regions or tuple(facts.region_codes)
    check_names("channels", channels, facts.store_channels)
    check_names("regions", regions, tuple(facts.region_codes))
    codes = {name: facts.region_codes[name] for name in regions}
    check_painting(PaintedRegions(codes, facts.paint), facts.label_names, f"store {store.folder}")
    wanted = chosen.get("device", settings.device if settings.device != "cpu" else AUTO)
    wanted_device = None if wanted == AUTO else wanted
    device = pick_device(wanted_device, settings.mode, gpus)
    card = None if device == "cpu" else card_of(device, gpus)
    dtype = chosen.get("dtype", AUTO)
    if dtype == AUTO:
        dtype = host.best_dtype if card is None else best_dtype(card)
    depth, strides, reasons = _levels(settings, chosen, store)
    unet = dataclasses.replace(
        settings.unet,
        channels=len(channels),
        outputs=len(regions),
        seed=settings.seed,
        dtype=dtype,
        depth=depth,
        strides=strides,
    )
    settings = dataclasses.replace(
        settings,
        unet=unet,
        channels=channels,
        regions=regions,
        device=device,
        micro_batch=micro_batch_of(settings, workers),
    )
    check_device(settings, workers)
    config = RunConfig(**vars(facts), **vars(settings))
    config = _with_grid(config, store, chosen.get("patch"), card, reasons)
    config = _with_crops(config, store)
    config = dataclasses.replace(config, learning_rate=_peak_rate(config, reasons))
    for line in why_no_card(wanted_device, config.mode, gpus):
        reasons["device"] = line
    transfer = None
    if config.init:
        transfer = open_transfer(config)
        config = dataclasses.replace(config, init_record=transfer.record)
    return config, reasons, transfer


def _peak_rate(config: RunConfig, reasons: Dict[str, str]) -> float:
    """The rate that is chosen, or the optimizer's own, lower for Muon at half resolution alone."""
    if config.learning_rate or (config.optimizer, config.curriculum) != ("muon", "all"):
        return config.peak_rate
    reasons["learning_rate"] = f"learning rate {COARSE_RATE:g}: all steps are at half resolution"
    return COARSE_RATE


def _levels(
    settings: Settings, chosen: Chosen, store: Store
) -> Tuple[int, Strides, Dict[str, str]]:
    """The levels and the strides of the network, and why if no setting gives them: those of the
    network whose weights are taken, or by nnU-Net's rules."""
    depth = settings.unet.depth  # the chosen one, or the most of the recipe
    is_open = chosen.get("depth", AUTO) == AUTO
    strides = chosen.get("strides", AUTO)
    if strides != AUTO:
        return depth, settings.unet.strides, {}
    if settings.init:
        source = network_of_init(settings.init)
        given = source.every_stride
        if source.averages:
            given = (source.average, *given)
        if is_open or len(given) + 1 == depth:
            line = strides_line(given, f"those of --init {settings.init}")
            return len(given) + 1, given, {"strides": line}
    shape = median_extent(store, settings.extent)
    what = "the median case"
    if settings.is_patch:
        shape = shape3(map(min, chosen.get("patch") or USUAL_PATCH, shape))
        what = "a patch of the median case"
    reasons: Dict[str, str] = {}
    if is_open:
        most = depth
        depth, reason = depth_of_store(store, shape, most, what)
        if depth < most:
            reasons["depth"] = depth_line(depth, reason)
    strides, reason = strides_of_store(store, shape, depth)
    every_stride = UNetConfig(depth=depth, strides=strides).every_stride
    reasons["strides"] = strides_line(every_stride, reason)
    return depth, strides, reasons


def _with_grid(
    config: RunConfig,
    store: Store,
    wanted: Optional[Sequence[int]],
    card: Optional[Gpu],
    reasons: Dict[str, str],
) -> RunConfig:
    """The run with its largest grid, and that of its coarse steps: of whole volumes, or the
    `wanted` patch, by itself the largest that fits the card, on a CPU the usual one; and as many
    patches of a case as have the voxels of the median one. Whether there are coarse steps by
    themselves is decided by the median case."""
    divisors = config.unet.divisors
    extent = largest_extent(store, config)
    median = median_extent(store, config.extent)
    grid = config.grid_of(extent)
    samples_per_case = 1
    if config.is_patch:
        volume = grid
        if wanted is not None:
            grid = shape3(wanted)
        elif card is not None:
            grid = largest_patch(card, job_of(config, volume, threads=1, cases=0))
        else:
            grid = planner.usual_patch(volume, divisors)
        planner.check_patch(grid, volume, divisors)
        samples_per_case = max(round(math.prod(config.grid_of(median)) / math.prod(grid)), 1)
        extent = grid
        median = grid
    unet = config.unet
    stride = unet.stride(0)
    curriculum = config.curriculum
    if curriculum == AUTO:
        curriculum, why = curriculum_of_store(store, median, unet, config.is_patch)
        reasons["curriculum"] = f"curriculum {curriculum}: {why}"
    coarse_shape = NO_GRID
    if curriculum == "all":
        if config.is_patch or unet.depth == 2:
            raise InputError(
                "--curriculum must be half or off for patches and for 2 levels, got all; choose one"
            )
        unet = unet.averaging()
    elif curriculum == "half":
        coarse = coarse_grid(median, stride, divisors)
        if not coarse.is_possible:
            raise InputError(
                f"--curriculum must be off if half of {by(median)} has a single voxel along an "
                f"axis at the deepest level, got half, a grid of {by(coarse.grid)}; leave it out, "
                "or choose a smaller --depth"
            )
        coarse_shape = coarse_grid(extent, stride, divisors).grid
        if not config.is_patch:
            coarse_shape = shape3(map(operator.mul, coarse_shape, stride))
    return dataclasses.replace(
        config,
        unet=unet,
        grid=grid,
        coarse_grid=coarse_shape,
        samples_per_case=samples_per_case,
        curriculum=curriculum,
    )


def _with_crops(config: RunConfig, store: Store) -> RunConfig:
    """The run with its share of steps on crops, and so many samples of a case in an epoch that
    together they have the voxels of the whole case."""
    if config.curriculum != "all":
        return config
    share = crop_share_of_store(store, config.extent, config.unet)
    config = dataclasses.replace(config, whole_every=WHOLE_EVERY, crop_share=share)
    return dataclasses.replace(config, samples_per_case=round(1 / config.step_share))


def largest_extent(store: Store, config: RunConfig) -> Shape3:
    """Voxels X, Y, Z of the case whose grid is the largest, without what it is rounded up by; the
    largest along each axis for a micro-batch of several cases, which have one grid, and for
    patches."""
    extents = [case_box(record, config.extent).size for record in store.manifest.cases]
    if config.micro > 1 or config.is_patch:
        return shape3(map(max, zip(*extents)))
    return max(extents, key=lambda extent: math.prod(config.grid_of(extent)))


def job_of(settings: Settings, grid: Shape3, *, threads: int, cases: int) -> Job:
    """A run as a job of the estimator. `cases` are volumes an epoch, or patches."""
    return Job(
        unet=settings.unet,
        shape=grid,
        batch=settings.batch,
        micro_batch=settings.micro_batch,
        optimizer=settings.optimizer,
        freeze=settings.freeze,
        engine=installed_engine(),
        threads=threads,
        from_store=True,
        reworked=settings.augment.needs_volume,
        mixed=settings.augment.cutmix > 0,
        cases=cases,
    )


def check_device(settings: Settings, workers: int) -> None:
    """Raise InputError for a card with several workers."""
    if settings.device != "cpu" and workers > 1:
        raise InputError(
            f"--device must be cpu for several workers, got {settings.device}; give --device cpu"
        )


def micro_batch_of(settings: Settings, workers: int) -> int:
    """The micro-batch, which with batch norm is by itself a worker's whole share of the batch."""
    batch = settings.batch
    if batch % workers:
        raise InputError(
            f"--batch must be a multiple of the {workers} workers, got {batch}; choose another "
            "--batch, or as many workers as divide it"
        )
    share = batch // workers
    norm = settings.unet.norm
    micro_batch = settings.micro_batch
    if workers > 1 and norm == "batch" and not micro_batch:
        micro_batch = share
    micro = micro_of(norm, batch, micro_batch)
    if share % micro:
        raise InputError(
            f"--micro-batch must divide the {share} volumes of a worker, got {micro}; choose "
            "another --micro-batch, or fewer workers"
        )
    return micro_batch

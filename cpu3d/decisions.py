"""What is decided of a run before its memory is known: settings that were left open, and what
follows from store, host and workers.

    start = Start(settings, chosen, kept, saved)
    facts, settings, decided, reasons = decide(start, store, host, gpus, workers)
    config = joined(facts, settings, decided)

Names, channels and outputs follow from the store; batch and learning rate from the workers, if they
grow with them; device and dtype from the host; the grid, or the patch, from both."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Dict, Optional, Sequence, Tuple

from cpu3d.chosen import OF_PATCHES, Chosen
from cpu3d.data.fold import with_fold
from cpu3d.data.labels import PaintedRegions, check_painting
from cpu3d.data.nifti import is_placed
from cpu3d.data.region import Shape3
from cpu3d.data.resolution import field_of
from cpu3d.data.store import Store, check_names, grid_size
from cpu3d.data.stores.store_decisions import depth_of_store, strides_of_store
from cpu3d.errors import InputError
from cpu3d.host.gpu import Gpu, best_dtype, card_of, largest_patch, pick_device
from cpu3d.run.config_json import rate_growth
from cpu3d.run.transfer import network_of_init
from cpu3d.settings import Decided, RunConfig, Settings, StoreFacts, left_open
from memory_estimator import planner
from memory_estimator.common.units import by
from memory_estimator.host import Host
from memory_estimator.installed import installed_engine
from memory_estimator.job import AUTO, USUAL_PATCH, Job, micro_of
from models.config import UNetConfig
from models.strides import (
    EVERY_AXIS,
    STRIDES,
    Strides,
    coarse_grid,
    common_spacing,
    depth_line,
    lowered,
    network_grid,
    shape3,
    strides_line,
)

NO_GRID: Shape3 = (0, 0, 0)


@dataclass(frozen=True)
class Start:
    """What the decisions of a run start from."""

    settings: Settings
    """Those of the recipe, or of the run that is continued, with the chosen and the kept ones in
    their places."""
    chosen: Chosen  # by the user
    kept: Chosen  # by a run that is continued, under any recipe; or by the recipe
    saved: Optional[RunConfig] = None  # of the run that is continued
    done: int = 0  # steps of that run
    is_begun: bool = False  # whether that run has a checkpoint
    has_new_rates: bool = True  # whether the learning rates are not those of the saved run

    def wanted(self, name: str) -> Any:
        """The chosen value, else the one that is kept; None if the plan is to decide."""
        return left_open(self.chosen.get(name, self.kept.get(name)))


def decide(
    start: Start, store: Store, host: Host, gpus: Sequence[Gpu], workers: int
) -> Tuple[StoreFacts, Settings, Decided, Dict[str, str]]:
    """The facts of the store, the settings of a run as they are decided, what no setting gives, and
    for some of them, by the setting's name, a line that says why. The number of validations and of
    coarse steps, and the memory policy, are decided later. Raises InputError or ValueError for
    settings that do not suit the others."""
    settings = start.settings
    learning_rate, adam_rate = _rates(start, workers)
    micro_batch = _micro_batch(settings, workers, start.saved)
    split = with_fold(store, settings.fold)
    facts = store_facts(split)
    _refuse_other_store(start, facts)
    channels = _named("channels", settings.channels, facts.store_channels)
    regions = _named("regions", settings.regions, tuple(facts.region_codes))
    codes = {name: facts.region_codes[name] for name in regions}
    painted = PaintedRegions(codes, facts.paint)
    check_painting(painted, facts.label_names, f"store {store.folder}")
    device = _device(start, gpus, workers)
    card: Optional[Gpu] = None
    if device != "cpu":
        card = card_of(device, gpus)
    depth, strides, why = _levels(start, store)
    unet = dataclasses.replace(
        settings.unet,
        channels=len(channels),
        outputs=len(regions),
        seed=settings.seed,
        dtype=_dtype(start, host, card),
        depth=depth,
        strides=strides,
    )
    of_run = dataclasses.replace(settings, unet=unet, micro_batch=micro_batch)
    grids, patches_per_case = _grids(start, store, of_run, card)
    decided_settings = dataclasses.replace(
        settings,
        channels=channels,
        regions=regions,
        device=device,
        unet=unet,
        learning_rate=learning_rate,
        adam_rate=adam_rate,
        micro_batch=micro_batch,
        curriculum="off" if grids.coarse_grid == NO_GRID else "half",
        steps=_steps(start),
        patches_per_case=patches_per_case,
    )
    return facts, decided_settings, grids, {**why, **_cut_patch(start, grids.grid)}


def joined(facts: StoreFacts, settings: Settings, decided: Decided) -> RunConfig:
    """The run of these, but for what is decided later."""
    return RunConfig(**vars(facts), **vars(settings), **vars(decided))


def store_facts(store: Store) -> StoreFacts:
    """What a run knows of its store, as its fold sees it. Raises InputError if no case is to be
    trained on."""
    manifest = store.manifest
    if not manifest.split["train"]:
        rule = f"split train of {store.folder} must hold cases"
        raise InputError(f"{rule}, got none; prepare with another --split")
    spacings = []
    placed = set()
    for record in store.cases("train"):  # each is read from disk
        spacings.append(record.spacing_mm)
        placed.add(is_placed(record.geometry))
    return StoreFacts(
        store=str(store.folder.resolve()),
        store_channels=manifest.channels,
        label_names=manifest.labels,
        region_codes=manifest.regions,
        paint=manifest.paint,
        split_hash=manifest.split_hash,
        spacing_mm=common_spacing(spacings),
        target_spacing_mm=manifest.target_spacing_mm,
        oriented=placed.pop() if len(placed) == 1 else None,
        normalisation=manifest.normalisation,
    )


def job_of(settings: Settings, grid: Shape3, *, threads: int, cases: int) -> Job:
    """A run as a job of the estimator. `cases` are volumes an epoch, or patches."""
    engine = settings.engine
    if engine == AUTO:
        engine = installed_engine()
    return Job(
        unet=settings.unet,
        shape=grid,
        batch=settings.batch,
        micro_batch=settings.micro_batch,
        optimizer=settings.optimizer,
        weight_decay=settings.weight_decay,
        freeze=settings.freeze,
        engine=engine,
        threads=threads,
        from_store=True,
        reworked=settings.augment.needs_volume,
        cases=cases,
    )


# --- The decisions ---


def volume_shape(store: Store, config: RunConfig) -> Shape3:
    """Voxels X, Y, Z of a volume as the run is validated on it, at the store's resolution: the box
    that holds every case and the network's field."""
    extent = grid_size(store, extent=config.extent, multiple=1)
    return field_of(config.grid, config.resolution_by_axis, at_least=extent)


def _refuse_other_store(start: Start, facts: StoreFacts) -> None:
    """Raise InputError if the store lacks a channel or region of the run that is continued."""
    if start.saved is None:
        return
    for kind, of_run, names in (
        ("channels", start.saved.channels, facts.store_channels),
        ("regions", start.saved.regions, tuple(facts.region_codes)),
    ):
        if not set(of_run) <= set(names):
            rule = f"--store must have the {kind} of this run, {', '.join(of_run)}"
            todo = "take the store that the run was begun on, or another --run"
            raise InputError(f"{rule}, got {', '.join(names)}; {todo}")


def _named(kind: str, chosen: Sequence[str], names: Sequence[str]) -> Tuple[str, ...]:
    """The chosen ones of the store's `names`, or all. Raises InputError for others."""
    if not chosen:
        chosen = names
    check_names(kind, chosen, names)
    return tuple(chosen)


def _rates(start: Start, workers: int) -> Tuple[float, float]:
    """The learning rate and Adam's. They grow with the workers if the batch does; those of a run
    that continues have grown already, unless they are given again."""
    settings = start.settings
    chosen = start.chosen
    learning_rate = settings.peak_rate
    adam_rate = settings.adam_rate
    if "batch_per_worker" in chosen:
        growth = rate_growth(settings, workers)
        if start.has_new_rates or "learning_rate" in chosen:
            learning_rate *= growth
        if start.has_new_rates or "adam_rate" in chosen:
            adam_rate *= growth
    return learning_rate, adam_rate


def _micro_batch(settings: Settings, workers: int, saved: Optional[RunConfig]) -> int:
    """The micro-batch, which with batch norm is by itself a worker's whole share of the batch."""
    batch = settings.batch
    if batch % workers:
        rule = f"--batch must be a multiple of the {workers} workers, got {batch}"
        todo = "choose another --batch, or --batch-per-worker in its place"
        if saved:  # its batch must stay
            todo = "take as many workers as divide it"
        raise InputError(f"{rule}; {todo}")
    share = batch // workers
    norm = settings.unet.norm
    micro_batch = settings.micro_batch
    if workers > 1 and norm == "batch" and not micro_batch:
        micro_batch = share
    micro = micro_of(norm, batch, micro_batch)
    if share % micro:
        rule = f"--micro-batch must divide the {share} volumes of a worker, got {micro}"
        todo = "choose another --micro-batch, or fewer workers"
        if saved and norm == "batch":  # its micro-batch must stay
            todo = "take fewer workers"
        raise InputError(f"{rule}; {todo}")
    return micro_batch


def _steps(start: Start) -> int:
    """The number of steps, 0 if the epochs or a budget of minutes give it: a run that has begun
    keeps the steps that its budget became."""
    settings = start.settings
    saved = start.saved
    if saved is None or not settings.budget_minutes:
        return settings.steps
    is_as_long = settings.epochs == saved.epochs
    is_same_budget = settings.budget_minutes == saved.budget_minutes
    if start.is_begun and is_as_long and is_same_budget:
        return saved.steps
    return 0


def _device(start: Start, gpus: Sequence[Gpu], workers: int) -> str:
    settings = start.settings
    device = pick_device(start.wanted("device"), settings.mode, gpus)
    if device == "cpu":
        return device
    if settings.engine == "itex":
        rule = f"--engine must be auto or stock on {device}, got itex, which computes on CPUs"
        raise InputError(f"{rule}; give --engine stock")
    if workers > 1:
        rule = "--device must be cpu for several workers"
        raise InputError(f"{rule}, got {device}; give --device cpu")
    return device


def _dtype(start: Start, host: Host, card: Optional[Gpu]) -> str:
    """The compute dtype, by itself the fastest of the host, or of its card."""
    dtype: Optional[str] = start.wanted("dtype")
    if dtype is not None:
        return dtype
    return host.best_dtype if card is None else best_dtype(card)


def _grids(
    start: Start, store: Store, of_run: Settings, card: Optional[Gpu]
) -> Tuple[Decided, int]:
    """The grids that the network sees, and the patches of a case. `of_run` are the settings with
    the decided network and micro-batch."""
    unet = of_run.unet
    stride = _coarse_stride(start, unet)
    extent = grid_size(store, extent=of_run.extent, multiple=1)
    grid = network_grid(extent, lowered(of_run.resolution, stride), unet.divisors)
    patches_per_case = 1
    if of_run.is_patch:
        grid, patches_per_case = _patches(start, of_run, grid, card)
    else:
        _refuse_patches(start)
    of_coarse = _coarse_grid(start, store, unet, grid, stride)
    if of_coarse == NO_GRID and of_run.resolution == 1:  # nothing follows from it
        stride = EVERY_AXIS
    return Decided(grid, of_coarse, stride), patches_per_case


def _patches(
    start: Start, of_run: Settings, extent: Shape3, card: Optional[Gpu]
) -> Tuple[Shape3, int]:
    """The patch, by itself the largest that fits the card, on a CPU the usual one; and the patches
    of a case, by itself as many as have its number of voxels. `of_run` are the settings with the
    decided network and micro-batch."""
    divisors = of_run.unet.divisors
    wanted = start.wanted("patch")
    if wanted is not None:
        patch = _within_padding(tuple(wanted), extent, of_run.unet.depth)
    elif card is not None:
        patch = largest_patch(card, job_of(of_run, extent, threads=1, cases=0))
    else:
        patch = planner.usual_patch(extent, divisors)
    planner.check_patch(patch, extent, divisors)
    count = start.wanted("patches_per_case")
    if count is None:
        count = max(round(math.prod(extent) / math.prod(patch)), 1)
    return patch, count


def _within_padding(patch: Tuple[int, ...], extent: Shape3, depth: int) -> Tuple[int, ...]:
    """The patch without what lies outside the volume but within the padding that halving every axis
    would need: it fits the volumes of a network that has no strides of its own."""
    factor = 2 ** (depth - 1)
    padded = [-(-side // factor) * factor for side in extent]
    if len(patch) != 3 or any(n > most for n, most in zip(patch, padded)):
        return patch  # which is refused
    return tuple(map(min, patch, extent))


def _cut_patch(start: Start, grid: Shape3) -> Dict[str, str]:
    """The reason why the patch, which is the grid, is not the one that was asked for, if so."""
    wanted = start.wanted("patch")
    if wanted is None or tuple(wanted) == grid:
        return {}
    return {"patch": f"patch {by(grid, ' x ')}: {by(wanted, ' x ')}, cut to the volumes"}


def _refuse_patches(start: Start) -> None:
    """Raise InputError for settings of patches, which mean nothing for whole volumes."""
    for name in OF_PATCHES:
        if name in start.chosen:
            rule = f"--{name.replace('_', '-')} must come with --mode patch, got mode whole"
            todo = "leave it out" if start.saved else "add that"
            raise InputError(f"{rule}; {todo}")


def _levels(start: Start, store: Store) -> Tuple[int, Strides, Dict[str, str]]:
    """The levels and the strides of the network, and why if no setting gives them: those of the run
    that is continued, or of the network whose weights are taken, or by nnU-Net's rules."""
    settings = start.settings
    depth = settings.unet.depth  # the chosen one, or the most of the recipe
    is_open = start.wanted("depth") is None
    strides: Optional[Strides] = start.wanted("strides")
    if strides is not None:
        return depth, strides, {}
    if start.saved is not None:
        saved = start.saved.unet
        if not is_open and saved.depth != depth:  # which is refused
            return depth, (), {}
        line = strides_line(saved.every_stride, "as the run was begun")
        return saved.depth, saved.strides, {"strides": line}
    if settings.init:
        source = network_of_init(settings.init)
        if source is None:  # of a file alone it is not known: earlier versions halved all axes
            source = dataclasses.replace(settings.unet, strides=())
        if is_open or source.depth == depth:
            line = strides_line(source.every_stride, f"those of --init {settings.init}")
            return source.depth, source.strides, {"strides": line}
    extent = grid_size(store, extent=settings.extent, multiple=1)
    patch: Optional[Shape3] = None
    if settings.is_patch:
        patch = shape3(start.wanted("patch") or USUAL_PATCH)
        extent = shape3(map(min, patch, extent))
    why: Dict[str, str] = {}
    if is_open:
        most = depth
        depth, reason = depth_of_store(store, settings.extent, most, patch)
        if depth < most:
            why["depth"] = depth_line(depth, reason)
    strides, reason = strides_of_store(store, extent, depth)
    every_stride = UNetConfig(depth=depth, strides=strides).every_stride
    why["strides"] = strides_line(every_stride, reason)
    return depth, strides, why


def _coarse_stride(start: Start, unet: UNetConfig) -> Shape3:
    """2 for each axis that coarse steps, and a resolution below 1, make coarser: those that the
    first level halves, unless they are given, or an earlier version began the run with others."""
    wanted = start.wanted("coarse_stride")
    if wanted is None:
        return unet.stride(0) if start.saved is None else start.saved.coarse_stride
    stride = shape3(wanted)
    if stride not in STRIDES:
        rule = "--coarse-stride must be 2 along one axis at least"
        raise InputError(f"{rule}, got {by(stride, ' ')}; leave it out")
    return stride


def _coarse_grid(
    start: Start, store: Store, unet: UNetConfig, grid: Shape3, stride: Shape3
) -> Shape3:
    """The grid of the coarse steps of a network, which halve the axes of `stride`; NO_GRID, which
    is no curriculum, if that would leave the deepest level fewer than two voxels along one of them,
    and by itself if the grid is so small that coarse steps do not pay."""
    settings = start.settings
    if settings.curriculum == "off":
        return NO_GRID
    extent = grid
    if not settings.is_patch:
        extent = grid_size(store, extent=settings.extent, multiple=1)
    coarse = coarse_grid(extent, stride, unet.divisors, settings.resolution)  # 1 of patches
    is_asked_for = settings.curriculum == "half"
    is_of_other_grid = start.saved is not None and start.saved.grid != grid
    if is_asked_for and not coarse.is_possible and not is_of_other_grid:  # refused by its name
        below = []
        for axis, step, divisor in zip("XYZ", stride, unet.divisors):
            if step == 2:
                below.append(f"{2 * divisor} along {axis}")
        rule = f"--curriculum must be off if half of {by(grid)} is below {' or '.join(below)}"
        todo = "leave it out"
        if not start.saved:
            todo += ", or choose a smaller --depth"
        got = f"got half, a grid of {by(coarse.grid)}"
        raise InputError(f"{rule}, {got}; {todo}")
    if coarse.is_taken or (is_asked_for and (coarse.is_possible or is_of_other_grid)):
        return coarse.grid
    return NO_GRID

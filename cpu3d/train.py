"""Train a 3D U-Net on the whole volumes of a store, or on patches of them.

    ./run.sh train --store store --run runs/first
    ./run.sh train --store store --run runs/flair --recipe paper-flair --epochs 25
    ./run.sh train --store store --run runs/patches --mode patch --patch 96 96 96
    ./run.sh train --store store --run runs/fold-2 --fold 2/5

The same command again continues a run that was cut off; a larger --epochs, or --steps, extends a finished one.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from rich.console import Console

from cpu3d import memory_plan
from cpu3d.atomic import writable_folder
from cpu3d.config import RunConfig, differences, load_config, save_config
from cpu3d.data.extent import grid_size
from cpu3d.data.folds import with_fold
from cpu3d.data.region import Shape3
from cpu3d.data.resolution import network_grid
from cpu3d.data.store import Store, check_names, open_store
from cpu3d.data.words import by
from cpu3d.errors import InputError
from cpu3d.host.apply import describe, engine_name, in_force, set_up
from cpu3d.host.gpu import Gpu, HostGpus, best_dtype, card_of, fits_memory, pick_device, why_no_card
from cpu3d.lock import locked
from cpu3d.patch_plan import check_patch, patch_of_card, patch_of_memory, patches_per_case, usual_patch
from cpu3d.recipes import RECIPES
from cpu3d.run_log import read_events
from cpu3d.training_options import SIZES_OF_PATCH, add_training_options, chosen_settings, with_settings
from memory_estimator.estimate import Estimate
from memory_estimator.gpu import patch_shapes
from memory_estimator.host import Host, read_host


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", required=True, metavar="DIR", help="store that `prepare` has written")
    parser.add_argument("--run", required=True, metavar="DIR", help="folder for the run; continued where it exists")
    parser.add_argument("--force", action="store_true", help="train although it may not fit the memory that is free")
    add_training_options(parser)


def run(args: argparse.Namespace) -> int:
    settings = chosen_settings(args)
    train(Path(args.store), Path(args.run), settings=settings, recipe=args.recipe, force=args.force)
    return 0


def train(
    store_folder: Path,
    run_folder: Path,
    *,
    settings: Optional[Dict[str, Any]] = None,
    recipe: Optional[str] = None,
    force: bool = False,
) -> RunConfig:
    """Train, or continue, the run in `run_folder` on the store in `store_folder`; returns the run's configuration.

    Leaves config.json, log.jsonl, checkpoints/{last,best}.npz and tensorboard/ in the run folder. SIGINT and SIGTERM
    finish the step, save, and raise KeyboardInterrupt. Before anything is written it raises InputError for bad settings
    and, unless `force`, DoesNotFitError for a run that the free memory may not hold; a finished run asks for none.
    """
    store = open_store(store_folder)
    store.check_split()
    host, gpus = read_host(), HostGpus()
    config = resolve(store, run_folder, host, settings or {}, recipe, gpus)
    store = with_fold(store, config.fold)
    saved = load_config(run_folder) if (run_folder / "config.json").is_file() else None
    if config.device == "cpu":
        _say(*why_no_card((settings or {}).get("device", saved.device if saved else "auto"), config.mode, gpus))
    pick = (settings or {}).get("policy", saved.unet.policy if saved else "auto") == "auto"
    volumes = memory_plan.volumes_of(config, store)
    config, foreseen = _foresee(config, host, store, volumes, pick=pick, force=force)

    def check_fits() -> None:
        if not force:
            goes_on = saved is not None
            memory_plan.check_card(config, gpus, continued=goes_on)
            memory_plan.check_fits(foreseen, host, _other_grids(store, config), volumes, continued=goes_on)

    if saved is None:
        check_fits()
    _, threads, tf = set_up(config.engine, config.device)
    engine = engine_name(tf)

    from cpu3d.fit import Fit  # imports TensorFlow, so not before the host is set up

    writable_folder(run_folder, "run")
    with locked(run_folder, "run"), fits_memory("a training step", _smaller(config)):
        (run_folder / "checkpoints").mkdir(exist_ok=True)
        fit = Fit(store, run_folder, config)
        if saved is not None and not fit.is_over:  # one that is over takes no memory any more
            check_fits()
        save_config(config, run_folder)
        _say(*describe(host, threads, engine), *fit.plan(), *_changes(run_folder, engine, saved, config))
        if fit.is_over:
            fit.note_end()
            _say(f"nothing to do after step {fit.step}; a larger {fit.longer} goes on")
        else:
            on_cpu = config.device == "cpu"
            predicted = memory_plan.for_log(foreseen) if on_cpu else memory_plan.card_for_log(config)
            fit.log_start(host, engine, in_force(threads), predicted)
            fit.run()
    return config


def resolve(
    store: Store,
    run_folder: Path,
    host: Host,
    settings: Dict[str, Any],
    recipe: Optional[str],
    gpus: Sequence[Gpu] = (),
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
        if saved and saved.mode != config.mode:
            raise InputError(*differences(saved, config))
        view = with_fold(store, config.fold)
        config = _for_store(config, view)
        config = _for_host(config, saved, host, settings, gpus)
        if saved and "micro_batch" not in settings and saved.batch == config.batch:
            config = dataclasses.replace(config, micro_batch=saved.micro_batch)
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

_console = Console(stderr=True)


def _say(*lines: str) -> None:
    for line in lines:
        _console.print(line, highlight=False, markup=False, soft_wrap=True)


def _foresee(
    config: RunConfig,
    host: Host,
    store: Store,
    volumes: Optional[memory_plan.Volumes],
    *,
    pick: bool,
    force: bool,
) -> Tuple[RunConfig, Optional[Estimate]]:
    """The run with its policy, picked where that was left open, and the plan, which is said too.

    Without a calibration that can be read `force` trains all the same.
    """
    if config.device != "cpu":
        _say(*memory_plan.describe_card(config))
        return memory_plan.under(config, "speed") if pick else config, None
    cases = len(store.cases("train")) * config.patches_per_case
    try:
        config, why = memory_plan.pick_policy(config, host, cases, volumes) if pick else (config, "")
        foreseen = memory_plan.foresee(config, host, cases, volumes)
    except InputError as error:
        if not force:
            raise InputError(f"{error}; or --force") from None
        _say(f"plan: none, {error}")
        return config, None
    _say(*memory_plan.describe(foreseen, host), *([f"plan: {why}"] if why else []))
    return config, foreseen


def _smaller(config: RunConfig) -> str:
    """What to do where a step has run out of memory. A run that continues keeps its grid."""
    if config.is_patch:
        return "train into another folder with a smaller --patch, or with less --gpu-memory"
    return "take --policy lean, or train into another folder with fewer --filters"


def _other_grids(store: Store, config: RunConfig) -> List[Tuple[str, Shape3]]:
    """Smaller grids that the run could have, each with its option, the largest first."""
    if config.is_patch:
        *smaller, _ = patch_shapes(config.grid, config.unet.divisor)
        return [(f"--patch {by(shape, ' ')}", shape) for shape in reversed(smaller)]
    brain = grid_size(store, extent="brain", multiple=config.unet.divisor)
    smaller = config.resolution == 1 and config.extent == "full" and brain != config.grid
    return [("--extent brain", brain)] if smaller else []


def _changes(run_folder: Path, engine: str, saved: Optional[RunConfig], config: RunConfig) -> List[str]:
    """A line of warning where the run was computed in another way before."""
    engines = [event["engine"] for event in read_events(run_folder) if event.get("event") == "start"]
    before = []
    if engines and engines[-1] != engine:
        before.append(f"on {engines[-1]}")
    if saved and saved.unet.policy != config.unet.policy:
        before.append(f"under policy {saved.unet.policy}")
    if saved and saved.device != config.device:
        before.append(f"on device {saved.device}")
    if saved and saved.micro != config.micro:
        before.append(f"in micro-batches of {saved.micro}")
    return [f"note: this run was {', '.join(before)} before, so it goes on alike but not to the bit"] if before else []


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

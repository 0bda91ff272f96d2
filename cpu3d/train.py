"""Train a 3D U-Net on the whole volumes of a store, or on patches of them.

    ./run.sh train --store store --run runs/first
    ./run.sh train --store store --run runs/flair --recipe paper-flair --epochs 25
    ./run.sh train --store store --run runs/patches --mode patch --patch 96 96 96
    ./run.sh train --store store --run runs/fold-2 --fold 2/5

The same command again continues a run that was cut off; a longer --epochs extends a finished one.
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
from cpu3d.errors import InputError
from cpu3d.host.apply import describe, engine_name, in_force, set_up
from cpu3d.host.gpu import Gpu, best_dtype, card_of, pick_device, read_gpus, use_device
from cpu3d.lock import locked
from cpu3d.patch_plan import check_patch, patch_of_card, patches_per_case, usual_patch
from cpu3d.recipes import RECIPES
from cpu3d.run_log import read_events
from cpu3d.training_options import SIZES_OF_PATCH, add_training_options, chosen_settings, with_settings
from memory_estimator.estimate import Estimate
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
    host, gpus = read_host(), read_gpus()
    config = resolve(store, run_folder, host, settings or {}, recipe, gpus)
    store = with_fold(store, config.fold)
    saved = load_config(run_folder) if (run_folder / "config.json").is_file() else None
    pick = (settings or {}).get("policy", saved.unet.policy if saved else "auto") == "auto"
    config, foreseen = _foresee(config, host, store, pick=pick, force=force)

    def check_fits() -> None:
        if not force:
            memory_plan.check_card(config, gpus)
            memory_plan.check_fits(foreseen, host, _other_grids(store, config), continued=saved is not None)

    if saved is None:
        check_fits()
    _, threads, tf = set_up(config.engine)
    use_device(tf, config.device)
    engine = engine_name(tf)

    from cpu3d.fit import Fit  # imports TensorFlow, so not before the host is set up

    writable_folder(run_folder, "run")
    with locked(run_folder, "run"):
        (run_folder / "checkpoints").mkdir(exist_ok=True)
        fit = Fit(store, run_folder, config)
        if saved is not None and not fit.is_over:  # one that is over takes no memory any more
            check_fits()
        save_config(config, run_folder)
        _say(*describe(host, threads, engine), *fit.plan(), *_changes(run_folder, engine, saved, config))
        if fit.is_over:
            _say(f"nothing to do after step {fit.step}; a larger --epochs goes on")
        else:
            fit.log_start(host, engine, in_force(threads), memory_plan.for_log(foreseen))
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

    How a saved run computes its steps, in dtype, policy and micro-batch, only a setting changes, no recipe. A new run's
    policy is left for `train` to pick by memory. Raises InputError when the settings do not suit the store, or when a
    saved run cannot continue under them.
    """
    saved = load_config(run_folder) if (run_folder / "config.json").is_file() else None
    start = saved if saved is not None and recipe is None else RECIPES[recipe or "brats-regions"]()
    if saved and "micro_batch" not in settings:
        start = dataclasses.replace(start, micro_batch=0)  # it is the saved one again where the batch is, below
    try:
        config = with_settings(start, settings)
        config = _for_store(config, with_fold(store, config.fold))
        config = _for_host(config, saved, host, settings, gpus)
        if saved and "micro_batch" not in settings and saved.batch == config.batch:
            config = dataclasses.replace(config, micro_batch=saved.micro_batch)
        config = _with_grid(config, saved, store, settings, gpus)
    except ValueError as error:
        raise InputError(str(error)) from None
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
    config: RunConfig, host: Host, store: Store, *, pick: bool, force: bool
) -> Tuple[RunConfig, Optional[Estimate]]:
    """The run with its policy, picked where that was left open, and the plan, which is said too.

    Without a calibration that can be read `force` trains all the same.
    """
    if config.device != "cpu":
        _say(*memory_plan.describe_card(config))
        return memory_plan.under(config, "speed") if pick else config, None
    cases = len(store.cases("train")) * config.patches_per_case
    volume = grid_size(store, extent=config.extent, multiple=1) if config.is_patch else None
    try:
        config, why = memory_plan.pick_policy(config, host, cases) if pick else (config, "")
        foreseen = memory_plan.foresee(config, host, cases, volume)
    except InputError as error:
        if not force:
            raise InputError(f"{error}; or --force") from None
        _say(f"plan: none, {error}")
        return config, None
    _say(*memory_plan.describe(foreseen, host), *([f"plan: {why}"] if why else []))
    return config, foreseen


def _free_memory(device: str, gpus: Sequence[Gpu]) -> str:
    free_bytes = card_of(device, gpus).free_bytes
    if free_bytes is None:
        raise InputError(
            f"the memory of {device} must be known, its driver is silent; give --gpu-memory or --patch"
        )
    return f"{free_bytes}B"


def _other_grids(store: Store, config: RunConfig) -> List[Tuple[str, Shape3]]:
    """The grid that the store gives at the other extent, with the option for it, where it is smaller."""
    brain = grid_size(store, extent="brain", multiple=config.unet.divisor)
    smaller = config.mode == "whole" and config.resolution == 1 and config.extent == "full" and brain != config.grid
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
    cases = len(manifest.split["train"])
    if config.batch > cases:
        raise InputError(f"batch must be at most the {cases} training cases, got {config.batch}; lower it")
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
    own = config.device if saved or config.device != "cpu" else "auto"
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
    grid = grid_size(store, extent=config.extent, multiple=config.unet.divisor)
    if not config.is_patch:
        odd = [name for name in (*SIZES_OF_PATCH, "patches_per_case", "foreground") if name in settings]
        if odd:
            raise InputError(f"--{odd[0].replace('_', '-')} must come with --mode patch, got mode whole; add it")
        seen = network_grid(grid, config.resolution, config.unet.divisor)
        return dataclasses.replace(config, grid=seen, patches_per_case=1)
    if "patch" in settings:
        patch = tuple(settings["patch"])
    elif "gpu_memory" in settings or (saved is None and config.device != "cpu"):
        whole = memory_plan.job_of(dataclasses.replace(config, grid=grid, engine="stock"), threads=1, cases=0)
        patch = patch_of_card(whole, settings.get("gpu_memory") or _free_memory(config.device, gpus))
    else:
        patch = saved.grid if saved and saved.is_patch else usual_patch(grid)
    check_patch(patch, grid, config.unet)
    count = settings.get("patches_per_case") or (saved.patches_per_case if saved else patches_per_case(grid, patch))
    return dataclasses.replace(config, grid=patch, patches_per_case=count)

"""Whole volumes in one pass against a sliding window over them, with the same network: time, memory, Dice, seams.

    ./run.sh bench windows --run runs/first
    ./run.sh bench windows --run runs/first --window 64 64 64 --window 128 128 128 --overlap 0 0.5 --picture windows.png
    ./run.sh bench windows --run runs/first --split val --case BRATS_007 --record records/windows.jsonl

Each way in a fresh process, in turn, round by round; a case's seconds are from its image in memory to its
probabilities. The difference between a window's probabilities and those of one pass is taken over the brain, by the
distance to the nearest border of a tile: without overlap that shows the seams, with overlap what blending leaves of
them. The probabilities lie in the run folder while this runs, 110 MB a case and way of a BraTS grid.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
from rich.console import Console

from cpu3d.bench.record import append_record
from cpu3d.bench.step import ProcessFailedError
from cpu3d.bench.tile_borders import border_distance, by_distance, figures
from cpu3d.bench.windows_table import ONE_PASS, title_of, windows_table
from cpu3d.bench.windows_work import in_fresh_process
from cpu3d.config import RunConfig, load_config
from cpu3d.data.extent import grid_size
from cpu3d.data.labels import label_from_regions, region_mask
from cpu3d.data.patches import OVERLAP, patch_grid
from cpu3d.data.records import SPLITS
from cpu3d.data.region import Region, Shape3, crop, whole
from cpu3d.data.store import Store
from cpu3d.errors import InputError
from cpu3d.host.gpu import CPU, HostGpus, pick_device
from cpu3d.inference.evaluate import UNTOUCHED, check_finite
from cpu3d.inference.options import Inference
from cpu3d.inference.predictors import store_of_run
from cpu3d.inference.scores import dice_coefficient
from cpu3d.patch_plan import usual_patch
from cpu3d.training.checkpoint_history import weights_file
from cpu3d.util.atomic import atomic_write, writable_folder
from cpu3d.util.progress import bar

OVERLAPS = (0.0, OVERLAP)
"""Tiles side by side, whose seams show, and what is usual."""

OF_THE_HOST = ("engine_name", "threads", "host", "versions")
"""What one measurement says for all."""


@dataclass(frozen=True)
class Way:
    """One way to predict a volume."""

    name: str
    inference: Inference


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run folder written by train")
    parser.add_argument("--split", choices=SPLITS, default=UNTOUCHED, help="cases to predict (default: test)")
    parser.add_argument("--case", action="append", metavar="ID", help="only this one of them; repeatable")
    parser.add_argument("--store", type=Path, metavar="DIR", help="store folder, if it is no longer where it was")
    parser.add_argument("--weights", choices=("best", "last"), default="best", help="checkpoint (default: best)")
    parser.add_argument(
        "--window", type=int, nargs=3, action="append", metavar=("X", "Y", "Z"),
        help="voxels; repeatable (default: the run's patch, for a run on whole volumes 128 128 128 cut to them)",
    )  # fmt: skip
    parser.add_argument(
        "--overlap", type=float, nargs="+", default=OVERLAPS, metavar="S",
        help=f"shares of a window that the next one covers again, each measured (default: 0 {OVERLAP:g})",
    )  # fmt: skip
    parser.add_argument(
        "--device", default=CPU, metavar="D",
        help="of all ways: cpu, or gpu:0 (default: cpu; auto is that too, as one of them is one pass)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often, in turn (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append the result to a .jsonl file")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw differences, seconds and memory as PNG")


def run(args: argparse.Namespace) -> int:
    for path in (args.record, args.picture):
        if path:
            writable_folder(path.parent, "folder")
    run_dir = args.run.resolve()
    config = load_config(run_dir)
    device = pick_device(args.device, "whole", HostGpus())
    store = store_of_run(config, args.store)
    cases = _cases(store, args.split, args.case)
    ways = _ways(config, store, args.window, args.overlap)
    _check(run_dir, config, store, cases, args)
    result = compare_ways(run_dir, store, cases, ways, rounds=args.rounds, weights=args.weights, device=device)
    result["split"] = args.split
    if args.json:
        print(json.dumps(result))
    else:
        Console().print(windows_table(result))
    if args.record:
        append_record(args.record, "windows", result)
    if args.picture:
        from cpu3d.bench.windows_picture import draw_windows

        with atomic_write(args.picture) as file:
            file.write(draw_windows(result, title_of(result)))
    return 0


def compare_ways(
    run_dir: Path,
    store: Store,
    cases: Sequence[str],
    ways: Sequence[Way],
    *,
    rounds: int,
    weights: str = "best",
    device: str = CPU,
) -> Dict[str, Any]:
    """Predict `cases` in every way, `rounds` times in turn; the content of a record. The first way is the baseline.

    A row has the median over the rounds of its seconds a case, and of their ratio to the baseline's in the same round,
    the largest of its peaks, and of the first round its Dice by region and its difference from the baseline. A way that
    dies, as for want of memory, becomes a row with its reason. Raises ProcessFailedError where all of them do, and
    InputError where an answer is not finite.
    """
    config = load_config(run_dir)
    found: Dict[str, List[Optional[Dict[str, Any]]]] = {way.name: [] for way in ways}
    failures: Dict[str, ProcessFailedError] = {}
    # In the run folder: a folder for temporary files may be too small, or memory.
    with tempfile.TemporaryDirectory(prefix=".bench-windows-", dir=run_dir) as folder:
        answers = {way.name: Path(folder) / str(number) for number, way in enumerate(ways)}
        with bar("bench windows", total=rounds * len(ways)) as advance:
            for number in range(rounds):
                for way in ways:
                    request = {
                        "run": str(run_dir),
                        "store": str(store.folder.resolve()),
                        "weights": weights,
                        "cases": list(cases),
                        "inference": way.inference.to_json(),
                        "device": device,
                        "answers": None if number else str(answers[way.name]),
                    }
                    answers[way.name].mkdir(exist_ok=True)
                    found[way.name].append(None if way.name in failures else _measured(way, request, failures))
                    advance()
        measured = [one for results in found.values() for one in results if one]
        if not measured:
            raise next(iter(failures.values()))
        baseline = found[ways[0].name]
        rows = []
        for way in ways:
            row = _row(way, found[way.name], baseline, cases)
            row["error"] = failures[way.name].reason if way.name in failures else None
            if found[way.name][0]:
                row["dice"] = _dice(answers[way.name], store, cases, config)
                if way is not ways[0] and baseline[0]:
                    places = found[way.name][0]["cases"]
                    row["difference"] = _difference(answers, (ways[0], way), store, places, config)
            rows.append(row)
    return {
        "name": store.manifest.name,
        "cases": list(cases),
        "mode": config.mode,
        "extent": config.extent,
        "grid": list(config.grid),
        "unet": dataclasses.asdict(config.unet),
        "weights": weights,
        "device": device,
        "rounds": rounds,
        "rows": rows,
        **{name: measured[0][name] for name in OF_THE_HOST},
    }


# --- Private helpers ---


def _ways(
    config: RunConfig, store: Store, windows: Optional[Sequence[Sequence[int]]], overlaps: Sequence[float]
) -> List[Way]:
    """One pass, and every window with every overlap, each once. Raises InputError for what a network cannot take."""
    problems = []
    if not windows:
        grid = grid_size(store, extent=config.extent, multiple=config.unet.divisor)
        windows = [config.grid if config.is_patch else usual_patch(grid, config.unet.divisor)]
    ways = [Way(ONE_PASS, Inference(one_pass=True))]
    for window in map(tuple, windows):
        try:
            config.unet.check_shape(window, "--window")
        except ValueError as error:
            problems.append(str(error))
            continue
        for overlap in overlaps:
            name = f"{' x '.join(map(str, window))}, overlap {overlap:g}"
            ways.append(Way(name, Inference(window=window, overlap=overlap)))
    if problems:
        raise InputError(*problems)
    return list({way.name: way for way in ways}.values())


def _cases(store: Store, split: str, chosen: Optional[Sequence[str]]) -> List[str]:
    """The ids of the cases to predict. Raises InputError where there are none, or a chosen one is not among them."""
    there = [record.case_id for record in store.cases(split)]
    wanted = list(dict.fromkeys(chosen)) if chosen else there
    missing = [case_id for case_id in wanted if case_id not in there]
    if missing or not wanted:
        got = ", ".join(missing) or "none"
        raise InputError(f"cases must be in split {split} of {store.folder}, which has {len(there)}, got {got}")
    return wanted


def _check(run_dir: Path, config: RunConfig, store: Store, cases: Sequence[str], args: argparse.Namespace) -> None:
    """Raise InputError for what would only be found out in a process that was started for it."""
    problems = [
        f"case {case_id} must have a label, which its Dice is taken against, the store has none; choose another --case"
        for case_id in cases
        if not store.case(case_id).has_label
    ]
    if args.rounds < 1:
        problems.append(f"--rounds must be at least 1, got {args.rounds}; give a positive number")
    if config.resolution < 1:
        problems.append(f"run {run_dir} must be at full resolution, got {config.resolution:g}; name another run")
    try:
        weights_file(run_dir, args.weights)
    except InputError as error:
        problems.extend(error.problems)
    if problems:
        raise InputError(*problems)


def _measured(way: Way, request: Dict[str, Any], failures: Dict[str, ProcessFailedError]) -> Optional[Dict[str, Any]]:
    """A measurement; None where the process died, which is then among the failures."""
    try:
        return in_fresh_process(request)
    except ProcessFailedError as error:
        failures[way.name] = error
        return None


def _row(
    way: Way, results: List[Optional[Dict[str, Any]]], baseline: List[Optional[Dict[str, Any]]], cases: Sequence[str]
) -> Dict[str, Any]:
    """Time and memory; no Dice and no difference yet."""
    mean_s = lambda one: one and statistics.fmean(one["cases"][case_id]["seconds"] for case_id in cases)  # noqa: E731
    rounds = [mean_s(one) for one in results]
    seconds = [one for one in rounds if one]
    ratios = [one / base for one, base in zip(rounds, map(mean_s, baseline)) if one and base]
    peaks = {
        name: max((one[name] for one in results if one and one[name] is not None), default=None)
        for name in ("process_peak_bytes", "allocator_peak_bytes")
    }
    window = way.inference.window
    tiles = None
    if window and results[0]:
        sizes = [tuple(one["size"]) for one in results[0]["cases"].values()]
        tiles = statistics.fmean(len(_tiles(size, way.inference)) for size in sizes)
    return {
        "name": way.name,
        "window": window and list(window),
        "overlap": way.inference.overlap if window else None,
        "tiles": tiles,
        "seconds": statistics.median(seconds) if seconds else None,
        "seconds_min": min(seconds, default=None),
        "seconds_max": max(seconds, default=None),
        "ratio": statistics.median(ratios) if ratios else None,
        **peaks,
        "rounds": rounds,
        "dice": None,
        "difference": None,
    }


def _tiles(size: Shape3, inference: Inference) -> Tuple[Region, ...]:
    """The tiles of a region of `size`, counted from its first voxel."""
    return patch_grid(whole(size), inference.window, inference.overlap)


def _dice(folder: Path, store: Store, cases: Sequence[str], config: RunConfig) -> Dict[str, float]:
    """Mean over the cases by region, of the painted labels, as `evaluate` scores them."""
    regions = {name: config.region_codes[name] for name in config.regions}
    scores: Dict[str, List[float]] = {name: [] for name in regions}
    for case_id in cases:
        answers = _answers(folder, case_id)
        check_finite(answers, case_id)
        label, truth = label_from_regions(answers, regions), np.asarray(store.label(case_id))
        for name, codes in regions.items():
            scores[name].append(dice_coefficient(region_mask(truth, codes), region_mask(label, codes)))
    return {name: statistics.fmean(values) for name, values in scores.items()}


def _difference(
    answers: Dict[str, Path], pair: Tuple[Way, Way], store: Store, places: Dict[str, Any], config: RunConfig
) -> Dict[str, Any]:
    """How far two ways are apart over the brains of all cases, in all and by distance to the second's tile borders.

    Takes 4 bytes a brain voxel and region, 20 MB for a BraTS case of three regions.
    """
    regions = {name: config.region_codes[name] for name in config.regions}
    distances, differences, changed = [], [], 0
    for case_id, place in places.items():
        region = Region(tuple(place["start"]), tuple(place["size"]))
        brain = crop(np.asarray(store.image(case_id)).any(axis=-1), region)
        one, other = (crop(_answers(answers[way.name], case_id), region)[brain] for way in pair)
        distances.append(border_distance(region.size, _tiles(region.size, pair[1].inference))[brain])
        differences.append(np.abs(other - one))
        labels = [label_from_regions(each[:, None, None], regions) for each in (one, other)]
        changed += np.count_nonzero(labels[0] != labels[1])
    distance, difference = np.concatenate(distances), np.concatenate(differences)
    return {
        **figures(difference),
        "voxels": len(distance),
        "changed_share": changed / len(distance),
        "by_distance": by_distance(distance, difference),
    }


def _answers(folder: Path, case_id: str) -> np.ndarray:
    return np.load(folder / f"{case_id}.npy", mmap_mode="r", allow_pickle=False)

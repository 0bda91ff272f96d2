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
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np

from cpu3d.bench.harness import (
    HOST_FACTS,
    Output,
    Result,
    draw_bars,
    in_turn,
    last_json_line,
    read_options,
    summary,
    times,
    with_range,
)
from cpu3d.config import RunConfig, load_config
from cpu3d.data.labels import label_from_regions, region_mask
from cpu3d.data.records import SPLITS
from cpu3d.data.region import Region, Shape3, crop, grid_size, whole
from cpu3d.data.sampling import OVERLAP, patch_grid
from cpu3d.data.store import Store, open_store
from cpu3d.errors import InputError
from cpu3d.host.apply import engine_name, in_force, set_up
from cpu3d.host.gpu import CPU, HostGpus, memory_device, pick_device
from cpu3d.host.memory import peak_rss_bytes
from cpu3d.inference.options import Inference
from cpu3d.inference.predictors import store_of_run, trained_predictor
from cpu3d.patch_plan import usual_patch
from cpu3d.training.checkpoint_history import weights_file
from cpu3d.util.versions import versions
from memory_estimator.figure import PALETTE, new_figure, plain, png
from memory_estimator.schema import add_options, option
from memory_estimator.table import Table
from memory_estimator.units import GIB

ONE_PASS = "one pass"
"""The way that all others are measured against."""

DISTANCES = (0, 1, 2, 4, 8, 16, 32, 64)
"""Voxels to a border that get a row."""

LEAST = 1e-6
"""The logarithmic axis ends here: a smaller difference of probabilities is rounding."""

FEW = 100
"""Of fewer voxels than this no 99th percentile is drawn."""


@dataclass(frozen=True)
class WindowOptions:
    """Which network predicts which cases, in which ways."""

    run: Path = option(help="run folder written by train", metavar="DIR")
    split: str = option("test", "cases to predict", choices=SPLITS)
    case: Tuple[str, ...] = option((), "only this one of them; repeatable", metavar="ID", repeat=True)
    store: Optional[Path] = option(None, "store folder, if it is no longer where it was", metavar="DIR")
    weights: str = option("best", "checkpoint", choices=("best", "last"))
    window: Tuple[Tuple[int, int, int], ...] = option(
        (), "voxels; repeatable (default: the run's patch, for a run on whole volumes 128 128 128 cut to them)",
        metavar=("X", "Y", "Z"), repeat=True,
    )  # fmt: skip
    overlap: Tuple[float, ...] = option(
        (0.0, OVERLAP), "shares of a window that the next one covers again, each measured", metavar="S"
    )
    device: str = option(CPU, "of all ways: cpu, or gpu:0 (default: cpu; auto is that too)", metavar="D")
    rounds: int = option(3, "how often, in turn", at_least=1, metavar="N")


@dataclass(frozen=True)
class Way:
    """One way to predict a volume."""

    name: str
    inference: Inference


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, WindowOptions)
    add_options(parser, Output)


def run(args: argparse.Namespace) -> int:
    output, options = read_options(Output, args), read_options(WindowOptions, args)
    run_dir = options.run.resolve()
    config = load_config(run_dir)
    device = pick_device(options.device, "whole", HostGpus())
    store = store_of_run(config, options.store)
    cases = _cases(store, options.split, options.case)
    ways = _ways(config, store, options.window, options.overlap)
    _check(run_dir, config, store, cases, options.weights)
    result = compare_ways(run_dir, store, cases, ways, rounds=options.rounds, weights=options.weights, device=device)
    result["split"] = options.split
    output.publish("windows", result, windows_table(result), lambda: draw_windows(result))
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
) -> Result:
    """Predict `cases` in every way, `rounds` times in turn; the content of a record. The first way is the baseline.

    A row has the median over the rounds of its seconds a case, and of their ratio to the baseline's in the same round,
    the largest of its peaks, and of the first round its Dice by region and its difference from the baseline. A way that
    dies, as for want of memory, becomes a row with its reason. Raises ProcessFailedError where all of them do, and
    InputError where an answer is not finite.
    """
    config = load_config(run_dir)
    request = {"run": str(run_dir), "store": str(store.folder.resolve()), "weights": weights, "device": device}
    # In the run folder: a folder for temporary files may be too small, or memory.
    with tempfile.TemporaryDirectory(prefix=".bench-windows-", dir=run_dir) as folder:
        answers = {way.name: Path(folder) / str(number) for number, way in enumerate(ways)}

        def measure(way: Way, number: int) -> Result:
            answers[way.name].mkdir(exist_ok=True)
            own = {"inference": way.inference.to_json(), "answers": None if number else str(answers[way.name])}
            result = in_fresh_process({**request, "cases": list(cases), **own})
            return {**result, "seconds": statistics.fmean(one["seconds"] for one in result["cases"].values())}

        turns = {way.name: lambda number, way=way: measure(way, number) for way in ways}
        found, failures = in_turn(turns, rounds, "windows")
        baseline, rows = found[ways[0].name], []
        for way in ways:
            results, window = found[way.name], way.inference.window
            places = results[0]["cases"] if results[0] else {}
            tiles = [len(_tiles(tuple(one["size"]), way.inference)) for one in places.values() if window]
            compared = bool(places) and way is not ways[0] and bool(baseline[0])
            rows.append({
                "name": way.name,
                "window": window and list(window),
                "overlap": way.inference.overlap if window else None,
                "tiles": statistics.fmean(tiles) if tiles else None,
                **summary(results, baseline, "seconds"),
                "rounds": [one and one["seconds"] for one in results],
                "error": failures[way.name].reason if way.name in failures else None,
                "dice": _dice(answers[way.name], store, cases, config) if places else None,
                "difference": _difference(answers, (ways[0], way), store, places, config) if compared else None,
            })  # fmt: skip
    facts = next(one for results in found.values() for one in results if one)
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
        **{name: facts[name] for name in HOST_FACTS},
    }


# --- What is shown ---


def windows_table(record: Result) -> Table:
    """What each way takes, and how far it is off one pass: mean (99th percentile)."""
    rows, regions = [], next((list(row["dice"]) for row in record["rows"] if row["dice"]), [])
    for row in record["rows"]:
        dice, difference = row["dice"], row["difference"]
        cells = ["-" if row["tiles"] is None else f"{row['tiles']:g}", "died", *["-"] * 6]
        if not row["error"]:
            ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
            peak = f"{row['process_peak_bytes'] / GIB:.2f}"
            cells[1:5] = with_range(row, "seconds"), ratio, peak, "-"
            if dice:
                cells[4] = ", ".join(f"{value:.3f}" for value in dice.values())
            if difference:
                border = next((one for one in difference["by_distance"] if one["distance"] == 0), None)
                at_border = _mean_and_p99(border) if border else "none"
                cells[5:] = _mean_and_p99(difference), at_border, f"{difference['changed_share']:.2%}"
        rows.append([row["name"], *cells])
    columns = (
        "", "windows", "s a case", f"against {ONE_PASS}", "process peak, GiB", f"Dice {', '.join(regions)}",
        "difference", "at a border", "labels changed",
    )  # fmt: skip
    host = record["host"]
    title = (
        f"{title_of(record)}; {record['engine_name']}, {host['cores']} cores of {host['cpu']}, median of "
        f"{record['rounds']} round{'s' * (record['rounds'] != 1)} in turn (least to most). The difference is that of "
        f"the probabilities from {ONE_PASS}, over the brain: mean (99th percentile)."
    )
    died = "\n".join(f"{row['name']}: {row['error']}." for row in record["rows"] if row["error"])
    return Table(columns, rows, title=title, caption=died)


def distances_table(record: Result) -> Optional[Table]:
    """The difference by distance to a tile border; None where no way has a border inside a volume."""
    rows = [row for row in record["rows"] if row["difference"]]
    found = [{one["distance"]: one for one in row["difference"]["by_distance"]} for row in rows]
    # Without a border all is one distance, that of no border at all.
    found = [places if 0 in places else {} for places in found]
    lines = [
        [str(distance), *(_mean_and_p99(places[distance]) if distance in places else "-" for places in found)]
        for distance in DISTANCES
        if any(distance in places for places in found)
    ]
    return Table(("voxels to a border", *(row["name"] for row in rows)), lines) if lines else None


def draw_windows(record: Result) -> bytes:
    """Difference over distance on the left, seconds and memory of all ways on the right, as PNG."""
    rows = record["rows"]
    colours = ["#888888", *(PALETTE[number % len(PALETTE)] for number in range(len(rows) - 1))]
    figure = new_figure(11.2, max(3.4, 0.42 * len(rows) + 1.9))
    curves, seconds, memory = figure.subplots(1, 3, gridspec_kw={"width_ratios": (5, 3, 3)})
    plain(curves, "")
    for row, colour in zip(rows, colours):
        places = [one for one in (row["difference"] or {}).get("by_distance", ()) if one["voxels"] >= FEW]
        for name, style in (("mean", "-"), ("p99", "--")) if len(places) > 1 else ():
            curves.plot(
                [one["distance"] for one in places], [max(one[name], LEAST) for one in places], style, color=colour,
                linewidth=1.6, label=row["name"] if name == "mean" else None,
            )  # fmt: skip
    curves.set_yscale("log")
    curves.set_xlabel("voxels to the nearest tile border", fontsize=9)
    curves.set_ylabel("difference of probabilities from one pass", fontsize=9)
    curves.plot([], [], "--", color="#444444", linewidth=1.2, label="99th percentile")
    curves.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=2)
    names = [row["name"].replace(", ", "\n") for row in rows]
    draw_bars(seconds, [row["seconds"] for row in rows], "seconds a case", names=names, colours=colours)
    peaks = [row["process_peak_bytes"] and row["process_peak_bytes"] / GIB for row in rows]
    draw_bars(memory, peaks, "process peak, GiB", colours=colours)
    figure.suptitle(title_of(record), fontsize=10, fontweight="bold", x=0.01, ha="left")
    figure.tight_layout(pad=0.6, w_pad=1.4, rect=(0, 0, 1, 0.98))
    return png(figure)


def device_of(record: Result) -> str:
    """The device of a record; those from before there was a choice are of the CPU."""
    return record.get("device", CPU)


def title_of(record: Result) -> str:
    """Cases, network and device in one line."""
    unet, grid, count = record["unet"], times(record["grid"]), len(record["cases"])
    trained = f"patches of {grid}" if record["mode"] == "patch" else f"whole volumes, {grid}"
    return (
        f"{count} case{'s' * (count != 1)} of {record['name']}, a network trained on {trained}: "
        f"{unet['depth']} levels, {unet['filters']} filters, {unet['dtype']}"
        f"{'' if device_of(record) == CPU else f', on {device_of(record)}'}"
    )


# --- Distances to tile borders ---


def border_distance(shape: Shape3, tiles: Sequence[Region]) -> np.ndarray:
    """Voxels between each voxel of a volume and the nearest border of a tile: int16 (X, Y, Z), 0 right at a border.

    A border is a plane between two voxels, where a tile begins or ends inside the volume; the volume's own outer faces
    are none. Tiles are those of a grid, `sampling.patch_grid`, so that each plane cuts the whole volume; they
    may reach outside of it. Without any plane, as under a single tile, all are as far away as the longest side.
    """
    along = []
    for axis, length in enumerate(shape):
        voxels, nearest = np.arange(length), np.full(length, max(shape), np.int16)
        for plane in {edge for tile in tiles for edge in (tile.start[axis], tile.stop[axis]) if 0 < edge < length}:
            # Of voxels plane - 1 and plane, on its two sides, each is 0 away.
            nearest = np.minimum(nearest, np.where(voxels < plane, plane - 1 - voxels, voxels - plane))
        along.append(nearest.astype(np.int16))
    return np.minimum(np.minimum(along[0][:, None, None], along[1][None, :, None]), along[2][None, None, :])


def by_distance(distance: np.ndarray, difference: np.ndarray) -> List[Dict[str, Union[int, float]]]:
    """For every distance that occurs the voxels there and the mean, 99th percentile and maximum of their differences.

    `distance` is (N), of N voxels; `difference` (N, R) has R values of each, which count alike.
    """
    order = np.argsort(distance, kind="stable")
    values, first = np.unique(distance[order], return_index=True)
    groups = np.split(difference[order], first[1:])
    return [{"distance": int(value), "voxels": len(group), **figures(group)} for value, group in zip(values, groups)]


def figures(difference: np.ndarray) -> Dict[str, float]:
    """Mean, 99th percentile and maximum of differences. Raises ValueError for none."""
    return {
        "mean": float(difference.mean(dtype=np.float64)),
        "p99": float(np.percentile(difference, 99)),
        "max": float(difference.max()),
    }


# --- In the measuring process ---


def in_fresh_process(request: Dict[str, Any]) -> Result:
    """`work(request)` in a new process. Raises ProcessFailedError where that dies."""
    return last_json_line([sys.executable, "-m", "cpu3d.bench.windows", json.dumps(request)], "bench windows")


def work(request: Dict[str, Any]) -> Result:
    """Seconds of each case, from its image to its probabilities, what was seen of it, and the process's peaks.

    `request` has run, weights, store, cases, inference (an `Inference` as JSON), device ("cpu" or a card) and answers,
    a folder for the probabilities as <case_id>.npy, or None. The first case is predicted once more before the clock
    runs: compiling for a shape is of the run, not of a case.
    """
    device, asked = request["device"], request["inference"]
    host, plan, tf = set_up(device=device)
    window = asked["window"] and tuple(asked["window"])
    predictor = trained_predictor(
        Path(request["run"]), request["weights"], Inference(**{**asked, "window": window, "device": device})
    )
    store, cases = open_store(request["store"]), {}
    first = request["cases"][0]
    predictor.probabilities(store.image(first), store.case(first))
    for case_id in request["cases"]:
        begin = time.perf_counter()
        answers = predictor.probabilities(store.image(case_id), store.case(case_id))
        seconds = time.perf_counter() - begin
        region = predictor.region(store.case(case_id))
        cases[case_id] = {"seconds": seconds, "start": region.start, "size": region.size}
        if request["answers"]:
            np.save(Path(request["answers"]) / f"{case_id}.npy", answers)
        del answers  # else it would lie beside the next one
    from cpu3d.training.learner import allocator_peak_bytes  # imports TensorFlow, so not before

    return {
        "cases": cases,
        "process_peak_bytes": peak_rss_bytes(),
        "allocator_peak_bytes": allocator_peak_bytes(memory_device(device)),
        "engine_name": engine_name(tf),
        "threads": in_force(plan),
        "host": host.summary(),
        "versions": versions(),
    }


# --- Private helpers ---


def _ways(config: RunConfig, store: Store, windows: Sequence[Sequence[int]], overlaps: Sequence[float]) -> List[Way]:
    """One pass, and every window with every overlap, each once. Raises InputError for what a network cannot take."""
    if not windows:
        grid = grid_size(store, extent=config.extent, multiple=config.unet.divisor)
        windows = [config.grid if config.is_patch else usual_patch(grid, config.unet.divisor)]
    ways = [Way(ONE_PASS, Inference(one_pass=True))]
    for window in map(tuple, windows):
        try:
            config.unet.check_shape(window, "--window")
        except ValueError as error:
            raise InputError(str(error)) from None
        for overlap in overlaps:
            ways.append(Way(f"{times(window)}, overlap {overlap:g}", Inference(window=window, overlap=overlap)))
    return list({way.name: way for way in ways}.values())


def _cases(store: Store, split: str, chosen: Sequence[str]) -> List[str]:
    """The ids of the cases to predict. Raises InputError where there are none, or a chosen one is not among them."""
    there = [record.case_id for record in store.cases(split)]
    wanted = list(dict.fromkeys(chosen)) or there
    missing = [case_id for case_id in wanted if case_id not in there]
    if missing or not wanted:
        got = ", ".join(missing) or "none"
        raise InputError(f"cases must be in split {split} of {store.folder}, which has {len(there)}, got {got}")
    return wanted


def _check(run_dir: Path, config: RunConfig, store: Store, cases: Sequence[str], weights: str) -> None:
    """Raise InputError for what would only be found out in a process that was started for it."""
    problems = [
        f"case {case_id} must have a label, which its Dice is taken against, the store has none; choose another --case"
        for case_id in cases
        if not store.case(case_id).has_label
    ]
    if config.resolution < 1:
        problems.append(f"run {run_dir} must be at full resolution, got {config.resolution:g}; name another run")
    try:
        weights_file(run_dir, weights)
    except InputError as error:
        problems.extend(error.problems)
    if problems:
        raise InputError(*problems)


def _tiles(size: Shape3, inference: Inference) -> Tuple[Region, ...]:
    """The tiles of a region of `size`, counted from its first voxel."""
    return patch_grid(whole(size), inference.window, inference.overlap)


def _dice(folder: Path, store: Store, cases: Sequence[str], config: RunConfig) -> Dict[str, float]:
    """Mean over the cases by region, of the painted labels, as `evaluate` scores them."""
    from cpu3d.inference.evaluate import check_finite  # 20 MiB, not into the memory of a measuring process
    from cpu3d.inference.scores import dice_coefficient

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
) -> Result:
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


def _mean_and_p99(difference: Result) -> str:
    """Such as "0.0021 (0.035)"."""
    return f"{difference['mean']:.2g} ({difference['p99']:.2g})"


if __name__ == "__main__":
    print(json.dumps(work(json.loads(sys.argv[1]))))

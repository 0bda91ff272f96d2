"""Whole volumes in one pass against a sliding window over them, with the same network: time, memory, Dice.

    ./run.sh bench windows --run runs/first
    ./run.sh bench windows --run runs/first --window 64 64 64 --window 128 128 128 --overlap 0 0.5 --rounds 3
    ./run.sh bench windows --run runs/first --split val --case BRATS_007 --record records/windows.jsonl

Each way in a fresh process, in turn, round by round; a case's seconds are from its image in memory to its
probabilities. The difference between a window's probabilities and those of one pass is taken over the brain. The
probabilities lie in the run folder while this runs, 110 MB a case and way of a BraTS grid.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.bench.harness import (
    HOST_FACTS,
    Output,
    Result,
    deaths,
    facts_of,
    host_of,
    in_fresh_process,
    in_turn,
    summary,
    valid,
    with_range,
)
from cpu3d.bench.harness import times as by_times
from cpu3d.data.labels import label_from_regions, region_mask
from cpu3d.data.records import SPLITS
from cpu3d.data.region import Region, Shape3, crop, grid_size, whole
from cpu3d.data.sampling import OVERLAP, patch_grid
from cpu3d.data.store import Store, open_store
from cpu3d.errors import InputError
from cpu3d.host.apply import set_up
from cpu3d.host.gpu import CPU, HostGpus, memory_device, pick_device
from cpu3d.inference.runs import Inference, store_of_run, trained_predictor
from cpu3d.plan import usual_patch
from cpu3d.settings import RunConfig, load_config
from cpu3d.training.checkpoint import weights_file
from memory_estimator.schema import add_options, from_args, option
from memory_estimator.table import Table
from memory_estimator.units import GIB, count_of

HELP = "measure one pass against a sliding window with the same network: time, memory, Dice"

Codes = Mapping[str, Sequence[int]]
"""Region -> the labels that it is made of."""

ONE_PASS = "one pass"
"""The way that all others are measured against."""


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, WindowOptions)
    add_options(parser, Output, only=("json", "record"))


def run(args: argparse.Namespace) -> int:
    output, options = from_args(Output, args), from_args(WindowOptions, args)
    config = load_config(options.run.resolve())
    store = store_of_run(config, options.store)
    cases, device = _cases(store, options.split, options.case), pick_device(options.device, "whole", HostGpus())
    ways = _ways(config, store, options.window, options.overlap)
    if config.resolution < 1:
        raise InputError(f"run {options.run} must be at full resolution, got {config.resolution:g}; name another run")
    weights_file(options.run.resolve(), options.weights)  # there, or refused here
    request = {"run": str(options.run.resolve()), "weights": options.weights, "device": device}
    result = {**compare_ways(request, store, cases, ways, rounds=options.rounds), "split": options.split}
    output.publish("windows", result, [windows_table(result)])
    return 0


def compare_ways(
    request: Dict[str, str], store: Store, cases: Sequence[str], ways: Mapping[str, Inference], *, rounds: int
) -> Result:
    """Predict `cases` in every way, `rounds` times in turn; the content of a record. The first way is the baseline.

    A row has the median over the rounds of its seconds a case, and of their ratio to the baseline's in the same round,
    the largest of its peaks, and of the first round its Dice by region and its difference from the baseline. A way that
    dies, as for want of memory, becomes a row with its reason. Raises ProcessFailedError where all of them do, and
    InputError where an answer is not finite.
    """
    config, shared = load_config(Path(request["run"])), {**request, "store": str(store.folder.resolve())}
    # In the run folder: a folder for temporary files may be too small, or memory.
    with tempfile.TemporaryDirectory(prefix=".bench-windows-", dir=request["run"]) as folder:
        answers = {name: Path(folder) / str(number) for number, name in enumerate(ways)}

        def measure(name: str, number: int) -> Result:
            answers[name].mkdir(exist_ok=True)
            own = {"inference": ways[name].to_json(), "answers": None if number else str(answers[name])}
            result = in_fresh_process(predict_cases, {**shared, "cases": list(cases), **own})
            return {**result, "seconds": statistics.fmean(one["seconds"] for one in result["cases"].values())}

        found, failures = in_turn(
            {name: lambda number, name=name: measure(name, number) for name in ways}, rounds, "windows"
        )
        first, rows, regions = next(iter(ways)), [], {name: config.region_codes[name] for name in config.regions}
        for name, inference in ways.items():
            results, window = found[name], inference.window
            places = results[0]["cases"] if results[0] else {}
            grids = [whole(tuple(one["size"])) for one in places.values() if window]
            tiles = [len(patch_grid(grid, window, inference.overlap)) for grid in grids]
            compared = bool(places) and name != first and bool(found[first][0])
            pair = (answers[first], answers[name])
            rows.append({
                "name": name,
                "window": window and list(window),
                "overlap": inference.overlap if window else None,
                "tiles": statistics.fmean(tiles) if tiles else None,
                **summary(results, found[first], "seconds"),
                "rounds": [one and one["seconds"] for one in results],
                "error": failures[name].reason if name in failures else None,
                "dice": _dice(answers[name], store, cases, regions) if places else None,
                "difference": _difference(pair, store, places, regions) if compared else None,
            })  # fmt: skip
    facts = next(one for results in found.values() for one in results if one)
    return {
        "name": store.manifest.name,
        "cases": list(cases),
        **{name: getattr(config, name) for name in ("mode", "extent")},
        "grid": list(config.grid),
        "unet": dataclasses.asdict(config.unet),
        **{name: request[name] for name in ("weights", "device")},
        "rounds": rounds,
        "rows": rows,
        **{name: facts[name] for name in HOST_FACTS},
    }


def predict_cases(request: Dict[str, Any]) -> Result:
    """In the measuring process: seconds of each case, from its image to its probabilities, and the process's peaks.

    `request` has run, weights, store, cases, inference (an `Inference` as JSON), device ("cpu" or a card) and answers,
    a folder for the probabilities as <case_id>.npy, or None. The first case is predicted once more before the clock
    runs: compiling for a shape is of the run, not of a case.
    """
    device, asked = request["device"], request["inference"]
    host, plan, tf = set_up(device=device)
    inference = Inference(**{**asked, "window": asked["window"] and tuple(asked["window"]), "device": device})
    predictor = trained_predictor(Path(request["run"]), request["weights"], inference)
    store, cases = open_store(request["store"]), {}
    first = request["cases"][0]
    predictor.probabilities(store.image(first), store.case(first))
    for case_id in request["cases"]:
        begin = time.perf_counter()
        answers = predictor.probabilities(store.image(case_id), store.case(case_id))
        seconds, region = time.perf_counter() - begin, predictor.region(store.case(case_id))
        cases[case_id] = {"seconds": seconds, "start": region.start, "size": region.size}
        if request["answers"]:
            np.save(Path(request["answers"]) / f"{case_id}.npy", answers)
        del answers  # else it would lie beside the next one
    from cpu3d.training.learner import allocator_peak_bytes  # imports TensorFlow, so not before

    return {
        "cases": cases,
        "allocator_peak_bytes": allocator_peak_bytes(memory_device(device)),
        **facts_of(tf, plan, host),
    }


# --- Tables ---


def windows_table(record: Result) -> Table:
    """What each way takes, and how far it is off one pass: mean (99th percentile)."""
    rows, regions = [], next((list(row["dice"]) for row in record["rows"] if row["dice"]), [])
    for row in record["rows"]:
        difference, cells = row["difference"], ["died", *["-"] * 5]
        if not row["error"]:
            ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
            dice = ", ".join(f"{value:.3f}" for value in (row["dice"] or {}).values()) or "-"
            cells[:4] = with_range(row, "seconds"), ratio, f"{row['process_peak_bytes'] / GIB:.2f}", dice
        if difference:
            cells[4:] = f"{difference['mean']:.2g} ({difference['p99']:.2g})", f"{difference['changed_share']:.2%}"
        rows.append([row["name"], "-" if row["tiles"] is None else f"{row['tiles']:g}", *cells])
    columns = (
        "", "windows", "s a case", f"against {ONE_PASS}", "process peak, GiB", f"Dice {', '.join(regions)}",
        "difference", "labels changed",
    )  # fmt: skip
    unet, grid = record["unet"], by_times(record["grid"])
    trained = f"patches of {grid}" if record["mode"] == "patch" else f"whole volumes, {grid}"
    device = "" if record.get("device", CPU) == CPU else f", on {record['device']}"
    title = (
        f"{count_of(len(record['cases']), 'case')} of {record['name']}, a network trained on {trained}: "
        f"{unet['depth']} levels, {unet['filters']} filters, {unet['dtype']}{device}; {record['engine_name']}, "
        f"{host_of(record)}, median of {count_of(record['rounds'], 'round')} in turn (least to most). The difference "
        f"is that of the probabilities from {ONE_PASS}, over the brain: mean (99th percentile)."
    )
    return Table(columns, rows, title=title, caption=deaths(record["rows"]))


# --- Private helpers ---


def _ways(
    config: RunConfig, store: Store, windows: Sequence[Shape3], overlaps: Sequence[float]
) -> Dict[str, Inference]:
    """One pass, and every window with every overlap, each once. Raises InputError for what a network cannot take."""
    grid = grid_size(store, extent=config.extent, multiple=config.unet.divisor)
    windows = windows or [config.grid if config.is_patch else usual_patch(grid, config.unet.divisor)]
    ways = {ONE_PASS: Inference(one_pass=True)}
    for window in map(tuple, windows):
        valid(config.unet.check_shape, window, "--window")
        for overlap in overlaps:
            ways[f"{by_times(window)}, overlap {overlap:g}"] = Inference(window=window, overlap=overlap)
    return ways


def _cases(store: Store, split: str, chosen: Sequence[str]) -> List[str]:
    """The ids of the cases to predict. Raises InputError for none, for one that is not there or has no label."""
    there = [record.case_id for record in store.cases(split)]
    wanted = list(dict.fromkeys(chosen)) or there
    missing = [case_id for case_id in wanted if case_id not in there]
    if missing or not wanted:
        got = ", ".join(missing) or "none"
        raise InputError(f"cases must be in split {split} of {store.folder}, which has {len(there)}, got {got}")
    bare = [case_id for case_id in wanted if not store.case(case_id).has_label]
    if bare:
        raise InputError(f"cases must have a label, which their Dice is taken against, got {', '.join(bare)} without")
    return wanted


def _dice(folder: Path, store: Store, cases: Sequence[str], regions: Codes) -> Dict[str, float]:
    """Mean over the cases by region, of the painted labels, as `evaluate` scores them."""
    from cpu3d.inference.evaluate import check_finite  # 20 MiB, not into the memory of a measuring process
    from cpu3d.inference.scores import dice_coefficient

    scores: Dict[str, List[float]] = {name: [] for name in regions}
    for case_id in cases:
        answers = _answers(folder, case_id)
        check_finite(answers, case_id)
        label, truth = label_from_regions(answers, regions), np.asarray(store.label(case_id))
        for name, codes in regions.items():
            scores[name].append(dice_coefficient(region_mask(truth, codes), region_mask(label, codes)))
    return {name: statistics.fmean(values) for name, values in scores.items()}


def _difference(pair: Tuple[Path, Path], store: Store, places: Dict[str, Any], regions: Codes) -> Result:
    """How far two ways' answers are apart over the brains of all cases: mean, 99th percentile, maximum, labels.

    Takes 4 bytes a brain voxel and region, 20 MB for a BraTS case of three regions.
    """
    differences, changed = [], 0
    for case_id, place in places.items():
        region = Region(tuple(place["start"]), tuple(place["size"]))
        brain = crop(np.asarray(store.image(case_id)).any(axis=-1), region)
        one, other = (crop(_answers(folder, case_id), region)[brain] for folder in pair)
        differences.append(np.abs(other - one))
        labels = [label_from_regions(each[:, None, None], regions) for each in (one, other)]
        changed += np.count_nonzero(labels[0] != labels[1])
    found = np.concatenate(differences)
    figures = found.mean(dtype=np.float64), np.percentile(found, 99), found.max()
    share = {"voxels": len(found), "changed_share": changed / len(found)}
    return {**dict(zip(("mean", "p99", "max"), map(float, figures))), **share}


def _answers(folder: Path, case_id: str) -> np.ndarray:
    return np.load(folder / f"{case_id}.npy", mmap_mode="r", allow_pickle=False)

"""Whole volumes in one pass against a sliding window over them, with the same network: time, memory, Dice.

    ./run.sh bench windows --run runs/first --window 64 64 64 --window 128 128 128 --overlap 0 0.5 --rounds 3
    ./run.sh bench windows --run runs/first --split val --case BRATS_007 --record records/windows.jsonl

Each way in a fresh process, in turn, round by round; a case's seconds are from its image in memory to its
probabilities. After its first round each way predicts the cases once more, for their Dice.
"""

import dataclasses
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.bench import harness
from cpu3d.bench.harness import Output, Result, gib, host_of, with_range
from cpu3d.data.labels import label_from_regions, region_mask
from cpu3d.data.records import SPLITS
from cpu3d.data.region import grid_size, whole
from cpu3d.data.sampling import OVERLAP, patch_grid
from cpu3d.data.store import Store, open_store
from cpu3d.errors import InputError
from cpu3d.host.apply import set_up
from cpu3d.host.gpu import CPU, HostGpus, memory_device, pick_device
from cpu3d.inference.runs import Inference, store_of_run, trained_predictor
from cpu3d.settings import load_config
from cpu3d.training.checkpoint import weights_file
from cpu3d.util.records import by, count
from memory_estimator.planner import usual_patch
from memory_estimator.schema import option
from memory_estimator.table import Table

ONE_PASS = "one pass"  # all others are measured against it


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
    device: str = option(CPU, "of all ways: cpu, or gpu:0", metavar="D")
    rounds: int = option(3, "how often, in turn", at_least=1, metavar="N")


OPTIONS = (WindowOptions, Output)


def run(options: WindowOptions, output: Output) -> int:
    folder, config = options.run.resolve(), load_config(options.run.resolve())
    store = store_of_run(config, options.store)
    there = [record.case_id for record in store.cases(options.split)]
    cases = list(dict.fromkeys(options.case)) or there
    missing = [case_id for case_id in cases if case_id not in there]
    if missing or not cases:
        where = f"be in split {options.split} of {store.folder}, which has {len(there)}"
        raise InputError(f"cases must {where}, got {', '.join(missing) or 'none'}")
    bare = [case_id for case_id in cases if not store.case(case_id).has_label]
    if bare:
        raise InputError(f"cases must have a label, which their Dice is taken against, got {', '.join(bare)} without")
    if config.resolution < 1:
        raise InputError(f"run {options.run} must be at full resolution, got {config.resolution:g}; name another run")
    device = pick_device(options.device, "whole", HostGpus())
    grid = grid_size(store, extent=config.extent, multiple=config.unet.divisor)
    ways = {ONE_PASS: Inference(one_pass=True)}
    usual = config.grid if config.is_patch else usual_patch(grid, config.unet.divisor)
    for window in options.window or (usual,):
        harness.valid(config.unet.check_shape, window, "--window")
        for overlap in options.overlap:
            ways[f"{by(window, ' x ')}, overlap {overlap:g}"] = Inference(window=window, overlap=overlap)
    weights_file(folder, options.weights)  # there, or refused here
    request = {"run": str(folder), "weights": options.weights, "device": device}
    result = {**compare_ways(request, store, cases, ways, options.rounds), "split": options.split}
    output.publish("windows", result, windows_table(result))
    return 0


def compare_ways(
    request: Dict[str, str], store: Store, cases: Sequence[str], ways: Mapping[str, Inference], rounds: int
) -> Result:
    """Predict `cases` in every way, `rounds` times in turn; the content of a record. The first way is the baseline.

    A way that dies, as for want of memory, becomes a row with its reason. Raises ProcessFailedError where all do.
    """
    shared = {**request, "store": str(store.folder.resolve()), "cases": list(cases)}

    def measure(inference: Inference, number: int) -> Result:
        request = {**shared, "inference": inference.to_json(), "is_scored": number == 0}
        result = harness.in_fresh_process(predict_cases, request)
        return {**result, "seconds": statistics.fmean(one["seconds"] for one in result["cases"].values())}

    turns = {name: lambda number, one=one: measure(one, number) for name, one in ways.items()}
    found, failures = harness.in_turn(turns, rounds, "windows")
    baseline, rows = next(iter(found.values())), []
    for name, inference in ways.items():
        first, window, overlap = found[name][0] or {"cases": {}, "dice": None}, inference.window, inference.overlap
        grids = [whole(tuple(one["size"])) for one in first["cases"].values() if window]
        tiles = [len(patch_grid(grid, window, overlap)) for grid in grids]
        row = {"name": name, "window": window and list(window), "overlap": overlap if window else None}
        row.update(harness.summary(found[name], baseline, "seconds"), dice=first["dice"])
        row["tiles"] = statistics.fmean(tiles) if tiles else None
        row["rounds"] = [one and one["seconds"] for one in found[name]]
        row["error"] = failures[name].reason if name in failures else None
        rows.append(row)
    config, facts = load_config(Path(request["run"])), next(one for each in found.values() for one in each if one)
    about = {"name": store.manifest.name, "cases": list(cases), "mode": config.mode, "extent": config.extent}
    about.update(grid=list(config.grid), unet=dataclasses.asdict(config.unet), rounds=rounds, rows=rows)
    about.update(weights=request["weights"], device=request["device"])
    return {**about, **{name: facts[name] for name in harness.HOST_FACTS}}


def predict_cases(request: Dict[str, Any]) -> Result:
    """In the measuring process: seconds of each case, from its image to its probabilities, and the process's peaks.

    `request` has run, weights, store, cases, inference (an `Inference` as JSON), device ("cpu" or a card) and
    is_scored, whether Dice is wanted. Raises DivergedError where an answer is not finite.
    """
    device, chosen = request["device"], request["inference"]
    host, plan, tf = set_up(device=device)
    inference = Inference(**{**chosen, "window": chosen["window"] and tuple(chosen["window"]), "device": device})
    predictor = trained_predictor(Path(request["run"]), request["weights"], inference)
    store, cases = open_store(request["store"]), {}
    predict = lambda case_id: predictor.probabilities(store.image(case_id), store.case(case_id))  # noqa: E731
    predict(request["cases"][0])  # compiles for its shape
    for case_id in request["cases"]:
        begin = time.perf_counter()
        predict(case_id)
        cases[case_id] = {"seconds": time.perf_counter() - begin, "size": predictor.region(store.case(case_id)).size}
    from cpu3d.training.learner import allocator_peak_bytes  # imports TensorFlow, so not before

    peak = allocator_peak_bytes(memory_device(device))
    result = {"cases": cases, "allocator_peak_bytes": peak, **harness.facts_of(tf, plan, host)}
    if request["is_scored"]:  # once the peaks are read
        from cpu3d.inference.evaluate import check_finite
        from cpu3d.inference.scores import dice_coefficient

        scores: Dict[str, List[float]] = {name: [] for name in predictor.regions}
        for case_id in cases:
            answers, truth = predict(case_id), np.asarray(store.label(case_id))
            check_finite(answers, case_id)
            label = label_from_regions(answers, predictor.regions)
            for name, codes in predictor.regions.items():
                scores[name].append(dice_coefficient(region_mask(truth, codes), region_mask(label, codes)))
        result["dice"] = {name: statistics.fmean(values) for name, values in scores.items()}
    return result


def windows_table(record: Result) -> Table:
    """What each way takes and gives. Older records tell how far it is off one pass, too."""
    rows, regions = [], next((list(row["dice"]) for row in record["rows"] if row["dice"]), [])
    is_older = any("difference" in row for row in record["rows"])
    for row in record["rows"]:
        cells = [row["name"], "-" if row["tiles"] is None else f"{row['tiles']:g}"]
        if row["error"]:
            cells += ["died", "-", "-", "-"]
        else:
            ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
            dice = ", ".join(f"{value:.3f}" for value in (row["dice"] or {}).values()) or "-"
            cells += [with_range(row, "seconds"), ratio, gib(row["process_peak_bytes"]), dice]
        if is_older:
            off = row["difference"]
            cells += [f"{off['mean']:.2g} ({off['p99']:.2g})", f"{off['changed_share']:.2%}"] if off else ["-", "-"]
        rows.append(cells)
    columns = ["", "windows", "s a case", f"against {ONE_PASS}", "process peak, GiB", f"Dice {', '.join(regions)}"]
    columns += ["difference", "labels changed"] if is_older else []
    unet, grid = record["unet"], by(record["grid"], " x ")
    trained = f"patches of {grid}" if record["mode"] == "patch" else f"whole volumes, {grid}"
    device = "" if record.get("device", CPU) == CPU else f", on {record['device']}"
    title = (
        f"{count(record['cases'], 'case')} of {record['name']}, a network trained on {trained}: "
        f"{unet['depth']} levels, {unet['filters']} filters, {unet['dtype']}{device}; {record['engine_name']}, "
        f"{host_of(record)}, median of {count(record['rounds'], 'round')} in turn (least to most)."
    )
    older = f" The difference is that of the probabilities from {ONE_PASS}, over the brain: mean (99th percentile)."
    title += older if is_older else ""
    return Table(columns, rows, title=title, caption=harness.deaths(record["rows"]))

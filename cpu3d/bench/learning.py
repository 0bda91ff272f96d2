"""Measure how fast settings learn: Dice of untouched cases over training cost, in full steps and in seconds.

    ./run.sh bench learning --workdir learning --task small --record records/learning.jsonl -- --recipe demo

A task is plain, context or small, which are phantoms, or the folder of a real case, which is warped into copies. Data
and stores are kept in the workdir. A full step, the unit of cost, has the voxels of a step at full resolution; seconds
are of training alone. A region that an untouched case lacks is left out: its Dice there is 0 or 1.
"""

import dataclasses
import itertools
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, List, Mapping, Sequence, Tuple

from cpu3d.bench.harness import Output, Result
from cpu3d.data.store import Store, open_store
from cpu3d.data.stores.phantom import USUAL_SHAPE
from cpu3d.errors import InputError
from cpu3d.inference.evaluate import read_scores, scores_path
from cpu3d.processes import call
from cpu3d.report.pictures import Line, chart
from cpu3d.run.config import load_config
from cpu3d.run.log import read_events
from cpu3d.run.summary import numbers, of_kind
from cpu3d.settings import RunConfig
from cpu3d.util.atomic import writable_folder
from memory_estimator.common.schema import option
from memory_estimator.common.table import PALETTE, Table

PHANTOMS = {"plain": [], "context": ["--context", "count"], "small": ["--lesion-size", "small"]}  # task -> options
LESIONS = ("lesion_dice", "lesion_sensitivity", "false_positives")  # the scores that a record has


@dataclass(frozen=True)
class Options:
    """The options of `bench learning`."""

    workdir: Path = option(help="folder for data and stores, used again by later calls", metavar="DIR")
    task: str = option("plain", "plain, context or small, or the folder of a case")
    shape: Tuple[int, int, int] = option(USUAL_SHAPE, "voxels of phantoms", metavar=("X", "Y", "Z"))
    cases: Tuple[int, int] = option((8, 4), "cases to train on, and untouched cases", metavar=("TRAIN", "VAL"))
    steps: int = option(64, "steps of every run", at_least=1, metavar="N")
    seeds: Tuple[int, ...] = option((0, 1, 2), "seeds of the runs", metavar="S")
    name: str = option("", "name of these settings in tables (default: the options of train)")
    train: Tuple[str, ...] = option((), "options of train, after --", metavar="-- ...", rest=True)


OPTIONS = (Options, Output)


def run(options: Options, output: Output) -> int:
    """Train on the task with each seed in turn. Raises RunFailedError if a process fails."""
    train, workdir = [w for w in options.train if w != "--"], writable_folder(options.workdir, "workdir").resolve()
    name, log, curves = options.name or shlex.join(train) or "defaults", workdir / "log.txt", []
    store = made_store(workdir, options, log)
    untouched, command = store.cases("val"), ["train", "--store", str(store.folder), "--validations", "8"]
    regions = [r for r, codes in store.manifest.regions.items() if all({*codes} & {*c.label_voxels} for c in untouched)]
    if not regions:
        raise InputError("untouched cases must have a region in common, got none; choose other --cases")
    for seed in options.seeds:
        with tempfile.TemporaryDirectory(prefix="run-", dir=workdir) as folder:
            run, label = Path(folder) / "run", f"{options.task}, {name}, seed {seed}"
            words = [*command, "--run", str(run), *train, "--steps", str(options.steps), "--seed", str(seed)]
            call(words, log, label, run=run, steps=options.steps)
            call(["evaluate", "--run", str(run), "--split", "val", "--weights", "last"], log, label)
            events, config, scores = read_events(run), load_config(run), read_scores(scores_path(run, "val"))
        lesions = {name: {metric: scores["summary"][name][metric]["mean"] for metric in LESIONS} for name in regions}
        curves.append({"seed": seed, "points": points_of(events, config, regions), "lesions": lesions})
    start = of_kind(events, "start")[0]
    result = {"task": Path(options.task).resolve().name, "name": name, "options": train, "steps": options.steps}
    result.update(cases=options.cases, shape=untouched[0].shape, curves=curves, config=dataclasses.asdict(config))
    result.update(engine_name=start["engine"], **{fact: start[fact] for fact in ("threads", "host", "versions")})
    output.publish("learning", result, learning_table([result]))
    return 0


def made_store(workdir: Path, options: Options, log: Path) -> Store:
    """The store of the task below `workdir`, made if it is missing."""
    task, cases, shape = Path(options.task).resolve(), [*map(str, options.cases)], [*map(str, options.shape)]
    words = [*PHANTOMS[options.task], "--shape", *shape] if options.task in PHANTOMS else ["--warp", str(task)]
    folder = workdir / "-".join([task.name, *shape, *cases])
    data, store = str(folder / "data"), str(folder / "store")
    call(["phantom", "--out", data, "--cases", str(sum(options.cases)), *words], log, f"{options.task}: phantom")
    call(["prepare", "--dataset", data, "--store", store, "--split", *cases, "0"], log, f"{options.task}: prepare")
    return open_store(Path(store))


def points_of(events: Sequence[Mapping[str, Any]], config: RunConfig, regions: Sequence[str]) -> List[Result]:
    """A point for each validation: step, full steps and seconds of training until then, and Dice of `regions`."""
    points, seconds = [], [0.0, *itertools.accumulate(numbers(of_kind(events, "step"), "step_s"))]
    for event in of_kind(events, "validation"):
        step, dice = event["step"], {name: event["dice"][name] for name in regions}
        took = {"full_steps": config.full_steps(step), "seconds": seconds[min(step, len(seconds) - 1)]}
        points.append({"step": step, **took, "dice": dice})
    return points


def learning_table(records: Sequence[Result]) -> Table:
    """A row a record: costs and mean Dice at the end, means over the seeds, and of the Dice the range."""
    rows = []
    for record in records:
        ends = [curve["points"][-1] for curve in record["curves"]]
        costs = (f"{fmean(end[cost] for end in ends):.1f}" for cost in ("full_steps", "seconds"))
        dice = [fmean(end["dice"].values()) for end in ends]
        mean, low, high = fmean(dice), min(dice), max(dice)
        rows.append((record["task"], record["name"], *costs, f"{mean:.3f}", f"{low:.3f} to {high:.3f}"))
    return Table(("task", "settings", "full steps", "seconds", "mean Dice", "of the seeds"), rows, names=2)


def draw_learning(records: Sequence[Result]) -> bytes:
    """Mean Dice of the untouched cases over cost, a line a seed, a colour a record, as PNG."""
    lines = []
    for record, colour in zip(records, PALETTE * len(records)):
        for curve in record["curves"]:
            name = f"{record['task']}, {record['name']}" if curve is record["curves"][0] else ""
            dice = [fmean(point["dice"].values()) for point in curve["points"]]
            lines.append(Line(name, [point["full_steps"] for point in curve["points"]], dice, colour))
    return chart(lines, title="Dice of untouched cases", x_label="full steps", y_label="mean Dice", y_range=(0, 1))

"""Dice of untouched cases over what it cost, in full steps and in seconds: how fast settings learn.

    ./run.sh bench learning --workdir learning --record records/learning.jsonl -- --recipe demo
    ./run.sh bench learning --workdir learning --task small --task context --shape 80 106 70 -- --recipe demo
    ./run.sh bench learning --workdir learning --task CASE --name faster --steps 40 -- --learning-rate 0.01
    ./run.sh bench tables --records records --learning learning.png

A task is plain, context or small, which are phantoms, or the folder of a real case, of which warped copies are made:
the untouched ones are warped otherwise. Data and stores stay in the workdir for the next time; runs are made anew by
`train`, with what follows --, and are not kept. A full step has the voxels of one at full resolution, a coarse one
less; seconds are of training, without validation and saving. The weights at the end are scored lesion by lesion too. A
region that an untouched case lacks is left out: one voxel too many makes its Dice 0 there, and none 1.
"""

import contextlib
import dataclasses
import io
import itertools
import math
import shlex
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from cpu3d.bench.harness import Output, Result, host_of
from cpu3d.compare.run import call
from cpu3d.data.region import Shape3
from cpu3d.data.store import open_store
from cpu3d.data.stores.phantom import USUAL_SHAPE, write_phantom
from cpu3d.data.stores.prepare import prepare
from cpu3d.errors import InputError
from cpu3d.inference.evaluate import read_scores, scores_path
from cpu3d.inference.scores import METRICS
from cpu3d.run.log import read_events
from cpu3d.settings import RunConfig, load_config
from cpu3d.util.atomic import writable_folder
from cpu3d.util.records import by, count, listed
from memory_estimator.common.schema import option
from memory_estimator.common.table import PALETTE, Table, new_figure, plain, png

LESIONS = ("lesion_dice", "lesion_sensitivity", "false_positives")
"""Metrics of the weights at the end."""

PHANTOMS: Dict[str, Dict[str, str]] = {"plain": {}, "context": {"context": "count"}, "small": {"lesion_size": "small"}}
"""Task -> what `write_phantom` is given for it."""


@dataclass(frozen=True)
class Options:
    """What `bench learning` trains."""

    workdir: Path = option(help="folder for data and stores, used again the next time", metavar="DIR")
    task: Tuple[str, ...] = option(
        (), "plain, context, small or the folder of a real case; repeatable (default: plain)", "TASK", repeat=True
    )
    shape: Optional[Shape3] = option(None, "of phantoms, voxels (default: 240 240 155)", metavar=("X", "Y", "Z"))
    cases: Tuple[int, int] = option((8, 4), "to train on, and untouched", metavar=("TRAIN", "VAL"))
    steps: int = option(64, "of every run", at_least=1, metavar="N")
    every: int = option(8, "steps between validations, a divisor of --steps", at_least=1, metavar="N")
    seeds: Tuple[int, ...] = option((0, 1, 2), "of the runs", metavar="S")
    name: str = option("", "of these settings in tables (default: the options of train)")
    train: Tuple[str, ...] = option((), "after --: options of train", metavar="-- ...", rest=True)

    def __post_init__(self):
        if self.steps % self.every:
            raise InputError(f"--every must divide --steps, {self.steps}, got {self.every}; choose another")
        for task in self.task:
            if task not in PHANTOMS and not Path(task).is_dir():
                rule = f"be one of {', '.join(PHANTOMS)} or the folder of a case"
                raise InputError(f"--task must {rule}, got {task}; choose one")


OPTIONS = (Options, Output)


def run(options: Options, output: Output) -> int:
    workdir = writable_folder(options.workdir, "workdir").resolve()
    stores = {task: made_store(workdir, task, options.shape, options.cases) for task in options.task or ("plain",)}
    for task, store in stores.items():
        result = learned(workdir, store, options, task if task in PHANTOMS else Path(task).resolve().name)
        output.publish("learning", result, learning_table(result))
    return 0


def made_store(workdir: Path, task: str, shape: Optional[Shape3], cases: Tuple[int, int]) -> Path:
    """The store of a task with so many cases to train on and untouched, made below `workdir` where it is not there."""
    name, how = f"{task}-{by(shape or USUAL_SHAPE)}", {"shape": shape, **PHANTOMS.get(task, {})}
    if task not in PHANTOMS:
        name, how = Path(task).resolve().name, {"warp": Path(task)}
    folder = writable_folder(workdir / f"{name}-{cases[0]}-{cases[1]}", "folder")
    with contextlib.redirect_stdout(io.StringIO()):
        write_phantom(folder / "data", cases=sum(cases), **how)
        prepare(folder / "data", folder / "store", fractions=(*cases, 0))
    return folder / "store"


def learned(workdir: Path, store: Path, options: Options, task: str) -> Result:
    """Train on `store` with each seed in turn; the content of a record. Raises RunFailedError for a run that fails."""
    given = [word for word in options.train if word != "--"]
    length = ["--steps", str(options.steps), "--validations", str(options.steps // options.every)]
    name, log, curves, about = options.name or shlex.join(given) or "defaults", workdir / "log.txt", [], {}
    manifest, held_out = open_store(store).manifest, open_store(store).cases("val")
    scored = [r for r, codes in manifest.regions.items() if all({*codes} & {*one.label_voxels} for one in held_out)]
    for seed in options.seeds:
        with tempfile.TemporaryDirectory(prefix="run-", dir=workdir) as folder:
            run = Path(folder) / "run"
            what = f"{task}, {name}, seed {seed}"
            command = ["train", "--store", str(store), "--run", str(run), *given, *length, "--seed", str(seed)]
            call(command, log, what, run=run, steps=options.steps)
            call(["evaluate", "--run", str(run), "--split", "val", "--weights", "last"], log, what)
            events, config, scores = read_events(run), load_config(run), read_scores(scores_path(run, "val"))
        start = next(event for event in events if event["event"] == "start")
        lesions = {
            region: {metric: scores["summary"][region][metric]["mean"] for metric in LESIONS} for region in scored
        }
        curves.append({"seed": seed, "points": points_of(events, config, scored), "lesions": lesions})
        about = {
            name: getattr(config, name) for name in ("mode", "grid", "resolution", "batch", "optimizer", "coarse_steps")
        }
        about["unet"] = dataclasses.asdict(config.unet)
        about.update(engine_name=start["engine"], **{one: start[one] for one in ("threads", "host", "versions")})
    wanted = {"task": task, "name": name, "options": given, "steps": options.steps, "cases": list(options.cases)}
    return {**wanted, "shape": list(held_out[0].shape), "curves": curves, **about}


def points_of(events: Sequence[Mapping[str, Any]], config: RunConfig, regions: Sequence[str]) -> List[Result]:
    """Of each validation in a run's log: step, full steps and seconds of training until then, and Dice of `regions`."""
    points, seconds = [], 0.0
    for event in events:
        if event["event"] == "validation":
            spent = {"full_steps": config.full_steps(event["step"]), "seconds": seconds}
            dice = {name: value for name, value in event["dice"].items() if name in regions}
            points.append({"step": event["step"], **spent, "dice": dice})
        elif event["event"] == "step":
            seconds += event["step_s"]
    return points


# --- The record as a table and in a picture ---


def mean_dice(point: Result) -> float:
    return statistics.fmean(point["dice"].values())


def rows_of(record: Result) -> List[Tuple[Result, ...]]:
    """The points of each validation, one a seed that came so far."""
    steps = sorted({point["step"] for curve in record["curves"] for point in curve["points"]})
    return [tuple(p for curve in record["curves"] for p in curve["points"] if p["step"] == step) for step in steps]


def learning_table(record: Result) -> Table:
    """A row a validation: means over the seeds, and of the mean Dice the range."""
    rows, regions = [], list(next((points[0]["dice"] for points in rows_of(record)), {}))
    for points in rows_of(record):
        each = [mean_dice(point) for point in points]
        cells = [str(points[0]["step"]), f"{points[0]['full_steps']:.1f}"]
        cells.append(f"{statistics.fmean(point['seconds'] for point in points):.1f}")
        cells += [f"{statistics.fmean(point['dice'][region] for point in points):.3f}" for region in regions]
        rows.append([*cells, f"{statistics.fmean(each):.3f} ({min(each):.3f} to {max(each):.3f})"])
    train, val = record["cases"]
    length = f"{record['steps']} steps, {train} cases to train on, {val} untouched"
    title = f"{record['task']}, {record['name']}: {by(record['shape'], ' x ')}, {length}"
    seeds = f"Seeds {listed(curve['seed'] for curve in record['curves'])}; {host_of(record)}."
    lesions = "; ".join(
        f"{METRICS[metric].label} at the end: "
        + ", ".join(
            f"{region} {statistics.fmean(curve['lesions'][region][metric] for curve in record['curves']):.3f}"
            for region in regions
        )
        for metric in LESIONS
    )
    columns = ("step", "full steps", "seconds", *regions, "mean (range of seeds)")
    return Table(columns, rows, title=title, caption=f"{seeds} {lesions}.", names=0)


def draw_learning(records: Sequence[Result]) -> bytes:
    """PNG: mean Dice of the untouched cases over cost, a panel a task, a line for each name with the seeds' range."""
    tasks = list(dict.fromkeys(record["task"] for record in records))
    figure = new_figure(10, 0.4 + 2.6 * math.ceil(len(tasks) / 3))
    panels = figure.subplots(math.ceil(len(tasks) / 3), min(3, len(tasks)), squeeze=False).flatten()
    for axes, task in itertools.zip_longest(panels, tasks):
        if task is None:
            axes.axis("off")
            continue
        shown = sorted((one for one in records if one["task"] == task), key=lambda one: (one["name"], one["steps"]))
        for record, colour in zip(shown, itertools.cycle(PALETTE)):
            points = rows_of(record)
            each = [[mean_dice(point) for point in row] for row in points]
            cost = [row[0]["full_steps"] for row in points]
            label = f"{record['name']}; {record['steps']} steps, {count(record['curves'], 'seed')}"
            axes.fill_between(cost, *zip(*((min(dice), max(dice)) for dice in each)), color=colour, alpha=0.2, lw=0)
            axes.plot(cost, [statistics.fmean(dice) for dice in each], "o-", color=colour, markersize=3.2, label=label)
        plain(axes, f"{task}, {by(shown[0]['shape'], ' x ')}")
        axes.set(ylim=(0, 1), xlim=(0, None), xlabel="full steps", ylabel="mean Dice" if axes in panels[::3] else None)
        axes.legend(frameon=False, fontsize=7, loc="lower right")
    figure.tight_layout(pad=0.6)
    return png(figure)

"""Runs as a page shows them: what they were, how they learnt, and where they were computed.

runs = {"1/5": read_run(folder / "fold-1"), ...}
rows = facts(runs)      # ("a step sees", "a whole volume ..."), ...
"""

import contextlib
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.cases.resample import in_mm
from cpu3d.data.store import Store, open_store
from cpu3d.errors import InputError
from cpu3d.inference.scores_file import are_of_weights, read_scores, scores_path
from cpu3d.pages.page import flat, page_file, render_page
from cpu3d.plan_text import network_words
from cpu3d.report.pictures import Figures, Line, chart
from cpu3d.report.sections import Element, Folded, is_filled
from cpu3d.run.config_json import load_config
from cpu3d.run.log import read_events
from cpu3d.run.summary import History
from cpu3d.run.transfer import init_rows
from cpu3d.settings import RunConfig
from cpu3d.util.atomic import atomic_write
from cpu3d.util.records import count, listed
from memory_estimator.common.table import PALETTE, Table
from memory_estimator.common.units import GIB, by, format_bytes, format_seconds
from models.strides import axes_text

NOT_KNOWN = "-"
ITS_OWN = ("fold", "seed", "unet.seed")  # settings that differ between runs of one kind


@dataclass(frozen=True)
class RunFiles:
    """A run that has begun."""

    folder: Path
    config: RunConfig
    history: History  # of log.jsonl
    kind: str = ""  # runs of one kind have one colour and are named once

    @property
    def last_start(self) -> Mapping[str, Any]:
        """What its last attempt has logged at its start; {} if it has not been started."""
        return self.history.starts[-1] if self.history.starts else {}

    @property
    def state(self) -> str:
        """How far its training has come, in words."""
        last = self.history.last
        if last.get("event") == "diverged":
            return f"diverged after step {last['step']}: {last['reason']}"
        if self.history.end:
            return f"{self.history.end['reason']} after step {self.history.end['step']}"
        return f"not ended yet, step {self.history.last_step}"


def write_page(
    out: Path,
    *,
    title: str,
    command: str,
    runs: Mapping[str, RunFiles],
    store: Optional[Store],
    about: Sequence[Tuple[str, str]],
    sections: Mapping[str, Sequence[Element]],
    notes: Sequence[str] = (),
    alert: str = "",
) -> None:
    """Write the page of a run, of folds or of a comparison, atomically.

    - `command`: that makes it
    - `store`: None if it was moved or deleted
    - `about`: name and value of more than the settings tell
    - `sections`: heading -> elements, after those that all pages have under it

    Raises InputError where no page can be written."""
    page_file(out)
    rows = [*about, *facts(runs)]
    if store is None:
        notes = [*notes, "The store cannot be read, so no cases are shown."]
    else:
        rows.insert(0, ("data", _data(store)))
    differing, every = settings(runs)
    common: List[Tuple[str, List[Element]]] = [
        ("What was trained", [Table(("", ""), rows, names=2), differing]),
        ("First weights", _first_weights(runs)),
        ("Scores", []),
        ("Untouched cases, by the folds together", []),
        ("Post-processing", []),
        ("Cases", []),
        ("Training", [curves(runs)]),
        ("Memory and time", []),
        ("Host and software", hosts(runs)),
        ("Settings", [every]),
    ]
    filled = []
    for heading, elements in common:
        elements += sections.get(heading, ())
        shown = [element for element in elements if is_filled(element)]
        if shown:
            filled.append((heading, shown))
    page = render_page(
        Path(__file__).with_name("report.html.j2"),
        title=title,
        command=command,
        sections=filled,
        notes=notes,
        alert=alert,
    )
    with atomic_write(out, "w") as file:
        file.write(page)


def read_run(folder: Path, kind: str = "") -> RunFiles:
    """Read a run's settings and log. Raises InputError if its config.json is missing or damaged."""
    return RunFiles(folder, load_config(folder), History(read_events(folder)), kind)


def open_first(folders: Iterable[str]) -> Optional[Store]:
    """The first of these stores that can be read; None if all were moved or deleted."""
    for folder in folders:
        with contextlib.suppress(InputError):
            return open_store(Path(folder))
    return None


def current_scores(
    folder: Path, runs: Sequence[Path], splits: Sequence[str]
) -> Tuple[Optional[Dict[str, Any]], str]:
    """The scores in `folder` by the present weights of these runs, of the first of the splits that
    has some; and a note on those that are not shown."""
    note = ""
    for split in splits:
        path = scores_path(folder, split)
        if not path.is_file():
            continue
        why = "are of other weights"
        try:
            scores = read_scores(path)
            if are_of_weights(scores, runs):
                return scores, ""
        except InputError:
            why = "cannot be read"
        todo = f"run `evaluate --run {folder}` and then `report` again"
        note = f"The scores of the {split} cases {why}: {todo}."
    return None, note


def first_of_each_kind(runs: Mapping[str, RunFiles]) -> Dict[str, RunFiles]:
    """The first run of each kind, by its name; one without a kind is a kind of its own."""
    first: Dict[str, RunFiles] = {}
    for name, run in runs.items():
        first.setdefault(run.kind or name, run)
    return first


def facts(runs: Mapping[str, RunFiles]) -> List[Tuple[str, str]]:
    """Name and value of what distinguishes the runs; where they differ, each value with the runs
    that have it. "-" stands for what is logged alone, in a run that was not started."""
    runs_with: Dict[str, Dict[str, List[str]]] = {}  # name -> value -> runs
    for name, run in first_of_each_kind(runs).items():
        for fact, value in _described(run.config, run.last_start):
            runs_with.setdefault(fact, {}).setdefault(value, []).append(name)
    rows = []
    for fact, by_value in runs_with.items():
        values = list(by_value)
        if len(values) > 1:
            values = [f"{value} ({listed(names)})" for value, names in by_value.items()]
        rows.append((fact, "; ".join(values)))
    return rows


def runs_table(
    names: Iterable[str], runs: Mapping[str, RunFiles], cases: Mapping[str, Sequence[float]]
) -> Table:
    """A row for each run: what its training took, and the Dice of the `cases` that it has scored,
    by its name."""
    rows = []
    for name in names:
        if name not in runs:
            rows.append((name, "waiting", *["-"] * 5))
            continue
        costs = runs[name].history.costs()
        train_s = costs.train_s or costs.steps_s + costs.validation_s + costs.checkpoint_s
        dice = cases.get(name, ())
        row = (
            name,
            runs[name].state,
            f"{costs.steps:,}",
            format_seconds(train_s or None),
            format_bytes(costs.peak_rss_bytes),
            str(len(dice) or "-"),
            f"{np.mean(dice):.3f}" if dice else "-",
        )
        rows.append(row)
    return Table(
        ("run", "training", "steps", "time", "peak memory", "cases scored", "mean Dice"),
        rows,
        title="Runs",
        caption="Time is of all attempts, with validations; mean Dice of the cases and regions.",
        names=2,
    )


def settings(runs: Mapping[str, RunFiles]) -> List[Element]:
    """The settings that differ, a column a run or a kind of runs, and all of the first one."""
    runs = first_of_each_kind(runs)
    columns = [dict(flat(run.config.to_json())) for run in runs.values()]
    rows = []
    for name in sorted(set().union(*columns)):
        values = [column.get(name, NOT_KNOWN) for column in columns]
        if len(set(values)) > 1 and name not in ITS_OWN:
            rows.append((name, *values))
    differing = Table(("setting", *runs), rows, title="Settings that differ", names=1)
    every = Table(("", ""), sorted(columns[0].items()), names=2) if columns else Table((), ())
    return [differing, Folded("All settings, as config.json has them", every)]


def hosts(runs: Mapping[str, RunFiles]) -> List[Element]:
    """Where each attempt was computed, and the software of the last one."""
    rows = []
    about: List[Tuple[str, str]] = []
    for name, run in runs.items():
        for start in run.history.starts:
            host = start.get("host", {})
            words = [str(host.get(key, NOT_KNOWN)) for key in ("cpu", "cores", "instructions")]
            memory = format_bytes(host.get("memory_bytes"))
            rows.append((name, f"{start['step']:,}", start.get("time", ""), *words, memory))
            about = flat({group: start.get(group, {}) for group in ("versions", "threads")})
    columns = ("run", "from step", "at", "CPU", "cores", "instruction set", "memory")
    software = Table(("", ""), about, names=2)
    return [Table(columns, rows, names=4), Folded("Versions and switches", software)]


CURVES = (
    ("Loss of the steps", "steps", "loss", 1),
    ("Loss of the validations", "validations", "loss", 1),
    ("Mean Dice of the held-out cases", "validations", "mean_dice", 1),
    ("Time of a step, s", "steps", "step_s", 1),
    ("Waiting for data, s", "steps", "wait_s", 1),
    ("Learning rate", "steps", "learning_rate", 1),
    ("Memory of the process, GiB", "steps", "rss_bytes", GIB),
)
"""Title of a chart over the steps -> events of the log, their number, and its unit."""


def curves(runs: Mapping[str, RunFiles]) -> Figures:
    """How the runs have learnt, a chart for each number and a line for each run."""
    colours = dict(zip(first_of_each_kind(runs), itertools.cycle(PALETTE)))
    charts: Dict[Tuple[str, str], List[Line]] = {}
    for name, run in runs.items():
        kind = run.kind or name
        for title, x_label, x, y, is_dense in _curves_of(run.history):
            if np.isfinite(y).any():
                lines = charts.setdefault((title, x_label), [])
                is_named = any(line.name == kind for line in lines)  # in the legend
                lines.append(Line("" if is_named else kind, x, y, colours[kind], is_dense))
    figures: Figures = []
    for (title, x_label), lines in charts.items():
        y_range = (0, 1) if "Dice" in title else (0, None)
        switch = None
        if x_label == "step":
            switch = next(iter(runs.values())).config.coarse_steps
        axes = {"y_label": "", "x_label": x_label, "y_range": y_range, "switch": switch}
        figures.append((f"{title} over {x_label}", chart(lines, title=title, **axes)))
    return figures


# --- Private helpers ---


def _data(store: Store) -> str:
    manifest = store.manifest
    words = f"{manifest.name} ({manifest.layout}), {count(manifest.cases, 'case')}"
    if manifest.ignore is not None:
        name = manifest.labels[manifest.ignore]
        words += f"; voxels of label {manifest.ignore} {name} count nowhere"
    return words


def _first_weights(runs: Mapping[str, RunFiles]) -> List[Element]:
    """What the runs have taken from other weights, and what of it stays; [] for their own."""
    for run in runs.values():
        record = run.config.init_record
        if record:
            rows = [*init_rows(record), ("frozen", run.config.freeze)]
            return [Table(("", ""), rows, names=2)]
    return []


def _curves_of(history: History) -> Iterator[Tuple[str, str, Any, Any, bool]]:
    """Title, name of the x axis, both axes of each curve of a run, and whether it is dense."""
    for title, kind, number, unit in CURVES:
        events = getattr(history, kind)
        yield title, "step", events["step"], events[number] / unit, kind == "steps"
    validations = history.validations
    for region, dice in validations.dice.items():
        yield f"Dice of {region}", "step", validations["step"], dice, False
    steps = history.steps
    done = np.searchsorted(steps["step"], validations["step"], side="right")
    for x_label, number, unit in (
        ("voxels seen, millions", "voxels", 1e6),
        ("seconds of steps", "step_s", 1),
    ):
        sums = np.concatenate([[0], np.cumsum(np.nan_to_num(steps[number])) / unit])
        dice = validations["mean_dice"]
        yield "Mean Dice of the held-out cases", x_label, sums[done], dice, False


def _described(config: RunConfig, start: Mapping[str, Any]) -> List[Tuple[str, str]]:
    """Name and value of what distinguishes a run, by its settings and what its last start has
    logged; "-" stands for what is logged alone, in a run that was not started."""
    network = network_words(config.unet)
    if "parameters" in start:
        network += f", {start['parameters']:,} weights"
    batch = f"{config.batch}, {start.get('micro_batch', config.micro)} at a time"
    if start.get("workers", 1) > 1:
        batch += f", of {start['workers']} workers"
    coarse = "all" if config.unet.averages else "none"
    if config.coarse_steps:
        coarse = f"the first {config.coarse_steps:,}, on {by(config.coarse_seen_grid, ' x ')}"
        coarse += f": {axes_text(config.unet.stride(0))} halved"
    rows = [
        ("network", network),
        ("a step sees", _seen(config, start)),
        ("coarse steps", coarse),
        ("patches a step" if config.is_patch else "volumes a step", batch),
        ("optimizer", f"{config.optimizer}, rate {config.peak_rate:g} at its peak, cosine decay"),
        ("split", f"hash {config.split_hash}"),
        ("device", str(start.get("device", config.device))),
    ]
    logged = (("computed in", "precision"), ("memory policy", "policy"), ("engine", "engine"))
    for name, key in logged:
        rows.append((name, str(start.get(key, NOT_KNOWN))))
    return rows


def _seen(config: RunConfig, start: Mapping[str, Any]) -> str:
    """The grids of steps, and the size of their voxels."""
    words = f"a patch of {by(config.grid, ' x ')} voxels"
    if not config.is_patch:
        words = f"whole volumes of {start.get('grids', NOT_KNOWN)} voxels"
        if config.whole_every > 1:
            words = f"crops around the labels, in 1 step of {config.whole_every} {words}"
    spacing_mm = config.target_spacing_mm or config.spacing_mm
    if spacing_mm:
        words += f" of {in_mm(spacing_mm)}"
    return words

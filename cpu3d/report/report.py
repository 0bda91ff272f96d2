"""Make one self-contained page of a run: scores, best and worst cases, curves, memory and time, host and settings.

    ./run.sh report --run runs/first

Writes run/report.html: no script, no network, pictures inside, so it can be mailed or put beside a paper. It works with
what is there, also while a training is under way or before anything was evaluated, and says what is missing.
"""

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.labels import region_mask
from cpu3d.data.nifti import read_volume, to_ras
from cpu3d.data.words import by
from cpu3d.errors import InputError
from cpu3d.inference.evaluate import ranked, scores_path, warning
from cpu3d.report import pictures
from cpu3d.report.page import flat, gib, percent, render_page
from cpu3d.report.pictures import PALETTE, Line
from cpu3d.report.run_files import RunFiles, gather
from cpu3d.util.atomic import atomic_write, writable_folder
from cpu3d.util.records import duration
from memory_estimator.schema import add_options, from_args, option
from memory_estimator.units import GIB


@dataclass(frozen=True)
class Options:
    """Command-line options of `report`."""

    run: Path = option(help="run folder written by train", metavar="DIR")
    out: Optional[Path] = option(None, "page to write (default: report.html in the run folder)", "FILE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, Options)


def run(args: argparse.Namespace) -> int:
    options = from_args(Options, args)
    print(f"written: {write_report(options.run, options.out)}")
    return 0


def write_report(run_dir: Path, out: Optional[Path] = None) -> Path:
    """Write the page of the run in `run_dir` to `out`, by default run/report.html, atomically; returns its path.

    Raises InputError when `run_dir` holds no readable config.json, for a scores.json that is damaged or of another
    version, and when the page cannot be written there. Everything else that is missing is said on the page.
    """
    run_dir = Path(run_dir).resolve()
    out = Path(out) if out else run_dir / "report.html"
    if out.is_dir():
        raise InputError(f"--out {out} must be a file, found a folder; add a name such as report.html")
    files = gather(run_dir)
    writable_folder(out.parent, "folder of --out")
    page = render(files)
    with atomic_write(out, "w") as file:
        file.write(page)
    return out


def render(files: RunFiles) -> str:
    """The page as HTML."""
    scores, events = files.scores, files.events
    starts = [event for event in events if event["event"] == "start"]
    return render_page(
        Path(__file__).with_name("report.html.j2"),
        title=f"Report of {files.folder.name}",
        files=files,
        config=sorted(flat(files.config)),
        mode=files.config["mode"],
        starts=starts,
        facts=_facts(files, starts),
        missing=_missing(files),
        warning=warning(scores["split"]) if scores and not scores["untouched"] else "",
        scores=scores,
        ranked=ranked(scores["cases"]) if scores else [],
        score_pictures=_score_pictures(scores) if scores else [],
        cases=_overlays(files) if scores else [],
        curves=_curves(events),
        costs=_costs(events, files.config, scores),
        foreseen=_foreseen(starts, events),
        split=files.store.manifest.split if files.store else {},
        colours=(pictures.PREDICTION_ONLY, pictures.TRUTH_ONLY, pictures.BOTH),
    )


# --- Private helpers: words and numbers ---


def _facts(files: RunFiles, starts: Sequence[Mapping[str, Any]]) -> List[Tuple[str, str]]:
    """Name and value of what tells this run from others."""
    config, manifest = files.config, files.store.manifest if files.store else None
    end = _end(files.events)
    steps = [event["step"] for event in files.events if event["event"] == "step"]
    first, last = (starts[0], starts[-1]) if starts else ({}, {})
    facts = [
        ("run", str(files.folder)),
        ("data", f"{manifest.name} ({manifest.layout}), {len(manifest.cases)} cases" if manifest else "-"),
        ("store", str(config.get("store", "-"))),
        ("split hash", str(config.get("split_hash") or first.get("split_hash") or "-")),
        *([("fold", config["fold"])] if config["fold"] else []),
        ("started", _when(first.get("time"))),
        ("steps", f"{max(steps):,}" if steps else "0"),
        ("ended", f"{end['reason']} after step {end['step']}" if end else "not yet"),
        ("channels", ", ".join(config.get("channels", [])) or "-"),
        *_seen(config, last.get("grid")),
        ("parameters", f"{last['parameters']:,}" if isinstance(last.get("parameters"), int) else "-"),
        ("precision", str(last.get("precision", "-"))),
        ("policy", str(last.get("policy", "-"))),
        ("micro-batch", str(last.get("micro_batch", "-"))),
        ("engine", str(last.get("engine", "-"))),
        ("device", _device(last, config)),
    ]
    if files.scores:
        facts.append(("inference", _inference(files.scores)))
    if len(starts) > 1:
        facts.append(("restarts", ", ".join(f"at step {event.get('step', '?')}" for event in starts[1:])))
    return facts


def _seen(config: Mapping[str, Any], grid: Any) -> List[Tuple[str, str]]:
    """What a step saw of a case."""
    if config["mode"] == "patch":
        count = f"{config['patches_per_case']} an epoch, {percent(config['foreground'])} around labels"
        return [("mode", "patches"), ("patch", _shape(grid)), ("patches of a case", count)]
    share = config["resolution"]
    at = [("resolution", f"{share:g} of the store's")] if share < 1 else []
    return [("mode", "whole volumes"), ("grid", _shape(grid)), *at]


def _inference(scores: Mapping[str, Any]) -> str:
    """How the network was applied to the cases that were scored; "-" where the scores are too old to say."""
    runs = scores.get("runs") or [scores]
    ways = "; ".join({_way(run.get("inference")): None for run in runs})
    if len(runs) == 1:
        return ways
    crossed = all("held_out" in run for run in runs)
    return f"{ways}; {'each case by the fold that held it out' if crossed else f'mean of {len(runs)} runs'}"


def _way(inference: Optional[Mapping[str, Any]]) -> str:
    if not inference:
        return "-"
    window = inference.get("window")
    way = f"window of {_shape(window)}, {100 * inference.get('overlap', 0):g} % overlap" if window else "in one pass"
    return f"{way}, mean of 8 mirror images" if inference.get("flips") else way


def _device(start: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """That of an attempt, as its start says; those of older logs do not, and were on the CPU as the settings are."""
    return str(start.get("device") or config["device"])


def _missing(files: RunFiles) -> List[str]:
    """What is not there and how to make it, one sentence each."""
    notes = []
    if files.scores is None:
        notes.append(f"No scores yet: run `evaluate --run {files.folder}` and then `report` again.")
    if not any(event["event"] == "step" for event in files.events):
        notes.append("No training step is in log.jsonl yet, so there are no curves.")
    if files.store is None:
        notes.append(f"The store {files.config.get('store', '')} is not there now, so no cases are shown.")
    trained_with = files.config.get("split_hash")
    if files.scores and trained_with and files.scores["split_hash"] != trained_with:
        notes.append(f"The scores are of another split, {files.scores['split_hash']}: run `evaluate` again.")
    return notes


def _costs(
    events: Sequence[Mapping[str, Any]], config: Mapping[str, Any], scores: Optional[Mapping[str, Any]]
) -> List[Tuple[str, str, str]]:
    """Memory and time: (what, value, how it was told)."""
    steps = [event for event in events if event["event"] == "step"]
    end = _end(events)
    step_s, wait_s = _column(steps, "step_s"), _column(steps, "wait_s")
    extra_s = sum(_column([event for event in events if event["event"] in ("validation", "checkpoint")], "seconds"))
    ends = [event for event in events if event["event"] == "end"]
    peak = max([0, *_column(ends, "peak_rss_bytes"), *_column(steps, "rss_bytes")])
    wait_share = sum(wait_s) / sum(step_s) if sum(step_s) else None
    rows = [
        ("peak memory of the process", gib(peak), "largest resident set in the log"),
        *_allocated(events, config),
        ("time per step", f"{np.median(step_s):.2f} s" if step_s else "-", "median"),
        ("waiting for data", percent(wait_share), "of the time of the steps"),
        (
            "validation and checkpoints",
            percent(extra_s / (extra_s + sum(step_s))) if step_s else "-",
            "of the whole time",
        ),
        ("whole training", duration(end.get("seconds") or sum(step_s) + extra_s), "wall clock, all attempts"),
    ]
    if scores:
        rows.append(
            ("prediction", f"{np.median(_column(scores['cases'], 'predict_s')):.1f} s a volume", "median, full grid")
        )
        rows.append(("scoring", f"{np.median(_column(scores['cases'], 'score_s')):.1f} s a volume", "median"))
    return [row for row in rows if row[1] != "-"]


def _allocated(events: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> List[Tuple[str, str, str]]:
    """The allocator's peak on every device that an attempt ended on: TensorFlow has one allocator for each."""
    device, peaks = _device({}, config), {}
    for event in events:
        if event["event"] == "start":
            device = _device(event, config)
        elif event["event"] == "end":
            peaks[device] = max([peaks.get(device, 0), *_column([event], "allocator_peak_bytes")])
    what = "peak of TensorFlow's allocator"
    rows = []
    for device, peak in peaks.items():
        if device == "cpu":
            rows.append((what, gib(peak), "with ITEX it holds oneDNN's scratch"))
        else:
            rows.append((f"{what} on {device}", gib(peak), "cuDNN's workspaces are in it, CUDA's context is not"))
    return rows


def _foreseen(starts: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> List[Tuple[str, ...]]:
    """(what, predicted, measured, how far off) of the last attempt; empty where nothing was predicted of it."""
    predicted = starts[-1].get("predicted") if starts else None
    if not predicted:
        return []
    end, attempt = _end(events), events[max(i for i, event in enumerate(events) if event is starts[-1]) :]
    # The first step compiles; it is left out wherever another one tells the time.
    steps = [event for event in attempt if event["event"] == "step"]
    step_s = [event["step_s"] - event["wait_s"] for event in steps if "step_s" in event and "wait_s" in event]
    measured = {**end, "step_s": float(np.median(step_s[1:] or step_s)) if step_s else None}
    rows = []
    for name, key, measured_key, show in (
        ("peak of TensorFlow's allocator", "allocator_peak_bytes", "allocator_peak_bytes", gib),
        ("peak memory of the process", "process_peak_bytes", "peak_rss_bytes", gib),
        ("upper bound of it", "upper_bound_bytes", "peak_rss_bytes", gib),
        (
            "time per step, waiting for data aside",
            "step_s",
            "step_s",
            lambda seconds: f"{seconds:.2f} s" if seconds else "-",
        ),
    ):
        told, found = predicted.get(key), measured.get(measured_key)
        if not told:
            continue
        off = f"{told / found - 1:+.1%}" if told and found else "-"
        rows.append((name, show(told), show(found), off))
    return rows


def _end(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The event that ended the last attempt; empty when it has not ended, or was killed."""
    last = next((event for event in reversed(events) if event["event"] in ("start", "end")), {})
    return last if last.get("event") == "end" else {}


def _column(events: Sequence[Mapping[str, Any]], key: str) -> List[float]:
    return [event[key] for event in events if isinstance(event.get(key), (int, float))]


def _when(iso: Any) -> str:
    return str(iso).replace("T", " ")[:19] if iso else "-"


def _shape(shape: Any) -> str:
    return by(shape, " \u00d7 ") if shape else "-"


# --- Private helpers: pictures ---


def _score_pictures(scores: Mapping[str, Any]) -> List[Tuple[str, bytes]]:
    def column(metric: str) -> Dict[str, List[float]]:
        return {name: [case["regions"][name][metric] for case in scores["cases"]] for name in scores["summary"]}

    tolerance = f"{scores['tolerance_mm']:g} mm"
    return [
        ("Dice of every case", pictures.strips(column("dice"), title="Dice", y_label="Dice", y_range=(-0.02, 1.02))),
        (
            "HD95 of every case",
            pictures.strips(column("hd95_mm"), title="HD95 (less is better)", y_label="mm", y_range=(0, None)),
        ),
        (
            "surface Dice of every case",
            pictures.strips(
                column("surface_dice"), title=f"Surface Dice at {tolerance}", y_label="share", y_range=(-0.02, 1.02)
            ),
        ),
    ]


def _curves(events: Sequence[Mapping[str, Any]]) -> List[Tuple[str, bytes]]:
    """(what it shows, PNG) for every curve there is something to draw of."""
    steps = [event for event in events if event["event"] == "step"]
    validations = [event for event in events if event["event"] == "validation"]

    def line(name: str, source: Sequence[Mapping[str, Any]], value: Callable, colour: str, measured: bool) -> Line:
        points = [(event["step"], value(event)) for event in source]
        points = [(x, y) for x, y in points if isinstance(y, (int, float))]
        return Line(name, [x for x, _ in points], [y for _, y in points], colour, measured)

    def pair(name: str, value: Callable, colours: Tuple[str, str]) -> List[Line]:
        both = [
            line(f"{name}training", steps, value, colours[0], False),
            line(f"{name}validation", validations, value, colours[1], True),
        ]
        return [each for each in both if len(each.x)]

    charts = []
    loss = pair("", lambda event: event.get("loss"), PALETTE[:2])
    if loss:
        charts.append(("Loss over steps", pictures.chart(loss, title="Loss", y_label="loss")))
    regions = list(dict.fromkeys(name for event in (*validations, *steps) for name in event.get("dice") or {}))
    for kind, source in (("validation, whole volumes", validations), ("training steps", steps)):
        dice = [
            line(
                name,
                source,
                lambda event, name=name: (event.get("dice") or {}).get(name),
                colour,
                source is validations,
            )
            for name, colour in zip(regions, PALETTE * len(regions))
        ]
        dice = [each for each in dice if len(each.x)]
        if dice:
            title = f"Dice, {kind}"
            charts.append((title, pictures.chart(dice, title=title, y_label="Dice", y_range=(0, 1))))
    seconds = [
        line("step", steps, lambda event: event.get("step_s"), PALETTE[0], False),
        line("waiting for data", steps, lambda event: event.get("wait_s"), PALETTE[1], False),
    ]
    seconds = [each for each in seconds if len(each.x)]
    if seconds:
        charts.append(
            ("Seconds per step", pictures.chart(seconds, title="Time of a step", y_label="s", y_range=(0, None)))
        )
    singles = (
        ("Learning rate", "learning_rate", "learning rate", 1),
        ("Memory of the process", "rss_bytes", "GiB", GIB),
    )
    for title, key, label, unit in singles:
        only = line("", steps, lambda event, key=key: event.get(key), PALETTE[2], True)
        if len(only.x):
            only = dataclasses.replace(only, y=[value / unit for value in only.y], dots=False)
            charts.append((title, pictures.chart([only], title=title, y_label=label, y_range=(0, None))))
    return charts


def _overlays(files: RunFiles) -> List[Tuple[str, bytes]]:
    """(caption, PNG) of the best, median and worst case by mean Dice; of fewer where there are fewer."""
    if files.store is None:
        return []
    cases = ranked(files.scores["cases"])[::-1]
    chosen: Dict[str, List[str]] = {}
    for name, position in (("best", 0), ("median", len(cases) // 2), ("worst", len(cases) - 1)):
        chosen.setdefault(cases[position]["case_id"], []).append(name)
    region, codes = next(iter(files.scores["regions"].items()))
    pages = []
    for case in cases:
        names = chosen.get(case["case_id"])
        png = names and _overlay(files, case["case_id"], codes)
        if png:
            each = ", ".join(f"{name} {values['dice']:.3f}" for name, values in case["regions"].items())
            kind = " and ".join(names) if len(cases) > 1 else "the only"
            pages.append((f"{kind} case {case['case_id']}: Dice {each}. Shown: {region}", png))
    return pages


def _overlay(files: RunFiles, case_id: str, codes: Sequence[int]) -> Optional[bytes]:
    """The overlay of one case, None when its files are not there or do not fit any more."""
    path = scores_path(files.folder, files.scores["split"]).parent / "predictions" / f"{case_id}.nii.gz"
    try:
        prediction, geometry = read_volume(path)
        record = files.store.case(case_id)
        image, truth = files.store.image(case_id), np.asarray(files.store.label(case_id))
    except (InputError, KeyError):
        return None
    prediction = to_ras(prediction, geometry)
    if prediction.shape != truth.shape:
        return None
    channels = [name.lower() for name in files.store.manifest.channels]
    channel = channels.index("flair") if "flair" in channels else 0
    return pictures.overlay(
        np.asarray(image[..., channel]),
        region_mask(truth, codes),
        region_mask(prediction, codes),
        record.spacing_mm,
        title=f"{case_id}, {files.store.manifest.channels[channel]}",
    )

"""Stands in for `python -m cpu3d`: it makes up what a run leaves behind, so that a test need not
train.

stand_in.py TEMPLATE train|evaluate ...: train writes a run of its options, continuing one that is
there, and evaluate copies the template's scores. Every call is added to "calls.txt" beside the
template. Other files there make train
    fail       "GLOB CODE WORDS": a run of such a name says the words and ends with the code, after
               its first step
    undecided  leave a run of such a name without a decision on post-processing
    cut        stop after half of its steps, and wait for SIGINT or SIGTERM, which "signals" then
               holds
"""

import argparse
import dataclasses
import fnmatch
import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, os.getcwd())

from cpu3d.chosen import SETTINGS, recipe_settings, with_settings
from cpu3d.data.files.arrays import file_sha256
from cpu3d.inference.postprocessing.rules import PostProcessing, Rule
from cpu3d.inference.postprocessing.run_rules import SCHEMA, PostprocessingRules, postprocessing_of
from cpu3d.run.checkpoint import POSTPROCESSING, save_checkpoint, weights_file
from cpu3d.run.config_json import load_config, save_config
from cpu3d.run.log import append_event, read_events
from cpu3d.settings import RunConfig
from cpu3d.util.atomic import write_json
from memory_estimator.common.schema import add_options, arguments

BUDGET_STEPS = 6
"""What a budget of minutes comes to."""


def main(template: Path, command: str, *words: str) -> int:
    parser = argparse.ArgumentParser()
    for name, kind in (
        ("store", str),
        ("run", Path),
        ("split", str),
        ("tolerance", float),
        ("out", Path),
    ):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--force", action="store_true")
    add_options(parser, SETTINGS)
    args = parser.parse_args(words)
    with (template.parent / "calls.txt").open("a") as file:
        file.write(f"{command} {args.run.name}\n")
    (template.parent / "environ").write_text("\n".join(os.environ))
    return evaluate(template, args) if command == "evaluate" else train(template, args)


def evaluate(template: Path, args: argparse.Namespace) -> int:
    config, target = load_config(args.run), args.out or args.run
    shutil.copytree(template / "evaluation", target / "evaluation", dirs_exist_ok=True)
    path = target / "evaluation" / "scores.json"
    scores = json.loads(path.read_text())
    window = list(config.grid) if config.is_patch else None
    how = {**scores["inference"], "window": window, "one_pass": not config.is_patch}
    words = postprocessing_of(args.run, config).words
    cases = [{**case, "postprocessing": words} for case in scores["cases"]]
    own = {"cases": cases, "inference": how, "tolerance_mm": args.tolerance}
    own["weights_sha256"] = file_sha256(weights_file(args.run, "best"))
    path.write_text(json.dumps({**scores, **own}))
    return 0


def train(template: Path, args: argparse.Namespace) -> int:
    around, run, settings = template.parent, args.run, arguments([SETTINGS], args)[0]
    store = load_config(template)
    config = RunConfig(**vars(with_settings(recipe_settings(settings), settings)))
    own = {
        name: getattr(store, name)
        for name in ("store", "label_names", "region_codes", "split_hash", "regions")
    }
    own.update(grid=tuple(settings.get("patch", store.grid)), steps=config.steps or BUDGET_STEPS)
    config = dataclasses.replace(config, learning_rate=config.learning_rate or 0.1, **own)
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    save_config(config, run)
    done = max((event["step"] for event in read_events(run) if "step" in event), default=0)
    append_event(run, {"event": "start", "step": done, "host": {"cpu": "made up", "cores": 2}})
    stop = config.steps // 2 if (around / "cut").exists() else config.steps
    name, code, said = (
        (around / "fail").read_text().split(" ", 2) if (around / "fail").exists() else ("", 0, "")
    )
    for step in range(done + 1, stop + 1):
        step_s = 0.75 if config.is_patch else 2.25
        voxels = config.batch * math.prod(config.grid)
        seen = {"step_s": step_s, "wait_s": 0.25, "rss_bytes": 2**30, "voxels": voxels}
        append_event(run, {"event": "step", "step": step, **seen})
        if fnmatch.fnmatch(run.name, name):
            if int(code) == 4:
                append_event(
                    run,
                    {"event": "diverged", "step": step, "reason": "loss must be finite, got nan"},
                )
            print(said, file=sys.stderr)
            return int(code)
    append_event(run, {"event": "validation", "step": stop, "mean_dice": 0.7, "seconds": 0.5})
    for name in ("best", f"step-{stop:08d}"):
        save_checkpoint(run / "checkpoints" / f"{name}.npz", {}, {"step": stop})
    if stop < config.steps:
        signals = wait(around)
        append_event(run, {"event": "end", "reason": "interrupted", "step": stop, "seconds": 9.0})
        (around / "signals").write_text(" ".join(map(str, signals)))
        return 130
    end = {
        "event": "end",
        "reason": "finished",
        "step": config.steps,
        "seconds": 36.0,
        "peak_rss_bytes": 2**31,
    }
    append_event(run, end)
    undecided = (around / "undecided").read_text() if (around / "undecided").exists() else ""
    if run.name != undecided:
        decided = PostprocessingRules(
            weights_sha256=(file_sha256(weights_file(run, "best")),),
            split_hash=config.split_hash,
            cases=2,
            chosen=PostProcessing({config.regions[0]: Rule(share=0.1)}),
            before={},
            after={},
            cases_with=dict.fromkeys(config.regions, 2),
        )
        write_json(run / POSTPROCESSING, {"schema": SCHEMA, **dataclasses.asdict(decided)})
    return 0


def wait(around: Path) -> list:
    """The signals that arrive, and a moment more for others, as a step takes its time."""
    signals = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append(int(number)))
    (around / "waits.new").write_text(f"{os.getpid()} {os.getpgid(0)}")
    (around / "waits.new").rename(around / "waits")
    end = time.monotonic() + 60  # else a test that fails leaves this behind
    while not signals and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.2)
    return signals


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))

"""Run folders as `train` and `evaluate` leave them, made by hand on the tiny store, and of phantoms
for real ones."""

import dataclasses
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from cpu3d.data.files.arrays import file_sha256
from cpu3d.experiments import runner
from cpu3d.experiments.runner import RunFailedError
from cpu3d.inference.evaluate import evaluate_split
from cpu3d.run.checkpoint import save_checkpoint, weights_file
from cpu3d.run.config_json import load_config, save_config
from tests.cpu3d.experiments import stand_in


@pytest.fixture
def make_run(tmp_path, tiny_run, fake_predictor, tiny_store):
    """make_run("patch", seed=1, shift=2): a run whose predictions are off by two voxels; other
    settings of its config.

    `scored=False` leaves it without scores, `trained=False` without weights, `end` is what its last
    event holds."""

    def make(
        variant,
        seed=0,
        *,
        shift=0,
        scored=True,
        trained=True,
        end=None,
        mean_dice=0.7,
        step_s=1.5,
        **settings,
    ):
        folder = tmp_path / "runs" / f"{variant}-seed{seed}"
        (folder / "checkpoints").mkdir(parents=True)
        config = load_config(tiny_run)
        own = {name: settings.pop(name) for name in ("norm", "policy") if name in settings}
        unet = dataclasses.replace(config.unet, seed=seed, **own)
        config = dataclasses.replace(config, **{"seed": seed, "unet": unet, "steps": 4, **settings})
        save_config(config, folder)
        lines = [{"event": "start", "step": 0, "host": {"cpu": "made up", "cores": 2}}]
        for step in range(1, 5):
            seen = {"voxels": config.batch * math.prod(config.grid), "rss_bytes": 2**30}
            lines.append(
                {"event": "step", "step": step, "step_s": step_s if step > 1 else 9.0, **seen}
            )
            if step % 2 == 0:
                lines.append(
                    {"event": "validation", "step": step, "mean_dice": mean_dice, "seconds": 0.5}
                )
        default = {"reason": "finished", "step": 4, "seconds": 36.0, "peak_rss_bytes": 3 * 2**30}
        if end != "none":
            lines.append({"event": "end", **default, **(end or {})})
        (folder / "log.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
        )
        if trained:
            for name in ("best", "step-00000004"):
                save_checkpoint(folder / "checkpoints" / f"{name}.npz", {}, {"step": 4})
                os.utime(folder / "checkpoints" / f"{name}.npz", (1, 1))
        if scored:
            fake_predictor.shift = shift
            window = list(config.grid) if config.is_patch else None
            how = {"window": window, "one_pass": not window, "overlap": 0.5, "flips": True}
            evaluate_split(
                fake_predictor,
                tiny_store,
                "test",
                folder,
                about={
                    "fold": config.fold,
                    "weights_sha256": file_sha256(weights_file(folder, "best")),
                    "inference": how,
                },
            )
        return folder

    return make


@dataclass
class Stage:
    """The folder that tells `stand_in.py` what to do, and shows what it has done."""

    folder: Path

    def calls(self):
        """The calls since the last question, such as ["train whole-seed0"]."""
        path = self.folder / "calls.txt"
        calls = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return calls

    def tell(self, name, text=""):
        (self.folder / name).write_text(text)

    def waited(self, name, most_s=20.0):
        """The content of a file that the stand-in leaves, once it is there."""
        end = time.monotonic() + most_s
        while not (self.folder / name).exists():
            assert time.monotonic() < end, f"no {name}"
            time.sleep(0.01)
        return (self.folder / name).read_text()


@pytest.fixture
def processes(make_run, monkeypatch) -> Stage:
    """`stand_in.py` instead of the real program."""
    template = make_run("template", shift=1)
    program = (sys.executable, str(Path(__file__).with_name("stand_in.py")), str(template))
    monkeypatch.setattr(runner, "PROGRAM", program)
    monkeypatch.setattr(runner, "POLL_S", 0.05)
    return Stage(template.parent)


@pytest.fixture
def stage(make_run, monkeypatch) -> Stage:
    """`stand_in.main` called in this process, instead of the real program."""
    template = make_run("template", shift=1)

    def call(command, log, label, **more):
        code = stand_in.main(template, *command)
        if code:
            why = f"{command[0]} {'diverged' if code == 4 else 'failed'}"
            raise RunFailedError(f"{label} must succeed", code, why)

    monkeypatch.setattr(runner, "call", call)
    return Stage(template.parent)

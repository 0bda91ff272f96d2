"""Runs of experiments without a network, in this process."""

import dataclasses
import signal
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.data.files.arrays import file_sha256
from cpu3d.data.store import open_store
from cpu3d.errors import DivergedError, Interrupted
from cpu3d.experiments import folds, runner, variants
from cpu3d.experiments.runner import RunFailedError
from cpu3d.inference import evaluate
from cpu3d.inference.postprocessing import run_rules
from cpu3d.run.checkpoint import weights_file
from cpu3d.run.config_json import load_config, save_config
from cpu3d.run.log import append_event
from cpu3d.training import fit
from tests.cpu3d.conftest import FakePredictor
from tests.cpu3d.runs import HOST, SMALL, NumpyLearner, save_after_each_step

SETTINGS = {**SMALL, "epochs": 2, "validations": 1}


class Answers(FakePredictor):
    """The truth, a voxel off for each fold after the first and for patches, and an island of WT in
    a corner."""

    def __init__(self, run, weights, inference):
        config = load_config(run)
        super().__init__(
            Path(config.store),
            config.codes_by_region,
            config.label_names,
            channels=config.store_channels,
            inputs=config.store_channels,
            shift=int(config.fold[0]) - 1 if config.fold else int(config.is_patch),
            inference=inference,
            config=config,
            window=list(config.grid) if config.is_patch else None,
            weights_sha256=file_sha256(weights_file(run, weights)),
        )

    def probabilities(self, image, record, channels=(), in_windows=False):
        truth = np.asarray(open_store(self.store).label(record.case_id))
        masks = np.stack([np.isin(truth, codes) for codes in self.regions.values()], axis=-1)
        masks = np.roll(masks, self.shift, axis=0)
        masks[:2, :2, :2, 0] = True
        return masks.astype(np.float32) * self.sure


@dataclass
class Commands:
    """The commands that were called for, carried out in this process."""

    calls: list = field(default_factory=list)
    cut_at: int = -1  # the number of the call in which Ctrl-C comes
    diverges: str = ""  # the runs whose training diverges
    # (run, weights) of the networks that were asked
    loaded: list = field(default_factory=list)

    def seen(self):
        calls = self.calls
        self.calls = []
        return calls


def carried_out_here(monkeypatch):
    """Have trainings without a network, and networks that answer as `Answers`."""
    told = Commands()
    step = NumpyLearner.step

    def interrupted(self, *arguments):
        signal.raise_signal(signal.SIGINT)
        return step(self, *arguments)

    def call(command, log, label, *, run=None, steps=0):
        folder = Path(command[command.index("--run") + 1])
        told.calls.append(f"{command[0]} {folder.name}")
        is_cut = len(told.calls) - 1 == told.cut_at
        if folder.name in told.diverges and command[0] == "train":
            if (folder / "config.json").is_file():
                config = dataclasses.replace(load_config(folder), epochs=SETTINGS["epochs"])
                save_config(config, folder)
            folder.mkdir(parents=True, exist_ok=True)
            append_event(folder, {"event": "start", "step": 1})
            append_event(folder, {"event": "diverged", "step": 1, "reason": "loss must be finite"})
            raise RunFailedError("it must succeed", DivergedError.exit_code, "train diverged")
        if is_cut and command[0] == "evaluate":
            raise Interrupted("the same command continues")
        with monkeypatch.context() as patch:
            if is_cut:
                patch.setattr(NumpyLearner, "step", interrupted)
            code = main(command)
        if code == 130:
            raise Interrupted("the same command continues")
        assert code == 0

    def networks(runs, weights, inference):
        told.loaded += [(run.name, weights) for run in runs]
        return [Answers(run, weights, inference) for run in runs]

    monkeypatch.setattr(fit, "Learner", lambda config, exchange: NumpyLearner(config))
    save_after_each_step(monkeypatch)
    monkeypatch.setattr(runner, "call", call)
    for module in (folds, variants):
        monkeypatch.setattr(module, "read_host", lambda: HOST)
    for module in (evaluate, run_rules):
        monkeypatch.setattr(module, "trained_predictors", networks)
    return told


@pytest.fixture
def commands(monkeypatch):
    return carried_out_here(monkeypatch)

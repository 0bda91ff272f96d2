"""Runs on the store of phantoms, as tests begin, cut and read them."""

import numpy as np
import pytest

from cpu3d.config import save_config
from cpu3d.resolve import resolve
from cpu3d.training.checkpoint import load_checkpoint, weights_file
from cpu3d.training.fit import Fit
from cpu3d.training.run_log import read_events
from memory_estimator.host import read_host

SMALL = {"filters": 4, "depth": 3, "dtype": "float32", "epochs": 3, "warmup_steps": 2, "learning_rate": 0.01}


def start(store, folder, **settings):
    config = resolve(store, folder, read_host(), {**SMALL, **settings}, None)
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    save_config(config, folder)
    return Fit(store, folder, config)


def weights(folder, name="last"):
    return load_checkpoint(weights_file(folder, name))[0]


def assert_cut_and_continued_is_uninterrupted(store, folder, monkeypatch, steps, done=5, **settings):
    """Leaves both runs, folder/whole and folder/cut, which died after `done` of so many steps."""
    options = {"ema": 0.9, "save_minutes": 0.0, "steps": steps, **settings}
    start(store, folder / "whole", **options).run()
    expected = weights(folder / "whole")

    cut = start(store, folder / "cut", **options)
    step, taken = Fit._train_step, []

    def die(self, *given):
        if len(taken) == done:
            raise MemoryError
        taken.append(1)
        return step(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Fit, "_train_step", die)
        with pytest.raises(MemoryError):
            cut.run()
    again = start(store, folder / "cut", **options)
    assert again.step == done
    again.run()
    for name, array in weights(folder / "cut").items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    logged = [event["step"] for event in read_events(folder / "cut") if event["event"] == "step"]
    assert logged == list(range(1, steps + 1))

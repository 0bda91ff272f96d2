"""Runs on the store of phantoms, as tests begin, cut and read them; and a learner that needs no
network."""

import argparse
import dataclasses
import functools
import json
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf

from cpu3d.data.store import Store, open_store, write_store
from cpu3d.errors import InputError
from cpu3d.plan import make_plan
from cpu3d.run.checkpoint import (
    BEST,
    KEPT,
    checkpoints,
    load_checkpoint,
    newest,
    save_checkpoint,
    weights_file,
)
from cpu3d.run.config_json import save_config
from cpu3d.run.log import read_events
from cpu3d.training.fit import Fit
from cpu3d.training.heartbeat_writer import HeartbeatWriter
from cpu3d.training.learner import Learner, Outcome
from cpu3d.training.watchdog import Watchdog
from cpu3d.util.progress import say
from memory_estimator.common.schema import add_options, arguments
from memory_estimator.host import read_host
from models.unet3d import build_unet3d, finest
from models.weights import network_weights

HOST = dataclasses.replace(read_host(), available_bytes=20 * 2**30, cgroup_limit_bytes=None)
"""This one, with memory enough: nothing is decided by what is free while tests run."""


def with_free(free_bytes):
    return dataclasses.replace(HOST, available_bytes=free_bytes)


SMALL = {
    "filters": 4,
    "depth": 2,
    "dtype": "float32",
    "epochs": 3,
    "learning_rate": 0.01,
    "curriculum": "off",
}


class NumpyLearner:
    """A `Learner` for `Fit`, in NumPy: one number a region, which follows the region's share of the
    voxels.

    Like the real one it has a state besides its weights, and each step hangs on the volumes that it
    is given."""

    def __init__(self, config):
        self.config = config
        regions = config.unet.outputs
        self._arrays = {
            "model/000": np.zeros(regions),
            "optimizer/000": np.zeros(regions),
            "updates": np.zeros(1),
        }
        self.parameters = regions
        self.largest_bytes = 8 * regions

    def step(self, micro_batches, learning_rate, note=lambda: 0.0, before_exchange=lambda: None):
        weights = self._arrays["model/000"]
        momentum = self._arrays["optimizer/000"]
        losses = []
        dice = []
        gradient = np.zeros_like(weights)
        for _ in range(self.config.micro_batches):
            image, target = (np.asarray(array, np.float64) for array in next(micro_batches))
            error = target.mean((1, 2, 3)) * (1 + image.mean()) - weights
            losses.append(np.square(error).mean())
            dice.extend(error)
            gradient += error.sum(0) / self.config.batch
        if np.isfinite(losses).all():
            momentum[:] = 0.9 * momentum + gradient
            weights += learning_rate * momentum
            self._arrays["updates"] += 1
        return Outcome(np.array(losses), np.array(dice), np.array([note()]))

    def logits(self, image):
        answers = np.broadcast_to(
            self._arrays["model/000"], (*image.shape[:4], self.config.unet.outputs)
        )
        return answers.astype(np.float32)

    def arrays(self):
        return {name: array.copy() for name, array in self._arrays.items()}

    def release(self):
        self._arrays = {}

    def weights(self):
        return {"model/000": self._arrays["model/000"].copy()}

    def start_from(self, first):
        """From a norm's scale: it is no network that could take all."""
        self._arrays["model/000"][:] = np.mean(first("model/001", np.zeros(1)))

    def restore(self, arrays):
        for name, array in self._arrays.items():
            array[...] = arrays[name]


OF_NETWORK = ("unet", "grid", "batch", "micro_batch", "device", "freeze")
OF_NETWORK += ("optimizer", "peak_rate")
"""What a learner is compiled from."""


def shared_learner(config):
    """The network of a run from its initial weights; one that was compiled for an equal run before
    is taken again."""
    key = repr([getattr(config, name) for name in OF_NETWORK])
    if key not in _LEARNERS:
        learner = Learner(config)
        learner.release = lambda: None  # it is taken again
        initial = {name: np.array(array) for name, array in learner.arrays().items()}
        _LEARNERS[key] = learner, initial
    learner, initial = _LEARNERS[key]
    learner.config = config
    learner.restore(initial)
    return learner


_LEARNERS = {}


def shared_network(unet, weights):
    """`compiled_network` of predictions; one that was compiled for other weights is taken again."""
    key = repr(unet)
    if key not in _NETWORKS:
        model = build_unet3d(unet, batch_size=1)
        function = tf.function(
            lambda image: tf.cast(finest(model(image, training=False)), tf.float32),
            [tf.TensorSpec((1, None, None, None, unet.channels), unet.dtype)],
            autograph=False,
        )
        _NETWORKS[key] = model, function
    model, function = _NETWORKS[key]

    def answer(image):
        model.set_weights(weights)
        return function(image)

    return answer


_NETWORKS = {}


def run_command(module, *words):
    """Run a command of `python -m cpu3d` in this process: its module and the words after its
    name."""
    parser = argparse.ArgumentParser()
    add_options(parser, *module.OPTIONS)
    return module.run(
        *arguments(module.OPTIONS, parser.parse_args([str(word) for word in words]), InputError)
    )


def shown_cases(page):
    """The cases whose slices a page shows."""
    content = re.search(
        r'<script type="application/json"[^>]*>(.*?)</script>', page.read_text(encoding="utf-8")
    )
    return json.loads(content.group(1))


def decided(store, folder, **settings):
    """The settings of a run on `store`, all of them."""
    return make_plan(store, folder, HOST, settings).config


def start(store, folder, *, learner=shared_learner, **settings):
    """A run, new or continued, with the real network or another `learner(config)`."""
    plan = make_plan(store, folder, HOST, {**SMALL, **settings})
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    save_config(plan.config, folder)
    watchdog = Watchdog(HeartbeatWriter(folder, say=say))
    return Fit(plan, folder, watchdog, make_learner=learner)


start_without_network = functools.partial(start, learner=NumpyLearner)
"""A run whose learner needs no network."""


def written_weights(config, folder, seed=0):
    """A run of `config` in `folder` that has its best weights, drawn, and was never trained."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    save_config(config, folder)
    rng = np.random.default_rng(seed)
    weights = network_weights(config.unet)
    # Above 0, as variances are, and so small that a loss is no sign of a training that diverges.
    arrays = {weight.array: rng.uniform(0, 0.1, weight.shape).astype("f4") for weight in weights}
    state = {"step": 1, "best": 0.5, "coarse_steps": 0, "split_hash": config.split_hash}
    save_checkpoint(folder / "checkpoints" / BEST, arrays, state)
    return folder


def of_voxels(store, *spacing_mm, but=(), other_mm=(1.0, 1.0, 1.0)):
    """A view of a store with voxels of another size, in the cases `but` of `other_mm`."""
    cases = []
    for case in store.manifest.cases:
        size = other_mm if case.case_id in but else spacing_mm
        cases.append(dataclasses.replace(case, spacing_mm=size))
    return Store(store.folder, dataclasses.replace(store.manifest, cases=cases))


def with_absent_region(store):
    """A view of a store with one region more, NC, that no case has."""
    manifest = store.manifest
    labels = {**manifest.labels, 9: "necrosis"}
    regions = {**manifest.regions, "NC": (9,)}
    return Store(store.folder, dataclasses.replace(manifest, labels=labels, regions=regions))


def stored(view, folder):
    """A view of a store as one in `folder`."""
    shutil.copytree(view.folder, folder)
    write_store(folder, view.manifest)
    return open_store(folder)


def weights(folder, name="last"):
    return load_checkpoint(weights_file(folder, name))[0]


def save_after_each_step(monkeypatch):
    monkeypatch.setattr("cpu3d.training.fit.SAVE_EVERY_S", 0)


def steps_of(folder):
    return [event for event in read_events(folder) if event["event"] == "step"]


def assert_same_weights(folder, other):
    """To the bit."""
    expected = weights(other)
    for name, array in weights(folder).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


SAME = {
    "step": ("step", "epoch", "case_id", "loss", "dice", "learning_rate"),
    "validation": ("step", "epoch", "loss", "dice", "mean_dice", "best", "cases"),
}
"""Event -> its fields that follow from the run alone. JSON keeps a float to the bit."""


def followed(run):
    """What of a finished run follows from the run alone, its arrays to the bit."""
    events = []
    for event in read_events(run):
        events.append([event[name] for name in SAME.get(event["event"], ())])
    weights = []
    for name in ("last", "best"):
        arrays, state = load_checkpoint(weights_file(run, name))
        bits = {key: (array.dtype, array.shape, array.tobytes()) for key, array in arrays.items()}
        weights.append(({**state, "trained_s": 0, "validated_s": 0}, bits))
    return [event for event in events if event], weights


def assert_same_run(run, reference):
    """A finished run is that of `reference` to the bit: log, last checkpoint, best weights. Nothing
    else is left."""
    assert followed(run) == followed(reference)
    last = read_events(run)[-1]
    assert (last["event"], last["reason"]) == ("end", "finished")
    assert newest(run).path == checkpoints(run)[0]
    assert len(checkpoints(run)) <= KEPT
    assert list((run / "checkpoints").glob(".*.partial")) == []


def assert_cut_and_continued_is_uninterrupted(
    store, folder, monkeypatch, steps, done=5, **settings
):
    """Leaves both runs, folder/whole and folder/cut, which died after `done` of so many steps."""
    save_after_each_step(monkeypatch)
    options = {"steps": steps, **settings}
    start(store, folder / "whole", **options).run()
    cut = start(store, folder / "cut", **options)
    step = type(cut.learner).step
    taken = []

    def die(self, *arguments):
        if len(taken) == done:
            raise MemoryError
        taken.append(1)
        return step(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(type(cut.learner), "step", die)
        with pytest.raises(MemoryError):
            cut.run()
    again = start(store, folder / "cut", **options)
    assert again.step == done
    again.run()
    assert_same_run(folder / "cut", folder / "whole")

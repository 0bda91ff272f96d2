"""A run that starts from the weights of another: what it takes, what it refuses, what it says."""

import dataclasses
import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest

from cpu3d.data.manifest import remake
from cpu3d.data.normalise import Kind, Normalisation
from cpu3d.data.store import Store
from cpu3d.errors import InputError
from cpu3d.experiments.folds import train_folds
from cpu3d.plan import make_plan
from cpu3d.plan_text import plan_lines
from cpu3d.report.report import write_report
from cpu3d.run.checkpoint import weights_file
from cpu3d.run.config_json import load_config
from cpu3d.run.trained_weights import run_weights
from cpu3d.training.learner import Learner
from cpu3d.training.train import train
from models.weights import network_weights
from tests.cpu3d.runs import (
    HOST,
    SMALL,
    assert_cut_and_continued_is_uninterrupted,
    decided,
    of_voxels,
    written_weights,
)

pytestmark = pytest.mark.usefixtures("graphs_as_written", "compiled_once")

OPTIONS = {
    **{name: value for name, value in SMALL.items() if name != "epochs"},
    "steps": 2,
    "validations": 1,
    "augment": "off",
}
CHANNELS = ["FLAIR", "T1w"]
REGIONS = ["WT", "TC"]
OF_SOURCE = {**OPTIONS, "channels": CHANNELS, "regions": REGIONS}


@pytest.fixture(scope="module")
def source(phantom_store, compiled_once, tmp_path_factory):
    """A run of two channels and two regions."""
    folder = tmp_path_factory.mktemp("source") / "run"
    train(phantom_store.folder, folder, settings=OF_SOURCE)
    return folder


def started(store, folder, source, **settings):
    """The plan of a run that starts from `source`, its first weights by layer and name, and those
    that it would have by itself."""
    chosen = {**OF_SOURCE, "init": str(source), **settings}
    plan = make_plan(store, folder, HOST, chosen)
    learner = Learner(plan.config.at(plan.steps))
    fresh = by_name(plan.config, learner.weights().values())
    learner.start_from(plan.transfer.first)
    return plan, learner, by_name(plan.config, learner.weights().values()), fresh


def by_name(config, arrays):
    weights = network_weights(config.unet)
    return {(w.layer, w.name): np.array(array) for w, array in zip(weights, arrays)}


def of_run(run, name="best"):
    """The weights of a run that predict, by layer and name."""
    config = load_config(run)
    weights = run_weights(config, weights_file(run, name))
    return by_name(config, (weights.arrays[each] for each in weights.names))


def assert_same(arrays, expected):
    assert arrays.keys() == expected.keys()
    for key, array in arrays.items():
        np.testing.assert_array_equal(array, expected[key], err_msg=str(key))


# --- What is taken ---


def test_a_run_of_the_same_network_takes_all_weights(phantom_store, source, tmp_path):
    plan, learner, first, _ = started(
        phantom_store, tmp_path, source, dtype="bfloat16", policy="lean"
    )
    assert_same(first, of_run(source))
    record = plan.config.init_record
    assert record.fresh_layers == record.new_channels == record.new_regions == ()
    assert (record.channels, record.regions) == (tuple(CHANNELS), tuple(REGIONS))
    assert record.step == 2
    arrays = learner.arrays()
    assert int(arrays["updates"]) == 0
    slots = [array for name, array in arrays.items() if name.startswith("optimizer/")]
    assert not any(np.any(array) for array in slots if np.ndim(array)), "its optimizer is new"


def test_other_orders_and_a_new_channel_change_no_answer_and_new_regions_are_fresh(
    phantom_store, tmp_path
):
    network = {"residual": True, "depth": 3}
    config = decided(phantom_store, tmp_path / "none", **{**OF_SOURCE, **network})
    source = written_weights(config, tmp_path / "source")
    _, same, _, _ = started(phantom_store, tmp_path / "a", source, **network)
    more = {"channels": ["T2w", *CHANNELS[::-1]], "regions": ["TC", "ET", "WT"], **network}
    more["deep_supervision"] = True
    plan, learner, first, fresh = started(phantom_store, tmp_path / "b", source, **more)
    shape = (1, *plan.config.grid, 3)
    image = np.random.default_rng(0).normal(size=shape).astype("f4")
    answers = learner.logits(image).numpy()
    expected = same.logits(image[..., :0:-1]).numpy()
    np.testing.assert_allclose(answers[..., [2, 0]], expected, rtol=1e-4, atol=1e-4)
    head = first[("head", "kernel")], first[("head", "bias")]
    by_itself = fresh[("head", "kernel")], fresh[("head", "bias")]
    for array, expected in zip(head, by_itself):
        np.testing.assert_array_equal(array[..., 1], expected[..., 1])
        assert not np.array_equal(array[..., 0], expected[..., 0])
    record = plan.config.init_record
    assert (record.new_channels, record.new_regions) == (("T2w",), ("ET",))
    assert record.fresh_layers == ("head1",)


def test_a_run_that_shares_no_channel_has_a_fresh_first_convolution(
    phantom_store, source, tmp_path
):
    plan, _, first, fresh = started(phantom_store, tmp_path, source, channels=["T2w"])
    key = ("encoder0_conv1", "kernel")
    np.testing.assert_array_equal(first[key], fresh[key])
    assert plan.config.init_record.fresh_layers == ("encoder0_conv1",)
    expected = of_run(source)
    for other in first.keys() - {key}:
        np.testing.assert_array_equal(first[other], expected[other])


# --- What stays ---


def test_a_frozen_encoder_stays_to_the_bit_and_all_else_learns(
    phantom_store, tmp_path, monkeypatch
):
    settings = {**OPTIONS, "norm": "batch", "batch": 2}
    config = decided(phantom_store, tmp_path / "none", **settings)
    source = written_weights(config, tmp_path / "source")
    new = {**settings, "steps": 3, "init": str(source), "freeze": "encoder"}
    assert_cut_and_continued_is_uninterrupted(phantom_store, tmp_path, monkeypatch, done=2, **new)
    old = of_run(source)
    last = of_run(tmp_path / "whole", "last")
    stays = {key: np.array_equal(last[key], old[key]) for key in old}
    assert stays == {key: key[0].startswith("encoder") for key in old}


def test_freezing_needs_weights_to_start_from_that_know_all_channels(
    phantom_store, source, tmp_path
):
    frozen = {**OPTIONS, "freeze": "encoder"}
    with pytest.raises(InputError, match="--init"):
        make_plan(phantom_store, tmp_path, HOST, frozen)
    with pytest.raises(InputError, match="T2w"):
        make_plan(
            phantom_store, tmp_path, HOST, {**frozen, "init": str(source), "channels": ["T2w"]}
        )


# --- Going on ---


def test_a_run_that_has_begun_keeps_its_start_and_needs_its_weights_no_more(
    phantom_store, source, tmp_path
):
    run = tmp_path / "run"
    init = shutil.copytree(source, tmp_path / "init")
    settings = {**OF_SOURCE, "init": str(init)}
    record = train(phantom_store.folder, run, settings=settings).init_record
    shutil.rmtree(init)
    with pytest.raises(InputError, match="must keep its settings"):
        train(phantom_store.folder, run, settings={"freeze": "encoder"})
    for steps in (3, 4):
        assert train(phantom_store.folder, run, settings={"steps": steps}).init_record == record


# --- What is refused ---


def damaged(source, folder):
    path = Path(shutil.copytree(source, folder / "damaged")) / "checkpoints" / "best.npz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


def alone(source, folder):
    return Path(shutil.copy(weights_file(source, "best"), folder))


def empty_folder(source, folder):
    (folder / "empty").mkdir()
    return folder / "empty"


@pytest.mark.parametrize("make", [damaged, alone, empty_folder])
def test_what_are_no_weights_is_refused_before_anything_is_written(
    phantom_store, source, tmp_path, make
):
    path = make(source, tmp_path)
    with pytest.raises(InputError, match=str(path)):
        train(phantom_store.folder, tmp_path / "run", settings={**OF_SOURCE, "init": str(path)})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("settings", [{"filters": 8}, {"norm": "batch"}], ids=str)
def test_another_network_is_refused_with_what_differs(phantom_store, source, tmp_path, settings):
    ((name, value),) = settings.items()
    with pytest.raises(InputError, match=rf"{name} {value}"):
        make_plan(phantom_store, tmp_path, HOST, {**OF_SOURCE, **settings, "init": str(source)})


# --- What the weights have seen ---


def seen(store, source, folder, **settings):
    chosen = {**OPTIONS, "init": str(source), **settings}
    return make_plan(store, folder, HOST, chosen).config.init_record.seen


def test_a_run_takes_the_strides_of_its_weights_and_says_so(phantom_store, tmp_path):
    strides = ((2, 2, 2), (2, 2, 2))
    options = {**OPTIONS, "depth": 3}
    trained = decided(phantom_store, tmp_path / "none", **options, strides=strides)
    source = written_weights(trained, tmp_path / "source")
    store = of_voxels(phantom_store, 1.0, 1.0, 5.0)  # which would have others by itself
    plan = make_plan(store, tmp_path / "run", HOST, {**options, "init": str(source)})
    assert plan.config.unet == trained.unet
    assert str(source) in plan.reasons["strides"]
    other = {**options, "init": str(source), "strides": ((2, 1, 2), (2, 2, 2))}
    with pytest.raises(InputError, match="--strides 2,1,2 2,2,2"):
        make_plan(store, tmp_path / "run", HOST, other)


def test_images_of_another_normalisation_than_the_weights_know_are_named(
    phantom_store, source, tmp_path
):
    manifest = phantom_store.manifest
    kinds = (Normalisation(Kind.ZSCORE),) * len(manifest.channels)
    store = Store(phantom_store.folder, dataclasses.replace(manifest, normalisation=kinds))
    settings = {**OF_SOURCE, "init": str(source)}
    record = make_plan(store, tmp_path / "run", HOST, settings).config.init_record
    assert len(record.warnings) == len(CHANNELS)
    assert all("zscore" in line and name in line for line, name in zip(record.warnings, CHANNELS))
    same = make_plan(phantom_store, tmp_path / "same", HOST, settings).config.init_record
    assert same.warnings == ()


def test_weights_of_another_fold_of_the_same_split_have_seen_held_out_patients(
    phantom_store, source, tmp_path
):
    fold = {"fold": "1/3"}
    assert seen(phantom_store, source, tmp_path) is False
    assert seen(phantom_store, source, tmp_path, **fold) is True
    split = phantom_store.manifest.split
    other = remake(phantom_store.manifest, split={**split, "val": split["test"], "test": ()})
    other_split = Store(phantom_store.folder, other)
    assert seen(other_split, source, tmp_path) is None, "nothing is known of other splits"
    plan = make_plan(phantom_store, tmp_path, HOST, {**OF_SOURCE, "init": str(source), **fold})
    (line,) = [line for line in plan_lines(plan, HOST) if line.startswith("warning")]
    assert "scores are too good" in line
    # Nor is it forgotten by a run that starts from this one.
    run = written_weights(plan.config, tmp_path / "run")
    assert seen(phantom_store, run, tmp_path / "next", **fold) is True
    # It is refused where all cases are to be scored by folds that have not seen them.
    with pytest.raises(InputError, match="held-out patients"):
        train_folds(
            phantom_store.folder, tmp_path / "folds", 3, settings={**OF_SOURCE, "init": str(source)}
        )
    assert not (tmp_path / "folds").exists()


# --- What is said ---


def test_plan_and_report_say_what_was_taken(phantom_store, source, tmp_path, capsys):
    run = tmp_path / "run"
    more = {"regions": [*REGIONS, "ET"], "freeze": "encoder", "init": str(source)}
    config = train(phantom_store.folder, run, settings={**OF_SOURCE, **more})
    printed = capsys.readouterr().err
    path = weights_file(source, "best")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert config.init_record.sha256 == digest
    for text in (printed, write_report(run).read_text(encoding="utf-8")):
        assert str(path) in text
        assert digest[:12] in text

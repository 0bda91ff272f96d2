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
from cpu3d.run.log import read_events
from cpu3d.run.trained_weights import run_weights
from cpu3d.run.transfer import init_rows
from cpu3d.training.learner import Learner
from cpu3d.training.train import train
from models.weights import network_weights
from tests.cpu3d.runs import (
    HOST,
    SMALL,
    assert_cut_and_continued_is_uninterrupted,
    decided,
    of_voxels,
    weights,
    written_weights,
)

pytestmark = pytest.mark.usefixtures("graphs_as_written", "compiled_once")

OPTIONS = {**SMALL, "steps": 2, "validations": 1, "augment": "off"}
OPTIONS.pop("epochs")
CHANNELS = ("FLAIR", "T1w")
REGIONS = ("WT", "TC")
OF_SOURCE = {**OPTIONS, "channels": CHANNELS, "regions": REGIONS}


@pytest.fixture(scope="module")
def source(phantom_store, compiled_once, tmp_path_factory):
    """A run of two channels and two regions."""
    folder = tmp_path_factory.mktemp("source") / "run"
    train(phantom_store.folder, folder, settings=OF_SOURCE)
    return folder


def plan_from(source, store, folder, **settings):
    """The plan of a run that starts from `source`."""
    return make_plan(store, folder, HOST, {**OF_SOURCE, "init": str(source), **settings})


def started(plan):
    """The learner of a run that starts from another, and the weights that it would have by
    itself."""
    learner = Learner(plan.config.at(plan.steps))
    fresh = learner.weights()
    learner.start_from(plan.transfer.first)
    return learner, fresh


# --- What is taken ---


def test_a_run_of_the_same_network_takes_all_weights(phantom_store, source, tmp_path):
    plan = plan_from(source, phantom_store, tmp_path, dtype="bfloat16", policy="lean")
    learner, _ = started(plan)
    np.testing.assert_equal(learner.weights(), dict(weights(source, "best")))
    record = plan.config.init_record
    assert record.fresh_layers == record.new_channels == record.new_regions == ()
    assert (record.channels, record.regions, record.step) == (CHANNELS, REGIONS, 2)
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
    same, _ = started(plan_from(source, phantom_store, tmp_path / "a", **network))
    more = {"channels": ("T2w", *CHANNELS[::-1]), "regions": ("TC", "ET", "WT"), **network}
    plan = plan_from(source, phantom_store, tmp_path / "b", **more, deep_supervision=True)
    learner, fresh = started(plan)
    image = np.random.default_rng(0).normal(size=(1, *plan.config.grid, 3)).astype("f4")
    answers = learner.logits(image).numpy()
    expected = same.logits(image[..., :0:-1]).numpy()
    np.testing.assert_allclose(answers[..., [2, 0]], expected, rtol=1e-4, atol=1e-4)
    of_head = [w.array for w in network_weights(plan.config.unet) if w.layer == "head"]
    assert len(of_head) == 2
    for name in of_head:
        is_fresh = np.equal(learner.weights()[name], fresh[name]).reshape(-1, 3).all(0)
        assert is_fresh.tolist() == [False, True, False]
    record = plan.config.init_record
    assert init_rows(record)[1:4] == [
        ("layers", f"{record.layers - 1} of {record.layers}; fresh: head1"),
        ("channels", "T1w, FLAIR taken by name; T2w new, zero at first"),
        ("regions", "TC, WT taken by name; ET new, fresh"),
    ]


def test_a_run_that_shares_no_channel_has_a_fresh_first_convolution(
    phantom_store, source, tmp_path
):
    plan = plan_from(source, phantom_store, tmp_path, channels=["T2w"])
    learner, fresh = started(plan)
    first = "model/000"
    expected = {**weights(source, "best"), first: np.array(fresh[first])}
    np.testing.assert_equal(learner.weights(), expected)
    assert plan.config.init_record.fresh_layers == ("encoder0_conv1",)


# --- What stays ---


def test_a_frozen_encoder_stays_to_the_bit_and_all_else_learns(
    phantom_store, tmp_path, monkeypatch
):
    settings = {**OPTIONS, "norm": "batch", "batch": 2}
    config = decided(phantom_store, tmp_path / "none", **settings)
    source = written_weights(config, tmp_path / "source")
    init = str(weights_file(source, "best"))
    new = {**settings, "steps": 3, "init": init, "freeze": "encoder"}
    assert_cut_and_continued_is_uninterrupted(phantom_store, tmp_path, monkeypatch, done=2, **new)
    old = weights(source, "best")
    last = weights(tmp_path / "whole")
    for weight in network_weights(config.unet):
        stays = np.array_equal(last[weight.array], old[weight.array])
        assert stays == weight.layer.startswith("encoder"), weight


def test_freezing_needs_weights_to_start_from_that_know_all_channels(
    phantom_store, source, tmp_path
):
    with pytest.raises(InputError, match="--freeze encoder must come with --init, got none"):
        make_plan(phantom_store, tmp_path, HOST, {**OPTIONS, "freeze": "encoder"})
    with pytest.raises(InputError, match=r"must come with channels that .*, got new T2w;"):
        plan_from(source, phantom_store, tmp_path, freeze="encoder", channels=["T2w"])


# --- Going on ---


def test_a_run_that_has_begun_keeps_its_start_and_needs_its_weights_no_more(
    phantom_store, source, tmp_path
):
    init = shutil.copytree(source, tmp_path / "init")
    (init / "checkpoints/best.npz").unlink()  # then its last weights are taken

    def go(**settings):
        return train(phantom_store.folder, tmp_path / "run", settings=settings).init_record

    record = go(**OF_SOURCE, init=str(init))
    saved = [e["step"] for e in read_events(tmp_path / "run") if e["event"] == "checkpoint"]
    assert saved == [0, 2], "at once, as nothing else has these weights"
    shutil.rmtree(init)
    with pytest.raises(InputError, match="must keep its settings"):
        go(freeze="encoder")
    assert go(steps=3) == go(steps=4) == record


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
    with pytest.raises(InputError, match=f"{path} must (be|hold) "):
        train(phantom_store.folder, tmp_path / "run", settings={**OF_SOURCE, "init": str(path)})
    assert not (tmp_path / "run").exists()


def test_weights_beside_the_config_of_another_network_are_refused(source):
    config = load_config(source)
    wide = dataclasses.replace(config.unet, filters=8)
    for changes in ({"unet": wide}, {"regions": ("WT",)}):
        with pytest.raises(InputError, match=r"must hold the weights of its run's config\.json"):
            run_weights(dataclasses.replace(config, **changes), weights_file(source, "best"))


def test_another_network_is_refused_with_what_differs(phantom_store, source, tmp_path):
    with pytest.raises(InputError, match="filters 8 for 4 and norm batch for instance"):
        plan_from(source, phantom_store, tmp_path, filters=8, norm="batch")


@pytest.mark.parametrize("curriculum", ["off", "all"])
def test_a_run_takes_the_strides_of_its_weights_and_says_so(
    phantom_store, tmp_path, monkeypatch, curriculum
):
    monkeypatch.chdir(tmp_path)
    options = {**OPTIONS, "depth": 3, "curriculum": curriculum}
    trained = decided(phantom_store, tmp_path / "none", **options, strides=2 * ((2, 2, 2),))
    source = written_weights(trained, tmp_path / "source")
    store = of_voxels(phantom_store, 1.0, 1.0, 5.0)  # which would have others by itself
    options["init"] = source.name
    plan = make_plan(store, tmp_path / "run", HOST, options)
    assert plan.config.unet == trained.unet
    assert str(source) in plan.reasons["strides"]
    options["strides"] = ((2, 2, 2), (2, 1, 2))
    with pytest.raises(InputError, match=r"--strides .*2,1,2"):
        make_plan(store, tmp_path / "run", HOST, options)


# --- What the weights have seen ---


def test_images_of_another_normalisation_or_spacing_than_the_weights_know_are_named(
    phantom_store, source, tmp_path
):
    manifest = phantom_store.manifest
    kinds = (Normalisation(Kind.ZSCORE),) * len(manifest.channels)
    settings = dataclasses.replace(manifest.settings, target_spacing_mm=(1.0, 1.0, 2.0))
    other = dataclasses.replace(manifest, normalisation=kinds, settings=settings)

    def warnings(manifest):
        store = Store(phantom_store.folder, manifest)
        return plan_from(source, store, tmp_path).config.init_record.warnings

    first, second, third = warnings(other)
    assert "FLAIR is normalised by zscore" in first
    assert "T1w is" in second
    assert "spacing is 1 x 1 x 2 mm" in third
    assert warnings(manifest) == ()


def test_weights_of_another_fold_of_the_same_split_have_seen_held_out_patients(
    phantom_store, source, tmp_path
):
    def seen(source, store=phantom_store, **settings):
        return plan_from(source, store, tmp_path / "new", **settings).config.init_record.seen

    fold = {"fold": "1/3"}
    assert seen(source) is False
    assert seen(source, **fold) is True
    split = phantom_store.manifest.split
    other = remake(phantom_store.manifest, split={**split, "val": split["test"], "test": ()})
    assert seen(source, Store(phantom_store.folder, other)) is None, "another split"
    plan = plan_from(source, phantom_store, tmp_path, **fold)
    (line,) = [line for line in plan_lines(plan, HOST) if line.startswith("warning")]
    assert "scores are too good" in line
    # Nor is it forgotten by a run that starts from this one.
    run = written_weights(plan.config, tmp_path / "run")
    assert seen(run, **fold) is True
    assert "Held-out cases are NOT untouched" in write_report(run).read_text(encoding="utf-8")
    # It is refused where all cases are to be scored by folds that have not seen them.
    settings = {**OF_SOURCE, "init": str(source)}
    with pytest.raises(InputError, match="held-out patients"):
        train_folds(phantom_store.folder, tmp_path / "folds", 3, settings=settings)
    assert not (tmp_path / "folds").exists()


# --- What is said ---


def test_plan_and_report_say_what_was_taken(phantom_store, source, tmp_path, capsys):
    settings = {**OF_SOURCE, "freeze": "encoder", "init": str(source)}
    config = train(phantom_store.folder, tmp_path / "run", settings=settings)
    path = weights_file(source, "best")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert config.init_record.sha256 == digest
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    for text in (capsys.readouterr().err, page):
        assert str(path) in text
        assert digest[:12] in text

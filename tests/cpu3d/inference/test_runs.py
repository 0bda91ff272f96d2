"""Trained runs: the store they rest on, the device they are put on, which of them answer together,
and how."""

import dataclasses

import numpy as np
import pytest

from cpu3d.data.augment import NO_AUGMENT
from cpu3d.data.manifest import remake
from cpu3d.data.store import write_store
from cpu3d.errors import InputError
from cpu3d.host import gpu
from cpu3d.host.gpu import Gpu
from cpu3d.inference import ensemble, predictor
from cpu3d.inference.ensemble import Ensemble, trained_predictors
from cpu3d.inference.runs import Inference, load_configs, store_of_run
from cpu3d.run.config_json import load_config, save_config
from tests.cpu3d.conftest import LABELS, REGIONS, FakePredictor

CARD = Gpu(0, "made up", 2**34, 2**34, (8, 0))


def test_a_run_finds_its_store_as_its_fold_sees_it_also_where_it_was_moved_to(
    tiny_store, tiny_run, tmp_path
):
    config = load_config(tiny_run)
    assert store_of_run(config).manifest == tiny_store.manifest
    view = store_of_run(dataclasses.replace(config, fold="1/2"))
    assert view.manifest.split["test"] == tiny_store.manifest.split["test"]
    assert len(view.manifest.split["val"]) == 2
    moved = tiny_store.folder.rename(tmp_path / "moved")
    with pytest.raises(InputError) as caught:
        store_of_run(config)
    assert "--store" in caught.value.problems[-1]
    assert store_of_run(config, moved).folder == moved


def test_a_store_with_another_split_is_refused_because_its_test_cases_may_have_been_seen(
    tiny_store, tiny_run
):
    split = {"train": ("a", "b", "e"), "val": ("d",), "test": ("c", "f")}
    write_store(tiny_store.folder, remake(tiny_store.manifest, split=split))
    with pytest.raises(InputError, match="may have been trained on"):
        store_of_run(load_config(tiny_run), tiny_store.folder)


@pytest.fixture
def devices(monkeypatch):
    """What processes on a made-up host with one card are set up with."""
    devices = []
    monkeypatch.setattr(ensemble, "HostGpus", lambda: (CARD,))
    monkeypatch.setattr(gpu, "cuda_is_installed", lambda: True)
    monkeypatch.setattr(ensemble, "set_up", lambda *, device: devices.append(device))
    monkeypatch.setattr(predictor, "load_predictor", lambda run, weights, how: (run, weights, how))
    return devices


@pytest.fixture
def make_run(tiny_run):
    """make_run("patch"): a run of that mode."""

    def make(mode, **settings):
        folder = tiny_run.parent / f"run of {mode}"
        folder.mkdir()
        save_config(dataclasses.replace(load_config(tiny_run), mode=mode, **settings), folder)
        return folder

    return make


@pytest.mark.parametrize(
    ("modes", "how", "device"),
    [
        (["patch"], {}, "gpu:0"),
        (["whole"], {}, "cpu"),
        (["patch", "whole"], {}, "cpu"),
        (["patch", "whole"], {"window": (16, 16, 16)}, "gpu:0"),
        (["patch"], {"one_pass": True}, "cpu"),
        (["whole"], {"device": "gpu:0"}, "gpu:0"),
    ],
)
def test_a_card_is_taken_where_every_run_slides_a_window_or_where_it_is_asked_for(
    devices, make_run, modes, how, device
):
    inference = Inference(**how)
    folders = [make_run(mode) for mode in modes]
    assert trained_predictors(folders, "last", inference) == [
        (folder, "last", inference) for folder in folders
    ]
    assert devices == [device]


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ({"device": "gpu:3"}, ["--device"]),
        ({"device": "tpu"}, ["--device"]),
        ({"window": (16, 18, 16), "flips": True}, ["--window", "--flips"]),
    ],
)
def test_what_cannot_be_applied_is_refused_before_tensorflow_is_set_up(
    devices, make_run, how, names
):
    with pytest.raises(InputError) as caught:
        trained_predictors([make_run("whole", augment=NO_AUGMENT)], "best", Inference(**how))
    assert [problem.split()[0] for problem in caught.value.problems] == names
    assert devices == []


@pytest.mark.parametrize("how", [{"overlap": 1}, {"overlap": -0.1}, {"window": (8, 0, 8)}])
def test_values_out_of_range_are_refused(how):
    with pytest.raises(InputError, match=next(iter(how))):
        Inference(**how)


def test_the_answer_is_the_mean_of_the_probabilities_and_of_equal_ones_each(tiny_store):
    def answer(*sure):
        predictors = [FakePredictor(None, REGIONS, LABELS, sure=each) for each in sure]
        mean = Ensemble(predictors).probabilities(tiny_store.image("a"), tiny_store.case("a"))
        return np.asarray(mean)

    alone = [FakePredictor(None, REGIONS, LABELS, inputs=(name,)) for name in ("T1gd", "FLAIR")]
    assert Ensemble(alone).inputs == ("FLAIR", "T1gd")
    np.testing.assert_allclose(answer(0.2, 0.9, 0.7), 0.6 * answer(1), rtol=1e-6)
    same = answer(0.7, 0.7, 0.7)
    np.testing.assert_array_equal(same, answer(0.7))
    assert same.dtype == np.float32


def test_runs_that_are_the_same_or_of_other_stores_splits_or_regions_are_refused(
    fold_runs, tmp_path
):
    with pytest.raises(InputError, match=r"runs must differ, got \S*run-1 and"):
        load_configs([*fold_runs(""), tmp_path / "." / "run-1"])
    other = {
        "store_channels": ("T1gd", "FLAIR"),
        "label_names": {**LABELS, 3: "cyst"},
        "region_codes": {**REGIONS, "ET": (2,)},
        "paint": (("WT", 1), ("TC", 2), ("ET", 2)),
        "regions": ("WT",),
        "split_hash": "another",
        "target_spacing_mm": (1.0, 1.0, 1.0),
    }
    second = tmp_path / "second"
    second.mkdir()
    save_config(dataclasses.replace(load_config(tmp_path / "run-1"), **other), second)
    with pytest.raises(InputError) as caught:
        load_configs([tmp_path / "run-1", second])
    names = [[name, "of", "run", str(second)] for name in other]
    assert [problem.split()[:4] for problem in caught.value.problems] == names

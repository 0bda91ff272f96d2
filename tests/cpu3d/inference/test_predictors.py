"""The store that a run rests on, and the device that its network is put on."""

import dataclasses

import pytest

from cpu3d.config import load_config, save_config
from cpu3d.data.augment import NO_AUGMENT
from cpu3d.data.records import remake
from cpu3d.data.store import write_store
from cpu3d.errors import InputError
from cpu3d.host import gpu
from cpu3d.host.gpu import Gpu
from cpu3d.inference import predictor as inference
from cpu3d.inference import predictors
from cpu3d.inference.options import Inference
from cpu3d.inference.predictors import store_of_run, trained_predictor, trained_predictors

CARD = Gpu(0, "made up", 2**34, 2**34, (8, 0))


# --- The store ---


def test_a_run_finds_its_store_as_its_fold_sees_it(tiny_store, tiny_run):
    config = load_config(tiny_run)
    assert store_of_run(config).manifest == tiny_store.manifest
    view = store_of_run(dataclasses.replace(config, fold="1/2"))
    assert view.manifest.split["test"] == tiny_store.manifest.split["test"]
    assert len(view.manifest.split["val"]) == 2


def test_a_store_that_has_moved_is_asked_for_and_then_found(tiny_store, tiny_run, tmp_path):
    moved = tiny_store.folder.rename(tmp_path / "moved")
    config = load_config(tiny_run)
    with pytest.raises(InputError) as caught:
        store_of_run(config)
    assert caught.value.problems[-1] == predictors.STORE_HAS_MOVED
    with pytest.raises(InputError) as caught:
        store_of_run(config, way_out="--case must name a case")
    assert caught.value.problems[-1] == "--case must name a case"
    assert store_of_run(config, moved).folder == moved


def test_a_store_with_another_split_is_refused_because_its_test_cases_may_have_been_seen(tiny_store, tiny_run):
    split = {"train": ("a", "b", "e"), "val": ("d",), "test": ("c", "f")}
    write_store(tiny_store.folder, remake(tiny_store.manifest, split=split))
    with pytest.raises(InputError, match="may have been trained on") as caught:
        store_of_run(load_config(tiny_run), tiny_store.folder)
    assert len(caught.value.problems) == 1


def test_a_split_that_was_changed_by_hand_is_refused(tiny_store, tiny_run):
    split = {"train": ("a", "b", "e"), "val": ("d",), "test": ("c", "f")}
    write_store(tiny_store.folder, dataclasses.replace(tiny_store.manifest, split=split))
    with pytest.raises(InputError, match="must have hash"):
        store_of_run(load_config(tiny_run))


# --- The device ---


@pytest.fixture
def host(monkeypatch):
    """host(cards, cuda=True): a made-up host; returns the devices that processes on it were set up with."""

    def make(cards, cuda=True):
        devices = []
        monkeypatch.setattr(predictors, "HostGpus", lambda: cards)
        monkeypatch.setattr(gpu, "cuda_is_installed", lambda: cuda)
        monkeypatch.setattr(predictors, "set_up", lambda *, device: devices.append(device))
        monkeypatch.setattr(inference, "load_predictor", lambda run, weights, how: (run, weights, how))
        return devices

    return make


@pytest.fixture
def run_of(tiny_run):
    """run_of("patch"): a run of that mode."""

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
        (["whole"], {"window": (16, 16, 16)}, "gpu:0"),
        (["patch", "whole"], {"window": (16, 16, 16)}, "gpu:0"),
        (["patch"], {"one_pass": True}, "cpu"),
        (["patch"], {"device": "cpu"}, "cpu"),
        (["whole"], {"device": "gpu:0"}, "gpu:0"),
    ],
)
def test_a_card_is_taken_where_every_run_slides_a_window_or_where_it_is_asked_for(host, run_of, modes, how, device):
    devices, asked = host((CARD,)), Inference(**how)
    runs = [run_of(mode) for mode in modes]
    assert trained_predictors(runs, "last", asked) == [(run, "last", asked) for run in runs]
    assert devices == [device]


def test_nothing_said_is_the_best_weights_as_the_run_was_trained(host, tiny_run):
    devices = host(())
    assert trained_predictor(tiny_run) == (tiny_run, "best", Inference())
    assert devices == ["cpu"]


def test_a_card_that_is_not_used_for_want_of_cuda_is_told(host, run_of, capsys):
    devices = host((CARD,), cuda=False)
    trained_predictor(run_of("patch"))
    assert devices == ["cpu"]
    out, err = capsys.readouterr()
    assert "gpu:0 (made up) is not used: this TensorFlow is without CUDA" in err
    assert not out


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"device": "gpu:3"}, "device must be a GPU of this host, got gpu:3 with gpu:0"),
        ({"device": "tpu"}, "device must be auto, cpu, or a card such as gpu:0, got 'tpu'"),
        ({"window": (16, 18, 16)}, r"--window \(16, 18, 16\) must be divisible by 16"),
    ],
)
def test_what_cannot_be_is_refused_before_tensorflow_is_set_up(host, tiny_run, how, told):
    devices = host((CARD,))
    with pytest.raises(InputError, match=told):
        trained_predictor(tiny_run, "best", Inference(**how))
    assert devices == []


def test_all_that_is_wrong_with_a_way_is_told_together(host, run_of):
    host(())
    run = run_of("whole", augment=NO_AUGMENT)
    with pytest.raises(InputError) as caught:
        trained_predictor(run, "best", Inference(window=(16, 18, 16), flips=True))
    assert [problem.split()[0] for problem in caught.value.problems] == ["--window", "--flips"]

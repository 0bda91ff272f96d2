"""A tiny store whose images say their own labels, and a stand-in for a trained network that reads
them."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpu3d.data.cases.case import load_case
from cpu3d.data.datasets.dataset import CaseFiles
from cpu3d.data.manifest import Geometry, make_manifest
from cpu3d.data.nifti import read_volume, to_ras, write_volume
from cpu3d.data.store import open_store, write_store
from cpu3d.data.stores.convert import write_arrays
from cpu3d.errors import DivergedError
from cpu3d.inference.runs import Inference
from cpu3d.run.config_json import load_config, save_config
from cpu3d.settings import RunConfig

CHANNELS = ("FLAIR", "T1gd")
LABELS = {0: "background", 1: "edema", 2: "non-enhancing tumor", 3: "enhancing tumour"}
REGIONS = {"WT": (1, 2, 3), "TC": (2, 3), "ET": (3,)}
LPS_2MM = Geometry(
    shape=(12, 10, 8),
    affine=((-1.0, 0, 0, 5), (0, -1.0, 0, 7), (0, 0, 2.0, -3), (0, 0, 0, 1)),
    axes="LPS",
    sform_code=1,
    qform_code=2,
)
"""A grid that differs from the store's in two axes and whose voxels are 1 x 1 x 2 mm."""


AS_TRAINED = Inference()


@dataclass
class FakePredictor:
    """Reads the label off FLAIR, which `write_case` made `10 + label` inside the head."""

    store: Path
    regions: dict
    labels: dict
    channels: tuple = CHANNELS
    inputs: tuple = CHANNELS
    target_spacing_mm: tuple = None
    shift: int = 0
    """Voxels along X by which every answer is off."""
    sure: float = 0.9
    inference: Inference = AS_TRAINED
    mirrored: tuple = (0, 1, 2)
    window: tuple = None
    weights_sha256: str = "made up"
    config: Any = None

    def normalisation_of(self, channels):
        return ()

    def probabilities(self, image, record, channels=(), in_windows=False):
        channels = channels or self.channels
        if np.isnan(self.sure):
            raise DivergedError(f"probabilities for case {record.case_id} must be finite")
        assert tuple(image.shape) == (*record.shape, len(channels))
        label = np.maximum(np.asarray(image[..., channels.index("FLAIR")], np.int16) - 10, 0)
        answers = np.stack([np.isin(label, codes) for codes in self.regions.values()], axis=-1)
        return np.roll(answers, self.shift, axis=0).astype(np.float32) * self.sure


def write_case(folder, case_id, seed, geometry=LPS_2MM):
    """A 4D image and a label as NIfTI: a head of noise, in it oedema around core around enhancing
    tumour."""
    x = np.indices(geometry.shape)
    rng = np.random.default_rng(seed)
    centre = rng.integers(5, 7), rng.integers(4, 6), rng.integers(3, 5)
    far = np.max([abs(x[axis] - centre[axis]) for axis in range(3)], axis=0)
    label = np.select([far == 0, far == 1, far == 2], [3, 2, 1], 0).astype(np.uint8)
    head = np.zeros(geometry.shape, bool)
    head[1:-1, 1:-1, 1:-1] = True
    label[~head] = 0
    image = np.zeros((*geometry.shape, 2), np.int16)
    image[..., 0] = np.where(head, 10 + label, 0)
    image[..., 1] = np.where(head, rng.integers(50, 200, geometry.shape), 0)
    folder.mkdir(parents=True, exist_ok=True)
    image_path = folder / f"{case_id}.nii.gz"
    label_path = folder / f"{case_id}_label.nii.gz"
    write_volume(image_path, image, geometry)
    write_volume(label_path, label, geometry)
    return CaseFiles(case_id, case_id, (image_path,), label_path)


@pytest.fixture(scope="module")
def graphs_as_written():
    """TensorFlow runs graphs as they were traced: its passes over a new graph take a fifth of the
    time of a run of few steps. For tests of what goes from run to run; those of trainings, of the
    network and of exports have the passes."""
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


@pytest.fixture(scope="module")
def compiled_once():
    """Trainings of equal networks share one that is compiled, and so do their predictions."""
    from tests.cpu3d.runs import shared_learner, shared_network  # imports TensorFlow

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cpu3d.training.fit.Learner", lambda config, exchange: shared_learner(config))
        patch.setattr("cpu3d.inference.predictor.compiled_network", shared_network)
        yield


@pytest.fixture
def without_network(monkeypatch):
    """Have every run that begins here learn with a `NumpyLearner`: nothing is compiled."""
    from tests.cpu3d.runs import NumpyLearner  # imports TensorFlow

    monkeypatch.setattr("cpu3d.training.fit.Learner", lambda config, exchange: NumpyLearner(config))


@pytest.fixture
def without_pictures(monkeypatch):
    """Pages without drawn pictures, which take most of their time."""
    for draw in ("report.runs.chart", "report.pictures.strips", "experiments.results.strips"):
        monkeypatch.setattr(f"cpu3d.{draw}", lambda *data, **options: b"PNG")


@pytest.fixture
def tiny_store(tmp_path):
    """Six labelled cases: three to train, one to validate, two to test."""
    return make_store(tmp_path / "store", tmp_path / "source")


SPLIT = {"train": ("a", "b", "c"), "val": ("d",), "test": ("e", "f")}


def make_store(
    folder,
    source,
    *,
    labelled=True,
    split=SPLIT,
    geometry=LPS_2MM,
    ignore=None,
    normalisation=(),
):
    """A store of cases of `write_case`. Of their labels every second slice is `ignore`."""
    labels = dict(LABELS)
    if ignore is not None:
        labels[ignore] = "ignore"
    (folder / "cases").mkdir(parents=True)
    records = []
    for seed, case_id in enumerate(sorted(sum(split.values(), ()))):
        files = write_case(source, case_id, seed, geometry)
        if ignore is not None:
            label = to_ras(*read_volume(files.label)).copy()
            label[..., ::2] = ignore
            write_volume(files.label, label, geometry)
        case = load_case(
            files,
            channels=CHANNELS,
            labels=labels if labelled else None,
            ignore=ignore,
            normalisation=normalisation,
        )
        records.append(
            write_arrays(folder, case.record, case.image, case.label, format_="npy", cropped=False)
        )
    manifest = make_manifest(
        name="tiny",
        layout="decathlon",
        channels=CHANNELS,
        labels=labels,
        regions=REGIONS,
        ignore=ignore,
        split=split,
        split_seed=0,
        cases=tuple(records),
        versions={},
        normalisation=normalisation,
    )
    write_store(folder, manifest)
    return open_store(folder)


@pytest.fixture
def tiny_run(tmp_path, tiny_store):
    """A run folder trained on `tiny_store`, with a log that was cut off in mid-line."""
    folder = tmp_path / "run"
    folder.mkdir()
    hash_ = tiny_store.manifest.split_hash
    config = RunConfig(
        store=str(tiny_store.folder),
        store_channels=CHANNELS,
        label_names=LABELS,
        region_codes=REGIONS,
        split_hash=hash_,
        channels=CHANNELS,
        regions=tuple(REGIONS),
        grid=(16, 16, 16),
    )
    save_config(config, folder)
    start = {
        "event": "start",
        "time": "2025-03-01T10:00:00+00:00",
        "step": 0,
        "host": {"cpu": "made up", "cores": 2},
        "versions": {"tensorflow": "2.15.1"},
        "engine": "ITEX 2.15.0.0",
        "split_hash": hash_,
    }
    lines = [start]
    step_event = {
        "event": "step",
        "dice": {"WT": 0.9, "TC": 0.5, "ET": 0.2},
        "learning_rate": 1e-3,
        "step_s": 2.0,
        "wait_s": 0.02,
        "rss_bytes": 3 * 2**30,
    }
    validation = {
        "event": "validation",
        "loss": 0.3,
        "dice": {"WT": 0.8, "TC": 0.7, "ET": 0.6},
        "mean_dice": 0.7,
        "seconds": 3.0,
    }
    for step in range(1, 41):
        lines.append({**step_event, "step": step, "loss": 1 / step})
        if step % 20 == 0:
            lines.append({**validation, "step": step})
            lines.append({"event": "checkpoint", "step": step, "seconds": 1.0})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "log.jsonl").write_text(text + '{"event": "step", "step": 41, "lo', encoding="utf-8")
    return folder


@pytest.fixture
def fold_runs(tmp_path, tiny_run):
    """fold_runs("1/2", "2/2"): a run of each fold on `tiny_store`."""

    def make(*folds, **settings):
        config = dataclasses.replace(load_config(tiny_run), **settings)
        runs = []
        for fold in folds:
            runs.append(tmp_path / f"run-{len(runs) + 1}")
            runs[-1].mkdir()
            save_config(dataclasses.replace(config, fold=fold), runs[-1])
        return runs

    return make


@pytest.fixture
def fake_predictor(tiny_store):
    return FakePredictor(tiny_store.folder, REGIONS, LABELS)

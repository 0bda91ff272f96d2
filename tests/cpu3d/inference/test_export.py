"""Exports as `predict --network` and another program meet them, the verification, and what is
refused."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.data.files.arrays import file_sha256
from cpu3d.data.nifti import read_volume, write_volume
from cpu3d.data.normalise import Kind, Normalisation
from cpu3d.errors import InputError
from cpu3d.inference.export import formats
from cpu3d.inference.export.network import ExportedPredictor
from cpu3d.inference.postprocessing.rules import PostProcessing, Rule
from cpu3d.inference.postprocessing.run_rules import FILE, PostprocessingRules
from cpu3d.run.checkpoint import save_checkpoint
from cpu3d.run.config_json import load_config, save_config
from cpu3d.util.atomic import write_json
from models.layers import initial_kernel
from models.weights import network_weights
from tests.cpu3d.conftest import make_store
from tests.cpu3d.runs import decided


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store of grids of 12 x 10 x 8 voxels, axes L P S in their files, with brains of 10 x 8 x
    6."""
    folder = tmp_path_factory.mktemp("tiny")
    return make_store(folder / "store", folder / "source")


def make_run(store, folder, **settings):
    """A run whose network answers something, though it was never trained."""
    grid = settings.pop("grid", None)
    config = decided(store, folder, **{"filters": 4, "depth": 2, "dtype": "float32", **settings})
    config = dataclasses.replace(config, grid=grid or config.grid)
    (folder / "checkpoints").mkdir(parents=True)
    save_config(config, folder)
    rng = np.random.default_rng(3)
    named = {}
    for weight in network_weights(config.unet):
        first = 1.0 if weight.name == "gamma" else 0.0
        if weight.name == "kernel":
            first = initial_kernel(config.unet.seed, weight.layer)(weight.shape).numpy()
        named[weight.array] = first + rng.normal(0, 0.3, weight.shape).astype(np.float32)
        if weight.region_axis is not None and weight.name == "bias":
            named[weight.array][:] = 0  # no region is rare
    save_checkpoint(folder / "checkpoints/best.npz", named, {"step": 1, "coarse_steps": 0})
    digest = (file_sha256(folder / "checkpoints/best.npz"),)
    with_it = dict.fromkeys(config.regions, 3)
    rules = PostprocessingRules(RULES, {}, {}, with_it, digest, config.split_hash, 3)
    write_json(folder / FILE, {"schema": 1, **dataclasses.asdict(rules)})
    return folder


RULES = PostProcessing({"WT": Rule(share=0.5), "ET": Rule(region_mm3=1e6)})
"""They change what an untrained network answers."""

CT = Normalisation(Kind.CT, 11.0, 150.0, 60.0, 40.0)

RUNS = {  # format and kind of run -> its settings
    "onnx": {},
    "savedmodel": {
        "depth": 3,
        "extent": "full",
        "channels": ("T1gd",),
        "deep_supervision": True,
        "dtype": "bfloat16",
        "flip": False,
    },
    "onnx windows": {
        "mode": "patch",
        "grid": (8, 8, 4),
        "channels": ("T1gd",),
        "flip": False,
    },
}


@pytest.fixture(scope="module", params=RUNS)
def export(request, store, tmp_path_factory):
    """(run, exported) of a network in one of the formats."""
    folder = tmp_path_factory.mktemp("export")
    run = make_run(store, folder / "run", **RUNS[request.param])
    format_ = request.param.split()[0]
    assert export_run(run, format_, folder / "out") == 0
    return run, folder / "out"


def export_run(run, format_, out, *words):
    words = ["--run", run, "--format", format_, "--out", out, *words]
    return main(["export", *map(str, words)])


def predicted(who, image, out, *words):
    """The label and the sidecar that `predict` writes."""
    words = ["--image", str(image), "--out", str(out), *map(str, words)]
    assert main(["predict", *map(str, who), *words]) == 0
    label, _ = read_volume(out / "f.nii.gz")
    return label, json.loads((out / "f.json").read_text())


def test_predict_answers_alike_with_a_run_and_with_its_export(export, store, tmp_path):
    run, out = export
    image, config = store.folder.parent / "source/f.nii.gz", load_config(run)
    exact = shutil.copytree(run, tmp_path / "exact")
    unet = dataclasses.replace(config.unet, dtype="float32")  # as an exported network computes
    save_config(dataclasses.replace(config, unet=unet), exact)
    expected, by_run = predicted(["--run", exact], image, tmp_path / "of run")
    label, by_network = predicted(["--network", out], image, tmp_path / "of network")
    np.testing.assert_array_equal(label, expected)
    assert len(np.unique(label)) > 2
    for name in ("postprocessing", "label_codes", "volumes_ml"):
        assert by_network[name] == by_run[name]
    assert by_network["weights_sha256"] == file_sha256(run / "checkpoints/best.npz")
    raw, _ = predicted(["--network", out], image, tmp_path / "raw", "--raw")
    assert np.any(raw != label)
    about = json.loads((out / "export.json").read_text())
    assert about["inputs"]["image"]["shape"] == ["X", "Y", "Z", len(config.channels)]
    assert {path.name for path in out.iterdir()} == {"export.json", about["file"]}
    assert ("mean" in about["inputs"]) == config.is_patch
    if not config.is_patch:  # it would normalise each window by itself
        record = store.cases("test")[0]
        with pytest.raises(InputError, match="got one that normalises what it is given"):
            ExportedPredictor(out).probabilities(store.image("e"), record, in_windows=True)
    checked = about["verification"]
    assert checked["case_id"] == "e"  # the first of test
    assert checked["largest_difference"] < checked["tolerance"] <= 2e-5
    # `predict` computes in the run's dtype.
    if config.unet.dtype == "bfloat16":
        assert 1e-4 < checked["largest_difference_from_predict"] < 0.05


@pytest.mark.parametrize(
    ("format_", "kinds", "settings"),
    [
        ("onnx", (CT, Normalisation(Kind.ZSCORE)), {"channels": ("T1gd", "FLAIR")}),
        ("savedmodel", (CT, Normalisation(Kind.FOREGROUND)), {"extent": "full"}),
        ("onnx", (Normalisation(Kind.RESCALE), CT), {"mode": "patch", "grid": (8, 8, 4)}),
        ("savedmodel", (Normalisation(Kind.NONE), Normalisation(Kind.ZSCORE)), {"extent": "full"}),
        ("onnx", (), {"grid": (12, 10, 8)}),  # all of it is seen around what is not 0
    ],
)
def test_channels_of_every_kind_are_exported_also_if_0_does_not_surround_a_volume(
    tmp_path, format_, kinds, settings
):
    store = make_store(tmp_path / "store", tmp_path / "source", normalisation=kinds)
    run = make_run(store, tmp_path / "run", **settings)
    out = tmp_path / "out"
    # Of fractions, which `predict` rounds.
    voxels, geometry = read_volume(tmp_path / "source/f.nii.gz")
    fractions = np.random.default_rng(0).random(voxels.shape)
    image = np.where(voxels == 0, -70, voxels + fractions).astype(np.float32)[:11, :9, :7]
    geometry = dataclasses.replace(geometry, shape=image.shape[:3])  # the network sees more
    write_volume(tmp_path / "f.nii.gz", image, geometry)
    write_json(tmp_path / "dataset.json", {"modality": {"0": "FLAIR", "1": "T1gd"}})
    assert export_run(run, format_, out, "--case", tmp_path / "f.nii.gz") == 0
    about = json.loads((out / "export.json").read_text())
    assert about["verification"]["different_labels"] == 0
    expected, _ = predicted(["--run", run], tmp_path / "f.nii.gz", tmp_path / "of run")
    label, _ = predicted(["--network", out], tmp_path / "f.nii.gz", tmp_path / "of network")
    np.testing.assert_array_equal(label, expected)
    assert len(np.unique(expected)) > 1


def test_a_folder_without_a_network_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"must hold an export\.json, found none"):
        ExportedPredictor(tmp_path)


@pytest.fixture(scope="module")
def tiny(store, tmp_path_factory):
    """A run on whole volumes."""
    return make_run(store, tmp_path_factory.mktemp("tiny run") / "run")


@pytest.fixture
def refused(tiny, tmp_path, capsys):
    """The message of the command in ONNX, which writes nothing."""
    out = tmp_path / "out"

    def refused(*words):
        before = list(out.rglob("*"))
        assert export_run(tiny, "onnx", out, *words) == 2
        assert list(out.rglob("*")) == before
        return capsys.readouterr().err

    return refused


def test_a_network_that_answers_otherwise_is_not_written(refused, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(formats, "EPSILON", 0.5)
        assert "must answer as the run's" in refused()
    # Also if no probability is larger.
    monkeypatch.setattr(
        ExportedPredictor,
        "probabilities",
        lambda self, image, record, channels: np.zeros((*record.shape, 3), np.float32),
    )
    assert "must answer as the run's" in refused()


def test_a_given_case_and_the_last_weights_without_rules_of_the_best(tiny, store, tmp_path):
    run = shutil.copytree(tiny, tmp_path / "run")
    case = store.folder.parent / "source/b.nii.gz"
    shutil.copy(run / "checkpoints/best.npz", run / "checkpoints/step-00000120.npz")
    words = ["--case", case, "--weights", "last"]
    assert export_run(run, "onnx", tmp_path / "out", *words) == 0
    about = json.loads((tmp_path / "out/export.json").read_text())
    assert about["verification"]["case_id"] == "b"
    assert (about["weights"], about["checkpoint"]) == ("last", "step-00000120.npz")
    assert "best weights" in about["postprocessing"]["off"]


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(refused, store, tmp_path):
    cases = [store.folder.parent / f"source/{name}.nii.gz" for name in "ab"]
    assert "--case must be one case, got 2" in refused("--case", *cases)
    assert "must hold its last weights, found none" in refused("--weights", "last")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("a year of work")
    assert "must be a new or an empty folder" in refused()

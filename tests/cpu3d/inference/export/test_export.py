"""Exports as another program meets them, the verification, and what is refused."""

import dataclasses
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.data.files.arrays import file_sha256
from cpu3d.data.labels import label_from_regions
from cpu3d.data.nifti import read_volume, write_volume
from cpu3d.data.stores.case import load_case
from cpu3d.data.stores.conversion import Settings, identity
from cpu3d.data.stores.layouts import CaseFiles
from cpu3d.inference.export import network
from cpu3d.inference.predictor import load_predictor
from cpu3d.settings import load_config, save_config
from cpu3d.training.checkpoint import save_checkpoint
from cpu3d.training.learner import weight_names
from cpu3d.util.atomic import write_json
from cpu3d.util.lock import locked
from models.unet3d import build_unet3d
from tests.cpu3d.conftest import LPS_2MM, make_store
from tests.cpu3d.runs import decided

NET = {"filters": 4, "depth": 3, "dtype": "float32"}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store of grids of 12 x 10 x 8 voxels, axes L P S in their files, with brains of 10 x 8 x 6."""
    folder = tmp_path_factory.mktemp("tiny")
    return make_store(folder / "store", folder / "source")


def make_run(store, folder, **settings):
    """A run whose network answers something, though it was never trained."""
    grid = settings.pop("grid", None)
    config = decided(store, folder, **{**NET, **settings})
    config = dataclasses.replace(config, grid=grid or config.grid)
    (folder / "checkpoints").mkdir(parents=True)
    save_config(config, folder)
    rng = np.random.default_rng(3)
    weights = build_unet3d(config.unet, config.grid, 1).weights
    arrays = [weight.numpy() + rng.normal(0, 0.3, weight.shape).astype(np.float32) for weight in weights]
    arrays = [
        0 * array if "head" in weight.name and "bias" in weight.name else array  # regions are rare no more
        for weight, array in zip(weights, arrays)
    ]
    save_checkpoint(folder / "checkpoints/best.npz", dict(zip(weight_names(weights), arrays)), {})
    return folder


RUNS = {
    "onnx": {},
    "savedmodel": {"extent": "full", "channels": ("T1gd",), "deep_supervision": True, "dtype": "bfloat16"},
    "onnx windows": {"mode": "patch", "grid": (8, 8, 4), "channels": ("T1gd",)},
}
"""Format and kind of run -> what the run was trained with."""


@pytest.fixture(scope="module", params=RUNS)
def export(request, store, tmp_path_factory):
    """(run, exported) of a network in one of the formats."""
    folder = tmp_path_factory.mktemp("export")
    run = make_run(store, folder / "run", **RUNS[request.param])
    format_ = request.param.split()[0]
    assert main(["export", "--run", str(run), "--format", format_, "--out", str(folder / "out")]) == 0
    return run, folder / "out"


def test_the_program_in_usage_md_segments_a_file_as_predict_does(export, store, tmp_path):
    run, out = export
    image = store.folder.parent / "source/f.nii.gz"
    config = load_config(run)
    if config.channels == ("T1gd",):
        volume = read_volume(image)[0][..., 1]
        image = tmp_path / "f.nii.gz"
        write_volume(image, volume[::-1, ::-1], LPS_2MM)
    script = out / "segment.py"
    script.write_text((out / "USAGE.md").read_text().split("```python\n")[1].split("```")[0])
    done = subprocess.run(
        [sys.executable, script, image, tmp_path / "label.nii.gz"], cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    script.unlink()
    assert done.returncode == 0, done.stderr
    files = CaseFiles("f", "f", (image,), None)
    case = load_case(files, channels=config.channels, labels=None)
    predictor = load_predictor(run)
    expected = label_from_regions(predictor.probabilities(case.image, case.record, config.channels), predictor.regions)
    assert len(np.unique(expected)) > 2
    found, geometry = read_volume(tmp_path / "label.nii.gz")
    assert geometry.axes == "RAS"
    assert np.mean(found != expected) < (0.02 if config.unet.dtype == "bfloat16" else 1e-9)


def test_export_json_says_what_is_needed_to_use_it(export, store):
    run, out = export
    config, about = load_config(run), json.loads((out / "export.json").read_text())
    assert (out / about["file"]).exists()
    image = about["inputs"]["image"]
    assert (image["dtype"], image["shape"]) == ("float32", [*config.grid, len(config.channels)])
    assert about["channels"] == list(config.channels)
    assert about["regions"] == {"WT": [1, 2, 3], "TC": [2, 3], "ET": [3]}
    assert about["paint"] == [[{"output": 0, "code": 1}], [{"output": 1, "code": 2}], [{"output": 2, "code": 3}]]
    assert about["label_codes"]["3"] == "enhancing tumour"
    assert (about["weights"], about["checkpoint"]) == ("best", "best.npz")
    assert about["weights_sha256"] == file_sha256(run / "checkpoints/best.npz")
    assert about["trained_dtype"] == config.unet.dtype
    assert about["versions"]["numpy"] == np.__version__
    assert about["files"] == ["USAGE.md", about["file"]]
    assert sorted(path.name for path in out.iterdir()) == sorted(["export.json", *about["files"]])
    (answer,) = about["outputs"]
    assert (answer, "mean" in about["inputs"]) == (("logits", True) if config.is_patch else ("probabilities", False))
    told = about["verification"]
    assert told["case_id"] == "e"  # the first of test
    assert told["largest_difference"] < 1e-4
    assert told["label_voxels"] > 0
    assert told["different_labels"]["float32"] == 0


@pytest.fixture(scope="module")
def tiny(store, tmp_path_factory):
    """A run on whole volumes."""
    return make_run(store, tmp_path_factory.mktemp("tiny run") / "run")


@pytest.fixture
def call(tiny, tmp_path, capsys):
    """The command in ONNX; exit code and what it said."""

    def call(*words, run=tiny, out=tmp_path / "out"):
        code = main(["export", "--run", str(run), "--format", "onnx", "--out", str(out), *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.err if code == 2 else captured.out

    return call


def test_a_network_that_answers_otherwise_is_told_with_figures_and_gets_no_export_json(call, monkeypatch, tmp_path):
    monkeypatch.setattr(network, "EPSILON", 0.5)
    code, said = call()
    assert code == 1
    assert "largest difference" in said
    assert "has no export.json" in said
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["USAGE.md", "model.onnx"]


def test_another_size_and_a_case_of_ones_own(call, store, tmp_path):
    case = store.folder.parent / "source/b.nii.gz"
    assert call("--size", 16, 12, 8, "--case", case)[0] == 0
    about = json.loads((tmp_path / "out/export.json").read_text())
    assert about["size"] == [16, 12, 8]
    assert about["verification"]["case_id"] == "b"


def test_a_case_with_nan_is_read_as_the_runs_store_was_made(call, store, tmp_path):
    case = tmp_path / "in/b.nii.gz"
    case.parent.mkdir()
    voxels = read_volume(store.folder.parent / "source/b.nii.gz")[0][::-1, ::-1].astype(np.float32)
    voxels[0, 0, 0] = np.nan
    write_volume(case, voxels, LPS_2MM)
    assert "--zero-nan" in call("--case", case)[1]
    made = store.folder / "source.json"
    write_json(made, identity(store.manifest, Settings(zero_nan=True)))
    try:
        assert call("--case", case)[0] == 0
    finally:
        made.unlink()


def test_the_last_weights_are_those_of_the_newest_checkpoint(call, tiny, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(tiny, run)
    (run / "checkpoints/best.npz").rename(run / "checkpoints/step-00000120.npz")
    (run / "checkpoints/step-00000040.npz").write_bytes(b"older")
    assert call("--weights", "last", run=run)[0] == 0
    about = json.loads((tmp_path / "out/export.json").read_text())
    assert (about["weights"], about["checkpoint"]) == ("last", "step-00000120.npz")
    assert about["weights_sha256"] == file_sha256(run / "checkpoints/step-00000120.npz")


def test_weights_that_one_file_cannot_hold_lie_beside_it(call, monkeypatch, tmp_path):
    monkeypatch.setattr(network, "MOST_BYTES", 1000)
    assert call()[0] == 0
    about = json.loads((tmp_path / "out/export.json").read_text())
    assert about["files"] == ["USAGE.md", "model.onnx", "model.onnx.data"]
    assert about["verification"]["passed"]
    assert (tmp_path / "out/model.onnx.data").stat().st_size > 1000


def test_what_killed_exports_have_left_is_removed_but_not_what_is_being_written(call, tmp_path):
    for name in (".out.7.cpu3d.partial", ".out.8.cpu3d.partial", ".out.mine.cpu3d.partial", ".output.7.cpu3d.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.onnx").touch()
    with locked(tmp_path / ".out.8.cpu3d.partial", "export"):
        assert call()[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "out",
        ".out.8.cpu3d.partial",
        ".out.mine.cpu3d.partial",
        ".output.7.cpu3d.partial",
    }


def test_an_error_leaves_nothing_behind(call, monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cpu3d.inference.export.network.write_onnx", full)
    (tmp_path / "out").mkdir()
    assert call()[0] == 1
    assert not list((tmp_path / "out").iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--size", 16, 10, 8], "--size (16, 10, 8) must be divisible by 4; pad to (16, 12, 8)"),
        (["--size", 8, 8, 8], "case e must fit into 8 x 8 x 8, got a brain of 10 x 8 x 6; export with --size 12 8 8"),
        (["--case", "no.nii.gz"], "--case no.nii.gz must exist, found none"),
        (["--case", "a.nii.gz", "b.nii.gz"], "--case must be one case, got 2"),
        (["--weights", "last"], "must hold its last weights, found none"),
    ],
)
def test_what_cannot_be_exported_is_told_and_nothing_is_written(call, store, tmp_path, monkeypatch, words, told):
    monkeypatch.chdir(store.folder.parent / "source")
    code, said = call(*words)
    assert code == 2
    assert told in said
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_else_is_refused(call, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("a year of work")
    code, said = call()
    assert (code, (tmp_path / "out/thesis.tex").read_text()) == (2, "a year of work")
    assert "must be a new or an empty folder, got 1 entries in it" in said
    assert "got a file" in call(out=tmp_path / "out/thesis.tex")[1]


def test_a_run_of_a_smaller_resolution_is_refused(call, tiny, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    save_config(dataclasses.replace(load_config(tiny), resolution=0.5), run)
    assert "must have a run of resolution 1, got 0.5" in call(run=run)[1]

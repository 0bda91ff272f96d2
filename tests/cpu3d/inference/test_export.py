"""Exports as another program meets them, the verification, and what is refused."""

import dataclasses
import errno
import json
import os
import re
import runpy
import shutil

import nibabel
import numpy as np
import pytest
import tensorflow as tf
from scipy.ndimage import uniform_filter

from cpu3d.__main__ import main
from cpu3d.data.augment import AugmentConfig
from cpu3d.data.background import without_residue
from cpu3d.data.cases.case import load_case
from cpu3d.data.datasets.dataset import CaseFiles
from cpu3d.data.files.arrays import file_sha256
from cpu3d.data.labels import label_from_regions
from cpu3d.data.nifti import ras_spacing_mm, read_volume, to_ras, write_volume
from cpu3d.data.normalise import Kind, Normalisation
from cpu3d.data.region import bounding_box, centred, crop, paste, whole
from cpu3d.data.windows import sliding_window
from cpu3d.inference.export import formats, segment
from cpu3d.inference.export import image as images
from cpu3d.inference.export.contract import contract
from cpu3d.inference.postprocessing.rules import PostProcessing, Rule
from cpu3d.inference.postprocessing.run_rules import FILE, PostprocessingRules, postprocessing_of
from cpu3d.inference.predictor import load_predictor, over_mirror_images
from cpu3d.run.checkpoint import save_checkpoint
from cpu3d.run.config_json import load_config, save_config
from cpu3d.settings import RunConfig
from cpu3d.util.atomic import write_json
from models.config import UNetConfig
from models.layers import initial_kernel
from models.weights import network_weights
from tests.cpu3d.conftest import LPS_2MM, make_store
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
    config = decided(store, folder, **{"filters": 4, "depth": 3, "dtype": "float32", **settings})
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
    decision = PostprocessingRules(digest, config.split_hash, 3, RULES, {}, {}, with_it)
    write_json(folder / FILE, {"schema": 1, **dataclasses.asdict(decision)})
    return folder


def in_float32(run, folder):
    """The same run in `folder`, computed in float32."""
    shutil.copytree(run, folder)
    config = load_config(run)
    unet = dataclasses.replace(config.unet, dtype="float32")
    save_config(dataclasses.replace(config, unet=unet), folder)
    return folder


RULES = PostProcessing({"WT": Rule(share=0.5), "ET": Rule(region_mm3=1e6)})
"""A decision that changes what an untrained network answers."""


CT = Normalisation(Kind.CT, 11.0, 150.0, 60.0, 40.0)

RUNS = {  # format and kind of run -> its settings
    "onnx": {"depth": 2},
    "savedmodel": {
        "extent": "full",
        "channels": ("T1gd",),
        "deep_supervision": True,
        "dtype": "bfloat16",
        "flip": False,
    },
    "onnx windows": {
        "depth": 2,
        "mode": "patch",
        "grid": (8, 8, 4),
        "channels": ("T1gd",),
        "flip": False,
    },
    "onnx strides": {"strides": ((2, 2, 1), (1, 2, 2)), "up": "upsampling"},
    "savedmodel strides": {"strides": ((2, 1, 2), (2, 2, 1)), "residual": True},
}


@pytest.fixture(scope="module", params=RUNS)
def export(request, store, tmp_path_factory):
    """(run, exported) of a network in one of the formats."""
    folder = tmp_path_factory.mktemp("export")
    run = make_run(store, folder / "run", **RUNS[request.param])
    format_ = request.param.split()[0]
    assert (
        main(["export", "--run", str(run), "--format", format_, "--out", str(folder / "out")]) == 0
    )
    return run, folder / "out"


def test_the_program_in_usage_md_segments_a_file_as_predict_does_and_export_json_says_how(
    export, store, tmp_path
):
    run, out = export
    image, config = store.folder.parent / "source/f.nii.gz", load_config(run)
    if config.channels == ("T1gd",):
        volume = read_volume(image)[0][..., 1]
        image = tmp_path / "f.nii.gz"
        write_volume(image, volume[::-1, ::-1], LPS_2MM)
    program = (out / "USAGE.md").read_text().split("```python\n")[1].split("```")[0]
    assert "from cpu3d" not in program
    (tmp_path / "segment.py").write_text(program)
    saved = runpy.run_path(str(tmp_path / "segment.py"))
    saved["main"](out, str(image), str(tmp_path / "label.nii.gz"))
    case = load_case(CaseFiles("f", "f", (image,), None), channels=config.channels, labels=None)
    exact = in_float32(run, tmp_path / "exact")  # as an exported network computes
    predictor = load_predictor(exact)
    answers = predictor.probabilities(case.image, case.record, config.channels)
    rules, spacing_mm = postprocessing_of(run, config), case.record.spacing_mm
    expected = rules.paint(answers, predictor.regions, spacing_mm)
    assert np.any(expected != label_from_regions(answers, predictor.regions))
    assert len(np.unique(expected)) > 2
    label, geometry = read_volume(tmp_path / "label.nii.gz")
    assert geometry.axes == "RAS"
    assert np.mean(label != expected) < 0.002  # where regions are as likely to rounding
    about = json.loads((out / "export.json").read_text())
    taken = about["inputs"]["image"]
    assert (taken["dtype"], taken["shape"]) == ("float32", [*config.grid, len(config.channels)])
    numbers = {"FLAIR": "0000", "T1gd": "0001"}
    names = about["channel_names"]
    assert list(names)[: len(config.channels)] == list(config.channels)
    for channel in ("FLAIR", "T1gd"):
        assert {channel.lower(), numbers[channel]} <= set(names[channel])
    assert about["paint"] == [
        [{"output": 0, "code": 1}],
        [{"output": 1, "code": 2}],
        [{"output": 2, "code": 3}],
    ]
    assert about["weights_sha256"] == file_sha256(run / "checkpoints/best.npz")
    assert sorted(path.name for path in out.iterdir()) == sorted(["export.json", *about["files"]])
    assert list(about["outputs"]) == ["logits"]
    assert ("mean" in about["inputs"]) == config.is_patch
    checked = about["verification"]
    assert checked["case_id"] == "e"  # the first of test
    assert checked["largest_difference"] < 1e-4
    assert checked["label_voxels"] > 0
    assert (
        checked["different_labels"]["float32"] <= 1
    )  # of 960 voxels, where two regions are as likely to rounding
    # `predict` computes in the run's dtype. Which labels bfloat16 turns is chance: in many voxels a
    # network that has learnt nothing finds two as likely.
    if config.unet.dtype == "float32":
        assert checked["different_labels"]["predict"] <= 1
    else:
        assert 1e-4 < checked["largest_difference_from_predict"] < 0.05
    assert checked["postprocessed_voxels"] > 0
    assert about["postprocessing"]["words"] == rules.words


@pytest.mark.parametrize(
    ("format_", "kinds", "settings"),
    [
        ("onnx", (CT, Normalisation(Kind.ZSCORE)), {"channels": ("T1gd", "FLAIR")}),
        ("savedmodel", (CT, Normalisation(Kind.FOREGROUND)), {"extent": "full"}),
        ("onnx", (Normalisation(Kind.RESCALE), CT), {"mode": "patch", "grid": (8, 8, 4)}),
        ("savedmodel", (Normalisation(Kind.NONE), Normalisation(Kind.ZSCORE)), {}),
    ],
)
def test_a_network_of_channels_of_every_kind_is_exported_as_predict_computes(
    tmp_path, format_, kinds, settings
):
    store = make_store(tmp_path / "store", tmp_path / "source", normalisation=kinds)
    run = make_run(store, tmp_path / "run", depth=2, **settings)
    out = tmp_path / "out"
    assert main(["export", "--run", str(run), "--format", format_, "--out", str(out)]) == 0
    about = json.loads((out / "export.json").read_text())
    assert about["verification"]["different_labels"] == dict.fromkeys(
        ("float32", "predict", "predict --raw"), 0
    )
    # Of fractions, which `predict` rounds.
    voxels, geometry = read_volume(tmp_path / "source/f.nii.gz")
    fractions = np.random.default_rng(0).random(voxels.shape)
    image = np.where(voxels == 0, 0, voxels + fractions).astype(np.float32)
    write_volume(tmp_path / "f.nii.gz", image, geometry)
    write_json(tmp_path / "dataset.json", {"modality": {"0": "FLAIR", "1": "T1gd"}})
    segment.main(out, str(tmp_path / "f.nii.gz"), str(tmp_path / "label.nii.gz"))
    predictor = load_predictor(run)
    case = load_case(
        CaseFiles("f", "f", (tmp_path / "f.nii.gz",), None),
        channels=predictor.channels,
        normalisation=predictor.normalisation_of(predictor.channels),
    )
    assert case.record.units
    answers = predictor.probabilities(case.image, case.record)
    steps_mm = case.record.spacing_mm
    expected = postprocessing_of(run, load_config(run)).paint(answers, predictor.regions, steps_mm)
    label, _ = read_volume(tmp_path / "label.nii.gz")
    assert len(np.unique(expected)) > 1
    assert np.mean(label != expected) < 0.005


def made_up_answers(seed, regions):
    """Blobs of all sizes in each region, many of them outside of the larger regions."""
    noise = np.random.default_rng(seed).random((24, 20, 18, len(regions)))
    smooth = uniform_filter(noise, (3, 3, 3, 0))
    return (smooth - np.quantile(smooth, 0.95) + 0.5).astype(np.float32)


SIDES = {"left": (4,), "right": (5,)}


@pytest.mark.parametrize(
    "chosen",
    [
        RULES,
        PostProcessing({"WT": Rule(share=0.1), "ET": Rule(share=0.3)}),
        PostProcessing({"WT": Rule(share=0.3, stays_from=0.52)}),
        PostProcessing({"TC": Rule(share=0.01, region_mm3=2000), "ET": Rule(region_mm3=1e6)}),
        PostProcessing(RULES.rules, off="not decided"),
    ],
)
@pytest.mark.parametrize(
    ("more", "paint"),
    [
        ({}, ()),
        (SIDES, ()),
        (SIDES, (("right", 5), ("WT", 1), ("left", 4), ("TC", 2), ("ET", 3))),
    ],
)
def test_the_program_paints_and_removes_the_small_parts_as_predict_does(chosen, more, paint):
    regions, spacing_mm = {"WT": (1, 2, 3), "TC": (2, 3), "ET": (3,), **more}, (0.7, 1.1, 2.5)
    config = RunConfig(
        label_names=dict(enumerate("0abcde")),
        region_codes=regions,
        paint=paint,
        regions=tuple(regions),
        channels=("FLAIR",),
        grid=(24, 20, 16),
        unet=UNetConfig(channels=1, outputs=len(regions)),
    )
    regions = config.codes_by_region
    steps = {"postprocessing": chosen.steps(regions)}
    about = json.loads(json.dumps({**contract(config, "float32", "onnx"), **steps}))
    for seed in range(3):
        answers = made_up_answers(seed, regions)
        label = segment.processed(answers, about, float(np.prod(spacing_mm)))
        expected = chosen.paint(answers, regions, spacing_mm)
        np.testing.assert_array_equal(label, expected)
        assert bool(chosen.off) == np.array_equal(expected, label_from_regions(answers, regions))


@pytest.mark.parametrize("export", ["onnx"], indirect=True)
@pytest.mark.parametrize(("unit", "factor"), [("mm", 1), ("micron", 1000), ("meter", 0.001)])
def test_the_program_knows_the_unit_of_a_file(export, store, tmp_path, unit, factor):
    image = store.folder.parent / "source/e.nii.gz"
    source = nibabel.load(image)
    affine = np.diag([factor] * 3 + [1]) @ source.affine
    in_unit = nibabel.Nifti1Image(np.asarray(source.dataobj), affine)
    in_unit.header.set_xyzt_units(unit)
    nibabel.save(in_unit, tmp_path / "image.nii.gz")
    labels = []
    for path in (image, tmp_path / "image.nii.gz"):
        segment.main(export[1], str(path), str(tmp_path / "label.nii.gz"))
        labels.append(nibabel.load(tmp_path / "label.nii.gz"))
    as_written, label = labels
    assert label.header.get_xyzt_units()[0] == unit
    assert np.any(as_written.dataobj)
    np.testing.assert_array_equal(label.dataobj, as_written.dataobj)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with an export.json, whose network answers with a 20th of FLAIR."""
    monkeypatch.setattr(segment, "load_network", lambda folder, about: None)
    monkeypatch.setattr(
        segment, "probabilities_of", lambda network, about, image: image[..., :1] / 20
    )
    about = {
        "paint": [[{"output": 0, "code": 1}]],
        "threshold": 0.5,
        "trained_spacing_mm": [1, 1, 1],
        "postprocessing": {"remove": []},
        "channels": ["FLAIR", "T1gd"],
        "channel_names": {"FLAIR": ["flair"], "T1gd": ["t1gd"]},
    }
    (tmp_path / "export.json").write_text(json.dumps(about))
    return tmp_path


@pytest.mark.parametrize("name", ["image.nii.gz", "dataset.json", "export.json"])
@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_the_program_ends_with_a_line_for_a_file_that_is_empty_or_cut(store, folder, name, kept):
    shutil.copy(store.folder.parent / "source/f.nii.gz", folder / "image.nii.gz")
    (folder / "dataset.json").write_text('{"modality": {"0": "FLAIR", "1": "T1gd"}}')
    segment.main(folder, str(folder / "image.nii.gz"), str(folder / "label.nii.gz"))
    (folder / "label.nii.gz").unlink()
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: round(len(content) * kept)])
    with pytest.raises(SystemExit, match=rf"{name} must be whole .*, got .*; fetch it again"):
        segment.main(folder, str(folder / "image.nii.gz"), str(folder / "label.nii.gz"))
    assert not (folder / "label.nii.gz").exists()


def test_the_program_makes_nan_background_if_that_is_chosen_as_predict_does(store, folder):
    voxels, geometry = read_volume(store.folder.parent / "source/f.nii.gz")
    voxels = voxels.astype(np.float32)
    voxels[5, 5, 4, 0] = np.nan
    voxels[6, 5, 4, 0] = np.inf
    path = folder / "f.nii.gz"
    out = folder / "label.nii.gz"
    write_volume(path, voxels, geometry)
    with pytest.raises(SystemExit, match=r"FLAIR must be finite, got 2\b.*--zero-nan"):
        segment.main(folder, str(path), str(out))
    assert not out.exists()
    segment.main(folder, "--zero-nan", str(path), str(out))
    files = CaseFiles("f", "f", (path,), None)
    case = load_case(files, channels=("FLAIR", "T1gd"), zero_nan=True)
    label = to_ras(*read_volume(out))
    np.testing.assert_array_equal(label, case.image[..., 0] >= 10)


@pytest.mark.parametrize("codes", [(1, 1), (0, 0)])
def test_the_program_reads_units_orientation_and_background_as_predict_does(
    store, folder, capsys, monkeypatch, codes
):
    voxels = read_volume(store.folder.parent / "source/f.nii.gz")[0]
    residue = np.random.default_rng(0).normal(0, 1e-7, voxels.shape)
    image = nibabel.Nifti1Image(
        np.where(voxels == 0, residue, voxels).astype(np.float32), np.diag([1000, 1000, 2000, 1])
    )
    image.set_sform(image.affine, codes[0])
    image.set_qform(image.affine, codes[1])
    image.header.set_xyzt_units("micron")
    path, out = folder / "f.nii.gz", folder / "label.nii.gz"
    nibabel.save(image, path)
    case = load_case(CaseFiles("f", "f", (path,), None), channels=("FLAIR", "T1gd"))
    seen = []
    answer = segment.probabilities_of

    def noted(network, about, image):
        seen.append(image)
        return answer(network, about, image)

    monkeypatch.setattr(segment, "probabilities_of", noted)
    segment.main(folder, str(path), str(out))
    np.testing.assert_array_equal(seen[0] != 0, case.image != 0)
    printed = capsys.readouterr().err
    assert "voxels of 1 x 1 x 2 mm, but the network was trained on 1 x 1 x 1 mm" in printed
    assert ("sform and qform codes are 0" in printed) == (codes == (0, 0))
    label, place = read_volume(out)
    expected = np.asarray(seen[0][..., 0] >= 10, np.uint8)
    np.testing.assert_array_equal(to_ras(label, place), expected)
    assert place.axes == ("LAS" if codes == (0, 0) else "RAS")
    assert (place.unit, ras_spacing_mm(place)) == ("micron", pytest.approx((1, 1, 2)))


@pytest.mark.parametrize("kind", ["residue", "crop", "air", "scores", "whole"])
def test_the_program_takes_the_same_background_as_predict(kind):
    rng = np.random.default_rng(0)
    volume = np.zeros((24, 20, 16), np.float32)
    volume[5:19, 4:16, 3:13] = rng.uniform(100, 900, (14, 12, 10))
    noise = rng.normal(0, 1, volume.shape)
    volume = {
        "residue": np.where(volume == 0, 1e-5 * noise, volume),
        "crop": np.where(volume == 0, 1e-5 * noise, volume)[5:15, 4:12, 4:15],
        "air": np.hypot(volume, 5 * noise),
        "scores": np.where(volume == 0, 0, noise),
        "whole": np.rint(volume),
    }[kind].astype(np.float32)
    np.testing.assert_array_equal(images.without_residue(volume), without_residue(volume))


@pytest.mark.parametrize(
    ("trained", "codes", "said"),
    [(False, (1, 1), True), (False, (0, 0), False), (True, (1, 1), False)],
)
def test_the_program_says_if_only_the_image_gives_an_orientation(trained, codes, said):
    image = nibabel.Nifti1Image(np.zeros((4, 4, 4), np.float32), np.eye(4))
    image.set_sform(image.affine, codes[0])
    image.set_qform(image.affine, codes[1])
    notes = " ".join(images.notes_on(image, {"trained_with_orientation": trained}))
    assert ("trained on images without" in notes) == said
    assert ("codes are 0" in notes) == (codes == (0, 0))


REGIONS = {"all": (1, 2, 3, 4), "first": (1,), "second": (3,), "inner": (2,)}
"""One holds three that are as large as each other and so compete."""


def statistics(image):
    seen = [
        image[..., channel][image[..., channel] != 0].astype(np.float64) for channel in range(2)
    ]
    return np.array([values.mean() for values in seen]), np.array([values.std() for values in seen])


def made_up_logits(image, mean, std):
    """They depend on the normalised voxel and on its place in the image."""
    scores = np.where(image == 0, 0, (image - mean) / std)
    waves = np.sin(np.einsum("ixyz,i->xyz", np.indices(scores.shape[:3]), [1, 2, 3]))[..., None]
    first, second = scores[..., 0], scores[..., 1]
    return (waves + np.stack([first, -second, second - first, second], -1) - 0.2).astype(np.float32)


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("extent", ["brain", "full"])
@pytest.mark.parametrize("mode", ["whole", "patch"])
@pytest.mark.parametrize(
    ("shape", "size"),
    [((9, 12, 7), (12, 8, 8)), ((10, 5, 11), (8, 8, 12)), ((13, 13, 13), (4, 12, 8))],
)
def test_the_program_crops_pads_blends_and_paints_as_predict_does(mode, extent, flip, shape, size):
    rng, image = np.random.default_rng(4), np.zeros((*shape, 2), np.float32)
    inside = tuple(slice(1, max(min(n - 2, want), 3)) for n, want in zip(shape, size))
    image[inside] = rng.integers(0, 99, image[inside].shape)
    box = bounding_box(image.any(-1)) if extent == "brain" else whole(shape)
    if mode == "whole":  # which fits, or is exported larger
        size = tuple(max(pair) for pair in zip(box.size, size))
    config = RunConfig(
        label_names=dict(enumerate("0abcd")),
        region_codes=REGIONS,
        regions=tuple(REGIONS),
        channels=("FLAIR", "T1w"),
        mode=mode,
        extent=extent,
        grid=size,
        unet=UNetConfig(channels=2, outputs=4),
        augment=AugmentConfig(flip=flip),
    )
    region = centred(box, tuple(max(pair) for pair in zip(box.size, size)), shape)
    stats, part = statistics(image), crop(image, region)
    window = size if config.is_patch else region.size

    def logits_of(seen):
        return sliding_window(lambda tile: made_up_logits(tile[0], *stats)[None], seen, window)

    axes = (0, 1, 2) if flip else ()
    logits = over_mirror_images(logits_of, part[None], axes)
    expected = label_from_regions(paste(1 / (1 + np.exp(-logits)), region, shape), REGIONS)
    assert len(np.unique(expected)) == 5

    def made_up(image, mean=None, std=None):
        return made_up_logits(image, *(statistics(image) if mean is None else (mean, std)))

    about = json.loads(json.dumps(contract(config, "float32", "onnx")))
    np.testing.assert_array_equal(
        segment.painted(segment.probabilities_of(made_up, about, image), about), expected
    )
    about = {**about, "mode": "whole", "size": [1, *size[1:]]}
    with pytest.raises(SystemExit, match="export with a larger --size"):
        segment.probabilities_of(made_up, about, image)


@pytest.fixture(scope="module")
def tiny(store, tmp_path_factory):
    """A run on whole volumes."""
    return make_run(store, tmp_path_factory.mktemp("tiny run") / "run")


@pytest.fixture
def call(tiny, tmp_path, capsys):
    """The command in ONNX; exit code and what it printed."""

    def call(*words, run=tiny, out=tmp_path / "out"):
        code = main(
            ["export", "--run", str(run), "--format", "onnx", "--out", str(out), *map(str, words)]
        )
        captured = capsys.readouterr()
        return code, captured.err if code == 2 else captured.out

    return call


def test_a_network_that_answers_otherwise_gets_no_export_json(call, monkeypatch, tmp_path):
    monkeypatch.setattr(formats, "EPSILON", 0.5)
    code, message = call()
    assert code == 1
    assert "largest difference" in message
    assert "has no export.json" in message
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["USAGE.md", "model.onnx"]


def test_another_size_a_given_case_and_the_last_weights_without_rules_of_the_best(
    call, tiny, store, tmp_path
):
    run, case = shutil.copytree(tiny, tmp_path / "run"), store.folder.parent / "source/b.nii.gz"
    shutil.copy(run / "checkpoints/best.npz", run / "checkpoints/step-00000120.npz")
    (run / "checkpoints/step-00000040.npz").write_bytes(b"older")
    assert call("--case", case, "--size", 16, 12, 8, "--weights", "last", run=run)[0] == 0
    about = json.loads((tmp_path / "out/export.json").read_text())
    assert (about["size"], about["verification"]["case_id"]) == ([16, 12, 8], "b")
    assert (about["weights"], about["checkpoint"]) == ("last", "step-00000120.npz")
    assert about["weights_sha256"] == file_sha256(run / "checkpoints/step-00000120.npz")
    assert about["postprocessing"]["remove"] == []
    assert "best weights" in about["postprocessing"]["words"]
    assert about["verification"]["postprocessed_voxels"] == 0


def test_a_given_case_has_its_channels_by_name(call, store, tmp_path):
    (tmp_path / "data/imagesTs").mkdir(parents=True)
    case = shutil.copy(store.folder.parent / "source/b.nii.gz", tmp_path / "data/imagesTs/b.nii.gz")
    content = {"modality": {"0": "t2f", "1": "ADC"}, "labels": {"1": "tumour"}}
    (tmp_path / "data/dataset.json").write_text(json.dumps(content))
    code, message = call("--case", case)
    assert code == 2
    assert "FLAIR, T1gd, got t2f, ADC" in message


def test_an_error_leaves_an_empty_folder(call, monkeypatch, tmp_path):
    def full(about, weights, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(formats, "write_onnx", full)
    assert call()[0] == 1
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("form", ["savedmodel", "onnx"])
def test_a_full_disk_is_named_with_what_to_do(tiny, tmp_path, monkeypatch, capsys, form):
    out = tmp_path / "out"
    save = tf.saved_model.save

    def full(*about, **more):
        save(*about, **more)
        raise tf.errors.ResourceExhaustedError(None, None, f"{out}/x; No space left on device")

    def full_sync(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tf.saved_model, "save", full)
    monkeypatch.setattr(os, "fsync", full_sync)
    words = ["export", "--run", str(tiny), "--format", form, "--out", str(out)]
    assert main(words) == 1
    file = "(saved_model|model.onnx) must fit on its disk"
    problem = f"error: {out}/{file}, got No space .*; free space there and repeat"
    assert re.search(problem, capsys.readouterr().err)
    assert not list(out.iterdir())


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--size", 16, 10, 8], r"--size \(16, 10, 8\) must be divisible by 4\b.*\(16, 12, 8\)"),
        (
            ["--size", 8, 8, 8],
            r"case e must fit into 8 x 8 x 8, got .* 10 x 8 x 6\b.* --size 12 8 8",
        ),
        (["--case", "no.nii.gz"], "--case no.nii.gz must exist"),
        (["--case", "a.nii.gz", "b.nii.gz"], "--case must be one case, got 2"),
        (["--weights", "last"], "must hold its last weights, found none"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    call, store, tmp_path, monkeypatch, words, problem
):
    monkeypatch.chdir(store.folder.parent / "source")
    code, message = call(*words)
    assert code == 2
    assert re.search(problem, message)
    assert not list(tmp_path.iterdir())


def test_other_weights_a_smaller_resolution_and_a_folder_with_files_are_refused(
    call, tiny, tmp_path
):
    run, config = shutil.copytree(tiny, tmp_path / "run"), load_config(tiny)
    save_config(dataclasses.replace(config, unet=dataclasses.replace(config.unet, filters=8)), run)
    assert "config.json, got model/000 (3, 3, 3, 2, 4) for (3, 3, 3, 2, 8)" in call(run=run)[1]
    save_config(dataclasses.replace(config, resolution=0.5), run)
    assert "export needs a run at full resolution, got 0.5" in call(run=run)[1]
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("a year of work")
    code, message = call()
    assert (code, (tmp_path / "out/thesis.tex").read_text()) == (2, "a year of work")
    assert "must be a new or an empty folder, got a folder with files" in message
    assert (
        "must be a new or an empty folder, got a file" in call(out=tmp_path / "out/thesis.tex")[1]
    )

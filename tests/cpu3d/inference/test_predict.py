"""Predicting new images: where the answer lies, what lies beside it, and what is never
overwritten."""

import dataclasses
import json
import shutil

import nibabel
import numpy as np
import pytest

from cpu3d.data.nifti import read_volume, write_volume
from cpu3d.errors import DoesNotFitError, InputError
from cpu3d.inference import predict
from cpu3d.inference.cases import Case, cases_to_predict, codes_for
from cpu3d.inference.predict import Options
from cpu3d.run.config_json import load_config, save_config
from tests.cpu3d.conftest import CHANNELS, LABELS, LPS_2MM, REGIONS, FakePredictor, write_case
from tests.cpu3d.runs import run_command, shown_cases

STORES = ("FLAIR", "T1w", "T1gd", "T2w")


@pytest.fixture
def predictor(tmp_path):
    return FakePredictor(tmp_path / "no store", REGIONS, LABELS)


@pytest.fixture
def files(tmp_path):
    """A case of one 4D image, in/a.nii.gz."""
    return write_case(tmp_path / "in", "a", seed=1)


def predict_case(predictor, files, out, **how):
    case, options = (
        Case(files, CHANNELS, *codes_for(predictor, files)),
        Options(image=(), out=out, **how),
    )
    out.mkdir(exist_ok=True)
    return predict.predict_case(predictor, case, options, {}, predict.RAW)


@pytest.fixture
def call(monkeypatch, predictor, tiny_run):
    """Run the command with the fake predictor in place of a trained one."""
    monkeypatch.setattr(
        predict, "trained_predictors", lambda runs, weights, inference: [predictor] * len(runs)
    )
    return lambda *words, runs=(tiny_run,): run_command(predict, "--run", *runs, *words)


def split_channels(image, *names):
    """The channels of a 4D file as files of their own."""
    volume = read_volume(image)[0][::-1, ::-1]  # from L P S
    paths = [image.parent / name for name in names]
    for channel, path in enumerate(paths):
        write_volume(path, volume[..., channel % 2], LPS_2MM)
    return paths


def test_the_answer_has_the_sources_grid_and_codes_and_the_sidecar_says_whose_it_is(
    call, files, tiny_run, tmp_path
):
    source, label = nibabel.load(files.label), read_volume(files.label)[0]
    expected = np.asarray(source.dataobj)
    files.label.write_bytes(b"not a label at all")  # it is not read
    assert call("--image", files.images[0], "--out", tmp_path / "out", "--weights", "last") == 0
    answer = nibabel.load(tmp_path / "out/a.nii.gz")
    np.testing.assert_array_equal(np.asarray(answer.dataobj), expected)
    np.testing.assert_array_equal(answer.affine, source.affine)
    assert answer.get_data_dtype() == np.uint8
    assert (answer.header["sform_code"], answer.header["qform_code"]) == (1, 2)
    content = json.loads((tmp_path / "out/a.json").read_text())
    assert content["label_codes"] == {str(code): name for code, name in LABELS.items()}
    for name, codes in REGIONS.items():
        assert content["volumes_ml"][name] == pytest.approx(np.isin(label, codes).sum() * 2e-3)
    assert content["sources"][0]["path"] == "a.nii.gz"
    assert (content["run"], content["fold"], content["weights"]) == (str(tiny_run), "", "last")
    how = {"window": None, "one_pass": True, "overlap": 0.5, "flips": True}
    assert content["inference"] == how


OF_LAYOUT = {
    "old": ("brats2017", [0, 2, 1, 4]),
    "new": ("brats2023", [0, 2, 1, 3]),
    "listed": ("dataset.json", [0, 3, 1, 7]),
    "BraTS-PED-1": ("the run's store", [0, 1, 2, 3]),
    "a": ("the run's store", [0, 1, 2, 3]),
}
"""Image -> whose codes it is answered in, and these for background, oedema, core, enhancing."""


@pytest.fixture
def images(files, tmp_path):
    """The same voxels in every layout; their label is in the codes of the tiny store, which are
    Decathlon's."""
    image = files.images[0]
    images = {"a": image}
    for name, ends in (
        ("old", ("_flair", "_t1ce")),
        ("new", ("-t2f", "-t1c")),
        ("BraTS-PED-1", ("-t2f", "-t1c")),
    ):
        images[name] = tmp_path / "in" / name
        images[name].mkdir()
        split_channels(image, *(f"{name}/{name}{end}.nii.gz" for end in ends))
    data = tmp_path / "in/data"
    (data / "imagesTs").mkdir(parents=True)
    images["listed"] = shutil.copy(image, data / "imagesTs/listed.nii.gz")
    labels = {"0": "background", "3": "edema", "1": "core", "7": "enhancing"}
    modality = {"0": "FLAIR", "1": "T1gd"}
    (data / "dataset.json").write_text(json.dumps({"modality": modality, "labels": labels}))
    return images


def test_each_image_is_answered_in_the_codes_of_its_own_data_set(images, files, call, tmp_path):
    truth = read_volume(files.label)[0]
    assert call("--image", images["new"], "--out", tmp_path / "chosen", "--codes", "store") == 0
    np.testing.assert_array_equal(read_volume(tmp_path / "chosen/new.nii.gz")[0], truth)
    assert call("--image", *images.values(), "--out", tmp_path / "out") == 0
    for name, (origin, codes) in OF_LAYOUT.items():
        answer = read_volume(tmp_path / f"out/{name}.nii.gz")[0]
        np.testing.assert_array_equal(answer, np.array(codes)[truth], name)
        content = json.loads((tmp_path / f"out/{name}.json").read_text())
        assert content["codes_of"].endswith(origin)
        assert sorted(map(int, content["label_codes"])) == sorted(codes)
        assert content["volumes_ml"]["ET"] == pytest.approx(2e-3)


def test_a_region_without_a_code_there_has_that_of_the_store(predictor, images, call, tmp_path):
    predictor.labels = {**predict.LABEL_CODES["brats2023"], 4: "resection cavity"}
    predictor.regions = {"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,), "RC": (4,)}
    with pytest.raises(InputError, match=r"brats2017 .* 4 resection cavity"):
        call("--image", images["old"], "--out", tmp_path / "chosen", "--codes", "brats2017")
    assert call("--image", images["old"], "--out", tmp_path / "out") == 0
    assert json.loads((tmp_path / "out/old.json").read_text())["codes_of"] == predict.STORE


def test_labels_that_a_list_does_not_name_are_refused(call, images, tmp_path):
    path = tmp_path / "in/data/dataset.json"
    content = json.loads(path.read_text())
    content["labels"] = {"0": "background", "1": "WT", "2": "TC", "3": "ET"}  # of other meanings
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"1 edema.* got 1 WT, 2 TC, 3 ET; give --codes store"):
        call("--image", images["listed"], "--out", tmp_path / "out")


def test_nan_is_made_background(files, tmp_path, call):
    image = files.images[0]
    voxels = read_volume(image)[0][::-1, ::-1].astype(np.float32)
    voxels[0, 0, 0] = np.nan, np.inf
    write_volume(image, voxels, LPS_2MM)
    assert call("--image", image, "--out", tmp_path / "out", "--zero-nan") == 0
    assert json.loads((tmp_path / "out/a.json").read_text())["zeroed_voxels"] == 2


def test_probabilities_are_float32_on_the_sources_grid_one_file_a_region(
    predictor, files, tmp_path
):
    predictor.regions = {"left / right": (1, 2), "left : right": (3,)}
    content = predict_case(predictor, files, tmp_path / "out", probabilities=True)
    label = read_volume(files.label)[0]
    for name, codes in predictor.regions.items():
        volume, geometry = read_volume(tmp_path / "out" / content["probabilities"][name])
        assert (volume.dtype, geometry) == (np.float32, LPS_2MM)
        np.testing.assert_array_equal(volume, np.isin(label, codes) * np.float32(0.9))


@pytest.mark.parametrize(
    ("inputs", "names", "cases"),
    [
        ("FLAIR", "a b c d", "a:a b:b c:c d:d"),
        ("FLAIR", "x y x_seg", "x:x y:y"),
        ("FLAIR", "t1 flair t2 t1gd", "in:flair,t1,t1gd,t2"),
        ("FLAIR T1gd", "a b c", ""),
        ("FLAIR T1gd", "a_flair a_t1ce b_t1ce b_flair", "a:a_flair,a_t1ce b:b_flair,b_t1ce"),
        ("FLAIR", "a_t1", ""),
    ],
)
def test_3d_files_are_one_case_or_one_each_for_a_single_channel(files, inputs, names, cases):
    paths = split_channels(files.images[0], *(f"{name}.nii.gz" for name in names.split()))
    of_run = FakePredictor(None, REGIONS, LABELS, channels=STORES, inputs=tuple(inputs.split()))
    chosen, problems, _ = cases_to_predict(paths, of_run)
    assert bool(problems) == (not cases)
    stems = {
        case.files.case_id: ",".join(path.name[:-7] for path in case.files.images)
        for case in chosen
    }
    assert " ".join(f"{name}:{stem}" for name, stem in stems.items()) == cases


def test_a_case_that_was_predicted_alike_is_kept_and_named(
    call, predictor, files, tmp_path, capsys
):
    words = ("--image", files.images[0], "--out", tmp_path / "out")
    assert call(*words) == 0
    assert "1 case predicted in" in capsys.readouterr().out
    written = (tmp_path / "out/a.nii.gz").stat().st_mtime_ns
    other = write_case(tmp_path / "in", "b", seed=2).images[0]
    predictor.sure = 0.1  # which would show
    assert call(*words, "--image", files.images[0], other) == 0
    printed = capsys.readouterr().out
    assert "kept a, predicted before" in printed
    assert "1 case predicted in" in printed
    assert (tmp_path / "out/a.nii.gz").stat().st_mtime_ns == written
    assert not read_volume(tmp_path / "out/b.nii.gz")[0].any()


def other_weights(predictor, files):
    predictor.weights_sha256 = "others"


def other_image(predictor, files):
    image = nibabel.load(files.images[0])
    nibabel.save(nibabel.Nifti1Image(image.get_fdata() + 0.0, image.affine), files.images[0])


def other_order(predictor, files):
    names = {"0": "T1gd", "1": "FLAIR"}
    (files.images[0].parent / "dataset.json").write_text(json.dumps({"channel_names": names}))


def as_before(predictor, files):
    pass


@pytest.mark.parametrize(
    ("change", "more", "differs"),
    [
        (other_weights, (), "weights_sha256"),
        (other_image, (), "the image"),
        (other_order, (), "channels"),
        (as_before, ("--weights", "last"), "weights"),
        (as_before, ("--codes", "brats2023"), "label_codes"),
        (as_before, ("--zero-nan",), "zero_nan"),
        (as_before, ("--raw",), "postprocessing"),
        (as_before, ("--probabilities",), ""),
        (as_before, ("--page",), ""),
    ],
)
def test_another_answer_is_replaced_only_if_that_is_asked_for(
    call, predictor, files, tmp_path, change, more, differs
):
    words = ("--image", files.images[0], "--out", tmp_path / "out")
    assert call(*words) == 0
    change(predictor, files)
    predictor.sure = 0.1
    if differs:
        with pytest.raises(InputError, match=f"got those of a, whose .*{differs}.*--overwrite"):
            call(*words, *more)
        assert read_volume(tmp_path / "out/a.nii.gz")[0].any()
        more = (*more, "--overwrite")
    assert call(*words, *more) == 0
    assert not read_volume(tmp_path / "out/a.nii.gz")[0].any()


def killed_at(predictor, files, out, monkeypatch, step, *, before):
    """Predict into `out` until a step, and be killed before or after it."""
    whole = getattr(predict, step)

    def killed(*about):
        if not before:
            whole(*about)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(predict, step, killed)
        with pytest.raises(KeyboardInterrupt):
            predict_case(predictor, files, out, page=True)


@pytest.mark.parametrize(
    ("state", "corrected", "name"),
    [
        ("whole", False, "a.nii.gz"),
        ("whole", True, "a.nii.gz"),
        ("killed before its label", False, "a.nii.gz"),
        ("killed before its label", True, "a.nii.gz"),
        ("killed after its label", False, "a.nii.gz"),
        ("killed after its page", True, "a.nii.gz"),
        ("none", True, "a.nii.gz"),
        ("none", True, "a.json"),
        ("whole", True, "a.html"),
        ("whole", True, "a_WT_probability.nii.gz"),
    ],
)
def test_what_predict_has_not_written_is_never_overwritten(
    call, predictor, files, tmp_path, monkeypatch, state, corrected, name
):
    out = tmp_path / "out"
    words = ["--image", files.images[0], "--out", out, "--overwrite"]
    if state == "none":
        out.mkdir()
    else:
        assert call(*words) == 0
    if state.startswith("killed"):
        predictor.shift = 1  # another answer
        step = "write_case_page" if state.endswith("page") else "write_bytes"
        killed_at(predictor, files, out, monkeypatch, step, before="before" in state)
    words += {"a.html": ["--page"], "a_WT_probability.nii.gz": ["--probabilities"]}.get(name, [])
    if corrected:
        (out / name).write_bytes(b"an expert's week of work")
        with pytest.raises(InputError, match=f"{name} must not be overwritten"):
            call(*words)
        assert (out / name).read_bytes() == b"an expert's week of work"
        return
    assert call(*words) == 0
    assert json.loads((out / "a.json").read_text())["complete"]
    assert read_volume(out / "a.nii.gz")[0].any()


def test_a_label_that_was_corrected_is_kept_and_named(call, files, tmp_path, capsys):
    words = ("--image", files.images[0], "--out", tmp_path / "out")
    assert call(*words) == 0
    (tmp_path / "out/a.nii.gz").write_bytes(b"corrected")
    assert call(*words) == 0
    assert "kept a (its label as it was changed since)" in capsys.readouterr().out
    assert (tmp_path / "out/a.nii.gz").read_bytes() == b"corrected"


def test_a_source_is_never_overwritten(files, tmp_path, call):
    image = files.images[0]
    before = image.read_bytes()
    with pytest.raises(InputError, match="must not be a folder that is predicted on"):
        call("--image", image, "--out", tmp_path / "in", "--overwrite")
    assert (image.read_bytes(), (tmp_path / "in/a.json").exists()) == (before, False)


def test_pages_and_probabilities_of_the_answer_before_go(call, predictor, files, tmp_path):
    out = tmp_path / "out"
    words = ("--image", files.images[0], "--out", out)
    assert call(*words, "--page", "--probabilities") == 0
    assert len(list(out.iterdir())) == 6  # label, sidecar, page, WT, TC, ET
    (shown,) = shown_cases(out / "a.html")
    assert [modality["name"] for modality in shown["modalities"]] == list(CHANNELS)
    assert call(*words) == 0  # kept: they are of this answer
    assert len(list(out.iterdir())) == 6
    (tmp_path / "notes.txt").write_text("mine")
    content = json.loads((out / "a.json").read_text())
    content["files"] += ["../notes.txt", str(tmp_path / "notes.txt")]
    (out / "a.json").write_text(json.dumps(content))
    assert call(*words, "--overwrite") == 0
    assert sorted(path.name for path in out.iterdir()) == ["a.json", "a.nii.gz"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_diverged_network_writes_nothing_and_a_full_disk_leaves_what_can_be_redone(
    predictor, files, tmp_path, monkeypatch
):
    def full(*_):
        raise OSError(28, "No space left on device")

    predictor.sure = np.nan
    with pytest.raises(InputError, match="must be finite"):
        predict_case(predictor, files, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
    predictor.sure = 0.9
    predict_case(predictor, files, tmp_path / "out")
    before = (tmp_path / "out/a.nii.gz").read_bytes()
    predictor.sure = 0.1
    with monkeypatch.context() as patch:
        patch.setattr(predict, "write_bytes", full)
        with pytest.raises(OSError, match="No space"):
            predict_case(predictor, files, tmp_path / "out")
    assert (tmp_path / "out/a.nii.gz").read_bytes() == before
    assert not json.loads((tmp_path / "out/a.json").read_text())["complete"]
    assert predict_case(predictor, files, tmp_path / "out")["volumes_ml"]["WT"] == 0


def test_images_and_folders_that_cannot_be_used_are_refused_before_any_work(
    files, tmp_path, call, monkeypatch
):
    monkeypatch.setattr(
        predict, "trained_predictors", lambda *_: pytest.fail("the network was loaded")
    )
    image = files.images[0]
    missing = (tmp_path / "no.nii.gz", tmp_path / "nor this")
    with pytest.raises(InputError) as caught:
        call("--image", image, *missing, "--out", tmp_path / "out")
    assert len(caught.value.problems) == 2
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="must be a folder to write to"):
        call("--image", image, "--out", image / "below")


def test_a_bad_case_costs_the_others_nothing_and_is_named_at_the_end(
    predictor, tmp_path, call, monkeypatch
):
    images = [write_case(tmp_path / "in", name, seed=1).images[0] for name in "abcd"]
    images.append(write_case(tmp_path / "more", "d", seed=2).images[0])
    images[2].write_bytes(b"damaged")
    answer = predictor.probabilities

    def out_of_memory(image, record, channels):
        if record.case_id == "a":
            raise DoesNotFitError("memory must hold the prediction")
        return answer(image, record, channels)

    monkeypatch.setattr(predictor, "probabilities", out_of_memory)
    with pytest.raises(DoesNotFitError) as caught:
        call("--image", *images, "--out", tmp_path / "out")
    assert len(caught.value.problems) == 3
    assert [path.name for path in (tmp_path / "out").glob("*.gz")] == ["b.nii.gz"]


# --- What an image's header says, and how it differs from the training's ---


def with_header(image, path, *, affine=None, codes=(1, 1), unit=2):
    """The voxels of an image under another header, written by nibabel."""
    source = nibabel.load(image)
    written = nibabel.Nifti1Image(np.asarray(source.dataobj), affine)
    affine = source.affine if affine is None else affine
    written.set_sform(affine, codes[0])
    written.set_qform(affine if codes[1] else None, codes[1])
    written.header["xyzt_units"] = unit
    path.parent.mkdir(exist_ok=True)
    nibabel.save(written, path)
    return path


def trained_on(run, **facts):
    """Let a run have been trained on such images."""
    save_config(dataclasses.replace(load_config(run), **facts), run)


@pytest.mark.parametrize(("unit", "per_mm", "lean"), [(0, 1, 0), (1, 1e-3, 0.6), (3, 1e3, 0)])
def test_volumes_are_in_ml_whatever_the_headers_unit_and_the_grids_shear(
    call, files, tmp_path, unit, per_mm, lean
):
    image = nibabel.load(files.images[0])
    sheared = np.array(
        [[1, 0, 0, 0], [0, 1, lean, 0], [0, 0, (1 - lean**2) ** 0.5, 0], [0, 0, 0, 1.0]]
    )
    affine = np.diag([per_mm, per_mm, per_mm, 1]) @ sheared @ image.affine
    where = {"affine": affine, "codes": (1, 0), "unit": unit}
    path = with_header(files.images[0], tmp_path / "u/a.nii.gz", **where)
    assert call("--image", path, "--out", tmp_path / "out") == 0
    content = json.loads((tmp_path / "out/a.json").read_text())
    assert content["volumes_ml"]["TC"] == pytest.approx(27 * 2e-3 * (1 - lean**2) ** 0.5)
    assert content["spacing_mm"] == pytest.approx([1, 1, 2])
    answer = nibabel.load(tmp_path / "out/a.nii.gz")
    assert int(answer.header["xyzt_units"]) == unit
    assert answer.affine == pytest.approx(affine)
    np.testing.assert_array_equal(np.asarray(answer.dataobj), read_volume(files.label)[0])


@pytest.mark.parametrize(
    ("trained", "note"),
    [
        ((1.09, 0.92, 2.19), ""),
        ((1.0, 1.12, 2.0), "voxels of 1 x 1 x 2 mm, but the run was trained on 1 x 1.12 x 2 mm"),
        (None, ""),
    ],
)
def test_voxels_of_another_size_than_the_trainings_are_named_with_both(
    call, files, tiny_run, tmp_path, trained, note
):
    trained_on(tiny_run, spacing_mm=trained)
    assert call("--image", files.images[0], "--out", tmp_path / "out") == 0
    notes = json.loads((tmp_path / "out/a.json").read_text())["notes"]
    assert len(notes) == bool(note)
    assert all(note in text for text in notes)


@pytest.mark.parametrize(
    ("codes", "oriented", "note"),
    [
        ((1, 1), None, ""),
        ((1, 1), False, "without orientation"),
        ((0, 0), True, "sform and qform codes are 0"),
        ((0, 0), False, "sform and qform codes are 0"),
    ],
)
def test_an_image_without_orientation_is_named_and_one_other_than_the_trainings(
    call, files, tiny_run, tmp_path, capsys, codes, oriented, note
):
    trained_on(tiny_run, oriented=oriented)
    path = with_header(files.images[0], tmp_path / "o/a.nii.gz", codes=codes)
    assert call("--image", path, "--out", tmp_path / "out") == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: a: ")]
    assert len(lines) == bool(note)
    assert all("left and right may be exchanged" in line for line in lines)
    headers = [nibabel.load(file).header for file in (path, tmp_path / "out/a.nii.gz")]
    for name in ("sform_code", "qform_code"):
        assert headers[0][name] == headers[1][name]

"""Predicting new images: where the answer lies, what lies beside it, and what is never
overwritten."""

import dataclasses
import json
import shutil

import nibabel
import numpy as np
import pytest

from cpu3d.data.nifti import read_volume, write_volume
from cpu3d.errors import DivergedError, DoesNotFitError, InputError
from cpu3d.inference import predict
from cpu3d.run.config_json import load_config, save_config
from tests.cpu3d.conftest import CHANNELS, LABELS, LPS_2MM, REGIONS, FakePredictor, write_case
from tests.cpu3d.runs import run_command, shown_cases


@pytest.fixture
def predictor(tmp_path, tiny_run):
    return FakePredictor(tmp_path / "no store", REGIONS, LABELS, config=load_config(tiny_run))


@pytest.fixture
def files(tmp_path):
    """A case of one 4D image, in/a.nii.gz."""
    return write_case(tmp_path / "in", "a", seed=1)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def call(monkeypatch, predictor, tiny_run, files, out):
    """Run the command with the fake predictor in place of a trained one; by default on the case."""
    monkeypatch.setattr(predict, "trained_predictors", lambda runs, *_: [predictor])

    def call(*words, images=files.images):
        words = ("--image", *images, "--out", out, *words)
        assert run_command(predict, "--run", tiny_run, *words) == 0

    return call


def sidecar(out, name="a"):
    return json.loads((out / f"{name}.json").read_text())


def test_the_answer_has_the_sources_grid_and_codes_and_the_sidecar_says_whose_it_is(
    call, files, tiny_run, out, capsys
):
    source = nibabel.load(files.label)
    expected = np.asarray(source.dataobj)
    files.label.write_bytes(b"not a label at all")  # it is not read
    call("--weights", "last")
    answer = nibabel.load(out / "a.nii.gz")
    np.testing.assert_array_equal(np.asarray(answer.dataobj), expected)
    np.testing.assert_array_equal(answer.affine, source.affine)
    assert answer.get_data_dtype() == np.uint8
    assert (answer.header["sform_code"], answer.header["qform_code"]) == (1, 2)
    content = sidecar(out)
    volumes_ml = {
        name: round(np.isin(expected, codes).sum() * 2e-3, 4) for name, codes in REGIONS.items()
    }
    told = {
        "run": str(tiny_run),
        "fold": "",
        "weights": "last",
        "inference": {"window": None, "one_pass": True, "overlap": 0.5, "flips": True},
        "images": ["a.nii.gz"],
        "channels": list(CHANNELS),
        "normalisation": [],
        "target_spacing_mm": None,
        "regions": {name: list(codes) for name, codes in REGIONS.items()},
        "painting": [["WT", 1], ["TC", 2], ["ET", 3]],
        "label_codes": {str(code): name for code, name in LABELS.items()},
        "axes": "LPS",
        "volumes_ml": volumes_ml,
    }
    assert told.items() <= content.items()
    printed = " ".join(capsys.readouterr().out.split())
    cells = " ".join(f"{ml:.2f}" for ml in volumes_ml.values())
    assert f"a.nii.gz {cells} {content['seconds']:.1f}" in printed
    assert "WT ml TC ml ET ml" in printed
    assert "trained on cases of these names, a: if" in printed


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
    (image,) = files.images
    images = {"a": image}
    volume = read_volume(image)[0][::-1, ::-1]  # from L P S
    for name, ends in (
        ("old", ("_flair", "_t1ce")),
        ("new", ("-t2f", "-t1c")),
        ("BraTS-PED-1", ("-t2f", "-t1c")),
    ):
        images[name] = tmp_path / "in" / name
        images[name].mkdir()
        for channel, end in enumerate(ends):
            write_volume(images[name] / f"{name}{end}.nii.gz", volume[..., channel], LPS_2MM)
    data = tmp_path / "in/data"
    (data / "imagesTs").mkdir(parents=True)
    images["listed"] = shutil.copy(image, data / "imagesTs/listed.nii.gz")
    labels = {"0": "background", "3": "edema", "1": "core", "7": "enhancing"}
    write_list(data, labels)
    return images


def write_list(folder, labels):
    content = {"modality": {"0": "FLAIR", "1": "T1gd"}, "labels": labels}
    (folder / "dataset.json").write_text(json.dumps(content))


def test_each_image_is_answered_in_the_codes_of_its_own_data_set(images, files, call, out, capsys):
    truth = read_volume(files.label)[0]
    call("--codes", "store", images=[images["new"]])
    np.testing.assert_array_equal(read_volume(out / "new.nii.gz")[0], truth)
    capsys.readouterr()
    call("--overwrite", "--page", images=images.values())
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("enhancing tumour; --codes chooses others") == 1, "once for two cases"
    for name, (origin, codes) in OF_LAYOUT.items():
        answer = read_volume(out / f"{name}.nii.gz")[0]
        np.testing.assert_array_equal(answer, np.array(codes)[truth], name)
        content = sidecar(out, name)
        assert content["codes_of"].endswith(origin)
        assert sorted(map(int, content["label_codes"])) == sorted(codes)
        assert content["volumes_ml"]["ET"] == pytest.approx(2e-3)
        assert shown_cases(out / f"{name}.html")[0]["regions"][2]["codes"] == codes[3:]


def test_codes_without_one_for_each_region_are_the_stores_unless_they_are_asked_for(
    predictor, images, call, out, tmp_path
):
    predictor.labels = {**predict.LABEL_CODES["brats2023"], 4: "resection cavity"}
    predictor.regions = {"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,), "RC": (4,)}
    with pytest.raises(InputError, match=r"brats2017 .* 4 resection cavity"):
        call("--codes", "brats2017", images=[images["old"]])
    call(images=[images["old"]])
    assert sidecar(out, "old")["codes_of"] == predict.STORE
    write_list(tmp_path / "in/data", {"0": "background", "1": "WT", "2": "TC", "3": "ET"})
    with pytest.raises(InputError, match=r"2 .*got 1 WT, 2 TC, 3 ET; give --codes store"):
        call(images=[images["listed"]])


def test_nan_is_made_background(files, call, out):
    (image,) = files.images
    voxels = read_volume(image)[0][::-1, ::-1].astype(np.float32)
    voxels[0, 0, 0] = np.nan, np.inf
    write_volume(image, voxels, LPS_2MM)
    call("--zero-nan")
    assert sidecar(out)["zeroed_voxels"] == 2


def test_probabilities_are_float32_on_the_sources_grid_one_file_a_region(
    predictor, files, call, out
):
    predictor.regions = {"left / right": (1, 2), "left : right": (3,)}
    call("--probabilities")
    label = read_volume(files.label)[0]
    for name, codes in predictor.regions.items():
        volume, geometry = read_volume(out / sidecar(out)["probabilities"][name])
        assert (volume.dtype, geometry) == (np.float32, LPS_2MM)
        np.testing.assert_array_equal(volume, np.isin(label, codes) * np.float32(0.9))


def test_a_case_that_was_predicted_alike_is_kept_and_named(
    call, predictor, files, tmp_path, out, capsys
):
    call()
    other = write_case(tmp_path / "in", "b", seed=2).images[0]
    predictor.sure = 0.1  # which would show
    call(images=[*files.images, other])
    printed = capsys.readouterr().out
    assert "kept a, predicted before" in printed
    assert printed.count("1 case predicted in") == 2
    assert [read_volume(out / f"{name}.nii.gz")[0].any() for name in "ab"] == [True, False]
    (out / "a.nii.gz").write_bytes(b"corrected")
    call(images=[*files.images, other])
    assert "kept a (its label as it was changed since) and b," in capsys.readouterr().out
    assert (out / "a.nii.gz").read_bytes() == b"corrected"


def other_weights(predictor, image):
    predictor.weights_sha256 = "others"


def other_image(predictor, image):
    voxels = nibabel.load(image)
    nibabel.save(nibabel.Nifti1Image(voxels.get_fdata() + 0.0, voxels.affine), image)


def other_order(predictor, image):
    names = {"0": "T1gd", "1": "FLAIR"}
    (image.parent / "dataset.json").write_text(json.dumps({"channel_names": names}))


@pytest.mark.parametrize(
    ("change", "more", "differs"),
    [
        (other_weights, (), "weights_sha256"),
        (other_image, (), "the image"),
        (other_order, (), "channels"),
        (None, ("--weights", "last"), "weights"),
        (None, ("--codes", "brats2023"), "label_codes"),
        (None, ("--zero-nan",), "zero_nan"),
        (None, ("--raw",), "postprocessing"),
        (None, ("--probabilities",), ""),
        (None, ("--page",), ""),
    ],
)
def test_another_answer_is_replaced_only_if_that_is_asked_for(
    call, predictor, files, out, change, more, differs
):
    call()
    if change:
        change(predictor, files.images[0])
    predictor.sure = 0.1
    if differs:
        with pytest.raises(InputError, match=f"got those of a, whose .*{differs}.*--overwrite"):
            call(*more)
        assert read_volume(out / "a.nii.gz")[0].any()
        more = (*more, "--overwrite")
    call(*more)
    assert not read_volume(out / "a.nii.gz")[0].any()


@pytest.fixture
def killed_at(monkeypatch, call, predictor):
    """Predict another answer until a step, and be killed before or after it."""

    def killed_at(name, is_done, *words):
        step = getattr(predict, name)

        def killed(*about):
            if is_done:
                step(*about)
            raise KeyboardInterrupt

        predictor.shift = 1
        with monkeypatch.context() as patch:
            patch.setattr(predict, name, killed)
            with pytest.raises(KeyboardInterrupt):
                call("--overwrite", *words)

    return killed_at


MINE = (  # an expert's week of work, and what another version has written
    b'{"schema": 1, "files": ["a.json"]}',
    b'{"schema": 0, "files": ["a.json"], "written_by": "cpu3d predict"}',
)


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ("whole", "a.nii.gz"),
        ("killed before its label", "a.nii.gz"),
        ("none", "a.nii.gz"),
        ("none", "a.json"),
        ("whole", "a.html"),
        ("whole", "a_WT_probability.nii.gz"),
    ],
)
def test_what_predict_has_not_written_is_never_overwritten(call, out, killed_at, state, name):
    if state == "none":
        out.mkdir()
    else:
        call()
    if state == "killed before its label":
        killed_at("write_bytes", False)
    more = {"a.html": ["--page"], "a_WT_probability.nii.gz": ["--probabilities"]}
    for mine in MINE:
        (out / name).write_bytes(mine)
        with pytest.raises(InputError, match=f"{name} must not be overwritten"):
            call("--overwrite", *more.get(name, ()))
        assert (out / name).read_bytes() == mine


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("words", [(), ("--page",)])
def test_an_answer_with_a_page_that_was_cut_off_while_it_was_replaced_is_made_again(
    call, files, out, killed_at, is_done, words
):
    call("--page", "--probabilities")
    killed_at("write_bytes", is_done, *words)
    call(*words)
    (out / "a.nii.gz").unlink()
    call(*words)
    assert sidecar(out)["complete"]
    assert (out / "a.html").exists() == bool(words)
    assert len(list(out.iterdir())) == 2 + len(words)
    found = read_volume(out / "a.nii.gz")[0]
    assert (found != read_volume(files.label)[0]).any()  # another answer, of the shifted network


def test_a_source_is_never_overwritten(files, tmp_path, call):
    (image,) = files.images
    before = image.read_bytes()
    with pytest.raises(InputError, match="must not be a folder that is predicted on"):
        call("--out", tmp_path / "in/../in", "--overwrite")
    assert (image.read_bytes(), (tmp_path / "in/a.json").exists()) == (before, False)


def test_pages_and_probabilities_of_the_answer_before_go_and_nobody_elses_files(
    call, tmp_path, out
):
    call("--page", "--probabilities")
    (shown,) = shown_cases(out / "a.html")
    assert [modality["name"] for modality in shown["modalities"]] == list(CHANNELS)
    call()  # kept: they are of this answer
    assert len(list(out.iterdir())) == 6  # label, sidecar, page, WT, TC, ET
    for folder in (tmp_path, out):
        (folder / "notes.txt").write_text("mine")
    content = sidecar(out)
    content["files"] += ["../notes.txt", str(tmp_path / "notes.txt")]
    (out / "a.json").write_text(json.dumps(content))
    call("--overwrite")
    assert sorted(path.name for path in out.iterdir()) == ["a.json", "a.nii.gz", "notes.txt"]
    assert (tmp_path / "notes.txt").exists()


def test_images_and_folders_that_cannot_be_used_are_refused_before_any_work(
    files, tmp_path, call, out, monkeypatch
):
    monkeypatch.setattr(predict, "trained_predictors", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(InputError) as caught:
        call(images=(*files.images, tmp_path / "no.nii.gz", tmp_path / "nor this"))
    assert len(caught.value.problems) == 2
    assert not out.exists()
    with pytest.raises(InputError, match="must be a folder to write to"):
        call("--out", files.images[0] / "below")


def test_a_bad_case_costs_the_others_nothing_and_is_named_at_the_end(
    predictor, tmp_path, call, out, monkeypatch
):
    images = [write_case(tmp_path / "in", name, seed=1).images[0] for name in "abcde"]
    images.append(write_case(tmp_path / "more", "e", seed=2).images[0])
    images[2].write_bytes(b"damaged")
    answer = predictor.probabilities
    errors = {"a": DoesNotFitError("memory"), "d": DivergedError("not finite")}

    def failing(image, record, *more):
        if record.case_id in errors:
            raise errors[record.case_id]
        return answer(image, record, *more)

    monkeypatch.setattr(predictor, "probabilities", failing)
    with pytest.raises(DoesNotFitError) as caught:
        call(images=images)
    assert len(caught.value.problems) == 4
    assert sorted(path.name for path in out.iterdir()) == ["b.json", "b.nii.gz"]
    with pytest.raises(InputError) as caught:
        call(images=images[3:4])
    assert not isinstance(caught.value, DoesNotFitError)
    with pytest.raises(InputError, match="case ids must differ"):  # beside one that is kept
        call(images=[images[1], *images[4:]])


# --- What an image's header says, and how it differs from the training's ---


def with_codes(image, codes):
    """Write the voxels of an image under a header with other codes of its forms, by nibabel."""
    source = nibabel.load(image)
    written = nibabel.Nifti1Image(np.array(source.dataobj), source.affine)
    written.set_sform(source.affine, codes[0])
    written.set_qform(source.affine if codes[1] else None, codes[1])
    written.header["xyzt_units"] = 2
    nibabel.save(written, image)


SPACING = "voxels of 1 x 1 x 2 mm, but the run was trained on 1 x 1.12 x 2 mm"


@pytest.mark.parametrize(
    ("trained", "codes", "note"),
    [
        ({"spacing_mm": (1.09, 0.92, 2.19)}, (1, 1), ""),
        ({"spacing_mm": (1.0, 1.12, 2.0)}, (1, 1), SPACING),
        ({"spacing_mm": None, "oriented": None}, (1, 1), ""),
        ({"oriented": False}, (1, 1), "left and right may be exchanged"),
        ({"oriented": True}, (0, 0), "left and right may be exchanged"),
        ({"oriented": False}, (0, 0), "left and right may be exchanged"),
    ],
)
def test_an_image_unlike_the_trainings_or_without_orientation_is_named(
    call, files, tiny_run, out, capsys, trained, codes, note
):
    save_config(dataclasses.replace(load_config(tiny_run), **trained), tiny_run)
    with_codes(files.images[0], codes)
    call()
    notes = sidecar(out)["notes"]
    assert len(notes) == bool(note)
    assert all(note in text for text in notes)
    assert ("note: a: " in capsys.readouterr().err) == bool(note)
    header = nibabel.load(out / "a.nii.gz").header
    assert (header["sform_code"], header["qform_code"]) == codes

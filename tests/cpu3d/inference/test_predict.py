"""Predicting new images: where the answer lies, what lies beside it, and what is never overwritten."""

import json
import shutil

import nibabel
import numpy as np
import pytest

from cpu3d.data.nifti import read_volume, write_volume
from cpu3d.data.stores.conversion import Settings, identity
from cpu3d.errors import DoesNotFitError, InputError
from cpu3d.inference import predict
from cpu3d.inference.predict import Case, codes_for, find_cases
from cpu3d.util.atomic import write_json
from tests.cpu3d.conftest import CHANNELS, LABELS, LPS_2MM, REGIONS, FakePredictor, write_case
from tests.cpu3d.runs import run_command


@pytest.fixture
def predictor(tmp_path):
    return FakePredictor(tmp_path / "no store", REGIONS, LABELS)


def predict_case(predictor, files, out, **how):
    return predict.predict_case(predictor, Case(files, CHANNELS, codes_for(predictor, files)), out, **how)


def find(paths, channels, inputs):
    """The files of the cases, and the problems."""
    predictor = FakePredictor(None, REGIONS, LABELS, channels=tuple(channels), inputs=tuple(inputs))
    cases, problems = find_cases(paths, predictor)
    return [case.files for case in cases], problems


@pytest.fixture
def call(monkeypatch, predictor, tiny_run):
    """Run the command with the fake predictor in place of a trained one."""
    monkeypatch.setattr(predict, "trained_predictors", lambda runs, weights, inference: [predictor] * len(runs))

    def run(*words, runs=(tiny_run,)):
        return run_command(predict, "--run", *runs, *words)

    return run


def test_the_answer_has_the_sources_shape_affine_axes_and_codes(predictor, tmp_path):
    files = write_case(tmp_path / "in", "a", seed=1)
    predict_case(predictor, files, tmp_path / "out")
    source, answer = nibabel.load(files.label), nibabel.load(tmp_path / "out/a.nii.gz")
    np.testing.assert_array_equal(np.asarray(answer.dataobj), np.asarray(source.dataobj))
    np.testing.assert_array_equal(answer.affine, source.affine)
    assert nibabel.aff2axcodes(answer.affine) == ("L", "P", "S")
    assert answer.get_data_dtype() == np.uint8
    assert (answer.header["sform_code"], answer.header["qform_code"]) == (1, 2)


def test_the_sidecar_says_whose_answer_it_is_what_the_codes_mean_and_how_large_everything_is(call, tiny_run, tmp_path):
    files = write_case(tmp_path / "in", "a", seed=1)
    label = read_volume(files.label)[0]
    files.label.write_bytes(b"not a label at all")  # it is not read
    assert call("--image", files.images[0], "--out", tmp_path / "out", "--weights", "last") == 0
    content = json.loads((tmp_path / "out/a.json").read_text())
    assert content["complete"]
    assert content["label_codes"] == {str(code): name for code, name in LABELS.items()}
    assert content["volumes_ml"] == {
        name: pytest.approx(np.isin(label, codes).sum() * 2e-3) for name, codes in REGIONS.items()
    }
    assert content["sources"][0]["path"] == "a.nii.gz"
    assert (content["run"], content["fold"], content["weights"]) == (str(tiny_run), "", "last")
    assert content["inference"] == {"window": None, "one_pass": True, "overlap": 0.5, "flips": False}


def test_a_network_that_only_knows_the_whole_tumour_says_that_its_code_stands_for_several(
    predictor, tmp_path, call, capsys
):
    predictor.regions = {"WT": (1, 2, 3)}
    files = write_case(tmp_path / "in", "a", seed=1)
    assert call("--image", files.images[0], "--out", tmp_path / "out") == 0
    answer, label = read_volume(tmp_path / "out/a.nii.gz")[0], read_volume(files.label)[0]
    np.testing.assert_array_equal(answer, label > 0)
    meaning = "WT (edema, non-enhancing tumor, enhancing tumour)"
    assert json.loads((tmp_path / "out/a.json").read_text())["label_codes"]["1"] == meaning
    assert meaning in " ".join(capsys.readouterr().out.split())


@pytest.fixture
def images(tmp_path):
    """The same voxels in every layout, and their label in the codes of the tiny store, which are Decathlon's."""
    files = write_case(tmp_path / "in", "a", seed=1)
    for name, ends in (("old", ("_flair", "_t1ce")), ("new", ("-t2f", "-t1c")), ("BraTS-PED-1", ("-t2f", "-t1c"))):
        (files.images[0].parent / name).mkdir()
        split_channels(files.images[0], *(f"{name}/{name}{end}.nii.gz" for end in ends))
    data = tmp_path / "in/data"
    (data / "imagesTs").mkdir(parents=True)
    shutil.copy(files.images[0], data / "imagesTs/listed.nii.gz")
    labels = {"0": "background", "3": "edema", "1": "core", "7": "enhancing"}
    listed = {"modality": {"0": "FLAIR", "1": "T1gd"}, "labels": labels, "training": [{"image": "a.nii.gz"}]}
    (data / "dataset.json").write_text(json.dumps(listed))
    where = {"listed": data / "imagesTs/listed.nii.gz", "a": files.images[0]}
    return {**{name: tmp_path / "in" / name for name in ("old", "new", "BraTS-PED-1")}, **where}, files.label


OF_LAYOUT = {
    "old": ("brats2017", [0, 2, 1, 4]),
    "new": ("brats2023", [0, 2, 1, 3]),
    "listed": ("dataset.json", [0, 3, 1, 7]),
    "BraTS-PED-1": ("the run's store", [0, 1, 2, 3]),
    "a": ("the run's store", [0, 1, 2, 3]),
}
"""Image -> whose codes it is answered in, and these for background, oedema, core, enhancing."""


def test_each_image_is_answered_in_the_codes_of_its_own_data_set(images, call, tmp_path, capsys):
    paths, label = images
    assert call("--image", paths["new"], "--out", tmp_path / "chosen", "--codes", "store") == 0
    np.testing.assert_array_equal(read_volume(tmp_path / "chosen/new.nii.gz")[0], read_volume(label)[0])
    capsys.readouterr()
    assert call("--image", *paths.values(), "--out", tmp_path / "out") == 0
    said, truth = capsys.readouterr().out, read_volume(label)[0]
    for name, (of, codes) in OF_LAYOUT.items():
        np.testing.assert_array_equal(read_volume(tmp_path / f"out/{name}.nii.gz")[0], np.array(codes)[truth], name)
        content = json.loads((tmp_path / f"out/{name}.json").read_text())
        assert content["codes_of"].endswith(of)
        assert content["codes_of"] in said
        assert sorted(map(int, content["label_codes"])) == sorted(codes)
        assert content["volumes_ml"]["ET"] == pytest.approx(2e-3)


def test_a_region_without_a_code_in_the_images_data_set_has_the_stores_and_is_refused_where_codes_are_chosen(
    predictor, images, call, tmp_path
):
    paths, _ = images
    predictor.labels = {**predict.LABEL_CODES["brats2023"], 4: "resection cavity"}
    predictor.regions = {"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,), "RC": (4,)}
    with pytest.raises(InputError, match=r"region RC .* brats2017"):
        call("--image", paths["old"], "--out", tmp_path / "chosen", "--codes", "brats2017")
    assert call("--image", paths["old"], paths["new"], "--out", tmp_path / "out") == 0
    assert json.loads((tmp_path / "out/old.json").read_text())["codes_of"] == predict.STORE
    content = json.loads((tmp_path / "out/new.json").read_text())  # the codes of the release, and one more
    assert (content["codes_of"], content["label_codes"]["4"]) == ("brats2023", "resection cavity")
    predictor.labels, predictor.regions = {0: "background", 5: "oedema"}, {"oedema": (5,)}  # a label for a region
    assert call("--image", paths["old"], "--out", tmp_path / "out") == 0
    assert json.loads((tmp_path / "out/old.json").read_text())["regions"] == {"oedema": [2]}


def test_a_run_on_a_store_without_nan_takes_its_source_images_as_prepare_did(tmp_path, call, tiny_store):
    image = write_case(tmp_path / "in", "a", seed=1).images[0]
    voxels = read_volume(image)[0][::-1, ::-1].astype(np.float32)
    voxels[0, 0, 0] = np.nan, np.inf
    write_volume(image, voxels, LPS_2MM)
    with pytest.raises(InputError, match="--zero-nan"):
        call("--image", image, "--out", tmp_path / "out")
    assert call("--image", image, "--out", tmp_path / "out", "--zero-nan") == 0
    assert json.loads((tmp_path / "out/a.json").read_text())["zeroed_voxels"] == 2
    write_json(tiny_store.folder / "source.json", identity(tiny_store.manifest, Settings(zero_nan=True)))
    assert call("--image", image, "--out", tmp_path / "out") == 0


def test_probabilities_come_as_float32_on_the_sources_grid_one_file_a_region(predictor, tmp_path):
    files = write_case(tmp_path / "in", "a", seed=1)
    content = predict_case(predictor, files, tmp_path / "out", probabilities=True)
    label = read_volume(files.label)[0]
    for name, codes in REGIONS.items():
        volume, geometry = read_volume(tmp_path / "out" / content["probabilities"][name])
        assert volume.dtype == np.float32
        assert geometry == LPS_2MM
        np.testing.assert_array_equal(volume, np.isin(label, codes) * np.float32(0.9))


def test_regions_named_with_blanks_and_slashes_make_file_names(predictor, tmp_path):
    predictor.regions = {"left / right": (1,), "left : right": (2,)}
    content = predict_case(predictor, write_case(tmp_path / "in", "a", seed=1), tmp_path / "out", probabilities=True)
    assert len({path.name for path in (tmp_path / "out").glob("*_probability.nii.gz")}) == 2
    assert all((tmp_path / "out" / name).is_file() for name in content["probabilities"].values())


def test_one_file_per_channel_is_one_case_and_4d_files_are_cases_of_their_own(tmp_path):
    one, two = (write_case(tmp_path / name, name, seed=1).images[0] for name in ("one", "two"))
    both = read_volume(one)[0]
    for channel in (0, 1):
        write_volume(tmp_path / f"x{channel}.nii.gz", both[::-1, ::-1, :, channel], LPS_2MM)
    cases, problems = find([one, tmp_path / "x0.nii.gz", tmp_path / "x1.nii.gz", two], CHANNELS, CHANNELS)
    assert not problems
    assert [len(files.images) for files in cases] == [1, 1, 2]
    cases, _ = find([tmp_path / "x0.nii.gz", tmp_path / "x1.nii.gz"], CHANNELS[:1], CHANNELS[:1])
    assert [files.case_id for files in cases] == ["x0", "x1"]


@pytest.fixture
def flair_only(predictor):
    predictor.inputs = ("FLAIR",)
    return predictor


def split_channels(image, *names):
    """The channels of a 4D file as files of their own."""
    volume = read_volume(image)[0][::-1, ::-1]  # from L P S
    paths = [image.parent / name for name in names]
    for channel, path in enumerate(paths):
        write_volume(path, volume[..., channel], LPS_2MM)
    return paths


@pytest.mark.parametrize("kind", ["4D of the store", "3D", "4D of one", "folder", "folder of FLAIR", "3D of the store"])
def test_a_run_of_flair_alone_takes_the_stores_images_and_flair_alone(flair_only, call, tmp_path, kind):
    files = write_case(tmp_path / "in", "a", seed=1)
    label = read_volume(files.label)[0]
    (tmp_path / "in/case").mkdir()
    flair, t1gd = split_channels(files.images[0], "case/case_flair.nii.gz", "case/case_t1ce.nii.gz")
    thick = tmp_path / "in/thick.nii.gz"
    write_volume(thick, read_volume(flair)[0][::-1, ::-1, :, None], LPS_2MM)
    images = {
        "4D of the store": [files.images[0]],
        "3D": [flair],
        "4D of one": [thick],
        "3D of the store": [flair, t1gd],
    }
    if kind == "folder of FLAIR":
        t1gd.unlink()
    name = {"4D of the store": "a", "4D of one": "thick"}.get(kind, "case")
    assert call("--image", *images.get(kind, [flair.parent]), "--out", tmp_path / "out", "--codes", "store") == 0
    np.testing.assert_array_equal(read_volume(tmp_path / f"out/{name}.nii.gz")[0], label)
    sources = json.loads((tmp_path / f"out/{name}.json").read_text())["sources"]
    assert len(sources) == (2 if kind in ("folder", "3D of the store") else 1)


def test_unnamed_files_are_a_case_each_for_a_run_of_one_channel_and_none_is_lost(flair_only, call, tmp_path, capsys):
    one, two = (write_case(tmp_path / name, name, seed=1).images[0] for name in ("one", "two"))
    flair, _ = split_channels(one, "x.nii.gz", "x_seg.nii.gz")
    other, _ = split_channels(two, "y.nii.gz", "y_seg.nii.gz")
    assert call("--image", flair, other, one.parent / "x_seg.nii.gz", "--out", tmp_path / "out") == 0
    assert sorted(path.name for path in (tmp_path / "out").glob("*.nii.gz")) == ["x.nii.gz", "y.nii.gz"]
    assert f"not read: {one.parent / 'x_seg.nii.gz'}" in capsys.readouterr().out
    stores, folder = ("FLAIR", "T1w", "T1gd", "T2w"), one.parent
    four = split_channels(one, "a.nii.gz", "b.nii.gz") + split_channels(one, "c.nii.gz", "d.nii.gz")
    assert [files.images for files in find(four, stores, ("FLAIR",))[0]] == [(path,) for path in four]
    bare = split_channels(one, "t1.nii.gz", "flair.nii.gz") + split_channels(one, "t2.nii.gz", "t1gd.nii.gz")
    ((files,), _) = find(bare, stores, ("FLAIR",))
    assert (files.case_id, [path.name.split(".")[0] for path in files.images]) == (
        folder.name, ["flair", "t1", "t1gd", "t2"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("inputs", "names"),
    [
        (("FLAIR", "T1gd"), "a b c d"),  # a case of the store's four channels, or two of the run's
        (("FLAIR", "T1gd"), "a_t1ce b"),
        (("FLAIR",), "a_flair b"),
        (("FLAIR",), "a_flair a_t1 b_t1ce b_t2"),
    ],
)
def test_files_that_may_be_other_cases_are_refused(tmp_path, inputs, names):
    image = write_case(tmp_path, "one", seed=1).images[0]
    paths = [path for name in names.split() for path in split_channels(image, f"{name}.nii.gz")]
    cases, problems = find(paths, ("FLAIR", "T1w", "T1gd", "T2w"), inputs)
    assert problems
    assert not [files for files in cases if len(files.images) > 1]


def test_several_flair_images_are_cases_of_their_own_and_another_modality_is_refused(tmp_path):
    one, two = (write_case(tmp_path / name, name, seed=1).images[0] for name in ("one", "two"))
    first, t1 = split_channels(one, "one_flair.nii.gz", "one_t1.nii.gz")
    second, _ = split_channels(two, "two_flair.nii.gz", "two_t1.nii.gz")
    stores = ("FLAIR", "T1w", "T1gd", "T2w")
    cases, problems = find([first, second], stores, ("FLAIR",))
    assert [(files.case_id, files.images) for files in cases] == [("one", (first,)), ("two", (second,))]
    assert not problems
    assert find([t1], stores, ("FLAIR",))[1][0].startswith("channel FLAIR of")
    assert find([first, t1], stores, ("FLAIR", "T1w"))[0][0].images == (first, t1)
    plain = split_channels(one, "x0.nii.gz", "x1.nii.gz")
    (problem,) = find([first, *plain], stores, ("FLAIR", "T1gd"))[1]
    assert "one file for each of FLAIR, T1gd, got 3 files" in problem


def test_damaged_headers_are_told_file_by_file_and_the_good_are_found(tmp_path):
    images = [write_case(tmp_path / "in", name, seed=1).images[0] for name in ("a", "b", "c")]
    plain = split_channels(images[2], "x0.nii.gz", "x1.nii.gz")
    for image in images[:2]:
        image.write_bytes(b"no image at all")
    cases, problems = find([*images, *plain], CHANNELS, CHANNELS)
    assert [files.case_id for files in cases] == ["c", "x0"]
    assert [problem.split()[0] for problem in problems] == [str(images[0]), str(images[1])]
    stores = ("one", "two", "three")
    _, problems = find([images[0], *plain], stores, stores)  # a third file is there, so "got 2" would mislead
    assert [problem.split()[0] for problem in problems] == [str(images[0])]


def test_the_sidecar_of_an_ensemble_names_every_run(call, fold_runs, tmp_path):
    files = write_case(tmp_path / "in", "a", seed=1)
    runs = fold_runs("2/2", "1/2")
    assert call("--image", files.images[0], "--out", tmp_path / "out", runs=runs) == 0
    content = json.loads((tmp_path / "out/a.json").read_text())
    assert "run" not in content
    assert [(one["run"], one["fold"]) for one in content["runs"]] == [(str(runs[0]), "2/2"), (str(runs[1]), "1/2")]
    np.testing.assert_array_equal(read_volume(tmp_path / "out/a.nii.gz")[0], read_volume(files.label)[0])


def test_a_source_image_is_never_overwritten(tmp_path, call):
    image = write_case(tmp_path / "in", "a", seed=1).images[0]
    before = image.read_bytes()
    with pytest.raises(InputError, match="it is a source image"):
        call("--image", image, "--out", tmp_path / "in")
    assert image.read_bytes() == before
    assert not (tmp_path / "in/a.json").exists()


def test_a_file_that_predict_did_not_write_is_never_overwritten(predictor, tmp_path):
    files = write_case(tmp_path / "in", "a", seed=1)
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels/a.nii.gz").write_bytes(b"an expert's week of work")
    with pytest.raises(InputError, match="not written by predict"):
        predict_case(predictor, files, tmp_path / "labels")
    (tmp_path / "labels/a.json").write_text('{"written_by": "somebody"}')
    with pytest.raises(InputError, match="not written by predict"):
        predict_case(predictor, files, tmp_path / "labels")
    assert (tmp_path / "labels/a.nii.gz").read_bytes() == b"an expert's week of work"


def test_an_earlier_prediction_is_replaced_also_one_that_was_cut_off(predictor, tmp_path, monkeypatch):
    files = write_case(tmp_path / "in", "a", seed=1)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(predict, "write_label", full)
        with pytest.raises(OSError, match="No space"):
            predict_case(predictor, files, tmp_path / "out")
    assert not json.loads((tmp_path / "out/a.json").read_text())["complete"]
    predict_case(predictor, files, tmp_path / "out")
    predictor.sure = 0.1
    assert predict_case(predictor, files, tmp_path / "out")["volumes_ml"]["WT"] == 0
    assert not read_volume(tmp_path / "out/a.nii.gz")[0].any()


def test_missing_images_and_folders_that_are_none_are_refused_before_any_work(tmp_path, call, monkeypatch):
    monkeypatch.setattr(predict, "trained_predictors", lambda *_: pytest.fail("the network was loaded"))
    image = write_case(tmp_path / "in", "a", seed=1).images[0]
    with pytest.raises(InputError) as caught:
        call("--image", image, tmp_path / "no.nii.gz", tmp_path / "nor this", "--out", tmp_path / "out")
    assert len(caught.value.problems) == 2
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match=r"--out .* must be a folder to write to"):
        call("--image", image, "--out", image / "below")


def test_the_out_folder_must_be_a_folder_and_none_that_is_predicted_on(tmp_path, call):
    image = write_case(tmp_path / "in", "a", seed=1).images[0]
    with pytest.raises(InputError, match="must be a folder to write to, got a file"):
        call("--image", image, "--out", image)
    case = tmp_path / "case"
    for name, channel in (("case_flair", 0), ("case_t1ce", 1)):
        case.mkdir(exist_ok=True)
        write_volume(case / f"{name}.nii.gz", read_volume(image)[0][::-1, ::-1, :, channel], LPS_2MM)
    with pytest.raises(InputError, match="must not be a folder that is predicted on"):
        call("--image", case, "--out", case)


def test_a_diverged_network_is_told_and_writes_nothing(predictor, tmp_path):
    predictor.sure = np.nan
    with pytest.raises(InputError, match="must be finite"):
        predict_case(predictor, write_case(tmp_path / "in", "a", seed=1), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_what_a_case_lacks_costs_the_others_nothing_and_is_told_at_the_end(predictor, tmp_path, call, monkeypatch):
    images = [write_case(tmp_path / "in", name, seed=1).images[0] for name in "abcd"]
    images[2].write_bytes(b"damaged")
    damaged = bytearray(images[3].read_bytes())
    damaged[-6] ^= 1  # in the CRC: nibabel alone would not see it
    images[3].write_bytes(damaged)
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

import argparse
import json
import os

import nibabel
import numpy as np
import pytest

from cpu3d.data import phantom as phantom_module
from cpu3d.data.layouts import read_dataset
from cpu3d.data.phantom import CHANNELS, phantom_case, write_phantom
from cpu3d.errors import InputError
from cpu3d.util.child import KILLED
from cpu3d.util.lock import locked

SMALL = (40, 48, 36)


@pytest.fixture(scope="module")
def head():
    """A case at half the usual size: (image, label, mask of the brain)."""
    image, label = phantom_case((120, 120, 78), seed=0, index=0)
    return image, label, image[..., 0] != 0


def mean(image, name, where):
    return image[..., CHANNELS.index(name)][where].mean()


def test_a_skull_stripped_head_lies_on_zero_background(head):
    image, label, brain = head
    assert (image.dtype, label.dtype) == (np.int16, np.uint8)
    assert all(np.array_equal(image[..., index] != 0, brain) for index in range(4))
    assert 0.1 < brain.mean() < 0.25
    extent = [np.ptp(np.flatnonzero(brain.any(axis=tuple({0, 1, 2} - {axis})))) + 1 for axis in range(3)]
    assert np.allclose(extent, np.array([135, 174, 136]) / 2, rtol=0.1)
    assert image.min() == 0
    assert not label[~brain].any()


def test_tumour_contrasts_are_those_of_mri(head):
    image, label, brain = head
    healthy = brain & (label == 0)
    assert mean(image, "FLAIR", label == 1) > 1.3 * mean(image, "FLAIR", healthy)
    assert mean(image, "T2w", label > 0) > 1.2 * mean(image, "T2w", healthy)
    assert mean(image, "t1gd", label == 3) > 1.6 * mean(image, "t1gd", healthy)
    assert mean(image, "T1w", label == 2) < 0.8 * mean(image, "T1w", healthy)


def test_oedema_lies_around_core_and_rim():
    _, label = phantom_case((120, 120, 78), seed=0, index=0)
    rim = np.argwhere(label == 3)
    for axis in range(3):
        step = np.eye(3, dtype=int)[axis]
        for direction in (step, -step):
            beside = label[tuple((rim + direction).T)]
            assert np.isin(beside, (1, 2, 3)).mean() > 0.9
    spread = [np.argwhere(label == code).std(axis=0).mean() for code in (1, 3)]
    assert spread[0] > spread[1]


def test_no_single_brightness_tells_the_tumour():
    best = {name: [] for name in CHANNELS}
    for index in range(3):
        image, label = phantom_case((80, 80, 52), seed=0, index=index)
        brain, truth = image[..., 0] != 0, label > 0
        for number, name in enumerate(CHANNELS):
            values = image[..., number]
            limits = np.quantile(values[brain], np.linspace(0.3, 0.99, 30))
            dice = [2 * (truth & (values > t)).sum() / (truth.sum() + (values > t).sum()) for t in limits]
            best[name].append(max(dice))
    averages = {name: np.mean(values) for name, values in best.items()}
    assert max(averages.values()) < 0.85
    assert averages["FLAIR"] > 0.5


@pytest.mark.parametrize("shape", [(24, 24, 24), (32, 32, 24), (24, 60, 24)])
def test_small_shapes_have_all_three_codes(shape):
    for index in range(6):
        image, label = phantom_case(shape, seed=3, index=index)
        assert image.shape == (*shape, 4)
        assert set(np.unique(label)) == {0, 1, 2, 3}
        assert all(image[..., channel].std() > 0 for channel in range(4))


def test_a_case_depends_on_seed_and_number_alone():
    image, label = phantom_case(SMALL, seed=1, index=2)
    again = phantom_case(SMALL, seed=1, index=2)
    assert np.array_equal(image, again[0])
    assert np.array_equal(label, again[1])
    assert not np.array_equal(image, phantom_case(SMALL, seed=1, index=3)[0])
    assert not np.array_equal(image, phantom_case(SMALL, seed=2, index=2)[0])


def test_what_is_drawn_stays_what_it_was():
    """The numbers of version 1 as it was first written: whoever changes them makes a version 2."""
    image, label = phantom_case(SMALL, seed=5, index=0)
    assert np.bincount(label.ravel()).tolist() == [68193, 732, 64, 131]
    assert np.allclose(image[image[..., 0] > 0].mean(axis=0), [235.441, 444.287, 284.083, 421.204], atol=0.01)


def test_tumours_differ_in_place_size_and_side():
    centres, sizes = [], []
    for index in range(8):
        _, label = phantom_case(SMALL, seed=0, index=index)
        centres.append(np.argwhere(label > 0).mean(axis=0))
        sizes.append((label > 0).sum())
    assert np.ptp(centres, axis=0).min() > 3
    assert {centre[0] > SMALL[0] / 2 for centre in centres} == {True, False}
    assert max(sizes) > 1.5 * min(sizes)


def test_it_is_a_decathlon_data_set_whatever_the_workers(tmp_path):
    write_phantom(tmp_path / "one", cases=3, shape=SMALL, seed=4, workers=1)
    write_phantom(tmp_path / "two", cases=3, shape=SMALL, seed=4, workers=2)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert len(files) == 3 + 3 + 2
    assert all((tmp_path / "one" / path).read_bytes() == (tmp_path / "two" / path).read_bytes() for path in files)
    dataset = read_dataset(tmp_path / "one")
    assert dataset.channels == ("FLAIR", "T1w", "t1gd", "T2w")
    assert dataset.labels == {0: "background", 1: "edema", 2: "non-enhancing tumor", 3: "enhancing tumour"}
    assert (len(dataset.cases), dataset.problems) == (3, ())
    image, label = phantom_case(SMALL, seed=4, index=1)
    assert np.array_equal(np.asarray(nibabel.load(dataset.cases[1].images[0]).dataobj), image)
    assert np.array_equal(np.asarray(nibabel.load(dataset.cases[1].label).dataobj), label)


def test_an_unfinished_or_smaller_set_is_continued(tmp_path, monkeypatch):
    drawn = []
    real = phantom_module.phantom_case
    monkeypatch.setattr(phantom_module, "phantom_case", lambda *case: drawn.append(case[2]) or real(*case))
    out = write_phantom(tmp_path / "p", cases=2, shape=SMALL, workers=1)
    (out / "dataset.json").unlink()
    (out / "labelsTr/BRATS_001.nii.gz").unlink()
    (out / "imagesTr/.BRATS_001.nii.gz.x.cpu3d.partial").write_bytes(b"")
    drawn.clear()
    write_phantom(out, cases=3, shape=SMALL, workers=1)
    assert drawn == [0, 2]
    assert len(read_dataset(out).cases) == 3
    assert not list(out.rglob("*.partial"))


def test_a_folder_with_anything_else_in_it_is_refused(tmp_path):
    out = write_phantom(tmp_path / "p", cases=1, shape=SMALL, workers=1)
    with pytest.raises(InputError, match="same phantom"):
        write_phantom(out, cases=1, shape=SMALL, seed=9, workers=1)
    (out / "phantom.json").write_text("{")
    with pytest.raises(InputError, match="same phantom"):
        write_phantom(out, cases=1, shape=SMALL, workers=1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("")
    with pytest.raises(InputError, match="other content"):
        write_phantom(tmp_path / "other", cases=1, shape=SMALL, workers=1)
    with pytest.raises(InputError, match="folder to write to, got a file"):
        write_phantom(tmp_path / "other/file", cases=1, shape=SMALL, workers=1)
    assert os.listdir(tmp_path / "other") == ["file"]


def test_bad_arguments_are_told_together(tmp_path):
    with pytest.raises(InputError) as error:
        write_phantom(tmp_path / "p", cases=0, shape=(0, 64, -1), seed=-1)
    assert [problem.split()[0] for problem in error.value.problems] == ["--cases", "--shape", "--seed"]
    with pytest.raises(InputError, match="from 24"):
        write_phantom(tmp_path / "p", cases=1, shape=(64, 64, 23))
    with pytest.raises(InputError, match="--workers"):
        write_phantom(tmp_path / "p", cases=1, shape=SMALL, workers=0)
    assert not (tmp_path / "p").exists()


def test_ctrl_c_keeps_finished_cases_and_says_so(tmp_path, monkeypatch):
    real = phantom_module.phantom_case

    def interrupted(shape, seed, index, context):
        if index == 1:
            raise KeyboardInterrupt
        return real(shape, seed, index, context)

    monkeypatch.setattr(phantom_module, "phantom_case", interrupted)
    with pytest.raises(KeyboardInterrupt, match="run the same command again"):
        write_phantom(tmp_path / "p", cases=3, shape=SMALL, workers=1)
    assert [path.name for path in (tmp_path / "p/imagesTr").iterdir()] == ["BRATS_001.nii.gz"]
    assert not (tmp_path / "p/dataset.json").exists()


def test_two_into_one_folder_at_a_time_are_refused_and_neither_sweeps_the_others_files(tmp_path):
    out = write_phantom(tmp_path / "p", cases=1, shape=SMALL, workers=1)
    others = out / "imagesTr/.BRATS_002.nii.gz.x.cpu3d.partial"
    others.write_bytes(b"being written")
    with locked(out, "phantom folder"), pytest.raises(InputError, match="one process at a time"):
        write_phantom(out, cases=2, shape=SMALL, workers=1)
    assert others.exists()


@pytest.mark.parametrize("killed", [False, True], ids=["told", "killed"])
def test_a_shape_too_large_for_the_memory_is_bad_input(tmp_path, monkeypatch, killed):
    def too_large(*_):
        raise MemoryError

    if killed:
        monkeypatch.setattr(phantom_module, "run_jobs", lambda function, jobs, workers: ((job, KILLED) for job in jobs))
    else:
        monkeypatch.setattr(phantom_module, "phantom_case", too_large)
    with pytest.raises(InputError, match="--shape must fit into memory, got 40x48x36; choose a smaller one"):
        write_phantom(tmp_path / "p", cases=1, shape=SMALL, workers=1)


def test_the_command_line_has_the_size_of_brats_by_default(tmp_path):
    parser = argparse.ArgumentParser()
    phantom_module.add_arguments(parser)
    args = parser.parse_args(["--out", str(tmp_path / "p")])
    assert (args.cases, tuple(args.shape), args.seed) == (10, (240, 240, 155), 0)
    args = parser.parse_args(["--out", str(tmp_path / "p"), "--cases", "1", "--shape", "32", "32", "24", "--seed", "2"])
    assert phantom_module.run(args) == 0
    assert json.loads((tmp_path / "p/dataset.json").read_text())["numTraining"] == 1

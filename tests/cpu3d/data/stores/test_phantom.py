import nibabel
import numpy as np
import pytest

from cpu3d.data.stores import phantom as phantom_module
from cpu3d.data.stores.layouts import read_dataset
from cpu3d.data.stores.phantom import CHANNELS, phantom_case, write_phantom
from cpu3d.errors import InputError

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


@pytest.mark.parametrize("shape", [(24, 24, 24), (32, 32, 24), (24, 60, 24)])
def test_small_shapes_have_all_three_codes(shape):
    for index in range(6):
        image, label = phantom_case(shape, seed=3, index=index)
        assert image.shape == (*shape, 4)
        assert set(np.unique(label)) == {0, 1, 2, 3}
        assert all(image[..., channel].std() > 0 for channel in range(4))


def test_what_is_drawn_stays_what_it_was():
    """The numbers of version 1 as it was first written: whoever changes them makes a version 2."""
    image, label = phantom_case(SMALL, seed=5, index=0)
    assert np.bincount(label.ravel()).tolist() == [68193, 732, 64, 131]
    assert np.allclose(image[image[..., 0] > 0].mean(axis=0), [235.441, 444.287, 284.083, 421.204], atol=0.01)


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


def test_bad_arguments_are_told_together(tmp_path):
    with pytest.raises(InputError) as error:
        write_phantom(tmp_path / "p", cases=0, shape=(0, 64, -1), seed=-1)
    assert [problem.split()[0] for problem in error.value.problems] == ["--cases", "--shape", "--seed"]
    with pytest.raises(InputError, match="from 24"):
        write_phantom(tmp_path / "p", cases=1, shape=(64, 64, 23))
    with pytest.raises(InputError, match="--workers"):
        write_phantom(tmp_path / "p", cases=1, shape=SMALL, workers=0)
    assert not (tmp_path / "p").exists()

import json

import nibabel
import numpy as np
import pytest

from cpu3d.__main__ import main
from cpu3d.data.datasets.layouts import read_dataset
from cpu3d.data.phantoms.command import write_phantom
from cpu3d.data.phantoms.ct import ct_case
from cpu3d.data.phantoms.head import phantom_case
from tests.cpu3d.data.made_datasets import content_of

SMALL = (40, 48, 36)


def read(path):
    return np.array(nibabel.load(path).dataobj)


def test_what_is_drawn_stays_what_it_was():
    """The numbers of version 1 as it was first written: whoever changes them makes a version 2."""
    image, label = phantom_case(SMALL, seed=3, index=2)  # with two tumours
    assert (image.dtype, label.dtype) == (np.int16, np.uint8)
    head = image[..., 0] != 0
    np.testing.assert_array_equal(image != 0, np.repeat(head[..., None], 4, -1))
    assert not label[~head].any()
    assert np.bincount(label.ravel()).tolist() == [67761, 789, 279, 291]
    assert image[head].mean(axis=0) == pytest.approx([307.773, 407.868, 529.275, 467.279], abs=0.01)
    assert image[head].std(axis=0) == pytest.approx([91.286, 115.521, 162.446, 134.561], abs=0.01)


def test_it_is_a_decathlon_data_set_whatever_the_workers(tmp_path):
    one, two = (
        write_phantom(tmp_path / str(workers), cases=3, shape=SMALL, seed=4, workers=workers)
        for workers in (1, 2)
    )
    content = content_of(one)
    assert len(content) == 3 + 3 + 2
    assert content == content_of(two)
    dataset = read_dataset(one)
    assert (dataset.channels, len(dataset.cases)) == (("FLAIR", "T1w", "t1gd", "T2w"), 3)
    case = dataset.cases[1]
    for path, drawn in zip(case.paths, phantom_case(SMALL, seed=4, index=1)):
        np.testing.assert_array_equal(read(path), drawn)


@pytest.mark.parametrize(
    ("kind", "facts"), [("mr", ["BRATS phantom", "4D", 1]), ("ct", ["CT phantom", "3D", 1])]
)
def test_of_slices_that_are_annotated_now_and_then_the_others_are_to_be_ignored(
    tmp_path, kind, facts
):
    options = {"cases": 1, "shape": SMALL, "workers": 1, "kind": kind}
    whole = read_dataset(write_phantom(tmp_path / "whole", **options))
    sparse = read_dataset(write_phantom(tmp_path / "sparse", **options, annotate_every=10))
    about = json.loads((tmp_path / "sparse/dataset.json").read_text())
    assert [about[name] for name in ("name", "tensorImageSize", "numTraining")] == facts
    code = max(sparse.labels)
    assert (sparse.ignore, sparse.labels) == (code, {**whole.labels, code: "ignore"})
    expected = read(whole.cases[0].label)
    expected[..., np.arange(SMALL[2]) % 10 > 0] = code
    np.testing.assert_array_equal(read(sparse.cases[0].label), expected)


def test_a_shape_out_of_range_and_another_seed_are_refused_and_what_is_lost_is_written_again(
    tmp_path, capsys
):
    words = ["phantom", "--out", str(tmp_path / "p"), "--cases", "1", "--workers", "1", "--shape"]
    for shape in ("23 64 64", "24 24 32768"):
        assert main([*words, *shape.split()]) == 2
        rule = f"--shape must be from 24 to 32767, got ({shape.replace(' ', ', ')})"
        assert rule in capsys.readouterr().err
    assert not (tmp_path / "p").exists()
    words += map(str, SMALL)
    assert main(words) == 0
    for path in (tmp_path / "p").rglob("*.nii.gz"):
        path.unlink()
        assert main(words) == 0
        assert path.exists()
    assert main([*words, "--seed", "1"]) == 2
    assert "seed of phantom folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "index", "facts"),
    [
        ((80, 72, 60), 0, (8520, -1024, 632, -631.745, 488.287)),
        ((24, 24, 24), 3, (383, -1024, 622, -588.932, 489.017)),
    ],
)
def test_a_ct_is_drawn_as_it_first_was(shape, index, facts):
    image, label = ct_case(shape, seed=3, index=index)
    made = (label.sum(), image.min(), image.max(), image.mean(), image.std())
    assert made == pytest.approx(facts, abs=0.01)

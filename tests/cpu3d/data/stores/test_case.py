import numpy as np
import pytest

from cpu3d.data.region import Region
from cpu3d.data.stores.case import CENTRES, centres_of, load_case
from cpu3d.data.stores.layouts import CaseFiles
from cpu3d.errors import InputError
from tests.cpu3d.data.datasets import tiny_image, write_nifti

LABELS = {0: "background", 1: "core", 2: "oedema", 3: "enhancing"}
LPS = np.diag([-1.0, -1.0, 1.0, 1.0])


@pytest.fixture
def files(tmp_path):
    """files(*images, label=None, affines=..., label_affine=...): a case of the given arrays."""

    def make(*images, label=None, affines=None, label_affine=None):
        affines = affines or [np.eye(4)] * len(images)
        paths = tuple(
            write_nifti(tmp_path / "c" / f"c_{number}.nii.gz", image, affine)
            for number, (image, affine) in enumerate(zip(images, affines))
        )
        label_path = None
        if label is not None:
            label_path = write_nifti(tmp_path / "c" / "c_seg.nii.gz", label, label_affine)
        return CaseFiles("c", "p", paths, label_path)

    return make


def test_an_integral_case_is_stored_exactly_in_ras_with_statistics_worked_out_by_hand(files, tmp_path):
    first = np.zeros((3, 2, 2), np.float64)
    first[0, 0, 0], first[1, 0, 0] = 2, 4
    second = np.zeros((3, 2, 2), np.int16)
    second[1, 1, 0], second[1, 0, 1], second[0, 0, 0] = -5, 1, 1
    label = np.zeros((3, 2, 2), np.uint8)
    label[1, 0, 0] = 3
    case = load_case(
        files(first, second, label=label, affines=[LPS, LPS], label_affine=LPS),
        channels=("a", "b"),
        labels=LABELS,
        dataset_folder=tmp_path,
    )
    assert (case.image.dtype, case.image.shape) == (np.int16, (3, 2, 2, 2))
    assert case.image.flags.c_contiguous
    assert case.label.flags.c_contiguous
    assert (case.image[2, 1, 0, 0], case.image[1, 1, 0, 0], case.image[1, 0, 0, 1]) == (2, 4, -5)
    assert case.label[1, 1, 0] == 3
    record = case.record
    assert (record.image_dtype, record.max_abs_error) == ("int16", 0.0)
    assert record.channel_mean == (3.0, -1.0)
    assert record.channel_std == pytest.approx((1.0, np.sqrt(8)))
    assert (record.channel_min, record.channel_max) == ((2.0, -5.0), (4.0, 1.0))
    assert (record.channel_voxels, record.label_voxels) == ((2, 3), {0: 11, 3: 1})
    assert (record.box, record.geometry.axes) == (Region((1, 0, 0), (2, 2, 2)), "LPS")
    assert [source.path for source in record.sources] == ["c/c_0.nii.gz", "c/c_1.nii.gz", "c/c_seg.nii.gz"]
    assert record.sources[0].size_bytes == (tmp_path / "c/c_0.nii.gz").stat().st_size


@pytest.mark.parametrize("value", [40000.0, 1.5])
def test_what_int16_cannot_hold_is_stored_as_float16_scores_with_its_error(files, value):
    other = tiny_image(1).astype(np.float64)
    other[1, 1, 1] = value
    case = load_case(files(tiny_image(0), other), channels=("a", "b"))
    inside = other != 0
    scores = (other[inside] - other[inside].mean()) / other[inside].std()
    assert case.image.dtype == np.float16
    assert np.abs(case.image[..., 1][inside] - scores).max() <= case.record.max_abs_error < 2e-3
    assert not case.image[..., 1][~inside].any()
    assert case.record.channel_std == pytest.approx((1, 1), abs=1e-3)


def test_a_voxel_of_exactly_the_mean_does_not_become_background(files):
    volume = np.zeros((2, 2, 2), np.float32)
    volume[0, :, 0], volume[1, 0, 0] = (3.5, 5.5), 4.5
    case = load_case(files(volume), channels=("a",))
    assert np.array_equal(case.image[..., 0] != 0, volume != 0)


def test_a_case_has_a_file_for_each_channel_and_one_label_map(files):
    case = files(*map(tiny_image, range(2)), label=np.ones((6, 5, 4, 1), np.uint8))
    assert load_case(case, channels=("a", "b"), labels=LABELS).label.shape == (6, 5, 4)
    for channels, depth, rule in (("abc", 1, r"a file for each of .*, got 2"), ("ab", 2, "must be 3D, got shape")):
        case = files(*map(tiny_image, range(2)), label=np.ones((6, 5, 4, depth), np.uint8))
        with pytest.raises(InputError, match=rule):
            load_case(case, channels=tuple(channels), labels=LABELS)


def test_centres_are_the_middles_of_even_steps_through_a_codes_voxels():
    label = np.zeros((4, 4, 8), np.uint8)
    label[:2] = 1  # flat voxels 0..63: two a step, the second of each is kept
    label[3, 3] = 7  # eight voxels: all of them
    centres = centres_of(label)
    assert list(centres) == [1, 7]
    assert centres[1][:5] == ((0, 0, 1), (0, 0, 3), (0, 0, 5), (0, 0, 7), (0, 1, 1))
    assert (centres[1][-1], len(centres[1])) == ((1, 3, 7), CENTRES)
    assert centres[7] == tuple((3, 3, z) for z in range(8))
    assert all(type(n) is int for place in centres[1] for n in place)

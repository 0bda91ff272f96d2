import hashlib

import numpy as np
import pytest

from cpu3d.data.case import load_case, npy_parts
from cpu3d.data.layouts import CaseFiles, read_dataset
from cpu3d.data.region import Region
from cpu3d.errors import InputError

LABELS = {0: "background", 1: "core", 2: "oedema", 3: "enhancing"}
LPS = np.diag([-1.0, -1.0, 1.0, 1.0])


@pytest.fixture
def files(tmp_path, write_nifti):
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
    assert case.image[2, 1, 0, 0] == 2
    assert case.image[1, 1, 0, 0] == 4
    assert case.image[1, 0, 0, 1] == -5
    assert case.label[1, 1, 0] == 3
    record = case.record
    assert (record.image_dtype, record.max_abs_error) == ("int16", 0.0)
    assert record.channel_mean == (3.0, -1.0)
    assert record.channel_std == pytest.approx((1.0, np.sqrt(8)))
    assert (record.channel_min, record.channel_max) == ((2.0, -5.0), (4.0, 1.0))
    assert record.channel_voxels == (2, 3)
    assert record.label_voxels == {0: 11, 3: 1}
    assert record.box == Region((1, 0, 0), (2, 2, 2))
    assert record.geometry.axes == "LPS"
    assert [source.path for source in record.sources] == ["c/c_0.nii.gz", "c/c_1.nii.gz", "c/c_seg.nii.gz"]
    assert record.sources[0].size_bytes == (tmp_path / "c/c_0.nii.gz").stat().st_size


def test_axes_that_are_permuted_come_back_in_order_with_their_spacing(files):
    affine = np.zeros((4, 4))
    affine[2, 0], affine[0, 1], affine[1, 2], affine[3, 3] = -3, 1, 2, 1  # first axis down, second right, third front
    volume = np.arange(1, 25, dtype=np.int16).reshape(2, 3, 4)
    case = load_case(files(volume, affines=[affine]), channels=("a",))
    assert case.record.geometry.axes == "IRA"
    assert case.record.shape == (3, 4, 2)
    assert case.record.spacing_mm == (1.0, 2.0, 3.0)
    assert np.array_equal(case.image[..., 0], volume[::-1].transpose(1, 2, 0))


@pytest.mark.parametrize("value", [40000.0, 1.5])
def test_what_int16_cannot_hold_is_stored_as_float16_scores_with_its_error(files, tiny_image, value):
    exact, other = tiny_image(0), tiny_image(1).astype(np.float64)
    other[1, 1, 1] = value
    case = load_case(files(exact, other), channels=("a", "b"))
    assert case.image.dtype == np.float16
    assert 0 < case.record.max_abs_error < 2e-3
    for index, source in enumerate((exact, other)):
        inside = source != 0
        scores = (source[inside] - source[inside].mean()) / source[inside].std()
        stored = case.image[..., index]
        assert np.abs(stored[inside].astype(np.float64) - scores).max() <= case.record.max_abs_error
        assert not stored[~inside].any()
    assert case.record.channel_mean == pytest.approx((0, 0), abs=1e-3)
    assert case.record.channel_std == pytest.approx((1, 1), abs=1e-3)


def test_the_record_describes_the_npy_file_byte_by_byte(files, tmp_path, tiny_image, tiny_label):
    case = load_case(files(tiny_image(), label=tiny_label(1)), channels=("a",), labels=LABELS)
    np.save(tmp_path / "x.npy", case.image)
    content = (tmp_path / "x.npy").read_bytes()
    assert content == b"".join(npy_parts(case.image))
    assert case.record.image_bytes == len(content)
    assert case.record.image_sha256 == hashlib.sha256(content).hexdigest()
    assert len(npy_parts(case.image)[0]) % 64 == 0
    assert case.record.label_bytes == 128 + case.label.size


def test_without_known_labels_the_label_is_not_read(files, tiny_image, tiny_label):
    case = load_case(files(tiny_image(), label=tiny_label(77)), channels=("a",))
    assert case.label is None
    assert not case.record.has_label
    assert case.record.label_voxels == {}


def test_a_4d_image_and_a_label_with_a_fourth_axis_of_one_are_understood(files, tiny_image, tiny_label):
    image = np.stack([tiny_image(0), tiny_image(1)], -1)
    case = load_case(
        files(image, label=tiny_label(1, 2)[..., None].astype(np.float32)), channels=("a", "b"), labels=LABELS
    )
    assert np.array_equal(case.image, image)
    assert np.array_equal(case.label, tiny_label(1, 2))


def problems_of(files, channels=("a", "b"), labels=LABELS):
    with pytest.raises(InputError) as error:
        load_case(files, channels=channels, labels=labels)
    return error.value.problems


def test_all_problems_of_a_case_are_told_with_their_files(files, tiny_image, tiny_label):
    sick = tiny_image(0).astype(np.float32)
    sick[1, 1, 1], sick[2, 2, 2] = np.nan, np.inf
    told = problems_of(files(sick, np.zeros_like(sick), label=tiny_label(1, 9)))
    assert len(told) == 3
    assert "c_0.nii.gz must be finite, got 2 NaN" in told[0]
    assert "c_1.nii.gz must not be empty" in told[1]
    assert "c_seg.nii.gz must hold only the codes 0 background, 1 core" in told[2]
    assert "got 9 (1 voxels)" in told[2]


def test_a_constant_channel_is_refused(files, tiny_image):
    constant = np.where(tiny_image(0) != 0, 7, 0).astype(np.int16)
    (told,) = problems_of(files(tiny_image(1), constant))
    assert "c_1.nii.gz must vary" in told
    assert "got 7" in told


def test_files_on_different_grids_are_refused(files, tiny_image, tiny_label):
    shifted = np.eye(4)
    shifted[0, 3] = 0.01
    told = problems_of(files(tiny_image(0), tiny_image(1)[:, :, :3], label=tiny_label(1)))
    assert ["shape (6, 5, 4), got (6, 5, 3)" in problem for problem in told] == [True]
    told = problems_of(files(tiny_image(0), tiny_image(1), affines=[np.eye(4), shifted], label=tiny_label(1)))
    assert ["affines differ by 0.01 mm" in problem for problem in told] == [True]
    told = problems_of(files(tiny_image(0), tiny_image(1), label=tiny_label(1), label_affine=LPS))
    assert ["c_seg.nii.gz must lie on the grid of c_0.nii.gz: axes RAS, got LPS" in problem for problem in told] == [
        True
    ]


def test_affines_that_differ_by_rounding_are_one_grid(files, tiny_image):
    nudged = np.eye(4)
    nudged[0, 3] = 1e-4
    load_case(files(tiny_image(0), tiny_image(1), affines=[np.eye(4), nudged]), channels=("a", "b"))


@pytest.mark.parametrize("label", [np.nan, 1.5, -1, 256])
def test_label_values_that_are_no_known_codes_are_refused(files, tiny_image, tiny_label, label):
    values = tiny_label(1).astype(np.float32)
    values[2, 2, 2] = label
    (told,) = problems_of(files(tiny_image(0), tiny_image(1), label=values))
    assert f"got {label:g} (1 voxels)" in told


def test_a_wrong_number_of_channels_is_refused(files, tiny_image):
    (told,) = problems_of(files(np.stack([tiny_image(0)] * 3, -1)))
    assert "must hold 2 channel(s), got 3" in told
    (told,) = problems_of(files(tiny_image(0), tiny_image(1)), channels=("a", "b", "c"))
    assert "a file per channel, got 2" in told


def test_damaged_files_are_told_together(files, tiny_image, tiny_label):
    case = files(tiny_image(0), tiny_image(1), label=tiny_label(1))
    for path in (*case.images, case.label):
        path.write_bytes(path.read_bytes()[:-9])
    told = problems_of(case)
    assert [problem.split()[0].rsplit("/", 1)[1] for problem in told] == ["c_0.nii.gz", "c_1.nii.gz", "c_seg.nii.gz"]


def test_the_real_glioma_is_stored_exactly(real_cases):
    dataset = read_dataset(real_cases / "brats-gli-real")
    case = load_case(dataset.cases[0], channels=dataset.channels, labels=dataset.labels, dataset_folder=dataset.folder)
    assert case.image.dtype == np.int16
    assert case.record.geometry.axes == "LPS"
    assert case.record.box == Region((55, 24, 11), (130, 171, 126))
    assert {code: count for code, count in case.record.label_voxels.items() if code} == {1: 14300, 2: 108566, 3: 21866}

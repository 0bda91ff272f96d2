import hashlib

import numpy as np
import pytest

from cpu3d.data import case as case_module
from cpu3d.data.case import float16_image, load_case
from cpu3d.data.layouts import CaseFiles, read_dataset
from cpu3d.data.records import array_path
from cpu3d.data.region import Region
from cpu3d.data.write_cases import write_arrays
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


@pytest.mark.parametrize("format_", ["npy", "b2nd"])
@pytest.mark.parametrize("cropped", [False, True])
def test_the_record_describes_the_files_byte_by_byte(files, tmp_path, tiny_image, tiny_label, format_, cropped):
    case = load_case(files(tiny_image(), label=tiny_label(1)), channels=("a",), labels=LABELS)
    (tmp_path / "cases").mkdir()
    record = write_arrays(tmp_path, case.record, case.image, case.label, format_=format_, cropped=cropped)
    assert (record.format, record.stored) == (format_, case.record.box if cropped else Region((0, 0, 0), (6, 5, 4)))
    for part, size_bytes, sha256 in [
        ("x", record.image_bytes, record.image_sha256),
        ("y", record.label_bytes, record.label_sha256),
    ]:
        content = array_path(tmp_path, record, part).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (size_bytes, sha256)
    if format_ == "npy":  # what NumPy writes, its voxels at a multiple of 64 bytes
        np.save(tmp_path / "x.npy", case.image[1:5, 1:4, 1:3] if cropped else case.image)
        assert array_path(tmp_path, record, "x").read_bytes() == (tmp_path / "x.npy").read_bytes()
        assert record.label_bytes == 128 + (24 if cropped else 120)


def test_the_hash_of_the_voxels_is_that_of_the_npy_file_of_the_whole_grid(files, tmp_path, tiny_image, tiny_label):
    case = load_case(files(tiny_image(), label=tiny_label(1)), channels=("a",), labels=LABELS)
    for array, sha256 in [
        (case.image, case.record.image_voxels_sha256),
        (case.label, case.record.label_voxels_sha256),
    ]:
        np.save(tmp_path / "a.npy", array)
        assert sha256 == hashlib.sha256((tmp_path / "a.npy").read_bytes()).hexdigest()


def test_scores_may_be_asked_for_where_integers_would_be_exact(files, tmp_path):
    volume = np.zeros((2, 2, 2), np.int16)
    volume[0, 0] = 3, 5  # mean 4, std 1: scores -1 and 1, which float16 holds exactly
    case = load_case(files(volume), channels=("a",), scores=True)
    assert case.image.dtype == np.float16
    assert case.image[0, 0, :, 0].tolist() == [-1.0, 1.0]
    assert np.count_nonzero(case.image) == 2
    assert (case.record.image_dtype, case.record.max_abs_error) == ("float16", 0.0)


def test_a_voxel_of_exactly_the_mean_does_not_become_background(files):
    volume = np.zeros((2, 2, 2), np.int16)
    volume[0, :, 0], volume[1, 0, 0] = (3, 5), 4
    case = load_case(files(volume), channels=("a",), scores=True)
    assert np.array_equal(case.image[..., 0] != 0, volume != 0)
    assert case.record.channel_voxels == (3,)
    assert case.record.max_abs_error < 5e-4


def test_all_channels_whose_scores_float16_cannot_hold_are_told(files, tiny_image, monkeypatch):
    monkeypatch.setattr(case_module, "FLOAT16_MAX", 1.5)  # the real one needs four billion voxels
    fits = np.zeros((6, 5, 4), np.int16)
    fits[0, 0] = 3, 5, 3, 5
    with pytest.raises(InputError) as error:
        load_case(files(tiny_image(0), fits, tiny_image(1)), channels=("a", "b", "c"), scores=True)
    assert [problem.split(" must ")[0] for problem in error.value.problems] == ["channel a of c", "channel c of c"]
    assert "have z-scores that float16 can hold, up to 1.5, got 1." in error.value.problems[0]


def test_the_scores_of_a_stored_image_are_those_of_its_source(files, tiny_image):
    case = load_case(files(tiny_image(3), affines=[LPS]), channels=("a",))
    direct = load_case(files(tiny_image(3), affines=[LPS]), channels=("a",), scores=True)
    image, error = float16_image([case.image[..., 0]], ["a"])
    assert np.array_equal(image, direct.image)
    assert error == direct.record.max_abs_error


def test_nan_and_infinity_become_background_when_asked_and_are_counted(files, tiny_image):
    first, second = (tiny_image(seed).astype(np.float32) for seed in (0, 1))
    first[1, 1, 1], first[2, 2, 2], second[0, 0, 0] = np.nan, np.inf, -np.inf
    case = load_case(files(first, second), channels=("a", "b"), zero_nan=True)
    assert case.record.zeroed_voxels == 3
    assert case.image.dtype == np.int16
    expected = tiny_image(0)
    expected[1, 1, 1] = expected[2, 2, 2] = 0
    assert np.array_equal(case.image[..., 0], expected)
    assert np.array_equal(case.image[..., 1], tiny_image(1))
    assert load_case(files(tiny_image(0)), channels=("a",), zero_nan=True).record.zeroed_voxels == 0


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32, np.float64])
def test_label_codes_are_changed_all_at_once_before_they_are_checked(files, tiny_image, tiny_label, dtype):
    case = load_case(
        files(tiny_image(0), label=tiny_label(1, 2, 4).astype(dtype)),
        channels=("a",),
        labels=LABELS,
        label_map={4: 3, 1: 2, 2: 1, 77: 0},
    )
    assert np.array_equal(case.label, tiny_label(2, 1, 3))
    assert case.label.dtype == np.uint8
    assert case.record.label_voxels == {0: 117, 1: 1, 2: 1, 3: 1}


def test_a_code_that_the_map_leaves_out_stays_an_error_with_the_code_of_the_file(files, tiny_image, tiny_label):
    with pytest.raises(InputError, match=r"got 9 \(1 voxels\).*--label-map"):
        load_case(files(tiny_image(0), label=tiny_label(4, 9)), channels=("a",), labels=LABELS, label_map={4: 3, 1: 9})


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


def test_affines_that_differ_by_rounding_are_one_grid(files, tiny_image):
    nudged = np.eye(4)
    nudged[0, 3] = 1e-4
    load_case(files(tiny_image(0), tiny_image(1), affines=[np.eye(4), nudged]), channels=("a", "b"))


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

import gzip
import itertools

import nibabel
import numpy as np
import pytest
from nibabel.eulerangles import euler2mat

from cpu3d.data import nifti
from cpu3d.data.manifest import case_from_json, record_bytes
from cpu3d.data.nifti import (
    contradiction,
    from_ras,
    ras_spacing_mm,
    read_grid,
    read_volume,
    to_ras,
    write_volume,
)
from cpu3d.errors import InputError
from tests.cpu3d.data.made_datasets import make_record, write_nifti

ZEROS = np.zeros((2, 3, 4), np.int16)


def affine_of(axes, spacing=(1.0, 2.0, 3.0)):
    """The affine of a grid with the given axes; `spacing` is along its own axes."""
    affine = np.zeros((4, 4))
    for column, letter in enumerate(axes):
        row = "RLAPSI".index(letter) // 2
        affine[row, column] = spacing[column] if letter in "RAS" else -spacing[column]
    affine[:, 3] = (-10, 20, 5, 1)
    return affine


def write_back(path):
    """A file's grid, by way of a record, and the path of a label that is written on it."""
    record = make_record(geometry=read_volume(path)[1])
    geometry = case_from_json(record_bytes(record)).geometry
    label = path.with_name("label.nii")
    write_volume(label, np.zeros(nifti.ras_shape(geometry), np.uint8), geometry)
    return geometry, label


def overwrite(path, place, content):
    """Put these bytes at a place of a file."""
    whole = bytearray(path.read_bytes())
    whole[place : place + len(content)] = content
    path.write_bytes(whole)


@pytest.mark.parametrize(("dtype", "end"), [("<i2", ".nii"), (">i2", ".nii.gz"), (">f8", ".nii")])
@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
def test_a_volume_is_read_as_it_was_written_in_native_byte_order(tmp_path, dtype, end, kind):
    written = np.arange(24).reshape(2, 3, 4).astype(dtype)
    header = kind.header_class(endianness=dtype[0])
    header.set_data_dtype(written.dtype)
    nibabel.save(kind(written, np.eye(4), header), tmp_path / f"a{end}")
    voxels, geometry = read_volume(tmp_path / f"a{end}")
    assert voxels.dtype == written.dtype.newbyteorder("=")
    assert np.array_equal(voxels, written)
    assert (geometry.shape, geometry.axes) == ((2, 3, 4), "RAS")


@pytest.mark.parametrize("slope", [1, 3])
def test_scaling_is_applied_and_integral_values_stay_integral(tmp_path, slope):
    array = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    path = write_nifti(tmp_path / "a.nii", array)
    overwrite(path, 112, np.array([slope, -5], "<f4").tobytes())
    voxels, _ = read_volume(path)
    assert voxels.dtype == np.float64
    assert np.array_equal(voxels, array * slope - 5)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x5c\x01\0\0" + bytes(96),
        gzip.compress(bytes(5000), mtime=0),
        gzip.compress(bytes(5000), mtime=0)[:30],
    ],
    ids=range(4),
)
def test_a_file_that_is_empty_cut_or_something_else_is_refused(tmp_path, content):
    (tmp_path / "a.nii.gz").write_bytes(content)
    for read in (read_volume, read_grid):
        with pytest.raises(InputError, match=r"a\.nii\.gz must be .*, got"):
            read(tmp_path / "a.nii.gz")


@pytest.mark.parametrize(
    ("place", "content", "got"),
    [
        (280, bytes(12), "an invertible affine, got"),  # srow_x
        (292, np.array([np.nan], "<f4").tobytes(), "an invertible affine, got"),  # its offset
        (40, np.array([3, 0, 3, 4], "<i2").tobytes(), r"3 axes, or 4 .*, got shape \(0, 3, 4\)"),
        (40, np.array([5, 2, 3, 4, 2, 2], "<i2").tobytes(), r"3 axes, or 4 .*, got shape \(2"),
        (70, np.array([32], "<i2").tobytes(), "hold real numbers, got complex64"),
        (108, np.array([0], "<f4").tobytes(), "voxels after its header, got offset 0"),
        (344, b"ni1\0", "header and voxels in one file, got magic b'ni1'"),
        (252, b"\1\0\0\0" + np.array([1, 1], "<f4").tobytes(), "a valid qform"),
    ],
)
def test_a_header_that_does_not_make_sense_is_refused(tmp_path, place, content, got):
    path = write_nifti(tmp_path / "a.nii", ZEROS)
    overwrite(path, place, content)
    with pytest.raises(InputError, match=got):
        read_volume(path)


def test_another_ending_is_not_written(tmp_path):
    geometry = read_volume(write_nifti(tmp_path / "a.nii", ZEROS))[1]
    with pytest.raises(InputError, match=r"must end in \.nii\.gz or \.nii"):
        write_volume(tmp_path / "a.mgz", ZEROS, geometry)
    write_volume(tmp_path / "a.NII.GZ", ZEROS, geometry)
    assert gzip.decompress((tmp_path / "a.NII.GZ").read_bytes())


@pytest.mark.parametrize(
    "axes",
    [
        "".join(axis[side] for axis, side in zip(order, sides))
        for order in itertools.permutations(("RL", "AP", "SI"))
        for sides in itertools.product((0, 1), repeat=3)
    ],
)
def test_turning_to_ras_agrees_with_nibabel_and_turns_back_exactly(tmp_path, axes):
    array = np.arange(48, dtype=np.int16).reshape(2, 3, 4, 2)
    path = write_nifti(tmp_path / "a.nii", array, affine_of(axes))
    voxels, geometry = read_volume(path)
    expected = nibabel.as_closest_canonical(nibabel.load(path))
    assert geometry.axes == axes
    turned = to_ras(voxels, geometry)
    assert np.array_equal(turned, np.asarray(expected.dataobj))
    assert np.allclose(ras_spacing_mm(geometry), expected.header.get_zooms()[:3])
    assert nifti.ras_shape(geometry) == expected.shape[:3]
    assert np.array_equal(from_ras(turned, geometry), voxels)
    with pytest.raises(ValueError, match="R A S"):
        from_ras(voxels[1:], geometry)


@pytest.mark.parametrize("codes", [(1, 2), (0, 1), (4, 0), (0, 0)])
def test_sform_and_qform_that_differ_are_both_written_back_to_the_bit(tmp_path, codes):
    turned = affine_of("LPS")
    turned[:2, :2] = turned[:2, :2] @ [[0.8, -0.6], [0.6, 0.8]]
    turned[:3, 3] += 1 / 3
    source = write_nifti(tmp_path / "a.nii", ZEROS, affine_of("LPS"), codes, qform=turned)
    geometry, label = write_back(source)
    before = source.read_bytes()
    after = label.read_bytes()
    assert after[76:92] == before[76:92]  # pixdim
    assert after[252:328] == before[252:328]  # both codes, the quaternion, its offset, srow
    assert read_volume(label)[1] == geometry


# --- Units, sheared grids, files without orientation, headers off by rounding ---


@pytest.mark.parametrize("codes", [(1, 1), (0, 1), (0, 0)])
@pytest.mark.parametrize(
    ("unit", "per_mm"), [(0, 1.0), (1, 0.001), (2, 1.0), (3, 1000.0), (6, 1.0)]
)
def test_a_grid_is_in_mm_whatever_the_unit_of_its_header_which_is_written_back(
    tmp_path, codes, unit, per_mm
):
    affine = affine_of("LPS", spacing=(0.9, 1.1, 2.5))
    affine[:3] *= per_mm
    and_of_time = unit + 8
    path = write_nifti(tmp_path / "a.nii", ZEROS, affine, codes, unit=and_of_time)
    geometry, label = write_back(path)
    assert ras_spacing_mm(geometry) == pytest.approx((0.9, 1.1, 2.5), rel=1e-6)
    assert contradiction(geometry) == ""
    written = nibabel.load(label)
    assert int(written.header["xyzt_units"]) == (unit if unit < 4 else 0)
    assert written.affine == pytest.approx(nibabel.load(path).affine, rel=1e-6)


def test_forms_that_are_more_than_a_quarter_of_a_voxel_apart_contradict_each_other(tmp_path):
    for apart in (0.24, 0.26):
        qform = np.eye(4) + apart * np.eye(4, k=3)
        geometry, _ = read_grid(write_nifti(tmp_path / "a.nii", ZEROS, qform=qform))
        assert bool(contradiction(geometry)) == (apart > 0.25)


@pytest.mark.parametrize(("unit", "size", "mm"), [(3, 9, 0.009), (2, 101, 101)])
def test_voxels_of_no_scan_are_refused_as_their_unit_must_be_another(tmp_path, unit, size, mm):
    path = write_nifti(tmp_path / "a.nii", ZEROS, np.diag([size, size, size, 1]), unit=unit)
    with pytest.raises(InputError, match=rf"voxels of 0\.01 to 100 mm, got {mm:g} x .*xyzt_units"):
        read_volume(path)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 3, 4, 1, 3), (2, 3, 4, 3)),  # ITK's channels
        ((2, 3, 4, 1, 1), (2, 3, 4)),
        ((2, 3, 1, 1, 2), (2, 3, 1, 2)),
    ],
)
def test_axes_of_length_one_behind_the_third_are_left_out(tmp_path, shape, expected):
    array = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    path = write_nifti(tmp_path / "a.nii.gz", array)
    assert np.array_equal(read_volume(path)[0], array.reshape(expected))
    assert read_grid(path)[1] == np.prod(expected[3:])


@pytest.mark.parametrize("sform", [0, 1])
def test_a_quaternion_that_is_too_long_by_rounding_is_read_and_what_is_written_can_be_read(
    tmp_path, sform
):
    path = write_nifti(tmp_path / "a.nii", ZEROS, codes=(sform, 1))
    half = np.sqrt((1 + 9e-6) / 2)
    overwrite(path, 76, np.float32(1).tobytes())
    overwrite(path, 256, np.array([0, half, half], "<f4").tobytes())
    geometry, label = write_back(path)
    assert geometry.axes == ("RAS" if sform else "LSA")
    expected = np.eye(3) if sform else np.eye(3)[[0, 2, 1]] * [-1, 1, 1]
    assert nibabel.load(label).get_qform()[:3, :3] == pytest.approx(expected, abs=1e-4)


def sheared(degrees, about=(0.0, 0.0, 0.0)):
    """An affine of 1 x 1 x 2 mm whose third axis leans, all turned by angles about Z, Y and X."""
    affine = np.eye(4)
    affine[:3, 2] = 0, 2 * np.sin(np.radians(degrees)), 2 * np.cos(np.radians(degrees))
    affine[:3] = euler2mat(*np.radians(about)) @ affine[:3]
    return affine


@pytest.mark.parametrize("about", [(0.0, 0.0, 0.0), (7.0, -12.0, 4.0)])
@pytest.mark.parametrize("flips", [(1, 1, 1), (-1, -1, 1)])
@pytest.mark.parametrize("degrees", [-30, 0, 20])
def test_steps_of_a_sheared_grid_give_its_distances_and_volumes(tmp_path, degrees, about, flips):
    affine = sheared(degrees, about) @ np.diag([*flips, 1])
    _, geometry = read_volume(write_nifti(tmp_path / "a.nii", ZEROS, affine, codes=(1, 0)))
    steps = nifti.ras_steps_mm(geometry)
    apart = np.random.default_rng(0).integers(-9, 9, (50, 3))
    expected = np.linalg.norm(apart @ (affine[:3, :3] * flips).T, axis=1)
    assert np.linalg.norm(apart @ steps.T, axis=1) == pytest.approx(expected, rel=1e-5)
    assert min(np.diagonal(steps)) > 0
    assert np.prod(np.diagonal(steps)) == pytest.approx(2 * np.cos(np.radians(degrees)), rel=1e-5)
    assert ras_spacing_mm(geometry) == pytest.approx((1, 1, 2), rel=1e-5)
    if not degrees:  # turned alone: as the spacing, to the bit
        assert np.array_equal(steps, np.diag(ras_spacing_mm(geometry)))


def test_a_grid_sheared_by_more_than_any_gantry_is_refused(tmp_path):
    read_volume(write_nifti(tmp_path / "good.nii", ZEROS, sheared(44), codes=(1, 0)))
    bad = write_nifti(tmp_path / "bad.nii", ZEROS, sheared(46), codes=(1, 0))
    with pytest.raises(InputError, match=r"sheared by at most 45 degrees, got 46\.0"):
        read_volume(bad)


def test_without_orientation_the_first_axis_runs_to_the_left_and_that_is_said(tmp_path):
    for codes, axes, note in (
        ((1, 0), "RAS", ""),
        ((0, 1), "LAS", ""),
        ((0, 0), "LAS", "no orientation in the file (its sform and qform codes are 0)"),
    ):
        geometry = read_volume(write_nifti(tmp_path / "a.nii", ZEROS, codes=codes))[1]
        assert geometry.axes == axes
        assert nifti.orientation_note(geometry).partition(":")[0] == note

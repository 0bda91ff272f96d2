import gzip
import itertools

import nibabel
import numpy as np
import pytest

from cpu3d.data import nifti
from cpu3d.data.manifest import Geometry, case_from_json, record_bytes
from cpu3d.data.nifti import from_ras, ras_spacing_mm, read_volume, to_ras, write_volume
from cpu3d.errors import InputError
from tests.cpu3d.data.made_datasets import make_record, write_nifti

ORIENTATIONS = [
    "".join(axis[side] for axis, side in zip(order, sides))
    for order in itertools.permutations(("RL", "AP", "SI"))
    for sides in itertools.product((0, 1), repeat=3)
]


def geometry_of(axes: str, shape=(2, 3, 4), spacing=(1.0, 2.0, 3.0)) -> Geometry:
    """A grid with the given axes; `spacing` is along its own axes."""
    affine = np.eye(4)
    affine[:3, :3] = 0
    for column, letter in enumerate(axes):
        row = "RL AP SI".replace(" ", "").index(letter) // 2
        affine[row, column] = spacing[column] * (1 if letter in "RAS" else -1)
    affine[:3, 3] = (-10, 20, 5)
    return Geometry(shape, tuple(map(tuple, affine.tolist())), axes, 1, 1)


@pytest.mark.parametrize(
    ("dtype", "end"), [("<i2", ".nii"), (">i2", ".nii.gz"), ("<u1", ".nii.gz"), (">f8", ".nii")]
)
@pytest.mark.parametrize("version", [1, 2])
def test_a_volume_is_read_as_it_was_written_in_native_byte_order(tmp_path, dtype, end, version):
    written = np.arange(24).reshape(2, 3, 4).astype(dtype)
    kind = {1: nibabel.Nifti1Image, 2: nibabel.Nifti2Image}[version]
    header = kind.header_class(endianness=">" if dtype[0] == ">" else "<")
    header.set_data_dtype(written.dtype)
    nibabel.save(kind(written, np.eye(4), header), tmp_path / f"a{end}")
    voxels, geometry = read_volume(tmp_path / f"a{end}")
    assert voxels.dtype == written.dtype.newbyteorder("=")
    assert np.array_equal(voxels, written)
    assert (geometry.shape, geometry.axes) == ((2, 3, 4), "RAS")


def test_scaling_is_applied_and_integral_values_stay_integral(tmp_path):
    path = write_nifti(tmp_path / "a.nii", np.arange(24, dtype=np.int16).reshape(2, 3, 4))
    content = bytearray(path.read_bytes())
    content[112:120] = np.array([3, -5], "<f4").tobytes()
    path.write_bytes(content)
    voxels, _ = read_volume(path)
    assert voxels.dtype == np.float64
    assert np.array_equal(voxels, np.arange(24).reshape(2, 3, 4) * 3 - 5)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x5c\x01\0\0" + bytes(96),
        b"version https://git-lfs.github.com/spec/v1\noid sha256:1",
        b"P5 1000 " * 60,
        gzip.compress(bytes(5000), mtime=0),
        gzip.compress(bytes(5000), mtime=0)[:30],
    ],
    ids=range(6),
)
def test_a_file_that_is_empty_cut_or_something_else_is_refused(tmp_path, content):
    (tmp_path / "a.nii.gz").write_bytes(content)
    for read in (read_volume, nifti.read_grid):
        with pytest.raises(InputError, match=r"a\.nii\.gz must be .*, got"):
            read(tmp_path / "a.nii.gz")


def test_a_volume_that_is_not_packed_is_read_whatever_its_name(tmp_path):
    plain = write_nifti(tmp_path / "a.nii", np.ones((2, 3, 4), np.int16))
    plain.rename(tmp_path / "a.nii.gz")
    assert read_volume(tmp_path / "a.nii.gz")[0].shape == (2, 3, 4)


@pytest.mark.parametrize(
    ("place", "content", "got"),
    [
        (280, bytes(12), "affine, got"),  # srow_x
        (292, np.array([np.nan], "<f4").tobytes(), "affine, got"),  # its offset
        (40, np.array([3, 0, 3, 4], "<i2").tobytes(), "got shape"),
        (70, np.array([32], "<i2").tobytes(), "got complex64"),
        (108, np.array([0], "<f4").tobytes(), "got offset 0"),
        (344, b"ni1\0", "got magic b'ni1'"),
        (252, b"\1\0\0\0" + np.array([1, 1], "<f4").tobytes(), "a valid qform"),
    ],
)
def test_a_header_that_does_not_make_sense_is_refused(tmp_path, place, content, got):
    path = write_nifti(tmp_path / "a.nii", np.zeros((2, 2, 2), np.int16))
    whole = bytearray(path.read_bytes())
    whole[place : place + len(content)] = content
    path.write_bytes(whole)
    with pytest.raises(InputError, match=got):
        read_volume(path)


def test_what_does_not_fit_the_grid_or_the_format_is_not_written(tmp_path):
    geometry = geometry_of("LPS")
    with pytest.raises(InputError, match=r"must end in \.nii\.gz or \.nii"):
        write_volume(tmp_path / "a.mgz", np.zeros((2, 3, 4), np.uint8), geometry)


@pytest.mark.parametrize("axes", ORIENTATIONS)
def test_turning_to_ras_agrees_with_nibabel_and_turns_back_exactly(tmp_path, axes):
    array = np.arange(48, dtype=np.int16).reshape(2, 3, 4, 2)
    path = write_nifti(tmp_path / "a.nii", array, np.array(geometry_of(axes).affine))
    voxels, geometry = read_volume(path)
    expected = nibabel.as_closest_canonical(nibabel.load(path))
    assert geometry.axes == axes
    assert np.array_equal(to_ras(voxels, geometry), np.asarray(expected.dataobj))
    assert np.allclose(ras_spacing_mm(geometry), expected.header.get_zooms()[:3])
    assert nifti.ras_shape(geometry) == expected.shape[:3]
    assert np.array_equal(from_ras(to_ras(voxels, geometry), geometry), voxels)
    with pytest.raises(ValueError, match="R A S"):
        from_ras(voxels[1:], geometry)


@pytest.mark.parametrize("codes", [(1, 2), (0, 1), (4, 0), (0, 0)])
def test_sform_and_qform_that_differ_are_both_written_back_to_the_bit_also_by_way_of_a_record(
    tmp_path, codes
):
    source = tmp_path / "a.nii"
    turned = np.array(geometry_of("LPS").affine)
    image = nibabel.Nifti1Image(np.zeros((4, 4, 4), np.int16), None)
    image.set_sform(turned, codes[0])
    turned[:2, :2] = turned[:2, :2] @ [[0.8, -0.6], [0.6, 0.8]]
    turned[:3, 3] += 1 / 3
    image.set_qform(turned, codes[1])
    nibabel.save(image, source)
    record = make_record(geometry=read_volume(source)[1])
    geometry = case_from_json(record_bytes(record)).geometry
    write_volume(tmp_path / "label.nii", np.zeros(nifti.ras_shape(geometry), np.uint8), geometry)
    before = source.read_bytes()
    after = (tmp_path / "label.nii").read_bytes()
    assert after[76:92] == before[76:92]  # pixdim
    assert after[252:328] == before[252:328]  # both codes, the quaternion, its offset, srow
    assert read_volume(tmp_path / "label.nii")[1] == geometry


# --- Units, sheared grids, files without orientation, headers off by rounding ---


@pytest.mark.parametrize("codes", [(1, 1), (0, 1), (0, 0)])
@pytest.mark.parametrize(
    ("unit", "per_mm"), [(0, 1.0), (1, 0.001), (2, 1.0), (3, 1000.0), (6, 1.0)]
)
def test_a_grid_is_in_mm_whatever_the_unit_of_its_header_which_is_written_back(
    tmp_path, codes, unit, per_mm
):
    affine = np.array(geometry_of("LPS", spacing=(0.9, 1.1, 2.5)).affine)
    affine[:3] *= per_mm
    image = nibabel.Nifti2Image(np.zeros((4, 4, 4), np.int16), affine)
    image.set_sform(affine, codes[0])
    image.set_qform(affine, codes[1])
    image.header["xyzt_units"] = unit + 8  # and a unit of time
    nibabel.save(image, tmp_path / "a.nii")
    _, geometry = read_volume(tmp_path / "a.nii")
    assert ras_spacing_mm(geometry) == pytest.approx((0.9, 1.1, 2.5), rel=1e-6)
    write_volume(tmp_path / "label.nii", np.zeros((4, 4, 4), np.uint8), geometry)
    written = nibabel.load(tmp_path / "label.nii")
    assert int(written.header["xyzt_units"]) == (unit if unit < 4 else 0)
    before = nibabel.load(tmp_path / "a.nii").affine
    assert written.affine == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize(("unit", "size", "mm"), [(3, 1, 0.001), (1, 1, 1000), (2, 101, 101)])
def test_voxels_of_no_scan_are_refused_as_their_unit_must_be_another(tmp_path, unit, size, mm):
    image = nibabel.Nifti1Image(np.zeros((2, 3, 4), np.int16), np.diag([size, size, size, 1]))
    image.header["xyzt_units"] = unit
    nibabel.save(image, tmp_path / "a.nii")
    with pytest.raises(InputError, match=rf"voxels of 0\.01 to 100 mm, got {mm:g} x .*xyzt_units"):
        read_volume(tmp_path / "a.nii")


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 3, 4, 1, 3), (2, 3, 4, 3)),  # ITK's channels
        ((2, 3, 4, 3, 1), (2, 3, 4, 3)),
        ((2, 3, 4, 1, 1, 3), (2, 3, 4, 3)),
        ((2, 3, 4, 1), (2, 3, 4)),
        ((2, 3, 4, 1, 1), (2, 3, 4)),
        ((2, 3, 1, 1, 2), (2, 3, 1, 2)),
        ((1, 3, 1), (1, 3, 1)),
    ],
)
def test_axes_of_length_one_behind_the_third_are_left_out(tmp_path, shape, expected):
    array = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    path = write_nifti(tmp_path / "a.nii.gz", array)
    assert np.array_equal(read_volume(path)[0], array.reshape(expected))
    assert nifti.read_grid(path)[1] == (expected[3] if len(expected) == 4 else 1)


@pytest.mark.parametrize("sform", [0, 1])
@pytest.mark.parametrize("above", [4e-7, 9e-6])
def test_a_quaternion_that_is_too_long_by_rounding_is_read_and_what_is_written_can_be_read(
    tmp_path, sform, above
):
    path = write_nifti(tmp_path / "a.nii", np.zeros((2, 3, 4), np.int16), codes=(sform, 1))
    content = bytearray(path.read_bytes())
    half = np.sqrt((1 + above) / 2)
    content[76:80] = np.float32(1).tobytes()
    content[256:268] = np.array([0, half, half], "<f4").tobytes()
    path.write_bytes(content)
    _, geometry = read_volume(path)
    assert geometry.axes == ("RAS" if sform else "LSA")
    write_volume(tmp_path / "label.nii", np.zeros(nifti.ras_shape(geometry), np.uint8), geometry)
    written = nibabel.load(tmp_path / "label.nii").get_qform()[:3, :3]
    expected = np.eye(3) if sform else np.eye(3)[[0, 2, 1]] * [-1, 1, 1]
    assert written == pytest.approx(expected, abs=1e-4)


def sheared(degrees, about=(0.0, 0.0, 0.0)):
    """An affine of 1 x 1 x 2 mm whose third axis leans, all turned by angles about X, Y and Z."""
    affine = np.eye(4)
    affine[:3, 2] = 0, 2 * np.sin(np.radians(degrees)), 2 * np.cos(np.radians(degrees))
    for axis, angle in enumerate(np.radians(about)):
        i, j = [other for other in range(3) if other != axis]
        turn = np.eye(4)
        turn[i, i] = np.cos(angle)
        turn[j, j] = np.cos(angle)
        turn[i, j] = -np.sin(angle)
        turn[j, i] = np.sin(angle)
        affine = turn @ affine
    return affine


@pytest.mark.parametrize("about", [(0.0, 0.0, 0.0), (7.0, -12.0, 4.0)])
@pytest.mark.parametrize("flips", [(1, 1, 1), (-1, -1, 1)])
@pytest.mark.parametrize("degrees", [-30, 0, 20])
def test_steps_of_a_sheared_grid_give_its_distances_and_volumes(tmp_path, degrees, about, flips):
    affine = sheared(degrees, about) @ np.diag([*flips, 1])
    path = write_nifti(tmp_path / "a.nii", np.zeros((2, 3, 4), np.int16))
    image = nibabel.load(path)
    image.set_qform(None, 0)
    image.set_sform(affine, 1)
    nibabel.save(image, tmp_path / "b.nii")
    _, geometry = read_volume(tmp_path / "b.nii")
    steps = nifti.ras_steps_mm(geometry)
    apart = np.random.default_rng(0).integers(-9, 9, (50, 3))
    expected = np.linalg.norm(apart @ (affine[:3, :3] * flips).T, axis=1)
    assert np.linalg.norm(apart @ steps.T, axis=1) == pytest.approx(expected, rel=1e-5)
    assert np.prod(np.diagonal(steps)) == pytest.approx(2 * np.cos(np.radians(degrees)), rel=1e-5)
    assert ras_spacing_mm(geometry) == pytest.approx((1, 1, 2), rel=1e-5)
    if not degrees:  # turned alone: as the spacing, to the bit
        assert np.array_equal(steps, np.diag(ras_spacing_mm(geometry)))


def test_a_grid_sheared_by_more_than_any_gantry_is_refused(tmp_path):
    array = np.zeros((2, 3, 4), np.int16)
    nibabel.save(nibabel.Nifti1Image(array, sheared(44)), tmp_path / "good.nii")
    nibabel.save(nibabel.Nifti1Image(array, sheared(46)), tmp_path / "bad.nii")
    read_volume(tmp_path / "good.nii")
    with pytest.raises(InputError, match=r"sheared by at most 45 degrees, got 46\.0"):
        read_volume(tmp_path / "bad.nii")


def test_without_orientation_the_first_axis_runs_to_the_left_and_that_is_said(tmp_path):
    array = np.zeros((2, 3, 4), np.int16)
    placed = read_volume(write_nifti(tmp_path / "a.nii", array))[1]
    guessed = read_volume(write_nifti(tmp_path / "b.nii", array, codes=(0, 0)))[1]
    assert (placed.axes, guessed.axes) == ("RAS", "LAS")
    assert nifti.orientation_note(placed) == ""
    assert "sform and qform codes are 0" in nifti.orientation_note(guessed)

import gzip
import itertools
import json

import nibabel
import numpy as np
import pytest

from cpu3d.data import nifti
from cpu3d.data.nifti import from_ras, ras_spacing_mm, read_volume, to_ras, write_label
from cpu3d.data.records import Geometry, case_from_json, to_json
from cpu3d.errors import InputError
from tests.cpu3d.data.datasets import make_record, write_nifti

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


@pytest.mark.parametrize(("dtype", "end"), [("<i2", ".nii"), (">i2", ".nii.gz"), ("<u1", ".nii.gz"), (">f8", ".nii")])
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
    [b"", b"no header", b"\0" * 400, gzip.compress(b"still none" * 50, mtime=0)],
    ids=["empty", "short", "zeros", "packed"],
)
def test_what_is_no_nifti_is_refused(tmp_path, content):
    (tmp_path / "a.nii.gz").write_bytes(content)
    with pytest.raises(InputError, match=r"a\.nii\.gz must"):
        read_volume(tmp_path / "a.nii.gz")


@pytest.mark.parametrize(
    ("place", "content", "rule"),
    [
        (280, bytes(12), "an invertible affine"),  # srow_x
        (40, np.array([3, 0, 3, 4], "<i2").tobytes(), "have voxels, got shape"),
        (70, np.array([32], "<i2").tobytes(), "hold real numbers, got complex64"),
        (108, np.array([0], "<f4").tobytes(), "offset 0"),
        (344, b"ni1\0", "header and voxels in one file, got magic b'ni1'"),
        # Only the qform counts, whose quaternion is longer than 1.
        (252, np.array([1, 0], "<i2").tobytes() + np.array([1, 1], "<f4").tobytes(), "have a valid qform"),
    ],
)
def test_a_header_that_does_not_make_sense_is_refused(tmp_path, place, content, rule):
    path = write_nifti(tmp_path / "a.nii", np.zeros((2, 2, 2), np.int16))
    whole = bytearray(path.read_bytes())
    whole[place : place + len(content)] = content
    path.write_bytes(whole)
    with pytest.raises(InputError, match=rule):
        read_volume(path)


def test_what_does_not_fit_the_grid_or_the_format_is_not_written(tmp_path):
    geometry = geometry_of("LPS")
    with pytest.raises(ValueError, match=r"label must be 3D integers 0\.\.255"):
        write_label(tmp_path / "a.nii", np.full((2, 3, 4), 0.5), geometry)
    with pytest.raises(InputError, match=r"must end in \.nii\.gz or \.nii"):
        write_label(tmp_path / "a.mgz", np.zeros((2, 3, 4), np.uint8), geometry)


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
def test_sform_and_qform_that_differ_are_both_written_back_to_the_bit_also_by_way_of_a_record(tmp_path, codes):
    source, turned = tmp_path / "a.nii", np.array(geometry_of("LPS").affine)
    image = nibabel.Nifti1Image(np.zeros((4, 4, 4), np.int16), None)
    image.set_sform(turned, codes[0])
    turned[:2, :2] = turned[:2, :2] @ [[0.8, -0.6], [0.6, 0.8]]
    turned[:3, 3] += 1 / 3
    image.set_qform(turned, codes[1])
    nibabel.save(image, source)
    record = make_record(geometry=read_volume(source)[1])
    geometry = case_from_json(json.dumps(to_json(record)).encode()).geometry
    write_label(tmp_path / "label.nii", np.zeros(nifti.ras_shape(geometry), np.uint8), geometry)
    before, after = source.read_bytes(), (tmp_path / "label.nii").read_bytes()
    assert after[76:92] == before[76:92]  # pixdim
    assert after[252:328] == before[252:328]  # both codes, the quaternion, its offset, srow
    assert read_volume(tmp_path / "label.nii")[1] == geometry

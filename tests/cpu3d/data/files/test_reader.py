"""An array's file: encoded, read in every mode and format, and refused where it is another than was
written."""

import dataclasses
import hashlib
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpu3d.data.files.arrays import FORMATS
from cpu3d.data.files.reader import Reader, choose_read_mode, file_system
from cpu3d.data.manifest import ArrayFile, array_path
from cpu3d.data.region import Region
from cpu3d.errors import InputError
from tests.cpu3d.data.made_datasets import stored_case

MODES = ("mmap", "pread")
SHAPE = (7, 6, 5)
EACH = [(mode, kind) for mode in MODES for kind in FORMATS]


def voxels(shape=SHAPE, channels=2, dtype=np.int16, seed=0):
    """An image of distinct values, as far as the dtype goes, and a label."""
    values = (
        np.random.default_rng(seed)
        .permutation(np.prod((*shape, channels)))
        .reshape(*shape, channels)
    )
    return values.astype(dtype), (values[..., 0] % 251).astype(np.uint8)


@pytest.fixture
def case(tmp_path):
    """A case in a store of its own: (folder, record, image, label)."""
    image, label = voxels()
    return tmp_path, stored_case(tmp_path, image, label), image, label


def refuses(folder, record, box, match, mode="mmap"):
    """Whether reading all of an image and reading a box of it are refused for this reason."""
    for read in (
        lambda reader: reader.array(record, "x"),
        lambda reader: reader.array(record, "x", (box,) * 3),
    ):
        with pytest.raises(InputError, match=match):
            read(Reader(folder, mode))


# --- Reading ---


@pytest.mark.parametrize(("mode", "kind"), EACH)
def test_every_mode_gives_the_array_that_was_stored_ready_for_zero_copy(tmp_path, mode, kind):
    image, label = voxels()
    record = stored_case(tmp_path, image, label, kind=kind)
    reader = Reader(tmp_path, mode)
    for name, stored in (("x", image), ("y", label)):
        array = reader.array(record, name)
        assert array.dtype == stored.dtype
        assert array.flags.c_contiguous
        assert array.ctypes.data % 64 == 0
        np.testing.assert_array_equal(array, stored)
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        is_map = str(array_path(tmp_path, record, name)) in maps
        assert is_map == (not array.flags.writeable) == (kind == "npy" and mode != "pread")


@st.composite
def arrays_and_boxes(draw):
    """(shape, channels, slices), boxes that are whole along some axes among them."""
    shape = tuple(draw(st.integers(1, 12)) for _ in range(3))
    starts = [draw(st.integers(0, n - 1)) if draw(st.booleans()) else 0 for n in shape]
    ends = [(a, draw(st.integers(a + 1, n)) if a else n) for a, n in zip(starts, shape)]
    return shape, draw(st.integers(1, 3)), tuple(slice(*pair) for pair in ends)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(arrays_and_boxes())
def test_a_box_is_the_same_in_every_mode_and_format(tmp_path, drawn):
    shape, channels, slices = drawn
    image, label = voxels(shape, channels)
    records = {kind: stored_case(tmp_path, image, label, kind=kind) for kind in FORMATS}
    for mode, kind in EACH:
        reader = Reader(tmp_path, mode)
        for name, stored in (("x", image), ("y", label), ("x", image)):
            box = reader.array(records[kind], name, slices)
            assert box.flags.c_contiguous
            assert box.flags.writeable
            assert box.ctypes.data % 64 == 0
            assert box.dtype == stored.dtype
            np.testing.assert_array_equal(box, stored[slices])


# --- Files that are not what was written ---


@pytest.mark.parametrize(("mode", "kind"), EACH)
@pytest.mark.parametrize("length", [0, -1])
def test_a_file_of_another_length_is_refused(tmp_path, mode, kind, length):
    image, label = voxels()
    record = stored_case(tmp_path, image, label, kind=kind)
    path = array_path(tmp_path, record, "x")
    os.truncate(path, length % record.files["x"].size_bytes)
    refuses(
        tmp_path,
        record,
        slice(0, 1),
        f"{path} must be {record.files['x'].size_bytes} .* got {path.stat().st_size}",
        mode,
    )
    np.testing.assert_array_equal(Reader(tmp_path, mode).array(record, "y"), label)


@pytest.mark.parametrize("mode", ["mmap", "pread"])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((*SHAPE, 2), "<u2"), ((6, 7, 5, 2), "<i2"), ((*SHAPE, 2), ">i2")]
)
def test_a_file_of_another_array_is_refused(case, mode, shape, dtype):
    folder, record, _, _ = case
    path = array_path(folder, record, "x")
    np.save(path, np.zeros(shape, dtype))
    assert path.stat().st_size == record.files["x"].size_bytes
    rule = f"{path} must be .* int16 .7, 6, 5, 2., got another header"
    refuses(folder, record, slice(0, 1), rule, mode)


@pytest.mark.parametrize("mode", ["mmap", "pread"])
def test_a_packed_file_of_another_array_is_refused(tmp_path, mode):
    record = stored_case(tmp_path, *voxels(), kind="b2nd")
    other = dataclasses.replace(record, stored=Region((0, 0, 0), (6, 7, 5)))
    rule = r"must be a \.b2nd array of int16 \(6, 7, 5, 2\), got int16 \(7, 6, 5, 2\)"
    refuses(tmp_path, other, slice(0, 1), rule, mode)


@pytest.mark.parametrize("flipped", [slice(100), slice(5000, 5001)])
def test_a_damaged_packed_file_is_named(tmp_path, flipped):
    record = stored_case(tmp_path, *voxels((40, 40, 40)), kind="b2nd")
    path = array_path(tmp_path, record, "x")
    content = bytearray(path.read_bytes())
    content[flipped] = bytes(byte ^ 1 for byte in content[flipped])
    path.write_bytes(content)
    refuses(
        tmp_path,
        record,
        slice(0, 40),
        re.escape(f"store file {path} must be a .b2nd array of int16"),
    )


def test_a_packed_file_that_leads_to_another_is_refused_and_not_followed(tmp_path, monkeypatch):
    blosc2 = pytest.importorskip("blosc2")
    image, label = voxels()
    record = stored_case(tmp_path, image, label, kind="b2nd")
    monkeypatch.chdir(tmp_path)
    blosc2.asarray(image, urlpath="secret.b2nd", mode="w")
    source = {"local_abspath": "secret.b2nd", "urlpath": None, "caterva2_env": False}
    content = blosc2.asarray(image, meta={"proxy-source": source}).to_cframe()
    array_path(tmp_path, record, "x").write_bytes(content)
    file = ArrayFile(len(content), hashlib.sha256(content).hexdigest())
    record = dataclasses.replace(record, files={"x": file})
    monkeypatch.setattr(blosc2, "open", lambda *_, **__: pytest.fail("opened"))
    refuses(tmp_path, record, slice(0, 1), r"a.x.b2nd must be .*, got .*metadata .*proxy-source")


def test_a_file_cut_while_it_is_read_is_an_error_with_pread(case, monkeypatch):
    folder, record, _, _ = case
    path = array_path(folder, record, "x")
    preadv = os.preadv

    def cut_then_read(handle, buffers, offset):
        os.truncate(path, 200 if offset else record.files["x"].size_bytes)
        return preadv(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut_then_read)
    size = record.files["x"].size_bytes
    message = f"{path} must be {size} bytes long, got its end at byte 200 while it was read"
    with pytest.raises(InputError, match=re.escape(message)):
        Reader(folder, "pread").array(record, "x")


# --- The mode ---


def test_files_of_a_network_are_read_so_that_a_failure_is_an_error():
    assert [choose_read_mode(kind) for kind in ("ext4", "xfs", "")] == ["mmap"] * 3
    assert {
        choose_read_mode(kind) for kind in ("nfs4", "cifs", "smb3", "lustre", "fuse.sshfs", "9p")
    } == {"pread"}


def test_the_last_of_the_longest_mount_points_above_a_path_is_the_one_it_lies_on(monkeypatch):
    points = [
        ("/", "ext4"),
        ("/data", "ext3"),
        ("/data", "nfs4"),
        ("/data/fast", "xfs"),
        ("/dat", "tmpfs"),
    ]
    mounts = [SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in points]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: mounts)
    kinds = {
        "/data/x/y": "nfs4",
        "/data": "nfs4",
        "/data/fast/store": "xfs",
        "/database": "ext4",
        "/": "ext4",
    }
    assert {path: file_system(path) for path in kinds} == kinds
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: os.stat("/no/such/table"))
    assert file_system("/data") == ""

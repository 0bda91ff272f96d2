"""An array's file: encoded, read in every mode and format, and refused where it is another than was
written."""

import dataclasses
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpu3d.data.files.arrays import FORMATS, decode_b2nd
from cpu3d.data.files.reader import Reader, choose_read_mode, file_system
from cpu3d.data.manifest import array_path
from cpu3d.data.region import whole
from cpu3d.errors import InputError
from tests.cpu3d.data.made_datasets import stored_case

SHAPE = (7, 6, 5)
READ_MODES = ("mmap", "pread")
EACH = [(mode, kind) for mode in READ_MODES for kind in FORMATS]


def voxels(shape=SHAPE, channels=2):
    """An image of distinct values and a label."""
    values = np.random.default_rng(0).permutation(np.prod(shape) * channels)
    image = values.reshape(*shape, channels).astype(np.int16)
    return image, (image[..., 0] % 251).astype(np.uint8)


def refuses(folder, record, match, mode="mmap"):
    """Whether reading all of an image and reading a box of it are refused for this reason."""
    for box in (None, (slice(0, 1),) * 3):
        with pytest.raises(InputError, match=match):
            Reader(folder, mode).array(record, "x", box)


# --- Reading ---


@pytest.mark.parametrize(("mode", "kind"), EACH)
def test_every_mode_gives_the_array_that_was_stored_ready_for_zero_copy(tmp_path, mode, kind):
    image, label = voxels()
    record = stored_case(tmp_path, image, label, kind=kind)
    reader = Reader(tmp_path, mode)
    handles = os.listdir("/proc/self/fd")
    for name, stored in (("x", image), ("y", label)):
        array = reader.array(record, name)
        assert array.dtype == stored.dtype
        assert array.flags.c_contiguous
        assert array.ctypes.data % 64 == 0
        np.testing.assert_array_equal(array, stored)
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        is_map = str(array_path(tmp_path, record, name)) in maps
        assert is_map == (not array.flags.writeable) == (kind == "npy" and mode == "mmap")
    del array
    assert os.listdir("/proc/self/fd") == handles, "all closed"


@st.composite
def arrays_and_boxes(draw):
    """(shape, channels, slices), boxes that are whole along some axes among them."""
    shape = tuple(draw(st.integers(1, 12)) for _ in range(3))
    starts = [draw(st.integers(0, n - 1)) if draw(st.booleans()) else 0 for n in shape]
    ends = [(a, draw(st.integers(a + 1, n)) if a else n) for a, n in zip(starts, shape)]
    return shape, draw(st.integers(1, 3)), tuple(slice(*pair) for pair in ends)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrays_and_boxes())
def test_a_box_is_the_same_in_every_mode_and_format(tmp_path, drawn):
    shape, channels, slices = drawn
    image, label = voxels(shape, channels)
    records = {kind: stored_case(tmp_path, image, label, kind=kind) for kind in FORMATS}
    for mode, kind in EACH:
        reader = Reader(tmp_path, mode)
        for name, stored in (("x", image), ("y", label)):
            box = reader.array(records[kind], name, slices)
            assert box.flags.c_contiguous
            assert box.flags.writeable
            assert box.ctypes.data % 64 == 0
            assert box.dtype == stored.dtype
            np.testing.assert_array_equal(box, stored[slices])


# --- Files that are not what was written ---


@pytest.mark.parametrize(("mode", "kind"), EACH)
@pytest.mark.parametrize("more", [1, -1])
def test_a_file_of_another_length_is_refused(tmp_path, mode, kind, more):
    image, label = voxels()
    record = stored_case(tmp_path, image, label, kind=kind)
    path = array_path(tmp_path, record, "x")
    size = record.files["x"].size_bytes
    os.truncate(path, size + more)
    refuses(tmp_path, record, f"{path} must be {size} .* got {path.stat().st_size}", mode)
    np.testing.assert_array_equal(Reader(tmp_path, mode).array(record, "y"), label)


@pytest.mark.parametrize("mode", READ_MODES)
@pytest.mark.parametrize(
    ("shape", "dtype"), [((*SHAPE, 2), "<u2"), ((6, 7, 5, 2), "<i2"), ((*SHAPE, 2), ">i2")]
)
def test_a_file_of_another_array_is_refused(tmp_path, mode, shape, dtype):
    record = stored_case(tmp_path, *voxels())
    path = array_path(tmp_path, record, "x")
    np.save(path, np.zeros(shape, dtype))
    rule = f"{path} must be .* int16 .7, 6, 5, 2., got another header"
    refuses(tmp_path, record, rule, mode)


def test_a_packed_file_of_another_array_is_refused(tmp_path):
    record = stored_case(tmp_path, *voxels(), kind="b2nd")
    other = dataclasses.replace(record, stored=whole((6, 7, 5)))
    rule = r"must be a \.b2nd array of int16 \(6, 7, 5, 2\), got int16 \(7, 6, 5, 2\)"
    refuses(tmp_path, other, rule)


def test_a_damaged_packed_file_is_named(tmp_path):
    record = stored_case(tmp_path, *voxels((40, 40, 40)), kind="b2nd")
    path = array_path(tmp_path, record, "x")
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    refuses(tmp_path, record, f"store file {path} must be a .b2nd array of int16")


def test_a_packed_file_that_leads_to_another_is_refused_and_not_followed():
    blosc2 = pytest.importorskip("blosc2")
    source = {"local_abspath": "/dev/null", "urlpath": None, "caterva2_env": False}
    content = blosc2.asarray(voxels()[0], meta={"proxy-source": source}).to_cframe()
    with pytest.raises(ValueError, match=r"metadata .*proxy-source"):
        decode_b2nd(content)


def test_a_file_cut_while_it_is_read_is_an_error_with_pread(tmp_path, monkeypatch):
    record = stored_case(tmp_path, *voxels())
    path = array_path(tmp_path, record, "x")
    size = record.files["x"].size_bytes
    preadv = os.preadv

    def cut_then_read(handle, buffers, offset):
        os.truncate(path, 200 if offset else size)
        return preadv(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut_then_read)
    message = f"{path} must be {size} bytes long, got its end at byte 200 while it was read"
    with pytest.raises(InputError, match=re.escape(message)):
        Reader(tmp_path, "pread").array(record, "x")


# --- The mode ---


NETWORK = "nfs4 smb3 fuse.sshfs 9p afs beegfs ceph cifs glusterfs gpfs lustre orangefs panfs wekafs"


def test_files_of_a_network_are_read_so_that_a_failure_is_an_error():
    assert {choose_read_mode(kind) for kind in ("ext4", "xfs", "")} == {"mmap"}
    assert set(map(choose_read_mode, NETWORK.split())) == {"pread"}


def test_the_last_of_the_longest_mount_points_above_a_path_is_the_one_it_lies_on(monkeypatch):
    mounts = [
        SimpleNamespace(mountpoint=point, fstype=kind)
        for point, kind in (
            ("/", "ext4"),
            ("/data", "ext3"),
            ("/data", "nfs4"),
            ("/data/fast", "xfs"),
            ("/dat", "tmpfs"),
        )
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: mounts)
    kinds = {"/data": "nfs4", "/data/x/y": "nfs4", "/data/fast/store": "xfs", "/database": "ext4"}
    assert {path: file_system(path) for path in kinds} == kinds

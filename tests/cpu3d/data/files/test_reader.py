import dataclasses
import errno
import hashlib
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpu3d.data.files import arrays, pages
from cpu3d.data.files.reader import Reader
from cpu3d.data.records import array_path
from cpu3d.errors import InputError

MODES = ("mmap", "pread", "ram")
SHAPE = (7, 6, 5)


def voxels(shape=SHAPE, channels=2, dtype=np.int16, seed=0):
    """An image of distinct values, as far as the dtype goes, and a label."""
    values = np.random.default_rng(seed).permutation(np.prod((*shape, channels))).reshape(*shape, channels)
    return values.astype(dtype), (values[..., 0] % 251).astype(np.uint8)


def maps():
    """What is mapped into this process."""
    return Path("/proc/self/maps").read_text(encoding="utf-8")


@pytest.fixture
def case(tmp_path, stored_case):
    """A case in a store of its own: (folder, record, image, label)."""
    image, label = voxels()
    return tmp_path, stored_case(tmp_path, image, label), image, label


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["npy", "b2nd"])
@pytest.mark.parametrize("dtype", [np.int16, np.float16])
def test_every_mode_gives_the_array_that_was_stored_ready_for_zero_copy(tmp_path, stored_case, mode, kind, dtype):
    image, label = voxels(dtype=dtype)
    record = stored_case(tmp_path, image, label, kind=kind)
    reader = Reader(tmp_path, mode)
    for part, stored in (("x", image), ("y", label)):
        array = reader.array(record, part)
        assert array.dtype == stored.dtype
        assert array.flags.c_contiguous
        assert array.ctypes.data % 64 == 0
        np.testing.assert_array_equal(array, stored)
    assert reader.reads.zero_copy_ratio == (1 if kind == "npy" and mode != "pread" else 0)
    assert reader.reads.arrays == 2


@st.composite
def arrays_and_boxes(draw):
    """(shape, channels, slices), boxes that are whole along some axes and empty ones among them."""
    shape = tuple(draw(st.integers(1, 12)) for _ in range(3))
    slices = tuple(slice(a, draw(st.integers(a, n))) for a, n in ((draw(st.integers(0, n)), n) for n in shape))
    whole = draw(st.tuples(*[st.booleans()] * 3))
    slices = tuple(slice(0, n) if all_ else part for all_, part, n in zip(whole, slices, shape))
    return shape, draw(st.integers(1, 3)), slices


@pytest.mark.parametrize("gap_bytes", [4, arrays.GAP_BYTES])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrays_and_boxes())
def test_a_box_is_the_same_in_every_mode_and_format(tmp_path, stored_case, monkeypatch, gap_bytes, drawn):
    shape, channels, slices = drawn
    monkeypatch.setattr(arrays, "GAP_BYTES", gap_bytes)  # so that small arrays meet each way to read a box
    image, label = voxels(shape, channels)
    records = [stored_case(tmp_path, image, label, kind=kind) for kind in ("npy", "b2nd")]
    for record in records:
        for mode in MODES:
            reader = Reader(tmp_path, mode)
            for part, stored in (("x", image), ("y", label)):
                box = reader.box(record, part, slices)
                assert box.flags.c_contiguous
                assert box.flags.writeable
                assert box.ctypes.data % 64 == 0 or box.size == 0
                assert box.dtype == stored.dtype
                np.testing.assert_array_equal(box, stored[slices])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["npy", "b2nd"])
@pytest.mark.parametrize(
    ("axis", "bad", "told"),
    [
        (0, slice(-1, 3), "-1:3 of 7"),
        (1, slice(2, 7), "2:7 of 6"),
        (2, slice(3, 2), "3:2 of 5"),
        (2, slice(6, 6), "6:6 of 5"),
        (0, slice(None, 3), "None:3 of 7"),
        (0, slice(0, 4, 2), "0:4:2 of 7"),
    ],
)
def test_a_box_that_reaches_beyond_the_array_is_refused(tmp_path, stored_case, mode, kind, axis, bad, told):
    record = stored_case(tmp_path, *voxels(), kind=kind)
    slices = [slice(1, 2)] * 3
    slices[axis] = bad
    reader = Reader(tmp_path, mode)
    with pytest.raises(ValueError, match=f"must be three slices within the stored array, got {told}; crop"):
        reader.box(record, "x", tuple(slices))
    if mode != "ram":
        with pytest.raises(ValueError, match=f"got {told}"):
            reader.advise(record, tuple(slices))
    with pytest.raises(ValueError, match="got 2 slices"):
        reader.box(record, "x", (slice(1, 2),) * 2)
    assert reader.reads.bytes_read == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["npy", "b2nd"])
@pytest.mark.parametrize("length", [0, 50, -1, 1])
def test_a_file_of_another_length_is_refused_before_it_is_mapped(
    tmp_path, stored_case, monkeypatch, mode, kind, length
):
    image, label = voxels()
    record = stored_case(tmp_path, image, label, kind=kind)
    stored_case(tmp_path, image, label, stem="b", kind=kind)
    path = array_path(tmp_path, record, "x")
    os.truncate(path, length if length in (0, 50) else record.image_bytes + length)
    monkeypatch.setattr(pages, "map_file", lambda *_, **__: pytest.fail("mapped"))
    for read in (lambda reader: reader.array(record, "x"), lambda reader: reader.box(record, "x", (slice(0, 1),) * 3)):
        found = path.stat().st_size
        message = f"store file {path} must be {record.image_bytes} bytes long, got {found}; delete it and run"
        with pytest.raises(InputError, match=re.escape(message)):
            read(Reader(tmp_path, mode))
    monkeypatch.undo()
    np.testing.assert_array_equal(Reader(tmp_path, mode).array(record, "y"), label)
    good = dataclasses.replace(record, stem="b")
    np.testing.assert_array_equal(Reader(tmp_path, mode).array(good, "x"), image)


@pytest.mark.parametrize(
    "other", [np.zeros((*SHAPE, 2), np.uint16), np.zeros((6, 7, 5, 2), np.int16), np.zeros((*SHAPE, 2), ">i2")]
)
def test_a_file_of_another_array_is_refused(case, other):
    folder, record, _, label = case
    path = array_path(folder, record, "x")
    np.save(path, other)
    assert path.stat().st_size == record.image_bytes
    for mode in MODES:
        message = re.escape(f"store file {path} must be a .npy array of int16 (7, 6, 5, 2), got another header; delete")
        with pytest.raises(InputError, match=message):
            Reader(folder, mode).array(record, "x")
    np.testing.assert_array_equal(Reader(folder).array(record, "y"), label)


@pytest.mark.parametrize("flipped", [slice(None), slice(100), slice(5000, 5001), slice(-1, None)])
def test_a_damaged_packed_file_is_told_by_name(tmp_path, stored_case, flipped):
    image, label = voxels((40, 40, 40))
    record = stored_case(tmp_path, image, label, kind="b2nd")
    path = array_path(tmp_path, record, "x")
    content = bytearray(path.read_bytes())
    content[flipped] = bytes(byte ^ 1 for byte in content[flipped])
    path.write_bytes(content)
    for read in (lambda reader: reader.array(record, "x"), lambda reader: reader.box(record, "x", (slice(0, 40),) * 3)):
        with pytest.raises(InputError, match=re.escape(f"store file {path} must be a .b2nd array of int16")):
            read(Reader(tmp_path))
    np.testing.assert_array_equal(Reader(tmp_path).array(record, "y"), label)


@pytest.mark.parametrize(
    "named",
    [
        {"proxy-source": {"local_abspath": "SECRET", "urlpath": None, "caterva2_env": False}},
        {"proxy-source": {"local_abspath": None, "urlpath": ["a", "http://localhost:9", None], "caterva2_env": False}},
        {"LazyArray": 1},
    ],
)
def test_a_packed_file_that_leads_to_another_is_refused_and_not_followed(tmp_path, stored_case, monkeypatch, named):
    blosc2 = pytest.importorskip("blosc2")
    image, label = voxels()
    record = stored_case(tmp_path, image, label, kind="b2nd")
    secret = str(tmp_path / "secret.b2nd")
    blosc2.asarray(image, urlpath=secret, mode="w")
    for source in named.values():
        if isinstance(source, dict) and source["local_abspath"]:
            source["local_abspath"] = secret
    content = blosc2.asarray(image, meta=named).to_cframe()
    array_path(tmp_path, record, "x").write_bytes(content)
    record = dataclasses.replace(record, image_bytes=len(content), image_sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(blosc2, "open", lambda *_, **__: pytest.fail("opened"))
    for read in (lambda reader: reader.array(record, "x"), lambda reader: reader.box(record, "x", (slice(0, 1),) * 3)):
        with pytest.raises(InputError, match=rf"a.x.b2nd must be .*, got .*metadata .*{next(iter(named))}"):
            read(Reader(tmp_path))
    np.testing.assert_array_equal(Reader(tmp_path).box(record, "y", (slice(1, 3),) * 3), label[1:3, 1:3, 1:3])


@pytest.mark.parametrize("mode", MODES)
def test_a_file_replaced_under_a_reader_is_told(case, mode):
    folder, record, image, label = case
    reader = Reader(folder, mode)
    before = reader.array(record, "x")
    path = array_path(folder, record, "x")
    new = path.with_suffix(".new")
    new.write_bytes(path.read_bytes())
    os.replace(new, path)
    for _ in range(2):
        with pytest.raises(InputError, match=re.escape(f"store file {path} must stay as it was while it is read, got")):
            reader.box(record, "x", (slice(0, 1),) * 3)
    np.testing.assert_array_equal(before, image)  # what was given out before lives on
    np.testing.assert_array_equal(reader.array(record, "y"), label)
    np.testing.assert_array_equal(Reader(folder, mode).array(record, "x"), image)


def test_a_file_cut_while_it_is_read_is_an_error_with_pread(case, monkeypatch):
    folder, record, _, label = case
    path = array_path(folder, record, "x")
    preadv = os.preadv

    def cut_then_read(handle, buffers, offset, *flags):
        if offset > 0:
            os.truncate(path, 200)
        return preadv(handle, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", cut_then_read)
    message = f"store file {path} must be {record.image_bytes} bytes long, it ended at byte 200 while it was read"
    with pytest.raises(InputError, match=re.escape(message)):
        Reader(folder, "pread").array(record, "x")
    monkeypatch.undo()
    np.testing.assert_array_equal(Reader(folder, "pread").array(record, "y"), label)


@pytest.mark.parametrize("mode", ["pread", "mmap"])
def test_a_failing_disk_is_an_error_with_the_files_name(case, monkeypatch, mode):
    folder, record, _, _ = case

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="Input/output error") as raised:
        Reader(folder, mode).array(record, "x")
    assert raised.value.filename == str(array_path(folder, record, "x"))


def test_problems_names_every_bad_file_of_a_case_and_reads_no_voxel(case):
    folder, record, _, _ = case
    assert Reader(folder).problems(record) == []
    assert Reader(folder).reads.bytes_read == 0
    os.truncate(array_path(folder, record, "x"), 10)
    array_path(folder, record, "y").unlink()
    found = Reader(folder).problems(record)
    assert [line.split(" must ")[0] for line in found] == [
        f"store file {array_path(folder, record, part)}" for part in "xy"
    ]


def test_maps_go_with_their_last_array_and_leave_no_file_open(case):
    folder, record, image, _ = case
    reader = Reader(folder)
    part = reader.array(record, "x")[2:3]
    assert str(array_path(folder, record, "x")) in maps()
    np.testing.assert_array_equal(part, image[2:3])
    with pytest.raises(ValueError, match="read-only"):
        part[...] = 0
    del part
    assert str(array_path(folder, record, "x")) not in maps()
    for mode in MODES:
        before = len(os.listdir("/proc/self/fd"))
        reader = Reader(folder, mode)
        kept = [reader.array(record, "x"), reader.array(record, "y")]
        assert len(os.listdir("/proc/self/fd")) == before
        del kept


def test_ram_maps_a_file_once_and_keeps_it(case):
    folder, record, _, _ = case
    reader = Reader(folder, "ram")
    reader.advise(record)
    assert reader.array(record, "x").ctypes.data == reader.array(record, "x").ctypes.data
    assert str(array_path(folder, record, "y")) in maps()
    del reader
    assert str(array_path(folder, record, "y")) not in maps()

import hashlib
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu3d.data.files.arrays import (
    BLOCK_VOXELS,
    CHUNK_VOXELS,
    FORMATS,
    aligned_empty,
    b2nd_layout,
    content_sha256,
    decode_b2nd,
    encode,
    file_sha256,
    npy_header,
    unpack,
    voxels_sha256,
)

shapes = st.tuples(*[st.integers(1, 40)] * 3, st.integers(1, 4)) | st.tuples(*[st.integers(1, 40)] * 3)


def voxels(shape, dtype, seed=0):
    values = np.random.default_rng(seed).integers(-3, 200, shape)
    return values.astype(dtype) * (values > 100).astype(dtype)


def decode(pieces, format_):
    content = b"".join(bytes(piece) for piece in pieces)
    return decode_b2nd(content) if format_ == "b2nd" else np.load(io.BytesIO(content), allow_pickle=False)


@pytest.mark.parametrize("format_", FORMATS)
@settings(max_examples=40)
@given(shape=shapes, dtype=st.sampled_from(["<i2", "<f2", "|u1"]), seed=st.integers(0, 99))
def test_what_is_encoded_comes_back_bit_by_bit_and_says_the_same_hash(format_, shape, dtype, seed):
    array = voxels(shape, dtype, seed)
    back = decode(encode(array, format_), format_)
    assert back.dtype == array.dtype
    assert back.flags.c_contiguous
    assert back.tobytes() == array.tobytes()
    assert voxels_sha256(back) == voxels_sha256(array)


def test_a_format_that_is_none_is_refused():
    with pytest.raises(ValueError, match="npy, b2nd"):
        encode(np.zeros((1, 1, 1), np.uint8), "nii")


def test_what_is_unpacked_is_aligned_as_tensorflow_wants_it():
    array = voxels((17, 5, 9, 2), np.int16)
    assert decode_b2nd(b"".join(encode(array, "b2nd"))).ctypes.data % 64 == 0
    for size in range(1, 40):
        empty = aligned_empty((size, 3), np.int16)
        assert empty.ctypes.data % 64 == 0
        assert (empty.shape, empty.dtype, empty.flags.c_contiguous) == ((size, 3), np.int16, True)


def test_a_box_of_a_packed_array_is_unpacked_alone():
    import blosc2

    array = voxels((40, 35, 30, 2), np.int16)
    content = b"".join(encode(array, "b2nd"))
    slices = (slice(3, 38), slice(0, 5), slice(29, 30), slice(0, 2))
    part = unpack(blosc2.ndarray_from_cframe(content, copy=True), slices)
    assert np.array_equal(part, array[slices])
    assert part.ctypes.data % 64 == 0


@pytest.mark.parametrize(
    "damage", [lambda content: content[: len(content) // 2], lambda content: b"", lambda content: b"\0" * len(content)]
)
def test_a_damaged_packed_array_is_told(damage):
    content = b"".join(encode(voxels((8, 8, 8), np.uint8), "b2nd"))
    with pytest.raises(ValueError, match="no whole Blosc2 array"):
        decode_b2nd(damage(content))


@pytest.mark.parametrize(
    ("shape", "chunks", "blocks"),
    [
        ((240, 240, 155, 4), (*CHUNK_VOXELS, 4), (*BLOCK_VOXELS, 4)),
        ((240, 240, 155), CHUNK_VOXELS, BLOCK_VOXELS),
        ((100, 130, 7, 1), (100, 128, 7, 1), (32, 32, 7, 1)),
        ((1, 1, 1, 9), (1, 1, 1, 9), (1, 1, 1, 9)),
    ],
)
def test_chunks_and_blocks_hold_all_channels_and_are_no_longer_than_the_array(shape, chunks, blocks):
    assert b2nd_layout(shape) == (chunks, blocks)


def test_a_packed_file_is_laid_out_as_planned():
    import blosc2

    packed = blosc2.ndarray_from_cframe(b"".join(encode(voxels((40, 33, 20, 2), np.int16), "b2nd")), copy=True)
    assert (packed.chunks, packed.blocks) == b2nd_layout((40, 33, 20, 2))


def test_a_npy_file_begins_as_numpy_would_begin_it_and_its_voxels_are_aligned():
    array = voxels((6, 5, 4, 2), np.int16)
    theirs = io.BytesIO()
    np.save(theirs, array)
    assert b"".join(bytes(piece) for piece in encode(array, "npy")) == theirs.getvalue()
    for shape in [(1, 1, 1), (512, 512, 1000, 4)]:
        assert len(npy_header("<i2", shape)) % 64 == 0


def test_the_hash_of_voxels_tells_dtype_shape_and_every_voxel_but_not_the_layout_in_memory():
    array = voxels((4, 5, 6), np.int16)
    others = [array.astype(np.float16), array.reshape(5, 4, 6), array + (np.arange(120).reshape(4, 5, 6) == 7)]
    hashes = {voxels_sha256(one.astype(one.dtype.newbyteorder("<"))) for one in [array, *others]}
    assert len(hashes) == 4
    assert voxels_sha256(np.asfortranarray(array)) == voxels_sha256(array)


def test_a_file_in_pieces_has_the_length_and_hash_of_the_file(tmp_path):
    pieces = encode(voxels((6, 5, 4), np.uint8), "npy")
    path = tmp_path / "a"
    path.write_bytes(b"".join(bytes(piece) for piece in pieces))
    size_bytes, sha256 = content_sha256(pieces)
    assert size_bytes == path.stat().st_size
    assert sha256 == file_sha256(path) == hashlib.sha256(path.read_bytes()).hexdigest()

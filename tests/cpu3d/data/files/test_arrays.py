import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu3d.data.files.arrays import FORMATS, decode_b2nd, encode, npy_header, voxels_sha256

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


@pytest.mark.parametrize(
    "damage", [lambda content: content[: len(content) // 2], lambda content: b"", lambda content: b"\0" * len(content)]
)
def test_a_damaged_packed_array_is_told(damage):
    content = b"".join(encode(voxels((8, 8, 8), np.uint8), "b2nd"))
    with pytest.raises(ValueError, match="no whole Blosc2 array"):
        decode_b2nd(damage(content))


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

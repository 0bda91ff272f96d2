"""How an array lies in its file: .npy, which maps into memory as it is, or .b2nd (Blosc2), a tenth of the size.

A .npy file is for fast disks or data that stays in the page cache: nothing is unpacked, a part is a part of the file.
A .b2nd file is for slow disks and networks: less is read, and what is read has to be unpacked.
"""

import hashlib
import io
import os
from pathlib import Path
from typing import List, Sequence, Tuple, Union

import numpy as np

from memory_estimator.files import open_regular

FORMATS = ("npy", "b2nd")
"""What an array's file can be, and how its name ends."""

ALIGNMENT_BYTES = 64
"""TensorFlow takes an array without a copy when its data begins at a multiple of this."""

BLOCK_VOXELS = (32, 32, 16)
"""Of a .b2nd block, what is unpacked at least: 128 KiB of four int16 channels, so it stays in a core's L2 cache."""
CHUNK_VOXELS = (128, 128, 128)
"""Of a .b2nd chunk, what is read at least. A chunk holds all channels: a patch needs them all, and takes three times as
long from chunks of one channel."""

Bytes = Union[bytes, memoryview]


def aligned_empty(shape: Sequence[int], dtype) -> np.ndarray:
    """An uninitialised C-ordered array whose data TensorFlow can take without a copy; NumPy's own start anywhere."""
    dtype = np.dtype(dtype)
    size_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + size_bytes].view(dtype).reshape(shape)


def encode(array: np.ndarray, format_: str) -> List[Bytes]:
    """The file of a C-ordered array, in pieces to be written one after another."""
    if format_ == "npy":
        return [npy_header(array.dtype, array.shape), memoryview(array).cast("B")]
    if format_ != "b2nd":
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format_!r}")
    import blosc2

    chunks, blocks = b2nd_layout(array.shape)
    # Of the codecs and filters tried on MRI and CT the fastest to unpack; ZSTD is a tenth smaller.
    parameters = {
        "codec": blosc2.Codec.LZ4HC,
        "clevel": 5,
        "typesize": array.dtype.itemsize,
        "filters": [blosc2.Filter.SHUFFLE],
        "filters_meta": [0],
        "nthreads": 1,
    }
    return [blosc2.asarray(array, chunks=chunks, blocks=blocks, cparams=parameters).to_cframe()]


def decode_b2nd(content: Bytes) -> np.ndarray:
    """The array in the bytes of a .b2nd file, aligned for TensorFlow. Raises ValueError where they are damaged."""
    import blosc2

    content = bytes(content)  # the packed array reads from it and does not keep it
    try:
        packed = _plain(blosc2.ndarray_from_cframe(content))
        return unpack(packed, tuple(slice(0, n) for n in packed.shape))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"no whole Blosc2 array ({error})") from None


def open_b2nd(path: str):
    """A .b2nd file as a `blosc2.NDArray` that reads its chunks when they are needed. Raises RuntimeError, ValueError.

    Not `blosc2.open`: from version 3 on that follows what a file's metadata name, other files and addresses in the
    network, before its caller sees any of it.
    """
    import blosc2

    return _plain(blosc2.blosc2_ext.open(path, "r", 0))


def unpack(packed, slices: Tuple[slice, ...]) -> np.ndarray:
    """A box of a `blosc2.NDArray` as an aligned array. Raises RuntimeError where its bytes are damaged."""
    start, stop = [part.start for part in slices], [part.stop for part in slices]
    out = aligned_empty([b - a for a, b in zip(start, stop)], packed.dtype)
    return packed.get_slice_numpy(out, (start, stop))  # what packed[slices] does, without a copy into `out`


def b2nd_layout(shape: Sequence[int]) -> Tuple[Tuple[int, ...], Tuple[int, ...]]:
    """(chunks, blocks) of an array (X, Y, Z) or (X, Y, Z, C), none longer than the array; chunks hold all channels."""
    chunks = tuple(min(n, want) for n, want in zip(shape, CHUNK_VOXELS)) + tuple(shape[3:])
    blocks = tuple(min(n, want) for n, want in zip(chunks, BLOCK_VOXELS)) + tuple(shape[3:])
    return chunks, blocks


def npy_header(dtype, shape: Sequence[int]) -> bytes:
    """What comes before the voxels in a .npy file of a C-ordered array; its length is a multiple of 64 bytes."""
    header = io.BytesIO()
    dtype = np.lib.format.dtype_to_descr(np.dtype(dtype))
    description = {"descr": dtype, "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(header, description)
    return header.getvalue()


def voxels_sha256(array: np.ndarray) -> str:
    """SHA-256 of an array's dtype, shape and voxels: the same however it is stored."""
    digest = hashlib.sha256(npy_header(array.dtype, array.shape))
    digest.update(memoryview(np.ascontiguousarray(array)).cast("B"))
    return digest.hexdigest()


def content_sha256(pieces: Sequence[Bytes]) -> Tuple[int, str]:
    """Length in bytes and SHA-256 of a file that is written in pieces."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return sum(len(piece) for piece in pieces), digest.hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a regular file's content, read in pieces. Raises as `open_regular`."""
    digest = hashlib.sha256()
    with os.fdopen(open_regular(path), "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


# --- Private helpers ---


def _plain(packed):
    """Refuse what is no array of its own: a proxy of another, an expression, a list of chunks."""
    meta = sorted(getattr(packed, "schunk", packed).meta)
    if meta != ["b2nd"]:
        raise ValueError(f"metadata {', '.join(meta) or 'of no array'}")
    return packed

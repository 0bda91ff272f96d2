"""An array's file: .npy, which maps into memory as it is, or .b2nd (Blosc2), a tenth of the size.

A .npy file is for fast disks or data that stays in the page cache: nothing is unpacked, a box is
read from its place in the file. A .b2nd file is for slow disks and networks: less is read, and all
of it has to be unpacked."""

import contextlib
import functools
import hashlib
import io
import math
import os
from pathlib import Path
from typing import Any, List, Optional, Sequence, Tuple, Union

import numpy as np

from cpu3d.data.region import Array
from memory_estimator.common.files import open_regular

FORMATS = ("npy", "b2nd")  # kinds of an array's file, and the ends of its name
# TensorFlow takes an array without a copy when its data begins at a multiple of this.
ALIGNMENT_BYTES = 64
# Of a .b2nd file: a block stays in a core's L2 cache while it is unpacked. Both hold all channels.
BLOCK_VOXELS = (32, 32, 16)
CHUNK_VOXELS = (128, 128, 128)
# Of a larger request Linux reads no more ahead than the device's largest transfer.
READ_AHEAD_BYTES = 1 << 20


def aligned_empty(shape: Sequence[int], dtype: Any) -> Array:
    """Make an uninitialised C-ordered array whose data TensorFlow can take without a copy."""
    dtype = np.dtype(dtype)
    size_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + size_bytes].view(dtype).reshape(shape)


def encode(array: Array, format_: str) -> List[Union[bytes, memoryview]]:
    """Return the content of a C-ordered array's file, in pieces to be written one after another."""
    if format_ == "npy":
        return [npy_header(array.dtype, array.shape), array.data.cast("B")]
    import blosc2

    chunks = tuple(map(min, array.shape, (*CHUNK_VOXELS, *array.shape[3:])))
    blocks = tuple(map(min, chunks, (*BLOCK_VOXELS, *array.shape[3:])))
    # Of the codecs and filters tried on MRI and CT the fastest to unpack; ZSTD is a tenth smaller.
    parameters = {
        "codec": blosc2.Codec.LZ4HC,
        "clevel": 5,
        "filters": [blosc2.Filter.SHUFFLE],
        "filters_meta": [0],
        "typesize": array.dtype.itemsize,
        "nthreads": 1,
    }
    return [blosc2.asarray(array, chunks=chunks, blocks=blocks, cparams=parameters).to_cframe()]


def decode_b2nd(
    content: bytes,
    slices: Optional[Sequence[slice]] = None,
    expected: Optional[Tuple[Tuple[int, ...], "np.dtype[Any]"]] = None,
) -> Array:
    """Unpack the array in the bytes of a .b2nd file, or a box of it, aligned for TensorFlow.

    Raises ValueError for damaged bytes, another shape or dtype than `expected`, and for an array
    that is not in `content`: a proxy or an expression names other files and addresses, which Blosc2
    would open."""
    import blosc2

    try:
        packed = blosc2.ndarray_from_cframe(content)
        meta = sorted(getattr(packed, "schunk", packed).meta)
        if meta != ["b2nd"]:
            raise ValueError(f"metadata {', '.join(meta) or 'of no array'}")
        if expected not in (None, (tuple(packed.shape), packed.dtype)):
            raise ValueError(f"{packed.dtype} {tuple(packed.shape)}")
        slices = slices or [slice(0, n) for n in packed.shape]
        start = [cut.start for cut in slices]
        stop = [cut.stop for cut in slices]
        out = aligned_empty([b - a for a, b in zip(start, stop)], packed.dtype)
        # What packed[slices] does, without a copy into `out`.
        return packed.get_slice_numpy(out, (start, stop))
    except RuntimeError as error:
        raise ValueError(f"no whole Blosc2 array ({error})") from None


@functools.lru_cache(256)
def npy_header(dtype: "np.dtype[Any]", shape: Tuple[int, ...]) -> bytes:
    """Return the header of a .npy file of a C-ordered array, a multiple of 64 bytes long."""
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    facts = {"descr": descr, "fortran_order": False, "shape": shape}
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, facts)
    return header.getvalue()


def voxels_sha256(array: Array) -> str:
    """Hash an array's dtype, shape and voxels; its file does not matter."""
    digest = hashlib.sha256(npy_header(array.dtype, array.shape))
    digest.update(np.ascontiguousarray(array).data.cast("B"))
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Hash a regular file's content, read in pieces. Raises as `open_regular`."""
    digest = hashlib.sha256()
    with os.fdopen(open_regular(path), "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def bring_in(handle: int, start: int, length: int) -> None:
    """Ask the kernel to read these bytes of an open file ahead; macOS ignores it."""
    stop = start + length
    with contextlib.suppress(AttributeError, OSError):  # a lasting failure is raised by the read
        for begin in range(start, stop, READ_AHEAD_BYTES):
            piece = min(READ_AHEAD_BYTES, stop - begin)
            os.posix_fadvise(handle, begin, piece, os.POSIX_FADV_WILLNEED)


def give_back(handle: int) -> None:
    """Let the kernel drop an open file's pages; those in a map stay."""
    with contextlib.suppress(AttributeError, OSError):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)

"""An array's file: .npy, which maps into memory as it is, or .b2nd (Blosc2), a tenth of the size.

A .npy file is for fast disks or data that stays in the page cache: nothing is unpacked, a part is a part of the file.
A .b2nd file is for slow disks and networks: less is read, and what is read has to be unpacked.
"""

import contextlib
import ctypes
import functools
import hashlib
import io
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, List, Optional, Sequence, Tuple, Union

import numpy as np

from cpu3d.errors import InputError
from memory_estimator.common.files import open_regular

if TYPE_CHECKING:
    from cpu3d.data.records import CaseRecord

FORMATS = ("npy", "b2nd")
"""What an array's file can be, and how its name ends."""

ALIGNMENT_BYTES = 64
"""TensorFlow takes an array without a copy when its data begins at a multiple of this."""

BLOCK_VOXELS, CHUNK_VOXELS = (32, 32, 16), (128, 128, 128)
"""Of a .b2nd file, what is unpacked at least, so that it stays in a core's L2 cache; and what is read at least. Both
hold all channels, as a patch needs them all."""

# --- Whole files ---


def aligned_empty(shape: Sequence[int], dtype) -> np.ndarray:
    """An uninitialised C-ordered array whose data TensorFlow can take without a copy; NumPy's own start anywhere."""
    dtype = np.dtype(dtype)
    size_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + size_bytes].view(dtype).reshape(shape)


def encode(array: np.ndarray, format_: str) -> List[Union[bytes, memoryview]]:
    """The file of a C-ordered array, in pieces to be written one after another."""
    if format_ == "npy":
        return [npy_header(array.dtype, array.shape), memoryview(array).cast("B")]
    import blosc2

    chunks = tuple(map(min, array.shape, (*CHUNK_VOXELS, *array.shape[3:])))
    blocks = tuple(map(min, chunks, (*BLOCK_VOXELS, *array.shape[3:])))
    # Of the codecs and filters tried on MRI and CT the fastest to unpack; ZSTD is a tenth smaller.
    codec = {"codec": blosc2.Codec.LZ4HC, "clevel": 5, "filters": [blosc2.Filter.SHUFFLE], "filters_meta": [0]}
    parameters = {**codec, "typesize": array.dtype.itemsize, "nthreads": 1}
    return [blosc2.asarray(array, chunks=chunks, blocks=blocks, cparams=parameters).to_cframe()]


def decode_b2nd(content: Union[bytes, memoryview]) -> np.ndarray:
    """The array in the bytes of a .b2nd file, aligned for TensorFlow. Raises ValueError where they are damaged."""
    import blosc2

    content = bytes(content)  # the packed array reads from it and does not keep it
    try:
        return _unpack(blosc2.ndarray_from_cframe(content))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"no whole Blosc2 array ({error})") from None


@functools.lru_cache(256)
def npy_header(dtype: np.dtype, shape: Tuple[int, ...]) -> bytes:
    """What comes before the voxels in a .npy file of a C-ordered array; its length is a multiple of 64 bytes."""
    header, descr = io.BytesIO(), np.lib.format.dtype_to_descr(np.dtype(dtype))
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": shape})
    return header.getvalue()


def voxels_sha256(array: np.ndarray) -> str:
    """SHA-256 of an array's dtype, shape and voxels: the same however it is stored."""
    digest = hashlib.sha256(npy_header(array.dtype, array.shape))
    digest.update(memoryview(np.ascontiguousarray(array)).cast("B"))
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a regular file's content, read in pieces. Raises as `open_regular`."""
    digest = hashlib.sha256()
    with os.fdopen(open_regular(path), "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


# --- Open files ---


def bring_in(handle: int, start: int, length: int) -> None:
    """Ask the kernel for a part of an open file. Returns at once, unless the disk's queue is full; macOS ignores it.

    In pieces: Linux reads no more of one request than the device's largest transfer, and forgets the rest.
    """
    with contextlib.suppress(AttributeError, OSError):  # what fails for good fails when it is read
        for begin in range(start, start + length, 1 << 20):
            os.posix_fadvise(handle, begin, min(1 << 20, start + length - begin), os.POSIX_FADV_WILLNEED)


def give_back(handle: int) -> None:
    """Let the kernel take an open file's pages; those that a map is using stay."""
    with contextlib.suppress(AttributeError, OSError):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


@functools.lru_cache(None)
def _libc() -> ctypes.CDLL:
    library, size, pointer = ctypes.CDLL(None, use_errno=True), ctypes.c_size_t, ctypes.c_void_p
    library.mmap.argtypes, library.mmap.restype = (pointer, size, *[ctypes.c_int] * 3, ctypes.c_long), pointer
    library.munmap.argtypes = (pointer, size)
    return library


class _Map:
    """A file's bytes as read-only uint8, which go with the last array over them. `handle` may be closed.

    Python's own `mmap` would keep a copy of the handle: 500 cases meet the usual limit of 1,024 open files.
    """

    def __init__(self, handle: int, size_bytes: int, library: ctypes.CDLL):
        # `munmap` is kept: when Python ends, a module's names may be gone.
        self._munmap, self._size_bytes, self._address = library.munmap, size_bytes, None
        address = library.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, handle, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._address = address
        self.__array_interface__ = {"version": 3, "shape": (size_bytes,), "typestr": "|u1", "data": (address, True)}

    def __del__(self):
        if self._address:
            self._munmap(self._address, self._size_bytes)


@dataclass(frozen=True)
class ArrayFile:
    """An open array file and what its case's record says of it. A damaged or shorter file is an InputError."""

    path: Path
    handle: int
    size_bytes: int
    header: bytes
    """Of a .npy file; none in a .b2nd file."""
    shape: Tuple[int, ...]
    dtype: np.dtype
    sha256: str

    def check_header(self) -> None:
        """Refuse a .npy file of another array: it would be read as nonsense, or past its end."""
        found = np.empty(min(len(self.header), self.size_bytes), np.uint8)
        self._fill(found, 0)
        size_bytes = len(self.header) + math.prod(self.shape) * self.dtype.itemsize
        if self.header and (found.tobytes(), self.size_bytes) != (self.header, size_bytes):
            raise self._damaged("another header")

    def map(self) -> np.ndarray:
        """The array of a .npy file as a read-only map, which goes with the last of its views."""
        mapped = np.asarray(_Map(self.handle, self.size_bytes, _libc()))
        return mapped[len(self.header) :].view(self.dtype).reshape(self.shape)

    def read(self) -> np.ndarray:
        """The array of a .npy file, aligned."""
        array = aligned_empty(self.shape, self.dtype)
        self._fill(array, len(self.header))
        return array

    def read_box(self, slices: Sequence[slice]) -> np.ndarray:
        """A box of a .npy file, aligned, a plane of X at a time.

        Not through a map: one made for a box costs a page fault for every few pages of it, more than to copy rows.
        """
        out = aligned_empty([one.stop - one.start for one in slices], self.dtype)
        rows = np.empty((out.shape[1], *self.shape[2:]), self.dtype)
        starts, length = self.ask_for(slices)
        for plane, start in zip(out, starts):
            self._fill(rows, start, length)
            plane[...] = rows[:, : out.shape[2]]
        return out

    def ask_for(self, slices: Sequence[slice]) -> Tuple[range, int]:
        """(first bytes, their length) of a box's planes in a .npy file, all of which the kernel begins to read.

        Reads that wait one after another take longer: of a 96^3 patch of a CT, 5 times as long.
        """
        (x, y, z), voxel_bytes = slices[:3], self.dtype.itemsize * math.prod(self.shape[3:])
        row = self.shape[2] * voxel_bytes
        plane, corner = self.shape[1] * row, len(self.header) + y.start * row + z.start * voxel_bytes
        length = (y.stop - y.start - 1) * row + (z.stop - z.start) * voxel_bytes
        starts = range(corner + x.start * plane, corner + x.stop * plane, plane)
        for start in starts:
            bring_in(self.handle, start, length)
        return starts, length

    def unpack(self, slices: Optional[Sequence[slice]] = None, *, check: bool) -> np.ndarray:
        """A .b2nd file's array, or a box of it, aligned; with `check` all of its bytes are compared with their hash.

        One flipped bit makes wrong voxels more often than an error, or ends the process.
        """
        import blosc2

        content = np.empty(self.size_bytes if check or slices is None else 0, np.uint8)
        self._fill(content, 0)
        if check and hashlib.sha256(content).hexdigest() != self.sha256:
            raise self._damaged("other bytes than were written")
        content, path = content.tobytes(), f"/dev/fd/{self.handle}"
        try:
            # The open file, and not whatever its path leads to by now. Not `blosc2.open`: from version 3 on that
            # follows what a file's metadata name, other files and addresses in the network.
            packed = blosc2.ndarray_from_cframe(content) if content else blosc2.blosc2_ext.open(path, "r", 0)
            return _unpack(packed, slices, (self.shape, self.dtype))
        except (RuntimeError, ValueError) as error:
            raise self._damaged(error) from None

    def _fill(self, array: np.ndarray, offset: int, length: Optional[int] = None) -> None:
        """Fill an array, or its first `length` bytes, from `offset` of the file on."""
        into, done = memoryview(array.reshape(-1).view(np.uint8))[:length], 0
        while done < len(into):  # one call reads 2 GiB at most, and a network may give less than was asked for
            count = os.preadv(self.handle, [into[done:]], offset + done)
            if count == 0:
                rule = f"store file {self.path} must be {self.size_bytes} bytes long, it ended at byte"
                raise InputError(f"{rule} {offset + done} while it was read; restore it, or `prepare` again")
            done += count

    def _damaged(self, got) -> InputError:
        kind = f"a {self.path.suffix} array of {self.dtype} {self.shape}"
        return InputError(f"store file {self.path} must be {kind}, got {got}; delete it and run `prepare` again")


def array_file(record: "CaseRecord", part: str, path: Path, handle: int) -> ArrayFile:
    """The open file of a case's image, `part` "x", or label, "y"."""
    shape, dtype, size_bytes, sha256 = record.stored.size, np.dtype("u1"), record.label_bytes, record.label_sha256
    if part == "x":
        shape, dtype = (*shape, record.channels), np.dtype(record.image_dtype).newbyteorder("<")
        size_bytes, sha256 = record.image_bytes, record.image_sha256
    header = npy_header(dtype, tuple(shape)) if record.format == "npy" else b""
    return ArrayFile(path, handle, size_bytes, header, tuple(shape), dtype, sha256)


def _unpack(packed, slices: Optional[Sequence[slice]] = None, expected: Optional[Tuple] = None) -> np.ndarray:
    """A Blosc2 array, or a box of it. ValueError unless it holds its own voxels, of the (shape, dtype) expected."""
    meta = sorted(getattr(packed, "schunk", packed).meta)
    if meta != ["b2nd"]:  # a proxy of another, an expression, a list of chunks
        raise ValueError(f"metadata {', '.join(meta) or 'of no array'}")
    if expected not in (None, (tuple(packed.shape), packed.dtype)):
        raise ValueError(f"{packed.dtype} {tuple(packed.shape)}")
    slices = slices or [slice(0, n) for n in packed.shape]
    start, stop = [part.start for part in slices], [part.stop for part in slices]
    out = aligned_empty([b - a for a, b in zip(start, stop)], packed.dtype)
    return packed.get_slice_numpy(out, (start, stop))  # what packed[slices] does, without a copy into `out`

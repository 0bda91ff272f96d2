"""An array's file: .npy, which maps into memory as it is, or .b2nd (Blosc2), a tenth of the size.

A .npy file is for fast disks or data that stays in the page cache: nothing is unpacked, a part is a part of the file.
A .b2nd file is for slow disks and networks: less is read, and what is read has to be unpacked.
"""

import contextlib
import functools
import hashlib
import io
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Iterator, List, Sequence, Tuple, Union

import numpy as np

from cpu3d.data.files import pages
from cpu3d.errors import InputError
from memory_estimator.files import open_regular

if TYPE_CHECKING:
    from cpu3d.data.records import CaseRecord

FORMATS = ("npy", "b2nd")
"""What an array's file can be, and how its name ends."""

ALIGNMENT_BYTES = 64
"""TensorFlow takes an array without a copy when its data begins at a multiple of this."""

BLOCK_VOXELS = (32, 32, 16)
"""Of a .b2nd block, what is unpacked at least: 128 KiB of four int16 channels, so it stays in a core's L2 cache."""
CHUNK_VOXELS = (128, 128, 128)
"""Of a .b2nd chunk, what is read at least. A chunk holds all channels: a patch needs them all, and takes three times as
long from chunks of one channel."""

GAP_BYTES = 16 * 1024
"""Two parts of a file that lie closer than this are read as one: a read of its own costs more than so many bytes."""

Bytes = Union[bytes, memoryview]

# --- Whole files ---


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

    chunks = tuple(map(min, array.shape, (*CHUNK_VOXELS, *array.shape[3:])))
    # Of the codecs and filters tried on MRI and CT the fastest to unpack; ZSTD is a tenth smaller.
    parameters = {
        "codec": blosc2.Codec.LZ4HC,
        "clevel": 5,
        "typesize": array.dtype.itemsize,
        "filters": [blosc2.Filter.SHUFFLE],
        "filters_meta": [0],
        "nthreads": 1,
    }
    blocks = tuple(map(min, chunks, (*BLOCK_VOXELS, *array.shape[3:])))
    return [blosc2.asarray(array, chunks=chunks, blocks=blocks, cparams=parameters).to_cframe()]


def decode_b2nd(content: Bytes) -> np.ndarray:
    """The array in the bytes of a .b2nd file, aligned for TensorFlow. Raises ValueError where they are damaged."""
    import blosc2

    content = bytes(content)  # the packed array reads from it and does not keep it
    try:
        packed = _plain(blosc2.ndarray_from_cframe(content))
        return _unpack(packed, [slice(0, n) for n in packed.shape])
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"no whole Blosc2 array ({error})") from None


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


def file_sha256(path: Path) -> str:
    """SHA-256 of a regular file's content, read in pieces. Raises as `open_regular`."""
    digest = hashlib.sha256()
    with os.fdopen(open_regular(path), "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


# --- Open files ---


@dataclass(frozen=True)
class ArrayFile:
    """An open array file and what its case's record says of it."""

    path: Path
    handle: int
    size_bytes: int
    offset: int
    """Where a .npy file's voxels begin; 0 in a .b2nd file."""
    shape: Tuple[int, ...]
    dtype: np.dtype
    sha256: str

    def check_header(self) -> None:
        """Raise InputError for a .npy file of another array: it would be read as nonsense, or past its end."""
        if not self.offset:
            return
        voxels_bytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        found = np.empty(min(self.offset, self.size_bytes), np.uint8)
        self._fill(_bytes(found), 0)
        if found.tobytes() != _header(self.dtype, self.shape) or self.size_bytes != self.offset + voxels_bytes:
            raise self._damaged("another header")

    def check_content(self) -> int:
        """Raise InputError for a file of other bytes than were written; returns how many were read for it, all.

        For .b2nd files: one flipped bit makes wrong voxels more often than an error, or ends the process.
        """
        digest, piece = hashlib.sha256(), np.empty(min(self.size_bytes, 1 << 20), np.uint8)
        for start in range(0, self.size_bytes, len(piece)):
            part = piece[: self.size_bytes - start]
            self._fill(_bytes(part), start)
            digest.update(part)
        if digest.hexdigest() != self.sha256:
            raise self._damaged("other bytes than were written")
        return self.size_bytes

    def content(self, *, populate: bool = False) -> np.ndarray:
        """The file's bytes as a map, read from front to back at once if `populate`."""
        with self._named():
            return pages.map_file(self.handle, self.size_bytes, populate=populate)

    def view(self, content: np.ndarray) -> np.ndarray:
        """The array in a .npy file's `content`."""
        return content[self.offset :].view(self.dtype).reshape(self.shape)

    def ask_for(self, slices: Sequence[slice]) -> None:
        """Have the kernel begin to read what is missing of a box of a .npy file, all of it at once. Raises OSError.

        Reads that wait one after another take longer: of a 96^3 patch of a CT, 5 times as long.
        """
        starts, length = self._runs(slices)
        for start in starts:
            pages.bring_in(self.handle, start, length)

    def read(self) -> np.ndarray:
        """The whole array of a .npy file, aligned."""
        array = aligned_empty(self.shape, self.dtype)
        self._fill(_bytes(array), self.offset)
        return array

    def read_box(self, slices: Sequence[slice]) -> Tuple[np.ndarray, int]:
        """(box, bytes read) of a .npy file: a plane of X at a time, or a row where rows lie `GAP_BYTES` apart.

        Not through a map: one made for a box costs a page fault for every few pages of it, more than to copy the gaps.
        """
        out = aligned_empty([one.stop - one.start for one in slices], self.dtype)
        starts, length = self._runs(slices)
        fill, parts = self._filler(slices), out
        if len(starts) > len(out):
            parts = out.reshape(-1, *out.shape[2:])
        elif out.shape[2] < self.shape[2]:
            buffer = np.empty((out.shape[1], *self.shape[2:]), self.dtype)
            span = _bytes(buffer)[:length]
            for plane, start in zip(out, starts):
                fill(span, start)
                plane[...] = buffer[:, : out.shape[2]]
            return out, len(starts) * length
        return out, sum(fill(_bytes(part), start) for part, start in zip(parts, starts))

    def unpack(self, *, check: bool) -> np.ndarray:
        """The whole array of a .b2nd file, aligned, its bytes compared with those written if `check`."""
        content = np.empty(self.size_bytes, np.uint8)
        self._fill(_bytes(content), 0)
        if check and hashlib.sha256(content).hexdigest() != self.sha256:
            raise self._damaged("other bytes than were written")
        try:
            return self._as_recorded(decode_b2nd(memoryview(content)))
        except ValueError as error:
            raise self._damaged(error) from None

    def unpack_box(self, slices: Sequence[slice]) -> Tuple[np.ndarray, int]:
        """(box, bytes of the chunks that it lies in) of a .b2nd file."""
        import blosc2

        try:
            # The open file, and not whatever the path leads to by now. Not `blosc2.open`: from version 3 on that
            # follows what a file's metadata name, other files and addresses in the network.
            packed = self._as_recorded(_plain(blosc2.blosc2_ext.open(f"/dev/fd/{self.handle}", "r", 0)))
            return _unpack(packed, slices), _chunk_bytes(packed, slices)
        except (RuntimeError, ValueError) as error:
            raise self._damaged(error) from None

    # --- Private helpers ---

    def _runs(self, slices: Sequence[slice]) -> Tuple[List[int], int]:
        """(first bytes, their length) of the parts of a .npy file that hold a box: its planes, or the rows of these."""
        (x, y, z), voxel_bytes = slices[:3], self.dtype.itemsize * math.prod(self.shape[3:])
        row, part = self.shape[2] * voxel_bytes, (z.stop - z.start) * voxel_bytes
        apart = row - part >= GAP_BYTES
        rows = range(y.start, y.stop if apart else y.start + 1)
        corner = self.offset + z.start * voxel_bytes
        starts = [corner + (i * self.shape[1] + j) * row for i in range(x.start, x.stop) for j in rows]
        return starts, part if apart else (y.stop - y.start - 1) * row + part

    def _filler(self, slices: Sequence[slice]) -> Callable[[memoryview, int], int]:
        """A function that does as `_fill`, and at the first byte that is not in memory asks for the whole box.

        To find out costs nothing where all is there; looking at a box's pages takes as long as copying them.
        """
        flags = getattr(os, "RWF_NOWAIT", 0)  # Linux: what is in memory, or an error; no waiting for a disk
        asked = False

        def fill(into: memoryview, place: int) -> int:
            nonlocal asked
            if not asked:
                with contextlib.suppress(OSError):
                    if flags and os.preadv(self.handle, [into], place, flags) == len(into):
                        return len(into)
                asked = True
                with contextlib.suppress(OSError):  # advice; what fails for good fails below
                    self.ask_for(slices)
            return self._fill(into, place)

        return fill

    def _fill(self, into: memoryview, offset: int) -> int:
        """Fill memory from `offset` of the file on; returns its length in bytes."""
        done = 0
        with self._named():
            while done < len(into):  # one call reads 2 GiB at most, and a network may give less than was asked for
                count = os.preadv(self.handle, [into[done:]], offset + done)
                if count == 0:
                    rule = f"store file {self.path} must be {self.size_bytes} bytes long, it ended at byte"
                    raise InputError(f"{rule} {offset + done} while it was read; restore it, or `prepare` again")
                done += count
        return done

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Put the file's name into an error of the system that knows only its handle."""
        try:
            yield
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise

    def _as_recorded(self, array):
        if tuple(array.shape) != self.shape or array.dtype != self.dtype:
            raise self._damaged(f"{array.dtype} {tuple(array.shape)}")
        return array

    def _damaged(self, got) -> InputError:
        kind = f"a {self.path.suffix} array of {self.dtype} {self.shape}"
        return InputError(f"store file {self.path} must be {kind}, got {got}; delete it and run `prepare` again")


def array_file(record: "CaseRecord", part: str, path: Path, handle: int) -> ArrayFile:
    """The open file of a case's image, `part` "x", or label, "y"."""
    shape, dtype = tuple(record.stored.size), np.dtype("u1")
    size_bytes, sha256 = record.label_bytes, record.label_sha256
    if part == "x":
        shape, dtype = (*shape, record.channels), np.dtype(record.image_dtype).newbyteorder("<")
        size_bytes, sha256 = record.image_bytes, record.image_sha256
    offset = len(_header(dtype, shape)) if record.format == "npy" else 0
    return ArrayFile(path, handle, size_bytes, offset, shape, dtype, sha256)


# --- Private helpers ---


def _bytes(array: np.ndarray) -> memoryview:
    """The memory of a C-ordered array."""
    return memoryview(array.reshape(-1).view(np.uint8))


@functools.lru_cache(256)
def _header(dtype: np.dtype, shape: Tuple[int, ...]) -> bytes:
    return npy_header(dtype, shape)


def _unpack(packed, slices: Sequence[slice]) -> np.ndarray:
    """A box of a `blosc2.NDArray` as an aligned array. Raises RuntimeError where its bytes are damaged."""
    start, stop = [part.start for part in slices], [part.stop for part in slices]
    out = aligned_empty([b - a for a, b in zip(start, stop)], packed.dtype)
    return packed.get_slice_numpy(out, (start, stop))  # what packed[slices] does, without a copy into `out`


def _plain(packed):
    """Refuse what is no array of its own: a proxy of another, an expression, a list of chunks."""
    meta = sorted(getattr(packed, "schunk", packed).meta)
    if meta != ["b2nd"]:
        raise ValueError(f"metadata {', '.join(meta) or 'of no array'}")
    return packed


def _chunk_bytes(packed, slices: Sequence[slice]) -> int:
    """Packed size of the chunks that hold a box, as if all were equally large."""
    spans = [(one.stop - 1) // n - one.start // n + 1 for one, n in zip(slices, packed.chunks)]
    chunks = [-(-n // chunk) for n, chunk in zip(packed.shape, packed.chunks)]
    return packed.schunk.cbytes * math.prod(spans) // math.prod(chunks)
